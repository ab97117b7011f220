//! Passes requests from rings to the port, and replies back to the rings. All of this runs on one
//! thread at a time, which never waits for the engine.
//!
//! **Hops.** The engine's thread serves the rings itself, between two turns of its tasks, as long
//! as nothing has to be waited for and nothing is large (`ring_path.rs`). Otherwise one thread
//! serves all rings of a volume and the messages of its VMM. A reply then rings the thread's
//! eventfd, which is polled beside the kicks. Under load one wake-up serves kicks and replies
//! together.
//!
//! **Back-pressure.** A request may find no room: in the window, in the engine's inbox, for its
//! bytes of payload, or because its route is held. Then it is kept, one for each ring, and nothing
//! more is taken from that ring. The bell rings when a retry is worthwhile: bytes are returned by
//! our own replies, and the port promises to ring for the rest.

use crate::chain::{ChainError, Command, IOERR, OK, ParsedChain, parse};
use crate::memory::{GuestMemory, MappedMemory, Segments};
use crate::pending_count::{PendingCount, PendingGuard};
use crate::ring::{ChainHead, Ring, RingError};
use crate::writer_claim::{WritePermit, WritingClient};
use bcached_port::{
    BufferPool, ErrorKind, Export, ExportTable, LogLimit, Operation, Payload, QueueFull, Reply,
    ReplyReceiver, RequestSender, Route,
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vm_memory::{Bytes as _, GuestAddress};

/// Bytes of buffers that are kept for later requests.
const STOCK_BYTES: usize = 4 << 20;
/// Bytes of the disk's identification for its guest.
const IDENTITY_BYTES: usize = 20;

/// The state for serving one client's requests.
pub(crate) struct RequestHandler {
    pub(crate) export: Arc<Export>,
    route: Route,
    requests: RequestSender<PendingRequest>,
    replies: ReplyReceiver<PendingRequest>,
    pending_count: Arc<PendingCount>,
    /// For each ring, a request kept for lack of room.
    kept: Vec<Option<DeferredRequest>>,
    /// Bytes of payload in memory, and their limit.
    bytes: u64,
    bytes_max: u64,
    /// An answered write must be durable, because the driver sends no flushes.
    pub(crate) is_write_through: bool,
    exports: ExportTable,
    writer: WritingClient,
    permit: Option<WritePermit>,
    pub(crate) over: Option<EndReason>,
    nonsense: LogLimit,
    refusals: LogLimit,
    /// The rest of the quota of this turn.
    quota: TurnQuota,
    /// Something needs the volume's own thread.
    pub(crate) wants_thread: bool,
    /// Requests in flight whose content is [large](LARGE_BYTES).
    large: u32,
    large_since: Option<Instant>,
    /// Buffers of completed requests, kept for reuse.
    stock: BufferPool,
}

/// Why a client is no longer served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EndReason {
    /// The engine is gone. Its unfinished requests stay recorded in the VMM's memory for the next
    /// one.
    Engine,
    /// The guest's memory was taken away.
    Memory,
}

/// How much may be done in one turn.
#[derive(Clone, Copy)]
pub(crate) struct TurnQuota {
    requests: u32,
    bytes: u64,
    /// On the engine's thread.
    is_on_ring: bool,
}

/// Content larger than this is copied by the volume's own thread: copying it takes as long as
/// waking that thread.
pub(crate) const LARGE_BYTES: u64 = 64 << 10;
/// What the engine's thread does in one turn before its other tasks get theirs.
const RING_QUOTA: TurnQuota = TurnQuota { requests: 64, bytes: 256 << 10, is_on_ring: true };

/// How many requests are started in one turn, fewer than are answered. So while the first of many
/// are answered and their guest continues, the next ones are carried out, and neither side idles.
const RING_TAKES: u32 = 8;

impl TurnQuota {
    /// The quota for the volume's own thread, for a ring of that size: so no ring keeps the others
    /// waiting forever.
    pub(crate) const fn of_thread(size: u16) -> Self {
        Self { requests: size as u32, bytes: u64::MAX, is_on_ring: false }
    }

    /// Whether the quota permits this much; if so, takes it off.
    const fn has(&mut self, bytes: u64) -> bool {
        if self.requests == 0 || self.bytes == 0 {
            return false;
        }
        self.requests -= 1;
        self.bytes = self.bytes.saturating_sub(bytes);
        true
    }
}

/// What accompanies a request and turns its reply into an answer.
pub(crate) struct PendingRequest {
    ring: u16,
    generation: u32,
    head: ChainHead,
    status: GuestAddress,
    /// The destination of its content.
    into: Segments,
    /// The data written, whose memory is reused.
    written: Payload,
    /// The memory as of the start of the request. It stays mapped until this is dropped.
    memory: Arc<MappedMemory>,
    /// Bytes of payload that it holds.
    bytes: u64,
    #[expect(dead_code, reason = "dropping it is its use")]
    ticket: PendingGuard,
    #[expect(dead_code, reason = "no other client writes before this is dropped")]
    permit: Option<WritePermit>,
}

