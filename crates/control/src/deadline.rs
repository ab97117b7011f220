//! How long a client waits for the answer to a request that changes something.
//!
//! The client sends the end of its patience in a header, and a daemon that comes to the request
//! later does not carry it out: the client has reported by then that the daemon did not answer.

use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// The header: the end of the client's wait, in milliseconds by [`boot_millis`].
pub const AWAITED: &str = "bcached-awaited-until";

/// Milliseconds since the system was started. The clock goes on while the machine sleeps.
#[must_use]
pub fn boot_millis() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    // It does not go back behind the start.
    millis(Duration::try_from(now).unwrap_or_default())
}

/// Whole milliseconds of `time`, at most [`u64::MAX`].
#[must_use]
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
