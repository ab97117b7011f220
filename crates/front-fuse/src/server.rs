//! The server: mounts, serves until it is told to stop, and leaves no mount behind.

use crate::filesystem::Files;
use crate::mount::{Mount, MountError};
use crate::nodes::{NamedTree, Nodes, Owner, VOLUMES, is_name};
use crate::open_files::OpenFiles;
use crate::open_limit::Places;
use crate::shutdown::Life;
use crate::tree::Tree;
use crate::workers::Workers;
use bcached_port::{ExportTable, Pool, Stock};
use fuser::{Config, Session, SessionACL};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime};
use thiserror::Error;

/// How a server is to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where to mount: an empty directory.
    pub directory: PathBuf,
    /// Whether other users than our own may look into it; the files' permissions stay. An ordinary user may do that only
    /// if `/etc/fuse.conf` says so.
    pub allow_other: bool,
    /// What programs may use.
    pub limits: Limits,
}

/// What programs may use at most.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Requests of one open file that are with its engine; as many that no program waits for (of `io_uring`, of loop
    /// devices) the kernel sends at a time for the whole mount.
    pub requests: u16,
    /// Bytes of payload that one open file holds in memory, at least 4 MiB.
    pub file_bytes: u64,
    /// Bytes of payload that all open files hold in memory, at least 4 MiB; an eighth comes on top for small requests.
    pub total_bytes: u64,
    /// Volumes that programs have open at once: each has a thread. One more is refused with ENFILE.
    pub open_volumes: usize,
    /// Threads that take what the kernel sends.
    pub threads: usize,
    /// Threads that call trees.
    pub tree_threads: usize,
}

/// Why a server did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// Nothing could be mounted.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The limits leave no room to work.
    #[error("the FUSE limits allow no work: {0}")]
    Limits(&'static str),
    /// Two things of the mount would have one name, or it is none.
    #[error("no tree of the FUSE mount can be called {0:?}")]
    TreeName(String),
    /// The system refused a thread or descriptor.
    #[error("could not start the FUSE server")]
    System(#[from] io::Error),
}

/// Requests that were not answered in time.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{requests} requests from the FUSE mount still wait for the engine")]
pub struct StillBusy {
    /// How many.
    pub requests: usize,
}

/// A file that a program has open, for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Client {
    /// The process that opened it.
    pub peer: String,
    /// Where it lies in the mount.
    pub path: String,
    /// The volume's name, if it is one.
    pub export: Option<String>,
    /// Whether it has written to the volume.
    pub writing: bool,
}

/// A mount that is served. Dropped, it is unmounted without waiting for anybody; see [`FuseServer::shutdown`].
pub struct FuseServer {
    shared: Arc<Shared>,
    mount: Mount,
    /// Ends with the session.
    session: Receiver<()>,
    is_unmounted: bool,
}

/// What all threads of a server share.
pub(crate) struct Shared {
    pub(crate) nodes: Nodes,
    pub(crate) open: OpenFiles,
    pub(crate) life: Arc<Life>,
    pub(crate) workers: Arc<Workers>,
    pub(crate) places: Arc<Places>,
    pub(crate) memory: Arc<Pool>,
    /// Memory of requests that were answered.
    pub(crate) stock: Arc<Mutex<Stock>>,
    pub(crate) limits: Limits,
}

/// The largest request, and what is read around it.
const BYTES_MIN: u64 = 4 << 20;
/// Memory of requests that is kept for the next ones, of what all of them may hold.
const STOCK_PART: u64 = 8;
/// What ends because the mount is gone needs no longer than this.
const CUT_GRACE: Duration = Duration::from_secs(1);
/// Nobody who passes keeps a mount longer than this.
const PASSING: Duration = Duration::from_millis(100);
/// Each look may be a process of the helper's.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Of those who keep a mount busy the log names so many.
const NAMED_MAX: usize = 10;

