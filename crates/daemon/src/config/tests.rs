use super::*;

fn load(text: &str, more: &[(&str, &str)]) -> Result<Config, Failure> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("config.toml");
    std::fs::write(&path, text).expect("a file");
    std::fs::create_dir(folder.path().join("config.d")).expect("a folder");
    for (name, text) in more {
        std::fs::write(folder.path().join("config.d").join(name), text).expect("a file");
    }
    Config::load(&CommandLine { config: Some(path), ..CommandLine::default() })
}

/// The refusal of `text`, without the folder's name.
fn refused(text: &str) -> (Kind, String) {
    let failure = load(text, &[]).expect_err(text);
    let sentence = failure.to_string();
    (failure.kind, sentence.rsplit("/config.toml").next().expect("one part at least").to_owned())
}

const WHOLE: &str = r#"
version = 1
[daemon]
control = "/run/x/control.sock"
memory = "512M"
stop_timeout = "5s"
[nbd]
listen = ["/run/x/nbd.sock", "127.0.0.1:10809"]
[cache.nvme]
device = "/dev/disk/by-id/nvme"
[defaults]
cache = "nvme"
export = "nbd"
cache_mode = "writethrough"
[volume.media]
backing = "UUID=1f5a0c22-2a53-4ae5-9a6f-9f6f5d6b2f10"
wait = "1m"
[volume.scratch]
backing = "/dev/mapper/scratch"
cache_mode = "writeback"
shared = true
"#;

#[test]
fn a_whole_file_is_understood() {
    let config = load(WHOLE, &[]).expect("a good file");
    assert_eq!(config.control, Path::new("/run/x/control.sock"));
    assert_eq!(config.memory_bytes, 512 << 20);
    assert_eq!(config.stop_timeout, Duration::from_secs(5));
    let tcp = "127.0.0.1:10809".parse().expect("an address");
    assert_eq!(config.listen, [Listen::Unix("/run/x/nbd.sock".into()), Listen::Tcp(tcp)]);
    assert_eq!(config.caches[0].name.as_deref(), Some("nvme"));
    let [media, scratch] = config.volumes.as_slice() else { panic!("{:?}", config.volumes) };
    assert_eq!(media.cache.as_deref(), Some("nvme"), "from the defaults");
    assert_eq!(media.cache_mode, Some(CacheMode::Writethrough));
    assert_eq!((media.wait, media.shared), (Duration::from_secs(60), false));
    assert_eq!(scratch.cache_mode, Some(CacheMode::Writeback), "its own word counts more");
    assert_eq!((scratch.wait, scratch.shared), (WAIT_DEFAULT, true));
}

#[test]
fn later_files_override_key_by_key() {
    let config = load(
        WHOLE,
        &[
            ("10-mode.toml", "version = 1\n[volume.media]\ncache_mode = \"none\"\n"),
            ("20-mode.toml", "version = 1\n[volume.media]\ncache_mode = \"writearound\"\n"),
            ("30-more.toml", "version = 1\n[volume.more]\nbacking = \"/srv/more\"\n"),
            ("99-not.conf", "not toml"),
        ],
    );
    let config = config.expect("good files");
    let media = config.volumes.iter().find(|volume| volume.name.as_deref() == Some("media"));
    let media = media.expect("still there");
    assert_eq!(media.cache_mode, Some(CacheMode::Writearound));
    assert_eq!(media.backing, "UUID=1f5a0c22-2a53-4ae5-9a6f-9f6f5d6b2f10");
    assert_eq!(config.volumes.len(), 3);
}

#[test]
fn errors_name_file_and_line() {
    let cache = "version = 1\n[cache.a]\ndevice = \"/x\"\n";
    for (text, sentence) in [
        ("version = 2\n[cache.a]\ndevice = \"/x\"\n", ":1: version 2 is unknown"),
        ("[cache.a]\ndevice = \"/x\"\n", ":1: missing field `version`"),
        (&format!("{cache}devise = \"/y\"\n"), ":4: unknown field `devise`"),
        (&format!("{cache}device = \"/y\"\n"), ":4: duplicate key"),
        (
            &format!("{cache}[volume.v]\nbacking = \"/b\"\ncache_mode = \"fast\"\n"),
            ":6: unknown variant `fast`",
        ),
        (&format!("{cache}[daemon]\nmemory = \"1MB\"\n"), ":5: `1MB` is not a size"),
        (&format!("{cache}[daemon]\nstop_timeout = \"5 s\"\n"), ":5: `5 s` is not a time"),
        (&format!("{cache}[volume.v]\ncache = \"b\"\nbacking = \"/b\"\n"), ":5: there is no cache `b`"),
        (&format!("{cache}[volume.v]\nwait = \"1s\"\n"), ":4: [volume.v] has no `backing`"),
        (&format!("{cache}[volume.\"a/b\"]\nbacking = \"/b\"\n"), ":4: \"a/b\" cannot be a name"),
        (&format!("{cache}[nbd]\nlisten = [\"0.0.0.0:10809\"]\n"), ":5: 0.0.0.0:10809 is not a loopback"),
        (&format!("{cache}[volume.v\n"), ":4: "),
    ] {
        let (kind, found) = refused(text);
        assert_eq!(kind, Kind::Config, "{text}: {found}");
        assert!(found.starts_with(sentence), "{text}: {found}");
    }
}

