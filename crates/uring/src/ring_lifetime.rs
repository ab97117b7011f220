//! Rings that end with the thread they belong to, or after it, but never before.
//!
//! Linux 6.5 to 6.14 have a fault (CVE-2025-37906): they complete a command of a ublk queue twice
//! if its request arrives between the last check of the ring and the cancellation of the commands,
//! and then use freed memory. A ring that is closed is ended by a kernel worker, milliseconds
//! later. A thread that ends, by itself or killed, handles what has arrived at one of its rings and
//! cancels the commands of that ring at once, with microseconds in between; then it continues with
//! its next ring.
//!
//! But the commands of two devices on one ring wait for each other, and a thread does this only if
//! it has something in flight that concerns a ring as a file. So each such queue has a dedicated
//! ring ([`DedicatedRing`]), which the engine's ring polls. All of these rings are closed when the
//! thread is gone.

use crate::threads::locked;
use io_uring::IoUring;
use rustix::thread::{Pid, gettid};
use std::io;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::Mutex;

/// Rings whose threads may still be ending. Ended ones are removed whenever another ring is added.
static PARTED: Mutex<Vec<DetachedRing>> = Mutex::new(Vec::new());

struct DetachedRing {
    thread: Pid,
    _ring: IoUring,
}

/// A ring that may outlive its thread.
pub(crate) struct DetachableRing {
    /// Present until this value is dropped.
    ring: Option<IoUring>,
    lasts: bool,
}

impl DetachableRing {
    /// Creates a ring that ends when it is dropped.
    pub(crate) const fn new(ring: IoUring) -> Self {
        Self { ring: Some(ring), lasts: false }
    }

    /// Marks the ring to outlive its thread: it is dropped on that thread, but is kept until the
    /// thread has ended.
    pub(crate) const fn last(&mut self) {
        self.lasts = true;
    }
}

impl Deref for DetachableRing {
    type Target = IoUring;

    fn deref(&self) -> &IoUring {
        self.ring.as_ref().expect("the ring exists until this is dropped")
    }
}

impl DerefMut for DetachableRing {
    fn deref_mut(&mut self) -> &mut IoUring {
        self.ring.as_mut().expect("the ring exists until this is dropped")
    }
}

impl Drop for DetachableRing {
    fn drop(&mut self) {
        if let Some(ring) = self.ring.take().filter(|_| self.lasts) {
            let mut parted = locked(&PARTED);
            parted.retain(|one| is_there(one.thread));
            parted.push(DetachedRing { thread: gettid(), _ring: ring });
        }
    }
}

/// Returns true if this thread of the process has not ended.
fn is_there(thread: Pid) -> bool {
    Path::new(&format!("/proc/self/task/{}", thread.as_raw_nonzero())).exists()
}

/// A ring client's dedicated ring.
pub(crate) struct DedicatedRing {
    pub ring: DetachableRing,
    /// Number of its poll in the engine's ring. Unique within one engine.
    pub number: u64,
    /// The engine's ring polls it.
    pub is_polled: bool,
}

impl DedicatedRing {
    /// Creates a ring with entries for as many commands as the ring client has at once.
    pub(crate) fn new(number: u64, commands: u16) -> io::Result<Self> {
        let ring = DetachableRing::new(IoUring::new(u32::from(commands.max(1)))?);
        Ok(Self { ring, number, is_polled: false })
    }

    /// Submits the entries that have been pushed.
    pub(crate) fn submit(&mut self) {
        if !self.ring.submission().is_empty() {
            // Entries that the kernel does not take for lack of memory stay queued until the next
            // turn.
            let _taken = self.ring.submit();
        }
    }

    pub(crate) fn has_news(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    /// Ends a ring on a new thread and returns how many are kept then. `None`: `io_uring` is
    /// unavailable here.
    fn end_one() -> Option<usize> {
        let mut ring = DetachableRing::new(IoUring::new(2).ok()?);
        ring.last();
        drop(ring);
        Some(locked(&PARTED).len())
    }

    #[test]
    fn rings_are_closed_when_their_threads_have_ended() {
        (0..9).for_each(|_| drop(thread::spawn(end_one).join()));
        let Some(here) = end_one() else {
            eprintln!("SKIPPED: no io_uring here");
            return;
        };
        // The ring of the last thread may remain for a moment longer.
        assert!((1..=2).contains(&here), "{here}");
        // This thread still lives.
        assert_eq!(end_one().map(|now| now - 1), Some(1));
    }
}
