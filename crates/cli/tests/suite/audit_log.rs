//! The log names the user of each changing command, also if it is refused, and logs nothing that
//! did not happen.

use crate::common::{self, Daemon, Images, ask, done, refused};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The time limit for operations that take a moment.
const LIMIT: Duration = Duration::from_secs(60);

fn started(images: &Images, wait: &str, more: &str) -> Daemon {
    let (fast, tank) = images.pair(36 << 20, 20 << 20);
    images.configure(&format!(
        "version = 1\n[cache.fast]\ndevice = {fast:?}\n[defaults]\nwait = {wait:?}\n[volume.tank]\nbacking = {tank:?}\n{more}"
    ));
    Daemon::configured(images)
}

/// A regression: commands refused before they reached the main loop were not logged.
#[test]
fn what_is_refused_is_in_the_log_with_its_user() {
    let images = Images::new();
    let daemon = started(&images, "1s", "");
    let uid = rustix::process::getuid().as_raw();
    let nowhere = images.path("nowhere");
    let nowhere = nowhere.to_str().expect("text");
    for (words, exit, event) in [
        (&["set", "nothing", "writeback_percent=20"][..], 2, "options-refused"),
        (&["flush", "nothing"], 2, "job-refused"),
        (&["cancel", "77"], 2, "job-refused"),
        (&["replace", "nothing", "--with", nowhere], 2, "job-refused"),
        (&["replace", "fast", "--with", nowhere], 4, "job-refused"),
        (&["add", "more", "--size", "1000T"], 3, "job-refused"),
    ] {
        let before = daemon.log().lines().count();
        let ran = ask(&daemon, words);
        assert_eq!(ran.exit, exit, "{words:?}: {ran:?}");
        let log = daemon.log();
        let told: Vec<_> = log.lines().skip(before).filter(|line| line.contains("refused")).collect();
        let wanted = format!("[event={event} uid={uid}]");
        let what = words[..2].join(" ");
        let is_it = |line: &&str| line.contains(&what) && line.ends_with(&wanted);
        assert!(!told.is_empty() && told.iter().all(is_it), "{words:?}: {told:?}");
    }
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: a monitor of the log's event ids saw a change that did not happen.
#[test]
fn a_dry_run_is_no_change() {
    let images = Images::new();
    let daemon = started(&images, "1s", "");
    done(&daemon, &["set", "tank", "writeback_percent=20", "--dry-run"]);
    assert!(daemon.log().contains("event=options-planned") && !daemon.log().contains("options-changed"));
    done(&daemon, &["set", "tank", "writeback_percent=20"]);
    assert!(daemon.log().contains("event=options-changed"));
    done(&daemon, &["set", "fast", "congested_read_threshold_us=7"]);
    assert!(
        !daemon.log().contains("options-refused"),
        "it is no volume, which nobody has said: {}",
        daemon.log()
    );
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: the command waited forever for a volume that was no longer to be served.
#[test]
fn who_adds_a_volume_that_is_removed_meanwhile_hears_of_it() {
    let images = Images::new();
    let daemon = started(&images, "1h", "");
    let late = images.path("late");
    let late = late.to_str().expect("text");
    common::bcached(&["make", "-B", &images.blank("late", 20 << 20)]);
    let held = common::FileLock::new(late);
    std::thread::scope(|scope| {
        let adds = scope.spawn(|| ask(&daemon, &["add", "late", "--backing", late]));
        daemon.wait_for("it is waited for", |status| status["volumes"][1]["state"] == "waiting");
        // The client that adds it has seen the waiting state, or finds the volume gone: it is told
        // either way.
        done(&daemon, &["remove", "late"]);
        let added = adds.join().expect("no panic");
        assert_eq!(added.exit, 4, "{added:?}");
        assert!(
            added.err.contains("late was added, but is not served: another command has removed it"),
            "{added:?}"
        );
    });
    drop(held);
    refused(&daemon, &["flush", "late"], 2, "late");
    assert_eq!(daemon.stop().0, 0);
}

/// Connections beyond the limit are closed; the log message about that had no id. [`Daemon::stop`]
/// checks each line.
#[test]
fn a_crowd_of_clients_is_told_of_by_an_id() {
    let images = Images::new();
    let daemon = started(&images, "1s", "");
    let socket = images.path("run/nbd.sock");
    let (mut clients, began) = (Vec::new(), Instant::now());
    while !daemon.log().contains("too many NBD connections") {
        clients.extend(UnixStream::connect(&socket));
        assert!(began.elapsed() < LIMIT, "{} connections are not too many", clients.len());
    }
    assert!(daemon.log().contains("[event=nbd-crowded "), "{}", daemon.log());
    drop(clients);
    assert_eq!(daemon.stop().0, 0);
}
