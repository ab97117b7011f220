//! `bcached serve` as a process: data written over NBD is read back after a stop and after a crash;
//! the daemon's messages; its refusals.

use crate::common::{self, Daemon, Images, bcached, bytes, json, patch, requires, reseal, run, tool};
use rustix::process::Signal;
use std::path::Path;

const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 20 << 20;

/// Makes a set in writeback mode: a cache and a backing device.
fn set(images: &Images) -> (String, String) {
    let (cache, backing) = (images.blank("cache", CACHE_BYTES), images.blank("backing", BACKING_BYTES));
    let made =
        bcached(&["make", "-b", "64k", "--writeback", "--label", "tank", "-C", &cache, "-B", &backing]);
    assert_eq!(made.exit, 0, "{made:?}");
    (cache, backing)
}

fn copy(from: &str, to: &str) {
    let copied = run(tool("nbdcopy").args([from, to]));
    assert_eq!(copied.exit, 0, "{copied:?}");
}

/// Returns bytes that differ from sector to sector.
fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56).to_le_bytes()[0]
    };
    (0..length).map(|_| next()).collect()
}

fn assert_content(daemon: &Daemon, images: &Images, wanted: &[u8]) {
    let back = images.path("back");
    let _none_yet = std::fs::remove_file(&back);
    copy(&daemon.uri("tank"), back.to_str().expect("text"));
    assert!(bytes(&back)[..wanted.len()] == *wanted, "the content came back changed");
}

#[test]
fn what_is_written_comes_back_after_a_stop_and_after_a_crash() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let (cache, backing) = set(&images);
    let devices = ["--cache", &cache, "--backing", &backing];
    let wanted = pattern(7, 4 << 20);
    let data = images.path("data");
    std::fs::write(&data, &wanted).expect("data");
    let daemon = Daemon::start(&images, &devices);
    copy(data.to_str().expect("text"), &daemon.uri("tank"));
    assert_content(&daemon, &images, &wanted);
    let status = daemon.status();
    assert_eq!(status["schema"], "bcached.status");
    assert_eq!(status["state"], "ready");
    assert_eq!(status["volumes"][0]["name"], "tank");
    assert_eq!(status["volumes"][0]["state"], "served");
    assert_eq!(status["volumes"][0]["size_bytes"], BACKING_BYTES - 8192);
    assert_eq!(status["volumes"][0]["cache_mode"], "writeback");
    assert!(status["caches"][0]["write_bytes"].as_u64() >= Some(4 << 20), "{status}");
    daemon.kill();
    assert_eq!(bcached(&["check", &cache, &backing]).exit, 0, "sound after a crash");

    let daemon = Daemon::start(&images, &devices);
    assert_content(&daemon, &images, &wanted);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
    let checked = bcached(&["check", "--json", &cache, "--backing", &backing]);
    assert_eq!(checked.exit, 0, "{checked:?}");
    let dirty = json(&checked.out)["sets"][0]["volumes"][0]["dirty_sectors"].as_u64().expect("a number");
    assert_eq!(log.contains("dirty stays on cache; keep them together"), dirty > 0, "{dirty} sectors: {log}");

    let daemon = Daemon::start(&images, &devices);
    assert_content(&daemon, &images, &wanted);
}

#[test]
fn its_sockets_go_with_it() {
    let images = Images::new();
    let (cache, _) = set(&images);
    let daemon = Daemon::start(&images, &["--cache", &cache]);
    assert!(images.path("run/control.sock").exists() && images.path("run/nbd.sock").exists());
    assert_eq!(mode_of(&images.path("run/control.sock")), 0o600);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
    assert!(!images.path("run/control.sock").exists());
    assert!(!images.path("run/nbd.sock").exists());
}

fn mode_of(path: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::metadata(path).expect("there").permissions().mode() & 0o777
}

