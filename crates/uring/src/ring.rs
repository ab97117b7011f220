//! The ring: the only place where memory is handed to the kernel.
//!
//! Soundness invariant: **an operation stays in `operations`, untouched, from before its entry is
//! pushed until its completion has been reaped.** The slab may move an operation when it grows, but
//! not the operation's memory, which is on the heap. Nothing accesses that memory while it is in
//! flight. A ring that is dropped waits for the operations in the kernel, and leaks the memory of
//! those that do not complete.
//!
//! Back-pressure: at most as many operations are in the kernel as the completion queue has entries,
//! so it cannot overflow. Further operations wait in `backlog`, in order. Progress is guaranteed: a
//! backlog implies operations in the kernel, and each completion makes room.
#![allow(unsafe_code, reason = "submission entries carry raw pointers into memory the operation owns")]

mod client_reads;
mod clients;

pub(crate) use client_reads::ClientInputs;

use crate::blocking_io::TRANSFER_MAX;
use crate::buffer_slots::BufferSlots;
use crate::counters::{Counters, count};
use crate::device::{Device, DeviceKind};
use crate::errno::{is_transient, kind_of};
use crate::prepared_op::{Action, PreparedOp};
use crate::ring_lifetime::{DedicatedRing, DetachableRing};
use crate::wakeup::Signals;
use bcached_env::{Buffer, BufferSlot, Completion, IoErrorKind, LentBuffer, Payload};
use client_reads::INPUTS;
use clients::{HostedClient, OF_CLIENT, OF_DEDICATED};
use io_uring::squeue::{Entry, Flags};
use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};
use rustix::io::Errno;
use slab::Slab;
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// `user_data` of the poll on the eventfd; slab keys stay far below it.
const SIGNALS: u64 = u64::MAX;

/// After this many consecutive `EAGAIN` or `EINTR`, a helper thread does the operation, where
/// waiting is possible.
const ATTEMPTS: u8 = 8;

/// How long a dropped ring waits for the kernel before it leaks the operations in flight.
const CLOSE_MAX: Duration = Duration::from_secs(5);

/// Interval between two checks during that wait.
const LAST_LOOK: Duration = Duration::from_millis(100);

/// An operation and its progress.
struct RingOp {
    work: PreparedOp,
    /// Bytes transferred so far.
    done: usize,
    attempts: u8,
}

/// How an operation left the ring.
pub(crate) enum ReapOutcome {
    /// It completed.
    Done(Completion),
    /// The ring cannot do it; a helper thread starts it from the beginning.
    Helper(PreparedOp),
}

/// What to do with an operation after the kernel's answer.
enum OpOutcome {
    /// Nothing: it continues.
    Continue,
    /// A helper thread starts it from the beginning.
    Helper,
    /// It completed with this result.
    Done(Result<(), IoErrorKind>),
}

/// Number of rings that this process has created.
static RINGS: AtomicU64 = AtomicU64::new(0);

/// A ring and the operations and clients on it.
pub(crate) struct Ring {
    /// Unique among all rings that this process has created.
    number: u64,
    ring: DetachableRing,
    operations: Slab<RingOp>,
    /// Operations whose entry is not pushed yet.
    backlog: VecDeque<usize>,
    /// Operations whose entry is pushed and whose completion is not reaped.
    in_kernel: usize,
    in_kernel_max: usize,
    /// Operations that completed within one [`Ring::reap`]; kept to reuse its allocation.
    done: Vec<(PreparedOp, Result<(), IoErrorKind>)>,
    /// Keeps the eventfd open for the poll that is in the ring.
    signals: Arc<Signals>,
    is_watching: bool,
    counters: Arc<Counters>,
    clients: Slab<HostedClient>,
    /// Number of dedicated rings created for ring clients; source of their numbers.
    dedicated_count: u64,
    slots: BufferSlots,
    inputs: ClientInputs,
}

impl Ring {
    pub(crate) fn new(
        ring: IoUring,
        inputs: ClientInputs,
        signals: Arc<Signals>,
        counters: Arc<Counters>,
    ) -> Self {
        // Two entries are reserved for the polls of the signals and of the inputs. Polls of ring
        // clients' dedicated rings are few, and complete rarely.
        let places = usize::try_from(ring.params().cq_entries()).unwrap_or(usize::MAX).max(3) - 2;
        Self {
            number: RINGS.fetch_add(1, Ordering::Relaxed),
            ring: DetachableRing::new(ring),
            operations: Slab::with_capacity(places),
            backlog: VecDeque::with_capacity(places),
            in_kernel: 0,
            in_kernel_max: places,
            done: Vec::with_capacity(places),
            is_watching: false,
            counters,
            clients: Slab::new(),
            dedicated_count: 0,
            slots: BufferSlots::default(),
            inputs,
            signals,
        }
    }

