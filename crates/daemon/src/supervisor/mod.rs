//! The supervisor: opens the configured caches and volumes, keeps them served, and stops them in
//! order.
//!
//! One loop handles one channel of events: devices that appear, sets that open, volumes that
//! attach, signals. Each cache and each volume has its own state with its own reason. A missing
//! device is looked for again; a refused one keeps its final reason. Devices named on the command
//! line are all required at once: there, the first final reason ends the program.

mod caches;
mod devices;
mod fronts;
mod handover;
mod jobs;
mod lifecycle;
mod options;
mod report;
mod table;
#[cfg(test)]
mod tests;
mod volumes;

use crate::control_server::{ControlServer, Handlers, Signal, Signals};
use crate::descriptor_limit;
use crate::events;
use crate::log;
use crate::oom_score;
use crate::socket_activation;
use crate::sysfs::Sysfs;
use crate::take_over::{self, DaemonState, InheritedState, Predecessor, Successor};
use crate::udev_owned::OwnedList;
use bcached_config::{CommandLine, Config};
use bcached_control::failure::{Failure, Kind};
use bcached_control::take_over::{TakeOverPhase, TakeOverReport};
use bcached_format::BackingSuperblock;
use bcached_offline::devices::{BackingDevice, CacheDevice};
use bcached_offline::notes;
use bcached_port::ExportTable;
use caches::CacheEvent;
use devices::open_timeout::PendingOpens;
use fronts::FrontendManager;
use handover::{HandOverTracker, RunOutcome};
use jobs::JobEvent;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use table::Table;
use volumes::VolumeEvent;

/// How often missing devices are looked for.
const RETRY: Duration = Duration::from_secs(2);

/// How often the sets are checked when nothing else happens.
const HEALTH: Duration = Duration::from_secs(5);

/// An event that the loop waits for.
enum Event {
    Signal(Signal),
    /// A front end has news about a volume.
    FrontChanged,
    /// An event of the cache of this index.
    Cache(usize, CacheEvent),
    /// An event of the volume of this index.
    Volume(usize, VolumeEvent),
    /// An event of the job of this number.
    Job(u64, JobEvent),
    /// An engine has created a flash-only volume, or serves one again.
    FlashAdded(Box<jobs::flash::AddedFlashVolume>),
    /// An engine has finished the first step of a change of options, or has failed.
    FirstStepDone(Box<options::change::FirstStepOutcome>),
    /// A client asks for something.
    Request(ClientRequest),
    /// Another process is to take over, or a client asks whether one could.
    HandOver(Box<handover::HandOverRequest>),
}

/// What a client asks of the loop.
enum ClientRequest {
    /// To change options.
    Change(Box<options::change::ChangeRequest>),
    /// How the configuration files differ from what runs.
    ConfigDiff(options::config_diff::DiffReply),
    /// For a job.
    Begin(Box<jobs::JobRequest>),
    /// To replace a cache by another device.
    Replace(Box<jobs::replace::ReplaceRequest>),
}

/// The phase of the daemon's life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Starting,
    Ready,
    Stopping,
}

/// The state that the loop changes and the control thread reads.
struct Shared {
    phase: Phase,
    /// The loop's configuration; changed by [`Supervisor::set_config`] only.
    config: Arc<Config>,
    table: Table,
    jobs: jobs::JobTable,
    /// How long a stop waits for users.
    stop_timeout: Duration,
    /// Volumes that are moving from one engine to another.
    moves: BTreeMap<usize, jobs::attach_detach::MoveInFlight>,
    /// Warnings about resources that were taken away and are needed.
    warnings: Vec<String>,
}