/// A request that found no room.
enum DeferredRequest {
    /// Its payload is not in memory yet.
    Parsed { head: ChainHead, status: GuestAddress, command: Command },
    /// As returned by the port.
    Whole(QueueFull<PendingRequest>),
}

/// How taking from a ring ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TakeOutcome {
    /// No more requests are available.
    Drained,
    /// The turn's quota is used up; there may be more.
    QuotaUsed,
    /// There is no room; the bell will ring.
    Full,
}

impl RequestHandler {
    pub(crate) fn new(
        (export, exports, writer): (Arc<Export>, ExportTable, WritingClient),
        route: Route,
        (requests, replies): (RequestSender<PendingRequest>, ReplyReceiver<PendingRequest>),
        pending_count: Arc<PendingCount>,
        limits: &crate::Limits,
        queues: u16,
    ) -> Self {
        Self {
            export,
            route,
            requests,
            replies,
            pending_count,
            kept: (0..queues).map(|_| None).collect(),
            bytes: 0,
            bytes_max: limits.volume_bytes,
            is_write_through: true,
            exports,
            writer,
            permit: None,
            over: None,
            nonsense: LogLimit::default(),
            refusals: LogLimit::default(),
            quota: TurnQuota::of_thread(0),
            wants_thread: false,
            large: 0,
            large_since: None,
            stock: BufferPool::new(STOCK_BYTES),
        }
    }

    /// Whether the client has the write claim.
    pub(crate) const fn is_writing(&self) -> bool {
        self.permit.is_some()
    }

    /// Whether every request taken from that ring has been given back.
    pub(crate) fn is_idle(&self, index: u16, ring: &Ring) -> bool {
        ring.under_way == 0 && !ring.has_left() && self.kept[usize::from(index)].is_none()
    }

    /// Takes requests from the ring and submits them to the engine. With `only_left`, takes no new
    /// ones.
    pub(crate) fn take(
        &mut self,
        (index, ring): (u16, &mut Ring),
        memory: &Arc<MappedMemory>,
        only_left: bool,
    ) -> TakeOutcome {
        if self.is_over(memory) {
            return TakeOutcome::Drained;
        }
        if let Some(kept) = self.kept[usize::from(index)].take()
            && !self.retry((index, ring), memory, kept)
        {
            return TakeOutcome::Full;
        }
        while self.quota.has(0) {
            if only_left && !ring.has_left() {
                return TakeOutcome::Drained;
            }
            match ring.take(memory) {
                Ok(None) => return TakeOutcome::Drained,
                Ok(Some(head)) if self.begin((index, ring), memory, head) => {}
                Ok(Some(_)) => return TakeOutcome::Full,
                Err(error) => {
                    ring.set_faulty(true);
                    // The thread looks again, and reports the error.
                    self.wants_thread = true;
                    if !self.quota.is_on_ring {
                        ring.tell_error();
                        self.complain(&error);
                    }
                    return TakeOutcome::Drained;
                }
            }
        }
        TakeOutcome::QuotaUsed
    }

    /// Whether this client is no longer served. In that case, data read from its memory is invalid.
    pub(crate) fn is_over(&mut self, memory: &MappedMemory) -> bool {
        if memory.is_cut() {
            self.over.get_or_insert(EndReason::Memory);
        }
        self.over.is_some()
    }

    /// Starts a turn.
    pub(crate) const fn begin_turn(&mut self, quota: TurnQuota) {
        self.quota = quota;
    }

    /// Starts a turn of the engine's thread.
    pub(crate) const fn begin_turn_on_ring(&mut self) {
        (self.quota, self.wants_thread) = (RING_QUOTA, false);
    }

    /// Limits the rest of the turn to taking requests, after the replies had their part.
    pub(crate) const fn begin_takes_on_ring(&mut self) {
        self.quota.requests = RING_TAKES;
    }

    /// Whether a request of the ring waits for room.
    pub(crate) fn has_kept(&self, index: u16) -> bool {
        self.kept[usize::from(index)].is_some()
    }

    /// How long there has been no large request that needs the volume's own thread. `None` if there
    /// is one now.
    pub(crate) fn small_for(&self) -> Option<Duration> {
        let is_large = |kept: &DeferredRequest| kept.bytes() > LARGE_BYTES;
        if self.large > 0 || self.kept.iter().flatten().any(is_large) {
            return None;
        }
        Some(self.large_since.map_or(Duration::MAX, |since| since.elapsed()))
    }

