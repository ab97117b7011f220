mod volume_numbers;

use super::*;
use crate::options::Scope;
use crate::options::value::Value;

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

/// Returns the value of an option in the files, with its file and line.
fn said(volume: &Volume, option: &str) -> String {
    let setting = &volume.options[option];
    let file = setting.origin.file().file_name().expect("a file").to_string_lossy();
    format!("{} {file}:{}", setting.value, setting.origin.line())
}

/// Returns the failure for `text`, without the folder's name.
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
    assert_eq!(
        config.places.listen,
        [Address::Unix("/run/x/nbd.sock".into()), Address::Tcp(tcp)].map(Listener::from)
    );
    assert_eq!(config.caches[0].name.as_deref(), Some("nvme"));
    let [media, scratch] = config.volumes.as_slice() else { panic!("{:?}", config.volumes) };
    assert_eq!(media.cache.as_deref(), Some("nvme"), "from the defaults");
    assert_eq!(said(media, "cache_mode"), "writethrough config.toml:14");
    assert_eq!((media.wait, media.shared), (Duration::from_secs(60), false));
    assert_eq!(said(scratch, "cache_mode"), "writeback config.toml:20", "its own word counts more");
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
    assert_eq!(said(media, "cache_mode"), "writearound 20-mode.toml:3");
    assert_eq!(media.backing, "UUID=1f5a0c22-2a53-4ae5-9a6f-9f6f5d6b2f10");
    assert_eq!(config.volumes.len(), 3);
}

/// Sections keep the order in which they appear, whatever their names.
#[test]
fn sections_have_the_places_at_which_they_stand() {
    let text = "version = 1\nvolume.zzz.backing = \"/dev/z\"\n[cache.y]\ndevice = \"/dev/y\"\n[cache.b]\ndevice = \"/dev/b\"\n\
                [defaults]\ncache = \"b\"\n[volume.out]\nbacking = \"/dev/o\"\nserved = false\n[volume.mmm]\nbacking = \"/dev/m\"\n";
    let more = "version = 1\n[volume.ccc]\nbacking = \"/dev/c\"\n[volume.aaa]\nbacking = \"/dev/a\"\n[volume.zzz]\nwait = \"2s\"\n";
    let config = load(text, &[("10-more.toml", more)]).expect("good files");
    let places: Vec<_> =
        config.volumes.iter().filter_map(|volume| Some((volume.name.as_deref()?, volume.number))).collect();
    assert_eq!(places, [("zzz", 0), ("mmm", 2), ("ccc", 3), ("aaa", 4)]);
    assert_eq!(config.places_of_volumes, 5);
    let caches: Vec<_> = config.caches.iter().filter_map(|cache| cache.name.as_deref()).collect();
    assert_eq!(caches, ["y", "b"]);
}

