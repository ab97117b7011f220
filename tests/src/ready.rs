//! Waits until a started daemon is ready.

use std::io::{BufRead as _, BufReader};
use std::process::Child;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Waits until a daemon whose output is piped reports that it is ready. Its later output is read
/// and discarded.
///
/// # Errors
/// What happened instead, in words.
///
/// # Panics
/// The output is not piped, or was taken before.
pub fn wait(child: &mut Child, limit: Duration) -> Result<(), String> {
    let output = child.stdout.take().expect("it is piped");
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    match lines.recv_timeout(limit) {
        Ok(line) if line == "ready" => Ok(()),
        other => Err(format!("bcached serve is not ready: {other:?}")),
    }
}
