//! Serves one connection, from its first byte to its end: the handshake, then requests into the
//! port. A second thread ([`crate::writer`]) sends the replies. Requests that need no waiting are
//! handled on the engine's ring ([`crate::ring_path`]).
//!
//! **Back-pressure.** Before a request is submitted, it has its place in the window and its bytes
//! in the budget. While it waits for either, nothing more is read, and the peer's sends block.
//!
//! **The end** may come by DISC, a closed or broken socket, bytes that are not NBD, or the server
//! stopping. In each case no more requests are read. Everything submitted is carried out, and
//! answered as far as the peer still listens. Then the write claim is released and the socket is
//! closed. A write whose payload did not arrive completely is never submitted.

use crate::channel::{ReceiveChannel, SendChannel};
use crate::client_catalog::ClientCatalog;
use crate::handoff::{ConnectionState, ResumedConnection, WriterStatus};
use crate::peer_timeouts::PeerPace;
use crate::proto::handshake::{
    Encryption, ExportCatalog, ExportOffer, Handshake, HandshakeStep, NegotiatedParams,
};
use crate::proto::reply::ReplyContext;
use crate::proto::request::{Command, Decision, HEADER_BYTES, RequestHeader, Session};
use crate::proto::wire::{NbdError, Violation};
use crate::ring_path::{RingPath, TurnOutcome};
use crate::server::{SMALL_BYTES_MAX, ServerShared, ServingMode};
use crate::socket::{ReceiveTimeout, Socket};
use crate::source::{ReadBuffer, ReadOutcome};
use crate::tls::TlsConfig;
use crate::writer::{PendingRequest, ReplyBatch, Writer};
use bcached_port::{
    Budget, Buffer, Operation, Payload, Peer, Reply, RequestSender, Route, WriteClaim, WriterGeneration,
};
use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;

/// The bandwidth that any path to a client is assumed to have, apart from an initial stall.
const SLOWEST_BYTES_A_SECOND: u64 = 1 << 20;

/// Why a connection ended before its client disconnected properly.
#[derive(Debug, Error)]
pub(crate) enum ConnectionError {
    #[error("the client violated the protocol: {0}")]
    Violation(Violation),
    #[error("the connection failed: {0}")]
    Socket(#[from] io::Error),
    #[error("the TLS handshake failed: {0}")]
    Tls(io::Error),
    #[error("the volume {0:?} stopped being served during the handshake")]
    Gone(String),
}

/// The client of a connection, as far as the server knows it.
#[derive(Clone)]
pub(crate) struct ClientContext {
    /// The connection's number.
    pub(crate) number: u64,
    /// The client that it belongs to.
    pub(crate) peer: Peer,
    /// Whether it may only read.
    pub(crate) read_only: bool,
    /// If set, the connection must begin TLS, with this.
    pub(crate) tls: Option<TlsConfig>,
    /// If set, the connection uses this export, without a handshake.
    pub(crate) export: Option<String>,
}

/// Serves a connection to its end, from the start or from the state in which another server left
/// it. Returns its state if a further server is to resume it.
pub(crate) fn serve(
    shared: &Arc<ServerShared>,
    socket: &Arc<Socket>,
    caller: &ClientContext,
    resumed: Option<ResumedConnection>,
) -> Result<Option<ConnectionState>, ConnectionError> {
    let (session, since, claim, source, sending) = match resumed {
        Some(ResumedConnection { session, since, claim, unread }) => {
            let source = ReadBuffer::behind(ReceiveChannel::Plain(Arc::clone(socket)), &unread);
            (session, since, claim, source, SendChannel::Plain(Arc::clone(socket)))
        }
        None => {
            let (since, waited) = (Cell::new(WriterGeneration::default()), Cell::default());
            let catalog = ClientCatalog { shared, socket, caller, since, waited };
            let mut hands = PendingHandshake {
                shared,
                socket,
                caller,
                source: ReadBuffer::new(ReceiveChannel::Plain(Arc::clone(socket))),
                sending: SendChannel::Plain(Arc::clone(socket)),
            };
            let agreed = match &caller.export {
                Some(name) => Some(hands.begin_with(name, &catalog)?),
                None => hands.shake(&catalog)?,
            };
            let Some(agreed) = agreed else { return Ok(None) };
            let PendingHandshake { source, sending, .. } = hands;
            (Session::new(agreed), Some(catalog.since.get()), None, source, sending)
        }
    };
    Connection { shared, socket, caller }.transmit(session, (since, claim), source, sending)
}

/// A connection whose volume is known.
struct Connection<'a> {
    shared: &'a Arc<ServerShared>,
    socket: &'a Arc<Socket>,
    caller: &'a ClientContext,
}

