//! How many requests of a volume the engine has not answered, also those of clients that are gone.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

/// The count.
#[derive(Default)]
pub(crate) struct Tally {
    count: AtomicUsize,
    /// Held while the last one is told of, so that nobody looks before it and sleeps after it.
    gate: Mutex<()>,
    is_none: Condvar,
}

/// Counts while it lives.
pub(crate) struct Ticket(Arc<Tally>);

impl Tally {
    pub(crate) fn enter(self: &Arc<Self>) -> Ticket {
        self.count.fetch_add(1, Ordering::Relaxed);
        Ticket(Arc::clone(self))
    }

    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Waits until there are none, not longer than the deadline; how many there are then.
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

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            drop(self.0.gate.lock());
            self.0.is_none.notify_all();
        }
    }
}
