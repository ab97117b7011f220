//! A stop that somebody asks for by command: he is told what stays dirty where, and how it ends.
//!
//! The process ends with its last answer: it waits a moment for who asks how the stop has ended.

use crate::control_server::{AskStop, AskStopped, Signal};
use crate::engine_thread::Engine;
use crate::supervisor::fronts::Fronts;
use crate::supervisor::handover::Course;
use crate::supervisor::report::volume_names;
use crate::supervisor::table::{CacheEntry, Table};
use crate::supervisor::{Event, Phase, Shared};
use bcached_control::failure::{Failure, Kind};
use bcached_control::stop::{DirtyStays, Stopping};
use bcached_engine::VolumeInfo;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How long an answer waits for the end: less than the client waits for it.
const LOOK: Duration = Duration::from_secs(5);

/// How long the process waits for who is to hear how it has ended, and how long an answer may take to go out.
const HEARS: Duration = Duration::from_secs(2);
const ANSWERS: Duration = Duration::from_millis(50);

/// How a stop by command has ended. Clones are the same one.
#[derive(Clone, Default)]
pub struct Ending(Arc<(Mutex<Told>, Condvar)>);

#[derive(Default)]
struct Told {
    /// What was there when somebody asked.
    asked: Option<Stopping>,
    ended: Option<Result<(), Failure>>,
    /// Who was cut off.
    cut: Vec<String>,
    /// What is dirty, since everything has been stopped.
    stays: Vec<DirtyStays>,
    is_heard: bool,
}

impl Ending {
    /// Who has open what is about to end, and has not gone.
    pub fn cuts(&self, users: Vec<String>) {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).cut = users;
    }

    /// What the engines have left dirty: write-back went on, and users wrote, while these were waited for.
    pub fn stays(&self, dirty: Vec<DirtyStays>) {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).stays = dirty;
    }

    /// Everything has been stopped, or not. Waits for who asked, so that he hears it.
    pub fn tell(&self, outcome: &Result<(), Failure>) {
        let (told, rung) = &*self.0;
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        told.ended = Some(outcome.clone());
        rung.notify_all();
        if told.asked.is_none() {
            return;
        }
        let waited = rung.wait_timeout_while(told, HEARS, |told| !told.is_heard);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        std::thread::sleep(ANSWERS);
    }
}

/// What the control thread calls for a stop.
pub fn stop(
    shared: Arc<Mutex<Shared>>,
    fronts: Fronts,
    (ending, course): (Ending, Course),
    events: Sender<Event>,
) -> AskStop {
    Box::new(move |asked, uid| {
        let timeout = shared.lock().unwrap_or_else(PoisonError::into_inner).stop_timeout;
        let now = Stopping {
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
        // It would end that, and the process that goes on then would have heard of no stop.
        if course.is_under_way() {
            return Err(Failure::new(Kind::Busy, "the daemon cannot be stopped just now")
                .why("another process takes over from it")
                .next("ask again when that has ended"));
        }
        {
            let mut told = ending.0.0.lock().unwrap_or_else(PoisonError::into_inner);
            // Who asks again while it goes on hears of the same, and of its first moment.
            if let Some(first) = &told.asked {
                return Ok(first.clone());
            }
            told.asked = Some(now.clone());
        }
        tracing::info!(event = "stop-asked", uid = crate::supervisor::jobs::user(uid), "stop");
        // A second signal would cut the waiting short.
        let is_stopping = shared.lock().unwrap_or_else(PoisonError::into_inner).phase == Phase::Stopping;
        if !is_stopping {
            let _ending = events.send(Event::Signal(Signal::Stop));
        }
        Ok(now)
    })
}

/// What it calls to hear how far that is.
pub fn stopped(ending: Ending) -> AskStopped {
    Box::new(move || {
        let (told, rung) = &*ending.0;
        let told = told.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = rung.wait_timeout_while(told, LOOK, |told| told.asked.is_some() && told.ended.is_none());
        let (mut told, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let mut stopping = told.asked.clone().ok_or_else(|| {
            Failure::new(Kind::NotFound, "nobody has asked for a stop").next("`bcached stop` does")
        })?;
        if let Some(ended) = &told.ended {
            stopping.ended = true;
            stopping.failure = ended.as_ref().err().map(Failure::to_error);
            stopping.cut.clone_from(&told.cut);
            stopping.dirty.clone_from(&told.stays);
            told.is_heard = true;
            rung.notify_all();
        }
        Ok(stopping)
    })
}

/// What is dirty in every open cache. Holds no lock while it waits for the engines.
fn dirty(shared: &Mutex<Shared>) -> Vec<DirtyStays> {
    let engines: Vec<Option<Engine>> = {
        let shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.table.caches.iter().map(CacheEntry::engine).collect()
    };
    let statuses = Engine::status_of_all(&engines);
    let shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
    let each = statuses.iter().enumerate().filter_map(|(index, status)| Some((index, status.as_ref()?)));
    each.flat_map(|(index, status)| dirty_of(&shared.table, index, &status.volumes)).collect()
}

/// What is dirty in one cache of volumes with backing devices that are served.
pub fn dirty_of(table: &Table, cache: usize, volumes: &[VolumeInfo]) -> Vec<DirtyStays> {
    let dirty = volumes.iter().filter(|info| info.may_be_dirty() && !info.flash_only);
    let stays = dirty.map(|info| DirtyStays {
        volume: volume_names::name_of(&table.volumes, cache, info.id, volumes),
        dirty_bytes: info.dirty_sectors * 512,
        at_least: !info.is_counted,
        device: table.caches[cache].device.clone(),
    });
    stays.collect()
}
