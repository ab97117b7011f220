//! The answering side, and signals: one thread with a tokio of its own. Nothing of tokio leaves this file.

use super::differences::Differences;
use super::events::Events;
use super::explain::Explained;
use super::jobs::{Begin, Job, Jobs};
use super::metrics::Listener;
use super::options::{Change, Changed, Options};
use super::routes::{self, Peer};
use super::socket::connect_now;
use super::status::Status;
use super::stop::{Stop, Stopping};
use crate::failure::{Failure, Kind};
use crate::options::Scope;
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use tokio::signal::unix::{SignalKind, signal};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// A signal that the supervisor acts on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// Stop in order.
    Stop,
    /// Read the configuration again.
    Reload,
}

/// The status; if told so, with what costs more.
pub type AskStatus = Box<dyn Fn(bool) -> Status + Send + Sync>;

/// The options of the volume or cache that is called so.
pub type AskOptions = Box<dyn Fn(Scope, &str) -> Result<Options, Failure> + Send + Sync>;

/// Changes options of the volume or cache that is called so, for that user.
pub type AskChange = Box<dyn Fn(Scope, &str, Change, Option<u32>) -> Result<Changed, Failure> + Send + Sync>;

/// Begins long work, for that user.
pub type AskBegin = Box<dyn Fn(Begin, Option<u32>) -> Result<Job, Failure> + Send + Sync>;

/// Says how far the long work of this number is, perhaps after giving it up.
pub type AskJob = Box<dyn Fn(u64) -> Result<Job, Failure> + Send + Sync>;

/// All long work.
pub type AskJobs = Box<dyn Fn() -> Result<Jobs, Failure> + Send + Sync>;

/// How what runs differs from what the files say.
pub type AskDifferences = Box<dyn Fn() -> Result<Differences, Failure> + Send + Sync>;

/// Where that byte of the volume that is called so is.
pub type AskExplain = Box<dyn Fn(&str, u64) -> Result<Explained, Failure> + Send + Sync>;

/// What came after the event of that sequence; if told so, once there is any, or after a while.
pub type AskEvents = Box<dyn Fn(u64, bool) -> Result<Events, Failure> + Send + Sync>;

/// Stops the daemon, for that user.
pub type AskStop = Box<dyn Fn(Stop, Option<u32>) -> Result<Stopping, Failure> + Send + Sync>;

/// Says how far a stop is.
pub type AskStopped = Box<dyn Fn() -> Result<Stopping, Failure> + Send + Sync>;

/// What the control thread asks and tells.
pub struct Handlers {
    /// The status now, on request with what costs more. May take a moment.
    pub status: AskStatus,
    /// May take a moment.
    pub options: AskOptions,
    /// Waits until it is done, for a while.
    pub change: AskChange,
    /// Waits until it has begun, for a while.
    pub begin: AskBegin,
    /// May take a moment.
    pub jobs: AskJobs,
    /// May take a moment.
    pub job: AskJob,
    /// May take a moment.
    pub cancel: AskJob,
    /// May take a moment.
    pub explain: AskExplain,
    /// May take a moment.
    pub differences: AskDifferences,
    /// Waits for the next, if told so.
    pub events: AskEvents,
    /// May take a moment.
    pub stop: AskStop,
    /// Waits for the end, for a while.
    pub stopped: AskStopped,
    /// A signal has come.
    pub signal: Box<dyn Fn(Signal) + Send + Sync>,
}

/// The bound socket. Dropped, it takes its file with it, unless somebody else's has taken its place.
pub struct Control {
    path: PathBuf,
    /// Device and inode of the socket file.
    file: Option<(u64, u64)>,
    listener: UnixListener,
    metrics: Option<Listener>,
}