#[test]
fn errors_name_file_and_line() {
    let cache = "version = 1\n[cache.a]\ndevice = \"/x\"\n";
    for (text, sentence) in [
        ("version = 2\n[cache.a]\ndevice = \"/x\"\n", ":1: version 2 is unknown"),
        ("[cache.a]\ndevice = \"/x\"\n", ":1: missing field `version`"),
        (&format!("{cache}devise = \"/y\"\n"), ":4: unknown key `devise`; perhaps device is meant"),
        (&format!("{cache}device = \"/y\"\n"), ":4: `device` is set twice; remove one of them"),
        (
            &format!("{cache}[volume.v]\nbacking = \"/b\"\ncache_mode = \"fast\"\n"),
            ":6: cannot set `cache_mode`: `fast` is not one of writethrough, writeback, writearound, none",
        ),
        (&format!("{cache}[daemon]\nmemory = \"1MB\"\n"), ":5: `1MB` is not a size"),
        (&format!("{cache}[daemon]\nstop_timeout = \"5 s\"\n"), ":5: `5 s` is not a time"),
        (&format!("{cache}[volume.v]\ncache = \"b\"\nbacking = \"/b\"\n"), ":5: there is no cache `b`"),
        (&format!("{cache}[volume.v]\nwait = \"1s\"\n"), ":4: [volume.v] has no `backing`"),
        (&format!("{cache}[volume.\"a/b\"]\nbacking = \"/b\"\n"), ":4: \"a/b\" is not a valid name"),
        (&format!("{cache}[nbd]\nlisten = [\"0.0.0.0:10809\"]\n"), ":5: 0.0.0.0:10809 is not a loopback"),
        (
            &format!("{cache}[daemon]\nmetrics = \"0.0.0.0:9763\"\n"),
            ":5: 0.0.0.0:9763 is not a loopback address, and every client that reaches it could read",
        ),
        (&format!("{cache}[daemon]\nmetrics = \"9763\"\n"), ":5: `9763` is not ADDRESS:PORT"),
        (&format!("{cache}[volume.v\n"), ":4: "),
        ("version = 1\n[cache.a]\ndevice = \"UUID=xyz\"\n", ":3: `UUID=xyz` is not the UUID of a device"),
        (
            &format!("{cache}[volume.v]\nbacking = \"UUID=1f5a\"\n"),
            ":5: `UUID=1f5a` is not the UUID of a device",
        ),
        (&format!("{cache}[fuse]\ndirectory = \"rel\"\n"), ":5: `rel` must be an absolute path, as /rel"),
        (
            &format!("{cache}[nbd]\nlisten = [\"rel\"]\n"),
            ":5: `rel` is neither the absolute path of a socket",
        ),
        (&format!("{cache}[nbd]\nlisten = [\"run/rel\"]\n"), ":5: `run/rel` must be an absolute path"),
        (&format!("{cache}[daemon]\nmemory = \"1M\"\n"), ":5: `memory` is too small"),
        (&format!("{cache}[volum.v]\n"), ":4: unknown key `volum`; perhaps volume is meant"),
        (&format!("{cache}[volume.v]\nxy = 1\n"), ":5: unknown key `xy`; see *Serve* in docs/guide.md"),
        (&format!("{cache}[fuse]\nxy = 1\n"), ":5: unknown key `xy`; write one of directory, allow_other"),
    ] {
        let (kind, found) = refused(text);
        assert_eq!(kind, Kind::Config, "{text}: {found}");
        assert!(found.starts_with(sentence), "{text}: {found}");
    }
}

#[test]
fn what_is_to_come_is_named_as_such() {
    let text = "version = 1\n[defaults]\nrecovery_timeout = \"5m\"\n";
    let (kind, sentence) = refused(text);
    assert_eq!(kind, Kind::NotInThisVersion);
    assert!(sentence.starts_with(":3: `recovery_timeout` is not in this version; remove it"), "{sentence}");
    let (_, sentence) = refused("version = 1\n[defaults]\ndiscard_passdown = true\n");
    assert!(sentence.contains("in this version, discards are passed down to the backing"), "{sentence}");
}

#[test]
fn a_place_of_nbd_may_be_to_look_only() {
    let listen =
        |listen: &str| format!("version = 1\n[cache.a]\ndevice = \"/x\"\n[nbd]\nlisten = [{listen}]\n");
    let config = load(
        &listen("\"/run/a.sock\", { at = \"127.0.0.1:1\", read_only = true }, { at = \"/run/b.sock\" }"),
        &[],
    );
    let places: Vec<_> = config.expect("a good file").places.listen.iter().map(ToString::to_string).collect();
    assert_eq!(places, ["/run/a.sock", "127.0.0.1:1 (read-only)", "/run/b.sock"]);
    for (typed, sentence) in [
        ("{ read_only = true }", ":5: missing field `at`"),
        (
            "{ at = \"/run/b.sock\", readonly = true }",
            ":5: unknown key `readonly`; perhaps read_only is meant",
        ),
        ("{ at = \"here\" }", ":5: `here` is neither the absolute path of a socket nor ADDRESS:PORT"),
        ("7", ":5: invalid type: integer `7`, expected an address to listen on, such as"),
        (
            "\"/run/a.sock\", { at = \"/run/a.sock\", read_only = true }",
            ":5: /run/a.sock is configured twice",
        ),
        ("{ at = \"192.0.2.1:10809\", read_only = true }", ":5: 192.0.2.1:10809 is not a loopback address"),
    ] {
        let (kind, found) = refused(&listen(typed));
        assert_eq!((kind, found.starts_with(sentence)), (Kind::Config, true), "{typed}: {found}");
    }
}