    /// Passes the engine's replies to the guest, as far as this turn's quota permits. Returns true
    /// if there may be more.
    pub(crate) fn answer(&mut self, rings: &mut [Ring], memory: &Arc<MappedMemory>) -> bool {
        while self.quota.has(0) {
            let Some((pending, reply)) = self.replies.try_next() else { return false };
            self.forget_bytes(pending.bytes);
            self.quota.bytes = self.quota.bytes.saturating_sub(pending.bytes);
            let ring = &mut rings[usize::from(pending.ring)];
            if ring.generation() != pending.generation {
                self.put_away(pending, reply);
                continue;
            }
            ring.under_way -= 1;
            if reply.result == Err(ErrorKind::Gone) && ring.is_tracked() {
                self.over = Some(EndReason::Engine);
                continue;
            }
            let (status, written) = pending.outcome(&reply);
            let head = pending.head.index;
            self.give_back(ring, memory, head, (&pending.memory, pending.status), (status, written));
            self.put_away(pending, reply);
        }
        true
    }

    /// Keeps the buffers of a request for reuse.
    fn put_away(&mut self, pending: PendingRequest, reply: Reply) {
        reply.buffer.into_iter().for_each(|buffer| self.stock.put(buffer));
        self.stock.put_payload(pending.written);
    }

    fn forget_bytes(&mut self, bytes: u64) {
        self.bytes -= bytes;
        if bytes > LARGE_BYTES {
            self.large -= 1;
            self.large_since = Some(Instant::now());
        }
    }

    /// Drops the request that was kept for a ring, and returns its head.
    pub(crate) fn forget_kept(&mut self, index: u16) -> Option<ChainHead> {
        match self.kept[usize::from(index)].take()? {
            DeferredRequest::Parsed { head, .. } => Some(head),
            DeferredRequest::Whole(QueueFull { context, .. }) => {
                self.forget_bytes(context.bytes);
                Some(context.head)
            }
        }
    }

    /// Starts the request of a chain. Returns false if there is no room for it, and it is kept.
    fn begin(
        &mut self,
        (index, ring): (u16, &mut Ring),
        memory: &Arc<MappedMemory>,
        head: ChainHead,
    ) -> bool {
        match parse(memory, ring.table(), head.index) {
            ParsedChain::Run { command, status } => self.run((index, ring), memory, (head, status, command)),
            ParsedChain::Refuse { answer, status, why } => {
                if let Some(why) = why {
                    self.complain_of(why);
                }
                self.give_back(ring, memory, head.index, (memory, status), (answer, 0));
                true
            }
            ParsedChain::Unanswerable(why) => {
                self.complain_of(why);
                if let Err(error) = ring.give_back(memory, head.index, 0) {
                    self.complain(&error);
                }
                true
            }
        }
    }

    fn retry(
        &mut self,
        (index, ring): (u16, &mut Ring),
        memory: &Arc<MappedMemory>,
        kept: DeferredRequest,
    ) -> bool {
        match kept {
            DeferredRequest::Parsed { head, status, command } => {
                self.run((index, ring), memory, (head, status, command))
            }
            DeferredRequest::Whole(QueueFull { context, operation }) => {
                self.submit((index, ring), context, operation)
            }
        }
    }

    /// Carries out what the front end can do itself, and submits the rest to the engine. Returns
    /// false if there is no room.
    fn run(
        &mut self,
        (index, ring): (u16, &mut Ring),
        memory: &Arc<MappedMemory>,
        (head, status, command): (ChainHead, GuestAddress, Command),
    ) -> bool {
        if command.changes_content() && !self.may_write() {
            self.give_back(ring, memory, head.index, (memory, status), (IOERR, 0));
            return true;
        }
        let bytes = command.payload_bytes();
        let is_for_thread = self.quota.is_on_ring && bytes > LARGE_BYTES;
        self.wants_thread |= is_for_thread;
        if is_for_thread || bytes > 0 && self.bytes > 0 && self.bytes + bytes > self.bytes_max {
            self.kept[usize::from(index)] = Some(DeferredRequest::Parsed { head, status, command });
            return false;
        }
        let fua = self.is_write_through;
        let (mut into, mut written) = (Segments::default(), Payload::default());
        let operation = match command {
            Command::Read { sector, into: segments } => {
                into = segments;
                let buffer = self.stock.take(usize::try_from(bytes).unwrap_or(0));
                Operation::Read { sector, buffer }
            }
            Command::Write { sector, from } => match from.gather(memory, &mut self.stock) {
                Ok(buffer) => {
                    let payload = buffer.freeze();
                    written = payload.clone();
                    Operation::Write { sector, payload, fua }
                }
                Err(why) => {
                    self.complain_of(why);
                    self.give_back(ring, memory, head.index, (memory, status), (IOERR, 0));
                    return true;
                }
            },
            Command::Flush => Operation::Flush,
            Command::Identify { into } => {
                let told = into.scatter(memory, &self.identity());
                let outcome = told.map_or((IOERR, 0), |bytes| (OK, bytes));
                self.give_back(ring, memory, head.index, (memory, status), outcome);
                return true;
            }
            Command::Discard { sector, sectors } => Operation::Discard { sector, sectors, fua },
            Command::WriteZeroes { sector, sectors, may_discard } => {
                Operation::WriteZeroes { sector, sectors, fua, may_discard }
            }
        };
        // Everything that is to be read of the guest's memory has been read.
        if self.is_over(memory) {
            return true;
        }
        self.bytes += bytes;
        self.large += u32::from(bytes > LARGE_BYTES);
        self.quota.bytes = self.quota.bytes.saturating_sub(bytes);
        let generation = ring.generation();
        let (memory, ticket) = (Arc::clone(memory), self.pending_count.enter());
        let permit = self.permit.clone();
        let pending = PendingRequest {
            ring: index,
            generation,
            head,
            status,
            into,
            written,
            memory,
            bytes,
            ticket,
            permit,
        };
        self.submit((index, ring), pending, operation)
    }

