//! A stop that a user requests by command. The user is told which dirty data stays where, and how
//! the stop ends.
//!
//! The process ends after its last answer: it waits a moment for each client that has requested the
//! stop and asks how it has ended.

use crate::control_server::{ControlServer, Signal, StopHandler, StopProgressHandler};
use crate::engine_thread::Engine;
use crate::supervisor::fronts::FrontendManager;
use crate::supervisor::handover::HandOverTracker;
use crate::supervisor::report::volume_names;
use crate::supervisor::table::{CacheEntry, Table};
use crate::supervisor::{Event, Phase, Shared};
use bcached_control::failure::{Failure, Kind};
use bcached_control::stop::{RemainingDirty, StopReport};
use bcached_engine::VolumeInfo;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Longest time that an answer waits for the end: less than the client waits for it.
const LOOK: Duration = Duration::from_secs(5);

/// How long the process waits for the clients to ask how it has ended, and how long the answers may
/// take to be sent.
const HEARS: Duration = Duration::from_secs(2);
const ANSWERS: Duration = Duration::from_secs(2);

/// How a stop by command has ended. Clones share it.
#[derive(Clone, Default)]
pub struct StopTracker(Arc<(Mutex<StopState>, Condvar)>);

#[derive(Default)]
struct StopState {
    /// The state when the stop was requested.
    asked: Option<StopReport>,
    ended: Option<Result<(), Failure>>,
    /// The clients that were cut off.
    cut: Vec<String>,
    /// The dirty data after everything was stopped.
    stays: Vec<RemainingDirty>,
    /// Number of requests for the stop whose clients have not been told how it has ended. Some of
    /// them never ask.
    unheard: u32,
}

impl StopState {
    /// Returns the state when the stop was first requested and, if it has ended, how. `None`: no
    /// stop was requested.
    fn report(&self) -> Option<StopReport> {
        let mut report = self.asked.clone()?;
        if let Some(ended) = &self.ended {
            report.ended = true;
            report.failure = ended.as_ref().err().map(Failure::to_error);
            report.cut.clone_from(&self.cut);
            report.dirty.clone_from(&self.stays);
        }
        Some(report)
    }
}

impl StopTracker {
    fn lock(&self) -> MutexGuard<'_, StopState> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that one of the requesters has its final answer.
    fn is_heard(&self) {
        let mut told = self.lock();
        told.unheard = told.unheard.saturating_sub(1);
        self.0.1.notify_all();
    }

    /// Records the clients that still have open what is about to end.
    pub fn cuts(&self, users: Vec<String>) {
        self.lock().cut = users;
    }

    /// Records what the engines have left dirty: write-back went on, and clients wrote, while the
    /// stop waited for clients.
    pub fn stays(&self, dirty: Vec<RemainingDirty>) {
        self.lock().stays = dirty;
    }

    /// Publishes the outcome of the stop. Waits for its requesters to hear it, if there are any,
    /// and then for `control` to send its answers, among them the last events to their followers.
    pub fn tell(&self, outcome: &Result<(), Failure>, control: &ControlServer) {
        let mut told = self.lock();
        told.ended = Some(outcome.clone());
        self.0.1.notify_all();
        let waited = self.0.1.wait_timeout_while(told, HEARS, |told| told.unheard > 0);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        control.finish(ANSWERS);
    }
}

