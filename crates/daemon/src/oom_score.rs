//! Protection from the OOM killer.
//!
//! If this process is killed, users of mounted volumes lose more than the memory that its end
//! frees. The systemd unit sets `OOMScoreAdjust` for that reason; a daemon that root has started by
//! hand does the same for itself.
//!
//! Programs that this process executes, in its place or beside itself, get the score that it had
//! before: the next bcached decides for itself.

use std::sync::OnceLock;
use std::{fs, io};

/// As in the unit.
const PROTECTED: i32 = -900;

/// The score of this process.
const OWN: &str = "/proc/self/oom_score_adj";

/// The score before this process protected itself, if it did.
static BEFORE: OnceLock<i32> = OnceLock::new();

/// Protects this process if root has started it, unless systemd has started it or a score was
/// chosen for it.
pub fn protect() {
    let by_systemd = ["INVOCATION_ID", "NOTIFY_SOCKET"].iter().any(|name| std::env::var_os(name).is_some());
    if by_systemd || !rustix::process::geteuid().is_root() {
        return;
    }
    let protected = read().and_then(|before| {
        // A score below the default was chosen on purpose.
        if before < 0 {
            return Ok(None);
        }
        write(PROTECTED).map(|()| Some(before))
    });
    match protected {
        Ok(before) => before.into_iter().for_each(|before| _ = BEFORE.set(before)),
        Err(error) => tracing::warn!(
            event = "oom-not-protected",
            "cannot protect this process from the OOM killer ({error}): it may be killed when memory is short; give it \
             CAP_SYS_RESOURCE, or start it from systemd with OOMScoreAdjust={PROTECTED}"
        ),
    }
}

/// Runs `start`, which executes another program, without the protection.
pub fn as_before<T>(start: impl FnOnce() -> T) -> T {
    let Some(before) = BEFORE.get() else { return start() };
    // Raising the score is always permitted, and lowering it again is as permitted as it was.
    let given_up = write(*before).is_ok();
    let started = start();
    if given_up && let Err(error) = write(PROTECTED) {
        tracing::warn!(
            event = "oom-not-protected",
            "this process is no longer protected from the OOM killer: {error}"
        );
    }
    started
}

fn read() -> io::Result<i32> {
    fs::read_to_string(OWN)?.trim().parse().map_err(io::Error::other)
}

fn write(score: i32) -> io::Result<()> {
    fs::write(OWN, score.to_string())
}
