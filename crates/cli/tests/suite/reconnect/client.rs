//! A client that gets one request after another, and may have to wait.

use crate::common::{Daemon, tool};
use std::io::{BufRead as _, Write as _};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

/// A client without an answer after this time gets none.
const LIMIT: Duration = Duration::from_secs(60);

/// A client that stays connected.
pub struct ReconnectClient {
    child: Child,
    asks: ChildStdin,
    answers: Receiver<String>,
}

impl ReconnectClient {
    pub fn connect(daemon: &Daemon, volume: &str) -> Self {
        let mut child = tool("sh")
            .args(["-c", "exec qemu-io -f raw --cache writeback \"$0\" 2>&1", &daemon.uri(volume)])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let (asks, answers) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let (send, receive) = mpsc::channel();
        std::thread::spawn(move || {
            for line in std::io::BufReader::new(answers).lines().map_while(Result::ok) {
                let _nobody_asks_any_more = send.send(line.trim_start_matches("qemu-io> ").to_owned());
            }
        });
        Self { child, asks, answers: receive }
    }

    #[track_caller]
    pub fn ask(&mut self, asked: &str, answer: &str) {
        self.begin(asked);
        self.hears(asked, answer);
    }

    pub fn begin(&mut self, asked: &str) {
        writeln!(self.asks, "{asked}").expect("it listens");
    }

    pub fn waits(&self) -> bool {
        // The rest of the last answer is its speed.
        let news = self.answers.try_iter().find(|line| !line.contains("ops/sec"));
        news.is_none()
    }

    #[track_caller]
    pub fn hears(&self, asked: &str, answer: &str) {
        let mut line = self.answers.recv_timeout(LIMIT).expect("it answers");
        while line.contains("ops/sec") {
            line = self.answers.recv_timeout(LIMIT).expect("it answers");
        }
        assert!(line.starts_with(answer), "{asked}: {line}");
    }

    pub fn leave(mut self) {
        drop(self.asks);
        let _exit_of_a_failed_command = self.child.wait().expect("ends");
    }
}