#[test]
fn a_cache_is_overwritten_only_if_nothing_dirty_is_in_it() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let (cache, backing) = set(&images);
    let devices = ["--cache", &cache, "--backing", &backing];
    Daemon::start(&images, &devices).stop();
    let wipe = ["make", "-b", "64k", "-C", &cache, "--wipe-bcache"];
    let asked = bcached(&wipe[..5]);
    assert_eq!(
        (asked.exit, asked.err.contains("it holds no dirty data: --wipe-bcache")),
        (3, true),
        "{asked:?}"
    );

    let daemon = Daemon::start(&images, &devices);
    let data = images.path("data");
    // Less than a tenth of the cache: write-back leaves some of it while a client is active; how
    // much depends on the time.
    std::fs::write(&data, pattern(9, 1 << 20)).expect("data");
    copy(data.to_str().expect("text"), &daemon.uri("tank"));
    let (exit, log) = daemon.stop();
    assert_eq!((exit, log.contains("dirty stays on cache; keep them together")), (0, true), "{log}");
    let before = bytes(&cache);
    let refused = bcached(&wipe);
    assert_eq!(
        (refused.exit, refused.err.contains(" of dirty data; serve it with its backing devices")),
        (3, true),
        "{refused:?}"
    );
    assert!(bytes(&cache) == before, "nothing is written");

    let clean = images.blank("clean", CACHE_BYTES);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &clean]).exit, 0);
    Daemon::start(&images, &["--cache", &clean]).stop();
    let made = bcached(&["make", "-b", "64k", "-C", &clean, "--wipe-bcache"]);
    assert_eq!(made.exit, 0, "{made:?}");
}

