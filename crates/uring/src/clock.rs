//! The two clocks used in production: a monotonic one that starts with the driver, and the wall
//! clock.

use bcached_env::Time;
use core::time::Duration;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Longest single sleep; the driver then loops and sleeps again.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// Measures the time since the driver was opened.
pub(crate) struct Clock {
    start: Instant,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self { start: Instant::now() }
    }

    pub(crate) fn now(&self) -> Time {
        Time(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Returns how long a sleep until `until` may last; `None` if that moment has passed.
    pub(crate) fn remaining(&self, until: Option<Time>) -> Option<Duration> {
        let Some(until) = until else { return Some(SLEEP_MAX) };
        let left = until.since(self.now());
        if left.is_zero() { None } else { Some(left.min(SLEEP_MAX)) }
    }
}

/// Returns the seconds since 1970; 0 if the clock is set before that, the maximum from 2106 on.
pub(crate) fn wall_seconds() -> u32 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u32::try_from(since.as_secs()).unwrap_or(u32::MAX)
}
