//! Clients of an engine's ring: queues of ublk devices, connections of NBD clients, disks of
//! virtual machines.
//!
//! A ublk queue is a client of the engine like any other, and talks to it through a port; so is a
//! connection. From the ring they need that their commands are submitted and completed together
//! with the engine's own operations, on one thread and with one system call. That saves two hops
//! per request, and only a ring that has registered a request's memory can do I/O on it.
//!
//! A ring client's commands refer to no memory of this process, so nothing that a ring client does
//! can make them unsound; the ring keeps the ring client's device open. The buffers that the kernel
//! registers for them are the kernel's own memory, which it keeps as long as an operation reads or
//! writes there.

use crate::ring::poll_in;
use crate::threads::locked;
use crate::wakeup::{Bell, CLIENT, Signals};
use bcached_env::BufferSlot;
use io_uring::opcode::{PollAdd, UringCmd16};
use io_uring::squeue::Entry;
use io_uring::types::Fd;
use rustix::ioctl::{Opcode, opcode};
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard};

/// Something that lives on a ring. It runs on the engine's thread, between two turns of its tasks,
/// so no method may block or take long.
pub trait RingClient: Send {
    /// The device that its commands go to.
    fn device(&self) -> Arc<dyn AsFd + Send + Sync>;

    /// Passes every command that is to be submitted now to `push`. A command that `push` refuses,
    /// because the ring is full for the moment, must be kept and passed again on the next turn,
    /// which follows at once.
    fn turn(&mut self, push: &mut dyn FnMut(Command) -> bool);

    /// The command of `tag` has completed with this result: 0 or more, or a negative errno.
    fn completed(&mut self, tag: u16, result: i32);

    /// Returns true if the ring client is to be notified ([`RingClient::input`]) as soon as its
    /// device is readable or at end of file. Called after each of its turns.
    fn awaits_input(&self) -> bool {
        false
    }

    /// The device is readable. Called again as long as the ring client does not read.
    fn input(&mut self) {}

    /// The system cannot report when the device is readable, and never will.
    fn input_refused(&mut self) {}

    /// Returns true if nothing of the ring client is in the kernel or will be: it can be dropped.
    fn is_over(&self) -> bool;

    /// Returns true if work has arrived that neither a bell nor a command's completion announces.
    /// Called repeatedly while the thread busy-polls before it sleeps, so it may only look at
    /// memory.
    fn has_news(&self) -> bool {
        false
    }

    /// The thread is about to sleep: from now on, only a bell or the completion of a command wakes
    /// it. Returns false if the ring client has something to do first; it then gets its turn at
    /// once.
    fn may_sleep(&mut self) -> bool {
        true
    }

    /// Returns how many buffers the kernel is to register for the ring client with the ring, by
    /// itself: as many as it has tags.
    fn slots_wanted(&self) -> u16 {
        0
    }

    /// Tells the ring client the first of its buffer slots, which are its own as long as it lives
    /// here. Called before its first turn, if there is room for them.
    fn slots_from(&mut self, _first: BufferSlot) {}

    /// Returns true if the ring need not wait for the ring client's commands when it ends.
    fn leaves_first(&self) -> bool {
        false
    }

    /// Returns the maximum number of commands the ring client has at once if its ring must not end
    /// while one of its requests may be arriving; `None` if the ring may end at any time. The
    /// commands of such a ring client are on a dedicated ring. When the engine's ring ends, the
    /// ring client is still told of completions, but gets no further turn. When none has arrived
    /// for a moment, or after half a second, its ring ends with the thread, as it does if the
    /// thread is killed.
    fn ends_at_rest(&self) -> Option<u16> {
        None
    }
}

/// A command of a ring client to the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Command {
    /// A command to a queue of a ublk device.
    Ublk(UblkCommand),
    /// Completes when the descriptor is readable or at end of file.
    Readable {
        /// The tag; no other command with it is in the kernel.
        tag: u16,
    },
}

impl Command {
    pub(crate) const fn tag(self) -> u16 {
        match self {
            Self::Ublk(UblkCommand { tag, .. }) | Self::Readable { tag } => tag,
        }
    }

    /// Returns the ring's entry for it. It refers to no memory.
    pub(crate) fn entry(self, device: BorrowedFd<'_>) -> Entry {
        match self {
            Self::Ublk(command) => command.entry(device),
            Self::Readable { .. } => PollAdd::new(Fd(device.as_raw_fd()), poll_in()).build(),
        }
    }
}

