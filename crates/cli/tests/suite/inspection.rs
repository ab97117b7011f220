//! `scan`, `config` and `top`: what is on disks, what the files say, and what is running.

use crate::common::{
    self, CommandResult, Daemon, Images, ask, bcached, done, fill, json, pattern, refused, requires, tool,
};

const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 20 << 20;

fn make(images: &Images, words: &[&str], name: &str, bytes: u64) -> String {
    let path = images.blank(name, bytes);
    let made = bcached(&[&["make", "-b", "64k"], words, &[&path]].concat());
    assert_eq!(made.exit, 0, "{made:?}");
    path
}

/// A cache with one attached volume, and one device that is not attached.
struct InspectionFixture {
    images: Images,
    fast: String,
    tank: String,
    pond: String,
}

impl InspectionFixture {
    fn new() -> Self {
        let images = Images::new();
        let fast = make(&images, &["-C"], "fast", CACHE_BYTES);
        let tank = make(&images, &["--writeback", "--label", "tank", "-B"], "tank", BACKING_BYTES);
        let pond = make(&images, &["--label", "pond", "-B"], "pond", BACKING_BYTES);
        assert_eq!(Daemon::start(&images, &["--cache", &fast, "--backing", &tank]).stop().0, 0);
        Self { images, fast, tank, pond }
    }

    fn config(&self, text: &str) -> String {
        let path = self.images.path("config.toml");
        std::fs::write(&path, text).expect("a file");
        path.to_str().expect("text").to_owned()
    }

    fn usual(&self, more: &str) -> String {
        let (fast, tank) = (&self.fast, &self.tank);
        self.config(&format!(
            "version = 1\n[cache.fast]\ndevice = {fast:?}\n[volume.media]\nbacking = {tank:?}\n{more}"
        ))
    }
}

fn all(words: &[&str]) -> CommandResult {
    bcached(words)
}

#[test]
fn devices_are_found_by_set_and_left_alone() {
    let site = InspectionFixture::new();
    let InspectionFixture { images, fast, tank, pond } = &site;
    let before: Vec<_> = [fast, tank, pond].map(common::bytes).into();
    let found = all(&["scan", fast, tank, pond, tank]);
    assert_eq!(found.exit, 0, "{found:?}");
    let lines: Vec<_> = found.out.lines().collect();
    assert!(lines[0].starts_with("set ") && lines[0].len() == "set ".len() + 36, "{found:?}");
    assert!(
        lines[1].starts_with("  cache    ") && lines[1].ends_with("36 MiB, buckets of 64 KiB"),
        "{found:?}"
    );
    assert!(lines[2].contains("\"tank\"  20 MiB, clean, writeback"), "{found:?}");
    assert_eq!(lines[3], "no set");
    assert!(lines[4].contains("\"pond\"  20 MiB, no cache, writethrough") && lines.len() == 5, "{found:?}");
    let object = json(&all(&["scan", "--json", tank]).out);
    let set = &object["sets"][0];
    assert_eq!(
        (object["schema"].as_str(), set["caches"].as_array().map(Vec::len)),
        (Some("bcached.scan"), Some(0))
    );
    assert_eq!(set["backings"][0]["state"].as_str(), Some("clean"));
    assert!(all(&["scan", tank]).out.contains(": its cache is missing"));
    common::reseal(tank, common::STATE, common::DIRTY);
    assert!(all(&["scan", tank]).out.contains("dirty"), "state dirty");
    common::patch(tank, 4096 + 104, &[2]);
    let torn = all(&["scan", tank, fast]);
    assert!(torn.exit == 0 && torn.out.contains(": not usable: "), "{torn:?}");
    let blank = images.blank("blank", 1 << 20);
    let none = all(&["scan", &blank]);
    assert_eq!((none.exit, none.err.contains("has no bcache superblock")), (2, true), "{none:?}");
    let missing = all(&["scan", "/nonexistent"]);
    assert_eq!(missing.exit, 4, "{missing:?}");
    assert!(before[0] == common::bytes(fast) && before[2] == common::bytes(pond), "nothing was written");
    // Looks at whatever this machine has, and no more.
    assert_eq!(all(&["scan"]).exit, 0);
}

