//! Hand-over: another process takes over from this one, or this one has taken over. This is the
//! loop's part of it; the rest is in [`crate::take_over`].

pub mod earlier_clients;

use crate::control_server::{ControlServer, TakeOverHandler, TakeOverProgressHandler};
use crate::supervisor::devices::liveness;
use crate::supervisor::fronts::FrontendManager;
use crate::supervisor::jobs::user;
use crate::supervisor::lifecycle::shutdown::REPLIES_LIMIT;
use crate::supervisor::table::{Table, VolumeEntry, VolumeState};
use crate::supervisor::{Event, Phase, Shared, Supervisor, SupervisorParameters};
use crate::take_over::{DaemonState, Predecessor, ReleasedState, Successor};
use bcached_config::Config;
use bcached_control::failure::{Failure, Kind};
use bcached_control::take_over::{TakeOverPhase, TakeOverReport, TakeOverRequest};
use bcached_uring::device::claim;
use std::path::Path;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest time that an answer waits for the end: less than the client waits for it.
const LOOK: Duration = Duration::from_secs(5);

/// Longest time that a caller of a dry run waits: less than the client waits for it.
const CHECK_LIMIT: Duration = Duration::from_secs(8);

/// The part of [`CHECK_LIMIT`] that the program has at least, to read its configuration.
const TRIAL_LIMIT: Duration = Duration::from_secs(1);

/// Longest time for the release of block devices after their engines have ended.
const DEVICES_LIMIT: Duration = Duration::from_secs(5);

/// How long clients wait in a hand-over for volumes that were not served before it.
const OTHERS_LIMIT: Duration = Duration::from_millis(250);

/// The advice for a request that comes while the daemon stops.
const START_AFTER: &str = "start the other program when this daemon has stopped";

/// The progress of a hand-over. Clones share it.
#[derive(Clone)]
pub struct HandOverTracker(Arc<(Mutex<TakeOverReport>, Condvar)>);

impl HandOverTracker {
    /// Begins with what is known when a process starts, or goes on.
    pub fn begin(known: TakeOverReport) -> Self {
        let known = TakeOverReport { pid: std::process::id(), ..known };
        Self(Arc::new((Mutex::new(known), Condvar::new())))
    }

    /// Returns the progress of a process that was to be replaced, and is not.
    pub fn failed(failure: &Failure) -> TakeOverReport {
        let failure = Some(failure.to_error());
        TakeOverReport { progress: TakeOverPhase::Failed, failure, ..TakeOverReport::default() }
    }

    fn set(&self, now: TakeOverReport) {
        *self.lock() = TakeOverReport { pid: std::process::id(), ..now };
        self.0.1.notify_all();
    }

    /// Checks whether another process takes over, or this one does and the former one may still
    /// take everything back.
    pub fn is_under_way(&self) -> bool {
        let now = self.lock();
        now.progress == TakeOverPhase::UnderWay && !now.former_died
    }

    /// Notes that the former process has died: it cannot take anything back from this one.
    pub fn loses_former(&self) {
        self.lock().former_died = true;
    }

