//! A backing device that is pulled while its volume is served, and returns as another device, as
//! processes. A truncated file simulates the pulled disk: nothing is read from it or written to it
//! any more. A copy made before that is the disk that returns, under the same name.

mod cache;
mod client;

use crate::common::{
    self, Daemon, Images, bcached, bytes, content, done, fill, flushes, nbdsh, pattern, requires, reseal,
};
use client::ReconnectClient;
use std::process::Stdio;

const DATA_BYTES: usize = 1 << 20;
/// Where the volume begins on its device.
const DATA_OFFSET: usize = 8 << 10;

/// A cache with two volumes in writeback mode without write-back, each on a file.
struct ReconnectFixture {
    images: Images,
}

impl ReconnectFixture {
    /// Requests that need the disk while it is away fail.
    fn failing() -> Self {
        Self::new("on_backing_error = \"fail\"")
    }

    /// With these options.
    fn new(options: &str) -> Self {
        let images = Images::new();
        let fast = images.blank("fast", 36 << 20);
        assert_eq!(bcached(&["make", "-b", "64k", "-C", &fast]).exit, 0);
        let mut text = format!("version = 1\n[cache.fast]\ndevice = {fast:?}\n");
        // The volume that stays is first: it is examined before the other.
        for volume in ["stays", "tank"] {
            let device = images.blank(volume, 20 << 20);
            assert_eq!(bcached(&["make", "--writeback", "--label", volume, "-B", &device]).exit, 0);
            text +=
                &format!("[volume.{volume}]\nbacking = {device:?}\nwriteback_running = false\n{options}\n");
        }
        images.configure(&text);
        Self { images }
    }

    fn file(&self, name: &str) -> String {
        self.images.path(name).to_str().expect("text").to_owned()
    }

    /// Copies the volume's disk as it is now, as the disk that may return.
    fn copy(&self, volume: &str) -> String {
        let copy = self.file(&format!("{volume} elsewhere"));
        std::fs::copy(self.file(volume), &copy).expect("a copy");
        copy
    }

    /// Makes the disk unreachable from now on.
    fn pull(&self, volume: &str) {
        let file = std::fs::File::options().write(true).open(self.file(volume));
        file.and_then(|file| file.set_len(0)).expect("cut");
    }

    /// From now on another disk has its name.
    fn plug(&self, copy: &str, volume: &str) {
        std::fs::rename(copy, self.file(volume)).expect("another file");
    }
}

fn volume(status: &serde_json::Value, name: &str) -> serde_json::Value {
    let volumes = status["volumes"].as_array().expect("a list");
    volumes.iter().find(|volume| volume["name"] == name).expect("it is there").clone()
}

fn wait_for_event(daemon: &Daemon, event: &str) {
    daemon.wait_for(event, |_| daemon.log().contains(&format!("event={event}")));
}