#[test]
fn files_are_checked_and_shown_with_their_origins() {
    let site = InspectionFixture::new();
    let config = site.usual("writeback_percent = 20\n");
    let sound = all(&["config", "check", "--config", &config]);
    assert_eq!((sound.exit, sound.out.as_str()), (0, "sound: caches: 1, volumes: 1\n"), "{sound:?}");
    let daemon = Daemon::start(&site.images, &["--config", &config]);
    done(&daemon, &["set", "media", "writeback_percent=30", "quiet_hours=23:00-07:00"]);
    let shown = all(&["config", "show", "--config", &config]);
    let set_file = site.images.path("config.d/99-set.toml");
    assert!(
        shown.out.contains(&format!("[volume.media]\nbacking = {:?}  # {config}:5\n", site.tank)),
        "{shown:?}"
    );
    assert!(shown.out.contains(&format!("writeback_percent = 30  # {}:", set_file.display())), "{shown:?}");
    assert!(!shown.out.contains("= 20"), "{shown:?}");
    // The output is an equivalent configuration.
    let again = site.images.path("again.toml");
    std::fs::write(&again, &shown.out).expect("a file");
    drop(std::fs::rename(site.images.path("config.d"), site.images.path("away.d")));
    let checked = all(&["config", "check", "--config", again.to_str().expect("text")]);
    assert_eq!(checked.exit, 0, "{checked:?}\n{}", shown.out);
    drop(std::fs::rename(site.images.path("away.d"), site.images.path("config.d")));

    let bad = site.usual("writeback_percent = 90\n");
    let refused = all(&["config", "check", "--config", &bad]);
    assert_eq!(
        (refused.exit, refused.out.as_str()),
        (1, "a start would refuse this configuration\n"),
        "{refused:?}"
    );
    assert!(refused.err.contains("config.toml:6: cannot set `writeback_percent`"), "{refused:?}");
    let object = json(&all(&["config", "check", "--json", "--config", &bad]).out);
    assert_eq!(
        (object["sound"].as_bool(), object["failure"]["kind"].as_str()),
        (Some(false), Some("config")),
        "{object}"
    );
    let shown = all(&["config", "show", "--config", &bad]);
    assert_eq!((shown.exit, shown.out.as_str()), (2, ""), "{shown:?}");
    let missing = all(&["config", "check", "--config", "/nonexistent.toml"]);
    assert_eq!(
        (missing.exit, missing.err.contains("cannot read the configuration")),
        (2, true),
        "{missing:?}"
    );
}

