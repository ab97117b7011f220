//! Others that live on an engine's ring: queues of ublk devices, connections of NBD clients, disks of virtual machines.
//!
//! A ublk queue is a client of the engine like any other, and speaks to it through a port; so is a connection. What they need of the ring
//! is that their commands to the kernel go out with the engine's own and their ends come back with the engine's own, on one thread and
//! with one system call: that saves two hops a request, and only a ring that has a request's memory registered can do I/O on it.
//!
//! A guest's commands refer to no memory of ours, so nothing that a guest does can make them unsound; the ring keeps their device open. What
//! the kernel registers for them is memory of the kernel's own, which it holds as long as somebody reads or writes there.

use crate::ring::poll_in;
use crate::threads::locked;
use crate::wakeup::{Bell, GUEST, Signals};
use bcached_env::Slot;
use io_uring::opcode::{PollAdd, UringCmd16};
use io_uring::squeue::Entry;
use io_uring::types::Fd;
use rustix::ioctl::{Opcode, opcode};
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard};

/// Something that lives on a ring. It runs on the engine's thread, between two turns of its tasks: nothing of it may wait or take long.
pub trait Guest: Send {
    /// What its commands go to.
    fn device(&self) -> Arc<dyn AsFd + Send + Sync>;

    /// Gives `push` every command that is to go to the kernel now. One that `push` refuses, because the ring is full for the moment, is
    /// kept and given again on the next turn, which comes at once.
    fn turn(&mut self, push: &mut dyn FnMut(Command) -> bool);

    /// The command of `tag` has ended so: 0 and more, or a negative errno.
    fn completed(&mut self, tag: u16, result: i32);

    /// Whether it is to be told ([`Guest::input`]) as soon as something can be read from its device, or nothing will be any more. Asked after each
    /// of its turns.
    fn awaits_input(&self) -> bool {
        false
    }

    /// Something can be read. It is told again for as long as it does not read it.
    fn input(&mut self) {}

    /// The system does not tell of what can be read from its device; nor will it.
    fn input_refused(&mut self) {}

    /// Nothing of it is in the kernel, and nothing will be: it can be dropped.
    fn is_over(&self) -> bool;

    /// Whether something has come that nobody has rung for and no command tells of. It is asked over and over while the thread looks on
    /// before it sleeps, so it must be a look at memory.
    fn has_news(&self) -> bool {
        false
    }

    /// The thread is about to sleep: from now on somebody has to ring, or a command to end. False if there is something to do first; then
    /// it has its turn at once.
    fn may_sleep(&mut self) -> bool {
        true
    }

    /// How many buffers the kernel is to register for it with the ring, by itself: as many as it has tags.
    fn slots_wanted(&self) -> u16 {
        0
    }

    /// Their numbers begin with that, and are its own as long as it lives here. Told before its first turn, if there is room for them.
    fn slots_from(&mut self, _first: Slot) {}

    /// When the ring ends it need not wait for its commands.
    fn leaves_first(&self) -> bool {
        false
    }

    /// Its ring must not end while one of its commands may be on its way here; so many it has at most. They are on a ring of its own. When the
    /// engine's ring ends it is told of those that still come, but has no turn any more; when none has come for a moment, or after half a
    /// second, its ring ends with the thread, as it does if that is killed. `None`: it may end at any time.
    fn ends_at_rest(&self) -> Option<u16> {
        None
    }
}

/// What a guest has the kernel do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Command {
    /// To a queue of a ublk device.
    Ublk(UblkCommand),
    /// It ends when something can be read from the descriptor, or nothing will be any more.
    Readable {
        /// No other command of it is in the kernel.
        tag: u16,
    },
}

impl Command {
    pub(crate) const fn tag(self) -> u16 {
        match self {
            Self::Ublk(UblkCommand { tag, .. }) | Self::Readable { tag } => tag,
        }
    }

