//! Hands over connections to another server, in another process or in this one. Between two
//! requests a connection consists of its socket, the negotiated parameters, and the bytes that were
//! received and not yet parsed.
//!
//! A request that was started is waited for, and everything asked is answered first. A connection
//! that cannot be handed over is ended, as when a server stops. That applies to a connection in
//! TLS, whose keys are private to the process, and to one that is served by its threads alone,
//! which wait in the socket.

use crate::accept::NewConnection;
use crate::connection::ClientContext;
use crate::endpoint::BoundAddress;
use crate::proto::handshake::{ExportOffer, NegotiatedParams};
use crate::proto::request::Session;
use crate::server::{ClientInfo, Connections, LiveConnection, NbdServer, ServerShared, ServingMode};
use crate::socket::Socket;
use bcached_port::socket::SocketOwner;
use bcached_port::{ExportError, ExportTable, WriteClaim, WriterGeneration};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A connection between two requests.
pub struct HandoffConnection {
    /// Shared with its server, so that no second descriptor is needed.
    socket: Arc<Socket>,
    /// The rest of its state.
    pub state: ConnectionState,
}

/// The state of a connection apart from its socket.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ConnectionState {
    /// UUID of the volume.
    pub volume: String,
    /// The volume's size as the client was told, in bytes.
    pub bytes: u64,
    /// Whether replies are structured.
    pub structured: bool,
    /// Whether block status was negotiated.
    pub block_status: bool,
    /// Whether the client was told that the export is read-only.
    pub read_only: bool,
    /// Whether the client was told that it may use several connections.
    pub multi_conn: bool,
    /// Whether it arrived at a read-only endpoint.
    pub only_looks: bool,
    /// Its standing as a writer.
    pub right: WriterStatus,
    /// Bytes that were received and belong to no request yet.
    pub unread: Vec<u8>,
}

/// A client's standing as a writer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum WriterStatus {
    /// It holds the write claim.
    Has,
    /// It may still claim writing.
    MayBegin,
    /// Another client has written since it connected.
    Lost,
}

/// What a server hands over.
#[derive(Debug)]
pub struct Handoff {
    /// The sockets at which it has listened, in the order of the options.
    pub sockets: Vec<HandoffSocket>,
    /// Connections to be resumed.
    pub connections: Vec<HandoffConnection>,
    /// Connections that had to be ended.
    pub ended: Vec<ClientInfo>,
}

/// A listening socket to hand over.
#[derive(Debug)]
pub struct HandoffSocket {
    /// The socket.
    pub socket: OwnedFd,
    /// Its address.
    pub bound: BoundAddress,
    /// Whose process has bound it.
    pub whose: SocketOwner,
}

/// Connections that are being handed over.
#[derive(Default)]
pub(crate) struct HandoffQueue {
    /// Those that another server is to resume, so far.
    left: Vec<HandoffConnection>,
    /// Those that are ended instead.
    ended: Vec<ClientInfo>,
}

/// A resumed connection.
pub(crate) struct ResumedConnection {
    pub(crate) session: Session,
    /// The moment since which no other client may have written, for it to claim writing. `None` if
    /// another client has written.
    pub(crate) since: Option<WriterGeneration>,
    pub(crate) claim: Option<WriteClaim>,
    pub(crate) unread: Vec<u8>,
}

/// How long clients that are in the handshake have to choose their volume.
const HANDSHAKES: Duration = Duration::from_secs(1);

impl NbdServer {
    /// Stops the server and hands over its sockets and connections. Clients get the replies to
    /// pending requests, up to `limit`; a client with a request still incomplete by then is cut
    /// off.
    #[must_use = "what is dropped is closed"]
    pub fn leave(mut self, limit: Duration) -> Handoff {
        let shared = Arc::clone(self.shared());
        let deadline = Instant::now() + limit;
        // First, so that no connection ends just because this server does.
        shared.recall_all();
        let listening = self.stop_accepting();
        let mut cut = Vec::new();
        if !shared.wait_all_ended(deadline.min(Instant::now() + HANDSHAKES)) {
            shared.end_handshakes();
            cut = shared.end_all(deadline);
        }
        let HandoffQueue { left: mut connections, mut ended } = shared.take_left();
        connections.append(&mut shared.lock_kept());
        // A client that was told to end may not have ended yet.
        cut.retain(|client| ended.iter().all(|told| told.number != client.number));
        ended.append(&mut cut);
        let sockets = listening.into_iter().filter_map(|socket| match socket.leave() {
            Ok(left) => Some(left),
            Err(error) => {
                tracing::warn!(event = "nbd-not-left", %error, "cannot pass on a listening NBD socket");
                None
            }
        });
        Handoff { sockets: sockets.collect(), ended, connections }
    }

    /// Keeps connections that another server has handed over until their volumes are served: see
    /// [`NbdServer::go_on`].
    pub fn keep(&self, left: Vec<HandoffConnection>) {
        self.shared().lock_kept().extend(left);
    }

    /// Resumes the kept connections whose volumes are now served, regardless of the connection
    /// limit, and even if the server is closed. The server does this automatically before it offers
    /// a volume to any other client, so that a client that has written may continue to.
    pub fn go_on(&self) {
        self.shared().go_on();
    }

    /// The UUIDs of the volumes that are waited for, one for each kept connection.
    #[must_use]
    pub fn awaited(&self) -> Vec<String> {
        self.shared().lock_kept().iter().map(|left| left.state.volume.clone()).collect()
    }