#[test]
fn what_comes_by_tcp_is_protected_as_is_said() {
    let text = |lines: &str| {
        format!("version = 1\n[cache.a]\ndevice = \"/x\"\n[nbd]\nlisten = [\"0.0.0.0:10809\"]\n{lines}")
    };
    let tls = |lines: &str| load(&text(lines), &[]).map(|config| config.places.tls);
    let with = |verify_peer| Tls::On(Certificates { directory: "/etc/x".into(), verify_peer });
    assert_eq!(tls("tls = \"off\"\n"), Ok(Tls::Off));
    assert_eq!(tls("tls = \"/etc/x\"\n"), Ok(with(true)), "nobody is let in by default");
    assert_eq!(tls("tls = \"/etc/x\"\ntls_verify_peer = false\n"), Ok(with(false)));
    // Any file can set it.
    let more = [("more.toml", "version = 1\n[nbd]\ntls = \"/etc/x\"\n")];
    assert_eq!(load(&text(""), &more).map(|config| config.places.tls), Ok(with(true)));
    for (lines, sentence) in [
        (
            "",
            ":5: 0.0.0.0:10809 is not a loopback address, and NBD without TLS is open to every client; write",
        ),
        ("tls = \"on\"\n", ":6: `on` is neither \"off\" nor the absolute path of a directory with"),
        ("tls = true\n", ":6: invalid type: boolean `true`, expected a string"),
        ("tls = \"off\"\ntls_verify_peer = true\n", ":7: `tls_verify_peer` has no effect without TLS"),
    ] {
        let (kind, found) = refused(&text(lines));
        assert_eq!((kind, found.starts_with(sentence)), (Kind::Config, true), "{lines}: {found}");
    }
}

#[test]
fn sockets_are_of_the_group_that_is_said() {
    let text = |nbd: &str| format!("version = 1\n[cache.a]\ndevice = \"/x\"\n[nbd]\n{nbd}\n");
    let places = |nbd: &str| load(&text(nbd), &[]).expect("a good file").places;
    let id = |group: Option<&Group>| group.map(|group| group.id);
    assert_eq!(id(places("").nbd_group.as_ref()), None);
    assert_eq!(id(places("group = \"root\"").nbd_group.as_ref()), Some(0), "by name");
    let each = places(
        "group = \"12345\"\nlisten = [\"/run/a\", { at = \"/run/b\", read_only = true, group = \"54321\" }]",
    );
    assert_eq!(id(each.nbd_group.as_ref()), Some(12_345), "by number");
    assert_eq!(each.listen.iter().map(|at| id(at.group.as_ref())).collect::<Vec<_>>(), [None, Some(54_321)]);
    assert_eq!(each.listen[1].to_string(), "/run/b (read-only) (group 54321)");
    let more = [("more.toml", "version = 1\n[nbd]\ngroup = \"7\"\n[vhost-user]\ngroup = \"8\"\n")];
    let over = load(&text("group = \"6\""), &more).expect("good files").places;
    assert_eq!((id(over.nbd_group.as_ref()), id(over.vhost_user_group.as_ref())), (Some(7), Some(8)));
    for (nbd, sentence) in [
        (
            "group = \"no such\"",
            ":5: `no such` is not a group of this machine: write a name that `getent group` lists",
        ),
        ("group = \"4294967295\"", ":5: `4294967295` is not a group of this machine"),
        ("group = 5", ":5: invalid type: integer `5`, expected a string"),
        (
            "listen = [{ at = \"127.0.0.1:1\", group = \"0\" }]",
            ":5: `group` is for unix sockets only: every client that reaches 127.0.0.1:1",
        ),
    ] {
        let (kind, found) = refused(&text(nbd));
        assert_eq!((kind, found.starts_with(sentence)), (Kind::Config, true), "{nbd}: {found}");
    }
}

