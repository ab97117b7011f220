//! What clients can bring about as often as they like is told to the log only so often.

use std::time::{Duration, Instant};

/// No more often than this.
const EVERY: Duration = Duration::from_secs(60);

/// Counts what happens between two times that it is told.
#[derive(Default)]
pub struct Quiet {
    count: u64,
    told: Option<Instant>,
}

impl Quiet {
    /// It has happened. How often since it was last told, if it is time to tell.
    pub fn count(&mut self) -> Option<u64> {
        self.count += 1;
        if self.told.is_some_and(|told| told.elapsed() < EVERY) {
            return None;
        }
        self.told = Some(Instant::now());
        Some(std::mem::take(&mut self.count))
    }
}
