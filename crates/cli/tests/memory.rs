//! The memory for nodes, as processes: caches that come and go never have more together than there is, and each its part.

mod common;

use common::{Daemon, Images, bcached, done};
use rustix::process::Signal;

const MIB: u64 = 1 << 20;

/// Half of the memory.
const ALL: u64 = 64 * MIB;

/// What each cache has, which is asserted to be no more than there is.
#[track_caller]
fn parts(status: &serde_json::Value) -> Vec<u64> {
    let caches = status["caches"].as_array().expect("caches").iter();
    let parts: Vec<u64> = caches.filter_map(|cache| cache["node_budget_bytes"].as_u64()).collect();
    assert!(parts.iter().sum::<u64>() <= ALL, "more than there is: {status}");
    parts
}

/// Each new cache had its part of what others had already.
#[test]
fn caches_that_come_and_go_share_the_memory() {
    let images = Images::new();
    let (fast, tank) = images.pair(36 * MIB, 20 * MIB);
    let [slow, new] = ["slow", "new"].map(|name| images.blank(name, 36 * MIB));
    assert_eq!(bcached(&["make", "-b", "64k", "-C", &slow]).exit, 0);
    let one = format!(
        "version = 1\n[daemon]\nmemory = \"128M\"\n[cache.fast]\ndevice = {fast:?}\n[volume.media]\nbacking = {tank:?}\n\
         cache = \"fast\"\n"
    );
    images.configure(&one);
    let daemon = Daemon::configured(&images);
    assert_eq!(parts(&daemon.status()), [ALL]);

    images.configure(&format!("{one}[cache.slow]\ndevice = {slow:?}\n"));
    daemon.signal(Signal::HUP);
    daemon.wait_for("both have their part", |status| parts(status) == [ALL / 2, ALL / 2]);
    done(&daemon, &["release", "slow"]);
    daemon.wait_for("it has all of it again", |status| parts(status) == [ALL]);

    done(&daemon, &["replace", "fast", "--with", &new]);
    daemon.wait_for("so has the new one", |status| {
        parts(status) == [ALL] && status["caches"][0]["device"] == *new
    });
    assert_eq!(daemon.status()["volumes"][0]["cache"], "fast");
    let (exit, log) = daemon.stop();
    assert_eq!(exit, 0, "{log}");
}
