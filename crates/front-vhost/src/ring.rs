//! One virtqueue: its configuration by the VMM, the chains taken from it, and notifications in both
//! directions.
//!
//! **Life cycle.** It is configured by messages, started by the kick descriptor, and stopped when
//! the VMM asks for its base. Each start is a new generation: a reply to a request of an earlier
//! one is not for this ring any more.

use crate::chain::DescriptorTable;
use crate::inflight::{InflightArea, InflightTracker};
use crate::memory::GuestMemory;
use crate::signal::{Call, Kick};
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use thiserror::Error;
use virtio_queue::{Error as QueueError, Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::{Bytes as _, GuestAddress};

/// The most entries of a ring.
pub(crate) const RING_SIZE_MAX: u16 = 1024;
/// Flag of the available ring by which a driver without event index suppresses interrupts.
const NO_INTERRUPT: u16 = 1;

/// Why a ring cannot be used.
#[derive(Debug, Error)]
pub(crate) enum RingError {
    #[error("a ring cannot have {0} entries")]
    Size(u32),
    #[error("the parts of a ring are not at valid places in memory")]
    Place,
    #[error("the guest announces available entries that cannot exist")]
    Available,
    #[error("the ring is no longer in the guest's memory")]
    Gone,
}

/// A virtqueue.
pub(crate) struct Ring {
    queue: Queue,
    kick: Option<Kick>,
    call: Option<Call>,
    error: Option<Call>,
    is_enabled: bool,
    is_paused: bool,
    generation: u32,
    /// Chains submitted to the engine and not given back.
    pub(crate) under_way: u32,
    /// Heads that a former daemon had taken, to be taken again.
    left: VecDeque<u16>,
    tracker: Option<InflightTracker>,
    /// Chains were given back, and the guest was not notified yet.
    has_news: bool,
    /// Its content was invalid when it was last read.
    is_faulty: bool,
    /// Kicks are enabled.
    is_listening: bool,
}

/// A chain that has been taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ChainHead {
    pub(crate) index: u16,
    /// It is the available entry just before the next one: it can be put back.
    is_newest: bool,
}

impl Ring {
    pub(crate) fn new() -> Result<Self, QueueError> {
        Ok(Self {
            queue: Queue::new(RING_SIZE_MAX)?,
            kick: None,
            call: None,
            error: None,
            is_enabled: false,
            is_paused: false,
            generation: 0,
            under_way: 0,
            left: VecDeque::new(),
            tracker: None,
            has_news: false,
            is_faulty: false,
            is_listening: true,
        })
    }

    /// Sets the number of entries.
    pub(crate) fn resize(&mut self, entries: u32) -> Result<(), RingError> {
        let size = u16::try_from(entries).map_err(|_| RingError::Size(entries))?;
        self.queue.try_set_size(size).map_err(|_| RingError::Size(entries))
    }

    /// Sets the addresses of its parts.
    pub(crate) fn place(
        &mut self,
        descriptors: GuestAddress,
        available: GuestAddress,
        used: GuestAddress,
    ) -> Result<(), RingError> {
        let queue = &mut self.queue;
        queue
            .try_set_desc_table_address(descriptors)
            .and_then(|()| queue.try_set_avail_ring_address(available))
            .and_then(|()| queue.try_set_used_ring_address(used))
            .map_err(|_| RingError::Place)
    }

    /// Sets the index of the next available entry to be taken.
    pub(crate) fn set_base(&mut self, base: u16) {
        self.queue.set_next_avail(base);
    }

    pub(crate) fn set_event_index(&mut self, is_used: bool) {
        self.queue.set_event_idx(is_used);
    }

    pub(crate) const fn set_enabled(&mut self, is_enabled: bool) {
        self.is_enabled = is_enabled;
    }

    /// Sets how the guest is notified of answers. It is notified immediately, because a process may
    /// have died after giving an answer.
    pub(crate) fn set_call(&mut self, call: Option<File>) {
        self.call = call.map(Call::new);
        self.ring_call();
    }

    pub(crate) fn set_error(&mut self, error: Option<File>) {
        self.error = error.map(Call::new);
    }

    /// Sets how the guest signals requests, which starts the ring.
    pub(crate) fn set_kick(
        &mut self,
        kick: File,
        memory: &GuestMemory,
        inflight: Option<(&InflightArea, u16)>,
    ) -> Result<(), RingError> {
        self.kick = Some(Kick::new(kick));
        self.is_listening = true;
        if self.queue.ready() {
            return Ok(());
        }
        self.queue.set_ready(true);
        if !self.queue.is_valid(memory) {
            self.queue.set_ready(false);
            return Err(RingError::Place);
        }
        self.generation = self.generation.wrapping_add(1);
        self.under_way = 0;
        let used = self.queue.used_idx(memory, Ordering::Acquire).map_err(|_| RingError::Gone)?.0;
        self.queue.set_next_used(used);
        self.tracker = inflight.and_then(|(area, queue)| area.tracker(queue, self.queue.size()));
        if let Some(tracker) = &mut self.tracker {
            let left = tracker.resume(self.queue.size(), used, self.queue.next_avail());
            self.queue.set_next_avail(left.next_available);
            self.left = left.heads.into();
        }
        Ok(())
    }

    /// Takes no more chains. Those in flight may still be given back.
    pub(crate) const fn pause(&mut self) {
        self.is_paused = true;
    }