    fn lock(&self) -> MutexGuard<'_, TakeOverReport> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request to the process that may hand over.
pub enum HandOverRequest {
    /// Check whether it could hand over.
    Check(Sender<Result<(), Failure>>),
    /// Hand over.
    HandOver(Successor),
}

/// Returns the control thread's function that requests a hand-over.
pub fn ask(
    shared: Arc<Mutex<Shared>>,
    fronts: FrontendManager,
    hand_over: HandOverTracker,
    events: Sender<Event>,
) -> TakeOverHandler {
    Box::new(move |asked, uid| {
        check(&asked, &shared, &fronts)?;
        let reconnect = fronts.reconnect();
        let now = |progress| TakeOverReport {
            progress,
            pid: std::process::id(),
            reconnect: reconnect.clone(),
            ..TakeOverReport::default()
        };
        if asked.dry_run {
            tracing::info!(
                event = "take-over-tried",
                uid = user(uid),
                "checking whether {} could take over (dry run)",
                asked.program.display()
            );
            return would(&asked, &shared, &events).map(|()| now(TakeOverPhase::WouldBe));
        }
        {
            let mut hand_over = hand_over.lock();
            if hand_over.progress == TakeOverPhase::UnderWay {
                return Ok(hand_over.clone());
            }
            *hand_over = now(TakeOverPhase::UnderWay);
        }
        tracing::info!(
            event = "take-over-asked",
            uid = user(uid),
            "take-over requested: {}",
            asked.program.display()
        );
        // No process is started in vain.
        let successor = liveness::check(&shared).and_then(|()| {
            let successor = Successor::start(&asked.program)?;
            let (program, version) = (asked.program.display(), &successor.version);
            tracing::info!(
                event = "successor-started",
                "started {program} (bcached {version}), which is to take over"
            );
            Ok(successor)
        });
        let begun = successor.and_then(|successor| {
            // As late as possible: from here on clients wait.
            liveness::prove(&shared)?;
            let gone = |_| Failure::new(Kind::NotFound, "the daemon is stopping").next(START_AFTER);
            events.send(Event::HandOver(Box::new(HandOverRequest::HandOver(successor)))).map_err(gone)
        });
        if let Err(failure) = begun {
            tracing::error!(event = "take-over-failed", "{failure}");
            hand_over.set(HandOverTracker::failed(&failure));
            return Err(failure);
        }
        Ok(now(TakeOverPhase::UnderWay))
    })
}

/// Checks whether a hand-over could succeed: the devices answer, the files describe what is served,
/// and the program runs and understands them. The program is ended then.
fn would(asked: &TakeOverRequest, shared: &Mutex<Shared>, events: &Sender<Event>) -> Result<(), Failure> {
    let until = Instant::now() + CHECK_LIMIT;
    let left = || until.saturating_duration_since(Instant::now());
    liveness::prove(shared)?;
    let (answer, answered) = mpsc::channel();
    let _refused_below = events.send(Event::HandOver(Box::new(HandOverRequest::Check(answer))));
    let late = |_| {
        Err(crate::supervisor::late("the daemon did not handle the request in time").next("try again later"))
    };
    answered.recv_timeout(left()).unwrap_or_else(late)?;
    Successor::tries(&asked.program, left().max(TRIAL_LIMIT))
}

/// Returns the control thread's function that asks for the progress.
pub fn taken_over(hand_over: HandOverTracker) -> TakeOverProgressHandler {
    Box::new(move || {
        let is_under_way = |now: &mut TakeOverReport| now.progress == TakeOverPhase::UnderWay;
        let waited = hand_over.0.1.wait_timeout_while(hand_over.lock(), LOOK, is_under_way);
        let (now, _) = waited.unwrap_or_else(PoisonError::into_inner);
        Ok(now.clone())
    })
}

fn check(asked: &TakeOverRequest, shared: &Mutex<Shared>, fronts: &FrontendManager) -> Result<(), Failure> {
    let phase = shared.lock().unwrap_or_else(PoisonError::into_inner).phase;
    match phase {
        Phase::Ready => {}
        Phase::Starting => {
            return Err(
                cannot(Kind::Busy, "it is still starting".to_owned()).next("try again when it is ready")
            );
        }
        Phase::Stopping => {
            return Err(cannot(Kind::Io, "it is stopping".to_owned()).next(START_AFTER));
        }
    }
    let program = &asked.program;
    if !program.is_absolute() || !program.is_file() {
        let what = format!("there is no program {}", program.display());
        return Err(Failure::new(Kind::Usage, what).next("give its absolute path"));
    }
    check_unused(fronts)
}

/// Checks that no client uses what the other process cannot take over.
fn check_unused(fronts: &FrontendManager) -> Result<(), Failure> {
    let users = fronts.users_of_files();
    if users.is_empty() {
        return Ok(());
    }
    Err(cannot(
        Kind::InUse,
        format!("clients use mounts or devices that end with the daemon: {}", users.join(", ")),
    )
    .next("unmount or close them first: FUSE mounts, and block devices other than ublk's"))
}

pub fn cannot(kind: Kind, why: String) -> Failure {
    Failure::new(kind, "no process can take over from this daemon now").why(why)
}

/// Returns the failure of a process that was told to end while it was to take over. Its sockets are
/// those of the process that goes on.
pub fn told_to_end() -> Failure {
    Failure::new(Kind::Io, "the process that was to take over was told to stop")
}

/// Returns the names of the served volumes.
fn served(volumes: &[VolumeEntry]) -> Vec<String> {
    let are = volumes.iter().filter(|entry| matches!(entry.state, VolumeState::Served(_)));
    are.map(|entry| entry.display_name().to_owned()).collect()
}

/// How a process has ended, or that it goes on.
pub enum RunOutcome {
    Ended(Result<(), Failure>),
    /// Another process was to take over and has not: what this one goes on with.
    Continues(Box<SupervisorParameters>),
}

impl Supervisor {
    /// Handles a request. Returns the process that takes over, if one does.
    pub fn hears(&self, request: HandOverRequest) -> Option<Successor> {
        match request {
            // If it is dropped, it ends.
            HandOverRequest::HandOver(successor) => self.may_hand_over().then_some(successor),
            HandOverRequest::Check(answer) => {
                let checked = self.check_files().and_then(|files| self.check_to_hand_over(files.as_ref()));
                let _gone = answer.send(checked);
                None
            }
        }
    }

