//! `bcached replace`, as processes: a cache moves to another device under its clients, whatever
//! happens in between. Dirty data in a dead cache keeps it from being replaced.

use crate::common::{
    self, Daemon, FileLock, Images, ask, bcached, bytes, content, done, fill, json, pattern, refused,
    requires, tool,
};
use std::io::{BufRead as _, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

const CACHE_BYTES: u64 = 36 << 20;
/// Longer than a cache: writes past a cache's size can be made to fail without any other effect.
const BACKING_BYTES: u64 = 64 << 20;
const DATA_BYTES: usize = 2 << 20;
const VOLUMES: [&str; 2] = ["media", "pond"];

/// A cache with two volumes in writeback mode, and a blank device.
struct ReplaceFixture {
    images: Images,
    old: String,
    new: String,
}

impl ReplaceFixture {
    fn new() -> Self {
        let images = Images::new();
        let old = images.blank("old", CACHE_BYTES);
        let new = images.blank("new", CACHE_BYTES);
        assert_eq!(bcached(&["make", "-b", "64k", "-C", &old]).exit, 0);
        // On a loaded machine the device would be congested, and writes would bypass it.
        let mut text =
            format!("version = 1\n[cache.fast]\ndevice = {old:?}\ncongested_write_threshold_us = 0\n");
        for volume in VOLUMES {
            let device = images.blank(&format!("{volume}.img"), BACKING_BYTES);
            assert_eq!(bcached(&["make", "--writeback", "--label", volume, "-B", &device]).exit, 0);
            text += &format!("[volume.{volume}]\nbacking = {device:?}\nwriteback_running = false\n");
        }
        images.configure(&text);
        Self { images, old, new }
    }

    fn start(&self) -> Daemon {
        Daemon::configured(&self.images)
    }

    fn kept(&self) -> String {
        self.images.kept()
    }

    fn write(&self, daemon: &Daemon) {
        for (seed, volume) in (1..).zip(VOLUMES) {
            fill(&self.images, daemon, volume, &pattern(DATA_BYTES, seed));
        }
    }

    #[track_caller]
    fn expect(&self, daemon: &Daemon) {
        for (seed, volume) in (1..).zip(VOLUMES) {
            let found = content(&self.images, daemon, volume);
            assert!(found[..DATA_BYTES] == pattern(DATA_BYTES, seed), "{volume} holds something else");
        }
    }

    /// Some data of one volume cannot be written back: its device fails writes there.
    fn hold_back(&self, daemon: &Daemon, seed: u8) {
        let write = format!("write -P {seed} 60M 64k");
        let ran = common::run(tool("qemu-io").args(["-f", "raw", "-c", &write, &daemon.uri("media")]));
        assert!(ran.out.contains("wrote 65536/65536"), "{ran:?}");
        daemon.fail_writes_beyond(40 << 20);
    }

    /// Nothing on the old device is used any more: it is blank from now on.
    fn old_is_gone(&self) {
        std::fs::write(&self.old, vec![0; 1 << 20]).expect("a file");
    }
}

/// A client that stays connected.
struct ReplaceClient {
    child: Child,
    asks: ChildStdin,
    answers: std::io::Lines<std::io::BufReader<ChildStdout>>,
}

impl ReplaceClient {
    fn connect(daemon: &Daemon, volume: &str) -> Self {
        let mut child = tool("qemu-io")
            .args(["-f", "raw", &daemon.uri(volume)])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let (asks, answers) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        Self { child, asks, answers: std::io::BufReader::new(answers).lines() }
    }

    #[track_caller]
    fn ask(&mut self, asked: &str, answer: &str) {
        writeln!(self.asks, "{asked}").expect("it listens");
        let line = self.answers.find(|line| !line.as_ref().is_ok_and(|line| line.contains("ops/sec")));
        let line = line.expect("it answers").expect("text");
        assert!(line.trim_start_matches("qemu-io> ").starts_with(answer), "{asked}: {line}");
    }

    fn leave(mut self) {
        drop(self.asks);
        assert!(self.child.wait().expect("ends").success());
    }
}

fn caches(daemon: &Daemon) -> Vec<(String, String)> {
    let status = daemon.status();
    let caches = status["caches"].as_array().cloned().unwrap_or_default();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    caches.iter().map(|cache| (text(&cache["name"]), text(&cache["device"]))).collect()
}

/// The old SSD wears out: everything moves to a new one, and clients notice nothing.
#[test]
fn a_cache_is_replaced_under_its_clients() {
    if !requires("nbdcopy") || !requires("qemu-io") {
        return;
    }
    let site = ReplaceFixture::new();
    let daemon = site.start();
    site.write(&daemon);
    let mut client = ReplaceClient::connect(&daemon, "media");
    client.ask("write -P 7 4M 64k", "wrote 65536/65536");
    let planned = done(&daemon, &["replace", "fast", "--with", &site.new, "--dry-run"]);
    // Some of the 4 MiB may have been written back by now.
    assert!(
        planned.starts_with("fast: ") && planned.contains(" MiB would be written back, then"),
        "{planned}"
    );
    assert!(bytes(&site.new).iter().all(|byte| *byte == 0) && site.kept().is_empty(), "nothing was done");

    let replaced = done(&daemon, &["replace", "fast", "--with", &site.new]);
    assert!(replaced.starts_with("fast: replaced: "), "{replaced}");
    assert_eq!(caches(&daemon), [("fast".to_owned(), site.new.clone())]);
    client.ask("read -P 7 4M 64k", "read 65536/65536");
    client.ask("write -P 8 4M 64k", "wrote 65536/65536");
    for volume in daemon.status()["volumes"].as_array().expect("volumes") {
        assert_eq!((volume["cache"].as_str(), volume["attached"].as_bool()), (Some("fast"), Some(true)));
    }
    let again = json(&done(&daemon, &["replace", "fast", "--with", &site.new, "--json"]));
    assert_eq!(again["already"].as_bool(), Some(true), "{again}");
    client.leave();
    // What is no longer in use is free for other programs: the empty set that the old device still
    // is, and then a blank device.
    let left = bcached(&["check", &site.old]);
    assert!(left.exit == 0 && !left.out.contains("dirty of"), "{left:?}");
    site.old_is_gone();
    assert_eq!(daemon.stop().0, 0);

    let daemon = site.start();
    assert!(!site.kept().contains("former") && site.kept().contains(&site.new), "{}", site.kept());
    assert!(daemon.log().contains("event=cache-moved"), "a file still names the old one: {}", daemon.log());
    site.expect(&daemon);
    assert_eq!(caches(&daemon), [("fast".to_owned(), site.new)]);
    assert_eq!(daemon.stop().0, 0);
}

/// If the daemon is killed in the middle, the next one serves every volume from where it is, and
/// continues the replacement.
#[test]
fn a_replacement_goes_on_after_a_kill_and_can_be_cancelled() {
    if !requires("nbdcopy") || !requires("qemu-io") {
        return;
    }
    let site = ReplaceFixture::new();
    let daemon = site.start();
    site.write(&daemon);
    site.hold_back(&daemon, 7);
    let begun = json(&done(&daemon, &["replace", "fast", "--with", &site.new, "--no-wait", "--json"]));
    let joined = json(&done(&daemon, &["replace", "fast", "--with", &site.new, "--no-wait", "--json"]));
    assert_eq!(
        (begun["id"].as_u64().is_some(), joined["id"].as_u64()),
        (true, begun["id"].as_u64()),
        "the same one"
    );
    let third = site.images.blank("third", CACHE_BYTES);
    refused(&daemon, &["replace", "fast", "--with", &third], 3, "its volumes are already moving to");
    // Volumes begin to leave when the new cache is open.
    daemon.wait_for("media leaves", |status| {
        status["jobs"].as_array().is_some_and(|jobs| jobs.iter().any(|job| job["volume"] == "media"))
    });
    refused(&daemon, &["flush", "media"], 3, "its replace is still running (job ");
    let late = ask(&daemon, &["replace", "fast", "--with", &site.new, "--timeout", "1s"]);
    assert_eq!((late.exit, late.err.contains("`bcached cancel ")), (6, true), "{late:?}");
    let listed = daemon.status();
    assert_eq!(caches(&daemon).len(), 2, "{listed}");
    daemon.kill();

    let daemon = site.start();
    daemon
        .wait_for("it goes on", |status| status["caches"].as_array().is_some_and(|caches| caches.len() == 1));
    site.old_is_gone();
    site.expect(&daemon);
    assert!(!site.kept().contains("former"), "{}", site.kept());

    // A cancelled replacement is not resumed automatically; the same command completes it.
    site.hold_back(&daemon, 8);
    let begun = json(&done(&daemon, &["replace", "fast", "--with", &third, "--no-wait", "--json"]));
    let cancelled = done(&daemon, &["cancel", &begun["id"].to_string()]);
    assert!(cancelled.contains("replace was cancelled"), "{cancelled}");
    assert_eq!(daemon.stop().0, 0);
    let daemon = site.start();
    site.expect(&daemon);
    assert!(daemon.status()["jobs"].as_array().is_none_or(Vec::is_empty), "{}", daemon.status());
    assert_eq!(caches(&daemon).len(), 2, "both are in use");
    done(&daemon, &["replace", "fast", "--with", &third]);
    std::fs::write(&site.new, vec![0; 1 << 20]).expect("a file");
    site.expect(&daemon);
    assert_eq!(daemon.stop().0, 0);
    let daemon = site.start();
    site.expect(&daemon);
    let ran =
        common::run(tool("qemu-io").args(["-f", "raw", "-c", "read -P 8 60M 64k", &daemon.uri("media")]));
    assert!(ran.out.contains("read 65536/65536"), "{ran:?}");
    assert_eq!(daemon.stop().0, 0);
}

/// The old cache is dead. Clean volumes lose nothing; a replacement that would lose data is
/// refused.
#[test]
fn a_dead_cache_is_replaced_if_nothing_was_dirty_in_it() {
    if !requires("nbdcopy") {
        return;
    }
    let site = ReplaceFixture::new();
    let daemon = site.start();
    site.write(&daemon);
    done(&daemon, &["flush", "pond"]);
    assert_eq!(daemon.stop().0, 0);
    let keep = bytes(&site.old);
    std::fs::remove_file(&site.old).expect("ours");

    let text = std::fs::read_to_string(site.images.path("config.toml")).expect("text");
    std::fs::write(
        site.images.path("config.toml"),
        text.replace("writeback_running", "wait = \"0s\"\nwriteback_running"),
    )
    .expect("a file");
    let daemon = site.start();
    let ran = ask(&daemon, &["replace", "fast", "--with", &site.new]);
    assert_eq!((ran.exit, ran.err.contains("the newest data of media is in it")), (3, true), "{ran:?}");
    assert!(ran.err.contains("forget") && bytes(&site.new).iter().all(|byte| *byte == 0), "{ran:?}");
    assert_eq!(daemon.stop().0, 0);

    std::fs::write(&site.old, keep).expect("a file");
    let daemon = site.start();
    done(&daemon, &["wait", "media", "--for", "served"]);
    done(&daemon, &["flush", "media"]);
    assert_eq!(daemon.stop().0, 0);
    std::fs::remove_file(&site.old).expect("ours");
    let daemon = site.start();
    done(&daemon, &["replace", "fast", "--with", &site.new]);
    for volume in VOLUMES {
        done(&daemon, &["wait", volume, "--for", "served", "--timeout", "30s"]);
    }
    site.expect(&daemon);
    // Until the new cache is open they are served without one.
    daemon.wait_for("they come to it", |status| {
        let volumes = status["volumes"].as_array().expect("volumes");
        volumes.iter().all(|volume| volume["cache"] == "fast")
    });
    site.expect(&daemon);
    assert_eq!(daemon.stop().0, 0);
}

/// Refused commands change nothing.
#[test]
fn what_cannot_be_replaced_is_refused() {
    let site = ReplaceFixture::new();
    let daemon = site.start();
    let with =
        |device: &str| vec!["replace".to_owned(), "fast".to_owned(), "--with".to_owned(), device.to_owned()];
    let refuse = |device: &str, exit: i32, sentence: &str| {
        let words = with(device);
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        refused(&daemon, &words, exit, sentence);
    };
    refused(&daemon, &["replace", "slow", "--with", &site.new], 2, "no cache is called `slow`");
    refuse("/nowhere/at/all", 4, "/nowhere/at/all");
    refuse(&site.images.blank("small", 1 << 20), 2, "it is too small");
    let media = site.images.path("media.img");
    refuse(media.to_str().expect("text"), 3, "it is the device of media already");
    let swap = site.images.blank("swap", CACHE_BYTES);
    common::patch(&swap, 4086, b"SWAPSPACE2");
    refuse(&swap, 3, "--wipe-signature=swap");
    let other = site.images.blank("other", CACHE_BYTES);
    assert_eq!(bcached(&["make", "-b", "64k", "-B", &other]).exit, 0);
    refuse(&other, 3, "--wipe-bcache");
    done(&daemon, &["add", "swapped", "--size", "1M"]);
    refuse(&site.new, 3, "is in it: there is no backing device that its data could go to");
    done(&daemon, &["remove", "swapped"]);
    refuse(&site.new, 3, "is in it: there is no backing device that its data could go to");
    done(&daemon, &["forget", "swapped", "--accept-loss", "1M"]);
    assert!(
        !site.kept().contains("former") && bytes(&site.new).iter().all(|byte| *byte == 0),
        "{}",
        site.kept()
    );
    // A cache made with a custom geometry is used unchanged.
    assert_eq!(bcached(&["make", "-b", "32k", "-C", &site.new]).exit, 0);
    let set = json(&bcached(&["show", "--json", &site.new]).out);
    done(&daemon, &["replace", "fast", "--with", &site.new]);
    let found = daemon.status()["caches"][0].clone();
    assert_eq!(found["bucket_bytes"].as_u64(), Some(32 << 10), "{found} {set}");
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

/// A volume that has left the dead cache is marked so, or has no mark at all: both join the new
/// one.
#[test]
fn a_volume_that_has_left_a_dead_cache_comes_to_the_new_one() {
    let site = ReplaceFixture::new();
    let daemon = site.start();
    assert_eq!(daemon.stop().0, 0);
    // As a set that fails under a clean volume leaves it.
    let pond = site.images.path("pond.img");
    common::reseal(pond.to_str().expect("text"), common::STATE, common::STALE);
    std::fs::remove_file(&site.old).expect("ours");
    let daemon = site.start();
    done(&daemon, &["replace", "fast", "--with", &site.new]);
    for volume in VOLUMES {
        done(&daemon, &["wait", volume, "--for", "served", "--timeout", "30s"]);
    }
    assert_eq!(daemon.stop().0, 0);
}

/// With several caches no section says what is in which one: any dirty volume keeps the dead cache
/// from being replaced.
#[test]
fn a_dead_cache_is_not_replaced_while_anything_may_be_dirty_in_it() {
    if !requires("nbdcopy") {
        return;
    }
    let site = ReplaceFixture::new();
    let other = site.images.blank("other", CACHE_BYTES);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &other]).exit, 0);
    let path = site.images.path("config.toml");
    let text = std::fs::read_to_string(&path).expect("text") + &format!("[cache.slow]\ndevice = {other:?}\n");
    let one = text.replace("[volume.media]\n", "[volume.media]\ncache = \"fast\"\nwait = \"1s\"\n");
    let one = one.replace("[volume.pond]\n", "[volume.pond]\ncache = \"fast\"\nwait = \"1s\"\n");
    std::fs::write(&path, &one).expect("a file");
    let daemon = site.start();
    fill(&site.images, &daemon, "pond", &pattern(DATA_BYTES, 2));
    assert_eq!(daemon.stop().0, 0);
    let keep = bytes(&site.old);

    std::fs::remove_file(&site.old).expect("ours");
    for said in ["", "cache = \"none\"\n"] {
        let without = one.replace("[volume.pond]\ncache = \"fast\"\n", &format!("[volume.pond]\n{said}"));
        std::fs::write(&path, &without).expect("a file");
        let daemon = site.start();
        refused(&daemon, &["replace", "fast", "--with", &site.new], 3, "the newest data of pond is in it");
        assert!(bytes(&site.new).iter().all(|byte| *byte == 0), "nothing was done");
        assert_eq!(daemon.stop().0, 0);
    }

    // Clean, and of no named cache: it would not be served afterwards.
    std::fs::write(&site.old, keep).expect("a file");
    std::fs::write(&path, &one).expect("a file");
    let daemon = site.start();
    done(&daemon, &["flush", "pond"]);
    assert_eq!(daemon.stop().0, 0);
    std::fs::remove_file(&site.old).expect("ours");
    std::fs::write(&path, one.replace("[volume.pond]\ncache = \"fast\"\n", "[volume.pond]\n"))
        .expect("a file");
    let daemon = site.start();
    refused(&daemon, &["replace", "fast", "--with", &site.new], 2, "its section names no cache");
    assert_eq!(daemon.stop().0, 0);
}