    fn submit(
        &mut self,
        (index, ring): (u16, &mut Ring),
        pending: PendingRequest,
        operation: Operation,
    ) -> bool {
        match self.requests.try_submit_by(pending, &self.route, operation) {
            Ok(()) => {
                ring.under_way += 1;
                true
            }
            Err(full) => {
                self.kept[usize::from(index)] = Some(DeferredRequest::Whole(full));
                false
            }
        }
    }

    fn may_write(&mut self) -> bool {
        if self.permit.is_none() {
            self.permit = self.writer.ask(&self.exports, &self.export);
        }
        self.permit.is_some()
    }

    /// Writes the status and gives the chain back.
    fn give_back(
        &mut self,
        ring: &mut Ring,
        memory: &GuestMemory,
        head: u16,
        (at, status): (&GuestMemory, GuestAddress),
        (answer, written): (u8, u32),
    ) {
        // The address was valid when the request was taken. If its memory was removed since, the
        // status is not needed.
        let _gone = at.write_obj(answer, status);
        if let Err(error) = ring.give_back(memory, head, written.saturating_add(1)) {
            self.complain(&error);
        }
    }

    /// The volume's name if it fits, otherwise the start of its UUID: either is unique to the
    /// volume.
    fn identity(&self) -> [u8; IDENTITY_BYTES] {
        let name = self.export.name.as_bytes();
        let uuid = self.export.uuid.to_string().replace('-', "");
        let text = if name.len() <= IDENTITY_BYTES { name } else { &uuid.as_bytes()[..IDENTITY_BYTES] };
        let mut identity = [0; IDENTITY_BYTES];
        identity[..text.len()].copy_from_slice(text);
        identity
    }

    fn complain(&mut self, error: &RingError) {
        if let Some(count) = self.nonsense.count() {
            let volume = &self.export.name;
            tracing::warn!(event = "vhost-nonsense", volume, count, %error, "a guest's ring cannot be used");
        }
    }

    fn complain_of(&mut self, why: ChainError) {
        if let Some(count) = self.refusals.count() {
            let volume = &self.export.name;
            tracing::warn!(event = "vhost-malformed", volume, count, %why, "a guest's request was refused");
        }
    }
}

impl DeferredRequest {
    /// Bytes of its content.
    fn bytes(&self) -> u64 {
        match self {
            Self::Parsed { command, .. } => command.payload_bytes(),
            Self::Whole(QueueFull { context, .. }) => context.bytes,
        }
    }
}

impl PendingRequest {
    /// Returns the status and the bytes written besides it, after copying the content to its
    /// destination.
    fn outcome(&self, reply: &Reply) -> (u8, u32) {
        match (&reply.result, &reply.buffer) {
            (Err(kind), _) => (kind.codes().virtio, 0),
            (Ok(()), Some(buffer)) => {
                self.into.scatter(&self.memory, buffer.as_slice()).map_or((IOERR, 0), |bytes| (OK, bytes))
            }
            (Ok(()), None) => (OK, 0),
        }
    }
}

impl Command {
    const fn changes_content(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Discard { .. } | Self::WriteZeroes { .. })
    }

    /// Bytes of memory that it needs.
    const fn payload_bytes(&self) -> u64 {
        match self {
            Self::Read { into: segments, .. } | Self::Write { from: segments, .. } => segments.bytes(),
            _ => 0,
        }
    }
}
