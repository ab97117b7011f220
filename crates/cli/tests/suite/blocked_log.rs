//! A log that is not read: the daemon works, stops, and reports later which lines are missing.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use crate::common::{self, CommandResult, Daemon, Images, bcached, json};
use std::io::{PipeReader, Read as _};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

/// A daemon whose log is a pipe with a very small buffer, and the pipe's reading end.
struct BlockedLogDaemon {
    images: Images,
    child: Child,
    reader: Option<PipeReader>,
}

impl BlockedLogDaemon {
    fn start() -> Self {
        let images = Images::new();
        images.configure_pair(64 << 20, 16 << 20, "");
        let config = images.path("config.toml");
        let mut command = Daemon::command(&images, "run", &["--config", config.to_str().unwrap()]);
        let (reader, writer) = std::io::pipe().unwrap();
        rustix::pipe::fcntl_setpipe_size(&writer, 4096).unwrap();
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(writer).spawn().unwrap();
        let unread = Self { images, child, reader: Some(reader) };
        unread.until("it serves", |ran| ran.exit == 0 && json(&ran.out)["state"] == "ready");
        unread
    }

    fn ask(&self, words: &[&str]) -> CommandResult {
        bcached(&[words, &["--control", &common::control(&self.images)]].concat())
    }

    fn until(&self, what: &str, wanted: impl Fn(&CommandResult) -> bool) {
        let started = Instant::now();
        loop {
            let ran = self.ask(&["status", "--json"]);
            if wanted(&ran) {
                return;
            }
            assert!(started.elapsed() < LIMIT, "{what}: {ran:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Makes changes, each of which logs a line: more than the pipe holds.
    fn change(&self, times: usize) {
        for time in 0..times {
            let delay = format!("writeback_delay={}", time % 50);
            let ran = self.ask(&["set", "tank", "--runtime", &delay]);
            assert_eq!(ran.exit, 0, "{time}: {ran:?}");
        }
    }

    fn ends(&mut self) -> i32 {
        let process = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().expect("ended by itself");
            }
            assert!(started.elapsed() < LIMIT, "it does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for BlockedLogDaemon {
    fn drop(&mut self) {
        let _ended_already = self.child.kill();
        let _reaped_already = self.child.wait();
    }
}

#[test]
fn nobody_reads_the_log_and_all_goes_on() {
    let mut unread = BlockedLogDaemon::start();
    unread.change(60);
    unread.until("its reader is missed", |ran| json(&ran.out)["log"]["stuck_seconds"].is_u64());
    let told = unread.ask(&["status"]).out;
    assert!(told.contains("log: its reader has read nothing for "), "{told}");
    assert_eq!(unread.ask(&["flush", "tank"]).exit, 0);
    assert_eq!(unread.ends(), 0);
}

#[test]
fn what_the_log_has_lost_is_told_when_it_is_read_again() {
    let mut unread = BlockedLogDaemon::start();
    // The log quotes refused values: a few long lines fill its queue.
    let long = format!("writeback_delay={}", "x".repeat(30_000));
    unread.until("lines are lost", |ran| {
        let _refused = unread.ask(&["set", "tank", &long]);
        json(&ran.out)["log"]["lines_lost"].as_u64().is_some_and(|lost| lost > 0)
    });
    let metrics = unread.ask(&["metrics"]).out;
    assert!(metrics.lines().any(|line| line.starts_with("bcached_log_lines_lost_total ")), "{metrics}");
    let mut reader = unread.reader.take().unwrap();
    let read = std::thread::spawn(move || {
        let mut log = Vec::new();
        reader.read_to_end(&mut log).unwrap();
        String::from_utf8_lossy(&log).into_owned()
    });
    unread.until("it is read", |ran| json(&ran.out)["log"]["stuck_seconds"].is_null());
    assert_eq!(unread.ends(), 0);
    let log = read.join().unwrap();
    assert!(log.contains("[event=log-lines-lost]"), "{}", log.len());
    assert!(log.contains("[event=stopped]"), "its last line is there: {}", log.len());
}
