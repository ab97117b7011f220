//! Rings that end with the thread they belong to, or after it, never before.
//!
//! Linux 6.5 to 6.14 complete a command of a ublk queue twice if its request comes between the last look into the ring and the end of the commands
//! (CVE-2025-37906), and then use memory that they have freed. A ring that is closed is ended by a worker of the kernel's, milliseconds later. A
//! thread that ends, by itself or killed, hands out what has come to a ring of its own and ends the commands of that ring at once, with
//! microseconds in between, and then goes on to its next ring. But the commands of two devices on one ring wait for each other, and a thread
//! does that only if it has something under way that concerns a ring as a file. So each such queue has a ring to itself ([`Apart`]), which
//! the engine's ring polls; and all are closed when the thread has gone.

use crate::threads::locked;
use io_uring::IoUring;
use rustix::thread::{Pid, gettid};
use std::io;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::sync::Mutex;

/// Rings whose threads may still be ending. They are looked through whenever there is one more.
static PARTED: Mutex<Vec<Parted>> = Mutex::new(Vec::new());

struct Parted {
    thread: Pid,
    _ring: IoUring,
}

/// A ring that may outlast its thread.
pub(crate) struct Lasting {
    /// Until it is dropped.
    ring: Option<IoUring>,
    lasts: bool,
}

impl Lasting {
    /// One that ends when it is dropped.
    pub(crate) const fn new(ring: IoUring) -> Self {
        Self { ring: Some(ring), lasts: false }
    }

    /// It is dropped on its thread, and is to be there until that has ended.
    pub(crate) const fn last(&mut self) {
        self.lasts = true;
    }
}

impl Deref for Lasting {
    type Target = IoUring;

    fn deref(&self) -> &IoUring {
        self.ring.as_ref().expect("there until it is dropped")
    }
}

impl DerefMut for Lasting {
    fn deref_mut(&mut self) -> &mut IoUring {
        self.ring.as_mut().expect("there until it is dropped")
    }
}

impl Drop for Lasting {
    fn drop(&mut self) {
        if let Some(ring) = self.ring.take().filter(|_| self.lasts) {
            let mut parted = locked(&PARTED);
            parted.retain(|one| is_there(one.thread));
            parted.push(Parted { thread: gettid(), _ring: ring });
        }
    }
}

/// Whether a thread of this process has not ended.
fn is_there(thread: Pid) -> bool {
    Path::new(&format!("/proc/self/task/{}", thread.as_raw_nonzero())).exists()
}

/// A ring of a guest's own.
pub(crate) struct Apart {
    pub ring: Lasting,
    /// Of its poll in the engine's ring. No two of one engine have the same.
    pub number: u64,
    /// The poll is there.
    pub is_polled: bool,
}

impl Apart {
    /// With places for as many commands as the guest has at once.
    pub(crate) fn new(number: u64, commands: u16) -> io::Result<Self> {
        let ring = Lasting::new(IoUring::new(u32::from(commands.max(1)))?);
        Ok(Self { ring, number, is_polled: false })
    }

    /// Gives the kernel what has been pushed.
    pub(crate) fn submit(&mut self) {
        if !self.ring.submission().is_empty() {
            // What it does not take for want of memory stays there until the next turn.
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

    /// Ends one on this thread: how many are still there then. `None`: there are no rings here.
    fn end_one() -> Option<usize> {
        let mut ring = Lasting::new(IoUring::new(2).ok()?);
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
        // That of the last thread may be seen for a moment longer.
        assert!((1..=2).contains(&here), "{here}");
        // This thread lives.
        assert_eq!(end_one().map(|now| now - 1), Some(1));
    }
}
