//! A device that answers with I/O errors when the daemon starts is retried. To volumes without
//! dirty data on it, a failing cache counts as missing, and they return to it when it works again.
//! Needs `nbdkit` and `nbdfuse`, which provide a file with errors where a test wants them.

use crate::common::nbdkit::NbdkitFile;
use crate::common::{self, Daemon, Images, bcached, bytes, content, done, fill, json, pattern, requires};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 20 << 20;
const DATA_BYTES: usize = 2 << 20;

/// An image as a file that fails in the byte range given in the file `trouble`.
struct FailingFile {
    served: NbdkitFile,
    trouble: PathBuf,
}

impl FailingFile {
    /// Returns `None` if this machine lacks the tools.
    fn over(images: &Images, image: &str) -> Option<Self> {
        if !requires("nbdcopy") {
            return None;
        }
        let trouble = images.path("trouble");
        let told = trouble.display();
        let fails = format!(
            "if [ -e {told} ]; then read a b < {told}; \
             if [ $4 -lt $b ] && [ $(($4 + $3)) -gt $a ]; then echo EIO a bad place >&2; exit 1; fi; fi"
        );
        let flush = format!("if [ -e {told}-of-flush ]; then echo EIO it drops what it has >&2; exit 1; fi");
        let served = NbdkitFile::scripted(images, "flaky", (image, &fails, "exit 0", &flush))?;
        Some(Self { served, trouble })
    }

    fn file(&self) -> PathBuf {
        self.served.file()
    }

    /// From now on reads and writes of these bytes fail.
    fn fail(&self, from: u64, to: u64) {
        std::fs::write(&self.trouble, format!("{from} {to}\n")).expect("a file");
    }

    /// From now on flushes fail.
    fn fail_flushes(&self) -> PathBuf {
        let told = self.trouble.with_file_name("trouble-of-flush");
        std::fs::write(&told, "").expect("a file");
        told
    }

    fn mend(&self) {
        std::fs::remove_file(&self.trouble).expect("it was there");
    }
}

/// Returns the state in the superblock.
fn state_of(backing: &str) -> String {
    let shown = json(&bcached(&["show", "--json", backing]).out);
    shown["backing"]["state"].as_str().expect("a state").to_owned()
}

#[track_caller]
fn expect(images: &Images, daemon: &Daemon, volume: &str, seed: u8) {
    let found = content(images, daemon, volume);
    assert!(found[..DATA_BYTES] == pattern(DATA_BYTES, seed), "{volume} holds something else");
}

fn states(status: &serde_json::Value) -> [&str; 2] {
    [0, 1].map(|volume| status["volumes"][volume]["state"].as_str().unwrap_or_default())
}

