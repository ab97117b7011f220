//! The answering side: one thread with a tokio of its own. Nothing of tokio leaves this file.

use super::admission::Work;
use super::connection_limit::{self, Few};
use super::listener::{Lasting, Sockets};
use super::metrics::Listener;
use super::routes::{self, Peer};
use super::socket_file::Bound;
use bcached_config::options::Scope;
use bcached_control::config_diff::Differences;
use bcached_control::connect::monitor_beside;
use bcached_control::events::Events;
use bcached_control::explain::Explained;
use bcached_control::failure::Failure;
use bcached_control::jobs::{Begin, Job, Jobs};
use bcached_control::names::Called;
use bcached_control::options::{Change, Changed, Options};
use bcached_control::status::Status;
use bcached_control::stop::{Stop, Stopping};
use bcached_control::take_over::{TakeOver, TakingOver};
use bcached_port::socket::{Passed, Whose};
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

/// How long a thread stays that has nothing to do.
const KEPT: Duration = Duration::from_secs(60);

/// A signal that the supervisor acts on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signal {
    /// Stop in order.
    Stop,
    /// Read the configuration again.
    Reload,
}

/// The status; if work may be done for it, with what costs more.
pub type AskStatus = Box<dyn Fn(Option<Work>) -> Status + Send + Sync>;

/// The options of the volume or cache that is called so.
pub type AskOptions = Box<dyn Fn(Scope, Called<'_>) -> Result<Options, Failure> + Send + Sync>;

/// Changes options of the volume or cache that is called so, for that user.
pub type AskChange = Box<dyn Fn(Scope, &str, Change, Option<u32>) -> Result<Changed, Failure> + Send + Sync>;

/// Begins long work, for that user.
pub type AskBegin = Box<dyn Fn(Begin, Option<u32>) -> Result<Job, Failure> + Send + Sync>;

/// Says how far the long work of this number is, perhaps after giving it up.
pub type AskJob = Box<dyn Fn(u64) -> Result<Job, Failure> + Send + Sync>;
/// Gives the work of this number up, or only says whether that can be; for a user.
pub type AskCancel = Box<dyn Fn(u64, bool, Option<u32>) -> Result<Job, Failure> + Send + Sync>;

/// All long work.
pub type AskJobs = Box<dyn Fn() -> Result<Jobs, Failure> + Send + Sync>;

/// How what runs differs from what the files say.
pub type AskDifferences = Box<dyn Fn() -> Result<Differences, Failure> + Send + Sync>;

/// Where that byte of the volume that is called so is.
pub type AskExplain = Box<dyn Fn(Called<'_>, u64, Work) -> Result<Explained, Failure> + Send + Sync>;

/// What came after the event of that sequence; if told so, once there is any, or after a while.
pub type AskEvents = Box<dyn Fn(u64, bool) -> Result<Events, Failure> + Send + Sync>;

/// Stops the daemon, for that user.
pub type AskStop = Box<dyn Fn(Stop, Option<u32>) -> Result<Stopping, Failure> + Send + Sync>;

/// Says how far a stop is.
pub type AskStopped = Box<dyn Fn() -> Result<Stopping, Failure> + Send + Sync>;

/// Has another process take over, for that user.
pub type AskTakeOver = Box<dyn Fn(TakeOver, Option<u32>) -> Result<TakingOver, Failure> + Send + Sync>;

/// Says how far that is.
pub type AskTakenOver = Box<dyn Fn() -> Result<TakingOver, Failure> + Send + Sync>;

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
    pub cancel: AskCancel,
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
    /// Waits until another process runs.
    pub take_over: AskTakeOver,
    /// Waits for the end, for a while.
    pub taken_over: AskTakenOver,
}

/// Who may connect to the control socket, and to the one for who may only look.
const FOR_OWNER: Mode = Mode::RUSR.union(Mode::WUSR);
const FOR_GROUP: Mode = FOR_OWNER.union(Mode::RGRP).union(Mode::WGRP);

/// Where another socket goes, for whoever accepts.
type Again = mpsc::UnboundedSender<UnixListener>;

/// What the daemon can be asked on.
pub struct Control {
    /// For its owner only: everything.
    owner: Bound,
    /// For its group, too: to look, and to change nothing.
    monitor: Option<Bound>,
    metrics: Option<Listener>,
    /// Where those who accept hear of another socket: for the owner, and for who may only look.
    again: Option<(Again, Again)>,
    /// Nobody is accepted any more when it is true.
    ends: watch::Sender<bool>,
}

impl Control {
    /// Binds `path` for everything, and beside it a socket for who may only look; without that one volumes are served all the same. What
    /// was passed for either takes its place.
    ///
    /// # Errors
    /// A daemon answers there already, or the system refuses.
    pub fn bind(path: &Path, owner: Option<Passed>, monitor: Option<Passed>) -> Result<Self, Failure> {
        let owner = owner.map_or_else(|| Bound::bind(path, FOR_OWNER), |passed| Ok(Bound::passed(passed)))?;
        let beside = || Bound::bind(&monitor_beside(path), FOR_GROUP);
        let monitor = monitor.map_or_else(beside, |passed| Ok(Bound::passed(passed)));
        if let Err(failure) = &monitor {
            tracing::warn!(event = "monitor-failed", "nobody can look only: {failure}");
        }
        Ok(Self { owner, monitor: monitor.ok(), metrics: None, again: None, ends: watch::channel(false).0 })
    }

    /// Where commands are taken.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.owner.path()
    }

    /// The same with a port for metrics, if there is an `address`.
    ///
    /// # Errors
    /// It cannot be had.
    pub fn with_metrics(mut self, address: Option<SocketAddr>) -> Result<Self, Failure> {
        self.metrics = address.map(Listener::bind).transpose()?;
        Ok(self)
    }

    /// Starts the thread. It ends with the process, or some time after [`Control::leave`].
    ///
    /// # Errors
    /// No thread or descriptor to be had.
    pub fn start(&mut self, handlers: Arc<Handlers>) -> io::Result<()> {
        let owner = self.owner.listener.try_clone()?;
        let monitor = self.monitor.as_ref().map(|monitor| monitor.listener.try_clone()).transpose()?;
        let metrics = self.metrics.as_ref().map(Listener::try_clone).transpose()?;
        spare_descriptors()?;
        // Where the process may have no more threads tokio panics, unless one of its own is there.
        thread::Builder::new().spawn(|| ())?.join().ok();
        let runtime =
            tokio::runtime::Builder::new_current_thread().thread_keep_alive(KEPT).enable_all().build()?;
        runtime.spawn(keep_a_thread());
        let ends = self.ends.subscribe();
        let (owner_again, next_owner) = mpsc::unbounded_channel();
        let (monitor_again, next_monitor) = mpsc::unbounded_channel();
        self.again = Some((owner_again, monitor_again));
        thread::Builder::new().name("control".to_owned()).spawn(move || {
            if let Some(metrics) = metrics {
                runtime.spawn(metrics.serve(Arc::clone(&handlers), end_of(ends.clone())));
            }
            if let Some(monitor) = monitor {
                runtime.spawn(look((monitor, next_monitor), Arc::clone(&handlers), end_of(ends.clone())));
            }
            runtime.block_on(answer((owner, next_owner), handlers, end_of(ends)));
            // What somebody has asked may wait for a device.
            runtime.shutdown_background();
        })?;
        Ok(())
    }

    /// Its sockets that have files.
    pub fn sockets(&self) -> impl Iterator<Item = &Path> {
        std::iter::once(&self.owner).chain(&self.monitor).map(Bound::path)
    }

    /// Listens anew on one of its sockets, whose file somebody has removed. Connections go on.
    ///
    /// # Errors
    /// The system refuses, somebody else listens there now, or somebody else had bound it.
    pub fn bind_again(&mut self, path: &Path) -> Result<(), Failure> {
        let Self { owner, monitor, again, .. } = self;
        let Some((to_owner, to_monitor)) = again else { return Ok(()) };
        let (bound, to, mode) = match monitor {
            Some(monitor) if monitor.path() == path => (monitor, to_monitor, FOR_GROUP),
            _ if owner.path() == path => (owner, to_owner, FOR_OWNER),
            _ => return Err(Bound::cannot(path, &io::ErrorKind::NotFound.into())),
        };
        let next = bound.again(mode)?;
        let listener = next.listener.try_clone().map_err(|error| Bound::cannot(path, &error))?;
        *bound = next;
        // Who accepts nobody any more wants none.
        let _or_it_ends = to.send(listener);
        Ok(())
    }

    /// Accepts nobody any more, and leaves its sockets to who does next.
    #[must_use]
    pub fn leave(self) -> LeftSockets {
        let Self { owner, monitor, metrics, ends, .. } = self;
        ends.send_replace(true);
        LeftSockets {
            owner: owner.leave(),
            monitor: monitor.map(Bound::leave),
            metrics: metrics.map(Listener::into_socket),
        }
    }
}