#[test]
fn what_is_to_come_is_named_as_such() {
    let text = "version = 1\n[daemon]\nmetrics = \"127.0.0.1:9763\"\n";
    let (kind, sentence) = refused(text);
    assert_eq!(kind, Kind::NotInThisVersion);
    assert!(sentence.starts_with(":3: `metrics` is not in this version; leave it out"), "{sentence}");
    let (_, sentence) = refused("version = 1\n[cache.a]\ndevice = \"/x\"\n[defaults]\nexport = \"dev\"\n");
    assert!(sentence.starts_with(":5: `dev` is not in this version"), "{sentence}");
}

#[test]
fn nothing_is_configured_twice_or_without_a_cache() {
    assert!(refused("version = 1\n").1.contains("no cache is configured"));
    let twice = "version = 1\n[cache.a]\ndevice = \"/x\"\n[volume.v]\nbacking = \"/b\"\n[volume.w]\nbacking = \"/b\"\n";
    assert!(refused(twice).1.contains("/b is configured twice: as v and as w"));
    let line = CommandLine {
        caches: vec!["/c".into()],
        backings: vec!["/b".into(), "/b".into()],
        ..CommandLine::default()
    };
    let told = Config::load(&line).unwrap_err().to_string();
    assert_eq!(told, "/b is named twice; name each backing device once");
    let small = "version = 1\n[cache.a]\ndevice = \"/x\"\n[daemon]\nmemory = \"64M\"\n";
    assert!(refused(small).1.contains("`memory` is too small"));
}

#[test]
fn the_command_line_stands_for_itself() {
    let line = CommandLine {
        caches: vec!["/c".into()],
        backings: vec!["/b".into()],
        exports: vec!["nbd".into(), "nbd:127.0.0.1:0".into()],
        control: Some("/tmp/x/control.sock".into()),
        ..CommandLine::default()
    };
    let config = Config::load(&line).expect("a good line");
    assert_eq!(config.listen[0], Listen::Unix("/tmp/x/nbd.sock".into()));
    assert_eq!((config.caches.len(), config.volumes.len()), (1, 1));
    let both = CommandLine { config: Some("/etc/x".into()), ..line.clone() };
    assert_eq!(Config::load(&both).expect_err("both").kind, Kind::Usage);
    for (way, kind) in
        [("ublk", Kind::NotInThisVersion), ("nfs", Kind::Usage), ("nbd:8.8.8.8:1", Kind::Usage)]
    {
        let line = CommandLine { exports: vec![way.into()], ..line.clone() };
        assert_eq!(Config::load(&line).expect_err(way).kind, kind, "{way}");
    }
}

/// The guide's example is "every key that exists": it must be understood as it says, and no key may be missing in it.
#[test]
fn the_guide_shows_every_key() {
    const GUIDE: &str = include_str!("../../../../docs/guide.md");
    let (_, from) = GUIDE.split_once("```toml\n").expect("the guide has an example");
    let (example, after) = from.split_once("```").expect("the example ends");
    assert!(!after.contains("```toml"), "one example, so that nobody keeps another true");
    let config = load(example, &[]).expect("the guide's example");
    assert_eq!(config.control, Path::new(CONTROL_DEFAULT));
    assert_eq!((config.memory_bytes, config.stop_timeout), (MEMORY_DEFAULT, STOP_TIMEOUT_DEFAULT));
    let tcp = Listen::Tcp("127.0.0.1:10809".parse().expect("an address"));
    assert_eq!(config.listen, [Listen::Unix("/run/bcached/nbd.sock".into()), tcp]);
    let [media, scratch] = config.volumes.as_slice() else { panic!("{:?}", config.volumes) };
    assert_eq!((media.name.as_deref(), media.cache.as_deref()), (Some("media"), Some("nvme")));
    assert_eq!((media.cache_mode, media.wait), (Some(CacheMode::Writethrough), WAIT_DEFAULT));
    assert_eq!(scratch.cache_mode, Some(CacheMode::Writeback));
    assert_eq!((scratch.read_only, scratch.shared), (false, false), "the defaults");

    for section in ["[daemon]", "[nbd]", "[cache.a]", "[volume.v]"] {
        for key in known_keys(section) {
            let is_shown = example.lines().any(|line| line.starts_with(&format!("{key} =")));
            assert!(is_shown, "{section} knows `{key}`, and the guide does not show it");
        }
    }
}

/// The keys that a section can hold, as the parser's own refusal lists them.
fn known_keys(section: &str) -> Vec<String> {
    let (_, sentence) = refused(&format!("version = 1\n{section}\nno_such_key = 1\n"));
    let (_, listed) = sentence.split_once("expected ").expect("the refusal lists what it knows");
    listed.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}