#[test]
fn nothing_is_configured_twice_or_without_a_cache() {
    assert!(
        refused("version = 1\n[volume.v]\nbacking = \"/dev/disk\"\n").1.contains("no cache is configured")
    );
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
    assert_eq!(config.places.listen[0].at, Address::Unix("/tmp/x/nbd.sock".into()));
    assert_eq!((config.caches.len(), config.volumes.len()), (1, 1));
    let both = CommandLine { config: Some("/etc/x".into()), ..line.clone() };
    assert_eq!(Config::load(&both).expect_err("both").kind, Kind::Usage);
    for (way, kind) in [
        ("dev:/mnt", Kind::Usage),
        ("nfs", Kind::Usage),
        ("nbd:8.8.8.8:1", Kind::Usage),
        ("fuse:", Kind::Usage),
        ("ublk:3", Kind::Usage),
    ] {
        let line = CommandLine { exports: vec![way.into()], ..line.clone() };
        assert_eq!(Config::load(&line).expect_err(way).kind, kind, "{way}");
    }
}

#[test]
fn a_volume_is_to_be_had_by_the_ways_that_are_said() {
    let text = "version = 1\n[daemon]\nmemory = \"512M\"\ncontrol = \"/run/x/control.sock\"\n[vhost-user]\ndirectory = \"/run/vm\"\n\
                [fuse]\nallow_other = true\n[cache.a]\ndevice = \"/x\"\n[defaults]\nexport = \"vhost-user\"\n[volume.v]\nbacking = \"/b\"\n\
                [volume.w]\nbacking = \"/c\"\nexport = [\"fuse\", \"nbd\"]\n";
    let config = load(text, &[]).expect("a good file");
    let ways: Vec<_> = config.volumes.iter().map(|volume| volume.ways.to_string()).collect();
    assert_eq!(ways, ["vhost-user", "nbd, fuse"]);
    let dev =
        load(&text.replace("\"vhost-user\"\n[volume.v]", "\"dev\"\n[volume.v]"), &[]).expect("a good file");
    assert_eq!((dev.ways, &*dev.places.dev), (Frontend::Dev.into(), Path::new("/run/x/dev")));
    assert_eq!(config.ways, Frontend::VhostUser.into());
    let places = &config.places;
    assert_eq!((&*places.vhost_user, &*places.fuse), (Path::new("/run/vm"), Path::new("/run/x/fuse")));
    assert!(places.fuse_allow_other);
    assert_eq!(
        config.memory_of_nodes(config.volumes.iter().map(|volume| volume.ways)),
        (256 - 32) << 20,
        "what its disk takes is not for nodes"
    );

    let unsaid = (1..6).fold(text.replace("memory = \"512M\"\n", ""), |text, n| {
        format!("{text}[volume.v{n}]\nbacking = \"/v{n}\"\n")
    });
    let config = load(&unsaid, &[]).expect("as much as is needed");
    assert_eq!(
        (config.memory_bytes, config.memory_of_nodes(config.volumes.iter().map(|volume| volume.ways))),
        (512 << 20, 64 << 20)
    );
    let (_, small) = refused(&text.replace("512M", "180M"));
    assert!(small.contains("`memory` is too small: it must be at least 128M, plus 16M for each volume"));
    let (_, none) = refused("version = 1\n[defaults]\nexport = []\n");
    assert!(none.contains("`export` is empty"), "{none}");
    let line = CommandLine {
        caches: vec!["/c".into()],
        backings: vec!["/b".into()],
        exports: vec!["vhost-user:/run/vm".into(), "fuse:/mnt/x".into()],
        control: Some("/tmp/x/control.sock".into()),
        ..CommandLine::default()
    };
    let config = Config::load(&line).expect("a good line");
    assert_eq!(config.volumes[0].ways.to_string(), "vhost-user, fuse");
    assert_eq!((config.places.listen.len(), config.places.fuse), (0, "/mnt/x".into()));
}

