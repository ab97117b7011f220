//! Limits how many files are open. An open volume has a thread, and each handle takes memory.
//! Without a limit, any user that may open files could exhaust them.

use fuser::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Places of one kind.
pub(crate) struct OpenLimit {
    /// What occupies them, in the plural.
    of: &'static str,
    max: usize,
    taken: AtomicUsize,
    /// The log already says that all are taken.
    is_told: AtomicBool,
}

/// An occupied place; dropping it frees it.
pub(crate) struct OpenSlot(Arc<OpenLimit>);

impl OpenLimit {
    pub(crate) fn new(of: &'static str, max: usize) -> Arc<Self> {
        Arc::new(Self { of, max, taken: AtomicUsize::new(0), is_told: AtomicBool::new(false) })
    }

    /// Takes a place. If all are taken, the log says so once, until some are free again.
    pub(crate) fn take(self: &Arc<Self>) -> Result<OpenSlot, Errno> {
        let more = |taken| (taken < self.max).then_some(taken + 1);
        if self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok() {
            return Ok(OpenSlot(Arc::clone(self)));
        }
        if !self.is_told.swap(true, Ordering::Relaxed) {
            let Self { of, max, .. } = self.as_ref();
            tracing::warn!(
                event = "fuse-too-many-open",
                "{max} {of} are open in the FUSE mount; no more can be opened until some are closed"
            );
        }
        Err(Errno::ENFILE)
    }
}

impl Drop for OpenSlot {
    fn drop(&mut self) {
        let before = self.0.taken.fetch_sub(1, Ordering::Relaxed);
        // With hysteresis, so that closing and opening at the limit does not log each time.
        if before <= self.0.max - self.0.max / 8 {
            self.0.is_told.store(false, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_free_again_when_it_is_given_up() {
        let open_limit = OpenLimit::new("volumes", 2);
        let (one, _other) = (open_limit.take().expect("free"), open_limit.take().expect("free"));
        assert_eq!(open_limit.take().map(drop), Err(Errno::ENFILE));
        assert!(open_limit.is_told.load(Ordering::Relaxed));
        drop(one);
        assert!(!open_limit.is_told.load(Ordering::Relaxed), "the next time is told again");
        let _one = open_limit.take().expect("free again");
        assert!(open_limit.take().is_err());
    }
}