/// The device is written only after all else has been checked.
#[test]
fn a_refused_replacement_leaves_the_new_device_as_it_is() {
    let site = ReplaceFixture::new();
    let daemon = site.start();
    std::fs::create_dir_all(site.images.path("config.d")).expect("a folder");
    let file = site.images.path("config.d/99-set.toml");
    std::fs::write(&file, "# mine\n").expect("a file");
    refused(&daemon, &["replace", "fast", "--with", &site.new], 2, "it was not made by");
    refused(&daemon, &["replace", "fast", "--with", &site.new, "--dry-run"], 2, "it was not made by");
    assert!(bytes(&site.new).iter().all(|byte| *byte == 0), "it was written");
    std::fs::remove_file(&file).expect("ours");

    let set = json(&bcached(&["show", "--json", &site.old]).out)["set_uuid"].clone();
    let set = set.as_str().expect("a uuid");
    assert_eq!(bcached(&["make", "-b", "64k", "--cset-uuid", set, "-C", &site.new]).exit, 0);
    refused(&daemon, &["replace", "fast", "--with", &site.new], 3, "the UUID of a set that is in use");
    assert!(!site.kept().contains("former"), "{}", site.kept());
    assert_eq!(daemon.stop().0, 0);
}

/// With several caches, a volume that briefly belongs to none is identified by its section.
#[test]
fn volumes_that_name_no_cache_are_named_before_they_leave() {
    let site = ReplaceFixture::new();
    let other = site.images.blank("other", CACHE_BYTES);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &other]).exit, 0);
    let daemon = site.start();
    assert_eq!(daemon.stop().0, 0);
    let path = site.images.path("config.toml");
    let text = std::fs::read_to_string(&path).expect("text") + &format!("[cache.slow]\ndevice = {other:?}\n");
    std::fs::write(&path, text).expect("a file");
    let daemon = site.start();
    done(&daemon, &["replace", "fast", "--with", &site.new]);
    assert_eq!(site.kept().matches("cache = \"fast\"").count(), 2, "{}", site.kept());
    assert_eq!(daemon.stop().0, 0);
}