const CACHE: &str = "version = 1\n[cache.a]\ndevice = \"/x\"\n";

#[test]
fn every_option_is_a_key() {
    let text = format!(
        "{CACHE}[defaults]\nwriteback_percent = 20\nsequential_cutoff = 1048576\n\
         [volume.v]\nbacking = \"/b\"\nsequential_cutoff = \"64k\"\nwriteback_running = false\n\
         writeback_delay = 60\nquiet_hours = \"23:00-07:00\"\n[volume.w]\nbacking = \"/c\"\n"
    );
    let config = load(&text, &[]).expect("a good file");
    let [v, w] = config.volumes.as_slice() else { panic!("{:?}", config.volumes) };
    assert_eq!(said(v, "writeback_percent"), "20 config.toml:5");
    assert_eq!(said(v, "sequential_cutoff"), "64k config.toml:9");
    assert_eq!(said(w, "sequential_cutoff"), "1M config.toml:6");
    assert_eq!(v.options["writeback_running"].value, Value::Flag(false));
    assert_eq!(
        (said(v, "writeback_delay"), said(v, "quiet_hours")),
        ("1m config.toml:11".to_owned(), "23:00-07:00 config.toml:12".to_owned(),)
    );
    assert_eq!(w.options.len(), 2, "the defaults and nothing else");
    let keys = known_keys("[volume.v]");
    let missing = |option: &&crate::options::OptionDefinition| !keys.contains(&option.name.to_owned());
    let missing: Vec<_> = crate::options::OPTIONS.iter().filter(missing).map(|option| option.name).collect();
    assert_eq!(missing, ["label", "writeback_rate"], "which the device keeps, and which holds for a moment");
    let all = crate::options::cache_options::OPTIONS.iter().map(|option| option.name.to_owned());
    let own = ["device", "former", "moving", "imported", "served"].map(str::to_owned);
    assert_eq!(known_keys("[cache.a]"), [own.to_vec(), all.collect()].concat());
}

/// A wrong value is refused, because no user would see an adjustment made in a file.
#[test]
fn an_option_that_is_wrong_in_a_file_is_refused() {
    for (line, sentence) in [
        ("writeback_percent = 41", "cannot set `writeback_percent`: `41` is above the maximum, 40"),
        (
            "writeback_percent = 1.5",
            "invalid type: floating point `1.5`, expected a whole number, a text, true or",
        ),
        (
            "sequential_cutoff = \"1MB\"",
            "cannot set `sequential_cutoff`: `1MB` is not a size: write M or MiB",
        ),
        ("label = \"x\"", "`label` cannot be set in the configuration: the device stores it"),
        (
            "writeback_rate_fp_term_low = 10",
            "writeback_rate_fp_term_low must be below writeback_rate_fp_term_mid",
        ),
        ("sequental_cutoff = 1", "unknown key `sequental_cutoff`; perhaps sequential_cutoff is meant"),
    ] {
        let (kind, found) = refused(&format!("{CACHE}[volume.v]\nbacking = \"/b\"\n{line}\n"));
        assert_eq!((kind, kind.exit()), (Kind::Config, 2), "{line}: {found}");
        assert!(found.starts_with(&format!(":6: {sentence}")), "{line}: {found}");
    }
}