#[test]
fn the_journal_gets_priorities_and_a_gone_reader_stops_nothing() {
    let images = Images::new();
    let (cache, _) = set(&images);
    let control = images.path("run/control.sock");
    let mut command = common::program();
    command.args(["serve", "--cache", &cache, "--control"]).arg(&control).env("JOURNAL_STREAM", "8:1");
    command.env("BCACHED_NOTES", images.path("run"));
    let log = images.path("errors");
    command.stderr(std::fs::File::create(&log).expect("a log")).stdout(std::process::Stdio::piped());
    let mut child = command.spawn().expect("starts");
    drop(child.stdout.take());
    let ask = || bcached(&["status", "--control", control.to_str().expect("text")]);
    let started = std::time::Instant::now();
    while !ask().out.contains("ready") {
        assert!(started.elapsed() < std::time::Duration::from_secs(60), "never ready");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let id = rustix::process::Pid::from_raw(i32::try_from(child.id()).expect("an id")).expect("not zero");
    rustix::process::kill_process(id, Signal::TERM).expect("signals");
    assert_eq!(child.wait().expect("ends").code(), Some(0));
    let log = std::fs::read_to_string(log).expect("a log");
    // An unprivileged process warns that it cannot be protected from the OOM killer.
    let is_warning = |line: &&str| {
        ["event=notes-on-disk", "event=oom-not-protected"].iter().any(|event| line.contains(event))
    };
    assert!(log.lines().filter(is_warning).all(|line| line.starts_with("<4>")), "{log}");
    assert!(log.lines().filter(|line| !is_warning(line)).all(|line| line.starts_with("<6>")), "{log}");
    assert!(log.contains("<6>ready [event=ready]"), "{log}");
}

/// A misspelt level would be taken for the name of a part of the program, and only that part would
/// be logged.
#[test]
fn what_is_to_be_logged_is_understood_or_told() {
    let images = Images::new();
    let (fast, _tank) = set(&images);
    let mut command = Daemon::command(&images, "run", &["--cache", &fast]);
    command.env("BCACHED_LOG", "verbose");
    let (exit, log) = Daemon::start_command(&images, command).stop();
    assert_eq!(exit, 0, "{log}");
    assert!(log.contains("warning: BCACHED_LOG: `verbose` is not valid"), "{log}");
    assert!(log.contains("event=cache-opened"), "{log}");
}

#[test]
fn a_served_device_belongs_to_its_daemon() {
    let images = Images::new();
    let (cache, backing) = set(&images);
    let daemon = Daemon::start(&images, &["--cache", &cache, "--backing", &backing]);
    let other = images.path("other/control.sock");
    let other = other.to_str().expect("text");
    let words: [&[&str]; 6] = [
        &["serve", "--cache", &cache, "--control", other],
        &["check", &cache],
        &["check", &backing],
        &["dump", &cache],
        &["make", "-B", &backing, "--wipe-bcache"],
        &["doctor", &cache],
    ];
    for words in words {
        let ran = bcached(words);
        assert_eq!(ran.exit, 3, "{words:?}: {ran:?}");
        // The line of its device reports it.
        let told = if words[0] == "doctor" { &ran.out } else { &ran.err };
        assert!(told.contains("(bcached)"), "the holder is named: {words:?}: {ran:?}");
    }
    let second = bcached(&["serve", "--cache", &cache, "--control", daemon.control()]);
    assert_eq!((second.exit, second.err.contains("another daemon answers")), (3, true), "{second:?}");
    assert_eq!(bcached(&["show", &cache]).exit, 0, "to look is always allowed");
    assert_eq!(daemon.status()["state"], "ready", "it was not disturbed");
}

/// `bcached serve` with `words` fails with this exit status and sentence, and leaves the files in
/// `unchanged` as they are.
fn refuses(words: &[&str], unchanged: &[&str], exit: i32, sentence: &str) {
    let before: Vec<_> = unchanged.iter().map(bytes).collect();
    let folder = tempfile::tempdir().expect("a folder");
    let control = folder.path().join("control.sock");
    let mut all = vec!["serve", "--control", control.to_str().expect("text")];
    all.extend(words);
    let ran = bcached(&all);
    assert_eq!(ran.exit, exit, "{words:?}: {ran:?}");
    let said = ran.err.lines().last().unwrap_or_default();
    assert!(said.starts_with("bcached: ") && said.contains(sentence), "{words:?}: {ran:?}");
    assert!(!ran.out.contains("ready"), "{ran:?}");
    assert!(!control.exists(), "the socket goes with it");
    for (image, before) in unchanged.iter().zip(before) {
        assert!(bytes(image) == before, "{words:?}: {image} was written");
    }
}

#[test]
fn what_cannot_be_served_is_refused_and_not_written() {
    let images = Images::new();
    let (cache, backing) = set(&images);
    let blank = images.blank("blank", 20 << 20);
    let (c, b, blank) = (cache.as_str(), backing.as_str(), blank.as_str());
    refuses(&["--cache", blank], &[blank], 2, "it has no bcache superblock");
    refuses(&["--cache", b], &[b], 2, "it is a backing device; name it with --backing");
    refuses(&["--cache", "/nonexistent"], &[], 4, "it does not exist");
    refuses(&["--cache", "UUID=12345678-1234-1234-1234-123456789abc"], &[], 4, "no device has UUID=");
    refuses(&["--cache", "UUID=x"], &[], 2, "contains no UUID");
    refuses(&["--export", "dev:0", "--cache", c], &[c], 2, "the kernel names its devices: write only dev");
    if !std::path::Path::new("/dev/ublk-control").exists() {
        refuses(&["--export", "ublk", "--cache", c], &[c], 4, "load the module (modprobe ublk_drv");
    }
    refuses(&["--export", "nbd:8.8.8.8:1", "--cache", c], &[c], 2, "not a loopback address");
    refuses(&["--stop-timeout", "soon", "--cache", c], &[c], 2, "is not a time");
    refuses(&["--config", "/nonexistent", "--cache", c], &[c], 2, "both a configuration and devices");
    refuses(&["--config", "/nonexistent"], &[], 2, "cannot read the configuration");

    let short = images.blank("short", 0);
    std::fs::write(&short, &bytes(c)[..4 << 20]).expect("a shorter copy");
    refuses(&["--cache", &short], &[&short], 4, "the device is too small");
    std::fs::write(&short, &bytes(c)[..5000]).expect("a much shorter copy");
    refuses(&["--cache", &short], &[&short], 2, "it has no bcache superblock");

    let damaged = images.blank("damaged", 0);
    std::fs::copy(c, &damaged).expect("a copy");
    patch(&damaged, 4096 + 200, &[9]);
    refuses(&["--cache", &damaged], &[&damaged], 4, "bad checksum");
    std::fs::copy(c, &damaged).expect("a copy");
    patch(&damaged, 4096 + 24, &[0xc7]);
    refuses(&["--cache", &damaged], &[&damaged], 4, "the magic number is damaged");
    for command in [["serve", "--cache"].as_slice(), &["make", "--cache"], &["doctor"], &["check"], &["scan"]]
    {
        let ran = bcached(&[command, &[&damaged]].concat());
        let said = format!("{}{}", ran.out, ran.err);
        assert!(said.contains("the magic number is damaged") && !said.contains("`bcached make`"), "{said}");
    }
    std::fs::copy(c, &damaged).expect("a copy");
    reseal(&damaged, 16, 9);
    refuses(&["--cache", &damaged], &[&damaged], 4, "unsupported superblock version 9");
}

#[test]
fn a_backing_device_of_another_set_is_refused() {
    let images = Images::new();
    let (_, backing) = set(&images);
    let other = images.blank("other", CACHE_BYTES);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &other]).exit, 0);
    // Started once, so that opening it again writes little; the test checks only the backing
    // device.
    Daemon::start(&images, &["--cache", &other]).stop();
    for (state, name) in [(common::CLEAN, "clean"), (common::DIRTY, "dirty"), (common::STALE, "stale")] {
        reseal(&backing, common::STATE, state);
        refuses(&["--cache", &other, "--backing", &backing], &[&backing], 3, "nothing overrides this");
        match name {
            "dirty" => {
                refuses(&["--backing", &backing], &[&backing], 3, "its newest data is in the cache set");
            }
            "clean" => refuses(&["--backing", &backing], &[&backing], 3, "it belongs to the cache set"),
            _ => {}
        }
    }
}

