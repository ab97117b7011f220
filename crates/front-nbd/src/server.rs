//! The server: it listens, starts a thread for each connection, keeps track of the clients, and
//! stops within a time limit.
//!
//! One thread accepts on all endpoints. It sleeps in poll; an eventfd wakes it when a connection
//! has ended (its thread is then joined) or the server stops. When the connection limit is reached,
//! a new connection takes the place of the one that has been without an export for longest. So
//! clients that only connect keep no others out.
//!
//! Which client may write is decided in [`bcached_port::writer_claim`]: one at a time, unless the
//! volume is shared. Writing begins with the first write. From then on the export is offered to
//! other clients read-only, and one that connected before gets EPERM until it reconnects.

mod socket_recreate;

use crate::accept::NewConnection;
use crate::connection::ConnectionError;
use crate::endpoint::{BoundAddress, Endpoint, EndpointListener, ListenError};
use crate::handoff::{HandoffConnection, HandoffQueue};
use crate::limits::{Limits, memory, stock_of};
use crate::peer_timeouts::HoldsMemoryError;
use crate::ring_path::RingPath;
use crate::socket::Socket;
use crate::tls::TlsConfig;
use bcached_port::{BudgetPool, Buffer, BufferPool, ExportTable, LogLimit};
use bcached_uring::VolumeRings;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{SocketFlags, acceptfrom_with};
use rustix::process::{Resource, getrlimit};
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use thiserror::Error;

/// The options of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// The endpoints to listen at; at least one.
    pub endpoints: Vec<Endpoint>,
    /// Whether new connections wait until [`NbdServer::open`].
    pub closed: bool,
    /// The limits on what clients use.
    pub limits: Limits,
    /// If set, every client on TCP must begin TLS before anything else.
    pub tls: Option<TlsConfig>,
    /// The rings of the engines that serve volumes, for the fast path of connections.
    pub rings: VolumeRings,
}

/// Why a server did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// Listening at a place failed.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The limits leave no room to work.
    #[error("the NBD limits are too low: {0}")]
    Limits(&'static str),
    /// The system refused a thread or descriptor.
    #[error("could not start the NBD server")]
    System(#[from] io::Error),
}

/// Connections that did not end in time.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{connections} NBD connections still wait for the engine")]
pub struct ShutdownTimeout {
    /// Their number.
    pub connections: usize,
}

/// A connection, for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientInfo {
    /// Number of the connection, counted from the start of the server.
    pub number: u64,
    /// Process or address.
    pub peer: String,
    /// The volume's name, once chosen.
    pub export: Option<String>,
    /// Whether it has written.
    pub writing: bool,
    /// Whether it is read-only, either because of its endpoint or because of the offer it got for
    /// its volume.
    pub read_only: bool,
    /// Whether its traffic is encrypted, or will be before anything is disclosed.
    pub tls: bool,
}

/// A running server. Dropping it stops it without waiting for clients; see [`NbdServer::shutdown`].
pub struct NbdServer {
    shared: Arc<ServerShared>,
    bound: Vec<BoundAddress>,
    /// The endpoints in the same order, and whether TCP is in TLS there.
    endpoints: (Vec<Endpoint>, bool),
    accepting: Option<JoinHandle<Vec<EndpointListener>>>,
}

/// The state that all threads of a server share.
pub(crate) struct ServerShared {
    pub(crate) exports: ExportTable,
    pub(crate) limits: Limits,
    pub(crate) memory: Arc<BudgetPool>,
    /// TLS for future connections.
    tls: Mutex<Option<TlsConfig>>,
    pub(crate) rings: VolumeRings,
    /// Buffers of completed requests, kept for reuse.
    stock: Mutex<BufferPool>,
    connections: Mutex<Connections>,
    /// Connections handed over by another server whose volumes are not served yet. Locked before
    /// `connections`.
    pub(crate) kept: Mutex<Vec<HandoffConnection>>,
    /// Signalled when a connection has ended.
    ended: Condvar,
    /// Recreated sockets that are to replace those whose files were removed.
    again: Mutex<Vec<EndpointListener>>,
    /// Wakes the accepting thread.
    wake: OwnedFd,
    stopping: AtomicBool,
    /// Connections are not accepted yet.
    closed: AtomicBool,
}

