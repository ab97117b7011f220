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

use crate::channel::{Receiving, Sending};
use crate::handoff::{Resumed, Right, State};
use crate::peer_timeouts::Pace;
use crate::proto::handshake::{Agreed, Catalog, Encryption, Handshake, Offer, Step};
use crate::proto::reply::Awaited;
use crate::proto::request::{Command, Decision, HEADER_BYTES, Header, Session};
use crate::proto::wire::{NbdError, Violation};
use crate::ring_path::{Lane, Now};
use crate::server::{SMALL_BYTES_MAX, Served, Shared};
use crate::socket::{Patience, Socket};
use crate::source::{Look, Source};
use crate::tls::Tls;
use crate::writer::{Outgoing, Pending, Writer};
use bcached_port::{
    Budget, Buffer, Claim, Export, Moment, NoExport, Operation, Payload, Peer, Reply, Requests, Route,
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
pub(crate) enum Broken {
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
pub(crate) struct Caller {
    /// The connection's number.
    pub(crate) number: u64,
    /// The client that it belongs to.
    pub(crate) peer: Peer,
    /// Whether it may only read.
    pub(crate) read_only: bool,
    /// If set, the connection must begin TLS, with this.
    pub(crate) tls: Option<Tls>,
    /// If set, the connection uses this export, without a handshake.
    pub(crate) export: Option<String>,
}

/// Serves a connection to its end, from the start or from the state in which another server left
/// it. Returns its state if a further server is to resume it.
pub(crate) fn serve(
    shared: &Arc<Shared>,
    socket: &Arc<Socket>,
    caller: &Caller,
    resumed: Option<Resumed>,
) -> Result<Option<State>, Broken> {
    let (session, since, claim, source, sending) = match resumed {
        Some(Resumed { session, since, claim, unread }) => {
            let source = Source::behind(Receiving::Plain(Arc::clone(socket)), &unread);
            (session, since, claim, source, Sending::Plain(Arc::clone(socket)))
        }
        None => {
            let (since, waited) = (Cell::new(Moment::default()), Cell::default());
            let catalog = PeerCatalog { shared, socket, caller, since, waited };
            let mut hands = Hands {
                shared,
                socket,
                caller,
                source: Source::new(Receiving::Plain(Arc::clone(socket))),
                sending: Sending::Plain(Arc::clone(socket)),
            };
            let agreed = match &caller.export {
                Some(name) => Some(hands.begin_with(name, &catalog)?),
                None => hands.shake(&catalog)?,
            };
            let Some(agreed) = agreed else { return Ok(None) };
            let Hands { source, sending, .. } = hands;
            (Session::new(agreed), Some(catalog.since.get()), None, source, sending)
        }
    };
    Connection { shared, socket, caller }.transmit(session, (since, claim), source, sending)
}

/// A connection whose volume is known.
struct Connection<'a> {
    shared: &'a Arc<Shared>,
    socket: &'a Arc<Socket>,
    caller: &'a Caller,
}

impl Connection<'_> {
    fn transmit(
        self,
        session: Session,
        (since, claim): (Option<Moment>, Option<Claim>),
        source: Source,
        sending: Sending,
    ) -> Result<Option<State>, Broken> {
        let Self { shared, socket, caller } = self;
        let export = Arc::clone(&session.agreed().offer.export);
        let Some(route) = &export.served else { return Err(Broken::Gone(export.name.clone())) };
        let limits = &shared.limits;
        // The engine's thread does not decrypt, so that the cost of TLS falls on the connections
        // that use it.
        let ring = if caller.tls.is_none() { shared.rings.of(export.uuid.0) } else { None };
        let lane = ring.as_ref().map(Lane::new);
        let (requests, replies) = match lane.clone() {
            Some(lane) => {
                shared.is_served(caller.number, Served::OnRing(Arc::clone(&lane)));
                route.connect_with_bell::<Pending>(limits.requests, Arc::new(move || lane.ring()))
            }
            None => {
                shared.is_served(caller.number, Served::ByThreads);
                route.connect::<Pending>(limits.requests)
            }
        };
        let budget = Arc::new(Budget::new(limits.connection_bytes, Arc::clone(&shared.memory)));
        let pace = || Pace::new(Arc::clone(&budget), limits.give_way);
        let writer = Box::new(Writer {
            shared: Arc::clone(shared),
            number: caller.number,
            socket: Arc::clone(socket),
            sending,
            replies,
            structured: session.agreed().structured,
            pace: pace(),
            batch: VecDeque::new(),
            outgoing: Outgoing::default(),
        });
        let its_lane = lane.clone();
        let writer =
            shared.spawn(format!("nbd-reply-{}", caller.number), move || writer.run(its_lane.as_deref()))?;
        if let Some((ring, lane)) = ring.as_ref().zip(lane.as_ref()) {
            lane.host(ring, socket);
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
        let ending = lane.clone().map(EndsLane);
        let (reader, result) = reader.run(lane.as_deref());
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
        let goes_on = result? == Ended::Here && has_sent_all && lane.is_some() && shared.is_leaving();
        Ok(goes_on.then(|| State::of(&session, caller, right, source.here())))
    }
}

/// Which side has ended a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ended {
    /// The client, properly.
    There,
    /// The server: it is stopping, or leaving.
    Here,
}

