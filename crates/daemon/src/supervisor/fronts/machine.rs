//! Whether the machine goes down with the daemon.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long systemd may take to say whether the machine is going down.
const ASK_LIMIT: Duration = Duration::from_secs(5);

/// Whether systemd is taking the machine down. Where there is none, or it does not answer, no.
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
    // A word: it fits what a pipe holds.
    asked.wait_with_output().is_ok_and(|said| said.stdout.starts_with(b"stopping"))
}