/// A command to one tag of a queue of a ublk device (`linux/ublk_cmd.h`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UblkCommand {
    /// The queue.
    pub queue: u16,
    /// The tag; no other command with it is in the kernel.
    pub tag: u16,
    /// The result of its request: bytes, or a negative errno. `None`: there was no request yet, and
    /// the command fetches the first.
    pub result: Option<i32>,
    /// The slot where the kernel is to register the memory of its next request; `None`: nowhere.
    /// Ignored for a device that was not created for that.
    pub slot: Option<u16>,
}

/// `UBLK_U_IO_FETCH_REQ`: `_IOWR('u', 0x20, 16 bytes)`.
const FETCH: Opcode = opcode::read_write::<[u8; 16]>(b'u', 0x20);
/// `UBLK_U_IO_COMMIT_AND_FETCH_REQ`.
const COMMIT_AND_FETCH: Opcode = opcode::read_write::<[u8; 16]>(b'u', 0x21);

impl UblkCommand {
    /// Returns the ring's entry for it. It refers to no memory: its address field holds a number.
    fn entry(self, device: BorrowedFd<'_>) -> Entry {
        let mut bytes = [0; 16];
        bytes[0..2].copy_from_slice(&self.queue.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.result.unwrap_or(0).to_ne_bytes());
        let operation = if self.result.is_some() { COMMIT_AND_FETCH } else { FETCH };
        UringCmd16::new(Fd(device.as_raw_fd()), operation).cmd(bytes).addr(Some(self.register())).build()
    }
}

/// `UBLK_AUTO_BUF_REG_FALLBACK`: a request whose memory cannot be registered arrives all the same,
/// with a flag that says so.
const FALLBACK: u64 = 1 << 16;

impl UblkCommand {
    /// Encodes `struct ublk_auto_buf_reg`: the slot in its lowest 16 bits, flags above. No slot has
    /// the largest number, so nothing can be registered there.
    fn register(self) -> u64 {
        u64::from(self.slot.unwrap_or(u16::MAX)) | FALLBACK
    }
}

/// Sends ring clients to an engine's ring, from any thread. Clones lead to the same ring.
#[derive(Clone)]
pub struct RingHandle {
    waiting: Arc<Mutex<ClientQueue>>,
    signals: Arc<Signals>,
}

struct ClientQueue {
    clients: VecDeque<Box<dyn RingClient>>,
    /// Why no ring client is accepted any more.
    closed: Option<&'static str>,
}

/// A ring client was not accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct RingClosed(&'static str);

impl RingHandle {
    pub(crate) fn new(signals: Arc<Signals>) -> Self {
        let waiting = ClientQueue { clients: VecDeque::new(), closed: None };
        Self { waiting: Arc::new(Mutex::new(waiting)), signals }
    }

    /// Hosts `client`; it gets its first turn as soon as the engine's thread looks.
    ///
    /// # Errors
    /// There is no ring, or it has ended; the ring client has been dropped.
    pub fn host(&self, client: Box<dyn RingClient>) -> Result<(), RingClosed> {
        let mut waiting = self.lock();
        if let Some(why) = waiting.closed {
            drop(waiting);
            return Err(RingClosed(why));
        }
        waiting.clients.push_back(client);
        drop(waiting);
        self.signals.raise(CLIENT);
        Ok(())
    }

    /// Returns true if both lead to the same ring.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.waiting, &other.waiting)
    }

    /// Returns a bell that gives the clients of this ring a turn.
    #[must_use]
    pub fn bell(&self) -> Bell {
        Bell::of_guests(Arc::clone(&self.signals))
    }

    pub(crate) fn close(&self, why: &'static str) {
        let gone = {
            let mut waiting = self.lock();
            waiting.closed = Some(why);
            std::mem::take(&mut waiting.clients)
        };
        // Dropped without the lock: ring clients may ring when they are dropped.
        drop(gone);
    }

    pub(crate) fn take(&self) -> VecDeque<Box<dyn RingClient>> {
        std::mem::take(&mut self.lock().clients)
    }

    fn lock(&self) -> MutexGuard<'_, ClientQueue> {
        locked(&self.waiting)
    }
}

impl core::fmt::Debug for RingHandle {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str("RingHandle")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_numbers_of_the_header() {
        // `_IOWR('u', 0x20, struct ublksrv_io_cmd)`, which has 16 bytes.
        assert_eq!((FETCH, COMMIT_AND_FETCH), (0xc010_7520, 0xc010_7521));
    }
}
