//! Signals an eventfd of an untrusted process without ever blocking.
//!
//! A write to an eventfd blocks while its counter is full, unless the descriptor is non-blocking;
//! and any other process that has it open can make it blocking again at any moment. The kernel
//! itself adds to an eventfd without ever waiting. So the eventfd is registered with a ring of its
//! own. A no-op that completes on that ring makes the kernel signal the eventfd.
#![allow(unsafe_code, reason = "an operation is submitted, which refers to nothing")]

use io_uring::{IoUring, opcode};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};

/// Operations that may be in flight; each has completed by the time its submission returns.
const ENTRIES: u32 = 2;

/// Signals one eventfd; see the module documentation.
pub struct EventfdCaller(IoUring);

impl EventfdCaller {
    /// Creates a caller for this eventfd, and keeps the eventfd open.
    ///
    /// # Errors
    /// It is not an eventfd, or no ring is available.
    pub fn new(eventfd: BorrowedFd<'_>) -> io::Result<Self> {
        let ring = IoUring::new(ENTRIES)?;
        ring.submitter().register_eventfd(eventfd.as_fd().as_raw_fd())?;
        Ok(Self(ring))
    }

    /// Adds one to the eventfd's counter.
    pub fn ring(&mut self) {
        self.0.completion().for_each(drop);
        // SAFETY: the entry refers to no memory.
        let pushed = unsafe { self.0.submission().push(&opcode::Nop::new().build()) };
        // If there is no room, an earlier entry has not been submitted yet; it is submitted now.
        if pushed.is_ok() || !self.0.submission().is_empty() {
            // Entries that the system refuses for lack of memory are submitted with the next call.
            let _refused = self.0.submit();
        }
    }
}

impl core::fmt::Debug for EventfdCaller {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str("EventfdCaller")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{OFlags, fcntl_setfl};

    fn count(eventfd: impl AsFd) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(eventfd, &mut count).expect("rung");
        u64::from_ne_bytes(count)
    }

    #[test]
    fn a_counter_that_is_full_is_not_waited_for() {
        let bell = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd");
        let Ok(mut caller) = EventfdCaller::new(bell.as_fd()) else {
            eprintln!("SKIPPED: no io_uring here");
            return;
        };
        caller.ring();
        assert_eq!(count(&bell), 1);
        (0..100).for_each(|_| caller.ring());
        assert_eq!(count(&bell), 100, "more than it has entries");
        rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).expect("room");
        fcntl_setfl(&bell, OFlags::empty()).expect("ours");
        // A write would block forever now.
        (0..3).for_each(|_| caller.ring());
        assert!(count(&bell) >= u64::MAX - 1);
        caller.ring();
        assert_eq!(count(&bell), 1, "and it goes on");
    }

    #[test]
    fn what_is_no_eventfd_is_refused() {
        let (reads, writes) = std::io::pipe().expect("a pipe");
        assert!(EventfdCaller::new(reads.as_fd()).is_err() && EventfdCaller::new(writes.as_fd()).is_err());
        let file = tempfile::tempfile().expect("a file");
        assert!(EventfdCaller::new(file.as_fd()).is_err());
    }
}
