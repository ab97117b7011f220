//! What somebody takes away while the daemon runs is noticed, and mended or told of.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod common;

use common::{Daemon, Images, ask, content, done, fill, pattern, requires};

const BACKING_BYTES: u64 = 16 << 20;

fn site() -> (Images, Daemon) {
    let images = Images::new();
    images.configure_pair(64 << 20, BACKING_BYTES, "");
    let daemon = Daemon::configured(&images);
    (images, daemon)
}

fn warnings(status: &serde_json::Value) -> Vec<String> {
    let all = status["warnings"].as_array().into_iter().flatten();
    all.filter_map(|warning| warning.as_str().map(str::to_owned)).collect()
}

/// A cleaner has removed `/run/bcached`, and the daemon is killed: what was acknowledged since is there.
#[test]
fn a_note_that_was_removed_is_replaced_before_the_next_write_is_acknowledged() {
    if !requires("nbdcopy") {
        return;
    }
    let (images, daemon) = site();
    let note = |images: &Images| {
        let files = std::fs::read_dir(images.path("run")).unwrap().map(|entry| entry.unwrap().path());
        files.filter(|path| path.extension().is_some_and(|extension| extension == "note")).collect::<Vec<_>>()
    };
    let files = note(&images);
    assert_eq!(files.len(), 1, "{files:?}");
    std::fs::remove_file(&files[0]).unwrap();
    daemon.wait_for("it is missed", |status| {
        warnings(status).iter().any(|told| told.contains("somebody has removed this note"))
    });
    assert_eq!(ask(&daemon, &["status"]).exit, 1, "it is not as it should be");
    let data = pattern(1 << 20, 7);
    fill(&images, &daemon, "tank", &data);
    daemon.wait_for("there is another", |status| warnings(status).is_empty());
    assert_eq!(note(&images), files);
    assert!(daemon.log().contains("[event=note-gone]"), "{}", daemon.log());
    daemon.kill();
    let daemon = Daemon::configured(&images);
    assert!(content(&images, &daemon, "tank")[..data.len()] == data[..]);
    assert_eq!(daemon.stop().0, 0);
}

#[test]
fn a_socket_or_a_configuration_that_is_gone_is_told_of() {
    let (images, daemon) = site();
    std::fs::remove_file(images.path("run/nbd.sock")).unwrap();
    daemon.wait_for("the socket is missed", |status| {
        warnings(status).iter().any(|told| told.contains("nbd.sock"))
    });
    assert!(done_unwell(&daemon).contains("nobody who comes reaches the daemon there"));
    assert!(daemon.log().contains("[event=socket-gone]"), "{}", daemon.log());
    done(&daemon, &["set", "tank", "writeback_delay=17"]);
    assert_eq!(daemon.stop().0, 0);
}

fn done_unwell(daemon: &Daemon) -> String {
    let ran = ask(daemon, &["status"]);
    assert_eq!(ran.exit, 1, "{ran:?}");
    ran.out
}