/// The cache knows the volume; its section adds settings.
#[test]
fn a_section_can_say_more_of_a_volume_in_the_cache_alone() {
    const UUID: &str = "6f0c1a52-2a53-4ae5-9a6f-9f6f5d6b2f10";
    let text = |lines: &str| format!("{CACHE}[volume.swap]\n{lines}\n");
    let config =
        load(&text(&format!("flash = \"UUID={UUID}\"\nread_only = true")), &[]).expect("a good file");
    let wanted = FlashVolume {
        name: "swap".to_owned(),
        uuid: Uuid::from_text(UUID).expect("a uuid"),
        served: true,
        read_only: true,
        shared: false,
        ways: Frontend::Nbd.into(),
        number: None,
        wait: WAIT_DEFAULT,
    };
    assert_eq!((config.flash, config.volumes.len()), (vec![wanted], 0));
    let of_set = format!("version = 1\n[volume.swap]\nflash = \"UUID={UUID}\"\nserved = false\n");
    let config = load(CACHE, &[("99-set.toml", &of_set)]).expect("a good file");
    assert_eq!((config.flash.len(), config.flash[0].served), (1, false));
    // `[defaults]` apply where they make sense, and options of a former volume of that name do not
    // prevent a start.
    let for_all = format!(
        "{CACHE}[defaults]\nwait = \"3s\"\ncache_mode = \"none\"\n[volume.swap]\nflash = \"UUID={UUID}\"\n"
    );
    let former = "version = 1\n[volume.swap]\ncache_mode = \"none\"\nsize = \"1M\"\n";
    let config = load(&for_all, &[("99-set.toml", former)]).expect("good files");
    assert_eq!((config.flash.len(), config.flash[0].wait), (1, Duration::from_secs(3)));
    let config = load(&text(&format!("flash = \"UUID={UUID}\"\nwait = \"1s\"")), &[]).expect("a good file");
    assert_eq!(config.flash[0].wait, Duration::from_secs(1));
    for (key, value) in [("cache_mode", "writeback"), ("size", "1M"), ("on_cache_error", "fail")] {
        let (kind, found) = refused(&text(&format!("flash = \"UUID={UUID}\"\n{key} = \"{value}\"")));
        let sentence =
            format!("`{key}` has no effect in [volume.swap], which is a flash-only volume; remove it");
        assert_eq!((kind, found.contains(&sentence)), (Kind::Config, true), "{found}");
    }
    let (kind, found) = refused(&text("flash = \"/dev/sdb\""));
    assert_eq!(
        (kind, found.contains("`/dev/sdb` is not the UUID of a volume")),
        (Kind::Config, true),
        "{found}"
    );
    let (kind, found) = refused(&text(&format!("backing = \"/b\"\nflash = \"UUID={UUID}\"")));
    assert_eq!((kind, found.contains("either `backing` or `flash`")), (Kind::Config, true), "{found}");
}

/// A size that no cache can honour is refused, and not ignored.
#[test]
fn a_size_is_whole_sectors() {
    for size in ["0", "5000", "8388609"] {
        let (kind, found) =
            refused(&format!("{CACHE}[volume.media]\nbacking = \"/dev/b\"\nsize = \"{size}\"\n"));
        let sentence = "`size` of [volume.media] is not a positive multiple of 512 bytes; write a multiple of the cache's block size";
        assert_eq!((kind, found.contains(sentence)), (Kind::Config, true), "{found}");
    }
}

/// Persisted options take precedence whatever other files are called, and configure no volume.
#[test]
fn what_was_set_is_read_last_and_never_brings_a_volume() {
    let of_set = "version = 1\n[volume.media]\ncache_mode = \"none\"\n[volume.gone]\ncache_mode = \"none\"\n";
    let later = "version = 1\n[volume.media]\ncache_mode = \"writeback\"\nwait = \"3s\"\n";
    let config = load(WHOLE, &[("99-set.toml", of_set), ("zz-later.toml", later)]).expect("good files");
    assert_eq!(said(&config.volumes[0], "cache_mode"), "none 99-set.toml:3");
    assert!(config.volumes[0].options["cache_mode"].origin.is_by_set());
    assert_eq!(config.volumes[0].wait, Duration::from_secs(3));
    assert_eq!((config.volumes.len(), config.set_and_gone), (2, vec!["gone".to_owned()]));
}