impl Default for Limits {
    fn default() -> Self {
        let processors = thread::available_parallelism().map_or(2, usize::from);
        Self {
            // With the largest requests this is what one file may hold: what the kernel sends of itself never makes a
            // session thread wait for memory.
            requests: 64,
            file_bytes: 64 << 20,
            total_bytes: 128 << 20,
            open_volumes: 1024,
            threads: processors.clamp(2, 8),
            tree_threads: 4,
        }
    }
}

impl Limits {
    fn check(&self) -> Result<(), StartError> {
        let least = self.threads.min(self.tree_threads).min(self.open_volumes);
        if self.requests == 0 || least == 0 {
            return Err(StartError::Limits(
                "at least one request, one open file and one thread of each kind",
            ));
        }
        if self.file_bytes < BYTES_MIN || self.total_bytes < BYTES_MIN {
            return Err(StartError::Limits("4 MiB, for the largest request, must fit in memory"));
        }
        Ok(())
    }

    fn stock_bytes(&self) -> usize {
        usize::try_from(self.total_bytes / STOCK_PART).unwrap_or(usize::MAX)
    }
}

impl FuseServer {
    /// Mounts and serves the table's volumes, also those that are added later, and the trees under their names. What a daemon
    /// that is no more has left mounted there is replaced.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left behind then.
    pub fn start(
        options: Options,
        exports: ExportTable,
        trees: Vec<(String, Arc<dyn Tree>)>,
    ) -> Result<Self, StartError> {
        let memory = Arc::new(Pool::new(options.limits.total_bytes));
        Self::start_sharing(options, exports, trees, memory)
    }

    /// The same with memory for payloads that other front ends may have too: of as many bytes as the limits say.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left behind then.
    pub fn start_sharing(
        options: Options,
        exports: ExportTable,
        trees: Vec<(String, Arc<dyn Tree>)>,
        memory: Arc<Pool>,
    ) -> Result<Self, StartError> {
        options.limits.check()?;
        check_names(&trees)?;
        let life = Arc::new(Life::default());
        let workers = Workers::start(&life, if trees.is_empty() { 0 } else { options.limits.tree_threads })?;
        let owner = Owner {
            user: rustix::process::geteuid().as_raw(),
            group: rustix::process::getegid().as_raw(),
            since: SystemTime::now(),
        };
        let shared = Arc::new(Shared {
            nodes: Nodes::new(exports, trees, owner),
            open: OpenFiles::default(),
            life,
            workers,
            places: Places::new("volumes", options.limits.open_volumes),
            memory,
            stock: Arc::new(Mutex::new(Stock::new(options.limits.stock_bytes()))),
            limits: options.limits,
        });
        let started = Mount::make(&options.directory, options.allow_other)
            .map_err(StartError::from)
            .and_then(|(mount, device)| match shared.serve(device) {
                Ok(session) => Ok((mount, session)),
                Err(error) => {
                    mount.cut();
                    Err(error.into())
                }
            });
        match started {
            Ok((mount, session)) => Ok(Self { shared, mount, session, is_unmounted: false }),
            Err(error) => {
                shared.workers.close();
                Err(error)
            }
        }
    }

