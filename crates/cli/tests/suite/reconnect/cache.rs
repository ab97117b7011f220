//! A cache device that is pulled and returns. The truncated file simulates a disk with a volatile
//! write cache, as every file does.

use super::client::ReconnectClient;
use super::{volume, wait_for_event};
use crate::common::{
    Daemon, Images, bcached, bytes, content, done, fill, flushes, pattern, requires, reseal,
};

const DATA_BYTES: usize = 1 << 20;

/// Makes a cache with a volume in writeback mode without write-back, and one in writethrough mode.
fn site(options: &str) -> Images {
    let images = Images::new();
    let fast = images.blank("fast", 36 << 20);
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &fast]).exit, 0);
    // Data that is not flushed stays out of the journal.
    let mut text = format!("version = 1\n[cache.fast]\ndevice = {fast:?}\njournal_delay_ms = 60000\n");
    for (volume, mode) in [("dirty", "writeback"), ("clean", "writethrough")] {
        let device = images.blank(volume, 20 << 20);
        assert_eq!(bcached(&["make", "--label", volume, "-B", &device]).exit, 0);
        text += &format!(
            "[volume.{volume}]\nbacking = {device:?}\ncache_mode = \"{mode}\"\nwriteback_running = false\n\
             sequential_cutoff = 0\n{options}\n"
        );
    }
    images.configure(&text);
    images
}

/// Copies the cache as it is now to a file of this name, as the device that may return.
fn copy(images: &Images, name: &str) -> String {
    let copy = images.path(name);
    std::fs::copy(images.path("fast"), &copy).expect("a copy");
    copy.to_str().expect("text").to_owned()
}

/// Makes the cache device unreachable from now on.
fn pull(images: &Images) {
    pull_device(images, "fast");
}

/// The same for any device.
fn pull_device(images: &Images, name: &str) {
    let file = std::fs::File::options().write(true).open(images.path(name));
    file.and_then(|file| file.set_len(0)).expect("cut");
}

/// From now on another device has its name.
fn plug(images: &Images, copy: &str) {
    std::fs::rename(copy, images.path("fast")).expect("another file");
}

fn wait_until_served(daemon: &Daemon) {
    daemon.wait_for("both are served", |status| {
        ["dirty", "clean"].iter().all(|name| volume(status, name)["state"] == "served")
    });
}

/// A regression: after an SSD was pulled and put back, the daemon had to be restarted, and clients
/// saw errors until then.
#[test]
fn a_cache_device_that_comes_back_is_taken_up_under_its_clients() {
    if !requires("nbdcopy") || !requires("qemu-io") || !requires("nbdsh") {
        return;
    }
    let images = site("");
    let daemon = Daemon::configured(&images);
    let data = pattern(DATA_BYTES, 3);
    fill(&images, &daemon, "dirty", &data);
    fill(&images, &daemon, "clean", &data);
    let (mut dirty, mut clean) =
        (ReconnectClient::connect(&daemon, "dirty"), ReconnectClient::connect(&daemon, "clean"));
    dirty.ask("write -f -P 9 2M 64k", "wrote 65536/65536");
    clean.ask("write -P 9 2M 64k", "wrote 65536/65536");
    let copy = copy(&images, "fast elsewhere");
    // These are not flushed: they may be lost when the power is cut.
    dirty.ask("write -P 7 4M 64k", "wrote 65536/65536");
    pull(&images);
    dirty.begin("write -f -P 6 6M 64k");
    wait_for_event(&daemon, "cache-stopped-writing");
    clean.ask("write -P 8 3M 64k", "wrote 65536/65536");
    clean.ask("read -P 9 2M 64k", "read 65536/65536");
    assert!(dirty.waits(), "{}", daemon.log());
    plug(&images, &copy);
    wait_for_event(&daemon, "device-returned");
    dirty.hears("it is durable by itself", "wrote 65536/65536");
    assert!(!flushes(&daemon, "dirty") && flushes(&daemon, "dirty"), "{}", daemon.log());
    wait_for_event(&daemon, "cache-works-again");
    wait_until_served(&daemon);
    // This is the only trace of the writes that were given up.
    wait_for_event(&daemon, "writes-given-up");
    let log = daemon.log();
    let given_up: Vec<_> = log.lines().filter(|line| line.contains("event=writes-given-up")).collect();
    assert_eq!(given_up.len(), 1, "{log}");
    // Perhaps together with the write that waits, which is not acknowledged yet.
    assert!(given_up[0].contains("cache fast") && given_up[0].contains("sectors 8192 to "), "{log}");
    assert!(given_up[0].contains("KiB of dirty ("), "{log}");
    dirty.ask("read -P 9 2M 64k", "read 65536/65536");
    dirty.ask("read -P 6 6M 64k", "read 65536/65536");
    // All data of this volume was on its backing device.
    clean.ask("read -P 8 3M 64k", "read 65536/65536");
    clean.ask("write -f -P 5 7M 4k", "wrote 4096/4096");
    dirty.leave();
    clean.leave();
    for name in ["dirty", "clean"] {
        assert!(content(&images, &daemon, name)[..DATA_BYTES] == data, "{name}");
    }
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
    let checked = bcached(&["check", images.path("fast").to_str().expect("text")]);
    assert_eq!(checked.exit, 0, "{}", checked.out);
}

