//! What the log says of who asks for what: each changing command with its user, also if it is refused, and nothing that was not so.

use crate::common::{self, Daemon, Images, ask, done, refused};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How long something may take that takes a moment.
const LIMIT: Duration = Duration::from_secs(60);

fn started(images: &Images, wait: &str, more: &str) -> Daemon {
    let (fast, tank) = images.pair(36 << 20, 20 << 20);
    images.configure(&format!(
        "version = 1\n[cache.fast]\ndevice = {fast:?}\n[defaults]\nwait = {wait:?}\n[volume.tank]\nbacking = {tank:?}\n{more}"
    ));
    Daemon::configured(images)
}

/// What was refused before the loop had heard of it stood in no log.
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

/// Who watches the ids of the log saw a change that was none.
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

/// It waited for ever for what nobody was about to serve any more.
#[test]
fn who_adds_a_volume_that_is_removed_meanwhile_hears_of_it() {
    let images = Images::new();
    let daemon = started(&images, "1h", "");
    let late = images.path("late");
    let late = late.to_str().expect("text");
    common::bcached(&["make", "-B", &images.blank("late", 20 << 20)]);
    let held = common::Locked::new(late);
    std::thread::scope(|scope| {
        let adds = scope.spawn(|| ask(&daemon, &["add", "late", "--backing", late]));
        daemon.wait_for("it is waited for", |status| status["volumes"][1]["state"] == "waiting");
        // Who adds it has seen that, too, or sees that it is gone: he hears of it either way.
        done(&daemon, &["remove", "late"]);
        let added = adds.join().expect("no panic");
        assert_eq!(added.exit, 4, "{added:?}");
        assert!(
            added.err.contains("late was added, and is not served: somebody has removed it"),
            "{added:?}"
        );
    });
    drop(held);
    refused(&daemon, &["flush", "late"], 2, "late");
    assert_eq!(daemon.stop().0, 0);
}

/// More connections than there is room for are closed, which the log said without an id. [`Daemon::stop`] looks at each line.
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