struct Supervisor {
    line: CommandLine,
    /// The configuration in force.
    config: Arc<Config>,
    /// The devices come from the command line.
    strict: bool,
    notes: PathBuf,
    /// The list of the configured devices for udev, if this daemon keeps one.
    owned: Option<OwnedList>,
    /// What the log has reported of each device.
    said: BTreeMap<String, report::health::LoggedHealth>,
    /// Caches whose devices answer with errors.
    cache_retries: caches::retry_policy::CacheRetries,
    /// Caches whose opening hangs.
    slow_caches: PendingOpens<CacheDevice>,
    /// Backing devices that hang while their superblock is read.
    slow_looks: PendingOpens<BackingSuperblock>,
    /// Backing devices whose opening hangs.
    slow_backings: PendingOpens<BackingDevice>,
    /// Backing devices that are looked for while their volumes are served.
    backing_reconnects: volumes::reconnect::BackingReconnects,
    /// Cache devices that are looked for while their sets have failed.
    cache_reconnects: caches::reconnect::CacheReconnects,
    /// What the log has reported of openings.
    openings: caches::OpeningReports,
    /// Extensions of systemd's time limit for a start or a stop.
    extension: lifecycle::service_timeout::TimeoutExtension,
    /// When the log last named what the start waits for, counted from the start.
    waits_told: Duration,
    shared: Arc<Mutex<Shared>>,
    exports: ExportTable,
    /// Volumes that clients wait for.
    awaited: volumes::early_clients::AwaitedVolumes,
    file_watch: lifecycle::missing_files::FileWatch,
    /// How a stop that a client asked for has ended.
    stop_tracker: lifecycle::stop_request::StopTracker,
    fronts: FrontendManager,
    /// The process that this one takes over from, until it has done so.
    predecessor: Option<Predecessor>,
    /// What the predecessor handed over, or what this process left for itself.
    daemon_state: DaemonState,
    /// Clients from before this process served anything.
    earlier_clients: handover::earlier_clients::EarlierClients,
    /// The progress of a hand-over to another process, or its outcome.
    hand_over: HandOverTracker,
    /// No readiness has been announced yet.
    is_first: bool,
    events: Receiver<Event>,
    sender: Sender<Event>,
    started: Instant,
}

/// What a life of the supervisor begins with.
struct SupervisorParameters {
    config: Config,
    notes: PathBuf,
    /// Where the list for udev is, if this daemon keeps it.
    owned: Option<PathBuf>,
    predecessor: Option<Predecessor>,
    taken: InheritedState,
    /// What is known of the preceding hand-over.
    known: TakeOverReport,
    is_first: bool,
}

#[cfg(test)]
impl SupervisorParameters {
    /// A process without a predecessor, without a notes directory and without a list for udev.
    fn of(config: Config) -> Self {
        Self {
            config,
            notes: PathBuf::from("/nonexistent"),
            owned: None,
            predecessor: None,
            taken: InheritedState::default(),
            known: TakeOverReport::default(),
            is_first: true,
        }
    }
}

/// Why the loop has ended.
enum LoopExit {
    /// The daemon is asked to stop.
    Stop,
    /// Another process is to take over.
    HandOver(Box<Successor>),
}

/// Serves what `line` asks for until a signal ends it or another process takes over. Prints `ready`
/// on standard output and notifies systemd.
///
/// # Errors
/// Wrong configuration, before any device is opened; with devices on the command line, the first
/// that cannot be served; a stop that was not orderly.
pub fn serve(line: CommandLine) -> Result<(), Failure> {
    let predecessor = take_over::begun()?;
    let passed = socket_activation::take()?;
    bcached_uring::memory::return_large_blocks();
    log::init();
    let outcome = serve_logged(line, predecessor, passed);
    // The last lines may explain why the daemon ends.
    log::flush();
    outcome
}

fn serve_logged(
    line: CommandLine,
    predecessor: Option<Predecessor>,
    passed: socket_activation::PassedSockets,
) -> Result<(), Failure> {
    let prepared = prepare(&line, predecessor.is_some());
    if let (Err(failure), Some(predecessor)) = (&prepared, &predecessor) {
        predecessor.cannot(failure);
    }
    let (config, notes, signals) = prepared?;
    oom_score::protect();
    let taken = match &predecessor {
        Some(predecessor) => predecessor.take()?,
        None => InheritedState { passed, ..InheritedState::default() },
    };
    let is_first = predecessor.is_none();
    let progress = if is_first { TakeOverPhase::None } else { TakeOverPhase::UnderWay };
    let known = TakeOverReport { progress, ..TakeOverReport::default() };
    let owned = OwnedList::path_of_this_daemon(line.config.is_none());
    let mut start = SupervisorParameters { config, notes, owned, predecessor, taken, known, is_first };
    loop {
        match live(line.clone(), start, &signals)? {
            RunOutcome::Ended(outcome) => return outcome,
            RunOutcome::Continues(again) => start = *again,
        }
    }
}