/// Ends a lane when it is dropped.
struct EndsLane(Arc<Lane>);

impl Drop for EndsLane {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// The exports, as offered to one client.
struct PeerCatalog<'a> {
    shared: &'a Arc<Shared>,
    caller: &'a Caller,
    socket: &'a Arc<Socket>,
    /// When the last offer was made; whatever the client reads is at least as new.
    since: Cell<Moment>,
    /// How long the client has waited for volumes that were not served yet.
    waited: Cell<Duration>,
}

impl PeerCatalog<'_> {
    /// Finds a volume by name. May wait for the volume, and for its last writer to leave. Stops
    /// waiting if the client has hung up or lost its place, or if the server stops.
    fn find(&self, name: &str) -> Result<Arc<Export>, NoExport> {
        self.shared.go_on();
        let begun = Instant::now();
        let goes_on = || !self.shared.is_stopping() && !self.socket.has_hung_up();
        let found = self.shared.exports.find_or_wait(name, self.waited.get(), goes_on);
        // Connections taken over from another server are resumed first.
        self.shared.go_on();
        // A read-only client need not wait for a writer. The offer describes the volume as it is
        // after the wait.
        let found = match found {
            Ok(export) if !export.shared && !export.read_only && !self.caller.read_only => {
                self.shared.exports.writing().await_leavers(export.uuid, self.caller.peer, goes_on);
                self.shared.exports.find(name)
            }
            found => found,
        };
        self.waited.set(self.waited.get() + begun.elapsed());
        found
    }
}

impl Catalog for PeerCatalog<'_> {
    fn names(&self) -> Vec<String> {
        self.shared.exports.served().iter().map(|export| export.name.clone()).collect()
    }

    fn offer(&self, name: &str) -> Result<Offer, String> {
        let export = self.find(name).map_err(|error| error.to_string())?;
        let (now, taken) = self.shared.exports.writing().look(export.uuid, self.caller.peer);
        self.since.set(now);
        let read_only = export.read_only || self.caller.read_only || (taken && !export.shared);
        let one_of_several = matches!(self.caller.peer, Peer::Process { .. });
        let multi_conn = read_only || export.shared || one_of_several;
        Ok(Offer { export, read_only, multi_conn })
    }
}

/// A connection before its export is chosen.
struct Hands<'a> {
    shared: &'a Shared,
    socket: &'a Arc<Socket>,
    caller: &'a Caller,
    source: Source,
    sending: Sending,
}