    /// Checks what the other process would find out by itself: it can start with what the files
    /// say, if there are any.
    fn check_files(&self) -> Result<Option<Config>, Failure> {
        if self.strict {
            return Ok(None);
        }
        let files = self.read_with(None)?;
        self.read_certificates(&files)?;
        Ok(Some(files))
    }

    fn check_to_hand_over(&self, files: Option<&Config>) -> Result<(), Failure> {
        check_unused(&self.fronts)?;
        liveness::check(&self.shared)?;
        self.check_comes_again(files)
    }

    /// Checks again what was checked at the request, since the other process may have taken long to
    /// read its configuration. On failure the requester learns why, and nothing has changed.
    fn may_hand_over(&self) -> bool {
        // If they cannot be read, the requester has been told, or is about to be.
        let files = self.read_with(None).ok();
        let checked = self.check_to_hand_over(files.as_ref());
        if let Err(failure) = &checked {
            tracing::error!(event = "take-over-failed", "{failure}");
            self.hand_over.set(HandOverTracker::failed(failure));
        }
        checked.is_ok()
    }

    /// Checks that the next process, which may be this one again, can find all that is served: it
    /// is in the files, and where they say.
    fn check_comes_again(&self, files: Option<&Config>) -> Result<(), Failure> {
        let shared = self.shared();
        let volumes = shared.table.volumes.iter();
        let volumes = volumes.filter(|entry| matches!(entry.state, VolumeState::Served(_)));
        let caches = shared.table.caches.iter().filter(|cache| cache.engine().is_some());
        let backings = volumes.clone().filter_map(|entry| Some((entry.backing.as_deref()?, entry.opened?)));
        let devices = caches.filter_map(|cache| Some((cache.device.as_str(), cache.opened?)));
        let elsewhere = backings.chain(devices).find(|(path, opened)| {
            path.starts_with('/') && !opened.is_gone() && !opened.is_at(Path::new(path))
        });
        if let Some((path, _)) = elsewhere {
            return Err(cannot(Kind::Io, format!("{path} no longer leads to the device that is served"))
                .next("make it lead to that device again, or stop the daemon, which gives the device up"));
        }
        let names: Vec<_> = volumes.filter(|entry| entry.backing.is_some()).cloned().collect();
        drop(shared);
        let Some(files) = files else { return Ok(()) };
        let is_named = |entry: &&VolumeEntry| files.volumes.iter().any(|said| said.name == entry.name);
        match names.iter().find(|entry| !self.strict && !is_named(entry)) {
            None => Ok(()),
            Some(gone) => {
                let name = gone.display_name();
                Err(cannot(Kind::Io, format!("the configuration no longer has the volume {name}"))
                    .next(format!("run `bcached remove {name}` first, or restore its section")))
            }
        }
    }

    /// Hands everything over to another process, or takes it back if that fails.
    pub fn hand_over(self, control: ControlServer, successor: Successor) -> RunOutcome {
        tracing::info!(event = "handing-over", "handing over to another process");
        self.exports.end_waiting();
        let (config, notes, hand_over) =
            (self.config_to_go_on_with(), self.notes.clone(), self.hand_over.clone());
        let owned = self.owned.as_ref().map(|list| list.path().to_owned());
        let (released, left) = self.leave(control);
        match left.and_then(|()| successor.take(&released)) {
            Ok(()) => {
                tracing::info!(event = "handed-over", "another process has taken over");
                RunOutcome::Ended(Ok(()))
            }
            Err(failure) => {
                tracing::error!(event = "take-over-failed", "{failure}");
                let known = HandOverTracker::failed(&failure);
                // The requester that waits for the end has asked this process as it was.
                hand_over.set(known.clone());
                match released.take_back() {
                    Ok(taken) => {
                        let predecessor = None;
                        let again = SupervisorParameters {
                            config,
                            notes,
                            owned,
                            predecessor,
                            taken,
                            known,
                            is_first: false,
                        };
                        RunOutcome::Continues(Box::new(again))
                    }
                    Err(error) => {
                        RunOutcome::Ended(Err(Failure::new(Kind::Io, "this daemon cannot continue either")
                            .why(error.to_string())))
                    }
                }
            }
        }
    }