#[derive(Default)]
pub(crate) struct Connections {
    pub(crate) next: u64,
    pub(crate) live: BTreeMap<u64, LiveConnection>,
    /// Set once connections are being handed over to another server.
    pub(crate) leavers: Option<HandoffQueue>,
    /// Connections closed because the limit is reached.
    crowded_out: LogLimit,
    /// Connections cut because they made no progress.
    stuck: LogLimit,
    /// Connections that did not begin TLS.
    not_encrypted: LogLimit,
}

/// How the requests of a connection are served.
pub(crate) enum ServingMode {
    /// Not yet: the connection is still in the handshake.
    Handshake,
    /// On the engine's ring.
    OnRing(Arc<RingPath>),
    /// By its threads alone.
    ByThreads,
}

pub(crate) struct LiveConnection {
    pub(crate) client: ClientInfo,
    pub(crate) socket: Arc<Socket>,
    pub(crate) served: ServingMode,
    pub(crate) thread: JoinHandle<()>,
    /// The thread is about to return: joining it does not wait.
    pub(crate) done: bool,
    /// It lost its place to another connection and will end soon.
    pub(crate) cut: bool,
}

/// The most connections beyond the limit, which have lost their places but have not ended yet. At
/// this number no connection is accepted until one has ended. They only wait for their sockets,
/// which are shut down.
const LEAVING_MAX: usize = 32;
/// Payloads up to this size are copied on the ring, in bytes; larger ones are left to the
/// connection's own threads.
pub(crate) const SMALL_BYTES_MAX: usize = 64 << 10;
/// Stack size of connection threads; the largest item on a stack is a batch of replies.
const STACK_BYTES: usize = 256 << 10;
/// File descriptors reserved for commands and for a process that is to take over; new connections
/// never use them.
const SPARE: u64 = 8;
/// How long accepting pauses when descriptors run out, instead of spinning.
const ACCEPT_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// How long connections take at most to end after their sockets are cut at the limit of a shutdown.
const CUT_GRACE: Duration = Duration::from_secs(1);

impl NbdServer {
    /// Listens, and serves the volumes of the table, including those added later.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left behind then.
    pub fn start(options: Options, exports: ExportTable) -> Result<Self, StartError> {
        let memory = Arc::new(memory(options.limits.total_bytes));
        Self::start_sharing(options, exports, memory)
    }

    /// Like [`NbdServer::start`], with [`memory`] for payloads that other front ends may share. Its
    /// size has to be `total_bytes` of the limits.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left behind then.
    pub fn start_sharing(
        options: Options,
        exports: ExportTable,
        memory: Arc<BudgetPool>,
    ) -> Result<Self, StartError> {
        options.limits.check()?;
        let encrypted = options.tls.is_some();
        let listening = options
            .endpoints
            .iter()
            .map(|endpoint| endpoint.listen(encrypted))
            .collect::<Result<Vec<_>, _>>()?;
        let bound = listening.iter().map(|listening| listening.bound.clone()).collect();
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?;
        let shared = Arc::new(ServerShared {
            exports,
            memory,
            rings: options.rings,
            stock: Mutex::new(BufferPool::new(stock_of(options.limits.total_bytes))),
            limits: options.limits,
            tls: Mutex::new(options.tls),
            connections: Mutex::default(),
            kept: Mutex::default(),
            ended: Condvar::new(),
            again: Mutex::default(),
            wake,
            stopping: AtomicBool::new(false),
            closed: AtomicBool::new(options.closed),
        });
        let accepting = Arc::clone(&shared);
        let accepting = shared.spawn("nbd-accept".to_owned(), move || {
            let mut listening = listening;
            accepting.accept(&mut listening);
            let _whoever_waits_there_comes_again = accepting.replace_gone(&mut listening);
            listening
        })?;
        let endpoints = (options.endpoints, encrypted);
        Ok(Self { shared, bound, endpoints, accepting: Some(accepting) })
    }

