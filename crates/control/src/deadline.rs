//! How long a client waits for the answer to a request that changes something.
//!
//! The client sends the end of its wait in a header, and a daemon that reads the request later does
//! not carry it out: by then the client has reported that the daemon did not answer.

use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// The header with the end of the client's wait, in milliseconds by [`boot_millis`].
pub const AWAITED: &str = "bcached-awaited-until";

/// Returns the milliseconds since the system was started. The clock continues while the machine
/// sleeps.
#[must_use]
pub fn boot_millis() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    // The clock is never negative.
    millis(Duration::try_from(now).unwrap_or_default())
}

/// Returns the whole milliseconds of `time`, at most [`u64::MAX`].
#[must_use]
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