/// Returns the control thread's function that requests a stop.
pub fn stop(
    shared: Arc<Mutex<Shared>>,
    fronts: FrontendManager,
    (stop_tracker, hand_over): (StopTracker, HandOverTracker),
    events: Sender<Event>,
) -> StopHandler {
    Box::new(move |asked, uid| {
        // Before anything that takes time: the stop may be ending.
        if !asked.dry_run {
            stop_tracker.lock().unheard += 1;
        }
        let timeout = shared.lock().unwrap_or_else(PoisonError::into_inner).stop_timeout;
        let now = StopReport {
            pid: Some(std::process::id()),
            dry_run: asked.dry_run,
            already: false,
            ended: false,
            stop_timeout_seconds: timeout.as_secs(),
            users: fronts.uses(),
            dirty: dirty(&shared),
            cut: Vec::new(),
            failure: None,
        };
        if asked.dry_run {
            return Ok(now);
        }
        // A stop would end the hand-over, and the process that goes on then would know of no stop.
        if hand_over.is_under_way() {
            stop_tracker.is_heard();
            return Err(Failure::new(Kind::Busy, "the daemon cannot be stopped now")
                .why("another process is taking over from it")
                .next("try again when the take-over has ended"));
        }
        {
            let mut told = stop_tracker.lock();
            // A repeated request gets the same answer, with the state at the first one, or at the
            // end.
            if let Some(report) = told.report() {
                drop(told);
                if report.ended {
                    stop_tracker.is_heard();
                }
                return Ok(report);
            }
            told.asked = Some(now.clone());
        }
        tracing::info!(event = "stop-asked", uid = crate::supervisor::jobs::user(uid), "stop");
        // A second signal would cut the wait for clients short.
        let is_stopping = shared.lock().unwrap_or_else(PoisonError::into_inner).phase == Phase::Stopping;
        if !is_stopping {
            let _ending = events.send(Event::Signal(Signal::Stop));
        }
        Ok(now)
    })
}

/// Returns the control thread's function that asks how the stop has ended.
pub fn stopped(stop_tracker: StopTracker) -> StopProgressHandler {
    Box::new(move || {
        let (told, rung) = &*stop_tracker.0;
        let told = told.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = rung.wait_timeout_while(told, LOOK, |told| told.asked.is_some() && told.ended.is_none());
        let (told, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let report = told.report();
        drop(told);
        let report = report.ok_or_else(|| {
            Failure::new(Kind::NotFound, "no stop was requested").next("`bcached stop` requests one")
        })?;
        if report.ended {
            stop_tracker.is_heard();
        }
        Ok(report)
    })
}

/// Returns the dirty data in every open cache. Holds no lock while it waits for the engines.
fn dirty(shared: &Mutex<Shared>) -> Vec<RemainingDirty> {
    let engines: Vec<Option<Engine>> = {
        let shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.table.caches.iter().map(CacheEntry::engine).collect()
    };
    let statuses = Engine::status_of_all(&engines);
    let shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
    let each = statuses.iter().enumerate().filter_map(|(index, status)| Some((index, status.as_ref()?)));
    each.flat_map(|(index, status)| dirty_of(&shared.table, index, &status.volumes)).collect()
}

/// Returns the dirty data in one cache, of served volumes that have backing devices.
pub fn dirty_of(table: &Table, cache: usize, volumes: &[VolumeInfo]) -> Vec<RemainingDirty> {
    let dirty = volumes.iter().filter(|info| info.may_be_dirty() && !info.flash_only);
    let stays = dirty.map(|info| RemainingDirty {
        volume: volume_names::name_of(&table.volumes, cache, info.id, volumes),
        dirty_bytes: info.dirty_sectors * 512,
        at_least: !info.is_counted,
        device: table.caches[cache].device.clone(),
    });
    stays.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the process ended before a client asked how it had ended, because it had told
    /// that to an earlier client, which had given up waiting.
    #[test]
    fn the_process_waits_for_each_client_that_has_requested_the_stop() {
        let stop_tracker = StopTracker::default();
        let unheard = || stop_tracker.lock().unheard;
        let asked = StopReport {
            pid: None,
            dry_run: false,
            already: false,
            ended: false,
            stop_timeout_seconds: 0,
            users: Vec::new(),
            dirty: Vec::new(),
            cut: Vec::new(),
            failure: None,
        };
        {
            let mut told = stop_tracker.0.0.lock().expect("no panic");
            (told.asked, told.ended, told.unheard) = (Some(asked), Some(Ok(())), 2);
        }
        let ask = stopped(stop_tracker.clone());
        for left in [1, 0, 0] {
            assert!(ask().expect("a stop was requested").ended);
            assert_eq!(unheard(), left);
        }
    }
}
