//! The server: a socket and a thread for each volume that it is told to serve.

use crate::config::{GuestBlockSize, REQUEST_BYTES_MAX};
use crate::volume::{VolumeControl, run};
use bcached_port::ExportTable;
use bcached_port::socket::{SocketError, SocketListener};
use bcached_uring::VolumeRings;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use thiserror::Error;

/// The options of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// The directory of the sockets; it must exist.
    pub directory: PathBuf,
    /// The group that may connect; the process's own if `None`.
    pub group: Option<u32>,
    /// The limits on what a VMM uses.
    pub limits: Limits,
    /// The rings of the engines that serve volumes, for the fast path of disks.
    pub rings: VolumeRings,
}

/// The most that the VMM of a volume may use.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Unanswered requests.
    pub requests: usize,
    /// Bytes of payload in memory, at least 32 MiB: the largest request.
    pub volume_bytes: u64,
    /// How long a VMM that stops a queue (its guest is stopped or reset) waits for requests in
    /// flight. If the engine has not answered them by then, the queue stops without the answers.
    pub drain: Duration,
}

/// How a volume is presented.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeOptions {
    /// The maximum number of queues. QEMU refuses a disk with fewer queues than it is configured
    /// for, which by default is one for each processor of the guest. The queues share one thread,
    /// and unused ones cost nothing.
    pub queues: u16,
    /// The logical block size for guests.
    pub block: GuestBlockSize,
}

/// Why a server did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// The directory does not exist.
    #[error("the directory {} for vhost-user sockets does not exist; create it first", .0.display())]
    NoDirectory(PathBuf),
    /// The path is not a directory.
    #[error("{} is not a directory, so it cannot hold vhost-user sockets", .0.display())]
    NotDirectory(PathBuf),
    /// The limits leave no room to work.
    #[error("the vhost-user limits are too low: {0}")]
    Limits(&'static str),
}

/// Why a volume is not served.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// It is being served already.
    #[error("the volume {0:?} is already served by vhost-user")]
    AlreadyServed(String),
    /// The table has no such volume, or it cannot be used now.
    #[error("the volume {0:?} is not served at present")]
    NotServed(String),
    /// The name is not valid as a file name.
    #[error("the name of the volume {0:?} cannot be the file name of its vhost-user socket")]
    Name(String),
    /// The number of queues is out of range.
    #[error("a vhost-user disk can have 1 to {QUEUES_MAX} queues, not {0}")]
    Queues(u16),
    /// The socket cannot be created.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The system refused a thread or descriptor.
    #[error("could not serve a volume by vhost-user")]
    System(#[from] io::Error),
}

/// Volumes with requests that the engine has not answered in time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShutdownTimeout {
    /// The names of the volumes, each with its number of requests.
    pub volumes: Vec<(String, usize)>,
}

/// A connected VMM, for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientInfo {
    /// The volume's name.
    pub volume: String,
    /// Whether it has written.
    pub is_writing: bool,
    /// Requests that the engine has not answered, including those of former VMMs.
    pub requests: usize,
}

/// A running server. Dropping it stops it without waiting for clients; see
/// [`VhostServer::shutdown`].
pub struct VhostServer {
    options: Options,
    exports: ExportTable,
    volumes: Mutex<BTreeMap<String, ServedVolume>>,
}

struct ServedVolume {
    control: Arc<VolumeControl>,
    thread: JoinHandle<()>,
}

/// The most queues of a disk.
pub const QUEUES_MAX: u16 = 64;
/// Stack size of volume threads; nothing large is on their stacks.
const STACK_BYTES: usize = 256 << 10;
/// How long connections take at most to end after they are cut at the limit of a stop.
const CUT_GRACE: Duration = Duration::from_secs(1);

impl Default for Limits {
    fn default() -> Self {
        Self { requests: 256, volume_bytes: REQUEST_BYTES_MAX, drain: Duration::from_secs(30) }
    }
}

impl Default for VolumeOptions {
    fn default() -> Self {
        Self { queues: 8, block: GuestBlockSize::default() }
    }
}

impl VhostServer {
    /// Prepares to serve volumes of the table; see [`VhostServer::serve`].
    ///
    /// # Errors
    /// [`StartError`]; nothing is left behind then.
    pub fn start(options: Options, exports: ExportTable) -> Result<Self, StartError> {
        if options.limits.requests == 0 {
            return Err(StartError::Limits("at least one request at a time is needed"));
        }
        if options.limits.volume_bytes < REQUEST_BYTES_MAX {
            return Err(StartError::Limits("the largest request, 32 MiB, must fit in memory"));
        }
        match options.directory.metadata() {
            Ok(found) if found.is_dir() => {}
            Ok(_) => return Err(StartError::NotDirectory(options.directory)),
            Err(_) => return Err(StartError::NoDirectory(options.directory)),
        }
        Ok(Self { options, exports, volumes: Mutex::default() })
    }

