//! Connections that another server goes on with, in another process or in this one: between two requests all there is to a connection is
//! its socket, what was agreed on, and the bytes that nobody has looked at yet.
//!
//! Who has begun a request is waited for, and everything that was asked is answered first. What cannot be taken along ends as when a server
//! stops: a connection in TLS, whose keys are nobody else's, and one that is served by its threads alone, which wait in the socket.

use crate::accept::Newcomer;
use crate::connection::Caller;
use crate::endpoint::Bound;
use crate::proto::handshake::{Agreed, Offer};
use crate::proto::request::Session;
use crate::server::{Client, Connections, Live, NbdServer, Served, Shared};
use crate::socket::Socket;
use bcached_port::socket::Whose;
use bcached_port::{Claim, ExportTable, Moment, NoExport};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A connection between two requests.
pub struct Left {
    /// The same as its server has: no second descriptor is needed for it.
    socket: Arc<Socket>,
    /// What else there is to it.
    pub state: State,
}

/// What a connection is beside its socket.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct State {
    /// UUID of the volume.
    pub volume: String,
    /// Its size as the client was told, in bytes.
    pub bytes: u64,
    /// Replies are structured.
    pub structured: bool,
    /// Block status may be asked for.
    pub block_status: bool,
    /// The client was told that it may not write.
    pub read_only: bool,
    /// It may use several connections at once.
    pub multi_conn: bool,
    /// It has come where one may only look.
    pub only_looks: bool,
    /// Whether it writes.
    pub right: Right,
    /// What has come and belongs to no request yet.
    pub unread: Vec<u8>,
}

/// How a client stands with writing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Right {
    /// It writes.
    Has,
    /// It may begin to.
    MayBegin,
    /// Somebody else has written since it connected.
    Lost,
}

/// What a server leaves.
#[derive(Debug)]
pub struct Leaving {
    /// Where it has listened, in the order of the options.
    pub sockets: Vec<LeftSocket>,
    /// Connections that wait for who goes on with them.
    pub connections: Vec<Left>,
    /// Those that had to be ended.
    pub ended: Vec<Client>,
}

/// A socket that has been listened on.
#[derive(Debug)]
pub struct LeftSocket {
    /// It.
    pub socket: OwnedFd,
    /// Where it is.
    pub bound: Bound,
    /// Who has bound it.
    pub whose: Whose,
}

/// Connections that are leaving.
#[derive(Default)]
pub(crate) struct Leavers {
    /// Those that another server is to go on with, so far.
    left: Vec<Left>,
    /// Those that end instead.
    ended: Vec<Client>,
}

/// A connection that is gone on with.
pub(crate) struct Resumed {
    pub(crate) session: Session,
    /// From when on nobody else may have written for it to begin; `None`: somebody has.
    pub(crate) since: Option<Moment>,
    pub(crate) claim: Option<Claim>,
    pub(crate) unread: Vec<u8>,
}

/// How long a client that is about to choose its volume has for that.
const HANDSHAKES: Duration = Duration::from_secs(1);

impl NbdServer {
    /// Stops, and leaves what it has to another server. Clients get the replies to what they have asked, up to `limit`, and those who are
    /// not through with a request by then are cut off.
    #[must_use = "what is dropped is closed"]
    pub fn leave(mut self, limit: Duration) -> Leaving {
        let shared = Arc::clone(self.shared());
        let deadline = Instant::now() + limit;
        // First, so that no connection ends only because this server does.
        shared.recall_all();
        let listening = self.stop_accepting();
        let mut cut = Vec::new();
        if !shared.wait_all_ended(deadline.min(Instant::now() + HANDSHAKES)) {
            shared.end_handshakes();
            cut = shared.end_all(deadline);
        }
        let Leavers { left: mut connections, mut ended } = shared.take_left();
        connections.append(&mut shared.lock_kept());
        // Who was told to end may not have.
        cut.retain(|client| ended.iter().all(|told| told.number != client.number));
        ended.append(&mut cut);
        let sockets = listening.into_iter().filter_map(|socket| match socket.leave() {
            Ok(left) => Some(left),
            Err(error) => {
                tracing::warn!(event = "nbd-not-left", %error, "a place of NBD is not passed on");
                None
            }
        });
        Leaving { sockets: sockets.collect(), ended, connections }
    }

    /// Keeps connections that another server has left for when their volumes are served: see [`NbdServer::go_on`].
    pub fn keep(&self, left: Vec<Left>) {
        self.shared().lock_kept().extend(left);
    }

    /// Goes on with those that are kept whose volumes are served by now. They are let in whatever the limit of connections is, and if the server
    /// is closed. Before anybody else is offered a volume the server does so by itself: who has written to it may go on to.
    pub fn go_on(&self) {
        self.shared().go_on();
    }

    /// The UUIDs of the volumes that are waited for, one for each connection that is kept.
    #[must_use]
    pub fn awaited(&self) -> Vec<String> {
        self.shared().lock_kept().iter().map(|left| left.state.volume.clone()).collect()
    }