    /// Accepts `work`; the kernel sees it with the next [`Ring::submit`] or [`Ring::sleep`].
    pub(crate) fn start(&mut self, work: PreparedOp) {
        let key = self.operations.insert(RingOp { work, done: 0, attempts: 0 });
        self.backlog.push_back(key);
        self.fill_operations();
        if self.backlog.back() == Some(&key) {
            count(&self.counters.queued);
        }
    }

    /// Returns true if the ring can do this kind of work itself.
    pub(crate) fn can_do(&self, work: &PreparedOp) -> bool {
        let is_of_here = |lent: &LentBuffer| lent.place().0.ring == self.number;
        if work.action.lent().is_some_and(|lent| !is_of_here(lent) || !work.device.takes_lent()) {
            return false;
        }
        match &work.action {
            Action::Read { .. } => true,
            // Where asking for the size may take long, a flush needs a thread to do so.
            Action::Flush => work.device.kind() == DeviceKind::Block || !work.device.submits_slowly(),
            // A write that reaches the end of a file must ask for its size first; without
            // RWF_DSYNC, a forced write takes two calls.
            Action::Write { offset, payload, fua } => {
                !work.device.reaches_end(offset + payload.len() as u64) && (!fua || work.device.dsync())
            }
            // BLKDISCARD is an ioctl.
            Action::Discard { .. } => work.device.kind() == DeviceKind::File,
            Action::Zero { .. } => true,
        }
    }

    /// Makes the ring poll the signals' eventfd; returns false if there is no room for that.
    fn watch_signals(&mut self) -> bool {
        if !self.is_watching {
            let poll = opcode::PollAdd::new(Fd(self.signals.as_fd().as_raw_fd()), poll_in()).multi(true);
            // SAFETY: the entry refers to no memory, and `signals` keeps the eventfd open as long
            // as the ring.
            self.is_watching =
                unsafe { self.ring.submission().push(&poll.build().user_data(SIGNALS)) }.is_ok();
        }
        self.is_watching
    }

    /// Pushes whatever there is room for; returns true if nothing is left over.
    fn fill(&mut self) -> bool {
        let has_room = self.clients.is_empty() || self.turn_clients();
        has_room && self.fill_operations()
    }