    /// Ends the kept connections whose volume's UUID satisfies the condition. Returns the UUIDs,
    /// one for each connection.
    pub fn give_up(&self, is_in_vain: impl Fn(&str) -> bool) -> Vec<String> {
        let mut kept = self.shared().lock_kept();
        let ended = kept.extract_if(.., |left| is_in_vain(&left.state.volume));
        ended.map(|left| left.state.volume).collect()
    }
}

impl HandoffConnection {
    /// A connection that another process has passed.
    #[must_use]
    pub fn new(socket: OwnedFd, state: ConnectionState) -> Self {
        Self { socket: Arc::new(Socket::new(socket)), state }
    }
}

impl AsFd for HandoffConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl fmt::Debug for HandoffConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandoffConnection").field("state", &self.state).finish_non_exhaustive()
    }
}

impl ConnectionState {
    /// Restores the connection. A client that has written gets the write claim again before any
    /// other client can.
    pub(crate) fn resumed(
        self,
        exports: &ExportTable,
        caller: &ClientContext,
    ) -> Result<ResumedConnection, ExportError> {
        let export = exports.find(&self.volume)?;
        let (now, _) = exports.writing().look(export.uuid, caller.peer);
        let claim = match self.right {
            WriterStatus::Has => exports.writing().claim(export.uuid, caller.peer, now),
            WriterStatus::MayBegin | WriterStatus::Lost => None,
        };
        // Either no client has written by NBD since, or this one had lost the claim already: the
        // volume is not offered to any client before this (`ServerShared::go_on`).
        let since = (self.right != WriterStatus::Lost).then_some(now);
        let offer = ExportOffer { export, read_only: self.read_only, multi_conn: self.multi_conn };
        let agreed = NegotiatedParams { offer, structured: self.structured, block_status: self.block_status };
        Ok(ResumedConnection {
            session: Session::resumed(agreed, self.bytes),
            since,
            claim,
            unread: self.unread,
        })
    }

    /// Returns the state of a connection; `unread` are the bytes received and not yet parsed.
    pub(crate) fn of(session: &Session, caller: &ClientContext, right: WriterStatus, unread: &[u8]) -> Self {
        let NegotiatedParams { offer, structured, block_status } = session.agreed();
        Self {
            volume: offer.export.uuid.to_string(),
            bytes: session.bytes(),
            structured: *structured,
            block_status: *block_status,
            read_only: offer.read_only,
            multi_conn: offer.multi_conn,
            only_looks: caller.read_only,
            right,
            unread: unread.to_vec(),
        }
    }
}

impl ServerShared {
    /// Whether connections that end now are to be resumed by another server.
    pub(crate) fn is_leaving(&self) -> bool {
        self.lock().leavers.is_some()
    }

    /// Records how a connection is served from now on. If a hand-over is under way, the connection
    /// takes part in it.
    pub(crate) fn is_served(&self, number: u64, served: ServingMode) {
        let mut connections = self.lock();
        let Connections { live, leavers, .. } = &mut *connections;
        let Some(live) = live.get_mut(&number) else { return };
        live.served = served;
        if let Some(leavers) = leavers {
            leavers.recall(live);
        }
    }

    /// Adds a connection to those that are handed over.
    pub(crate) fn leave(&self, socket: &Arc<Socket>, state: ConnectionState) {
        if let Some(leavers) = &mut self.lock().leavers {
            leavers.left.push(HandoffConnection { socket: Arc::clone(socket), state });
        }
    }

    /// Stops all connections between two requests, as soon as possible, including those that have
    /// not reached their first request yet. Those that cannot be handed over are ended.
    fn recall_all(&self) {
        let mut connections = self.lock();
        let Connections { live, leavers, .. } = &mut *connections;
        let leavers = leavers.insert(HandoffQueue::default());
        live.values().filter(|live| !live.done).for_each(|live| leavers.recall(live));
    }

    /// Resumes a connection whose volume is served.
    fn resume(self: &Arc<Self>, HandoffConnection { socket, state }: HandoffConnection) {
        let address = rustix::net::getpeername(&*socket).ok().flatten();
        let address = address.and_then(|address| SocketAddr::try_from(address).ok());
        let newcomer = NewConnection {
            process: if address.is_some() { None } else { socket.peer_process() },
            socket,
            address,
            read_only: state.only_looks,
            tls: None,
            export: None,
            left: Some(state),
        };
        if let Err(error) = self.begin(newcomer) {
            tracing::warn!(event = "nbd-not-accepted", %error, "cannot resume an NBD connection");
        }
    }

    /// See [`NbdServer::go_on`].
    pub(crate) fn go_on(self: &Arc<Self>) {
        // Held until these connections have their write claims: their volumes are not offered to
        // other clients before that.
        let mut kept = self.lock_kept();
        if !kept.is_empty() {
            let served: Vec<_> =
                kept.extract_if(.., |left| self.exports.find(&left.state.volume).is_ok()).collect();
            served.into_iter().for_each(|left| self.resume(left));
        }
    }

    fn lock_kept(&self) -> MutexGuard<'_, Vec<HandoffConnection>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end_handshakes(&self) {
        let connections = self.lock();
        let idle = connections.live.values().filter(|live| live.client.export.is_none());
        idle.for_each(|live| live.socket.end_receiving());
    }

    fn take_left(&self) -> HandoffQueue {
        self.lock().leavers.as_mut().map(std::mem::take).unwrap_or_default()
    }
}

impl HandoffQueue {
    fn recall(&mut self, live: &LiveConnection) {
        match &live.served {
            ServingMode::OnRing(ring_path) => ring_path.recall(),
            ServingMode::ByThreads => {
                live.socket.end_receiving();
                self.ended.push(live.client.clone());
            }
            ServingMode::Handshake => {}
        }
    }
}
