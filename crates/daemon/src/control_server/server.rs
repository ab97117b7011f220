//! The server of the control sockets: one thread with its own tokio runtime. No type of tokio
//! leaves this file.

use super::admission::WorkPermit;
use super::connection_limit::{self, LimitedListener};
use super::listener::{ReplaceableListener, ReplaceableSocket};
use super::metrics::MetricsListener;
use super::routes::{self, Peer};
use super::socket_file::BoundSocket;
use bcached_config::options::Scope;
use bcached_control::config_diff::ConfigDifferences;
use bcached_control::connect::monitor_beside;
use bcached_control::events::Events;
use bcached_control::explain::ExplainReport;
use bcached_control::failure::Failure;
use bcached_control::jobs::{JobList, JobReport, JobSpec};
use bcached_control::names::TypedName;
use bcached_control::options::{OptionChange, OptionChangeReport, Options};
use bcached_control::status::Status;
use bcached_control::stop::{StopReport, StopRequest};
use bcached_control::take_over::{TakeOverReport, TakeOverRequest};
use bcached_port::socket::{PassedSocket, SocketOwner};
use rustix::fs::Mode;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// How long an idle blocking thread is kept.
const KEPT: Duration = Duration::from_secs(60);

/// A signal that the supervisor acts on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// Stop in order.
    Stop,
    /// Read the configuration again.
    Reload,
}

/// Returns the status; with `WorkPermit`, also the part that needs a scan by the engines.
pub type StatusHandler = Box<dyn Fn(Option<WorkPermit>) -> Status + Send + Sync>;

