//! Limits how often events that clients can cause at will are logged.

use std::time::{Duration, Instant};

/// Shortest interval between two log entries.
const EVERY: Duration = Duration::from_secs(60);

/// Counts events between two log entries.
#[derive(Default)]
pub struct LogLimit {
    count: u64,
    told: Option<Instant>,
}

impl LogLimit {
    /// Counts one event. Returns the number of events since the last log entry if it is time for
    /// the next one.
    pub fn count(&mut self) -> Option<u64> {
        self.count += 1;
        if self.told.is_some_and(|told| told.elapsed() < EVERY) {
            return None;
        }
        self.told = Some(Instant::now());
        Some(std::mem::take(&mut self.count))
    }
}