    /// Where the server listens, in the order of the options.
    #[must_use]
    pub fn bound(&self) -> &[BoundAddress] {
        &self.bound
    }

    pub(crate) const fn shared(&self) -> &Arc<ServerShared> {
        &self.shared
    }

    /// The connected clients.
    #[must_use]
    pub fn clients(&self) -> Vec<ClientInfo> {
        self.shared
            .lock()
            .live
            .values()
            .filter(|live| !live.done && !live.cut)
            .map(|live| live.client.clone())
            .collect()
    }

    /// Accepts connections from now on, including those that are already waiting.
    pub fn open(&self) {
        self.shared.closed.store(false, Ordering::SeqCst);
        self.shared.wake();
    }

    /// Uses another certificate, and other authorities, for future connections. Existing
    /// connections stay. A server that started without TLS continues without.
    pub fn renew(&self, tls: TlsConfig) {
        let mut current = self.shared.tls.lock().unwrap_or_else(PoisonError::into_inner);
        if current.is_some() {
            *current = Some(tls);
        }
    }

    /// Stops the server: it accepts no more connections and removes its socket files. Connected
    /// clients get the replies to pending requests, up to `limit`, and are then cut off. May take a
    /// second longer. Flushes nothing that no client asked to flush.
    ///
    /// # Errors
    /// [`ShutdownTimeout`] if the engine owes replies even then. The threads concerned end when the
    /// replies arrive or the engine goes away.
    pub fn shutdown(mut self, limit: Duration) -> Result<(), ShutdownTimeout> {
        drop(self.stop_accepting());
        self.shared.for_each_socket(Socket::end_receiving);
        self.shared.end_all(Instant::now() + limit);
        self.shared.reap();
        match self.shared.lock().live.len() {
            0 => Ok(()),
            connections => Err(ShutdownTimeout { connections }),
        }
    }

    /// Stops accepting, and returns the listening sockets. Dropping them closes them.
    pub(crate) fn stop_accepting(&mut self) -> Vec<EndpointListener> {
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.shared.wake();
        let Some(thread) = self.accepting.take() else { return Vec::new() };
        thread.join().unwrap_or_else(|_| {
            tracing::error!(event = "nbd-accepting-ended", "the accepting NBD thread panicked");
            Vec::new()
        })
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        drop(self.stop_accepting());
        self.shared.for_each_socket(Socket::end);
    }
}

impl Connections {
    /// Makes room for one more connection. Returns false if all connections have chosen their
    /// export.
    pub(crate) fn make_room(&mut self, limit: usize) -> bool {
        if self.live.values().filter(|live| !live.done && !live.cut).count() < limit {
            return true;
        }
        let idle =
            self.live.values_mut().find(|live| !live.done && !live.cut && live.client.export.is_none());
        let found = idle.map(|live| {
            live.cut = true;
            live.socket.end();
        });
        if let Some(count) = self.crowded_out.count() {
            let losers = if found.is_some() { "those without an export" } else { "the newest ones" };
            tracing::warn!(
                event = "nbd-crowded",
                limit,
                count,
                "too many NBD connections: {losers} were closed"
            );
        }
        found.is_some()
    }
}

impl ServerShared {
    /// Whether connections are to end at their next request.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        name: String,
        body: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<JoinHandle<T>> {
        thread::Builder::new().name(name).stack_size(STACK_BYTES).spawn(body)
    }

    /// Returns a buffer for a request, with arbitrary content: [`BufferPool::take`].
    pub(crate) fn buffer(&self, bytes: usize) -> Buffer {
        self.stock().take(bytes)
    }

    /// The buffers kept for reuse.
    pub(crate) fn stock(&self) -> MutexGuard<'_, BufferPool> {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a connection has chosen its export, and whether it is read-only.
    pub(crate) fn entered(&self, number: u64, export: &str, read_only: bool) {
        self.update(number, |client| {
            client.export = Some(export.to_owned());
            client.read_only = read_only;
        });
    }