impl Connection<'_> {
    fn transmit(
        self,
        session: Session,
        (since, claim): (Option<WriterGeneration>, Option<WriteClaim>),
        source: ReadBuffer,
        sending: SendChannel,
    ) -> Result<Option<ConnectionState>, ConnectionError> {
        let Self { shared, socket, caller } = self;
        let export = Arc::clone(&session.agreed().offer.export);
        let Some(route) = &export.served else { return Err(ConnectionError::Gone(export.name.clone())) };
        let limits = &shared.limits;
        // The engine's thread does not decrypt, so that the cost of TLS falls on the connections
        // that use it.
        let ring = if caller.tls.is_none() { shared.rings.of(export.uuid.0) } else { None };
        let ring_path = ring.as_ref().map(RingPath::new);
        let (requests, replies) = match ring_path.clone() {
            Some(ring_path) => {
                shared.is_served(caller.number, ServingMode::OnRing(Arc::clone(&ring_path)));
                route.connect_with_bell::<PendingRequest>(limits.requests, Arc::new(move || ring_path.ring()))
            }
            None => {
                shared.is_served(caller.number, ServingMode::ByThreads);
                route.connect::<PendingRequest>(limits.requests)
            }
        };
        let budget = Arc::new(Budget::new(limits.connection_bytes, Arc::clone(&shared.memory)));
        let pace = || PeerPace::new(Arc::clone(&budget), limits.give_way);
        let writer = Box::new(Writer {
            shared: Arc::clone(shared),
            number: caller.number,
            socket: Arc::clone(socket),
            sending,
            replies,
            structured: session.agreed().structured,
            pace: pace(),
            batch: VecDeque::new(),
            outgoing: ReplyBatch::default(),
        });
        let its_ring_path = ring_path.clone();
        let writer = shared
            .spawn(format!("nbd-reply-{}", caller.number), move || writer.run(its_ring_path.as_deref()))?;
        if let Some((ring, ring_path)) = ring.as_ref().zip(ring_path.as_ref()) {
            ring_path.host(ring, socket);
        }
        let mut reader = Box::new(Reader {
            shared: Arc::clone(shared),
            source,
            session,
            requests,
            route: route.clone(),
            pace: pace(),
            budget,
            caller: caller.clone(),
            since,
            claim: None,
            socket: Arc::clone(socket),
        });
        if let Some(claim) = claim {
            reader.has(claim);
        }
        // The writer learns of the reader's end in every case.
        let ending = ring_path.clone().map(RingPathGuard);
        let (reader, result) = reader.run(ring_path.as_deref());
        let right = reader.right();
        let Reader { requests, claim, source, session, .. } = *reader;
        // No more requests follow: the writer ends with the last reply.
        drop(requests);
        drop(ending);
        let has_sent_all = writer.join().unwrap_or_else(|_| {
            tracing::error!(
                event = "nbd-connection-failed",
                connection = caller.number,
                "the thread that sends the replies of an NBD connection panicked"
            );
            false
        });
        // Only now is every write of this connection complete.
        drop(claim);
        let goes_on =
            result? == EndedBy::Server && has_sent_all && ring_path.is_some() && shared.is_leaving();
        Ok(goes_on.then(|| ConnectionState::of(&session, caller, right, source.here())))
    }
}

/// Which side has ended a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum EndedBy {
    /// The client, properly.
    Client,
    /// The server: it is stopping, or leaving.
    Server,
}

/// Ends a ring path when it is dropped.
struct RingPathGuard(Arc<RingPath>);

impl Drop for RingPathGuard {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// A connection before its export is chosen.
struct PendingHandshake<'a> {
    shared: &'a ServerShared,
    socket: &'a Arc<Socket>,
    caller: &'a ClientContext,
    source: ReadBuffer,
    sending: SendChannel,
}