    /// Serves the volume called `name` on a socket in the server's directory, until it is stopped:
    /// one VMM at a time, one after another. The volume may leave the table and return in the
    /// meantime. A VMM that connects while it is absent is refused.
    ///
    /// # Errors
    /// [`ServeError`]; no socket is left behind then.
    pub fn serve(&self, name: &str, options: VolumeOptions) -> Result<(), ServeError> {
        if options.queues == 0 || options.queues > QUEUES_MAX {
            return Err(ServeError::Queues(options.queues));
        }
        if name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) {
            return Err(ServeError::Name(name.to_owned()));
        }
        if self.exports.route(name).is_none() {
            return Err(ServeError::NotServed(name.to_owned()));
        }
        let mut volumes = self.lock();
        if volumes.contains_key(name) {
            return Err(ServeError::AlreadyServed(name.to_owned()));
        }
        let listening = SocketListener::on(&self.socket_path(name), self.options.group)?;
        let shared = (self.exports.clone(), self.options.rings.clone());
        let limits = self.options.limits.clone();
        let control = Arc::new(VolumeControl::new(name.to_owned(), shared, limits, options)?);
        let shared = Arc::clone(&control);
        let builder = thread::Builder::new().name(format!("vhost-{name}")).stack_size(STACK_BYTES);
        let thread = builder.spawn(move || run(&shared, listening))?;
        volumes.insert(name.to_owned(), ServedVolume { control, thread });
        Ok(())
    }

    /// Listens again at the socket's `path`, whose file was removed. A connected VMM stays
    /// connected. Returns `None` if no volume is served there.
    #[must_use]
    pub fn bind_again(&self, path: &Path) -> Option<Result<(), SocketError>> {
        let volumes = self.lock();
        let (_, served) = volumes.iter().find(|(name, _)| self.socket_path(name) == path)?;
        let bound = SocketListener::on(path, self.options.group);
        Some(bound.map(|bound| served.control.listen_on(bound)))
    }

    /// The path of a volume's socket.
    #[must_use]
    pub fn socket_path(&self, name: &str) -> PathBuf {
        self.options.directory.join(format!("{name}.sock"))
    }

    /// All sockets, each with a unique number: a volume that is stopped and served again has a
    /// socket with a new number.
    #[must_use]
    pub fn sockets(&self) -> Vec<(PathBuf, u64)> {
        let volumes = self.lock();
        volumes.iter().map(|(name, served)| (self.socket_path(name), served.control.number)).collect()
    }

    /// The directory of all sockets.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.options.directory
    }

    /// Whether the volume of that name is being served.
    #[must_use]
    pub fn serves(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// The names of the volumes that are being served.
    #[must_use]
    pub fn served(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// The connected VMMs.
    #[must_use]
    pub fn clients(&self) -> Vec<ClientInfo> {
        let client = |(name, served): (&String, &ServedVolume)| {
            let connected = served.control.client()?;
            let requests = served.control.pending_count.count();
            Some(ClientInfo { volume: name.clone(), is_writing: connected.is_writing, requests })
        };
        self.lock().iter().filter_map(client).collect()
    }

    /// Announces that a volume's table entry, such as its size, has changed: its VMM is told, and
    /// asks for it.
    pub fn changed(&self, name: &str) {
        if let Some(served) = self.lock().get(name) {
            served.control.change();
        }
    }

    /// Stops serving a volume and removes its socket. Its VMM gets the answers to pending requests,
    /// up to `limit`, and is then cut off. May take a second longer. Requests not taken yet stay in
    /// the guest's memory, for the server that it connects to next. Does nothing if the volume is
    /// not served.
    ///
    /// # Errors
    /// [`ShutdownTimeout`] if the engine owes replies even then. They are dropped when they arrive.
    pub fn stop(&self, name: &str, limit: Duration) -> Result<(), ShutdownTimeout> {
        let served = self.lock().remove(name);
        stop_all(served.into_iter().collect(), limit)
    }

    /// Stops all volumes at the same time, like [`VhostServer::stop`].
    ///
    /// # Errors
    /// [`ShutdownTimeout`].
    pub fn shutdown(self, limit: Duration) -> Result<(), ShutdownTimeout> {
        let volumes = std::mem::take(&mut *self.lock());
        stop_all(volumes.into_values().collect(), limit)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, ServedVolume>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn stop_all(volumes: Vec<ServedVolume>, limit: Duration) -> Result<(), ShutdownTimeout> {
    let deadline = Instant::now() + limit;
    volumes.iter().for_each(|served| served.control.stop(deadline));
    let mut busy = Vec::new();
    for ServedVolume { control, thread } in volumes {
        if !control.wait_ended(deadline) {
            control.cut();
        }
        let has_ended = control.wait_ended(deadline + CUT_GRACE);
        if has_ended && thread.join().is_err() {
            let volume = &control.name;
            tracing::error!(event = "vhost-failed", volume, "the vhost-user thread of a volume panicked");
        }
        // Includes those of former VMMs.
        let requests = control.pending_count.wait_none(deadline);
        if !has_ended || requests > 0 {
            busy.push((control.name.clone(), requests));
        }
    }
    if busy.is_empty() { Ok(()) } else { Err(ShutdownTimeout { volumes: busy }) }
}

impl Drop for VhostServer {
    fn drop(&mut self) {
        for served in self.lock().values() {
            served.control.stop(Instant::now());
            served.control.cut();
        }
    }
}

impl fmt::Display for ShutdownTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let one = |(name, requests): &(String, usize)| format!("{name:?} ({requests} requests)");
        let all: Vec<String> = self.volumes.iter().map(one).collect();
        write!(f, "volumes served by vhost-user still wait for the engine: {}", all.join(", "))
    }
}

impl std::error::Error for ShutdownTimeout {}
