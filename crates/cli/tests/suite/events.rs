//! Events as clients of the daemon receive them.

use crate::common::{self, Daemon, Images, ask, bcached, done, json, refused};
use std::io::{BufRead as _, BufReader, Lines};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::mpsc;
use std::time::Duration;

fn set(images: &Images) -> (String, String) {
    let (cache, backing) = (images.blank("cache", 36 << 20), images.blank("backing", 20 << 20));
    assert_eq!(bcached(&["make", "-b", "64k", "--label", "tank", "-C", &cache, "-B", &backing]).exit, 0);
    (cache, backing)
}

/// A process that follows the events, and its lines, each received within a limit.
struct EventFollower {
    child: Child,
    lines: mpsc::Receiver<String>,
}

impl EventFollower {
    fn new(daemon: &Daemon, words: &[&str]) -> Self {
        let mut command = common::program();
        command.args(["events", "--follow", "--control", daemon.control()]).args(words);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("starts");
        let out: Lines<BufReader<ChildStdout>> = BufReader::new(child.stdout.take().expect("piped")).lines();
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || out.map_while(Result::ok).try_for_each(|line| send.send(line)));
        Self { child, lines }
    }

    #[track_caller]
    fn next(&self) -> String {
        self.lines.recv_timeout(Duration::from_secs(60)).expect("a line in time")
    }
}

impl Drop for EventFollower {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _reaped_already = self.child.wait();
    }
}

#[test]
fn what_has_happened_is_told_with_its_id() {
    let images = Images::new();
    let (cache, backing) = set(&images);
    let daemon = Daemon::start(&images, &["--cache", &cache, "--backing", &backing]);
    let all = done(&daemon, &["events", "--json"]);
    let all: Vec<_> = all.lines().map(json).collect();
    let ids: Vec<_> = all.iter().filter_map(|event| event["event"].as_str()).collect();
    assert!(
        ids.contains(&"cache-opened") && ids.contains(&"volume-served") && ids.last() == Some(&"ready"),
        "{ids:?}"
    );
    let served = all.iter().find(|event| event["event"] == "volume-served").expect("it is");
    assert_eq!(
        (served["schema"].as_str(), served["level"].as_str()),
        (Some("bcached.event"), Some("info")),
        "{served}"
    );
    assert_eq!(served["message"].as_str(), Some("tank: served"));
    let numbers: Vec<_> = all.iter().filter_map(|event| event["sequence"].as_u64()).collect();
    assert_eq!(numbers, (1..=all.len() as u64).collect::<Vec<_>>());
    let time = served["time"].as_str().expect("a time");
    let later = done(&daemon, &["events", "--since", time]);
    assert!(later.lines().any(|line| line.ends_with("tank: served [volume-served]")), "{later}");
    assert_eq!(done(&daemon, &["events", "--since", "2999-01-01T00:00:00Z"]), "");
    assert!(done(&daemon, &["events", "-n", "1"]).ends_with(" ready [ready]\n"));
    done(&daemon, &["set", "tank", "writeback_percent=20", "--runtime"]);
    let last = json(&done(&daemon, &["events", "-n", "1", "--json"]));
    assert_eq!(
        (last["event"].as_str(), last["fields"]["uid"].as_str().is_some()),
        (Some("options-changed"), true),
        "{last}"
    );
    refused(&daemon, &["events", "--since", "yesterday"], 2, "`yesterday` is not a time; write how long ago");
    assert_eq!(ask(&daemon, &["events", "--since", "1h"]).out.lines().count(), all.len() + 1);
}

/// A follower receives what happens. One that is too slow is told how many events it has missed.
/// The stream ends with the daemon.
#[test]
fn what_happens_is_followed_to_the_end() {
    let images = Images::new();
    let (cache, backing) = set(&images);
    let daemon = Daemon::start(&images, &["--cache", &cache, "--backing", &backing]);
    let follower = EventFollower::new(&daemon, &["-n", "1", "--json"]);
    assert_eq!(json(&follower.next())["event"].as_str(), Some("ready"));
    done(&daemon, &["set", "tank", "label=pond"]);
    // A user's change is reported after it was made.
    assert_eq!(json(&follower.next())["event"].as_str(), Some("label-set"));
    let asked = json(&follower.next());
    assert_eq!(asked["event"].as_str(), Some("options-changed"), "{asked}");
    assert_eq!(asked["message"].as_str(), Some("set tank label=pond"));
    // The follower is stopped while more happens than the daemon's list holds.
    let pid = rustix::process::Pid::from_raw(i32::try_from(follower.child.id()).expect("a process id"))
        .expect("not 0");
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("its own");
    // Signals that arrive together count as one.
    let started = std::time::Instant::now();
    while daemon.log().matches("reload-nothing").count() < 1100 {
        assert!(started.elapsed() < Duration::from_secs(60), "{}", daemon.log().lines().count());
        for _ in 0..50 {
            daemon.signal(rustix::process::Signal::HUP);
            std::thread::sleep(Duration::from_micros(500));
        }
    }
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).expect("its own");
    let mut line = json(&follower.next());
    while line["event"] != "events-lost" {
        assert_eq!(line["event"].as_str(), Some("reload-nothing"), "{line}");
        line = json(&follower.next());
    }
    assert!(line["lost"].as_u64().is_some_and(|lost| lost > 0), "{line}");
    // The follower must have read everything before the stop: a busy one would ask a daemon that
    // has ended meanwhile.
    done(&daemon, &["set", "tank", "label=pool"]);
    while line["message"] != "set tank label=pool" {
        line = json(&follower.next());
    }
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(daemon.stop().0, 0);
    let mut follower = follower;
    let mut is_told = false;
    while let Ok(line) = follower.lines.recv_timeout(Duration::from_secs(60)) {
        is_told |= json(&line)["event"].as_str() == Some("stopping");
    }
    assert!(is_told, "what comes after that may come too late");
    assert_eq!(follower.child.wait().expect("ends").code(), Some(5), "no daemon any more");
}