/// The old cache fails during the replacement, with data that exists nowhere else. The volume must
/// not be given to another set, or it could not be served. It stays, the job says why, and it moves
/// when the old cache works again.
#[test]
fn a_volume_with_dirty_data_stays_with_a_former_cache_that_has_failed() {
    if !requires("nbdcopy") || !requires("qemu-io") {
        return;
    }
    let site = ReplaceFixture::new();
    site.images.configure_wait("1s");
    let daemon = site.start();
    site.write(&daemon);
    site.hold_back(&daemon, 7);
    done(&daemon, &["replace", "fast", "--with", &site.new, "--no-wait"]);
    let volume = |status: &serde_json::Value, name: &str| {
        let volumes = status["volumes"].as_array().cloned().unwrap_or_default();
        volumes.into_iter().find(|volume| volume["name"] == name).unwrap_or_default()
    };
    daemon.wait_for("the other has gone", |status| {
        let pond = volume(status, "pond");
        pond["cache"] == "fast" && pond["attached"] == true
    });
    daemon.kill();

    // The replacement continues when the new device is available; until then the old one serves.
    let new = FileLock::new(&site.new);
    let daemon = site.start();
    daemon.wait_for("it is served", |status| volume(status, "media")["state"] == "served");
    done(&daemon, &["set", "media", "on_cache_error=fail", "--runtime"]);
    let mended = site.images.path("mended");
    std::fs::copy(&site.old, &mended).expect("a copy");
    let file = std::fs::File::options().write(true).open(&site.old);
    file.and_then(|file| file.set_len(1 << 20)).expect("cut");
    let change = ["-f", "raw", "-c", "discard 1M 64k", "-c", "flush", &daemon.uri("media")];
    let _it_fails = common::run(tool("qemu-io").args(change));
    daemon.wait_for("it has failed", |_| daemon.log().contains("event=cache-stopped-writing"));
    let dirty = volume(&daemon.status(), "media")["dirty_bytes"].clone();
    drop(new);
    daemon.wait_for("it says why", |status| {
        let jobs = status["jobs"].as_array().cloned().unwrap_or_default();
        jobs.iter().any(|job| job["blocked_by"] == "media has dirty data in a cache that has failed")
    });
    let media = volume(&daemon.status(), "media");
    let found = (media["state"].as_str(), media["cache"].as_str(), media["attached"].as_bool());
    assert_eq!(found, (Some("degraded"), Some("fast (former)"), Some(true)), "{media}");
    assert!(media["dirty_bytes"] == dirty && dirty != 0, "{media}");
    daemon.kill();
    std::fs::rename(&mended, &site.old).expect("it is back");

    let daemon = site.start();
    daemon
        .wait_for("it goes on", |status| status["caches"].as_array().is_some_and(|caches| caches.len() == 1));
    site.old_is_gone();
    site.expect(&daemon);
    let read = ["-f", "raw", "-c", "read -P 7 60M 64k", &daemon.uri("media")];
    let ran = common::run(tool("qemu-io").args(read));
    assert!(ran.out.contains("read 65536/65536"), "{ran:?}");
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: the job reported success before a volume had joined the new device. Users who
/// relied on that stopped the daemon, or removed the disk.
#[test]
fn a_dead_cache_is_replaced_when_its_volumes_are_on_the_new_device() {
    if !requires("nbdcopy") {
        return;
    }
    let site = ReplaceFixture::new();
    site.images.configure_wait("1s");
    let daemon = site.start();
    site.write(&daemon);
    VOLUMES.iter().for_each(|volume| drop(done(&daemon, &["flush", volume])));
    assert_eq!(daemon.stop().0, 0);
    std::fs::remove_file(&site.old).expect("ours");
    let daemon = site.start();
    let are = |status: &serde_json::Value, key: &str, value: &serde_json::Value| {
        status["volumes"].as_array().is_some_and(|all| all.iter().all(|volume| volume[key] == *value))
    };
    daemon.wait_for("without it", |status| are(status, "state", &"degraded".into()));
    let planned = done(&daemon, &["replace", "fast", "--with", &site.new, "--dry-run"]);
    assert!(planned.contains("with a UUID that is chosen then"), "{planned}");

    let replaced = done(&daemon, &["replace", "fast", "--with", &site.new]);
    let status = daemon.status();
    assert!(are(&status, "cache", &"fast".into()) && are(&status, "attached", &true.into()), "{status}");
    let set = json(&bcached(&["show", "--json", &site.new]).out)["set_uuid"].clone();
    assert!(
        replaced.contains(&format!("becomes the cache set {}", set.as_str().expect("a set"))),
        "{replaced}"
    );
    let again = json(&done(&daemon, &["replace", "fast", "--with", &site.new, "--json"]));
    assert_eq!(again["already"].as_bool(), Some(true), "{again}");
    assert_eq!(daemon.stop().0, 0);

    // A stop before that does not end it: the next start continues, and the same command waits for
    // it.
    std::fs::remove_file(&site.new).expect("ours");
    let third = site.images.blank("third", CACHE_BYTES);
    let daemon = site.start();
    daemon.wait_for("without it", |status| are(status, "state", &"degraded".into()));
    let begun = json(&done(&daemon, &["replace", "fast", "--with", &third, "--no-wait", "--json"]));
    assert!(begun["id"].as_u64().is_some(), "{begun}");
    assert_eq!(daemon.stop().0, 0);
    let daemon = site.start();
    done(&daemon, &["replace", "fast", "--with", &third]);
    let status = daemon.status();
    assert!(are(&status, "cache", &"fast".into()) && are(&status, "attached", &true.into()), "{status}");
    site.expect(&daemon);
    assert_eq!(daemon.stop().0, 0);
}

/// The command says what it waits for, and can be given up.
#[test]
fn who_waits_for_volumes_of_a_dead_cache_learns_for_which_and_can_give_it_up() {
    let site = ReplaceFixture::new();
    site.images.configure_wait("1s");
    std::fs::remove_file(&site.old).expect("ours");
    let daemon = site.start();
    // Its section says that it may take a while.
    let late = site.images.blank("late", BACKING_BYTES);
    assert_eq!(bcached(&["make", "-B", &late]).exit, 0);
    let held = FileLock::new(&late);
    let config = std::fs::read_to_string(site.images.path("config.toml")).expect("text");
    site.images.configure(&(config + &format!("[volume.late]\nbacking = {late:?}\nwait = \"10m\"\n")));
    daemon.signal(rustix::process::Signal::HUP);
    daemon.wait_for("it is known", |status| status["volumes"].as_array().is_some_and(|all| all.len() == 3));
    let with = ["replace", "fast", "--with", &site.new];
    let begun = json(&done(&daemon, &[&with[..], &["--no-wait", "--json"]].concat()));
    let number = begun["id"].to_string();
    daemon.wait_for("it says why", |status| {
        let blocked = status["jobs"][0]["blocked_by"].as_str().unwrap_or_default();
        blocked.starts_with("late is not served: ")
    });
    let late = ask(&daemon, &[&with[..], &["--timeout", "1s"]].concat());
    assert_eq!((late.exit, late.err.contains("late is not served: ")), (6, true), "{late:?}");
    assert!(late.err.contains(&format!("`bcached cancel {number}`")), "the same work: {late:?}");
    assert!(done(&daemon, &["cancel", &number]).contains("replace was cancelled"));
    drop(held);
    done(&daemon, &with);
    let status = daemon.status();
    let volumes = status["volumes"].as_array().expect("volumes");
    assert!(volumes.iter().all(|volume| volume["cache"] == "fast"), "{status}");
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: for a cache that always had this device, the command waited, and then said that
/// not all of its volumes were on "that".
#[test]
fn a_device_that_the_cache_always_had_is_not_waited_for() {
    let site = ReplaceFixture::new();
    let pond = site.images.path("pond.img");
    site.images.configure_wait("0s");
    std::fs::rename(&pond, site.images.path("away")).expect("out of sight");
    let daemon = site.start();
    daemon.wait_for("it is open", |status| {
        status["caches"][0]["state"] == "open" && status["volumes"][1]["state"] == "waiting"
    });
    for more in [&["--dry-run", "--json"][..], &["--json"]] {
        let words = [&["replace", "fast", "--with", &site.old][..], more].concat();
        let answer = json(&done(&daemon, &words));
        assert_eq!((&answer["already"], &answer["state"]), (&true.into(), &"done".into()), "{answer}");
    }
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: if the old cache had buckets of less than 32 KiB, each new device was called too
/// small, whatever its size.
#[test]
fn a_cache_of_small_buckets_is_replaced_by_another() {
    let images = Images::new();
    let [old, new, tank] = ["old", "new", "tank"].map(|name| images.blank(name, 20 << 20));
    let small = images.blank("small", 4 << 20);
    assert_eq!(bcached(&["make", "-b", "16k", "-C", &old, "-B", &tank]).exit, 0);
    images.configure(&format!(
        "version = 1\n[cache.fast]\ndevice = {old:?}\n[volume.tank]\nbacking = {tank:?}\n"
    ));
    let daemon = Daemon::configured(&images);
    let least =
        "a set needs at least 513 buckets, and the smallest that are chosen automatically have 16 KiB";
    refused(&daemon, &["replace", "fast", "--with", &small, "--dry-run"], 2, least);
    done(&daemon, &["replace", "fast", "--with", &new]);
    let shown = json(&bcached(&["show", "--json", &new]).out);
    assert_eq!(shown["bucket_bytes"], 16 << 10, "{shown}");
    assert_eq!(daemon.stop().0, 0);
}
