//! One connection, from its first byte to the end: the handshake, then requests into the port. A second thread
//! ([`crate::writer`]) sends the replies.
//!
//! **Back pressure.** Before a request is submitted it has its place in the window and its bytes in the budget; while
//! it waits for either nothing more is read, and the peer's sends block.
//!
//! **The end**, however it comes (DISC, a closed or broken socket, bytes that are no NBD, the server stopping): no
//! more requests are read, everything submitted is carried out and answered as far as the peer still listens, then the
//! right to write is given up and the socket is closed. A write whose payload did not come whole is never submitted.

use crate::channel::{Receiving, Sending};
use crate::pace::Pace;
use crate::proto::handshake::{Agreed, Catalog, Encryption, Handshake, Offer, Step};
use crate::proto::reply::Awaited;
use crate::proto::request::{Command, Decision, HEADER_BYTES, Header, Session};
use crate::proto::wire::{NbdError, Violation};
use crate::server::Shared;
use crate::socket::{Patience, Socket};
use crate::source::Source;
use crate::tls::Tls;
use crate::writer::{Pending, Writer};
use bcached_port::{Budget, Buffer, Claim, Moment, Operation, Peer, Reply, Requests, Route};
use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;

/// What any way to a client can do, beyond an initial stall.
const SLOWEST_BYTES_A_SECOND: u64 = 1 << 20;

/// Why a connection ended before its client said goodbye.
#[derive(Debug, Error)]
pub(crate) enum Broken {
    #[error("the client broke the protocol: {0}")]
    Violation(Violation),
    #[error("the connection failed: {0}")]
    Socket(#[from] io::Error),
    #[error("TLS did not begin: {0}")]
    Tls(io::Error),
    #[error("the volume {0:?} went away during the handshake")]
    Gone(String),
}

/// Who is on the other side of a connection.
#[derive(Clone)]
pub(crate) struct Caller {
    /// Our number for the connection.
    pub(crate) number: u64,
    /// Which client it belongs to.
    pub(crate) peer: Peer,
    /// It may only look.
    pub(crate) read_only: bool,
    /// It must begin TLS, with this.
    pub(crate) tls: Option<Tls>,
}

/// Serves a connection to its end.
pub(crate) fn serve(shared: &Arc<Shared>, socket: &Arc<Socket>, caller: &Caller) -> Result<(), Broken> {
    let catalog = PeerCatalog { shared, caller, since: Cell::new(Moment::default()) };
    let mut hands = Hands {
        shared,
        socket,
        caller,
        source: Source::new(Receiving::Plain(Arc::clone(socket))),
        sending: Sending::Plain(Arc::clone(socket)),
    };
    let Some(agreed) = hands.shake(&catalog)? else { return Ok(()) };
    let Hands { source, sending, .. } = hands;
    let export = Arc::clone(&agreed.offer.export);
    let Some(route) = &export.served else { return Err(Broken::Gone(export.name.clone())) };

    let limits = &shared.limits;
    let (requests, replies) = route.connect::<Pending>(limits.requests);
    let budget = Arc::new(Budget::new(limits.connection_bytes, Arc::clone(&shared.memory)));
    let pace = || Pace::new(Arc::clone(&budget), limits.give_way);
    let writer = Writer {
        shared: Arc::clone(shared),
        number: caller.number,
        socket: Arc::clone(socket),
        sending,
        replies,
        structured: agreed.structured,
        pace: pace(),
    };
    let writer = shared.spawn(format!("nbd-reply-{}", caller.number), move || writer.run())?;
    let mut reader = Reader {
        shared,
        source,
        session: Session::new(agreed),
        requests,
        route: route.clone(),
        pace: pace(),
        budget,
        caller,
        since: catalog.since.get(),
        claim: None,
    };
    let result = reader.run();
    let Reader { requests, claim, .. } = reader;
    // Nothing more is asked: the writer ends with the last reply.
    drop(requests);
    if writer.join().is_err() {
        tracing::error!(
            event = "nbd-connection-failed",
            connection = caller.number,
            "the replying thread panicked"
        );
    }
    // Only now is everything that this connection wrote done.
    drop(claim);
    result
}

/// The exports, as offered to one client.
struct PeerCatalog<'a> {
    shared: &'a Shared,
    caller: &'a Caller,
    /// When the last offer was made: what the client reads is at least as new.
    since: Cell<Moment>,
}