/// Does everything that can fail before anything is touched. The predecessor's resources are
/// touched long before the front ends start.
fn prepare(line: &CommandLine, succeeds: bool) -> Result<(Config, PathBuf, Signals), Failure> {
    let config = Config::load(line)?;
    // After the configuration is read: for a mistyped one, only that error is reported.
    match bcached_uring::memory::hold() {
        Ok(()) => tracing::info!(event = "memory-held", "memory is locked"),
        Err(refused) => tracing::info!(event = "memory-not-held", "{refused}"),
    }
    if let Some(certificates) = config.places.tls.certificates().filter(|_| succeeds) {
        certificates.read()?;
    }
    descriptor_limit::provide(&config)?;
    let notes = notes::directory()?;
    if let Some((event, sentence)) = notes::warning(&notes) {
        tracing::warn!(event, "{sentence}");
    }
    let signals = Signals::catch().map_err(|error| no_thread(&error))?;
    Ok((config, notes, signals))
}

fn no_thread(error: &std::io::Error) -> Failure {
    let failure = Failure::new(Kind::Io, "cannot start the control thread").why(error.to_string());
    match rustix::io::Errno::from_io_error(error) {
        Some(rustix::io::Errno::MFILE) => failure.next("raise the limit of open files (`ulimit -n 1024`)"),
        _ => failure,
    }
}

/// Runs one life of the supervisor: from the first socket to the end, or to a failed hand-over.
fn live(
    line: CommandLine,
    mut start: SupervisorParameters,
    signals: &Signals,
) -> Result<RunOutcome, Failure> {
    let (owner, monitor) = (start.taken.passed.control.take(), start.taken.passed.monitor.take());
    let config = &start.config;
    let mut control = ControlServer::bind(&config.control, owner, monitor)?.with_metrics(config.metrics)?;
    // Clients that use another control socket do not reach this daemon.
    tracing::info!(event = "control-listening", "listening for commands on {}", control.path().display());
    let supervisor = Supervisor::new(line, start);
    let heard = supervisor.sender.clone();
    signals.lead_to(move |signal| heard.send(Event::Signal(signal)).is_ok());
    let (shared, fronts) = (Arc::clone(&supervisor.shared), supervisor.fronts.clone());
    let (stop_tracker, hand_over) = (supervisor.stop_tracker.clone(), supervisor.hand_over.clone());
    let handlers = Arc::new(Handlers {
        status: report::status_of(Arc::clone(&shared), fronts.clone(), supervisor.started),
        options: options::options_of(Arc::clone(&shared)),
        change: options::change::ask(Arc::clone(&shared), supervisor.sender.clone()),
        begin: jobs::api::begin(Arc::clone(&shared), supervisor.sender.clone()),
        jobs: jobs::api::all(Arc::clone(&shared)),
        job: jobs::api::one(Arc::clone(&shared)),
        cancel: jobs::cancel::ask(Arc::clone(&shared), supervisor.sender.clone()),
        explain: volumes::explain::ask(Arc::clone(&shared)),
        differences: options::config_diff::ask(supervisor.sender.clone()),
        events: events::ask(),
        take_over: handover::ask(
            Arc::clone(&shared),
            fronts.clone(),
            hand_over.clone(),
            supervisor.sender.clone(),
        ),
        taken_over: handover::taken_over(hand_over.clone()),
        stop: lifecycle::stop_request::stop(
            shared,
            fronts,
            (stop_tracker.clone(), hand_over),
            supervisor.sender.clone(),
        ),
        stopped: lifecycle::stop_request::stopped(stop_tracker),
    });
    let numbers = report::numbers_of(Arc::clone(&supervisor.shared), supervisor.started);
    supervisor.fronts.tell_of(Arc::new(Sysfs::new(numbers, Arc::clone(&handlers))));
    control.start(handlers).map_err(|error| no_thread(&error))?;
    Ok(supervisor.run(control))
}