    /// Ends those that are kept for such volumes, by their UUIDs; one for each connection.
    pub fn give_up(&self, is_in_vain: impl Fn(&str) -> bool) -> Vec<String> {
        let mut kept = self.shared().lock_kept();
        let ended = kept.extract_if(.., |left| is_in_vain(&left.state.volume));
        ended.map(|left| left.state.volume).collect()
    }
}

impl Left {
    /// That another process has passed.
    #[must_use]
    pub fn new(socket: OwnedFd, state: State) -> Self {
        Self { socket: Arc::new(Socket::new(socket)), state }
    }
}

impl AsFd for Left {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl fmt::Debug for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Left").field("state", &self.state).finish_non_exhaustive()
    }
}

impl State {
    /// The connection as it was. Who has written has the right to it before anybody else can have it.
    pub(crate) fn resumed(self, exports: &ExportTable, caller: &Caller) -> Result<Resumed, NoExport> {
        let export = exports.find(&self.volume)?;
        let (now, _) = exports.writing().look(export.uuid, caller.peer);
        let claim = match self.right {
            Right::Has => exports.writing().claim(export.uuid, caller.peer, now),
            Right::MayBegin | Right::Lost => None,
        };
        // Nobody has written by NBD since, or it had lost the right: nobody is offered the volume before this (`Shared::go_on`).
        let since = (self.right != Right::Lost).then_some(now);
        let offer = Offer { export, read_only: self.read_only, multi_conn: self.multi_conn };
        let agreed = Agreed { offer, structured: self.structured, block_status: self.block_status };
        Ok(Resumed { session: Session::resumed(agreed, self.bytes), since, claim, unread: self.unread })
    }

    /// What is left of a connection; `unread` has come.
    pub(crate) fn of(session: &Session, caller: &Caller, right: Right, unread: &[u8]) -> Self {
        let Agreed { offer, structured, block_status } = session.agreed();
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

impl Shared {
    /// Whether connections that end now are gone on with elsewhere.
    pub(crate) fn is_leaving(&self) -> bool {
        self.lock().leavers.is_some()
    }

    /// A connection is served like this from now on. If those that are here are leaving, it does as well.
    pub(crate) fn is_served(&self, number: u64, served: Served) {
        let mut connections = self.lock();
        let Connections { live, leavers, .. } = &mut *connections;
        let Some(live) = live.get_mut(&number) else { return };
        live.served = served;
        if let Some(leavers) = leavers {
            leavers.recall(live);
        }
    }

    /// A connection is left.
    pub(crate) fn leave(&self, socket: &Arc<Socket>, state: State) {
        if let Some(leavers) = &mut self.lock().leavers {
            leavers.left.push(Left { socket: Arc::clone(socket), state });
        }
    }

    /// Connections are between two requests as soon as they can be, also those that come to their first one now; those that cannot be left
    /// end.
    fn recall_all(&self) {
        let mut connections = self.lock();
        let Connections { live, leavers, .. } = &mut *connections;
        let leavers = leavers.insert(Leavers::default());
        live.values().filter(|live| !live.done).for_each(|live| leavers.recall(live));
    }

    /// Goes on with one whose volume is served.
    fn resume(self: &Arc<Self>, Left { socket, state }: Left) {
        let address = rustix::net::getpeername(&*socket).ok().flatten();
        let address = address.and_then(|address| SocketAddr::try_from(address).ok());
        let newcomer = Newcomer {
            process: if address.is_some() { None } else { socket.peer_process() },
            socket,
            address,
            read_only: state.only_looks,
            tls: None,
            export: None,
            left: Some(state),
        };
        if let Err(error) = self.begin(newcomer) {
            tracing::warn!(event = "nbd-not-accepted", %error, "an NBD connection is not gone on with");
        }
    }

    /// See [`NbdServer::go_on`].
    pub(crate) fn go_on(self: &Arc<Self>) {
        // Held until they have the right to write: nobody is offered their volumes before that.
        let mut kept = self.lock_kept();
        if !kept.is_empty() {
            let served: Vec<_> =
                kept.extract_if(.., |left| self.exports.find(&left.state.volume).is_ok()).collect();
            served.into_iter().for_each(|left| self.resume(left));
        }
    }

    fn lock_kept(&self) -> MutexGuard<'_, Vec<Left>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end_handshakes(&self) {
        let connections = self.lock();
        let idle = connections.live.values().filter(|live| live.client.export.is_none());
        idle.for_each(|live| live.socket.end_receiving());
    }

    fn take_left(&self) -> Leavers {
        self.lock().leavers.as_mut().map(std::mem::take).unwrap_or_default()
    }
}

impl Leavers {
    fn recall(&mut self, live: &Live) {
        match &live.served {
            Served::OnRing(lane) => lane.recall(),
            Served::ByThreads => {
                live.socket.end_receiving();
                self.ended.push(live.client.clone());
            }
            Served::NotYet => {}
        }
    }
}
