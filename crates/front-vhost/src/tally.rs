//! How many requests of a volume the engine has not answered, also those of clients that are gone.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The count.
#[derive(Default)]
pub(crate) struct Tally(AtomicUsize);

/// Counts while it lives.
pub(crate) struct Ticket(Arc<Tally>);

impl Tally {
    pub(crate) fn enter(self: &Arc<Self>) -> Ticket {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ticket(Arc::clone(self))
    }

    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}