/// The sockets of a control that has been left. Of those that have a file: who has bound them.
pub struct LeftSockets {
    /// For everything.
    pub owner: (OwnedFd, Whose),
    /// For who may only look.
    pub monitor: Option<(OwnedFd, Whose)>,
    /// For numbers.
    pub metrics: Option<OwnedFd>,
}

/// One thread for what takes a moment stays, however many processes the daemon may have later: whoever asks is answered, if need be after
/// others.
async fn keep_a_thread() {
    while tokio::task::spawn_blocking(|| ()).await.is_ok() {
        tokio::time::sleep(KEPT / 2).await;
    }
}

/// Ready when that has become true, or nobody says so any more.
async fn end_of(mut ends: watch::Receiver<bool>) {
    let _or_nobody_is_there = ends.wait_for(|ends| *ends).await;
}

/// An error where the process has no descriptors left for tokio: for its signals it would panic.
pub(super) fn spare_descriptors() -> io::Result<()> {
    /// More than a runtime takes: an epoll with its copy and its waker, and three ends of the signals' socket pair.
    const NEEDED: usize = 8;
    let taken: Result<Vec<_>, _> = (0..NEEDED).map(|_| std::fs::File::open("/dev/null")).collect();
    taken.map(drop)
}

async fn answer(sockets: Sockets, handlers: Arc<Handlers>, end: impl Future<Output = ()> + Send + 'static) {
    let served = async {
        let service = routes::router(handlers).into_make_service_with_connect_info::<Peer>();
        let listener = Lasting::new(sockets)?;
        axum::serve(listener, service).with_graceful_shutdown(end).await
    };
    if let Err(error) = served.await {
        tracing::error!(event = "control-failed", "the control socket failed: {error}");
    }
}

/// Connections of those who may only look: descriptors are for volumes first.
const LOOKING_MAX: usize = 16;

async fn look(sockets: Sockets, handlers: Arc<Handlers>, end: impl Future<Output = ()> + Send + 'static) {
    let served = async {
        let listener = Lasting::new(sockets)?;
        let served =
            axum::serve(Few::new(listener, LOOKING_MAX, connection_limit::LIMITS), routes::to_look(handlers));
        served.with_graceful_shutdown(end).await
    };
    if let Err(error) = served.await {
        tracing::error!(event = "monitor-failed", "nobody can look only any more: {error}");
    }
}