    /// Where it is mounted.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.mount.directory()
    }

    /// What programs have open.
    #[must_use]
    pub fn clients(&self) -> Vec<Client> {
        self.shared.open.clients(self.mount.directory())
    }

    /// Whether nobody can ask anything any more: somebody else has unmounted it, or ended the connection.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        !matches!(self.session.try_recv(), Err(mpsc::TryRecvError::Empty))
    }

    /// Stops. If nobody uses the mount it is gone, and nobody was refused anything. If somebody does, what was asked is answered, up to
    /// `limit`, and what is asked from now on fails with ESHUTDOWN; the log says who it is, and it is taken away from them: their open files
    /// fail with ENOTCONN. (Where that takes a right that we do not have, it is out of sight, and goes when they close their files.)
    /// May take a second and a half longer. Nothing is flushed that no program asked for.
    ///
    /// # Errors
    /// [`StillBusy`] if the engine owes replies even then. Those threads end when it gives them, or goes away.
    pub fn shutdown(mut self, limit: Duration) -> Result<(), StillBusy> {
        let deadline = Instant::now() + limit;
        self.shared.life.unmounts();
        let is_unused = self.unmount_unused();
        self.shared.life.stop();
        if !is_unused {
            self.tell_users();
            self.shared.life.wait_until(deadline, |state| state.requests == 0);
            if !self.mount.unmount() && !self.mount.cut() {
                let directory = self.mount.directory().display();
                tracing::warn!(
                    event = "fuse-busy",
                    "{directory} is out of sight, but served until its open files are closed"
                );
            }
        }
        self.is_unmounted = true;
        self.shared.workers.close();
        // What comes of this is in the numbers below: a session that does not end leaves threads, not replies due.
        let _: Result<(), _> = self.session.recv_timeout(CUT_GRACE);
        let end = deadline.max(Instant::now() + CUT_GRACE);
        let left = self.shared.life.wait_until(end, |state| state.requests == 0 && state.threads == 0);
        match left.requests {
            0 => Ok(()),
            requests => Err(StillBusy { requests }),
        }
    }

    /// Unmounts before anything that is asked is refused, if nobody has a volume open; true if it is gone. Whoever looks at a name in it, reads a
    /// control file, or has just closed one, keeps it for a moment, and is not told of.
    fn unmount_unused(&self) -> bool {
        let until = Instant::now() + PASSING;
        loop {
            if self.mount.unmount() {
                return true;
            }
            let is_used = self.clients().iter().any(|client| client.export.is_some());
            if is_used || Instant::now() >= until {
                return false;
            }
            thread::sleep(LOOK_AGAIN);
        }
    }

    fn tell_users(&self) {
        let clients = self.clients();
        let users: BTreeSet<_> =
            clients.iter().map(|client| format!("{} has {} open", client.peer, client.path)).collect();
        let others = users.len().saturating_sub(NAMED_MAX);
        let mut users = users.into_iter().take(NAMED_MAX).collect::<Vec<_>>().join("; ");
        if users.is_empty() {
            "somebody looks at names in it, or has a directory of it open, or as working directory"
                .clone_into(&mut users);
        } else if others > 0 {
            users.push_str(&format!("; and {others} more"));
        }
        let directory = self.mount.directory().display();
        tracing::warn!(event = "fuse-busy", users, "{directory} is unmounted while it is in use: {users}");
    }
}

impl Drop for FuseServer {
    fn drop(&mut self) {
        self.shared.life.stop();
        if !self.is_unmounted && !self.mount.unmount() {
            self.mount.cut();
        }
        self.shared.workers.close();
    }
}

impl Shared {
    /// Answers what comes from the kernel, on threads that end with the mount.
    fn serve(self: &Arc<Self>, device: std::os::fd::OwnedFd) -> io::Result<Receiver<()>> {
        let mut config = Config::default();
        config.n_threads = Some(self.limits.threads);
        config.clone_fd = true;
        // The kernel knows who may; what comes through a descriptor that was given away, or from a thread of the kernel, is
        // not to be asked again.
        let session = Session::from_fd(Files::new(Arc::clone(self)), device, SessionACL::All, config)?;
        let (ending, ended) = mpsc::channel::<()>();
        let shared = Arc::clone(self);
        thread::Builder::new().name("fuse-session".to_owned()).spawn(move || {
            let result = session.run();
            shared.open.close_all();
            match result {
                Err(error) => tracing::error!(event = "fuse-ended", %error, "the FUSE session failed"),
                Ok(()) if !shared.life.ends() => {
                    tracing::warn!(
                        event = "fuse-ended",
                        "somebody has unmounted the FUSE mount, or cut it off"
                    );
                }
                Ok(()) => {}
            }
            drop(ending);
        })?;
        Ok(ended)
    }
}

fn check_names(trees: &[NamedTree]) -> Result<(), StartError> {
    let mut names = BTreeSet::from([VOLUMES]);
    match trees.iter().find(|(name, _)| !is_name(name) || !names.insert(name.as_str())) {
        Some((name, _)) => Err(StartError::TreeName(name.clone())),
        None => Ok(()),
    }
}