impl PendingHandshake<'_> {
    /// Starts without a handshake: the client of a handed connection already knows its parameters.
    fn begin_with(
        &self,
        name: &str,
        catalog: &ClientCatalog<'_>,
    ) -> Result<NegotiatedParams, ConnectionError> {
        let offer = catalog.offer(name).map_err(|_| ConnectionError::Gone(name.to_owned()))?;
        self.shared.entered(self.caller.number, &offer.export.name, offer.read_only);
        Ok(NegotiatedParams { offer, structured: false, block_status: false })
    }

    /// Runs the handshake. Returns `None` if the client hung up properly, or the server is
    /// stopping.
    fn shake(&mut self, catalog: &ClientCatalog<'_>) -> Result<Option<NegotiatedParams>, ConnectionError> {
        let encryption = if self.caller.tls.is_some() { Encryption::Required } else { Encryption::None };
        let mut handshake = Handshake::new(encryption);
        let agreed = self.agree(&mut handshake, catalog);
        // The client may have begun TLS after all.
        if handshake.wants_no_tls() {
            self.shared.is_not_encrypted(
                self.caller.number,
                &"the client tried to continue without TLS, and was refused; configure it with \
                  nbds:// and its certificates",
            );
        }
        agreed
    }

    fn agree(
        &mut self,
        handshake: &mut Handshake,
        catalog: &ClientCatalog<'_>,
    ) -> Result<Option<NegotiatedParams>, ConnectionError> {
        let stall = self.shared.limits.handshake;
        let begun = Instant::now() + stall;
        loop {
            // Time spent waiting for a volume is not the client's fault.
            let moment = begun + catalog.waited.get();
            let deadline = ReceiveTimeout::Deadline(moment);
            self.sending.send_slice(&handshake.take_outgoing(), stall)?;
            let Some(bytes) = self.source.next(handshake.needed(), deadline, deadline)? else {
                return Ok(None);
            };
            match handshake.step(bytes, catalog) {
                // The deadline also applies to a client that keeps asking questions.
                HandshakeStep::Continue
                    if ReceiveTimeout::Deadline(begun + catalog.waited.get()).is_over() =>
                {
                    return Err(io::Error::from(io::ErrorKind::TimedOut).into());
                }
                HandshakeStep::Continue => {}
                HandshakeStep::StartTls => {
                    let acknowledged = handshake.take_outgoing();
                    self.start_tls(&acknowledged, moment)?;
                }
                HandshakeStep::Transmission(agreed) => {
                    // Registered before the client is told: with an export, its connection cannot
                    // be evicted for a new one.
                    let ExportOffer { export, read_only, .. } = &agreed.offer;
                    self.shared.entered(self.caller.number, &export.name, *read_only);
                    self.sending.send_slice(&handshake.take_outgoing(), stall)?;
                    return Ok(Some(agreed));
                }
                HandshakeStep::Goodbye => {
                    self.sending.send_slice(&handshake.take_outgoing(), stall)?;
                    self.sending.say_goodbye();
                    return Ok(None);
                }
                HandshakeStep::Violation(violation) => return Err(ConnectionError::Violation(violation)),
            }
        }
    }

    /// Switches to TLS. Plaintext received before the client was told to begin may be from an
    /// attacker, and is a violation.
    fn start_tls(&mut self, acknowledged: &[u8], deadline: Instant) -> Result<(), ConnectionError> {
        if self.source.has_more() {
            return Err(ConnectionError::Violation(Violation::BeforeTls));
        }
        let tls = self.caller.tls.as_ref().expect("TLS is offered only if it is configured");
        self.sending.send_slice(acknowledged, self.shared.limits.handshake)?;
        let (receiving, sending) = tls.begin(self.socket, deadline).map_err(ConnectionError::Tls)?;
        self.source.go_over_to(ReceiveChannel::Tls(receiving));
        self.sending = SendChannel::Tls(sending);
        Ok(())
    }
}

/// How long a thread that has read a large payload waits for the next request before it lends the
/// reader to the ring again: in a stream the next request is already on its way.
const LINGER: Duration = Duration::from_millis(1);

/// The most requests that the ring starts before other connections get their turn.
const REQUESTS_MAX: usize = 64;

/// The receiving half of a connection.
pub(crate) struct Reader {
    shared: Arc<ServerShared>,
    source: ReadBuffer,
    session: Session,
    requests: RequestSender<PendingRequest>,
    route: Route,
    budget: Arc<Budget>,
    /// The pace of payloads.
    pace: PeerPace,
    caller: ClientContext,
    /// When the connection was established, for the write claim. `None` if another client has
    /// written since.
    since: Option<WriterGeneration>,
    /// The write claim, once it was needed and granted.
    claim: Option<WriteClaim>,
    /// Tells whether the client has left.
    socket: Arc<Socket>,
}