impl Supervisor {
    fn new(line: CommandLine, start: SupervisorParameters) -> Self {
        let SupervisorParameters { config, notes, owned, predecessor, taken, known, is_first } = start;
        let InheritedState { passed, connections, daemon_state } = taken;
        let (sender, events) = mpsc::channel();
        let waker = sender.clone();
        let strict = !line.caches.is_empty() || !line.backings.is_empty();
        let table = Table::with_said(&config, strict, &daemon_state.said);
        let config = Arc::new(config);
        let stop_timeout = config.stop_timeout;
        let owned = if strict { None } else { owned.map(OwnedList::at) };
        Self {
            line,
            config: Arc::clone(&config),
            strict,
            notes,
            owned,
            said: BTreeMap::new(),
            cache_retries: caches::retry_policy::CacheRetries::default(),
            slow_caches: PendingOpens::default(),
            slow_looks: PendingOpens::default(),
            slow_backings: PendingOpens::default(),
            backing_reconnects: volumes::reconnect::BackingReconnects::default(),
            cache_reconnects: caches::reconnect::CacheReconnects::default(),
            openings: caches::OpeningReports::default(),
            extension: lifecycle::service_timeout::TimeoutExtension::default(),
            waits_told: Duration::ZERO,
            shared: Arc::new(Mutex::new(Shared {
                phase: Phase::Starting,
                config,
                table,
                jobs: jobs::JobTable::default(),
                stop_timeout,
                moves: BTreeMap::new(),
                warnings: Vec::new(),
            })),
            exports: ExportTable::new(),
            awaited: volumes::early_clients::AwaitedVolumes::default(),
            file_watch: lifecycle::missing_files::FileWatch::default(),
            stop_tracker: lifecycle::stop_request::StopTracker::default(),
            fronts: FrontendManager::new(Arc::new(move || drop(waker.send(Event::FrontChanged))), passed.nbd)
                .succeeding(connections, predecessor.as_ref().map(|former| former.pid)),
            predecessor,
            daemon_state,
            earlier_clients: handover::earlier_clients::EarlierClients::default(),
            hand_over: HandOverTracker::begin(known),
            is_first,
            events,
            sender,
            started: Instant::now(),
        }
    }

    /// Checks everything that needs no engine before the first engine starts, because an engine
    /// writes.
    fn run(mut self, mut control: ControlServer) -> RunOutcome {
        let outcome = self.begin().and_then(|()| self.serve_events(&mut control));
        match (outcome, self.predecessor.take()) {
            (Ok(LoopExit::HandOver(successor)), _) => self.hand_over(control, *successor),
            (Err(failure), Some(predecessor)) if !predecessor.has_died() => {
                self.give_back(control, &predecessor, failure)
            }
            (Ok(LoopExit::Stop), Some(predecessor)) if !predecessor.has_died() => {
                self.give_back(control, &predecessor, handover::told_to_end())
            }
            (outcome, _) => {
                // No process takes anything back: close the sockets, including the inherited ones.
                bcached_port::socket::inherited::settle();
                let stop_tracker = self.stop_tracker.clone();
                let ended = outcome.and(self.stop());
                stop_tracker.tell(&ended, &control);
                // Dropping the control server removes its sockets.
                drop(control);
                RunOutcome::Ended(ended)
            }
        }
    }

