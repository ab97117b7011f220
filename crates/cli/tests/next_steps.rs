//! What is said of a way out must be one: each sentence here sent somebody the wrong way, or nowhere.

mod common;

use common::{Daemon, Images, ask, bcached, done, refused, run};
use std::process::Command;

const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 20 << 20;

/// A cache `fast` and its volume `tank`.
fn configured() -> (Images, Daemon) {
    let images = Images::new();
    images.configure_pair(CACHE_BYTES, BACKING_BYTES, "");
    let daemon = Daemon::configured(&images);
    (images, daemon)
}

/// He was told to configure a cache, which he had done; and nothing said that there was one.
#[test]
fn a_released_set_is_not_forgotten() {
    let (_images, daemon) = configured();
    done(&daemon, &["release", "fast"]);
    refused(&daemon, &["add", "tank"], 2, "`bcached import fast` serves it again");
    let status = done(&daemon, &["status"]);
    assert!(
        status.contains("cache fast: released (served = false); `bcached import fast` serves it again"),
        "{status}"
    );
    assert_eq!(done(&daemon, &["status", "fast"]).lines().count(), 2);
    assert_eq!(daemon.status()["released"], serde_json::json!(["fast"]));
    done(&daemon, &["import", "fast"]);
    assert!(!done(&daemon, &["status"]).contains("released"));
    assert_eq!(daemon.stop().0, 0);
}