    /// Gives everything back, because this process cannot take over. The former process goes on
    /// with what this one leaves unchanged.
    pub fn give_back(
        self,
        control: ControlServer,
        predecessor: &Predecessor,
        failure: Failure,
    ) -> RunOutcome {
        tracing::error!(event = "take-over-failed", "{failure}");
        let _left = self.leave(control);
        predecessor.cannot(&failure);
        RunOutcome::Ended(Err(failure))
    }

    /// Ends everything here, and takes nothing away from clients. The second value says whether the
    /// sets were closed.
    fn leave(mut self, control: ControlServer) -> (ReleasedState, Result<(), Failure>) {
        let since = Instant::now();
        let (entries, said) = {
            let mut shared = self.shared();
            shared.phase = Phase::Stopping;
            (shared.table.volumes.clone(), shared.table.said())
        };
        let (served, reconnect) = (served(&entries), self.fronts.reconnect());
        let claims = claim::live();
        let control = control.leave();
        // A client that waits for a moving volume would wait forever.
        entries.iter().for_each(|entry| self.let_clients_go(entry));
        let fronts = self.fronts.leave(REPLIES_LIMIT);
        self.strict = false;
        let mut closed = self.stop_engines();
        if !fronts.ublk.is_none_or(|ublk| ublk.wait(DEVICES_LIMIT)) {
            let what = format!("a block device was not released within {} s", DEVICES_LIMIT.as_secs());
            closed = closed.and(Err(Failure::new(Kind::Io, what)));
        }
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let name = |entry: &VolumeEntry| Some((entry.uuid?.to_string(), entry.display_name().to_owned()));
        let names = entries.iter().filter_map(name).collect();
        let daemon_state = DaemonState { served, names, said, version, reconnect, paused_seconds: 0.0 };
        (ReleasedState { claims, control, nbd: fronts.nbd, daemon_state, since }, closed)
    }

    /// Checks whether all is served that the former process served, or this one before it was to be
    /// replaced. Other volumes are waited for only briefly, because clients of all volumes would
    /// wait for them, too.
    pub fn all_is_back(&self, table: &Table, elapsed: Duration) -> bool {
        let waits =
            self.is_first || self.strict || self.daemon_state.served.is_empty() || elapsed < OTHERS_LIMIT;
        !waits && self.missing(table).is_empty()
    }

    /// Returns the volumes that were served before, and are not now.
    pub fn missing(&self, table: &Table) -> Vec<String> {
        let now = served(&table.volumes);
        self.daemon_state.served.iter().filter(|name| !now.contains(name)).cloned().collect()
    }

    /// Ends the hand-over when everything is served that is going to be: tells the former process,
    /// and resumes its clients.
    ///
    /// # Errors
    /// Not all that the former process served is served here.
    pub fn confirm(&mut self) -> Result<(), Failure> {
        let missing = self.missing(&self.shared().table);
        let died = self.predecessor.as_ref().is_some_and(Predecessor::has_died);
        if self.predecessor.is_some() && !died && !missing.is_empty() {
            let mut told = self.shared().table.not_served();
            if told.is_empty() {
                told.push("the configuration no longer names them".to_owned());
            }
            let what = format!("not all volumes are served as before: {}", missing.join(", "));
            return Err(Failure::new(Kind::Io, what).why(told.join("; ")));
        }
        let former = self.predecessor.take();
        former.iter().for_each(Predecessor::ready);
        self.earlier_clients.ready = Some(Instant::now());
        self.look_after_kept();
        self.fronts.open();
        let connections = self.fronts.resumed();
        if let Some(Predecessor { pid, .. }) = former {
            let DaemonState { version, paused_seconds, reconnect, .. } = self.daemon_state.clone();
            let paused_seconds = paused_seconds + self.started.elapsed().as_secs_f64();
            let of_version = if version.is_empty() { String::new() } else { format!(" (bcached {version})") };
            tracing::info!(
                event = "taken-over",
                "took over from process {pid}{of_version}: clients waited for {paused_seconds:.3} s; \
                 NBD connections that continue: {connections}"
            );
            self.hand_over.set(TakeOverReport {
                progress: TakeOverPhase::Done,
                former_pid: Some(pid),
                former_version: Some(version).filter(|version| !version.is_empty()),
                former_died: died,
                paused_seconds: Some(paused_seconds),
                connections,
                reconnect,
                ..TakeOverReport::default()
            });
        }
        bcached_port::socket::inherited::settle();
        Ok(())
    }
}