    /// Returns true if no operation on a device is in flight or queued.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_kernel == 0 && self.backlog.is_empty()
    }

    /// Pushes the operations that there is room for; returns true if none is left over.
    fn fill_operations(&mut self) -> bool {
        while self.in_kernel < self.in_kernel_max {
            let Some(key) = self.backlog.pop_front() else { return true };
            let operation = &mut self.operations[key];
            let entry = entry_of(operation).user_data(key as u64);
            // SAFETY: the entry points into memory owned by `operation`, which stays in the slab
            // until its completion is reaped (the invariant above). The device in it keeps the
            // descriptor open for as long.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                self.backlog.push_front(key);
                return false;
            }
            self.in_kernel += 1;
        }
        self.backlog.is_empty()
    }

    /// Submits whatever there is room for, and lets the kernel post what has completed. Does not
    /// block.
    pub(crate) fn submit(&mut self) {
        loop {
            let filled = self.fill();
            let queue = self.ring.submission();
            let is_idle = queue.is_empty() && !queue.taskrun() && !queue.cq_overflow();
            drop(queue);
            if is_idle {
                return;
            }
            // EBUSY and EAGAIN: completions must be reaped, or memory is short; the next turn tries
            // again. EINTR: the same. Nothing is lost, the entries stay in the queue.
            if self.ring.submit().is_err() || filled || self.in_kernel >= self.in_kernel_max {
                return;
            }
        }
    }

    /// Returns true if something has completed, if entering the kernel would post completions, or
    /// if a ring client has found work.
    pub(crate) fn has_news(&mut self) -> bool {
        let in_ring = self.ring.submission().taskrun() || !self.ring.completion().is_empty();
        let has_news = |hosted: &mut HostedClient| {
            hosted.client.has_news() || hosted.dedicated.as_mut().is_some_and(DedicatedRing::has_news)
        };
        in_ring || self.clients.iter_mut().any(|(_, hosted)| has_news(hosted))
    }

    /// Submits, and sleeps until something completes (a raised signal is a completion too) or
    /// `limit` has passed.
    pub(crate) fn sleep(&mut self, limit: Duration) {
        let is_told = self.watch_signals();
        let is_all = self.fill();
        if !is_told || !is_all && self.in_kernel < self.in_kernel_max {
            // More entries are waiting than the submission queue takes at once.
            return self.submit();
        }
        let time = Timespec::new().sec(limit.as_secs()).nsec(limit.subsec_nanos());
        // An error is a wake-up: the time is over, a signal arrived, or completions must be reaped
        // first.
        let _ = self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time));
    }

    /// Reaps all completions.
    pub(crate) fn reap(&mut self, mut sink: impl FnMut(ReapOutcome)) {
        let mut done = core::mem::take(&mut self.done);
        loop {
            let Some(entry) = self.ring.completion().next() else { break };
            if entry.user_data() == SIGNALS {
                self.is_watching = cqueue::more(entry.flags());
                self.signals.drain();
                continue;
            }
            if entry.user_data() == INPUTS {
                self.inputs_told();
                continue;
            }
            if entry.user_data() & OF_CLIENT != 0 {
                self.guest_completed(entry.user_data(), entry.result());
                continue;
            }
            if entry.user_data() & OF_DEDICATED != 0 {
                self.apart_told(entry.user_data(), cqueue::more(entry.flags()));
                continue;
            }
            let key = usize::try_from(entry.user_data()).expect("keys are slab indices");
            self.in_kernel -= 1;
            match self.step(key, entry.result()) {
                OpOutcome::Continue => {}
                OpOutcome::Helper => sink(ReapOutcome::Helper(self.operations.remove(key).work)),
                OpOutcome::Done(result) => done.push((self.operations.remove(key).work, result)),
            }
        }
        self.reap_aparts();
        // Done after all completions are reaped: one check of a device's size covers everything
        // that completed before it.
        let mut looked: Option<(Arc<Device>, Result<(), IoErrorKind>)> = None;
        for (work, result) in done.drain(..) {
            let mut whole = Ok(());
            if result.is_ok() && work.device.must_be_whole(&work.action) && !work.device.submits_slowly() {
                let known = looked.as_ref().filter(|(device, _)| Arc::ptr_eq(device, &work.device));
                whole = known.map_or_else(|| work.device.look_whole(), |(_, whole)| *whole);
                looked = Some((Arc::clone(&work.device), whole));
            }
            sink(ReapOutcome::Done(work.finish(whole.and(result))));
        }
        self.done = done;
    }

    /// Returns what follows from the kernel's answer. If the operation continues, it is queued
    /// already.
    fn step(&mut self, key: usize, answer: i32) -> OpOutcome {
        let operation = &mut self.operations[key];
        let device = &operation.work.device;
        if let Ok(got) = usize::try_from(answer) {
            let Some(length) = operation.length() else { return OpOutcome::Done(Ok(())) };
            return match device.advance(operation.done, got, length) {
                Some(done) if done == length => OpOutcome::Done(Ok(())),
                Some(done) => {
                    (operation.done, operation.attempts) = (done, 0);
                    count(&self.counters.continued);
                    self.backlog.push_back(key);
                    OpOutcome::Continue
                }
                // The file ended before the device does, or the device stopped accepting data; a
                // helper thread finds out which.
                None => OpOutcome::Helper,
            };
        }
        let errno = Errno::from_raw_os_error(answer.saturating_neg());
        if is_transient(errno) {
            count(&self.counters.retried);
            operation.attempts += 1;
            if operation.attempts < ATTEMPTS {
                self.backlog.push_back(key);
                return OpOutcome::Continue;
            }
            return OpOutcome::Helper;
        }
        if errno == Errno::OPNOTSUPP && operation.learn_refusal() {
            return OpOutcome::Helper;
        }
        if operation.work.action.lent().is_some() && matches!(errno, Errno::INVAL | Errno::FAULT) {
            // The request's memory does not suit this device, or is no longer registered: a helper
            // thread copies.
            return OpOutcome::Helper;
        }
        OpOutcome::Done(Err(kind_of(errno)))
    }
}

impl RingOp {
    /// Bytes to transfer; `None` for operations that answer with zero.
    fn length(&self) -> Option<usize> {
        match &self.work.action {
            Action::Read { buffer, .. } => Some(buffer.len()),
            Action::Write { payload, .. } => Some(payload.len()),
            _ => None,
        }
    }

    /// Remembers that the device does not support this; returns true if a helper thread can do it
    /// another way.
    fn learn_refusal(&self) -> bool {
        match &self.work.action {
            Action::Write { fua: true, .. } => self.work.device.refuse_dsync(),
            Action::Zero { unmap, .. } => {
                self.work.device.refuse_zeroes(*unmap);
                return false;
            }
            Action::Discard { .. } => {
                self.work.device.refuse_discard();
                return false;
            }
            _ => return false,
        }
        true
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.backlog.clear();
        // Ring clients that can continue elsewhere do so now, rather than after a hung device has
        // answered.
        self.clients.retain(|_, hosted| !hosted.client.leaves_first());
        let deadline = Instant::now() + CLOSE_MAX;
        while self.in_kernel > 0 && Instant::now() < deadline {
            self.take_last(LAST_LOOK);
        }
        // Last, so that nothing happens between this and the end of the ring.
        self.let_guests_rest();
        if self.in_kernel > 0 {
            // The kernel may still write into these buffers, so they are never freed.
            core::mem::forget(core::mem::take(&mut self.operations));
        }
    }
}

