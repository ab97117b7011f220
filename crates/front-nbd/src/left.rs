//! Connections that another server goes on with, in another process or in this one: between two requests all there is to a connection is
//! its socket, what was agreed on, and the bytes that nobody has looked at yet.
//!
//! Who has begun a request is waited for, and everything that was asked is answered first. What cannot be taken along ends as when a server
//! stops: a connection in TLS, whose keys are nobody else's, and one that is served by its threads alone, which wait in the socket.

use crate::connection::Caller;
use crate::endpoint::Bound;
use crate::newcomer::Newcomer;
use crate::proto::handshake::{Agreed, Offer};
use crate::proto::request::Session;
use crate::server::{Connections, Live, NbdServer, Served, Shared};
use crate::socket::Socket;
use bcached_port::{Claim, ExportTable, Moment, NoExport};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
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
    pub ended: usize,
}

/// A socket that has been listened on.
#[derive(Debug)]
pub struct LeftSocket {
    /// It.
    pub socket: OwnedFd,
    /// Where it is.
    pub bound: Bound,
    /// Somebody else has bound it.
    pub was_passed: bool,
}

/// Connections that are leaving.
#[derive(Default)]
pub(crate) struct Leavers {
    /// Those that another server is to go on with, so far.
    left: Vec<Left>,
    /// How many end instead.
    ended: usize,
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
        let mut cut = 0;
        if !shared.wait_all_ended(deadline.min(Instant::now() + HANDSHAKES)) {
            shared.end_handshakes();
            cut = shared.end_all(deadline);
        }
        let Leavers { left: connections, ended } = shared.take_left();
        let sockets = listening.into_iter().filter_map(|socket| match socket.leave() {
            Ok(left) => Some(left),
            Err(error) => {
                tracing::warn!(event = "nbd-not-left", %error, "a place of NBD is not passed on");
                None
            }
        });
        Leaving { sockets: sockets.collect(), ended: ended + cut, connections }
    }

    /// Goes on with connections that another server has left, whose volumes are served. They are let in whatever the limit of connections
    /// is, before anybody else if the server is closed.
    pub fn resume(&self, left: Vec<Left>) {
        for Left { socket, state } in left {
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
            if let Err(error) = self.shared().begin(newcomer) {
                tracing::warn!(event = "nbd-not-accepted", %error, "an NBD connection is not gone on with");
            }
        }
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
        // Nobody has written since: else it had lost the right.
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
                self.ended += 1;
            }
            Served::NotYet => {}
        }
    }
}