    /// Records that a connection has got the write claim.
    pub(crate) fn writes(&self, number: u64) {
        self.update(number, |client| client.writing = true);
    }

    /// Reports that a connection can no longer be used. If its peer made no progress, that is
    /// logged as a warning: it may have left other connections without memory, and its own program
    /// now sees an error.
    pub(crate) fn lost(&self, number: u64, peer_does: &str, error: &io::Error) {
        let is_in_the_way = HoldsMemoryError::is(error);
        if !is_in_the_way && error.kind() != io::ErrorKind::TimedOut {
            tracing::debug!(event = "nbd-broke-off", connection = number, %error, "an NBD connection is lost");
            return;
        }
        let mut connections = self.lock();
        let client = connections.live.get(&number).map(|live| live.client.clone());
        let Some((count, client)) = connections.stuck.count().zip(client) else { return };
        drop(connections);
        let (peer, volume) = (client.peer, client.export.unwrap_or_default());
        let why = if is_in_the_way {
            "other connections wait for the memory that it holds"
        } else {
            "its time limit is over"
        };
        tracing::warn!(
            event = "nbd-client-stuck",
            connection = number,
            count,
            "an NBD client of {volume} ({peer}) {peer_does}, and was disconnected: {why}"
        );
    }

    /// Reports that a connection broke off. A failure to begin TLS is a warning, because the fix is
    /// up to people: a certificate, or a client.
    pub(crate) fn broke_off(&self, number: u64, broken: &ConnectionError) {
        tracing::debug!(event = "nbd-broke-off", connection = number, error = %broken, "an NBD connection broke off");
        if let ConnectionError::Tls(why) = broken {
            self.is_not_encrypted(number, why);
        }
    }

    /// Warns that a connection did not begin TLS.
    pub(crate) fn is_not_encrypted(&self, number: u64, why: &dyn std::fmt::Display) {
        let mut connections = self.lock();
        let peer = connections.live.get(&number).map(|live| live.client.peer.clone());
        let Some((count, peer)) = connections.not_encrypted.count().zip(peer) else { return };
        drop(connections);
        tracing::warn!(
            event = "nbd-tls-failed",
            connection = number,
            count,
            "TLS with {peer} was not established: {why}"
        );
    }