impl Hands<'_> {
    /// Starts without a handshake: the client of a handed connection already knows its parameters.
    fn begin_with(&self, name: &str, catalog: &PeerCatalog<'_>) -> Result<Agreed, Broken> {
        let offer = catalog.offer(name).map_err(|_| Broken::Gone(name.to_owned()))?;
        self.shared.entered(self.caller.number, &offer.export.name, offer.read_only);
        Ok(Agreed { offer, structured: false, block_status: false })
    }

    /// Runs the handshake. Returns `None` if the client hung up properly, or the server is
    /// stopping.
    fn shake(&mut self, catalog: &PeerCatalog<'_>) -> Result<Option<Agreed>, Broken> {
        let encryption = if self.caller.tls.is_some() { Encryption::Demanded } else { Encryption::None };
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
        catalog: &PeerCatalog<'_>,
    ) -> Result<Option<Agreed>, Broken> {
        let stall = self.shared.limits.handshake;
        let begun = Instant::now() + stall;
        loop {
            // Time spent waiting for a volume is not the client's fault.
            let moment = begun + catalog.waited.get();
            let deadline = Patience::Deadline(moment);
            self.sending.send_slice(&handshake.take_outgoing(), stall)?;
            let Some(bytes) = self.source.next(handshake.needed(), deadline, deadline)? else {
                return Ok(None);
            };
            match handshake.step(bytes, catalog) {
                // The deadline also applies to a client that keeps asking questions.
                Step::Continue if Patience::Deadline(begun + catalog.waited.get()).is_over() => {
                    return Err(io::Error::from(io::ErrorKind::TimedOut).into());
                }
                Step::Continue => {}
                Step::StartTls => {
                    let acknowledged = handshake.take_outgoing();
                    self.start_tls(&acknowledged, moment)?;
                }
                Step::Transmission(agreed) => {
                    // Registered before the client is told: with an export, its connection cannot
                    // be evicted for a new one.
                    let Offer { export, read_only, .. } = &agreed.offer;
                    self.shared.entered(self.caller.number, &export.name, *read_only);
                    self.sending.send_slice(&handshake.take_outgoing(), stall)?;
                    return Ok(Some(agreed));
                }
                Step::Goodbye => {
                    self.sending.send_slice(&handshake.take_outgoing(), stall)?;
                    self.sending.say_goodbye();
                    return Ok(None);
                }
                Step::Violation(violation) => return Err(Broken::Violation(violation)),
            }
        }
    }

    /// Switches to TLS. Plaintext received before the client was told to begin may be from an
    /// attacker, and is a violation.
    fn start_tls(&mut self, acknowledged: &[u8], deadline: Instant) -> Result<(), Broken> {
        if self.source.has_more() {
            return Err(Broken::Violation(Violation::BeforeTls));
        }
        let tls = self.caller.tls.as_ref().expect("TLS is offered only if it is configured");
        self.sending.send_slice(acknowledged, self.shared.limits.handshake)?;
        let (receiving, sending) = tls.begin(self.socket, deadline).map_err(Broken::Tls)?;
        self.source.go_over_to(Receiving::Tls(receiving));
        self.sending = Sending::Tls(sending);
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
    shared: Arc<Shared>,
    source: Source,
    session: Session,
    requests: Requests<Pending>,
    route: Route,
    budget: Arc<Budget>,
    /// The pace of payloads.
    pace: Pace,
    caller: Caller,
    /// When the connection was established, for the write claim. `None` if another client has
    /// written since.
    since: Option<Moment>,
    /// The write claim, once it was needed and granted.
    claim: Option<Claim>,
    /// Tells whether the client has left.
    socket: Arc<Socket>,
}

impl Reader {
    /// Runs until the connection ends. `lane` handles the requests that need no waiting.
    fn run(mut self: Box<Self>, lane: Option<&Lane>) -> (Box<Self>, Result<Ended, Broken>) {
        let stall = self.shared.limits.stall;
        let mut was_large = false;
        while !self.shared.is_stopping() {
            if let Some(lane) = lane
                && !(was_large && self.source.await_some(LINGER))
            {
                self = lane.lend_reader(self, stall);
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
                Ok(None) => return (self, Ok(Ended::There)),
                Err(error) => return (self, Err(error)),
            }
        }
        (self, Ok(Ended::Here))
    }

    /// The client's standing as a writer.
    fn right(&self) -> Right {
        let volume = self.session.agreed().offer.export.uuid;
        let writing = self.shared.exports.writing();
        match self.since {
            _ if self.claim.is_some() => Right::Has,
            Some(since) if writing.may_begin(volume, self.caller.peer, since) => Right::MayBegin,
            _ => Right::Lost,
        }
    }

