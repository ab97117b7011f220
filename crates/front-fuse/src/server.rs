//! The server: it mounts, serves until it is stopped, and leaves no mount behind.

use crate::filesystem::FuseFilesystem;
use crate::mount::{Mount, MountError};
use crate::nodes::{NamedTree, NodeOwner, NodeTable, VOLUMES, is_name};
use crate::open_files::OpenFiles;
use crate::open_limit::OpenLimit;
use crate::shutdown::Lifecycle;
use crate::tree::ControlTree;
use crate::workers::WorkerPool;
use bcached_port::{BudgetPool, BufferPool, ExportTable};
use fuser::{Config, Session, SessionACL};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime};
use thiserror::Error;

/// The options of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// The mount point, an empty directory.
    pub directory: PathBuf,
    /// Whether users other than our own may access the mount; the files' permissions still apply.
    /// An ordinary user may set this only if `/etc/fuse.conf` allows it.
    pub allow_other: bool,
    /// The limits on what programs use.
    pub limits: Limits,
}

/// The most that programs may use.
#[derive(Clone, Debug)]
pub struct Limits {
    /// In-flight requests of one open file at its engine. It is also the number of background
    /// requests (of `io_uring`, of loop devices) that the kernel sends at a time for the whole
    /// mount.
    pub requests: u16,
    /// Bytes of payload that one open file holds in memory, at least 4 MiB.
    pub file_bytes: u64,
    /// Bytes of payload that all open files hold in memory, at least 4 MiB. An eighth is added for
    /// small requests.
    pub total_bytes: u64,
    /// Open volume files at the same time; each has a thread. A further open fails with ENFILE.
    pub open_volumes: usize,
    /// Threads that receive the kernel's requests.
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
    #[error("the FUSE limits are too low: {0}")]
    Limits(&'static str),
    /// Two entries of the mount would have the same name, or a name is invalid.
    #[error("no tree of the FUSE mount can be called {0:?}")]
    TreeName(String),
    /// The system refused a thread or descriptor.
    #[error("could not start the FUSE server")]
    System(#[from] io::Error),
}

/// Requests that were not answered in time.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{requests} requests from the FUSE mount still wait for the engine")]
pub struct ShutdownTimeout {
    /// Their number.
    pub requests: usize,
}

/// A file that a program has open, for people.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientInfo {
    /// The process that opened it.
    pub peer: String,
    /// Its path in the mount.
    pub path: String,
    /// The volume's name, if it is a volume.
    pub export: Option<String>,
    /// Whether it has written to the volume.
    pub writing: bool,
}

/// A mount that is served. Dropping it unmounts without waiting for clients; see
/// [`FuseServer::shutdown`].
pub struct FuseServer {
    shared: Arc<ServerShared>,
    mount: Mount,
    /// Disconnected when the session ends.
    session: Receiver<()>,
    is_unmounted: bool,
}

/// The state that all threads of a server share.
pub(crate) struct ServerShared {
    pub(crate) nodes: NodeTable,
    pub(crate) open: OpenFiles,
    pub(crate) lifecycle: Arc<Lifecycle>,
    pub(crate) workers: Arc<WorkerPool>,
    pub(crate) open_limit: Arc<OpenLimit>,
    pub(crate) memory: Arc<BudgetPool>,
    /// Buffers of completed requests, kept for reuse.
    pub(crate) stock: Arc<Mutex<BufferPool>>,
    pub(crate) limits: Limits,
}

/// The largest request, with the sectors read around it.
const BYTES_MIN: u64 = 4 << 20;
/// The divisor that gives the share of `total_bytes` kept as buffers for reuse.
const STOCK_PART: u64 = 8;
/// How long threads take at most to end after the mount is gone.
const CUT_GRACE: Duration = Duration::from_secs(1);
/// How long a transient user, such as a lookup, keeps a mount busy at most.
const PASSING: Duration = Duration::from_millis(100);
/// Pause between attempts to unmount; each may run the helper program.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// The most users of a busy mount that the log names.
const NAMED_MAX: usize = 10;

impl Default for Limits {
    fn default() -> Self {
        let processors = thread::available_parallelism().map_or(2, usize::from);
        Self {
            // With the largest requests this is what one file may hold, so the kernel's background
            // requests never make a session thread wait for memory.
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
                "at least one request, one open file and one thread of each kind are needed",
            ));
        }
        if self.file_bytes < BYTES_MIN || self.total_bytes < BYTES_MIN {
            return Err(StartError::Limits("the largest request, 4 MiB, must fit in memory"));
        }
        Ok(())
    }

    fn stock_bytes(&self) -> usize {
        usize::try_from(self.total_bytes / STOCK_PART).unwrap_or(usize::MAX)
    }
}

impl FuseServer {
    /// Mounts, and serves the volumes of the table, including those added later, and the trees
    /// under their names. A mount that a dead daemon has left at the directory is replaced.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left behind then.
    pub fn start(
        options: Options,
        exports: ExportTable,
        trees: Vec<(String, Arc<dyn ControlTree>)>,
    ) -> Result<Self, StartError> {
        let memory = Arc::new(BudgetPool::new(options.limits.total_bytes));
        Self::start_sharing(options, exports, trees, memory)
    }