impl Reader {
    /// Runs until the connection ends. `ring_path` handles the requests that need no waiting.
    fn run(
        mut self: Box<Self>,
        ring_path: Option<&RingPath>,
    ) -> (Box<Self>, Result<EndedBy, ConnectionError>) {
        let stall = self.shared.limits.stall;
        let mut was_large = false;
        while !self.shared.is_stopping() {
            if let Some(ring_path) = ring_path
                && !(was_large && self.source.await_some(LINGER))
            {
                self = ring_path.lend_reader(self, stall);
                if self.shared.is_leaving() {
                    break;
                }
            }
            match self.serve_one() {
                Ok(Some(bytes)) => {
                    was_large = bytes > SMALL_BYTES_MAX || !self.source.fits(HEADER_BYTES + bytes);
                }
                // When a server ends a connection that it cannot hand over, that looks like an end
                // by the client.
                Ok(None) => return (self, Ok(EndedBy::Client)),
                Err(error) => return (self, Err(error)),
            }
        }
        (self, Ok(EndedBy::Server))
    }

    /// The client's standing as a writer.
    fn right(&self) -> WriterStatus {
        let volume = self.session.agreed().offer.export.uuid;
        let writing = self.shared.exports.writing();
        match self.since {
            _ if self.claim.is_some() => WriterStatus::Has,
            Some(since) if writing.may_begin(volume, self.caller.peer, since) => WriterStatus::MayBegin,
            _ => WriterStatus::Lost,
        }
    }

    /// Waits for a request, and for what it needs. Returns its bytes of payload, in either
    /// direction, or `None` if there are no more requests.
    fn serve_one(&mut self) -> Result<Option<usize>, ConnectionError> {
        let stall = ReceiveTimeout::Stall(self.shared.limits.stall);
        let Some(bytes) = self.source.next(HEADER_BYTES, ReceiveTimeout::Forever, stall)? else {
            return Ok(None);
        };
        let bytes = bytes.first_chunk().expect("a whole header was received");
        let header = RequestHeader::parse(bytes).map_err(ConnectionError::Violation)?;
        match self.session.decide(&header) {
            Decision::Run(command) if command.changes_content() && !self.may_write() => {
                let payload =
                    if matches!(command, Command::Write { .. }) { command.payload_bytes() } else { 0 };
                self.refuse(&header, NbdError::EPERM, payload)?;
            }
            Decision::Run(command) => {
                self.submit(&header, command)?;
                return Ok(Some(command.payload_bytes() as usize));
            }
            Decision::Refuse { error, payload } => self.refuse(&header, error, payload)?,
            Decision::Disconnect => return Ok(None),
            Decision::Violation(violation) => return Err(ConnectionError::Violation(violation)),
        }
        Ok(Some(0))
    }

    /// Whether part of a request has been received.
    pub(crate) fn has_part(&self) -> bool {
        !self.source.here().is_empty()
    }

    /// Starts the small requests that have arrived completely, as far as memory and the window
    /// permit.
    pub(crate) fn work_now(&mut self) -> TurnOutcome {
        let mut is_all = false;
        for _ in 0..REQUESTS_MAX {
            match self.begin_one() {
                StartOutcome::Started => {}
                StartOutcome::Incomplete if is_all => return TurnOutcome::Idle,
                StartOutcome::Incomplete => match self.source.look() {
                    ReadOutcome::More => {}
                    ReadOutcome::Drained => is_all = true,
                    ReadOutcome::Empty => return TurnOutcome::Idle,
                    ReadOutcome::Other => return TurnOutcome::NeedsThread,
                },
                StartOutcome::NotStarted => return TurnOutcome::NeedsThread,
            }
        }
        TurnOutcome::More
    }

    /// Starts the next request, if it is complete. If it is not started, it has had no effect.
    fn begin_one(&mut self) -> StartOutcome {
        let here = self.source.here();
        let Some(bytes) = here.first_chunk::<HEADER_BYTES>() else { return StartOutcome::Incomplete };
        let Ok(header) = RequestHeader::parse(bytes) else { return StartOutcome::NotStarted };
        let Decision::Run(command) = self.session.decide(&header) else { return StartOutcome::NotStarted };
        let bytes = command.payload_bytes() as usize;
        let is_write = matches!(command, Command::Write { .. });
        let in_all = HEADER_BYTES + if is_write { bytes } else { 0 };
        if bytes > SMALL_BYTES_MAX || !self.source.fits(in_all) || self.shared.is_stopping() {
            return StartOutcome::NotStarted;
        }
        if here.len() < in_all {
            return StartOutcome::Incomplete;
        }
        if command.changes_content() && !self.may_write() {
            return StartOutcome::NotStarted;
        }
        let permit = (bytes > 0).then(|| self.budget.try_acquire(bytes as u64));
        if matches!(permit, Some(None)) {
            return StartOutcome::NotStarted;
        }
        let mut buffer = Buffer::default();
        if bytes > 0 {
            buffer = self.shared.buffer(bytes);
        }
        if is_write {
            buffer.as_mut_slice().copy_from_slice(&self.source.here()[HEADER_BYTES..in_all]);
        }
        let (operation, payload) = operation(command, buffer);
        let pending =
            PendingRequest { awaited: ReplyContext::of(&header, command), permit: permit.flatten(), payload };
        if self.requests.try_submit_by(pending, &self.route, operation).is_err() {
            return StartOutcome::NotStarted;
        }
        self.source.consume(in_all);
        StartOutcome::Started
    }

