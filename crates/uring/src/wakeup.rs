//! Wakes the engine's thread: the bell that any thread may ring, and the helpers' "something is
//! finished".
//!
//! Both are bits in one word. A bit that is already set is not announced again, so ringing a
//! thousand times costs one wake-up. The eventfd is written only if the driver is asleep; a driver
//! that is awake finds the bits by itself before it sleeps.
//!
//! Why no wake-up is lost: the sleeper stores `asleep`, then checks the bits; a ringer sets its
//! bit, then checks `asleep`. All four are sequentially consistent, so at least one of the two sees
//! the other. Either the sleeper stays awake, or the ringer writes the eventfd, which stays
//! readable until the sleeper has drained it.

use rustix::event::EventfdFlags;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The bell was rung from outside.
pub(crate) const RUNG: u32 = 1;
/// A helper thread has finished operations.
pub(crate) const FINISHED: u32 = 2;
/// A client of the ring has work.
pub(crate) const CLIENT: u32 = 4;

/// The signals that can wake a driver.
pub(crate) struct Signals {
    event: OwnedFd,
    raised: AtomicU32,
    asleep: AtomicBool,
}

impl Signals {
    pub(crate) fn new() -> std::io::Result<Arc<Self>> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self { event, raised: AtomicU32::new(0), asleep: AtomicBool::new(false) }))
    }

    /// Sets `bit` and wakes the driver if it sleeps. May be called from any thread.
    pub(crate) fn raise(&self, bit: u32) {
        let before = self.raised.fetch_or(bit, Ordering::SeqCst);
        if before & bit == 0 && self.asleep.swap(false, Ordering::SeqCst) {
            // This fails only if the counter is full; then the eventfd is readable, which is all
            // that is needed.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Takes the bits raised since the last call. What a bit announces was done before the bit was
    /// raised, so it is visible to the caller now.
    pub(crate) fn take(&self) -> u32 {
        if self.raised.load(Ordering::SeqCst) == 0 { 0 } else { self.raised.swap(0, Ordering::SeqCst) }
    }

    /// Returns true if anything has been raised since the last [`Signals::take`].
    pub(crate) fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire) != 0
    }

    /// Announces that the driver is about to sleep. Returns false if something was raised meanwhile
    /// and the driver must not sleep.
    #[must_use = "a driver that sleeps on `false` may sleep forever"]
    pub(crate) fn fall_asleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        if self.raised.load(Ordering::SeqCst) == 0 {
            return true;
        }
        self.wake_up();
        false
    }

    /// Marks the driver as awake, whatever ended its sleep.
    pub(crate) fn wake_up(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// Makes the eventfd unreadable again. Must be called whenever it was seen readable.
    pub(crate) fn drain(&self) {
        let mut count = [0_u8; 8];
        // It is fine if there is nothing to read: that is the state this call aims for.
        let _ = rustix::io::read(&self.event, &mut count);
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Rings the engine's thread. Any number of rings before it looks cause one
/// [`bcached_env::Event::Bell`]. A bell for the clients of a ring ([`crate::RingHandle::bell`])
/// gives them a turn instead.
///
/// What the ringer did before ringing is visible to the handler of the event. A bell outlives its
/// driver; ringing it then does nothing.
#[derive(Clone)]
pub struct Bell {
    signals: Arc<Signals>,
    bit: u32,
}

impl Bell {
    pub(crate) const fn of_engine(signals: Arc<Signals>) -> Self {
        Self { signals, bit: RUNG }
    }

    pub(crate) const fn of_guests(signals: Arc<Signals>) -> Self {
        Self { signals, bit: CLIENT }
    }

    /// Rings. Never blocks; costs a system call only if the driver sleeps.
    pub fn ring(&self) {
        self.signals.raise(self.bit);
    }
}

impl core::fmt::Debug for Bell {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str("Bell")
    }
}