#[test]
fn blocks_that_do_not_fit_say_which_option_mends_it() {
    let images = Images::new();
    let (cache, backing) = (images.blank("cache", CACHE_BYTES), images.blank("backing", BACKING_BYTES));
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &cache]).exit, 0);
    assert_eq!(bcached(&["make", "-w", "512", "-B", &backing]).exit, 0);
    let both = [cache.as_str(), &backing];
    refuses(&["--cache", &cache, "--backing", &backing], &both, 2, "bcached make --for");
}

/// A regression: each of these was refused after the cache had been initialised, and the good
/// backing device attached to it.
#[test]
fn a_refused_command_line_has_written_to_no_device() {
    let images = Images::new();
    let (cache, backing) = set(&images);
    let (elsewhere, small) = (images.blank("elsewhere", BACKING_BYTES), images.blank("small", BACKING_BYTES));
    assert_eq!(bcached(&["make", "-B", &elsewhere]).exit, 0);
    reseal(&elsewhere, common::STATE, common::CLEAN);
    assert_eq!(bcached(&["make", "-w", "512", "-B", &small]).exit, 0);
    let (link, copy, twin) = (images.path("link"), images.path("copy"), images.path("twin"));
    std::os::unix::fs::symlink(&backing, &link).expect("a link");
    std::fs::copy(&backing, &copy).expect("a copy");
    std::fs::copy(&cache, &twin).expect("a copy");
    let [link, copy, twin] = [&link, &copy, &twin].map(|path| path.to_str().expect("text"));
    let all = [cache.as_str(), &backing, &elsewhere, &small, copy, twin];
    let refuses_second = |option, second, exit, sentence| {
        refuses(&["--cache", &cache, "--backing", &backing, option, second], &all, exit, sentence);
    };
    refuses_second("--backing", link, 3, "this process has opened it already, perhaps by another path");
    refuses_second("--backing", copy, 3, "one is a copy of the other");
    refuses_second("--backing", &elsewhere, 3, "the backing device is attached to another cache set");
    refuses_second("--backing", &small, 2, "bcached make --for");
    refuses_second("--cache", twin, 3, "one is a copy of the other");
    reseal(&elsewhere, common::STATE, common::DIRTY);
    refuses_second("--backing", &elsewhere, 3, "the backing device has dirty data in another cache set");
    let other = images.blank("other", CACHE_BYTES);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &other]).exit, 0);
    let two = ["--cache", &cache, "--cache", &other, "--backing", &elsewhere];
    refuses(&two, &[&cache, &other, &elsewhere], 3, "it belongs to the cache set");
}