    /// Ends this generation, and returns the index of the next entry to be taken. `kept` is a chain
    /// that was taken and not submitted.
    pub(crate) fn stop(&mut self, kept: Option<ChainHead>) -> u16 {
        if let Some(head) = kept
            && head.is_newest
        {
            self.queue.set_next_avail(self.queue.next_avail().wrapping_sub(1));
            if let Some(tracker) = &self.tracker {
                tracker.untake(head.index);
            }
        }
        self.is_paused = false;
        self.queue.set_ready(false);
        self.generation = self.generation.wrapping_add(1);
        self.under_way = 0;
        self.left.clear();
        (self.kick, self.call, self.tracker) = (None, None, None);
        self.queue.next_avail()
    }

    pub(crate) fn is_started(&self) -> bool {
        self.queue.ready()
    }

    /// Whether chains may be taken.
    pub(crate) fn is_running(&self) -> bool {
        self.is_enabled && !self.is_paused && self.queue.ready()
    }

    /// Whether chains left by a former daemon were not taken again yet.
    pub(crate) fn has_left(&self) -> bool {
        !self.left.is_empty()
    }

    /// Whether requests in flight are recorded for the next daemon.
    pub(crate) const fn is_tracked(&self) -> bool {
        self.tracker.is_some()
    }

    pub(crate) const fn generation(&self) -> u32 {
        self.generation
    }

    pub(crate) fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Its descriptor table.
    pub(crate) fn table(&self) -> DescriptorTable {
        DescriptorTable {
            at: GuestAddress(self.queue.desc_table()),
            descriptors: u32::from(self.queue.size()),
        }
    }

    /// The kick to wait for, while the ring runs.
    pub(crate) fn kick(&self) -> Option<BorrowedFd<'_>> {
        if self.is_running() { self.kick.as_ref().map(|kick| kick.as_fd()) } else { None }
    }

    /// Clears a kick. If it is not an eventfd, it is not waited for again.
    pub(crate) fn clear_kick(&mut self) {
        self.kick.take_if(|kick| !kick.clear());
    }

    /// Whether the engine's thread may serve the ring: none of its descriptors can block, and
    /// `watch` signals its kicks from now on.
    pub(crate) fn is_fit(&mut self, watch: &Arc<OwnedFd>) -> bool {
        if !self.is_running() {
            return true;
        }
        let tells = self.call.as_ref().is_none_or(Call::never_waits);
        tells && !self.is_faulty && self.kick.as_mut().is_some_and(|kick| kick.is_watched_by(watch))
    }

    /// Whether there is a chain to take.
    pub(crate) fn has_available(&self, memory: &GuestMemory) -> bool {
        let is_there = |next| next != self.queue.next_avail();
        self.has_left() || self.queue.avail_idx(memory, Ordering::Relaxed).is_ok_and(|next| is_there(next.0))
    }

    /// Records whether its content was invalid.
    pub(crate) const fn set_faulty(&mut self, is_faulty: bool) {
        self.is_faulty = is_faulty;
    }

    /// Takes the next chain to work on, if there is one.
    pub(crate) fn take(&mut self, memory: &GuestMemory) -> Result<Option<ChainHead>, RingError> {
        if let Some(index) = self.left.pop_front() {
            return Ok(Some(ChainHead { index, is_newest: false }));
        }
        let mut available = self.queue.iter(memory).map_err(|error| match error {
            QueueError::InvalidAvailRingIndex => RingError::Available,
            _ => RingError::Gone,
        })?;
        let Some(chain) = available.next() else { return Ok(None) };
        let index = chain.head_index();
        if index >= self.queue.size() {
            return Err(RingError::Available);
        }
        if let Some(tracker) = &mut self.tracker {
            tracker.begin(index);
        }
        Ok(Some(ChainHead { index, is_newest: true }))
    }

    /// Gives a chain back, with `written` bytes written to it.
    pub(crate) fn give_back(
        &mut self,
        memory: &GuestMemory,
        index: u16,
        written: u32,
    ) -> Result<(), RingError> {
        if let Some(tracker) = &self.tracker {
            tracker.ending(index);
        }
        self.queue.add_used(memory, index, written).map_err(|_| RingError::Gone)?;
        if let Some(tracker) = &self.tracker {
            tracker.ended(index, self.queue.next_used());
        }
        self.has_news = true;
        Ok(())
    }

    /// Notifies the guest of chains given back, unless it suppresses that.
    pub(crate) fn tell(&mut self, memory: &GuestMemory) {
        if !std::mem::take(&mut self.has_news) {
            return;
        }
        let wanted = self.queue.needs_notification(memory).unwrap_or(true);
        let flags = || memory.load::<u16>(GuestAddress(self.queue.avail_ring()), Ordering::Relaxed);
        let is_quiet = !self.queue.event_idx_enabled()
            && flags().is_ok_and(|flags| u16::from_le(flags) & NO_INTERRUPT != 0);
        if wanted && !is_quiet {
            self.ring_call();
        }
    }

    /// Signals that the ring is broken, if the VMM has set up a descriptor for that.
    pub(crate) fn tell_error(&mut self) {
        self.error.as_mut().into_iter().for_each(Call::ring);
    }

    fn ring_call(&mut self) {
        self.call.as_mut().into_iter().for_each(Call::ring);
    }

    /// Disables kicks while chains are being taken anyway.
    pub(crate) fn hush(&mut self, memory: &GuestMemory) {
        if std::mem::take(&mut self.is_listening) {
            // A hint: if the ring is not there, taking reports that.
            let _hint = self.queue.disable_notification(memory);
        }
    }

    /// Enables kicks again. Returns true if chains have arrived meanwhile.
    pub(crate) fn listen(&mut self, memory: &GuestMemory) -> bool {
        self.is_listening = true;
        self.queue.enable_notification(memory).unwrap_or(false)
    }
}
