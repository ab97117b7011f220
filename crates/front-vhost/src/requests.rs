//! Requests from rings into the port, and replies back into rings; all of it on one thread at a time, which never waits for the
//! engine.
//!
//! **Hops.** The thread of the engine serves the rings itself, between two turns of its tasks, as long as nothing has to be waited for and
//! nothing is large (`lane.rs`). Else one thread serves all rings of a volume and the messages of its VMM: a reply rings its eventfd, which
//! is polled beside the kicks, and under load one wake-up serves kicks and replies together.
//!
//! **Back pressure.** A request for which there is no room (the window, the engine's inbox, bytes of payload, a route that
//! is held) is kept, one for each ring, and nothing more is taken from that ring. The bell rings when it is worth trying
//! again: bytes come back with replies of our own, the rest is the port's promise.

use crate::chain::{Command, IOERR, Malformed, OK, Parsed, parse};
use crate::memory::{GuestMemory, Mapped, Segments};
use crate::pending_count::{Tally, Ticket};
use crate::ring::{Head, Ring, RingError};
use crate::writer_claim::{Permit, Writer};
use bcached_port::{
    ErrorKind, Export, ExportTable, Full, Operation, Payload, Quiet, Replies, Reply, Requests, Route, Stock,
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vm_memory::{Bytes as _, GuestAddress};

/// Memory that is kept for the next requests, in bytes.
const STOCK_BYTES: usize = 4 << 20;
/// Bytes that name a disk for its guest.
const IDENTITY_BYTES: usize = 20;

/// What one client's requests need of us.
pub(crate) struct Serving {
    pub(crate) export: Arc<Export>,
    route: Route,
    requests: Requests<Pending>,
    replies: Replies<Pending>,
    tally: Arc<Tally>,
    /// A request kept for want of room, by ring.
    kept: Vec<Option<Kept>>,
    /// Payload in memory, and how much may be.
    bytes: u64,
    bytes_max: u64,
    /// Answers mean that what was written is durable: the driver sends no flushes.
    pub(crate) is_write_through: bool,
    exports: ExportTable,
    writer: Writer,
    permit: Option<Permit>,
    pub(crate) over: Option<Over>,
    nonsense: Quiet,
    refusals: Quiet,
    /// What is left of this turn.
    share: Share,
    /// Something has come up that is not for the thread of an engine.
    pub(crate) wants_thread: bool,
    /// Requests under way whose content is [large](LARGE_BYTES).
    large: u32,
    large_since: Option<Instant>,
    /// Memory of requests that have been answered, for the next ones.
    stock: Stock,
}

/// Why nothing more is done for a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Over {
    /// The engine is no more, and what it has not done stays noted in the VMM's memory for the next one.
    Engine,
    /// Memory that is the guest's has been taken away.
    Memory,
}

/// How much may be done at a time.
#[derive(Clone, Copy)]
pub(crate) struct Share {
    requests: u32,
    bytes: u64,
    /// By the thread of an engine.
    is_on_ring: bool,
}

/// Content from this size on is copied by the volume's own thread: it takes as long as waking that.
pub(crate) const LARGE_BYTES: u64 = 64 << 10;
/// What the thread of an engine does at a time before its other tasks have their turn.
const RING_SHARE: Share = Share { requests: 64, bytes: 256 << 10, is_on_ring: true };

/// Of requests that are begun fewer: while the first of many are answered and their guest goes on, the next ones are carried out, and nobody
/// stands still for the other.
const RING_TAKES: u32 = 8;

impl Share {
    /// Of a ring of that size, for the volume's own thread: no ring keeps the others waiting for ever.
    pub(crate) const fn of_thread(size: u16) -> Self {
        Self { requests: size as u32, bytes: u64::MAX, is_on_ring: false }
    }

    /// Whether so much may still be done; then that is taken off.
    const fn has(&mut self, bytes: u64) -> bool {
        if self.requests == 0 || self.bytes == 0 {
            return false;
        }
        self.requests -= 1;
        self.bytes = self.bytes.saturating_sub(bytes);
        true
    }
}

/// What travels with a request and makes an answer of its reply.
pub(crate) struct Pending {
    ring: u16,
    generation: u32,
    head: Head,
    status: GuestAddress,
    /// Where content goes.
    into: Segments,
    /// What is written, to be used again.
    written: Payload,
    /// As it was when the request was taken. It is mapped until this is dropped.
    memory: Arc<Mapped>,
    /// Payload that it holds.
    bytes: u64,
    #[expect(dead_code, reason = "dropping it is its use")]
    ticket: Ticket,
    #[expect(dead_code, reason = "nobody else writes before this is dropped")]
    permit: Option<Permit>,
}