/// A regression: a bus reset took both devices away. The cache was reopened, but its volume kept
/// the old disk permanently, and requests to it failed until the daemon was restarted.
#[test]
fn a_cache_and_its_disk_that_come_back_are_both_taken_up() {
    if !requires("nbdcopy") || !requires("qemu-io") {
        return;
    }
    for cache_first in [true, false] {
        let images = site("");
        let daemon = Daemon::configured(&images);
        let data = pattern(DATA_BYTES, 3);
        fill(&images, &daemon, "dirty", &data);
        let mut client = ReconnectClient::connect(&daemon, "dirty");
        client.ask("write -f -P 9 2M 64k", "wrote 65536/65536");
        let (cache, disk) = (images.path("fast elsewhere"), images.path("disk elsewhere"));
        for (from, to) in [("fast", &cache), ("dirty", &disk)] {
            std::fs::copy(images.path(from), to).expect("a copy");
            pull_device(&images, from);
        }
        client.begin("write -f -P 6 6M 64k");
        wait_for_event(&daemon, "cache-stopped-writing");
        let order = if cache_first {
            [(&cache, "fast"), (&disk, "dirty")]
        } else {
            [(&disk, "dirty"), (&cache, "fast")]
        };
        for (from, to) in order {
            std::fs::rename(from, images.path(to)).expect("another file");
            // The second device returns after the first has been examined.
            daemon.wait_for("it is looked for", |_| {
                daemon.log().contains("event=device-returned") || to == "dirty"
            });
        }
        client.hears("it has waited", "wrote 65536/65536");
        client.ask("read -P 9 2M 64k", "read 65536/65536");
        client.ask("read -P 0 12M 64k", "read 65536/65536");
        wait_until_served(&daemon);
        client.leave();
        assert!(content(&images, &daemon, "dirty")[..DATA_BYTES] == data, "{}", daemon.log());
        let (exit, log) = daemon.stop();
        assert_eq!(exit, 0, "{log}");
    }
}

/// A cache that was started elsewhere meanwhile has another history than the one acknowledged to
/// clients.
#[test]
fn a_cache_device_that_somebody_else_has_used_is_not_taken_up() {
    if !requires("nbdcopy") || !requires("qemu-io") {
        return;
    }
    let images = site("on_cache_error = \"fail\"");
    let daemon = Daemon::configured(&images);
    let data = pattern(DATA_BYTES, 3);
    fill(&images, &daemon, "dirty", &data);
    let mut client = ReconnectClient::connect(&daemon, "dirty");
    let (used, same) = (copy(&images, "used"), copy(&images, "same"));
    // Each start increments the sequence number of its superblock.
    reseal(&used, 112, bytes(&used)[4096 + 112] + 1);
    pull(&images);
    client.ask("write -f -P 6 6M 64k", "write failed");
    plug(&images, &used);
    daemon.wait_for("why", |status| {
        let reason = status["caches"][0]["reason"].as_str().unwrap_or_default().to_owned();
        reason.contains("another program has used it since")
    });
    client.ask("read -P 6 6M 64k", "read failed");
    plug(&images, &same);
    wait_for_event(&daemon, "cache-works-again");
    client.leave();
    assert!(content(&images, &daemon, "dirty")[..DATA_BYTES] == data);
    done(&daemon, &["set", "dirty", "writeback_running=true"]);
    done(&daemon, &["flush", "dirty"]);
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}
