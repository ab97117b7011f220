//! One queue of a device: a client of an engine's ring, and a client of the volume's engine.
//!
//! ```text
//!            kernel                       queue                         engine
//!   request ──► FETCH / COMMIT ends ──► description, data read ──port──► request
//!   answer  ◄── COMMIT_AND_FETCH    ◄── data written           ◄──port── reply
//! ```
//!
//! Each tag is in one place at a time: with the kernel, waiting for room in the port, with the
//! engine, or waiting to be committed. It is answered once. A request that the engine could not
//! finish because the engine is going away is answered only if the device is removed, too.
//! Otherwise it is left to the device's next server, to which the kernel reissues it.
//!
//! The data of all of them together is limited by [`BYTES_MAX`]. A request for which there is no
//! room is not read before others are done, and its data stays in the kernel's pages.
//!
//! Data is in pages of the submitting process, which only the kernel can access. If the kernel
//! registers them with the ring, they are lent to the engine ([`crate::pages`]), and devices access
//! them directly. Otherwise, and where the engine needs the bytes, reads and writes of the
//! character device copy them. A request whose pages are lent is answered once the engine has
//! returned all of them.

use crate::abi::{IoDescriptor, IoOperation, data_offset};
use crate::pages::QueuePages;
use crate::request_descriptors::RequestDescriptors;
use bcached_port::{
    Bell, BufferPool, BufferSlot, ErrorKind, Operation, Payload, Reply, ReplyReceiver, RequestSender, Route,
    SECTOR_BYTES,
};
use bcached_uring::{Command, RingClient, UblkCommand};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The most request data that the queues of a device hold in memory, in bytes. Each has an equal
/// part of it. A single request may be larger than that.
pub const BYTES_MAX: usize = 8 << 20;

/// The memory that they keep for later requests, in bytes: enough for a request of 4 KiB for each
/// tag of a queue, or for some large ones.
const STOCK_BYTES: usize = 2 << 20;

/// The state shared by the queues and the thread of their device.
pub(crate) struct DeviceShared {
    /// The device is being removed permanently: requests that the engine does not finish fail.
    pub is_going: AtomicBool,
    /// The memory of requests is lent to the engine.
    pub lends: AtomicBool,
    /// The volume is served by the engine of another ring, which cannot use memory registered with
    /// this one.
    pub is_abroad: AtomicBool,
    /// The ring must not end while a request is in flight: see
    /// [`DriverFeatures::may_complete_twice`](crate::DriverFeatures::may_complete_twice).
    pub ends_at_rest: bool,
    /// For each queue: a reply has arrived since its last turn, or there is room again.
    rung: Box<[AtomicBool]>,
}

impl DeviceShared {
    /// For so many queues.
    pub(crate) fn of(queues: u16, ends_at_rest: bool) -> Self {
        let rung = (0..queues).map(|_| AtomicBool::new(false)).collect();
        Self {
            is_going: AtomicBool::new(false),
            lends: AtomicBool::new(false),
            is_abroad: AtomicBool::new(false),
            ends_at_rest,
            rung,
        }
    }

    /// Makes all queues check everything in their next turn.
    pub(crate) fn ring(&self) {
        self.rung.iter().for_each(|rung| rung.store(true, Ordering::Release));
    }

    fn rung_of(&self, queue: u16) -> &AtomicBool {
        &self.rung[usize::from(queue)]
    }

    /// A queue's part of a total for the device.
    fn part(&self, bytes: usize) -> usize {
        bytes / self.rung.len()
    }
}

/// Runs its closure when it is dropped, that is, with the last queue that shares it.
pub(crate) struct DropCallback(Option<Box<dyn FnOnce() + Send + Sync>>);

impl DropCallback {
    /// The closure runs on the ring's thread, so it must not wait.
    pub(crate) fn new(call: impl FnOnce() + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self(Some(Box::new(call))))
    }
}

impl Drop for DropCallback {
    fn drop(&mut self) {
        if let Some(call) = self.0.take() {
            call();
        }
    }
}