    fn update(&self, number: u64, change: impl FnOnce(&mut ClientInfo)) {
        if let Some(live) = self.lock().live.get_mut(&number) {
            change(&mut live.client);
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // The write fails only if the counter is at its maximum, and then the thread is awake
        // anyway.
        let _: Result<usize, Errno> = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// The body of the accepting thread.
    fn accept(self: &Arc<Self>, listening: &mut [EndpointListener]) {
        let mut pause = false;
        while !self.is_stopping() {
            self.reap();
            let full = self.lock().live.len() >= self.limits.connections + LEAVING_MAX;
            let waits = pause || full || self.closed.load(Ordering::SeqCst);
            if !waits {
                pause = self.replace_gone(listening).is_err();
            }
            let sockets = if waits || pause { &[] } else { &*listening };
            let mut fds = vec![PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN)];
            fds.extend(sockets.iter().map(|socket| PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)));
            match poll(&mut fds, pause.then_some(&ACCEPT_PAUSE)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(
                        event = "nbd-accepting-ended",
                        %error,
                        "cannot poll for NBD connections; no new ones are accepted"
                    );
                    return;
                }
            }
            if fds[0].revents().contains(PollFlags::IN) {
                let mut count = [0; 8];
                // Non-blocking; it does not matter if there is nothing to read.
                let _: Result<usize, Errno> = rustix::io::read(&self.wake, &mut count);
            }
            pause = false;
            for (socket, fd) in sockets.iter().zip(&fds[1..]) {
                if !fd.revents().is_empty() {
                    pause |= self.accept_one(socket).is_err();
                }
            }
        }
    }

    /// Checks that more descriptors are free than are reserved. The next descriptor is the lowest
    /// free one.
    fn spare_descriptors(&self) -> Result<(), Errno> {
        let next = fcntl_dupfd_cloexec(&self.wake, 0).map(|next| u64::from(next.as_raw_fd().unsigned_abs()));
        let most = getrlimit(Resource::Nofile).current;
        match next {
            Ok(next) if most.is_none_or(|most| next.saturating_add(SPARE) < most) => Ok(()),
            _ => Err(Errno::MFILE),
        }
    }

    /// Accepts a connection, if there still is one. Returns false if none is waiting. An error
    /// means that none can be accepted for a while.
    fn accept_one(self: &Arc<Self>, listening: &EndpointListener) -> Result<bool, ()> {
        let (fd, address) = match self
            .spare_descriptors()
            .and_then(|()| acceptfrom_with(listening, SocketFlags::CLOEXEC))
        {
            Ok(accepted) => accepted,
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::INTR | Errno::CONNABORTED) => return Ok(true),
            Err(error) => {
                tracing::warn!(event = "nbd-not-accepted", %error, at = %listening.bound, "could not accept an NBD connection");
                return Err(());
            }
        };
        let socket = Arc::new(Socket::new(fd));
        let is_tcp = matches!(listening.bound, BoundAddress::Tcp(_));
        if is_tcp && let Err(error) = socket.prepare_tcp() {
            tracing::debug!(event = "nbd-broke-off", %error, "an NBD connection was closed before it began");
            return Ok(true);
        }
        let address = address.and_then(|address| SocketAddr::try_from(address).ok());
        let process = if is_tcp { None } else { socket.peer_process() };
        let tls = if is_tcp { self.tls.lock().unwrap_or_else(PoisonError::into_inner).clone() } else { None };
        let newcomer = NewConnection {
            socket,
            process,
            address,
            read_only: listening.read_only,
            tls,
            export: None,
            left: None,
        };
        self.begin(newcomer).map(|_| true).map_err(|error| {
            tracing::warn!(event = "nbd-not-accepted", %error, "could not start a thread for an NBD connection");
        })
    }

    /// Joins the threads of connections that have ended.
    fn reap(&self) {
        let done: Vec<LiveConnection> =
            self.lock().live.extract_if(.., |_, live| live.done).map(|(_, live)| live).collect();
        for live in done {
            if live.thread.join().is_err() {
                tracing::error!(
                    event = "nbd-connection-failed",
                    connection = live.client.number,
                    "the thread of an NBD connection panicked"
                );
            }
        }
    }

    /// Applies `act` to the sockets of connections that have not ended.
    fn for_each_socket(&self, act: impl Fn(&Socket)) {
        self.lock().live.values().filter(|live| !live.done).for_each(|live| act(&live.socket));
    }

    /// Waits until the deadline for connections to end, and cuts off the remaining ones. Returns
    /// those of them that have chosen a volume.
    pub(crate) fn end_all(&self, deadline: Instant) -> Vec<ClientInfo> {
        if self.wait_all_ended(deadline) {
            return Vec::new();
        }
        let is_here = |live: &&LiveConnection| !live.done && live.client.export.is_some();
        let cut = self.lock().live.values().filter(is_here).map(|live| live.client.clone()).collect();
        self.for_each_socket(Socket::end);
        self.wait_all_ended(Instant::now() + CUT_GRACE);
        cut
    }

    /// Whether all connections end before the deadline.
    pub(crate) fn wait_all_ended(&self, deadline: Instant) -> bool {
        let mut connections = self.lock();
        loop {
            if connections.live.values().all(|live| live.done) {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            connections =
                self.ended.wait_timeout(connections, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Marks a connection as ended when its thread is about to return.
pub(crate) struct ConnectionEndGuard<'a> {
    pub(crate) shared: &'a ServerShared,
    pub(crate) number: u64,
    pub(crate) socket: &'a Socket,
    /// Another server shares the socket and resumes the connection.
    pub(crate) is_left: bool,
}

impl Drop for ConnectionEndGuard<'_> {
    fn drop(&mut self) {
        if !self.is_left {
            self.socket.end();
        }
        if let Some(live) = self.shared.lock().live.get_mut(&self.number) {
            live.done = true;
        }
        self.shared.ended.notify_all();
        self.shared.wake();
    }
}