#[test]
fn a_missing_device_is_waited_for_and_taken_up_when_it_comes() {
    let images = Images::new();
    let (cache, backing) = set(&images);
    let later = images.path("later");
    std::fs::rename(&backing, &later).expect("out of sight");
    let config = images.path("config.toml");
    let text = format!(
        "version = 1\n[cache.fast]\ndevice = {cache:?}\n[volume.slow]\nbacking = {backing:?}\nwait = \"1s\"\n\
         cache_mode = \"writearound\"\n"
    );
    std::fs::write(&config, &text).expect("a file");
    let daemon = Daemon::start(&images, &["--config", config.to_str().expect("text")]);
    let status = bcached(&["status", "--control", daemon.control()]);
    assert_eq!(status.exit, 1, "not as configured: {status:?}");
    assert!(status.out.contains("volume slow: waiting"), "{status:?}");
    std::fs::rename(&later, &backing).expect("back");
    daemon.wait_for("slow is served", |status| status["volumes"][0]["state"] == "served");
    assert_eq!(daemon.status()["volumes"][0]["cache_mode"], "writearound");
    assert_eq!(bcached(&["status", "--control", daemon.control(), "slow"]).exit, 0);
    let unknown = bcached(&["status", "--control", daemon.control(), "other"]);
    assert_eq!((unknown.exit, unknown.err.contains("there are: fast, slow")), (2, true), "{unknown:?}");

    let more = images.blank("more", BACKING_BYTES);
    assert_eq!(bcached(&["make", "-B", &more]).exit, 0);
    let text = text.replace("writearound", "writethrough") + &format!("[volume.more]\nbacking = {more:?}\n");
    std::fs::write(&config, "version = 1\nnonsense\n").expect("a file");
    daemon.signal(Signal::HUP);
    let refused = |daemon: &Daemon| daemon.log().contains("reload-refused");
    daemon.wait_for("the bad file is refused", |_| refused(&daemon));
    std::fs::write(&config, &text).expect("a file");
    daemon.signal(Signal::HUP);
    daemon.wait_for("more is served", |status| status["volumes"][1]["state"] == "served");
    daemon.wait_for("the mode", |status| status["volumes"][0]["cache_mode"] == "writethrough");
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
    assert_eq!(json(&bcached(&["show", "--json", &backing]).out)["backing"]["cache_mode"], "writethrough");
}

#[test]
fn one_bad_volume_stops_no_other() {
    let images = Images::new();
    let (cache, backing) = set(&images);
    let bad = images.blank("bad", BACKING_BYTES);
    let config = images.path("config.toml");
    let text = format!(
        "version = 1\n[cache.fast]\ndevice = {cache:?}\n[volume.bad]\nbacking = {bad:?}\n\
         [volume.good]\nbacking = {backing:?}\n"
    );
    std::fs::write(&config, text).expect("a file");
    let daemon = Daemon::start(&images, &["--config", config.to_str().expect("text")]);
    let status = daemon.status();
    assert_eq!(status["volumes"][0]["state"], "failed", "{status}");
    assert!(status["volumes"][0]["reason"].as_str().is_some_and(|why| why.contains("no bcache superblock")));
    assert_eq!(status["volumes"][1]["state"], "served", "{status}");
    assert!(bytes(&bad).iter().all(|byte| *byte == 0), "nothing is written");
}

#[test]
fn nobody_answers_without_a_daemon() {
    let images = Images::new();
    let nobody = images.path("nobody.sock");
    let nobody = nobody.to_str().expect("text");
    let ran = bcached(&["status", "--control", nobody]);
    assert_eq!((ran.exit, ran.err.contains("no daemon answers")), (5, true), "{ran:?}");
    let left_over = std::os::unix::net::UnixListener::bind(nobody).expect("a socket");
    drop(left_over);
    let ran = bcached(&["--json", "status", "--control", nobody]);
    assert_eq!((ran.exit, json(&ran.err)["error"]["kind"].as_str()), (5, Some("no-daemon")));
}

#[test]
fn doctor_and_check_judge_devices() {
    let images = Images::new();
    let (cache, backing) = set(&images);
    let blank = images.blank("blank", 20 << 20);
    let ran = bcached(&["doctor", "--json", &cache, &backing]);
    assert_eq!(ran.exit, 0, "{ran:?}");
    let examined = json(&ran.out);
    assert_eq!(examined["devices"][0]["fit"], true);
    assert!(
        examined["machine"].as_array().is_some_and(|items| items.iter().any(|i| i["name"] == "io_uring"))
    );
    assert_eq!(bcached(&["doctor", &blank]).exit, 2);
    assert_eq!(bcached(&["check", &blank]).exit, 2);
    assert_eq!(bcached(&["dump", &blank]).exit, 2);
    assert_eq!(bcached(&["dump", &backing]).exit, 2);
    assert_eq!(bcached(&["check", &backing]).exit, 0);
    let never = bcached(&["check", &cache]);
    assert_eq!((never.exit, never.out.contains("never started")), (0, true), "{never:?}");
    Daemon::start(&images, &["--cache", &cache, "--backing", &backing]).stop();
    assert_eq!(bcached(&["check", &cache, "--backing", &backing]).exit, 0);
    let dumped = bcached(&["dump", "--json", &cache, "uuids"]);
    assert_eq!(dumped.exit, 0, "{dumped:?}");
    let mut lines = dumped.out.lines();
    assert_eq!(json(lines.next().expect("a header"))["schema"], "bcached.dump");
    assert_eq!(json(lines.next().expect("a slot"))["label"], "tank");
    // The journal starts at the first bucket: the magic of its entries is erased, and the set is
    // lost.
    patch(&cache, 64 << 10, &[0; 40 << 10]);
    for bucket in 1..6 {
        patch(&cache, bucket << 16, &[0; 64 << 10]);
    }
    let ran = bcached(&["check", &cache]);
    assert_eq!((ran.exit, ran.out.contains("error: ")), (1, true), "{ran:?}");
    assert_eq!(bcached(&["--json", "check", &cache]).exit, 1);
}