    /// As the ring takes it. It refers to no memory.
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
    /// The tag; no other command of it is in the kernel.
    pub tag: u16,
    /// How its request has ended: bytes, or a negative errno. `None`: it has had none yet, and is to fetch the first.
    pub result: Option<i32>,
    /// Where the kernel is to register the memory of its next request; `None`: nowhere. Of a device that was not made for that it
    /// means nothing.
    pub slot: Option<u16>,
}

/// `UBLK_U_IO_FETCH_REQ`: `_IOWR('u', 0x20, 16 bytes)`.
const FETCH: Opcode = opcode::read_write::<[u8; 16]>(b'u', 0x20);
/// `UBLK_U_IO_COMMIT_AND_FETCH_REQ`.
const COMMIT_AND_FETCH: Opcode = opcode::read_write::<[u8; 16]>(b'u', 0x21);

impl UblkCommand {
    /// As the ring takes it. It refers to no memory: its address is a number.
    fn entry(self, device: BorrowedFd<'_>) -> Entry {
        let mut bytes = [0; 16];
        bytes[0..2].copy_from_slice(&self.queue.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.result.unwrap_or(0).to_ne_bytes());
        let operation = if self.result.is_some() { COMMIT_AND_FETCH } else { FETCH };
        UringCmd16::new(Fd(device.as_raw_fd()), operation).cmd(bytes).addr(Some(self.register())).build()
    }
}

/// `UBLK_AUTO_BUF_REG_FALLBACK`: a request whose memory cannot be registered comes all the same, and says so.
const FALLBACK: u64 = 1 << 16;

impl UblkCommand {
    /// `struct ublk_auto_buf_reg`: the number in its lowest 16 bits, flags above. There is no slot of the largest number, so that nothing
    /// can be registered there.
    fn register(self) -> u64 {
        u64::from(self.slot.unwrap_or(u16::MAX)) | FALLBACK
    }
}

/// Where guests come to an engine's ring, from any thread. Clones lead to the same one.
#[derive(Clone)]
pub struct Guests {
    waiting: Arc<Mutex<Waiting>>,
    signals: Arc<Signals>,
}

struct Waiting {
    guests: VecDeque<Box<dyn Guest>>,
    /// Why none can come.
    closed: Option<&'static str>,
}

/// A guest that was not taken in.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct NoRing(&'static str);

impl Guests {
    pub(crate) fn new(signals: Arc<Signals>) -> Self {
        let waiting = Waiting { guests: VecDeque::new(), closed: None };
        Self { waiting: Arc::new(Mutex::new(waiting)), signals }
    }

    /// Takes `guest` in; it has its first turn as soon as the engine's thread looks.
    ///
    /// # Errors
    /// There is no ring, or no more; the guest has been dropped.
    pub fn host(&self, guest: Box<dyn Guest>) -> Result<(), NoRing> {
        let mut waiting = self.lock();
        if let Some(why) = waiting.closed {
            drop(waiting);
            return Err(NoRing(why));
        }
        waiting.guests.push_back(guest);
        drop(waiting);
        self.signals.raise(GUEST);
        Ok(())
    }

    /// Whether guests come to the same ring there.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.waiting, &other.waiting)
    }

    /// Gives the guests of this ring a turn.
    #[must_use]
    pub fn bell(&self) -> Bell {
        Bell::of_guests(Arc::clone(&self.signals))
    }

    pub(crate) fn close(&self, why: &'static str) {
        let gone = {
            let mut waiting = self.lock();
            waiting.closed = Some(why);
            std::mem::take(&mut waiting.guests)
        };
        // They may ring when they go.
        drop(gone);
    }

    pub(crate) fn take(&self) -> VecDeque<Box<dyn Guest>> {
        std::mem::take(&mut self.lock().guests)
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        locked(&self.waiting)
    }
}

impl core::fmt::Debug for Guests {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str("Guests")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_numbers_of_the_header() {
        // `_IOWR('u', 0x20, struct ublksrv_io_cmd)`, of 16 bytes.
        assert_eq!((FETCH, COMMIT_AND_FETCH), (0xc010_7520, 0xc010_7521));
    }
}