    fn begin(&mut self) -> Result<(), Failure> {
        options::reload::warn_of(&self.config);
        self.name_exports();
        self.tell_absent();
        self.start_fronts()?;
        self.claim_devices()?;
        self.advance()
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs until a signal arrives, or until a device of the command line is refused.
    fn serve_events(&mut self, control: &mut ControlServer) -> Result<LoopExit, Failure> {
        loop {
            self.announce_if_ready()?;
            if self.shared().phase == Phase::Starting {
                self.extension.tell();
            }
            self.tell_openings();
            self.tell_waits(self.started.elapsed());
            self.look_after_all();
            self.tell_absent();
            self.look_after_what_may_go(control);
            let pending = {
                let shared = self.shared();
                let is_busy = !shared.moves.is_empty()
                    || self.backing_reconnects.is_busy()
                    || self.cache_reconnects.is_busy()
                    || shared.table.caches.iter().any(|cache| cache.is_moving && cache.is_real());
                shared.phase == Phase::Starting || shared.table.is_waiting() || is_busy
            };
            match self.events.recv_timeout(if pending { RETRY } else { HEALTH }) {
                Ok(Event::Signal(Signal::Stop)) => return Ok(LoopExit::Stop),
                Ok(Event::HandOver(request)) => {
                    if let Some(successor) = self.hears(*request) {
                        return Ok(LoopExit::HandOver(Box::new(successor)));
                    }
                }
                Ok(Event::Signal(Signal::Reload)) => self.reload(),
                Ok(Event::Cache(index, event)) => self.cache_event(index, event)?,
                Ok(Event::Volume(index, event)) => self.volume_event(index, event),
                Ok(Event::Job(number, event)) => self.job_event(number, event),
                Ok(Event::FlashAdded(done)) => self.flash_added(*done),
                Ok(Event::FirstStepDone(outcome)) => self.first_step_done(*outcome),
                Ok(Event::Request(asked)) => self.asked(asked),
                // The work is done at the top of each turn.
                Ok(Event::FrontChanged) => {}
                Err(RecvTimeoutError::Timeout) => self.look_after_sets(),
                Err(RecvTimeoutError::Disconnected) => unreachable!("the supervisor holds a sender itself"),
            }
            self.advance()?;
        }
    }

    fn asked(&mut self, asked: ClientRequest) {
        match asked {
            ClientRequest::Change(asked) => self.change(*asked),
            ClientRequest::ConfigDiff(answer) => self.differs(&answer),
            ClientRequest::Begin(asked) => self.begin_job(*asked),
            ClientRequest::Replace(asked) => self.replace(*asked),
        }
    }

    /// Does the periodic work that may be due after any event.
    fn look_after_all(&mut self) {
        self.forget_openings();
        self.apply_options();
        self.look_after_moves();
        self.look_after_returns();
        self.look_after_cache_returns();
        self.go_on_replacing();
        self.take_caches_back();
        self.look_after_arrivals();
        self.divide_memory();
        self.try_ways_again();
        self.look_after_kept();
        self.fronts.look_after_numbers(&self.exports);
    }

    /// Drops devices that were opened for an entry that no longer waits for them. Otherwise their
    /// claims would last as long as the process.
    fn forget_openings(&mut self) {
        let (caches, volumes) = self.shared().table.awaited();
        self.slow_caches.retain(|device| caches.contains(device));
        self.slow_looks.retain(|device| volumes.contains(device));
        self.slow_backings.retain(|device| volumes.contains(device));
    }

    /// Takes every step that is possible now.
    fn advance(&mut self) -> Result<(), Failure> {
        let (caches, volumes) = {
            let shared = self.shared();
            (shared.table.caches.len(), shared.table.volumes.len())
        };
        for index in 0..caches {
            self.try_cache(index);
        }
        for index in 0..volumes {
            self.try_volume(index);
        }
        let (known, is_complete) = self.shared().table.devices();
        if let Some(list) = &mut self.owned {
            list.update(known, is_complete);
        }
        if self.strict
            && self.shared().phase == Phase::Starting
            && let Some(failure) = self.shared().table.first_failure()
        {
            return Err(failure);
        }
        Ok(())
    }
}

/// A failure: the loop did not reach a request in time, or did not finish it. The loop does one
/// thing after another, so the cause is not visible to the client: there may be very many devices,
/// none of them slow.
fn late(what: impl Into<Box<str>>) -> Failure {
    Failure::new(Kind::TimeLimit, what).why(
        "the daemon is busy with other work, or waits for a device; in that case `bcached status` names the device",
    )
}