/// A regression: the log said of every note that it was replayed, unless another daemon had run the
/// set since. The two cases were indistinguishable.
#[test]
fn the_log_says_what_became_of_a_note() {
    if !requires("nbdcopy") {
        return;
    }
    let images = Images::new();
    let (fast, tank) = images.pair(CACHE_BYTES, BACKING_BYTES);
    let words = ["--cache", fast.as_str(), "--backing", &tank];
    let daemon = Daemon::start(&images, &words);
    // No journal entry may take over the note's records before the kill: neither after a delay, nor
    // because write-back cleans a batch.
    common::done(&daemon, &["set", &fast, "journal_delay_ms=60000", "--runtime"]);
    common::done(&daemon, &["set", "tank", "writeback_running=0", "--runtime"]);
    let data = images.path("data");
    // Little enough that no bucket must be freed for it, which would write an entry. Work started
    // by the first writes also writes entries, so the test waits until it is over.
    std::fs::write(&data, common::pattern(4096, 1)).expect("a file");
    let mut calm = 0;
    for copies in 1.. {
        assert!(copies < 50, "entries are written without an end: {}", daemon.status());
        let before = daemon.status()["caches"][0]["journal_sequence"].clone();
        let copied = common::run(common::tool("nbdcopy").arg(&data).arg(daemon.uri("tank")));
        assert_eq!(copied.exit, 0, "{copied:?}");
        std::thread::sleep(std::time::Duration::from_millis(200));
        calm = if daemon.status()["caches"][0]["journal_sequence"] == before { calm + 1 } else { 0 };
        if calm == 3 {
            break;
        }
    }
    daemon.kill();
    let is_note = |path: &std::path::PathBuf| path.extension().is_some_and(|extension| extension == "note");
    let files = std::fs::read_dir(images.path("run")).expect("a folder").flatten();
    let note = files.map(|entry| entry.path()).find(is_note).expect("a note");
    let kept = common::bytes(&note);
    let told = |log: &str| log.lines().find(|line| line.contains("event=note-read")).map(str::to_owned);

    let daemon = Daemon::start(&images, &words);
    let line = told(&daemon.log()).expect("a line");
    assert!(line.contains("left by an earlier process: they are replayed"), "{line}");
    assert_eq!(daemon.stop().0, 0);
    // Put back, it is a note of a session that is over.
    std::fs::write(&note, kept).expect("a file");
    let daemon = Daemon::start(&images, &words);
    let line = told(&daemon.log()).expect("a line");
    assert!(line.contains("they are not replayed, because the set has been run since"), "{line}");
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: notes on a disk are as safe, but every write may wait for that disk, and the log
/// did not say so.
#[test]
fn notes_on_a_disk_are_told_of() {
    let images = Images::new();
    let (fast, tank) = images.pair(CACHE_BYTES, BACKING_BYTES);
    let words = ["--cache", fast.as_str(), "--backing", &tank];
    let of_shm = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let mut command = Daemon::command(&images, "run", &words);
    command.env("BCACHED_NOTES", of_shm.path());
    let daemon = Daemon::start_command(&images, command);
    assert!(!daemon.log().contains("event=notes-on-disk"), "{}", daemon.log());
    assert_eq!(daemon.stop().0, 0);
    // Wherever the build directory is, it is on a disk.
    let of_disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let mut command = Daemon::command(&images, "run", &words);
    command.env("BCACHED_NOTES", of_disk.path());
    let daemon = Daemon::start_command(&images, command);
    assert!(daemon.log().contains("event=notes-on-disk"), "{}", daemon.log());
    assert_eq!(daemon.stop().0, 0);
}
