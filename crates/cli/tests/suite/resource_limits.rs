//! A daemon with few system resources reports that before it reports ready, or continues with what
//! it has.

use crate::common::{Daemon, Images, done, limited, run};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

const CACHE_BYTES: u64 = 36 << 20;
const BACKING_BYTES: u64 = 20 << 20;

fn configured(images: &Images) -> Command {
    images.configure_pair(CACHE_BYTES, BACKING_BYTES, "");
    let config = images.path("config.toml");
    Daemon::command(images, "run", &["--config", config.to_str().expect("text")])
}

/// A regression: the daemon was ready, but no client could connect.
#[test]
fn a_daemon_that_may_open_too_few_files_does_not_start() {
    let images = Images::new();
    let command = configured(&images);
    let ran = run(&mut limited(&command, "ulimit -n 20"));
    assert_eq!((ran.exit, ran.out.as_str()), (4, ""), "{ran:?}");
    assert!(
        ran.err.contains("the limit of 20 open files is too low") && ran.err.contains("LimitNOFILE="),
        "{ran:?}"
    );
}

/// A soft limit is only a default: it is raised as far as possible.
#[test]
fn a_low_soft_limit_is_raised() {
    let images = Images::new();
    let command = configured(&images);
    let daemon = Daemon::start_command(&images, limited(&command, "ulimit -S -n 20"));
    done(&daemon, &["wait", "tank", "--for", "served", "--timeout", "30s"]);
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.id())).expect("readable");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("a limit");
    let words: Vec<_> = line.split_whitespace().collect();
    assert_eq!(words[3], words[4], "{line}");
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: NBD clients took all descriptors, and commands were not answered any more.
#[test]
fn who_connects_leaves_some_for_commands() {
    let images = Images::new();
    let command = configured(&images);
    let daemon = Daemon::start_command(&images, limited(&command, "ulimit -n 48"));
    let clients: Vec<_> = (0..60).map(|_| UnixStream::connect(images.path("run/nbd.sock"))).collect();
    let started = Instant::now();
    while !daemon.log().contains("event=nbd-not-accepted") {
        assert!(started.elapsed() < Duration::from_secs(60), "there are no more: {}", daemon.log());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(done(&daemon, &["status"]).contains("ready"));
    drop(clients);
    assert_eq!(daemon.stop().0, 0);
}

/// A regression: under a limit of processes (`TasksMax=`, a container's) each command failed
/// because no daemon answered. The test limits memory instead, which a thread's stack exceeds
/// first, and which applies to every user.
#[test]
fn commands_are_answered_where_there_are_no_more_threads() {
    use rustix::process::{Resource, Rlimit, prlimit};
    let images = Images::new();
    let daemon = Daemon::start_command(&images, configured(&images));
    done(&daemon, &["wait", "tank", "--for", "served", "--timeout", "30s"]);
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.id())).expect("readable");
    let line = status.lines().find(|line| line.starts_with("VmSize:")).expect("a size");
    let kib: u64 = line.split_whitespace().nth(1).and_then(|word| word.parse().ok()).expect("a number");
    let limit = Rlimit { current: Some((kib + 1024) << 10), maximum: None };
    prlimit(Some(daemon.process()), Resource::As, limit).expect("its own process");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert!(done(&daemon, &["status"]).contains("ready")));
        }
    });
    prlimit(Some(daemon.process()), Resource::As, Rlimit { current: None, maximum: None })
        .expect("as before");
    assert!(!daemon.log().contains("panic"), "{}", daemon.log());
    assert_eq!(daemon.stop().0, 0);
}
