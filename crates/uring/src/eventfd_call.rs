//! Rings an eventfd of somebody who is not trusted, and never waits for that.
//!
//! A write to an eventfd waits while its counter is full, unless it is non-blocking; and whoever else has it open can make it blocking again
//! at any moment. The kernel itself adds to one without ever waiting. So the eventfd is given to a ring of its own, on which an operation
//! ends that does nothing: the kernel tells of that.
#![allow(unsafe_code, reason = "an operation is submitted, which refers to nothing")]

use io_uring::{IoUring, opcode};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};

/// Operations that may be under way; each has ended when it has been submitted.
const ENTRIES: u32 = 2;

/// See the module's page.
pub struct Caller(IoUring);

impl Caller {
    /// For this eventfd, which it keeps open.
    ///
    /// # Errors
    /// It is no eventfd, or there is no ring to be had.
    pub fn new(eventfd: BorrowedFd<'_>) -> io::Result<Self> {
        let ring = IoUring::new(ENTRIES)?;
        ring.submitter().register_eventfd(eventfd.as_fd().as_raw_fd())?;
        Ok(Self(ring))
    }

    /// Adds one to it.
    pub fn ring(&mut self) {
        self.0.completion().for_each(drop);
        // SAFETY: the entry refers to nothing.
        let pushed = unsafe { self.0.submission().push(&opcode::Nop::new().build()) };
        // Without room an earlier one has not been taken, and goes now.
        if pushed.is_ok() || !self.0.submission().is_empty() {
            // What the system refuses for want of memory goes with the next.
            let _refused = self.0.submit();
        }
    }
}

impl core::fmt::Debug for Caller {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str("Caller")
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
        let Ok(mut caller) = Caller::new(bell.as_fd()) else {
            eprintln!("SKIPPED: no io_uring here");
            return;
        };
        caller.ring();
        assert_eq!(count(&bell), 1);
        (0..100).for_each(|_| caller.ring());
        assert_eq!(count(&bell), 100, "more than it has entries");
        rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).expect("room");
        fcntl_setfl(&bell, OFlags::empty()).expect("ours");
        // A write would wait for ever now.
        (0..3).for_each(|_| caller.ring());
        assert!(count(&bell) >= u64::MAX - 1);
        caller.ring();
        assert_eq!(count(&bell), 1, "and it goes on");
    }

    #[test]
    fn what_is_no_eventfd_is_refused() {
        let (reads, writes) = std::io::pipe().expect("a pipe");
        assert!(Caller::new(reads.as_fd()).is_err() && Caller::new(writes.as_fd()).is_err());
        let file = tempfile::tempfile().expect("a file");
        assert!(Caller::new(file.as_fd()).is_err());
    }
}