#[test]
fn what_runs_is_compared_with_what_the_files_say() {
    let site = InspectionFixture::new();
    let config = site.usual("");
    let daemon = Daemon::start(&site.images, &["--config", &config]);
    assert_eq!(done(&daemon, &["config", "diff"]), "the running configuration is that of the files\n");
    done(&daemon, &["set", "media", "writeback_percent=30"]);
    done(&daemon, &["shrink", "media", "--size", "12M"]);
    assert_eq!(
        done(&daemon, &["config", "diff"]),
        "the running configuration is that of the files\n",
        "what is kept"
    );
    done(&daemon, &["set", "media", "writeback_delay=1m", "--runtime"]);
    done(&daemon, &["set", "fast", "congested_read_threshold_us=7", "--runtime"]);
    done(&daemon, &["add", "scratch", "--size", "1M"]);
    done(&daemon, &["set", "scratch", "on_cache_error=fail", "--runtime"]);
    site.usual(&format!(
        "shared = true\nnumber = 7\nsequential_cutoff = \"1M\"\n[daemon]\nmemory = \"300M\"\n[volume.more]\nbacking = {:?}\ncache = \"none\"\n",
        site.pond
    ));
    let differs = ask(&daemon, &["config", "diff"]);
    assert_eq!(differs.exit, 1, "{differs:?}");
    let lines: Vec<_> = differs.out.lines().collect();
    assert_eq!(
        lines,
        [
            "daemon.memory: 256M is in force, 300M is in the files (until the next start)",
            "cache.fast.congested_read_threshold_us: 7 is in force, 2000 is in the files (until `bcached unset` or the next start: it was set with --runtime)",
            "volume.media.shared: false is in force, true is in the files (until the next start)",
            "volume.media.number: nothing is in force, 7 is in the files (until the next start)",
            "volume.media.sequential_cutoff: 4M is in force, 1M is in the files (until a reload or the next start)",
            "volume.media.writeback_delay: 1m is in force, 30s is in the files (until `bcached unset` or the next start: it was set with --runtime)",
            "volume.scratch.on_cache_error: fail is in force, freeze is in the files (until `bcached unset` or the next start: it was set with --runtime)",
            "volume.more: nothing is in force, a section is in the files (until a reload or the next start)",
        ]
    );
    let object = json(&ask(&daemon, &["config", "diff", "--json"]).out);
    assert_eq!(object["differences"][2]["running"].as_str(), Some("false"), "{object}");
    site.config("version = 2\n");
    refused(&daemon, &["config", "diff"], 2, "version 2 is unknown");
    assert_eq!(daemon.stop().0, 0);
    let daemon = Daemon::start(&site.images, &["--cache", &site.fast, "--backing", &site.tank]);
    refused(&daemon, &["config", "diff"], 2, "the daemon serves devices of its command line");
}

/// `config scan` prints a configuration that serves what it found.
#[test]
fn a_configuration_is_made_from_disks() {
    let site = InspectionFixture::new();
    let made = all(&["config", "scan", &site.fast, &site.tank, &site.pond]);
    assert_eq!(made.exit, 0, "{made:?}");
    let config = site.config(&made.out);
    let daemon = Daemon::start(&site.images, &["--config", &config]);
    let listed = done(&daemon, &["list"]);
    assert!(listed.lines().any(|line| line.starts_with("volume  tank")), "{listed}\n{}", made.out);
    assert!(
        listed.lines().any(|line| line.starts_with("volume  pond") && line.contains(" served ")),
        "{listed}"
    );
    assert_eq!(daemon.stop().0, 0);
    // Devices made together, and never served, belong together; and names are valid from any
    // directory.
    let (ssd, hdd) = (site.images.blank("ssd", 36 << 20), site.images.blank("hdd", 20 << 20));
    assert_eq!(all(&["make", "-b", "64k", "--cache", &ssd, "--backing", &hdd, "--label", "fresh"]).exit, 0);
    let folder = std::path::Path::new(&ssd).parent().expect("a file in a folder");
    let mut program = common::program();
    let made = common::run(program.current_dir(folder).args(["config", "scan", "ssd", "hdd"])).out;
    let told = made.split_once("[volume.\"fresh\"]").expect("named by its label").1;
    assert!(told.contains(&format!("backing = {hdd:?}")) && !told.contains("none"), "{made}");
    let none = all(&["config", "scan", &site.pond]);
    assert_eq!((none.exit, none.err.contains("no cache device was found")), (4, true), "{none:?}");
}