    fn may_write(&mut self) -> bool {
        let export = &self.session.agreed().offer.export;
        if export.shared || self.claim.is_some() {
            return true;
        }
        let Some(since) = self.since else { return false };
        let claim = self.shared.exports.writing().claim(export.uuid, self.caller.peer, since);
        if let Some(claim) = claim {
            self.shared.writes(self.caller.number);
            self.has(claim);
        }
        self.claim.is_some()
    }

    /// Takes the write claim. It is held until the client has left and all its requests are
    /// complete.
    fn has(&mut self, claim: WriteClaim) {
        let socket = Arc::clone(&self.socket);
        claim.ends_after(Arc::new(move || socket.has_hung_up()));
        self.claim = Some(claim);
    }

    fn refuse(&mut self, header: &RequestHeader, error: NbdError, payload: u32) -> io::Result<()> {
        self.source.skip(payload, self.timeout(payload))?;
        let awaited = ReplyContext::refusal(header, error);
        self.requests.answer(PendingRequest { awaited, permit: None, payload: None }, Reply::done());
        Ok(())
    }

    /// The deadline for a payload. It holds its bytes of the budget from its first byte on, so a
    /// payload that trickles in would otherwise keep them from other connections for as long as it
    /// likes.
    fn timeout(&self, payload: u32) -> ReceiveTimeout {
        let transfer = Duration::from_millis(1000 * u64::from(payload) / SLOWEST_BYTES_A_SECOND);
        ReceiveTimeout::Deadline(Instant::now() + self.shared.limits.stall + transfer)
    }

    fn submit(&mut self, header: &RequestHeader, command: Command) -> io::Result<()> {
        let bytes = command.payload_bytes();
        let permit = (bytes > 0).then(|| self.budget.acquire(u64::from(bytes)));
        let mut buffer = Buffer::default();
        if bytes > 0 {
            buffer = self.shared.buffer(bytes as usize);
        }
        if matches!(command, Command::Write { .. }) {
            let timeout = self.timeout(bytes);
            self.source.read(buffer.as_mut_slice(), timeout, &mut self.pace).inspect_err(|error| {
                self.shared.lost(self.caller.number, "does not send its payload", error);
            })?;
        }
        let awaited = ReplyContext::of(header, command);
        let (operation, payload) = operation(command, buffer);
        self.requests.submit_by(PendingRequest { awaited, permit, payload }, &self.route, operation);
        Ok(())
    }
}

/// The outcome of trying to start the next request.
enum StartOutcome {
    /// It is started.
    Started,
    /// It has not arrived, or not completely.
    Incomplete,
    /// It cannot be handled here, or there is no room.
    NotStarted,
}

/// Returns the operation for the engine, and the payload of a write. `buffer` is that of a read, or
/// holds the data to be written.
fn operation(command: Command, buffer: Buffer) -> (Operation, Option<Payload>) {
    let operation = match command {
        Command::Read { sector, .. } => Operation::Read { sector, buffer },
        Command::Write { sector, fua, .. } => {
            let payload = buffer.freeze();
            return (Operation::Write { sector, payload: payload.clone(), fua }, Some(payload));
        }
        Command::Flush => Operation::Flush,
        Command::Trim { sector, sectors, fua } => Operation::Discard { sector, sectors, fua },
        Command::WriteZeroes { sector, sectors, fua, may_discard } => {
            Operation::WriteZeroes { sector, sectors, fua, may_discard }
        }
        Command::BlockStatus { sector, sectors, extents_max } => {
            Operation::BlockStatus { sector, sectors, extents_max }
        }
    };
    (operation, None)
}