#[test]
fn the_file_of_set_is_made_and_rewritten_and_a_persons_is_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = set_file::path_beside(&folder.path().join("config.toml"));
    let mut file = SetFile::read(&path).expect("nothing there is nothing said");
    assert!(!file.is_changed());
    for (option, typed) in
        [("sequential_cutoff", "1M"), ("writeback_running", "0"), ("writeback_percent", "7")]
    {
        let option = Scope::Volume.find(option).expect("an option");
        file.of(Scope::Volume, "a \"b\"").insert(option.name, option.read(typed).expect("a value"));
    }
    assert!(file.is_changed() && !path.exists());
    file.check_writable().and_then(|()| file.write()).expect("a folder of ours");
    let text = std::fs::read_to_string(&path).expect("written");
    let (comment, rest) = text.split_once('\n').expect("lines");
    assert!(comment.starts_with("# Made by `bcached set`"), "{text}");
    let whole = "version = 1\n\n[volume.'a \"b\"']\nsequential_cutoff = \"1M\"\nwriteback_percent = 7\n\
                 writeback_running = false\n";
    assert_eq!(rest, whole);
    let names = || std::fs::read_dir(path.parent().expect("config.d")).expect("a folder").count();
    assert_eq!(names(), 1, "nothing unfinished is left");

    let mut file = SetFile::read(&path).expect("ours");
    assert!(!file.is_changed(), "{}", file.text());
    file.of(Scope::Volume, "a \"b\"").clear();
    let option = Scope::Cache.find("io_error_limit").expect("an option");
    file.of(Scope::Cache, "fast").insert(option.name, option.read("7").expect("a value"));
    file.write().expect("again");
    let whole = format!("{comment}\nversion = 1\n\n[cache.fast]\nio_error_limit = 7\n");
    assert_eq!(std::fs::read_to_string(&path).expect("written"), whole);

    let mut file = SetFile::read(&path).expect("ours");
    assert!(!file.is_changed(), "{}", file.text());
    file.of(Scope::Cache, "fast").clear();
    file.write().expect("again");
    assert_eq!(std::fs::read_to_string(&path).expect("written"), format!("{comment}\nversion = 1\n"));

    for of_person in ["version = 1\n", &format!("{comment}\nversion = 1\n[daemon]\nmemory = \"1G\"\n")] {
        std::fs::write(&path, of_person).expect("written");
        let refused = SetFile::read(&path).expect_err("not ours").to_string();
        assert!(refused.starts_with("cannot rewrite "), "{refused}");
        assert!(refused.contains("99-set.toml: it was not made by `bcached set`"), "{refused}");
        assert_eq!(std::fs::read_to_string(&path).expect("still there"), of_person);
    }
}