/// See the file's documentation.
pub(crate) struct Queue {
    number: u16,
    depth: u16,
    device: Arc<File>,
    descriptors: RequestDescriptors,
    route: Route,
    requests: RequestSender<PendingRequest>,
    replies: ReplyReceiver<PendingRequest>,
    /// Tags to be passed to the kernel, with the results of their requests, or none for a tag that
    /// only fetches.
    to_push: VecDeque<(u16, Option<i32>)>,
    /// Tags whose requests have not been read yet, for lack of memory.
    unread: VecDeque<u16>,
    /// Bytes of data that are in memory.
    held: usize,
    /// Buffers of completed requests, kept for reuse.
    stock: BufferPool,
    /// Requests for which the port had no room.
    waiting: VecDeque<(PendingRequest, Operation)>,
    /// Tags whose requests the engine has given up.
    given_up: Vec<u16>,
    /// Whether the device was created with memory registration.
    registers: bool,
    /// Changes are refused, whatever the kernel lets through.
    read_only: bool,
    /// The memory that the kernel registers; for no tags if there was no room for registration.
    queue_pages: QueuePages,
    /// Tags whose requests have ended with this result, but whose memory is not completely
    /// returned.
    lingering: Vec<(u16, i32)>,
    in_kernel: usize,
    /// The kernel has told a tag that the device is being removed.
    is_aborted: bool,
    shared: Arc<DeviceShared>,
    /// Dropped with the last queue.
    _on_end: Arc<DropCallback>,
}

/// A request that the engine has.
struct PendingRequest {
    tag: u16,
    /// The result for the kernel on success: bytes, or 0.
    bytes: i32,
    /// Bytes of its data in memory.
    held: usize,
    is_read: bool,
    /// The data written, whose memory is reused.
    written: Option<Payload>,
}

/// The location of a queue and the volume it serves.
pub(crate) struct QueueParams {
    pub device: Arc<File>,
    pub number: u16,
    pub depth: u16,
    /// The device was created so that the memory of requests is registered with the ring.
    pub registers: bool,
    /// Changes are refused. A device that was created when changes were allowed does not know that.
    pub read_only: bool,
    pub route: Route,
    /// Gives the queue a turn.
    pub turn: bcached_uring::Bell,
    pub shared: Arc<DeviceShared>,
}

impl Queue {
    /// `on_end` is dropped when the ring has finished with the queue, or dies.
    pub(crate) fn new(place: QueueParams, on_end: Arc<DropCallback>) -> Result<Self, Errno> {
        let QueueParams { device, number, depth, registers, read_only, route, turn, shared } = place;
        let descriptors = RequestDescriptors::map(&device, number, depth)?;
        let rings = Arc::clone(&shared);
        let bell: Bell = Arc::new(move || {
            if !rings.rung_of(number).swap(true, Ordering::AcqRel) {
                turn.ring();
            }
        });
        let (requests, replies) = route.connect_with_bell(usize::from(depth), bell);
        Ok(Self {
            number,
            device,
            descriptors,
            route,
            requests,
            replies,
            depth,
            to_push: (0..depth).map(|tag| (tag, None)).collect(),
            unread: VecDeque::with_capacity(usize::from(depth)),
            held: 0,
            stock: BufferPool::new(shared.part(STOCK_BYTES)),
            waiting: VecDeque::with_capacity(usize::from(depth)),
            given_up: Vec::new(),
            registers,
            read_only,
            queue_pages: QueuePages::default(),
            lingering: Vec::new(),
            in_kernel: 0,
            is_aborted: false,
            shared,
            _on_end: on_end,
        })
    }

    /// Starts the request that the kernel has written for `tag`, when its turn comes.
    fn begin(&mut self, tag: u16) {
        self.unread.push_back(tag);
        self.begin_unread();
    }

    /// Starts the requests for which there is memory.
    fn begin_unread(&mut self) {
        while let Some(tag) = self.unread.front().copied() {
            let described = self.descriptors.read(tag);
            let held = data_of(described);
            if !has_room(self.held, held, self.shared.part(BYTES_MAX)) {
                return;
            }
            self.unread.pop_front();
            self.begin_read(tag, described, held);
        }
    }