impl Ring {
    /// Reaps what the kernel completes within `limit`, for a ring that is about to end. Submits
    /// nothing new. Returns true if some of it belonged to ring clients with dedicated rings.
    fn take_last(&mut self, limit: Duration) -> bool {
        let time = Timespec::new().sec(limit.as_secs()).nsec(limit.subsec_nanos());
        let _ = self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time));
        while let Some(entry) = self.ring.completion().next() {
            match entry.user_data() {
                SIGNALS => self.signals.drain(),
                INPUTS => {}
                data if data & (OF_CLIENT | OF_DEDICATED) != 0 => {}
                // Short transfers are not continued: their requester is gone, as after a crash.
                _ => self.in_kernel -= 1,
            }
        }
        self.reap_aparts()
    }
}

/// The entry for the part of an operation that is still to be done.
fn entry_of(operation: &mut RingOp) -> Entry {
    let fd = Fd(operation.work.device.file().as_raw_fd());
    let done = operation.done;
    let entry = match &mut operation.work.action {
        Action::Read { offset, buffer, bounce } => {
            read_entry(fd, *offset + done as u64, bounce.as_mut().unwrap_or(buffer), done)
        }
        Action::Write { offset, payload, fua } => {
            write_entry(fd, *offset + done as u64, payload, (done, if *fua { libc::RWF_DSYNC } else { 0 }))
        }
        Action::Flush => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
        Action::Discard { offset, length } | Action::Zero { offset, length, unmap: true } => {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            opcode::Fallocate::new(fd, *length).offset(*offset).mode(mode).build()
        }
        Action::Zero { offset, length, unmap: false } => {
            let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
            opcode::Fallocate::new(fd, *length).offset(*offset).mode(mode).build()
        }
    };
    if operation.work.device.submits_slowly() { entry.flags(Flags::ASYNC) } else { entry }
}

/// Reads the data at `offset` into the buffer behind its first `done` bytes.
fn read_entry(fd: Fd, offset: u64, buffer: &mut Buffer, done: usize) -> Entry {
    if let Some(lent) = buffer.lent() {
        let ((BufferSlot { number: slot, .. }, start), length) = (lent.place(), length_of(lent.len() - done));
        return opcode::ReadFixed::new(fd, registered(start + done), length, slot).offset(offset).build();
    }
    let rest = &mut buffer.as_mut_slice()[done..];
    opcode::Read::new(fd, rest.as_mut_ptr(), length_of(rest.len())).offset(offset).build()
}

/// Writes all but the first `done` bytes to `offset`.
fn write_entry(fd: Fd, offset: u64, payload: &Payload, (done, flags): (usize, i32)) -> Entry {
    if let Some(lent) = payload.lent() {
        let ((BufferSlot { number: slot, .. }, start), length) = (lent.place(), length_of(lent.len() - done));
        let write = opcode::WriteFixed::new(fd, registered(start + done), length, slot);
        return write.offset(offset).rw_flags(flags).build();
    }
    let rest = &payload.as_slice()[done..];
    opcode::Write::new(fd, rest.as_ptr(), length_of(rest.len())).offset(offset).rw_flags(flags).build()
}

/// A position in a buffer that the kernel has registered by itself. It is counted from the buffer's
/// beginning, and is no address of this process.
const fn registered(start: usize) -> *mut u8 {
    core::ptr::without_provenance_mut(start)
}

/// Unregisters the buffers in `count` slots of the ring's table, from `first` on. Operations that
/// still read or write such a buffer keep its memory until they have completed.
pub(crate) fn clear_slots(ring: &IoUring, first: u32, count: usize) -> std::io::Result<()> {
    let nothing = libc::iovec { iov_base: core::ptr::null_mut(), iov_len: 0 };
    // SAFETY: the slots are replaced with nothing, so no memory is referred to.
    unsafe { ring.submitter().register_buffers_update(first, &vec![nothing; count], None) }
}

/// The length of one transfer; the rest is continued like a short transfer.
fn length_of(bytes: usize) -> u32 {
    u32::try_from(bytes.min(TRANSFER_MAX)).expect("a transfer is at most 1 GiB")
}

pub(crate) fn poll_in() -> u32 {
    u32::try_from(libc::POLLIN).expect("a small positive flag")
}

/// Pushes an operation that does nothing, for the probe.
pub(crate) fn push_nothing(ring: &mut IoUring) -> Result<(), io_uring::squeue::PushError> {
    // SAFETY: the entry refers to no memory.
    unsafe { ring.submission().push(&opcode::Nop::new().build()) }
}

#[cfg(test)]
mod tests;