impl Catalog for PeerCatalog<'_> {
    fn names(&self) -> Vec<String> {
        self.shared.exports.served().iter().map(|export| export.name.clone()).collect()
    }

    fn offer(&self, name: &str) -> Result<Offer, String> {
        let export = self.shared.exports.find(name).map_err(|error| error.to_string())?;
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
    /// `None` when the client hung up properly, or the server is stopping.
    fn shake(&mut self, catalog: &PeerCatalog<'_>) -> Result<Option<Agreed>, Broken> {
        let stall = self.shared.limits.handshake;
        let moment = Instant::now() + stall;
        let deadline = Patience::Deadline(moment);
        let encryption = if self.caller.tls.is_some() { Encryption::Demanded } else { Encryption::None };
        let mut handshake = Handshake::new(encryption);
        loop {
            self.sending.send_slice(&handshake.take_outgoing(), stall)?;
            let Some(bytes) = self.source.next(handshake.needed(), deadline, deadline)? else {
                return Ok(None);
            };
            match handshake.step(bytes, catalog) {
                // The deadline holds also for a client that always has another question ready.
                Step::Continue if deadline.is_over() => {
                    return Err(io::Error::from(io::ErrorKind::TimedOut).into());
                }
                Step::Continue => {}
                Step::StartTls => {
                    let acknowledged = handshake.take_outgoing();
                    self.start_tls(&acknowledged, moment)?;
                }
                Step::Transmission(agreed) => {
                    // Before it is told: from then on it is nobody who may have to go for others.
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

    /// From here on everything is said in TLS. What came before the client was told to begin may be somebody else's.
    fn start_tls(&mut self, acknowledged: &[u8], deadline: Instant) -> Result<(), Broken> {
        if self.source.has_more() {
            return Err(Broken::Violation(Violation::BeforeTls));
        }
        let tls = self.caller.tls.as_ref().expect("it is offered only where it is");
        self.sending.send_slice(acknowledged, self.shared.limits.handshake)?;
        let (receiving, sending) = tls.begin(self.socket, deadline).map_err(Broken::Tls)?;
        self.source.go_over_to(Receiving::Tls(receiving));
        self.sending = Sending::Tls(sending);
        Ok(())
    }
}

/// The receiving half of a connection.
struct Reader<'a> {
    shared: &'a Shared,
    source: Source,
    session: Session,
    requests: Requests<Pending>,
    route: Route,
    budget: Arc<Budget>,
    /// Of payloads.
    pace: Pace,
    caller: &'a Caller,
    /// When the connection was established, for the right to write.
    since: Moment,
    /// The right to write, once it was needed and given.
    claim: Option<Claim>,
}

impl Reader<'_> {
    fn run(&mut self) -> Result<(), Broken> {
        let stall = Patience::Stall(self.shared.limits.stall);
        while !self.shared.is_stopping() {
            let Some(bytes) = self.source.next(HEADER_BYTES, Patience::Forever, stall)? else {
                return Ok(());
            };
            let bytes = bytes.first_chunk().expect("a header was asked for");
            let header = Header::parse(bytes).map_err(Broken::Violation)?;
            match self.session.decide(&header) {
                Decision::Run(command) if command.changes_content() && !self.may_write() => {
                    let payload =
                        if matches!(command, Command::Write { .. }) { command.payload_bytes() } else { 0 };
                    self.refuse(&header, NbdError::EPERM, payload)?;
                }
                Decision::Run(command) => self.submit(&header, command)?,
                Decision::Refuse { error, payload } => self.refuse(&header, error, payload)?,
                Decision::Disconnect => return Ok(()),
                Decision::Violation(violation) => return Err(Broken::Violation(violation)),
            }
        }
        Ok(())
    }

    fn may_write(&mut self) -> bool {
        let export = &self.session.agreed().offer.export;
        if export.shared || self.claim.is_some() {
            return true;
        }
        self.claim = self.shared.exports.writing().claim(export.uuid, self.caller.peer, self.since);
        if self.claim.is_some() {
            self.shared.writes(self.caller.number);
        }
        self.claim.is_some()
    }

    fn refuse(&mut self, header: &Header, error: NbdError, payload: u32) -> io::Result<()> {
        self.source.skip(payload, self.patience(payload))?;
        let awaited = Awaited::refusal(header, error);
        self.requests.answer(Pending { awaited, permit: None }, Reply::done());
        Ok(())
    }

    /// For a payload: it holds its bytes of the budget from its first byte on, so that one which comes in drops would hold
    /// them from the others for as long as it likes.
    fn patience(&self, payload: u32) -> Patience {
        let transfer = Duration::from_millis(1000 * u64::from(payload) / SLOWEST_BYTES_A_SECOND);
        Patience::Deadline(Instant::now() + self.shared.limits.stall + transfer)
    }

    fn submit(&mut self, header: &Header, command: Command) -> io::Result<()> {
        let bytes = command.payload_bytes();
        let permit = (bytes > 0).then(|| self.budget.acquire(u64::from(bytes)));
        let operation = match command {
            Command::Read { sector, bytes } => {
                Operation::Read { sector, buffer: Buffer::zeroed(bytes as usize) }
            }
            Command::Write { sector, bytes, fua } => {
                let mut buffer = Buffer::zeroed(bytes as usize);
                let patience = self.patience(bytes);
                self.source
                    .read(buffer.as_mut_slice(), patience, &mut self.pace)
                    .inspect_err(|error| self.shared.lost(self.caller.number, "sends no payload", error))?;
                Operation::Write { sector, payload: buffer.freeze(), fua }
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
        let awaited = Awaited::of(header, command);
        self.requests.submit_by(Pending { awaited, permit }, &self.route, operation);
        Ok(())
    }
}