/// Incident F10: after a disk was pulled and put back, its volume failed until it was removed and
/// added again.
#[test]
fn a_backing_device_that_comes_back_is_taken_up_under_its_clients() {
    if !requires("nbdcopy") || !requires("qemu-io") {
        return;
    }
    let site = ReconnectFixture::failing();
    let daemon = Daemon::configured(&site.images);
    let (old, new) = (pattern(DATA_BYTES, 3), pattern(DATA_BYTES, 5));
    fill(&site.images, &daemon, "stays", &old);
    fill(&site.images, &daemon, "tank", &new);
    let mut client = ReconnectClient::connect(&daemon, "tank");
    client.ask("write -P 9 1M 64k", "wrote 65536/65536");
    let copy = site.copy("tank");
    site.pull("tank");
    client.ask("read -P 0 8M 64k", "read failed: Input/output error");
    client.ask("read -P 9 1M 64k", "read 65536/65536");
    client.ask("write -P 7 1M 64k", "wrote 65536/65536");
    daemon.wait_for("it is degraded", |status| volume(status, "tank")["state"] == "degraded");
    // A working device is left alone, whatever its name leads to by now.
    let other = site.copy("stays");
    site.plug(&other, "stays");
    site.plug(&copy, "tank");
    wait_for_event(&daemon, "device-returned");
    daemon.wait_for("both are served", |status| {
        ["stays", "tank"].iter().all(|name| volume(status, name)["state"] == "served")
    });
    assert!(!daemon.log().contains("volume stays: its device"), "{}", daemon.log());
    client.ask("read -P 0 8M 64k", "read 65536/65536");
    client.ask("read -P 7 1M 64k", "read 65536/65536");
    client.ask("write -P 8 2M 64k", "wrote 65536/65536");
    client.leave();

    let dirty = volume(&daemon.status(), "tank")["dirty_bytes"].as_u64();
    assert_eq!(dirty, Some(DATA_BYTES as u64 + (128 << 10)), "{}", daemon.log());
    done(&daemon, &["set", "tank", "writeback_running=true"]);
    done(&daemon, &["flush", "tank"]);
    let found = bytes(site.file("tank"));
    let found = &found[DATA_OFFSET..];
    assert!(found[..DATA_BYTES] == new, "the newest data is on the device that came back");
    assert!(found[DATA_BYTES..DATA_BYTES + (64 << 10)].iter().all(|byte| *byte == 7));
    assert!(found[2 << 20..(2 << 20) + (64 << 10)].iter().all(|byte| *byte == 8));
    assert_eq!(volume(&daemon.status(), "tank")["backing_state"], "clean");
    assert!(content(&site.images, &daemon, "stays")[..DATA_BYTES] == old);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

/// Acknowledged writes that were not flushed may be lost when the disk loses power. The next flush
/// must fail, and not succeed because the new disk has nothing to flush.
#[test]
fn a_flush_fails_for_what_a_pulled_device_may_have_lost() {
    if !requires("nbdcopy") || !requires("qemu-io") || !requires("nbdsh") {
        return;
    }
    let site = ReconnectFixture::failing();
    let daemon = Daemon::configured(&site.images);
    fill(&site.images, &daemon, "tank", &pattern(DATA_BYTES, 5));
    done(&daemon, &["set", "tank", "cache_mode=writearound"]);
    let mut client = ReconnectClient::connect(&daemon, "tank");
    client.ask("write -P 1 4M 64k", "wrote 65536/65536");
    client.ask("write -f -P 1 8M 4k", "wrote 4096/4096");
    let copy = site.copy("tank");
    client.ask("write -P 2 4M 64k", "wrote 65536/65536");
    site.pull("tank");
    client.ask("read -P 0 8M 64k", "read failed");
    site.plug(&copy, "tank");
    wait_for_event(&daemon, "device-returned");
    assert_eq!(daemon.log().matches("event=flush-failed").count(), 1, "{}", daemon.log());
    client.ask("read -P 1 4M 64k", "read 65536/65536");
    client.ask("write -f -P 3 8M 4k", "wrote 4096/4096");
    assert!(!flushes(&daemon, "tank"), "a write that is durable by itself has not said it");
    assert!(flushes(&daemon, "tank"), "it has been said");
    client.leave();
    assert!(content(&site.images, &daemon, "tank")[..DATA_BYTES] == pattern(DATA_BYTES, 5));
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

/// A disk that was used elsewhere in between holds newer data than the cache knows of, or is
/// truncated.
#[test]
fn a_device_that_somebody_else_has_used_is_not_taken_up() {
    if !requires("nbdcopy") || !requires("qemu-io") {
        return;
    }
    let site = ReconnectFixture::failing();
    let daemon = Daemon::configured(&site.images);
    fill(&site.images, &daemon, "tank", &pattern(DATA_BYTES, 5));
    let mut client = ReconnectClient::connect(&daemon, "tank");
    let copies = [(); 3].map(|()| {
        let copy = site.copy("tank");
        let kept = format!("{copy} {}", std::fs::read_dir(site.images.path("")).expect("a folder").count());
        std::fs::rename(&copy, &kept).expect("kept");
        kept
    });
    let [stale, shorter, same] = &copies;
    reseal(stale, common::STATE, common::STALE);
    let file = std::fs::File::options().write(true).open(shorter);
    file.and_then(|file| file.set_len(16 << 20)).expect("cut");
    site.pull("tank");
    client.ask("read -P 0 8M 64k", "read failed");
    let before = bytes(stale);
    for (copy, why) in [(stale, "another program has used it since"), (shorter, "it is shorter than before")]
    {
        site.plug(copy, "tank");
        let wanted = format!("the device is not accepted: {why}");
        daemon.wait_for(why, |status| {
            let reason = volume(status, "tank")["reason"].as_str().unwrap_or_default().to_owned();
            reason.contains(&wanted)
        });
        client.ask("read -P 0 8M 64k", "read failed");
        assert_eq!(volume(&daemon.status(), "tank")["dirty_bytes"], DATA_BYTES);
        if why != "it is shorter than before" {
            assert!(bytes(site.file("tank")) == before, "it was written to");
        }
    }
    assert_eq!(daemon.log().matches("event=device-not-taken").count(), 2, "told once: {}", daemon.log());
    // The reason describes what is there now.
    std::fs::remove_file(site.file("tank")).expect("it is there");
    let reason =
        |status: &serde_json::Value| volume(status, "tank")["reason"].as_str().unwrap_or_default().to_owned();
    daemon.wait_for("nothing is there", |status| !reason(status).contains("it is shorter than before"));
    let says = |sentence: &str| daemon.wait_for(sentence, |status| reason(status).contains(sentence));
    std::fs::write(site.file("tank"), vec![0; 16 << 20]).expect("written");
    says("something else is there now: it has no bcache superblock");
    std::fs::copy(site.file("stays"), site.file("tank")).expect("copied");
    says("another backing device is there now (UUID ");
    site.plug(same, "tank");
    wait_for_event(&daemon, "device-returned");
    client.ask("read -P 0 8M 64k", "read 65536/65536");
    client.leave();
    assert!(content(&site.images, &daemon, "tank")[..DATA_BYTES] == pattern(DATA_BYTES, 5));
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

/// A regression: while a disk was away for a moment, requests that needed it failed, and a file
/// system on it became read-only.
#[test]
fn who_needs_a_disk_that_is_away_waits_and_who_does_not_goes_on() {
    if !requires("nbdcopy") || !requires("qemu-io") {
        return;
    }
    let site = ReconnectFixture::new("sequential_cutoff = \"256k\"\nshared = true");
    let daemon = Daemon::configured(&site.images);
    let mut client = ReconnectClient::connect(&daemon, "tank");
    let (mut reader, mut writer) =
        (ReconnectClient::connect(&daemon, "tank"), ReconnectClient::connect(&daemon, "tank"));
    client.ask("write -P 9 1M 64k", "wrote 65536/65536");
    // Flushes what a former process may have written.
    let mut first = ReconnectClient::connect(&daemon, "tank");
    first.begin("flush");
    first.leave();
    let copy = site.copy("tank");
    site.pull("tank");
    reader.begin("read -P 0 8M 64k");
    wait_for_event(&daemon, "device-awaited");
    client.ask("read -P 9 1M 64k", "read 65536/65536");
    client.ask("write -P 7 1M 64k", "wrote 65536/65536");
    client.ask("write -f -P 7 2M 64k", "wrote 65536/65536");
    // Until the disk is known to be gone, the truncated file accepts writes. A write that ends
    // while one to the disk is in flight may have lost something, as far as the engine knows.
    wait_for_event(&daemon, "device-trouble");
    writer.begin("write -f -P 6 4M 512k");
    daemon.wait_for("it says so", |status| {
        let reason = volume(status, "tank")["reason"].as_str().unwrap_or_default().to_owned();
        reason.contains("requests that need the backing device wait until it is back, for at most 2m")
    });
    assert!(reader.waits() && writer.waits());
    site.plug(&copy, "tank");
    reader.hears("read", "read 65536/65536");
    writer.hears("write", "wrote 524288/524288");
    client.ask("write -f -P 8 2M 64k", "wrote 65536/65536");
    daemon.wait_for("it is served", |status| volume(status, "tank")["state"] == "served");
    let log = daemon.log();
    assert_eq!(log.matches("event=device-awaited").count(), 1, "told once, and it came in time: {log}");
    for client in [client, reader, writer] {
        client.leave();
    }
    let found = bytes(site.file("tank"));
    let written = &found[DATA_OFFSET + (4 << 20)..][..512 << 10];
    assert!(written.iter().all(|byte| *byte == 6), "the write has come to the disk that came back");
    let all = content(&site.images, &daemon, "tank");
    assert!(all[1 << 20..(1 << 20) + (64 << 10)].iter().all(|byte| *byte == 7));
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

/// A regression: the next process could not open the missing disk, so a volume that was served from
/// its cache was not served any more.
#[test]
fn nobody_takes_over_while_a_disk_is_away() {
    if !requires("qemu-io") {
        return;
    }
    let site = ReconnectFixture::new("");
    let daemon = Daemon::configured(&site.images);
    let mut client = ReconnectClient::connect(&daemon, "tank");
    client.ask("write -P 9 1M 64k", "wrote 65536/65536");
    let copy = site.copy("tank");
    site.pull("tank");
    client.begin("read -P 0 8M 64k");
    wait_for_event(&daemon, "device-awaited");
    let ran = common::ask(&daemon, &["take-over", "--dry-run"]);
    assert_eq!(ran.exit, 6, "{ran:?}");
    assert!(ran.err.contains("the backing device of volume tank is gone"), "{ran:?}");
    site.plug(&copy, "tank");
    client.hears("read", "read 65536/65536");
    wait_for_event(&daemon, "device-returned");
    assert_eq!(common::ask(&daemon, &["take-over", "--dry-run"]).exit, 0, "{}", daemon.log());
    client.leave();
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

/// A flush that waits does not succeed because the new disk has nothing to flush.
#[test]
fn a_flush_that_waited_says_what_a_pulled_device_may_have_lost() {
    if !requires("nbdcopy") || !requires("qemu-io") || !requires("nbdsh") {
        return;
    }
    let site = ReconnectFixture::new("cache_mode = \"writearound\"");
    let daemon = Daemon::configured(&site.images);
    let mut client = ReconnectClient::connect(&daemon, "tank");
    client.ask("write -f -P 1 8M 4k", "wrote 4096/4096");
    client.ask("write -P 2 4M 64k", "wrote 65536/65536");
    let copy = site.copy("tank");
    site.pull("tank");
    let mut flush = nbdsh(&daemon.uri("tank"), "h.flush()");
    let mut flush = flush.stderr(Stdio::null()).spawn().expect("starts");
    wait_for_event(&daemon, "device-awaited");
    site.plug(&copy, "tank");
    assert!(!flush.wait().expect("ends").success(), "{}", daemon.log());
    client.ask("write -f -P 3 8M 4k", "wrote 4096/4096");
    // This flush was requested before the loss was known.
    assert!(!flushes(&daemon, "tank") && flushes(&daemon, "tank"));
    client.leave();
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

#[test]
fn waiting_for_a_disk_has_an_end_and_the_disk_is_looked_for_all_the_same() {
    if !requires("qemu-io") {
        return;
    }
    let site = ReconnectFixture::new("freeze_timeout = \"1s\"");
    let daemon = Daemon::configured(&site.images);
    let mut client = ReconnectClient::connect(&daemon, "tank");
    let copy = site.copy("tank");
    site.pull("tank");
    for _ in 0..2 {
        client.ask("read -P 0 8M 64k", "read failed: Input/output error");
    }
    wait_for_event(&daemon, "device-awaited-in-vain");
    let log = daemon.log();
    assert_eq!(log.matches("event=device-awaited-in-vain").count(), 1, "{log}");
    assert!(log.contains("volume tank: its backing device has not come back in time"), "{log}");
    let status = bcached(&["status", "--control", daemon.control()]).out;
    let over = "requests that need the backing device fail: it has not come back within freeze_timeout (1s)";
    assert!(status.contains(over) && !status.contains("need the backing device wait"), "{status}");
    site.plug(&copy, "tank");
    wait_for_event(&daemon, "device-returned");
    client.ask("read -P 0 8M 64k", "read 65536/65536");
    client.leave();
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}

/// Requests do not wait because of a policy that is no longer in force, or while the daemon is
/// stopping.
#[test]
fn who_is_not_to_wait_for_a_disk_is_told_at_once() {
    if !requires("qemu-io") {
        return;
    }
    let site = ReconnectFixture::new("freeze_timeout = \"1h\"\ncache_mode = \"writearound\"");
    let daemon = Daemon::configured(&site.images);
    let mut client = ReconnectClient::connect(&daemon, "tank");
    site.pull("tank");
    client.begin("read -P 0 8M 64k");
    wait_for_event(&daemon, "device-awaited");
    assert!(client.waits());
    done(&daemon, &["set", "tank", "on_backing_error=read-only"]);
    client.hears("read", "read failed: Input/output error");
    client.ask("write -P 1 8M 64k", "write failed: Operation not permitted");
    daemon.wait_for("it says so", |status| {
        let reason = volume(status, "tank")["reason"].as_str().unwrap_or_default().to_owned();
        reason.contains("reads that need the backing device fail, writes that need it are not permitted")
    });
    done(&daemon, &["set", "tank", "on_backing_error=fail"]);
    client.ask("write -P 1 8M 64k", "write failed: Input/output error");
    done(&daemon, &["set", "tank", "on_backing_error=freeze"]);
    client.begin("read -P 0 8M 64k");
    let mut other = ReconnectClient::connect(&daemon, "stays");
    other.ask("read -P 0 8M 64k", "read 65536/65536");
    other.leave();
    assert!(client.waits());
    let (_what_was_not_flushed_may_be_lost, log) = daemon.stop();
    assert!(!log.contains("event=device-awaited-in-vain"), "{log}");
    client.hears("read", "read failed");
    client.leave();
}
