//! The orderly stop: clients first, then exports, then engines. Dirty data is never written back
//! here; it is reported instead.

use crate::control_server::Signal;
use crate::engine_error;
use crate::engine_thread::{Engine, EngineEvent};
use crate::supervisor::caches::CacheEvent;
use crate::supervisor::jobs::JobEvent;
use crate::supervisor::lifecycle::stop_request;
use crate::supervisor::report::health;
use crate::supervisor::table::{CacheState, Table};
use crate::supervisor::{Event, Phase, Supervisor};
use bcached_control::failure::{Failure, Kind};
use bcached_control::stop::RemainingDirty;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The interval between looks at the clients while a stop waits for them.
const LOOK: Duration = Duration::from_millis(100);

/// Longest time for pending replies to be sent.
pub const REPLIES_LIMIT: Duration = Duration::from_secs(5);

/// Longest time for an engine to write what a stop writes: leaves and one journal entry, no dirty
/// data.
const ENGINE_LIMIT: Duration = Duration::from_secs(30);

/// A device that owes an answer of this age when a stop begins may be why the stop takes too long.
const SILENT: Duration = Duration::from_secs(1);

/// The state when an engine was told to stop.
#[derive(Default)]
struct StopSnapshot {
    /// The devices that owe an answer, in sentences.
    silent: Vec<String>,
    /// The dirty data. It may have changed since: write-back goes on until the engine handles the
    /// stop.
    dirty: Vec<RemainingDirty>,
}

/// The part of [`ENGINE_LIMIT`] that an engine has however many signals arrive: two in quick
/// succession should not cost a recovery.
const ENGINE_GRACE: Duration = Duration::from_secs(1);

impl Supervisor {
    /// Stops everything.
    pub fn stop(mut self) -> Result<(), Failure> {
        self.shared().phase = Phase::Stopping;
        let _no_systemd = sd_notify::notify(&[sd_notify::NotifyState::Stopping]);
        self.extension.begin_anew();
        tracing::info!(event = "stopping", "stopping");
        self.exports.end_waiting();
        // Their volumes do not come back before the end.
        self.cut_kept("the daemon is stopping and their volumes are not served", |_| true);
        self.wait_for_users();
        self.stop_tracker.cuts(self.fronts.users_of_files());
        // A client that waits for a moving volume would wait forever.
        let entries = self.shared().table.volumes.clone();
        entries.iter().for_each(|entry| self.let_clients_go(entry));
        self.fronts.shutdown(REPLIES_LIMIT);
        let outcome = self.stop_engines();
        if outcome.is_ok() {
            tracing::info!(event = "stopped", "stopped");
        }
        outcome
    }

    /// Gives clients the time to disconnect; a second signal shortens it.
    fn wait_for_users(&mut self) {
        let deadline = Instant::now() + self.config.stop_timeout;
        let mut named = false;
        loop {
            self.extension.tell();
            let users = self.fronts.uses();
            let now = Instant::now();
            if users.is_empty() || now >= deadline {
                return;
            }
            if !named {
                let limit = self.config.stop_timeout.as_secs();
                let users = users.join(", ");
                tracing::info!(event = "stop-waits", "waiting up to {limit} s for clients: {users}");
                named = true;
            }
            match self.events.recv_timeout(LOOK) {
                Ok(Event::Signal(Signal::Stop)) => return,
                // These events are handled, so that no device that opens now is forgotten below.
                Ok(Event::Cache(
                    index,
                    event @ (CacheEvent::Engine(EngineEvent::Opened(_) | EngineEvent::Ended)
                    | CacheEvent::Stopped(_)),
                )) => drop(self.cache_event(index, event)),
                Ok(Event::Job(number, event)) => self.job_event(number, event),
                Ok(Event::FlashAdded(done)) => self.flash_added(*done),
                _ => {}
            }
        }
    }