#[test]
fn top_shows_what_goes_through_and_ends() {
    if !requires("nbdcopy") {
        return;
    }
    let site = InspectionFixture::new();
    let config = site.usual("");
    let daemon = Daemon::start(&site.images, &["--config", &config]);
    let data = site.images.path("data");
    std::fs::write(&data, vec![7; 1 << 20]).expect("a file");
    let copied = common::run(tool("nbdcopy").arg(&data).arg(daemon.uri("media")));
    assert_eq!(copied.exit, 0, "{copied:?}");
    let shown = done(&daemon, &["top", "--interval", "1s", "-n", "2"]);
    assert_eq!(shown.matches("volume media: served").count(), 2, "{shown}");
    assert_eq!(shown.matches("cache fast: 0 B/s hit, 0 B/s missed, 0 B/s written").count(), 2, "{shown}");
    assert!(!shown.contains('\x1b'), "no terminal");
    refused(&daemon, &["top", "--interval", "0s"], 2, "`0s` is not an interval");
    assert_eq!(json(&done(&daemon, &["top", "--json"]))["schema"].as_str(), Some("bcached.status"));
}

/// The bytes are where the explanation says, on both devices.
#[test]
fn an_offset_is_explained() {
    if !requires("nbdcopy") {
        return;
    }
    let site = InspectionFixture::new();
    let config = site.usual("writeback_running = false\n");
    let daemon = Daemon::start(&site.images, &["--config", &config]);
    let data = pattern(1 << 20, 0);
    fill(&site.images, &daemon, "media", &data);
    let object = |offset: &str| json(&ask(&daemon, &["explain", "media", offset, "--json"]).out);
    let number = |object: &serde_json::Value, key: &str| {
        usize::try_from(object[key].as_u64().unwrap_or_else(|| panic!("{key}: {object}"))).expect("small")
    };
    let dirty = object("100001");
    assert_eq!(
        (dirty["schema"].as_str(), dirty["state"].as_str()),
        (Some("bcached.explain"), Some("dirty")),
        "{dirty}"
    );
    assert!(number(&dirty, "start_bytes") <= 100_001 && number(&dirty, "end_bytes") > 100_001, "{dirty}");
    assert_eq!(number(&dirty, "bucket"), number(&dirty, "cache_offset_bytes") / (64 << 10));
    let at = number(&dirty, "cache_offset_bytes");
    assert_eq!(common::bytes(&site.fast)[at..at + 500], data[100_001..100_501], "it is there");
    let told = ask(&daemon, &["explain", "media", "100001"]);
    assert!(
        told.exit == 0
            && told.out.starts_with("media at byte 100001: dirty: the newest data is in the cache only\n"),
        "{told:?}"
    );
    done(&daemon, &["flush", "media"]);
    let clean = object("100001");
    assert_eq!(clean["state"].as_str(), Some("clean"));
    let below = number(&clean, "backing_offset_bytes");
    assert_eq!(common::bytes(&site.tank)[below..below + 500], data[100_001..100_501], "and there");
    let hole = ask(&daemon, &["explain", "media", "10M"]);
    assert!(hole.exit == 1 && hole.out.contains("not cached: on the backing device"), "{hole:?}");
    assert!(hole.out.contains("it has not been requested yet, or was evicted"), "{hole:?}");
    done(&daemon, &["set", "media", "cache_mode=none"]);
    assert!(
        ask(&daemon, &["explain", "media", "10M"]).out.contains("cache_mode is none: nothing new is cached")
    );
    refused(
        &daemon,
        &["explain", "media", "30M"],
        2,
        "offset 31457280 is beyond the end of media: its size is 20 MiB (20963328 bytes)",
    );
    refused(&daemon, &["explain", "media", "x"], 2, "`x` is not a size");
    done(&daemon, &["detach", "media"]);
    assert_eq!(object("0")["state"].as_str(), Some("uncached"));
    done(&daemon, &["stop", "media"]);
    refused(&daemon, &["explain", "media", "0"], 4, "media is not served");
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: only one fault was shown at a time, and configurations were called sound that a
/// start refuses or serves only in part.
#[test]
fn all_that_is_wrong_with_the_files_is_said_at_once() {
    let site = InspectionFixture::new();
    let check = |text: &str| {
        site.images.configure(text);
        let path = site.images.path("config.toml");
        all(&["config", "check", "--config", path.to_str().expect("text")])
    };
    let (control, nbd) = (site.images.path("c.sock"), site.images.path("n.sock"));
    let bad = format!(
        "version = 1\n[daemon]\nmetrics = 7\nmemory = \"1M\"\ncontrol = {control:?}\n\
         [nbd]\nlisten = [\"{nbd}\", \"{nbd}\", \"{control}\"]\n\
         [cache.one]\ndevice = \"/a\"\n[cache.two]\ndevice = \"/a\"\nno_such_key = 1\n\
         [volume.media]\nbacking = \"/a\"\nwriteback_percent = 90\n\
         [volume.pond]\nbacking = \"/b\"\ncache = \"three\"\n",
        nbd = nbd.display(),
        control = control.display()
    );
    let ran = check(&bad);
    assert_eq!((ran.exit, ran.out.as_str()), (1, "a start would refuse this configuration\n"), "{ran:?}");
    for sentence in [
        "config.toml:3: ",
        "config.toml:12: unknown key `no_such_key`",
        "config.toml:15: cannot set `writeback_percent`",
        "config.toml:18: there is no cache `three`",
        "`memory` is too small",
        "n.sock is configured twice",
        "c.sock is the control socket",
        "/a is configured twice: as the cache one and as the cache two",
        "/a is configured twice: as the cache one and as media",
    ] {
        let found = ran.err.lines().filter(|line| line.contains(sentence)).count();
        assert_eq!(found, 1, "{sentence}: {ran:?}");
    }
    assert!(ran.err.lines().all(|line| line.starts_with("bcached: error: ")), "{ran:?}");
    let path = site.images.path("config.toml");
    let path = path.to_str().expect("text");
    let object = json(&all(&["config", "check", "--json", "--config", path]).out);
    assert_eq!(object["failures"].as_array().map(Vec::len), Some(9), "{object}");
    assert_eq!(object["failures"][0], object["failure"], "{object}");
    // A start reports the first of them.
    let started = all(&["serve", "--config", path]);
    let last = started.err.lines().last().unwrap_or_default();
    assert_eq!((started.exit, last.contains("config.toml:3: ")), (2, true), "{started:?}");
    assert!(last.ends_with("`bcached config check` shows 8 more errors"), "{started:?}");
    assert_eq!(started.err.lines().count(), 1, "nothing comes before it: {started:?}");
    let started = all(&["serve", "--cache", "/a", "--export", "nonsense"]);
    assert_eq!((started.exit, started.err.lines().count()), (2, 1), "{started:?}");
    // The volume may be attached to one of the caches.
    let ran = check(
        "version = 1\n[cache.one]\ndevice = \"/a\"\n[cache.two]\ndevice = \"/b\"\n[volume.media]\nbacking = \"/c\"\n",
    );
    assert!(ran.out.contains("[volume.media] names none of the 2 caches: it is served only if"), "{ran:?}");
    // After a TOML syntax error nothing more can be determined.
    let ran = check("version = 1\n[cache.one\nno_such_key = 1\n");
    assert_eq!((ran.exit, ran.err.lines().count()), (1, 1), "{ran:?}");
}

/// A regression: a start found these later, in words that name no line, or served what was not
/// meant.
#[test]
fn what_is_one_thing_by_two_names_is_found() {
    let site = InspectionFixture::new();
    let (tank, link) = (site.images.path("tank"), site.images.path("link"));
    std::os::unix::fs::symlink(&tank, &link).expect("a link");
    std::os::unix::fs::symlink(site.images.path("."), site.images.path("here")).expect("a link");
    let [tank, link] = [&tank, &link].map(|path| path.display().to_string());
    let folder = site.images.path("").display().to_string();
    let folder = folder.trim_end_matches('/');
    let uuid = "1f5a0c22-2a53-4ae5-9a6f-9f6f5d6b2f10";
    let bad = format!(
        "version = 1\n[daemon]\ncontrol = \"{folder}/c.sock\"\nmetrics = \"127.0.0.1:9763\"\n\
         [nbd]\nlisten = [\n\"{folder}/n.sock\",\n\"{folder}/x/../n.sock\",\n\"{folder}/here/c.sock\",\n\"127.0.0.1:9763\",\n]\n\
         [cache.one]\ndevice = \"/a\"\nformer = \"/a/../a\"\n[cache.two]\ndevice = \"/b\"\nformer = {tank:?}\n\
         [defaults]\ncache = \"one\"\n\
         [volume.a]\nbacking = {link:?}\n[volume.b]\nbacking = \"UUID={uuid}\"\n\
         [volume.c]\nbacking = \"UUID={}\"\n[volume.d]\nflash = \"UUID={uuid}\"\n[volume.e]\nflash = \"UUID={}\"\n",
        uuid.to_uppercase(),
        uuid.to_uppercase(),
    );
    site.images.configure(&bad);
    let path = site.images.path("config.toml");
    let path = path.to_str().expect("text");
    let ran = all(&["config", "check", "--config", path]);
    assert_eq!((ran.exit, ran.err.lines().count()), (1, 7), "{ran:?}");
    for sentence in [
        format!(
            "config.toml:8: {folder}/x/../n.sock is configured twice: {folder}/n.sock is the same address"
        ),
        format!("config.toml:9: {folder}/here/c.sock is the control socket"),
        "config.toml:4: `metrics` cannot be on 127.0.0.1:9763: NBD is served on 127.0.0.1:9763".to_owned(),
        "config.toml:14: /a/../a is configured twice: as the cache one (by the name /a) and as the former"
            .to_owned(),
        format!(
            "config.toml:21: {link} is configured twice: as the former device (`former`) of the cache two (by the name {tank})"
        ),
        format!(
            "config.toml:25: UUID={} is configured twice: as b (by the name UUID={uuid})",
            uuid.to_uppercase()
        ),
        format!("config.toml:29: UUID={uuid} is configured twice: as d and as e"),
    ] {
        let found = ran.err.lines().filter(|line| line.contains(&sentence)).count();
        assert_eq!(found, 1, "{sentence}: {ran:?}");
    }
    // A start refuses the same.
    let started = all(&["serve", "--config", path]);
    assert_eq!((started.exit, started.err.contains("config.toml:8: ")), (2, true), "{started:?}");
}

/// A regression: a configuration of a GiB took three of memory, and clients were told meanwhile
/// that a device is slow to answer.
#[test]
fn a_configuration_that_is_too_large_is_refused_before_it_is_read() {
    let site = InspectionFixture::new();
    let config = site.usual("");
    let daemon = Daemon::start(&site.images, &["--config", &config]);
    let grow = |path: &str, bytes: u64| {
        std::fs::File::options().write(true).open(path).and_then(|file| file.set_len(bytes)).expect("sparse");
    };
    let length = std::fs::metadata(&config).expect("there").len();
    grow(&config, 1 << 30);
    let sentence = "config.toml: it is larger than 4 MiB, so it cannot be the configuration; ";
    for words in [
        &["config", "check", "--config", &config][..],
        &["config", "show", "--config", &config],
        &["serve", "--config", &config],
    ] {
        let ran = all(words);
        // Apart from log events there is only the sentence.
        let said: Vec<_> = ran.err.lines().filter(|line| !line.contains(" [event=")).collect();
        assert_eq!((ran.exit, said.len(), said[0].contains(sentence)), (2, 1, true), "{words:?}: {ran:?}");
    }
    refused(&daemon, &["add", "more", "--backing", "/nonexistent"], 2, sentence);
    refused(&daemon, &["config", "diff"], 2, sentence);
    grow(&config, length);
    assert_eq!(all(&["config", "check", "--config", &config]).exit, 0);
    assert_eq!(daemon.stop().0, 0);
}