    /// Waits for a request, and for what it needs. Returns its bytes of payload, in either
    /// direction, or `None` if there are no more requests.
    fn serve_one(&mut self) -> Result<Option<usize>, Broken> {
        let stall = Patience::Stall(self.shared.limits.stall);
        let Some(bytes) = self.source.next(HEADER_BYTES, Patience::Forever, stall)? else {
            return Ok(None);
        };
        let bytes = bytes.first_chunk().expect("a whole header was received");
        let header = Header::parse(bytes).map_err(Broken::Violation)?;
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
            Decision::Violation(violation) => return Err(Broken::Violation(violation)),
        }
        Ok(Some(0))
    }

    /// Whether part of a request has been received.
    pub(crate) fn has_part(&self) -> bool {
        !self.source.here().is_empty()
    }

    /// Starts the small requests that have arrived completely, as far as memory and the window
    /// permit.
    pub(crate) fn work_now(&mut self) -> Now {
        let mut is_all = false;
        for _ in 0..REQUESTS_MAX {
            match self.begin_one() {
                Begun::One => {}
                Begun::Part if is_all => return Now::Waits,
                Begun::Part => match self.source.look() {
                    Look::More => {}
                    Look::All => is_all = true,
                    Look::Nothing => return Now::Waits,
                    Look::Other => return Now::Thread,
                },
                Begun::Not => return Now::Thread,
            }
        }
        Now::More
    }

    /// Starts the next request, if it is complete. If it is not started, it has had no effect.
    fn begin_one(&mut self) -> Begun {
        let here = self.source.here();
        let Some(bytes) = here.first_chunk::<HEADER_BYTES>() else { return Begun::Part };
        let Ok(header) = Header::parse(bytes) else { return Begun::Not };
        let Decision::Run(command) = self.session.decide(&header) else { return Begun::Not };
        let bytes = command.payload_bytes() as usize;
        let is_write = matches!(command, Command::Write { .. });
        let in_all = HEADER_BYTES + if is_write { bytes } else { 0 };
        if bytes > SMALL_BYTES_MAX || !self.source.fits(in_all) || self.shared.is_stopping() {
            return Begun::Not;
        }
        if here.len() < in_all {
            return Begun::Part;
        }
        if command.changes_content() && !self.may_write() {
            return Begun::Not;
        }
        let permit = (bytes > 0).then(|| self.budget.try_acquire(bytes as u64));
        if matches!(permit, Some(None)) {
            return Begun::Not;
        }
        let mut buffer = Buffer::default();
        if bytes > 0 {
            buffer = self.shared.buffer(bytes);
        }
        if is_write {
            buffer.as_mut_slice().copy_from_slice(&self.source.here()[HEADER_BYTES..in_all]);
        }
        let (operation, payload) = operation(command, buffer);
        let pending = Pending { awaited: Awaited::of(&header, command), permit: permit.flatten(), payload };
        if self.requests.try_submit_by(pending, &self.route, operation).is_err() {
            return Begun::Not;
        }
        self.source.consume(in_all);
        Begun::One
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
    fn has(&mut self, claim: Claim) {
        let socket = Arc::clone(&self.socket);
        claim.ends_after(Arc::new(move || socket.has_hung_up()));
        self.claim = Some(claim);
    }

    fn refuse(&mut self, header: &Header, error: NbdError, payload: u32) -> io::Result<()> {
        self.source.skip(payload, self.patience(payload))?;
        let awaited = Awaited::refusal(header, error);
        self.requests.answer(Pending { awaited, permit: None, payload: None }, Reply::done());
        Ok(())
    }

    /// The deadline for a payload. It holds its bytes of the budget from its first byte on, so a
    /// payload that trickles in would otherwise keep them from other connections for as long as it
    /// likes.
    fn patience(&self, payload: u32) -> Patience {
        let transfer = Duration::from_millis(1000 * u64::from(payload) / SLOWEST_BYTES_A_SECOND);
        Patience::Deadline(Instant::now() + self.shared.limits.stall + transfer)
    }

    fn submit(&mut self, header: &Header, command: Command) -> io::Result<()> {
        let bytes = command.payload_bytes();
        let permit = (bytes > 0).then(|| self.budget.acquire(u64::from(bytes)));
        let mut buffer = Buffer::default();
        if bytes > 0 {
            buffer = self.shared.buffer(bytes as usize);
        }
        if matches!(command, Command::Write { .. }) {
            let patience = self.patience(bytes);
            self.source.read(buffer.as_mut_slice(), patience, &mut self.pace).inspect_err(|error| {
                self.shared.lost(self.caller.number, "does not send its payload", error);
            })?;
        }
        let awaited = Awaited::of(header, command);
        let (operation, payload) = operation(command, buffer);
        self.requests.submit_by(Pending { awaited, permit, payload }, &self.route, operation);
        Ok(())
    }
}

/// The outcome of trying to start the next request.
enum Begun {
    /// It is started.
    One,
    /// It has not arrived, or not completely.
    Part,
    /// It cannot be handled here, or there is no room.
    Not,
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