/// The guide's example claims to show every key: it must be valid, and no key may be missing.
#[test]
fn the_guide_shows_every_key() {
    const GUIDE: &str = include_str!("../../../docs/guide.md");
    let (_, from) = GUIDE.split_once("```toml\n").expect("the guide has an example");
    let (example, after) = from.split_once("```").expect("the example ends");
    assert!(!after.contains("```toml"), "one example, so that nobody keeps another true");
    let config = load(example, &[]).expect("the guide's example");
    assert_eq!(config.control, Path::new(CONTROL_DEFAULT));
    assert_eq!((config.memory_bytes, config.stop_timeout), (MEMORY_DEFAULT, STOP_TIMEOUT_DEFAULT));
    let [own, tcp, look] = config.places.listen.as_slice() else { panic!("{:?}", config.places.listen) };
    assert_eq!(own, &Address::Unix("/run/bcached/nbd.sock".into()).into());
    assert_eq!(tcp, &Address::Tcp("127.0.0.1:10809".parse().expect("an address")).into());
    assert!(look.read_only);
    assert!(config.places.tls.certificates().is_some_and(|certificates| certificates.verify_peer));
    let [media, scratch] = config.volumes.as_slice() else { panic!("{:?}", config.volumes) };
    assert_eq!((media.name.as_deref(), media.cache.as_deref()), (Some("media"), Some("nvme")));
    assert!(said(media, "cache_mode").starts_with("writethrough "));
    assert_eq!(media.wait, WAIT_DEFAULT);
    assert!(said(scratch, "cache_mode").starts_with("writeback "));
    assert_eq!(said(scratch, "max_dirty_age").split(' ').next(), Some("12h"));
    assert_eq!((scratch.read_only, scratch.shared), (false, false), "the defaults");
    assert_eq!(config.flash.iter().map(|flash| &*flash.name).collect::<Vec<_>>(), ["swap"]);

    let is_none_of = |key: &str| [Scope::Volume, Scope::Cache].iter().all(|scope| scope.find(key).is_none());
    for section in ["[daemon]", "[nbd]", "[cache.a]", "[volume.v]"] {
        // Options have their own table in the guide, which another test compares with the code.
        let own = known_keys(section).into_iter().filter(|key| is_none_of(key));
        for key in own {
            let is_shown = example.lines().any(|line| line.starts_with(&format!("{key} =")));
            assert!(is_shown, "{section} knows `{key}`, and the guide does not show it");
        }
    }
}

/// Returns the keys that a section can have, from the parser's own error.
fn known_keys(section: &str) -> Vec<String> {
    let message = parse::message(&format!("version = 1\n{section}\nno_such_key = 1\n"));
    let (_, known) = unknown_key::unknown_key(&message).expect("it lists what it knows");
    known.into_iter().map(str::to_owned).collect()
}

/// A pipe, or a file that never ends, is refused. Reading one used to block the daemon for all
/// commands and signals.
#[test]
fn a_configuration_is_a_regular_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("config.toml");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::from_raw_mode(0o600)).expect("a pipe");
    let refused = parse::read(&pipe, &mut Vec::new()).expect_err("a pipe").to_string();
    assert!(refused.contains("config.toml") && refused.contains("it is not a regular file"), "{refused}");
}

/// Returns the findings of `text`, as lines and errors.
fn findings(text: &str) -> Vec<String> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("config.toml");
    std::fs::write(&path, text).expect("a file");
    let line = CommandLine { config: Some(path), ..CommandLine::default() };
    let (_, findings) = Config::findings(&line).expect("it can be read");
    let place = |finding: &Failure| finding.to_string().rsplit("/config.toml:").next().map(str::to_owned);
    findings.iter().filter_map(place).collect()
}

/// A refused line with multi-byte characters does not change the line numbers after it.
#[test]
fn a_refused_line_of_many_bytes_a_letter_moves_no_other() {
    let found = findings(
        "version = 1\n[cache.fast]\ndevice = \"/dev/x\"\n\"äääääääääääääääääää\" = 1\nb = 1\n[volume.tank]\nbacking = \"/dev/y\"\nc = 1\n",
    );
    let lines: Vec<_> = found.iter().filter_map(|found| found.split(':').next()).collect();
    assert_eq!(lines, ["4", "5", "8"], "{found:?}");
}

/// A section whose device was refused is not reported to have none.
#[test]
fn a_refused_device_is_not_said_to_be_missing_too() {
    let found =
        findings("version = 1\n[cache.fast]\ndevice = 5\n[volume.tank]\nbacking = 5\ncache = \"fast\"\n");
    let lines: Vec<_> = found.iter().map(|found| found.split(',').next().unwrap_or_default()).collect();
    assert_eq!(lines, ["3: invalid type: integer `5`", "5: invalid type: integer `5`"], "{found:?}");
    let found = findings("version = 1\n[cache.fast]\n[volume.tank]\nbacking = 5\n");
    let lines: Vec<_> = found.iter().map(|found| found.split(',').next().unwrap_or_default()).collect();
    assert_eq!(lines, ["4: invalid type: integer `5`", "2: [cache.fast] has no `device`"], "{found:?}");
}