    /// Like [`FuseServer::start`], with a pool of payload memory that other front ends may share.
    /// Its size has to be `total_bytes` of the limits.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left behind then.
    pub fn start_sharing(
        options: Options,
        exports: ExportTable,
        trees: Vec<(String, Arc<dyn ControlTree>)>,
        memory: Arc<BudgetPool>,
    ) -> Result<Self, StartError> {
        options.limits.check()?;
        check_names(&trees)?;
        let lifecycle = Arc::new(Lifecycle::default());
        let workers =
            WorkerPool::start(&lifecycle, if trees.is_empty() { 0 } else { options.limits.tree_threads })?;
        let owner = NodeOwner {
            user: rustix::process::geteuid().as_raw(),
            group: rustix::process::getegid().as_raw(),
            since: SystemTime::now(),
        };
        let shared = Arc::new(ServerShared {
            nodes: NodeTable::new(exports, trees, owner),
            open: OpenFiles::default(),
            lifecycle,
            workers,
            open_limit: OpenLimit::new("volumes", options.limits.open_volumes),
            memory,
            stock: Arc::new(Mutex::new(BufferPool::new(options.limits.stock_bytes()))),
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

    /// The mount point.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.mount.directory()
    }

    /// The files that programs have open.
    #[must_use]
    pub fn clients(&self) -> Vec<ClientInfo> {
        self.shared.open.clients(self.mount.directory())
    }

    /// Whether no request can arrive any more: the mount was unmounted, or its connection ended, by
    /// another program.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        !matches!(self.session.try_recv(), Err(mpsc::TryRecvError::Empty))
    }

    /// Stops the server. If the mount is not in use, it is unmounted without refusing any request.
    /// If it is in use:
    ///
    /// 1. New requests fail with ESHUTDOWN, and the log names the users.
    /// 2. Requests already received are answered, up to `limit`.
    /// 3. The mount is disconnected: the users' open files fail with ENOTCONN. Where we lack the
    ///    permission for that, the mount is detached, and ends when its users close their files.
    ///
    /// May take a second and a half longer. Flushes nothing that no program asked to flush.
    ///
    /// # Errors
    /// [`ShutdownTimeout`] if the engine owes replies even then. The threads concerned end when the
    /// replies arrive or the engine goes away.
    pub fn shutdown(mut self, limit: Duration) -> Result<(), ShutdownTimeout> {
        let deadline = Instant::now() + limit;
        self.shared.lifecycle.unmounts();
        let is_unused = self.unmount_unused();
        self.shared.lifecycle.stop();
        if !is_unused {
            self.tell_users();
            self.shared.lifecycle.wait_until(deadline, |state| state.requests == 0);
            if !self.mount.unmount() && !self.mount.cut() {
                let directory = self.mount.directory().display();
                tracing::warn!(
                    event = "fuse-busy",
                    "{directory} is detached, but still served until its open files are closed"
                );
            }
        }
        self.is_unmounted = true;
        self.shared.workers.close();
        // The outcome shows in the numbers below: a session that does not end leaves threads, not
        // pending replies.
        let _: Result<(), _> = self.session.recv_timeout(CUT_GRACE);
        let end = deadline.max(Instant::now() + CUT_GRACE);
        let left = self.shared.lifecycle.wait_until(end, |state| state.requests == 0 && state.threads == 0);
        match left.requests {
            0 => Ok(()),
            requests => Err(ShutdownTimeout { requests }),
        }
    }

    /// Unmounts before any request is refused, if no volume is open. Returns whether the mount is
    /// gone. A program that looks up a name, reads a control file or has just closed one keeps the
    /// mount busy for a moment; it is not reported.
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
            "a process is looking up names in it, or has a directory of it open or as working \
             directory"
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
        self.shared.lifecycle.stop();
        if !self.is_unmounted && !self.mount.unmount() {
            self.mount.cut();
        }
        self.shared.workers.close();
    }
}

impl ServerShared {
    /// Answers the kernel's requests, on threads that end with the mount.
    fn serve(self: &Arc<Self>, device: std::os::fd::OwnedFd) -> io::Result<Receiver<()>> {
        let mut config = Config::default();
        config.n_threads = Some(self.limits.threads);
        config.clone_fd = true;
        // The kernel checks permissions. Requests through a descriptor that was passed on, or from
        // a kernel thread, must not be checked again.
        let session =
            Session::from_fd(FuseFilesystem::new(Arc::clone(self)), device, SessionACL::All, config)?;
        let (ending, ended) = mpsc::channel::<()>();
        let shared = Arc::clone(self);
        thread::Builder::new().name("fuse-session".to_owned()).spawn(move || {
            let result = session.run();
            shared.open.close_all();
            match result {
                Err(error) => tracing::error!(event = "fuse-ended", %error, "the FUSE session failed"),
                Ok(()) if !shared.lifecycle.ends() => {
                    tracing::warn!(
                        event = "fuse-ended",
                        "another program has unmounted the FUSE mount, or disconnected it"
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