/// Returns the options of the volume or cache with this name.
pub type OptionsHandler = Box<dyn Fn(Scope, TypedName<'_>) -> Result<Options, Failure> + Send + Sync>;

/// Changes options of the volume or cache with this name, on behalf of this user.
pub type ChangeHandler =
    Box<dyn Fn(Scope, &str, OptionChange, Option<u32>) -> Result<OptionChangeReport, Failure> + Send + Sync>;

/// Begins a job, on behalf of this user.
pub type BeginJobHandler = Box<dyn Fn(JobSpec, Option<u32>) -> Result<JobReport, Failure> + Send + Sync>;

/// Returns the progress of the job with this number.
pub type JobHandler = Box<dyn Fn(u64) -> Result<JobReport, Failure> + Send + Sync>;
/// Cancels the job with this number, or only reports whether that is possible; on behalf of this
/// user.
pub type CancelJobHandler = Box<dyn Fn(u64, bool, Option<u32>) -> Result<JobReport, Failure> + Send + Sync>;

/// Returns all jobs.
pub type JobsHandler = Box<dyn Fn() -> Result<JobList, Failure> + Send + Sync>;

/// Returns how the running configuration differs from the files.
pub type ConfigDiffHandler = Box<dyn Fn() -> Result<ConfigDifferences, Failure> + Send + Sync>;

/// Returns where this byte of the volume with this name is.
pub type ExplainHandler =
    Box<dyn Fn(TypedName<'_>, u64, WorkPermit) -> Result<ExplainReport, Failure> + Send + Sync>;

/// Returns the events after this sequence number; if the flag is set, waits a while for the first.
pub type EventsHandler = Box<dyn Fn(u64, bool) -> Result<Events, Failure> + Send + Sync>;

/// Stops the daemon, on behalf of this user.
pub type StopHandler = Box<dyn Fn(StopRequest, Option<u32>) -> Result<StopReport, Failure> + Send + Sync>;

/// Returns the progress of a stop.
pub type StopProgressHandler = Box<dyn Fn() -> Result<StopReport, Failure> + Send + Sync>;

/// Hands over to another process, on behalf of this user.
pub type TakeOverHandler =
    Box<dyn Fn(TakeOverRequest, Option<u32>) -> Result<TakeOverReport, Failure> + Send + Sync>;

/// Returns the progress of that.
pub type TakeOverProgressHandler = Box<dyn Fn() -> Result<TakeOverReport, Failure> + Send + Sync>;

/// The functions that the control thread calls.
pub struct Handlers {
    /// The status now, on request with the parts that cost more. May take a moment.
    pub status: StatusHandler,
    /// May take a moment.
    pub options: OptionsHandler,
    /// Waits until it is done, for a limited time.
    pub change: ChangeHandler,
    /// Waits until it has begun, for a limited time.
    pub begin: BeginJobHandler,
    /// May take a moment.
    pub jobs: JobsHandler,
    /// May take a moment.
    pub job: JobHandler,
    /// May take a moment.
    pub cancel: CancelJobHandler,
    /// May take a moment.
    pub explain: ExplainHandler,
    /// May take a moment.
    pub differences: ConfigDiffHandler,
    /// Waits for the next event, if asked to.
    pub events: EventsHandler,
    /// May take a moment.
    pub stop: StopHandler,
    /// Waits for the end, for a limited time.
    pub stopped: StopProgressHandler,
    /// Waits until another process runs.
    pub take_over: TakeOverHandler,
    /// Waits for the end, for a limited time.
    pub taken_over: TakeOverProgressHandler,
}

/// The modes of the control socket and of the read-only socket.
const FOR_OWNER: Mode = Mode::RUSR.union(Mode::WUSR);
const FOR_GROUP: Mode = FOR_OWNER.union(Mode::RGRP).union(Mode::WGRP);

/// Where a replacement socket is sent, for the task that accepts.
type ReplacementSender = mpsc::UnboundedSender<UnixListener>;

/// The sockets of the daemon.
pub struct ControlServer {
    /// For its owner only: all requests.
    owner: BoundSocket,
    /// For its group, too: read-only.
    monitor: Option<BoundSocket>,
    metrics: Option<MetricsListener>,
    /// The channels that give replacement sockets to the accepting tasks, of the control socket and
    /// of the read-only socket.
    again: Option<(ReplacementSender, ReplacementSender)>,
    /// No connection is accepted any more once this is true.
    ends: watch::Sender<bool>,
    /// Disconnected when all requests on the control socket have been answered after that.
    answered: Option<std::sync::mpsc::Receiver<()>>,
}

impl ControlServer {
    /// Binds `path` for all requests, and a read-only socket beside it. Volumes are served even if
    /// the read-only socket cannot be bound. A socket passed by the service manager is used instead
    /// of binding.
    ///
    /// # Errors
    /// A daemon answers there already, or the system refuses.
    pub fn bind(
        path: &Path,
        owner: Option<PassedSocket>,
        monitor: Option<PassedSocket>,
    ) -> Result<Self, Failure> {
        let owner = owner
            .map_or_else(|| BoundSocket::bind(path, FOR_OWNER), |passed| Ok(BoundSocket::passed(passed)))?;
        let beside = || BoundSocket::bind(&monitor_beside(path), FOR_GROUP);
        let monitor = monitor.map_or_else(beside, |passed| Ok(BoundSocket::passed(passed)));
        if let Err(failure) = &monitor {
            tracing::warn!(event = "monitor-failed", "the read-only socket is not available: {failure}");
        }
        Ok(Self {
            owner,
            monitor: monitor.ok(),
            metrics: None,
            again: None,
            ends: watch::channel(false).0,
            answered: None,
        })
    }

    /// The path of the control socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.owner.path()
    }

    /// Adds a port for metrics, if there is an `address`.
    ///
    /// # Errors
    /// The port cannot be bound.
    pub fn with_metrics(mut self, address: Option<SocketAddr>) -> Result<Self, Failure> {
        self.metrics = address.map(MetricsListener::bind).transpose()?;
        Ok(self)
    }

    /// Starts the thread. It ends with the process, or some time after
    /// [`ControlServer::finish`] or [`ControlServer::leave`].
    ///
    /// # Errors
    /// No thread or descriptor is available.
    pub fn start(&mut self, handlers: Arc<Handlers>) -> io::Result<()> {
        let owner = self.owner.listener.try_clone()?;
        let monitor = self.monitor.as_ref().map(|monitor| monitor.listener.try_clone()).transpose()?;
        let metrics = self.metrics.as_ref().map(MetricsListener::try_clone).transpose()?;
        spare_descriptors()?;
        // Tokio panics where the process can have no more threads, unless one of its own already
        // runs.
        thread::Builder::new().spawn(|| ())?.join().ok();
        let runtime =
            tokio::runtime::Builder::new_current_thread().thread_keep_alive(KEPT).enable_all().build()?;
        runtime.spawn(keep_a_thread());
        let ends = self.ends.subscribe();
        let (owner_again, next_owner) = mpsc::unbounded_channel();
        let (monitor_again, next_monitor) = mpsc::unbounded_channel();
        self.again = Some((owner_again, monitor_again));
        let (answers, answered) = std::sync::mpsc::channel::<()>();
        self.answered = Some(answered);
        thread::Builder::new().name("control".to_owned()).spawn(move || {
            if let Some(metrics) = metrics {
                runtime.spawn(metrics.serve(Arc::clone(&handlers), end_of(ends.clone())));
            }
            if let Some(monitor) = monitor {
                runtime.spawn(look((monitor, next_monitor), Arc::clone(&handlers), end_of(ends.clone())));
            }
            runtime.block_on(answer((owner, next_owner), handlers, end_of(ends)));
            drop(answers);
            // A running request may wait for a device.
            runtime.shutdown_background();
        })?;
        Ok(())
    }

    /// The paths of its sockets.
    pub fn sockets(&self) -> impl Iterator<Item = &Path> {
        std::iter::once(&self.owner).chain(&self.monitor).map(BoundSocket::path)
    }

    /// Listens anew on the socket at `path`, whose file was removed. Connections are kept.
    ///
    /// # Errors
    /// The system refuses, another process listens there now, or another process had bound the
    /// socket.
    pub fn bind_again(&mut self, path: &Path) -> Result<(), Failure> {
        let Self { owner, monitor, again, .. } = self;
        let Some((to_owner, to_monitor)) = again else { return Ok(()) };
        let (bound, to, mode) = match monitor {
            Some(monitor) if monitor.path() == path => (monitor, to_monitor, FOR_GROUP),
            _ if owner.path() == path => (owner, to_owner, FOR_OWNER),
            _ => return Err(BoundSocket::cannot(path, &io::ErrorKind::NotFound.into())),
        };
        let next = bound.again(mode)?;
        let listener = next.listener.try_clone().map_err(|error| BoundSocket::cannot(path, &error))?;
        *bound = next;
        // It fails if the task does not accept any more, and so needs no socket.
        let _or_it_ends = to.send(listener);
        Ok(())
    }

    /// Stops accepting, and waits until the requests on the control socket have been answered, up
    /// to `limit`. A client that connects from here on waits for the end of the process.
    pub fn finish(&self, limit: Duration) {
        self.ends.send_replace(true);
        if let Some(answered) = &self.answered {
            let _or_too_late = answered.recv_timeout(limit);
        }
    }

    /// Stops accepting, and leaves its sockets to the next process.
    #[must_use]
    pub fn leave(self) -> ControlSockets {
        let Self { owner, monitor, metrics, ends, .. } = self;
        ends.send_replace(true);
        ControlSockets {
            owner: owner.leave(),
            monitor: monitor.map(BoundSocket::leave),
            metrics: metrics.map(MetricsListener::into_socket),
        }
    }
}

/// The sockets of a [`ControlServer`] that was left. For those that have a file: which process has
/// bound it.
pub struct ControlSockets {
    /// For all requests.
    pub owner: (OwnedFd, SocketOwner),
    /// Read-only.
    pub monitor: Option<(OwnedFd, SocketOwner)>,
    /// For metrics.
    pub metrics: Option<OwnedFd>,
}

/// Keeps one blocking thread alive, however many threads the machine grants later: requests are
/// always answered, if need be one after another.
async fn keep_a_thread() {
    while tokio::task::spawn_blocking(|| ()).await.is_ok() {
        tokio::time::sleep(KEPT / 2).await;
    }
}

/// Completes when the value has become true, or when its sender is gone.
async fn end_of(mut ends: watch::Receiver<bool>) {
    let _or_nobody_is_there = ends.wait_for(|ends| *ends).await;
}

/// Fails where the process has too few descriptors left for tokio, which would panic when it
/// registers signals.
pub(super) fn spare_descriptors() -> io::Result<()> {
    /// More than a runtime takes: an epoll with its duplicate and its waker, and three ends of the
    /// signals' socket pair.
    const NEEDED: usize = 8;
    let taken: Result<Vec<_>, _> = (0..NEEDED).map(|_| std::fs::File::open("/dev/null")).collect();
    taken.map(drop)
}

async fn answer(
    sockets: ReplaceableSocket,
    handlers: Arc<Handlers>,
    end: impl Future<Output = ()> + Send + 'static,
) {
    let served = async {
        let service = routes::router(handlers).into_make_service_with_connect_info::<Peer>();
        let listener = ReplaceableListener::new(sockets)?;
        axum::serve(listener, service).with_graceful_shutdown(end).await
    };
    if let Err(error) = served.await {
        tracing::error!(event = "control-failed", "the control socket failed: {error}");
    }
}

/// Connections of read-only clients at once: descriptors are for volumes first.
const LOOKING_MAX: usize = 16;

async fn look(
    sockets: ReplaceableSocket,
    handlers: Arc<Handlers>,
    end: impl Future<Output = ()> + Send + 'static,
) {
    let served = async {
        let listener = ReplaceableListener::new(sockets)?;
        let served = axum::serve(
            LimitedListener::new(listener, LOOKING_MAX, connection_limit::TIMEOUTS),
            routes::to_look(handlers),
        );
        served.with_graceful_shutdown(end).await
    };
    if let Err(error) = served.await {
        tracing::error!(event = "monitor-failed", "the read-only socket failed: {error}");
    }
}
