//! Finds out whether the machine shuts down together with the daemon.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Longest time that systemd may take to say whether the machine is shutting down.
const ASK_LIMIT: Duration = Duration::from_secs(5);

/// Checks whether systemd is shutting the machine down. Returns false if there is no systemd, or if
/// it does not answer.
pub fn stops() -> bool {
    let mut asked = Command::new("systemctl");
    asked.arg("is-system-running").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let Ok(mut asked) = asked.spawn() else { return false };
    let deadline = Instant::now() + ASK_LIMIT;
    while let Ok(None) = asked.try_wait() {
        if Instant::now() > deadline {
            let _is_over = asked.kill();
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // The answer is one word, which fits into the pipe.
    asked.wait_with_output().is_ok_and(|said| said.stdout.starts_with(b"stopping"))
}
