//! Counts what the driver had to do beyond passing operations on. For metrics and tests.

use std::sync::atomic::{AtomicU64, Ordering};

/// The counters, written by the driver's threads and readable from any thread.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) bounced: AtomicU64,
    pub(crate) continued: AtomicU64,
    pub(crate) retried: AtomicU64,
    pub(crate) queued: AtomicU64,
    pub(crate) helped: AtomicU64,
}

/// Adds one.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// A reading of the driver's counters, all since it was opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct CounterSnapshot {
    /// Operations that went through a copy because the device would not accept their memory
    /// (misaligned, or lent).
    pub bounced: u64,
    /// Short transfers that were continued.
    pub continued: u64,
    /// Operations submitted again after `EINTR` or `EAGAIN`.
    pub retried: u64,
    /// Operations that found the ring full and had to queue in the driver.
    pub queued: u64,
    /// Operations that the ring handed to a helper thread.
    pub helped: u64,
}

impl Counters {
    pub(crate) fn read(&self) -> CounterSnapshot {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CounterSnapshot {
            bounced: value(&self.bounced),
            continued: value(&self.continued),
            retried: value(&self.retried),
            queued: value(&self.queued),
            helped: value(&self.helped),
        }
    }
}
