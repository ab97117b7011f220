//! The server: a socket and a thread for each volume that it is told to serve.

use crate::config::{GuestBlock, REQUEST_BYTES_MAX};
use crate::volume::{Control, run};
use bcached_port::ExportTable;
use bcached_port::socket::{Listening, SocketError};
use bcached_uring::Rings;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use thiserror::Error;

/// How a server is to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the sockets are; it must exist.
    pub directory: PathBuf,
    /// Group that may connect; the process' own if `None`.
    pub group: Option<u32>,
    /// What a VMM may use.
    pub limits: Limits,
    /// Where volumes are served, as far as disks can be there.
    pub rings: Rings,
}

/// What the VMM of a volume may use at most.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Requests that are not answered yet.
    pub requests: usize,
    /// Bytes of payload in memory, at least 32 MiB: the largest request.
    pub volume_bytes: u64,
    /// A VMM that stops a queue (its guest is stopped or reset) waits so long for requests under way; if the engine
    /// has not answered them then, it goes on without the answers.
    pub drain: Duration,
}

/// How a volume is offered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeOptions {
    /// Queues, at most: QEMU refuses a disk with fewer than it wants, which by default is one for each processor of the
    /// guest. They share one thread, and those that a guest does not use cost nothing.
    pub queues: u16,
    /// The block that guests must keep to.
    pub block: GuestBlock,
}

/// Why a server did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// The directory is not there.
    #[error("the directory {} for vhost-user sockets does not exist; make it first", .0.display())]
    NoDirectory(PathBuf),
    /// Something else is there.
    #[error("{} is to hold vhost-user sockets and is not a directory", .0.display())]
    NotDirectory(PathBuf),
    /// The limits leave no room to work.
    #[error("the vhost-user limits allow no work: {0}")]
    Limits(&'static str),
}

/// Why a volume is not served.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// It is already.
    #[error("the volume {0:?} is served by vhost-user already")]
    AlreadyServed(String),
    /// The table has no such volume, or it cannot be used now.
    #[error("the volume {0:?} is not served at present")]
    NotServed(String),
    /// The name is none for a file.
    #[error("a volume called {0:?} cannot have a vhost-user socket, whose file is named after it")]
    Name(String),
    /// No disk has so many queues.
    #[error("a vhost-user disk has between 1 and {QUEUES_MAX} queues, and {0} are asked for")]
    Queues(u16),
    /// The socket cannot be made.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The system refused a thread or descriptor.
    #[error("could not serve a volume by vhost-user")]
    System(#[from] io::Error),
}

/// Volumes whose requests the engine has not answered in time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StillBusy {
    /// Which, and how many requests each.
    pub volumes: Vec<(String, usize)>,
}

/// A VMM that is connected, for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Client {
    /// The volume's name.
    pub volume: String,
    /// Whether it has written.
    pub is_writing: bool,
    /// Requests that the engine has not answered, also those of VMMs that are gone.
    pub requests: usize,
}

/// A running server. Dropped, it stops without waiting for anybody; see [`VhostServer::shutdown`].
pub struct VhostServer {
    options: Options,
    exports: ExportTable,
    volumes: Mutex<BTreeMap<String, Served>>,
}

struct Served {
    control: Arc<Control>,
    thread: JoinHandle<()>,
}

/// Queues of a disk, at most.
pub const QUEUES_MAX: u16 = 64;
/// Stacks of volumes' threads: nothing large is on them.
const STACK_BYTES: usize = 256 << 10;
/// After the limit of a stop connections are cut; what ends by that needs no longer than this.
const CUT_GRACE: Duration = Duration::from_secs(1);

impl Default for Limits {
    fn default() -> Self {
        Self { requests: 256, volume_bytes: REQUEST_BYTES_MAX, drain: Duration::from_secs(30) }
    }
}

impl Default for VolumeOptions {
    fn default() -> Self {
        Self { queues: 8, block: GuestBlock::default() }
    }
}