    /// Stops all engines at the same time. A set that is still opening is waited for first: if it
    /// were cut off during its recovery, the next start would have to do that work. A signal
    /// shortens the wait.
    pub fn stop_engines(&mut self) -> Result<(), Failure> {
        self.extension.begin_anew();
        let began = Instant::now();
        let mut deadline = began + ENGINE_LIMIT;
        let mut hurried = false;
        let caches = self.shared().table.caches.len();
        let begun = (0..caches).filter_map(|index| Some((index, self.begin_stop(index)?)));
        let mut pending: BTreeMap<_, _> = begun.collect();
        let (mut outcome, mut dirty) = (Ok(()), Vec::new());
        while !pending.is_empty() {
            match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::Signal(Signal::Stop)) => {
                    (deadline, hurried) = (deadline.min(began + ENGINE_GRACE), true);
                }
                Ok(Event::Cache(index, CacheEvent::Engine(EngineEvent::Opened(result)))) => {
                    self.cache_opened(index, result);
                    match self.begin_stop(index) {
                        Some(begun) => drop(pending.insert(index, begun)),
                        None => drop(pending.remove(&index)),
                    }
                }
                Ok(Event::Cache(index, CacheEvent::Engine(EngineEvent::Ended))) => {
                    if let Some(begun) = pending.remove(&index) {
                        dirty.extend(begun.dirty);
                        outcome = outcome.and(Err(self.recovers(index, "its thread panicked")));
                    }
                }
                Ok(Event::Cache(index, CacheEvent::Stopped(stopped))) => {
                    pending.remove(&index);
                    dirty.extend(stop_request::dirty_of(&self.shared().table, index, &stopped.volumes));
                    outcome = outcome.and(self.stopped(index, stopped.outcome));
                }
                Ok(Event::Job(number, JobEvent::Ended(outcome))) => self.job_ended(number, outcome),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        let signal = if hurried { ", and another signal arrived" } else { "" };
        let why = format!("no answer for {} s{signal}", began.elapsed().as_secs());
        for (index, StopSnapshot { silent, dirty: then }) in pending {
            dirty.extend(then);
            // An engine that is ending does not report the state of its devices any more.
            let silent = if silent.is_empty() {
                String::new()
            } else {
                format!("; when the stop began: {}", silent.join("; "))
            };
            outcome = outcome.and(Err(self.recovers(index, &format!("{why}{silent}"))));
        }
        for stays in &dirty {
            tracing::info!(event = "dirty-stays", "{}", stays.sentence());
        }
        self.stop_tracker.stays(dirty);
        match self.shared().table.first_failure() {
            Some(failure) if self.strict => outcome.and(Err(failure)),
            _ => outcome,
        }
    }

    /// Tells an engine to stop. `None`: its cache need not be waited for.
    fn begin_stop(&self, index: usize) -> Option<StopSnapshot> {
        let shared = self.shared();
        let engine = match shared.table.caches.get(index).map(|cache| &cache.state) {
            Some(CacheState::Open { engine, .. }) => engine.clone(),
            Some(CacheState::Opening { .. } | CacheState::Ending { .. }) => {
                return Some(StopSnapshot::default());
            }
            _ => return None,
        };
        drop(shared);
        let mut begun = StopSnapshot::default();
        if let Some(status) = engine.status() {
            // It may have been opened a moment ago.
            self.tell_given_up(index, &status, true);
            let shared = self.shared();
            name_stuck_devices(&shared.table, index, &status);
            begun.silent = health::silent_of(&shared.table, index, &status, SILENT);
            begun.dirty = stop_request::dirty_of(&shared.table, index, &status.volumes);
        }
        self.tell_to_stop(index, &engine);
        Some(begun)
    }

    /// Tells an engine to stop. Its end arrives as an event.
    pub fn tell_to_stop(&self, index: usize, engine: &Engine) {
        let sender = self.sender.clone();
        engine.stop(Box::new(move |stopped| {
            drop(sender.send(Event::Cache(index, CacheEvent::Stopped(stopped))));
        }));
    }

    /// Handles an engine that has stopped, in order or not.
    fn stopped(&mut self, index: usize, outcome: Result<(), bcached_engine::Error>) -> Result<(), Failure> {
        let failure =
            outcome.as_ref().err().map(|error| engine_error::of_stop(self.not_stopped(index), error));
        if self.is_ending(index) {
            // It was released or replaced just before, and that is to be kept.
            self.cache_let_go(index, outcome);
        } else {
            self.end_cache(index);
        }
        failure.map_or(Ok(()), Err)
    }

    /// Checks whether the cache was being stopped before the daemon was.
    fn is_ending(&self, index: usize) -> bool {
        matches!(self.shared().table.caches[index].state, CacheState::Ending { .. })
    }

    /// Joins the thread of an engine that has answered and only returns.
    fn end_cache(&self, index: usize) {
        let state = std::mem::replace(&mut self.shared().table.caches[index].state, CacheState::Stopped);
        if let CacheState::Open { thread, .. } | CacheState::Ending { thread } = state {
            let _ended = thread.join();
        }
    }

    /// Returns the failure of a stop after which the next start recovers the set. Nothing else is
    /// known to be wrong with it.
    fn recovers(&self, index: usize, why: &str) -> Failure {
        Failure::new(Kind::Io, self.not_stopped(index)).why(why).next(engine_error::RECOVERS)
    }

    fn not_stopped(&self, index: usize) -> String {
        let shared = self.shared();
        let cache = &shared.table.caches[index];
        let opening =
            if matches!(cache.state, CacheState::Opening { .. }) { " while it was opening" } else { "" };
        format!("the cache on {} could not be stopped in order{opening}", cache.device)
    }
}

/// Logs the devices that hang. A stop waits for operations in flight, so the user should know why
/// it takes long.
fn name_stuck_devices(table: &Table, cache: usize, status: &bcached_engine::Status) {
    let limit = ENGINE_LIMIT.as_secs();
    for told in health::stuck_of(table, cache, status) {
        tracing::warn!(event = "stop-waits", "waiting up to {limit} s for a device: {told}");
    }
}