    /// Turns the request into an operation and submits it, or answers it with an error.
    fn begin_read(&mut self, tag: u16, described: IoDescriptor, held: usize) {
        match self.operation(tag, described, held) {
            Ok(operation) => {
                let bytes = i32::try_from(held).unwrap_or(i32::MAX);
                let is_read = matches!(operation, Operation::Read { .. });
                let written = match &operation {
                    Operation::Write { payload, .. } if payload.lent().is_none() => Some(payload.clone()),
                    _ => None,
                };
                self.held += held;
                self.ask(PendingRequest { tag, bytes, held, is_read, written }, operation);
            }
            Err(errno) => self.commit(tag, -errno.raw_os_error()),
        }
    }

    fn operation(&mut self, tag: u16, described: IoDescriptor, bytes: usize) -> Result<Operation, Errno> {
        let IoDescriptor { wanted, fua, keeps_space, sector, sectors, .. } = described;
        if self.read_only && wanted.changes() {
            return Err(Errno::ROFS);
        }
        let sectors = u64::from(sectors);
        let is_abroad = self.shared.is_abroad.load(Ordering::Acquire);
        let is_lent = !described.is_unregistered && bytes > 0 && !is_abroad;
        let lent = if is_lent { self.queue_pages.lend(tag, bytes) } else { None };
        Ok(match (wanted, lent) {
            (IoOperation::Read, Some(buffer)) => Operation::Read { sector, buffer },
            (IoOperation::Read, None) => Operation::Read { sector, buffer: self.stock.take(bytes) },
            (IoOperation::Write, Some(buffer)) => Operation::Write { sector, payload: buffer.freeze(), fua },
            (IoOperation::Write, None) => {
                let mut buffer = self.stock.take(bytes);
                // Copies from the request's pages.
                self.device
                    .read_exact_at(buffer.as_mut_slice(), self.data_offset(tag))
                    .map_err(|e| errno_of(&e))?;
                Operation::Write { sector, payload: buffer.freeze(), fua }
            }
            (IoOperation::Flush, _) => Operation::Flush,
            (IoOperation::Discard, _) => Operation::Discard { sector, sectors, fua },
            (IoOperation::WriteZeroes, _) => {
                Operation::WriteZeroes { sector, sectors, fua, may_discard: !keeps_space }
            }
            (IoOperation::Other(_), _) => return Err(Errno::OPNOTSUPP),
        })
    }

    /// The offset of a tag's request data in the character device.
    const fn data_offset(&self, tag: u16) -> u64 {
        data_offset(self.number, tag)
    }

    /// Submits a request, after those that wait for room.
    fn ask(&mut self, asked: PendingRequest, operation: Operation) {
        let is_next = self.waiting.is_empty();
        self.waiting.push_back((asked, operation));
        if is_next {
            self.ask_waiting();
        }
    }

    /// Submits the waiting requests, as far as there is room.
    fn ask_waiting(&mut self) {
        while let Some((asked, operation)) = self.waiting.pop_front() {
            if let Err(full) = self.requests.try_submit_by(asked, &self.route, operation) {
                return self.waiting.push_front((full.context, full.operation));
            }
        }
    }

    /// Passes the engine's reply to the kernel.
    fn answer(&mut self, asked: PendingRequest, reply: Reply) {
        let PendingRequest { tag, bytes, held, is_read, written } = asked;
        self.held -= held;
        let result = match (reply.result, &reply.buffer) {
            (Ok(()), Some(buffer)) if is_read && buffer.lent().is_none() => {
                // Copies into the request's pages.
                let given = self.device.write_all_at(buffer.as_slice(), self.data_offset(tag));
                Some(given.map_or_else(|error| -errno_of(&error).raw_os_error(), |()| bytes))
            }
            (Ok(()), None) if is_read => Some(-Errno::IO.raw_os_error()),
            (Ok(()), _) => Some(bytes),
            (Err(ErrorKind::Gone), _) if !self.shared.is_going.load(Ordering::Acquire) => None,
            (Err(kind), _) => Some(-kind.codes().errno),
        };
        reply.buffer.into_iter().for_each(|buffer| self.stock.put(buffer));
        written.into_iter().for_each(|payload| self.stock.put_payload(payload));
        match result {
            Some(result) => self.end(tag, result),
            None => self.given_up.push(tag),
        }
    }