impl Control {
    /// Binds `path`, for its owner only.
    ///
    /// # Errors
    /// A daemon answers there already, or the system refuses.
    pub fn bind(path: &Path) -> Result<Self, Failure> {
        let cannot = |error: &io::Error| {
            let kind =
                if error.kind() == io::ErrorKind::PermissionDenied { Kind::Permission } else { Kind::Io };
            Failure::new(kind, format!("cannot listen on {}", path.display()))
                .why(error.to_string())
                .next("name another socket with --control")
        };
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            match std::fs::create_dir(folder) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(cannot(&error)),
                _ => {}
            }
        }
        remove_stale(path)?;
        let listener = listen(path).map_err(|error| cannot(&error))?;
        Ok(Self { path: path.to_owned(), file: identity(path), listener, metrics: None })
    }

    /// The same with a port for metrics, if there is an `address`.
    ///
    /// # Errors
    /// It cannot be had.
    pub fn with_metrics(mut self, address: Option<SocketAddr>) -> Result<Self, Failure> {
        self.metrics = address.map(Listener::bind).transpose()?;
        Ok(self)
    }

    /// Starts the thread. It ends with the process.
    ///
    /// # Errors
    /// No thread or descriptor to be had.
    pub fn start(&self, handlers: Handlers) -> io::Result<()> {
        let listener = self.listener.try_clone()?;
        let metrics = self.metrics.as_ref().map(Listener::try_clone).transpose()?;
        spare_descriptors()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        // Signals are caught from here on, not only when the thread first runs.
        let signals = {
            let _entered = runtime.enter();
            // A write beyond the limit of file size raises SIGXFSZ, which ends a process that does not catch it; caught,
            // it leaves the write with an error, as on a full file system. The handler stays without this stream.
            drop(signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?);
            [
                (signal(SignalKind::terminate())?, Signal::Stop),
                (signal(SignalKind::interrupt())?, Signal::Stop),
                (signal(SignalKind::hangup())?, Signal::Reload),
            ]
        };
        thread::Builder::new().name("control".to_owned()).spawn(move || {
            let handlers = Arc::new(handlers);
            for (mut stream, signal) in signals {
                let told = Arc::clone(&handlers);
                runtime.spawn(async move {
                    while stream.recv().await.is_some() {
                        (told.signal)(signal);
                    }
                });
            }
            if let Some(metrics) = metrics {
                runtime.spawn(metrics.serve(Arc::clone(&handlers)));
            }
            if let Err(error) = runtime.block_on(answer(listener, handlers)) {
                tracing::error!(event = "control-failed", "the control socket failed: {error}");
            }
        })?;
        Ok(())
    }
}

/// An error where the process has no descriptors left for tokio: for its signals it would panic.
fn spare_descriptors() -> io::Result<()> {
    /// More than a runtime takes: an epoll with its copy and its waker, and three ends of the signals' socket pair.
    const NEEDED: usize = 8;
    let taken: Result<Vec<_>, _> = (0..NEEDED).map(|_| std::fs::File::open("/dev/null")).collect();
    taken.map(drop)
}

async fn answer(listener: UnixListener, handlers: Arc<Handlers>) -> io::Result<()> {
    let service = routes::router(handlers).into_make_service_with_connect_info::<Peer>();
    axum::serve(tokio::net::UnixListener::from_std(listener)?, service).await
}

/// The file that bind makes takes its mode from the socket: it is never open to anybody else.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Removes a socket on which nobody answers.
fn remove_stale(path: &Path) -> Result<(), Failure> {
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !metadata.file_type().is_socket() {
        return Err(Failure::new(Kind::Usage, format!("cannot listen on {}", path.display()))
            .why("it exists and is not a socket")
            .next("name another socket with --control"));
    }
    match connect_now(path) {
        Err(Errno::CONNREFUSED) => {
            let _gone_already = std::fs::remove_file(path);
            Ok(())
        }
        Err(Errno::NOENT) => Ok(()),
        _ => Err(Failure::new(Kind::InUse, format!("cannot listen on {}", path.display()))
            .why("another daemon answers there")
            .next("stop it, or name another socket with --control")),
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        if self.file.is_some() && identity(&self.path) == self.file {
            let _gone_already = std::fs::remove_file(&self.path);
        }
    }
}

/// Which file lies at `path`: its device and inode.
fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A daemon that ended late took the socket of the next one along.
    #[test]
    fn a_socket_that_is_no_longer_ours_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let Ok(control) = Control::bind(&path) else { panic!("nothing is there") };
        std::fs::rename(&path, folder.path().join("moved.sock")).unwrap();
        let _next = UnixListener::bind(&path).unwrap();
        drop(control);
        assert!(path.exists(), "somebody else's");
    }
}
