//! Protection from the OOM killer. Whoever has volumes mounted loses more with this process than the memory that its end
//! frees: the unit for systemd says so with `OOMScoreAdjust`, and a daemon that root has started by hand does the same.
//!
//! What this process executes in its place, or beside itself, has what was there before: the next bcached decides for itself.

use std::sync::OnceLock;
use std::{fs, io};

/// As in the unit.
const PROTECTED: i32 = -900;

/// What a process says of itself.
const OWN: &str = "/proc/self/oom_score_adj";

/// What there was before this process protected itself, if it did.
static BEFORE: OnceLock<i32> = OnceLock::new();

/// Protects this process, if root has started it and neither systemd nor somebody else has decided about that.
pub fn protect() {
    let by_systemd = ["INVOCATION_ID", "NOTIFY_SOCKET"].iter().any(|name| std::env::var_os(name).is_some());
    if by_systemd || !rustix::process::geteuid().is_root() {
        return;
    }
    let protected = read().and_then(|before| {
        // Who has chosen less than usual has meant it.
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
             CAP_SYS_RESOURCE, or start it by systemd with OOMScoreAdjust={PROTECTED}"
        ),
    }
}

/// Does `start`, which executes another program, without that protection.
pub fn as_before<T>(start: impl FnOnce() -> T) -> T {
    let Some(before) = BEFORE.get() else { return start() };
    // It may always be given up, and to take it back is as permitted as it was.
    let given_up = write(*before).is_ok();
    let started = start();
    if given_up && let Err(error) = write(PROTECTED) {
        tracing::warn!(
            event = "oom-not-protected",
            "this process is not protected from the OOM killer any more: {error}"
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