/// A request that found no room.
enum Kept {
    /// Its payload is not in memory yet.
    Parsed { head: Head, status: GuestAddress, command: Command },
    /// As the port gave it back.
    Whole(Full<Pending>),
}

/// How taking from a ring ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Taken {
    /// Nothing is left to be taken.
    All,
    /// Enough for one turn; there may be more.
    Turn,
    /// There is no room; the bell will ring.
    Full,
}

impl Serving {
    pub(crate) fn new(
        (export, exports, writer): (Arc<Export>, ExportTable, Writer),
        route: Route,
        (requests, replies): (Requests<Pending>, Replies<Pending>),
        tally: Arc<Tally>,
        limits: &crate::Limits,
        queues: u16,
    ) -> Self {
        Self {
            export,
            route,
            requests,
            replies,
            tally,
            kept: (0..queues).map(|_| None).collect(),
            bytes: 0,
            bytes_max: limits.volume_bytes,
            is_write_through: true,
            exports,
            writer,
            permit: None,
            over: None,
            nonsense: Quiet::default(),
            refusals: Quiet::default(),
            share: Share::of_thread(0),
            wants_thread: false,
            large: 0,
            large_since: None,
            stock: Stock::new(STOCK_BYTES),
        }
    }

    /// Whether it has been given the right to write.
    pub(crate) const fn is_writing(&self) -> bool {
        self.permit.is_some()
    }

    /// Whether everything that was taken from that ring has been given back.
    pub(crate) fn is_idle(&self, index: u16, ring: &Ring) -> bool {
        ring.under_way == 0 && !ring.has_left() && self.kept[usize::from(index)].is_none()
    }

    /// Takes what the ring has and hands it to the engine. With `only_left`, nothing that is new.
    pub(crate) fn take(
        &mut self,
        (index, ring): (u16, &mut Ring),
        memory: &Arc<Mapped>,
        only_left: bool,
    ) -> Taken {
        if self.is_over(memory) {
            return Taken::All;
        }
        if let Some(kept) = self.kept[usize::from(index)].take()
            && !self.retry((index, ring), memory, kept)
        {
            return Taken::Full;
        }
        while self.share.has(0) {
            if only_left && !ring.has_left() {
                return Taken::All;
            }
            match ring.take(memory) {
                Ok(None) => return Taken::All,
                Ok(Some(head)) if self.begin((index, ring), memory, head) => {}
                Ok(Some(_)) => return Taken::Full,
                Err(error) => {
                    ring.set_faulty(true);
                    // The thread looks again, and tells.
                    self.wants_thread = true;
                    if !self.share.is_on_ring {
                        ring.tell_error();
                        self.complain(&error);
                    }
                    return Taken::All;
                }
            }
        }
        Taken::Turn
    }

    /// Whether nothing more is done for this client. What has been read of its memory counts for nothing then.
    pub(crate) fn is_over(&mut self, memory: &Mapped) -> bool {
        if memory.is_cut() {
            self.over.get_or_insert(Over::Memory);
        }
        self.over.is_some()
    }

    /// Begins a turn.
    pub(crate) const fn begin_turn(&mut self, share: Share) {
        self.share = share;
    }

    /// Begins a turn of the thread of an engine.
    pub(crate) const fn begin_turn_on_ring(&mut self) {
        (self.share, self.wants_thread) = (RING_SHARE, false);
    }

    /// Answers have had their part of the turn: now requests.
    pub(crate) const fn begin_takes_on_ring(&mut self) {
        self.share.requests = RING_TAKES;
    }

    /// Whether a request of the ring waits for room.
    pub(crate) fn has_kept(&self, index: u16) -> bool {
        self.kept[usize::from(index)].is_some()
    }

    /// How long the thread of an engine has had nothing large to leave to others; `None` if there is something now.
    pub(crate) fn small_for(&self) -> Option<Duration> {
        let is_large = |kept: &Kept| kept.bytes() > LARGE_BYTES;
        if self.large > 0 || self.kept.iter().flatten().any(is_large) {
            return None;
        }
        Some(self.large_since.map_or(Duration::MAX, |since| since.elapsed()))
    }

    /// Gives the guest what the engine has answered, as far as this turn goes; true if there may be more.
    pub(crate) fn answer(&mut self, rings: &mut [Ring], memory: &Arc<Mapped>) -> bool {
        while self.share.has(0) {
            let Some((pending, reply)) = self.replies.try_next() else { return false };
            self.forget_bytes(pending.bytes);
            self.share.bytes = self.share.bytes.saturating_sub(pending.bytes);
            let ring = &mut rings[usize::from(pending.ring)];
            if ring.generation() != pending.generation {
                self.put_away(pending, reply);
                continue;
            }
            ring.under_way -= 1;
            if reply.result == Err(ErrorKind::Gone) && ring.is_tracked() {
                self.over = Some(Over::Engine);
                continue;
            }
            let (status, written) = pending.outcome(&reply);
            let head = pending.head.index;
            self.give_back(ring, memory, head, (&pending.memory, pending.status), (status, written));
            self.put_away(pending, reply);
        }
        true
    }

