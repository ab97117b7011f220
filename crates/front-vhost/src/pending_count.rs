//! Counts the requests of a volume that the engine has not answered, including those of former
//! clients.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

/// The count.
#[derive(Default)]
pub(crate) struct PendingCount {
    count: AtomicUsize,
    /// Taken briefly when the count reaches zero, so that a waiter cannot miss the notification
    /// between its check and its sleep.
    gate: Mutex<()>,
    is_none: Condvar,
}

/// Counts as one request while it lives.
pub(crate) struct PendingGuard(Arc<PendingCount>);

impl PendingCount {
    pub(crate) fn enter(self: &Arc<Self>) -> PendingGuard {
        self.count.fetch_add(1, Ordering::Relaxed);
        PendingGuard(Arc::clone(self))
    }

    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Waits until the count is zero, at most until the deadline. Returns the count then.
    pub(crate) fn wait_none(&self, deadline: Instant) -> usize {
        let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let count = self.count();
            if count == 0 || left.is_zero() {
                return count;
            }
            gate = self.is_none.wait_timeout(gate, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for PendingGuard {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            drop(self.0.gate.lock());
            self.0.is_none.notify_all();
        }
    }
}