    /// Answers a request once all its memory is returned, which is usually immediately.
    fn end(&mut self, tag: u16, result: i32) {
        if !self.queue_pages.is_back(tag) {
            return self.lingering.push((tag, result));
        }
        let has_failed = self.queue_pages.has_failed(tag) && result >= 0;
        self.commit(tag, if has_failed { -Errno::IO.raw_os_error() } else { result });
    }

    /// Checks requests whose memory was still in use by a device when they ended. On this ring
    /// every such completion is followed by a turn.
    fn end_lingering(&mut self) {
        for (tag, result) in std::mem::take(&mut self.lingering) {
            self.end(tag, result);
        }
    }

    fn commit(&mut self, tag: u16, result: i32) {
        self.to_push.push_back((tag, Some(result)));
    }
}

/// Bytes of data that a request has in memory.
fn data_of(described: IoDescriptor) -> usize {
    let has_data = matches!(described.wanted, IoOperation::Read | IoOperation::Write);
    let bytes = if has_data { u64::from(described.sectors) * SECTOR_BYTES } else { 0 };
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Whether so many more bytes fit in memory.
const fn has_room(held: usize, bytes: usize, bytes_max: usize) -> bool {
    held == 0 || bytes == 0 || bytes <= bytes_max.saturating_sub(held)
}

/// The error code for the kernel. Pages that are shorter than the request are an I/O error.
fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

impl RingClient for Queue {
    fn device(&self) -> Arc<dyn AsFd + Send + Sync> {
        self.device.clone()
    }

    fn slots_wanted(&self) -> u16 {
        if self.registers { self.depth } else { 0 }
    }

    fn slots_from(&mut self, first: BufferSlot) {
        self.queue_pages = QueuePages::new(&self.device, (self.number, self.depth), first);
        self.shared.lends.store(true, Ordering::Release);
    }

    fn turn(&mut self, push: &mut dyn FnMut(Command) -> bool) {
        // Cleared before the look, so that a ring of the bell during it is not missed.
        if self.shared.rung_of(self.number).swap(false, Ordering::AcqRel) {
            while let Some((asked, reply)) = self.replies.try_next() {
                self.answer(asked, reply);
            }
            self.ask_waiting();
            self.begin_unread();
        }
        if !self.lingering.is_empty() {
            self.end_lingering();
        }
        if self.shared.is_going.load(Ordering::Acquire) {
            for tag in std::mem::take(&mut self.given_up) {
                self.end(tag, -Errno::IO.raw_os_error());
            }
        }
        while let Some((tag, result)) = self.to_push.front().copied() {
            let command = UblkCommand { queue: self.number, tag, result, slot: self.queue_pages.slot(tag) };
            if !push(Command::Ublk(command)) {
                break;
            }
            self.to_push.pop_front();
            self.in_kernel += 1;
        }
    }

    fn completed(&mut self, tag: u16, result: i32) {
        self.in_kernel -= 1;
        if result == 0 {
            return self.begin(tag);
        }
        if result != -Errno::NODEV.raw_os_error() {
            tracing::error!(
                event = "ublk-command-failed",
                "the kernel refused a command to a ublk device: {}",
                std::io::Error::from_raw_os_error(-result)
            );
        }
        // The tag stays with the kernel permanently.
        self.is_aborted = true;
    }

    fn may_sleep(&mut self) -> bool {
        // Memory returned from another ring rings no bell. There is little of it, and it returns
        // soon, because nothing more is lent to that ring.
        self.lingering.is_empty() || !self.shared.is_abroad.load(Ordering::Acquire)
    }

    fn ends_at_rest(&self) -> Option<u16> {
        // Requests that still arrive stay here unanswered; the kernel reissues them to the next
        // server.
        self.shared.ends_at_rest.then_some(self.depth)
    }

    fn is_over(&self) -> bool {
        self.is_aborted
            && self.in_kernel == 0
            && self.to_push.is_empty()
            && self.unread.is_empty()
            && self.lingering.is_empty()
            && self.requests.outstanding() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_request_alone_always_has_room() {
        let has_room = |held, bytes| has_room(held, bytes, 1 << 20);
        assert!(has_room(0, 2 << 20) && has_room(1 << 20, 0) && has_room((1 << 20) - 4096, 4096));
        assert!(!has_room((1 << 20) - 4095, 4096) && !has_room(2 << 20, 512));
    }
}