    /// Keeps the memory of a request for another.
    fn put_away(&mut self, pending: Pending, reply: Reply) {
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

    /// Forgets the request that was kept for a ring; where it came from.
    pub(crate) fn forget_kept(&mut self, index: u16) -> Option<Head> {
        match self.kept[usize::from(index)].take()? {
            Kept::Parsed { head, .. } => Some(head),
            Kept::Whole(Full { context, .. }) => {
                self.forget_bytes(context.bytes);
                Some(context.head)
            }
        }
    }

    /// Begins with a chain; false if there is no room for it, and it is kept.
    fn begin(&mut self, (index, ring): (u16, &mut Ring), memory: &Arc<Mapped>, head: Head) -> bool {
        match parse(memory, ring.table(), head.index) {
            Parsed::Run { command, status } => self.run((index, ring), memory, (head, status, command)),
            Parsed::Refuse { answer, status, why } => {
                if let Some(why) = why {
                    self.complain_of(why);
                }
                self.give_back(ring, memory, head.index, (memory, status), (answer, 0));
                true
            }
            Parsed::Silence(why) => {
                self.complain_of(why);
                if let Err(error) = ring.give_back(memory, head.index, 0) {
                    self.complain(&error);
                }
                true
            }
        }
    }

    fn retry(&mut self, (index, ring): (u16, &mut Ring), memory: &Arc<Mapped>, kept: Kept) -> bool {
        match kept {
            Kept::Parsed { head, status, command } => {
                self.run((index, ring), memory, (head, status, command))
            }
            Kept::Whole(Full { context, operation }) => self.submit((index, ring), context, operation),
        }
    }

    /// Carries out what the front end can, and hands the rest to the engine; false if there is no room for it.
    fn run(
        &mut self,
        (index, ring): (u16, &mut Ring),
        memory: &Arc<Mapped>,
        (head, status, command): (Head, GuestAddress, Command),
    ) -> bool {
        if command.changes_content() && !self.may_write() {
            self.give_back(ring, memory, head.index, (memory, status), (IOERR, 0));
            return true;
        }
        let bytes = command.payload_bytes();
        let is_for_thread = self.share.is_on_ring && bytes > LARGE_BYTES;
        self.wants_thread |= is_for_thread;
        if is_for_thread || bytes > 0 && self.bytes > 0 && self.bytes + bytes > self.bytes_max {
            self.kept[usize::from(index)] = Some(Kept::Parsed { head, status, command });
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
        // All that is to be read of it has been.
        if self.is_over(memory) {
            return true;
        }
        self.bytes += bytes;
        self.large += u32::from(bytes > LARGE_BYTES);
        self.share.bytes = self.share.bytes.saturating_sub(bytes);
        let generation = ring.generation();
        let (memory, ticket) = (Arc::clone(memory), self.tally.enter());
        let permit = self.permit.clone();
        let pending =
            Pending { ring: index, generation, head, status, into, written, memory, bytes, ticket, permit };
        self.submit((index, ring), pending, operation)
    }

    fn submit(&mut self, (index, ring): (u16, &mut Ring), pending: Pending, operation: Operation) -> bool {
        match self.requests.try_submit_by(pending, &self.route, operation) {
            Ok(()) => {
                ring.under_way += 1;
                true
            }
            Err(full) => {
                self.kept[usize::from(index)] = Some(Kept::Whole(full));
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
        // It was there when the request was taken; if its memory has gone since, nobody looks at it.
        let _gone = at.write_obj(answer, status);
        if let Err(error) = ring.give_back(memory, head, written.saturating_add(1)) {
            self.complain(&error);
        }
    }

    /// The volume's name if it fits, else the beginning of its UUID: both are of one volume only.
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

    fn complain_of(&mut self, why: Malformed) {
        if let Some(count) = self.refusals.count() {
            let volume = &self.export.name;
            tracing::warn!(event = "vhost-malformed", volume, count, %why, "a guest's request was refused");
        }
    }
}

impl Kept {
    /// Content of it.
    fn bytes(&self) -> u64 {
        match self {
            Self::Parsed { command, .. } => command.payload_bytes(),
            Self::Whole(Full { context, .. }) => context.bytes,
        }
    }
}

impl Pending {
    /// Status and bytes written besides it, when content is where it belongs.
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

    /// Memory that it needs.
    const fn payload_bytes(&self) -> u64 {
        match self {
            Self::Read { into: segments, .. } | Self::Write { from: segments, .. } => segments.bytes(),
            _ => 0,
        }
    }
}