impl VhostServer {
    /// Gets ready to serve volumes of the table; see [`VhostServer::serve`].
    ///
    /// # Errors
    /// [`StartError`]; nothing is left behind then.
    pub fn start(options: Options, exports: ExportTable) -> Result<Self, StartError> {
        if options.limits.requests == 0 {
            return Err(StartError::Limits("at least one request at a time"));
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

    /// Serves the volume called `name` on a socket in the server's directory, until it is stopped: one VMM at a time, one
    /// after the other. The volume may leave the table and come back meanwhile; a VMM that comes while it is not there is
    /// turned away.
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
        let listening = Listening::on(&self.socket_path(name), self.options.group)?;
        let shared = (self.exports.clone(), self.options.rings.clone());
        let limits = self.options.limits.clone();
        let control = Arc::new(Control::new(name.to_owned(), shared, limits, options)?);
        let shared = Arc::clone(&control);
        let builder = thread::Builder::new().name(format!("vhost-{name}")).stack_size(STACK_BYTES);
        let thread = builder.spawn(move || run(&shared, listening))?;
        volumes.insert(name.to_owned(), Served { control, thread });
        Ok(())
    }

    /// Listens anew on the socket at `path`, whose file somebody has removed. The VMM that is connected goes on. `None` if
    /// no volume is served there.
    #[must_use]
    pub fn bind_again(&self, path: &Path) -> Option<Result<(), SocketError>> {
        let volumes = self.lock();
        let (_, served) = volumes.iter().find(|(name, _)| self.socket_path(name) == path)?;
        let bound = Listening::on(path, self.options.group);
        Some(bound.map(|bound| served.control.listen_on(bound)))
    }

    /// Where the socket of a volume is.
    #[must_use]
    pub fn socket_path(&self, name: &str) -> PathBuf {
        self.options.directory.join(format!("{name}.sock"))
    }

    /// All sockets, each with a number that no other has had: of a volume that was served before, and is served again, it is another.
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

    /// Whether the volume of that name is served.
    #[must_use]
    pub fn serves(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// The volumes that are served, by name.
    #[must_use]
    pub fn served(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// The VMMs that are connected.
    #[must_use]
    pub fn clients(&self) -> Vec<Client> {
        let client = |(name, served): (&String, &Served)| {
            let connected = served.control.client()?;
            let requests = served.control.tally.count();
            Some(Client { volume: name.clone(), is_writing: connected.is_writing, requests })
        };
        self.lock().iter().filter_map(client).collect()
    }

    /// What the table says of a volume has changed, such as its size: its VMM is told, and asks for it.
    pub fn changed(&self, name: &str) {
        if let Some(served) = self.lock().get(name) {
            served.control.change();
        }
    }

    /// Stops serving a volume: its socket goes, its VMM gets the answers to what it has asked, up to `limit`, then it is cut
    /// off. May take a second longer. What it could not ask any more stays in the guest's memory, for whoever it connects
    /// to next. Nothing happens if the volume is not served.
    ///
    /// # Errors
    /// [`StillBusy`] if the engine owes replies even then. They are dropped when they come.
    pub fn stop(&self, name: &str, limit: Duration) -> Result<(), StillBusy> {
        let served = self.lock().remove(name);
        stop_all(served.into_iter().collect(), limit)
    }

    /// Stops all volumes at once, as [`VhostServer::stop`].
    ///
    /// # Errors
    /// [`StillBusy`].
    pub fn shutdown(self, limit: Duration) -> Result<(), StillBusy> {
        let volumes = std::mem::take(&mut *self.lock());
        stop_all(volumes.into_values().collect(), limit)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Served>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn stop_all(volumes: Vec<Served>, limit: Duration) -> Result<(), StillBusy> {
    let deadline = Instant::now() + limit;
    volumes.iter().for_each(|served| served.control.stop(deadline));
    let mut busy = Vec::new();
    for Served { control, thread } in volumes {
        if !control.wait_ended(deadline) {
            control.cut();
        }
        let has_ended = control.wait_ended(deadline + CUT_GRACE);
        if has_ended && thread.join().is_err() {
            let volume = &control.name;
            tracing::error!(event = "vhost-failed", volume, "the thread of a volume panicked");
        }
        // Also those of VMMs that have gone before.
        let requests = control.tally.wait_none(deadline);
        if !has_ended || requests > 0 {
            busy.push((control.name.clone(), requests));
        }
    }
    if busy.is_empty() { Ok(()) } else { Err(StillBusy { volumes: busy }) }
}

impl Drop for VhostServer {
    fn drop(&mut self) {
        for served in self.lock().values() {
            served.control.stop(Instant::now());
            served.control.cut();
        }
    }
}

impl fmt::Display for StillBusy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let one = |(name, requests): &(String, usize)| format!("{name:?} ({requests} requests)");
        let all: Vec<String> = self.volumes.iter().map(one).collect();
        write!(f, "volumes served by vhost-user still wait for the engine: {}", all.join(", "))
    }
}

impl std::error::Error for StillBusy {}