/// All of `pond`'s data and none of `media`'s is dirty in the cache, and the cache fails in this
/// range when the daemon starts.
fn start_with_trouble(from: u64, to: u64) {
    let images = Images::new();
    let fast = images.blank("fast", CACHE_BYTES);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &fast]).exit, 0);
    let [media, pond] = ["media", "pond"].map(|name| images.blank(name, BACKING_BYTES));
    for backing in [&media, &pond] {
        assert_eq!(bcached(&["make", "--writeback", "-B", backing]).exit, 0);
    }
    let configure = |device: &str| {
        images.configure(&format!(
            "version = 1\n[cache.fast]\ndevice = {device:?}\ncongested_read_threshold_us = 0\ncongested_write_threshold_us = 0\n\
             [defaults]\nwait = \"1s\"\nwriteback_running = false\n\
             [volume.media]\nbacking = {media:?}\n[volume.pond]\nbacking = {pond:?}\n"
        ));
    };
    configure(&fast);
    let daemon = Daemon::configured(&images);
    for volume in ["media", "pond"] {
        fill(&images, &daemon, volume, &pattern(DATA_BYTES, 1));
    }
    done(&daemon, &["flush", "media"]);
    done(&daemon, &["wait", "media", "--for", "clean", "--timeout", "30s"]);
    assert_eq!(daemon.stop().0, 0);
    assert_eq!((state_of(&media).as_str(), state_of(&pond).as_str()), ("clean", "dirty"));

    let Some(flaky) = FailingFile::over(&images, &fast) else { return };
    configure(flaky.file().to_str().expect("text"));
    flaky.fail(from, to);
    let before = bytes(&pond);
    let daemon = Daemon::configured(&images);
    let status = daemon.status();
    assert_eq!(states(&status), ["degraded", "waiting"], "{status}\n{}", daemon.log());
    let reason = status["volumes"][0]["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("cannot be read or written: the volume is served without it"), "{reason}");
    let reason = status["volumes"][1]["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("whose device fails"), "{reason}");
    assert_eq!(state_of(&media), "inconsistent", "before anything is written");
    expect(&images, &daemon, "media", 1);
    fill(&images, &daemon, "media", &pattern(DATA_BYTES, 2));
    assert!(bytes(&pond) == before, "its device was written");

    flaky.mend();
    daemon.wait_for("the cache has both", |status| {
        let is_home = |volume: usize| status["volumes"][volume]["cache"] == "fast";
        states(status) == ["served", "served"] && is_home(0) && is_home(1)
    });
    expect(&images, &daemon, "media", 2);
    expect(&images, &daemon, "pond", 1);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
    drop(flaky);
    let check = bcached(&["check", &fast, "--backing", &media, "--backing", &pond]);
    assert_eq!(check.exit, 0, "{check:?}");
}

/// A regression: a dying SSD blocked access to data all of which was on the disk, unlike a missing
/// SSD.
#[test]
fn clean_volumes_go_without_a_cache_whose_superblock_cannot_be_read() {
    start_with_trouble(4096, 8192);
}

/// The device answers, but everything after its superblock is unreadable: the journal, and all that
/// follows.
#[test]
fn clean_volumes_go_without_a_cache_whose_journal_cannot_be_read() {
    start_with_trouble(64 << 10, CACHE_BYTES);
}

/// A regression: a second of errors left a volume failed until it was removed and added; a cache
/// was retried.
#[test]
fn a_backing_device_that_fails_at_the_start_is_tried_again() {
    let images = Images::new();
    let (fast, tank) = images.pair(CACHE_BYTES, BACKING_BYTES);
    let Some(flaky) = FailingFile::over(&images, &tank) else { return };
    let ill = flaky.file();
    images.configure(&format!(
        "version = 1\n[cache.fast]\ndevice = {fast:?}\n[volume.tank]\nbacking = {ill:?}\nwait = \"5m\"\n"
    ));
    flaky.fail(0, BACKING_BYTES);
    // The start does not wait for it: `wait` is longer than this may take.
    let daemon = Daemon::configured(&images);
    let status = daemon.status();
    let (state, reason) = (&status["volumes"][0]["state"], status["volumes"][0]["reason"].as_str());
    assert_eq!(state, "waiting", "{status}\n{}", daemon.log());
    assert!(
        reason.is_some_and(|reason| reason.contains("bcached tries again, at growing intervals")),
        "{status}"
    );
    let log = daemon.log();
    assert_eq!(
        (log.matches("event=volume-waits").count(), log.contains("volume-failed")),
        (1, false),
        "{log}"
    );
    flaky.mend();
    daemon.wait_for("it is served", |status| status["volumes"][0]["state"] == "served");
    fill(&images, &daemon, "tank", &pattern(DATA_BYTES, 3));
    expect(&images, &daemon, "tank", 3);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

/// A small file system in memory, unmounted at the end.
struct MemoryMount(PathBuf);

impl MemoryMount {
    /// Returns `None` if this machine cannot mount one.
    fn new(images: &Images) -> Option<Self> {
        let place = images.path("memory");
        std::fs::create_dir(&place).expect("a folder");
        let mut mount = common::tool("mount");
        let mounted = common::run(mount.args(["-t", "tmpfs", "-o", "size=8m,mode=0755", "none"]).arg(&place));
        if mounted.exit != 0 {
            println!("skipped: nothing can be mounted here: {}", mounted.err.trim());
            return None;
        }
        Some(Self(place))
    }
}

impl Drop for MemoryMount {
    fn drop(&mut self) {
        let _not_mounted = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A regression: a cache without space for its note stayed failed until the next start, and only
/// `wait` said so.
#[test]
fn a_cache_without_room_for_its_note_is_tried_again() {
    let images = Images::new();
    let (fast, tank) = images.pair(CACHE_BYTES, BACKING_BYTES);
    let Some(memory) = MemoryMount::new(&images) else { return };
    let filler = memory.0.join("filler");
    std::fs::write(&filler, vec![1; 6 << 20]).expect("room for it");
    images.configure(&format!(
        "version = 1\n[cache.fast]\ndevice = {fast:?}\n[volume.tank]\nbacking = {tank:?}\nwait = \"0s\"\n"
    ));
    let config = images.path("config.toml");
    let mut command = Daemon::command(&images, "run", &["--config", config.to_str().expect("text")]);
    command.env("BCACHED_NOTES", memory.0.join("notes"));
    let daemon = Daemon::start_command(&images, command);
    daemon.wait_for("it is not given up", |status| {
        status["caches"][0]["state"] == "waiting" && status["volumes"][0]["state"] == "waiting"
    });
    let status = daemon.status();
    let reason = status["caches"][0]["reason"].as_str().unwrap_or_default();
    assert!(
        reason.contains("free space on the note's file system") && reason.contains("bcached tries again"),
        "{reason}"
    );
    daemon.wait_for("the volume says so, too", |status| {
        let reason = status["volumes"][0]["reason"].as_str().unwrap_or_default();
        reason.contains("No space left") && reason.contains("free space on the note's file system")
    });
    assert!(daemon.log().contains("event=cache-waits"), "{}", daemon.log());
    let left = std::fs::read_dir(memory.0.join("notes")).expect("it was made").count();
    assert_eq!(left, 0, "a note without its room is none, and nobody would take it away");
    std::fs::remove_file(&filler).expect("ours");
    daemon.wait_for("it is served", |status| {
        status["volumes"][0]["state"] == "served" && status["volumes"][0]["cache"] == "fast"
    });
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

/// A regression: a running daemon waited for space in a full file system below a cache, but at a
/// start the cache failed for good.
#[test]
fn a_cache_without_room_below_it_is_tried_again() {
    let images = Images::new();
    let (fast, tank) = images.pair(CACHE_BYTES, BACKING_BYTES);
    let Some(memory) = MemoryMount::new(&images) else { return };
    let sparse = memory.0.join("fast");
    let copied = common::run(Command::new("cp").arg("--sparse=always").arg(&fast).arg(&sparse));
    assert_eq!(copied.exit, 0, "{copied:?}");
    let filler = memory.0.join("filler");
    std::fs::write(&filler, vec![1; 9 << 20]).expect_err("it is full");
    images.configure(&format!(
        "version = 1\n[cache.fast]\ndevice = {sparse:?}\n[volume.tank]\nbacking = {tank:?}\nwait = \"0s\"\n"
    ));
    let daemon = Daemon::configured(&images);
    daemon.wait_for("it is not given up", |status| {
        let reason = status["caches"][0]["reason"].as_str().unwrap_or_default();
        status["caches"][0]["state"] == "waiting" && reason.contains("no space left")
    });
    let status = daemon.status();
    let reason = status["caches"][0]["reason"].as_str().unwrap_or_default();
    let said = format!("free space on the file system below {}; bcached tries again", sparse.display());
    assert!(reason.contains(&said), "{reason}");
    std::fs::remove_file(&filler).expect("ours");
    daemon.wait_for("it is served", |status| {
        status["volumes"][0]["state"] == "served" && status["volumes"][0]["cache"] == "fast"
    });
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

/// How long bcached may prepare buckets after the first data of a volume; that flushes as well.
const CALM: Duration = Duration::from_secs(1);

/// A regression: acknowledged writes voided by a failed flush were lost silently. `status` did not
/// say what a restart would lose, nor did the log of the restart say what it had lost. `ends` ends
/// the daemon.
fn what_is_given_up_is_told_before_and_after(ends: impl FnOnce(Daemon)) {
    let images = Images::new();
    let (fast, tank) = images.pair(CACHE_BYTES, BACKING_BYTES);
    let Some(flaky) = FailingFile::over(&images, &fast) else { return };
    let ill = flaky.file();
    images.configure(&format!(
        "version = 1\n[cache.fast]\ndevice = {ill:?}\ncongested_write_threshold_us = 0\n\
         [volume.tank]\nbacking = {tank:?}\nwait = \"1s\"\nwriteback_running = false\non_cache_error = \"fail\"\n"
    ));
    let daemon = Daemon::configured(&images);
    fill(&images, &daemon, "tank", &pattern(DATA_BYTES, 1));
    std::thread::sleep(CALM);
    let told = flaky.fail_flushes();
    // Acknowledged, and not flushed. The daemon itself flushes soon.
    let data = images.path("data");
    std::fs::write(&data, pattern(64 << 10, 2)).expect("a file");
    let copied = common::run(common::tool("nbdcopy").arg(&data).arg(daemon.uri("tank")));
    assert_eq!(copied.exit, 0, "{copied:?}");
    let lost = "up to 64 KiB of tank (sectors 0 to 128)";
    daemon.wait_for("the cache has stopped writing", |status| {
        let reason = status["caches"][0]["reason"].as_str().unwrap_or_default();
        let means =
            "the next start recovers the set as after a power cut, without writes that were acknowledged and not flushed";
        reason.contains(means) && reason.ends_with(lost)
    });
    ends(daemon);
    std::fs::remove_file(told).expect("ours");

    // A start that fails to open the cache reports nothing, and leaves that to the next one.
    flaky.fail(64 << 10, 128 << 10);
    let daemon = Daemon::configured(&images);
    daemon.wait_for("it is tried again", |status| status["caches"][0]["state"] == "waiting");
    assert!(!daemon.log().contains("writes-given-up"), "{}", daemon.log());
    flaky.mend();
    daemon.wait_for("it is served, and told of", |status| {
        status["volumes"][0]["state"] == "served" && daemon.log().contains("event=writes-given-up")
    });
    let log = daemon.log();
    let given_up: Vec<_> = log.lines().filter(|line| line.contains("event=writes-given-up")).collect();
    assert_eq!(given_up.len(), 1, "{log}");
    assert!(given_up[0].contains("cache fast") && given_up[0].contains("were given up"), "{log}");
    assert!(given_up[0].contains(lost), "{log}");
    let found = content(&images, &daemon, "tank");
    assert!(
        found[..DATA_BYTES] == pattern(DATA_BYTES, 1),
        "what was flushed is there, and what was given up is not"
    );
    assert_eq!(daemon.stop().0, 0);
    let (exit, log) = Daemon::configured(&images).stop();
    assert_eq!((exit, log.contains("writes-given-up")), (0, false), "it is told once: {log}");
}

#[test]
fn what_is_given_up_after_a_failed_flush_is_told_before_and_after() {
    what_is_given_up_is_told_before_and_after(|daemon| daemon.kill());
}

/// A clean stop does not close this set cleanly: it says so, and the next start reports what was
/// lost.
#[test]
fn what_is_given_up_is_told_after_a_stop_too() {
    what_is_given_up_is_told_before_and_after(|daemon| {
        let (exit, log) = daemon.stop();
        assert_ne!(exit, 0, "{log}");
        assert!(
            log.contains(
                "recovers the set as after a power cut, without writes that were acknowledged and not flushed"
            ),
            "{log}"
        );
    });
}
