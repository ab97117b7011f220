//! Caches: from a name to a device, an engine and an open set, and what happens to it afterwards.

pub mod reconnect;
pub mod replaced;
pub mod retry_policy;

use crate::engine_thread::{self, Engine, EngineEvent, EngineParameters, NoteOutcome, OpenedSet, StoppedSet};
use crate::supervisor::devices::open_timeout::OpenError;
use crate::supervisor::jobs::replace_steps;
use crate::supervisor::lifecycle::memory_budget::NodeMemory;
use crate::supervisor::options::Completion;
use crate::supervisor::options::owner::no_cache;
use crate::supervisor::options::pending_settings::RequestId;
use crate::supervisor::report::health;
use crate::supervisor::report::progress_of;
use crate::supervisor::report::reasons;
use crate::supervisor::report::volume_names;
use crate::supervisor::table::{CacheEntry, CacheState};
use crate::supervisor::volumes::placement::UnservedReason;
use crate::supervisor::{Event, Phase, Supervisor};
use bcached_config::NO_CACHE;
use bcached_control::failure::{Failure, Kind};
use bcached_engine::{DiscardState, Error, OpenProgress, Options, Settings, Status};
use bcached_format::Uuid;
use bcached_offline::devices::{self, CacheDevice};
use bcached_offline::notes;
use bcached_uring::NoteContents;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How often the log reports an opening that is still in progress.
const OPENING_TOLD: Duration = Duration::from_secs(10);

/// An event of a cache.
pub enum CacheEvent {
    /// News from its engine.
    Engine(EngineEvent),
    /// Its engine has stopped.
    Stopped(StoppedSet),
    /// Its engine has written this requested value to the superblock, or has refused it (true).
    SettingsSettled(RequestId, bool),
    /// Its engine has taken up the returned device. True if unflushed writes may be lost.
    Returned(Box<Result<bool, Error>>),
    /// Its set, whose device is gone, has tried to write to it.
    Probed,
    /// Its engine has changed its memory for nodes to this, in bytes, or keeps what it had.
    NodesChanged(Option<usize>),
    /// A client cancels the replacement of this former device.
    StopReplacing,
}

impl Supervisor {
    /// Handles an event of the cache of this index.
    pub fn cache_event(&mut self, index: usize, event: CacheEvent) -> Result<(), Failure> {
        match event {
            CacheEvent::Engine(EngineEvent::Opened(result)) => self.cache_opened(index, result),
            CacheEvent::Engine(EngineEvent::Ended) => self.cache_ended(index)?,
            CacheEvent::Engine(EngineEvent::Failed) => self.look_after_sets(),
            CacheEvent::Engine(EngineEvent::Recovered) => self.set_works_again(index),
            CacheEvent::Stopped(stopped) => self.cache_let_go(index, stopped.outcome),
            CacheEvent::SettingsSettled(request, refused) => self.settings_settled(index, &request, refused),
            CacheEvent::Returned(taken) => self.cache_returned(index, *taken),
            CacheEvent::Probed => self.cache_proved(index),
            CacheEvent::NodesChanged(has) => self.nodes_changed(index, has),
            CacheEvent::StopReplacing => self.stop_replacing(index, replace_steps::cancelled()),
        }
        Ok(())
    }

    /// Opens the cache's device, if the cache waits for it, and starts its engine.
    pub fn try_cache(&mut self, index: usize) {
        let device = match self.shared().table.caches.get(index) {
            Some(CacheEntry { state: CacheState::Waiting(_), device, .. }) => device.clone(),
            _ => return,
        };
        if !self.cache_retries.is_due(index) {
            return;
        }
        let state = match self.slow_caches.open(&device, self.cache_retries.opens(index)) {
            Err(OpenError::NoAnswer(failure)) => {
                self.cache_retries.soon(index);
                CacheState::Waiting(failure)
            }
            Err(OpenError::Failed(failure)) => self.cache_refused(index, failure),
            Ok(cache) => {
                self.shared().table.caches[index].nodes.table = self.counted_table(&cache.superblock);
                let Some(nodes) = self.nodes_for(index) else {
                    let waits = Failure::new(Kind::Scarce, "the memory for its index is not free yet")
                        .why("other caches are giving up some of theirs")
                        .next("it is opened when they have done so");
                    self.shared().table.caches[index].state = CacheState::Waiting(waits);
                    self.cache_retries.soon(index);
                    return self.slow_caches.keep(&device, cache);
                };
                match self.too_large(index, &cache.superblock, nodes) {
                    Some(failure) => self.refused_for_memory(index, failure),
                    None => self.start_engine(index, cache, nodes).unwrap_or_else(CacheState::Failed),
                }
            }
        };
        self.shared().table.set_cache(index, state);
    }

    /// Gives the device to a new engine, which opens the set on it.
    fn start_engine(&self, index: usize, cache: CacheDevice, nodes: usize) -> Result<CacheState, Failure> {
        let (label, set) = (cache.superblock.label(), cache.superblock.set_uuid());
        self.check_twin(index, set)?;
        let name = self.shared().table.name_cache(index, label, set);
        let superblock = &cache.superblock;
        {
            let entry = &mut self.shared().table.caches[index];
            (entry.uuid, entry.last_set) = (Some(superblock.uuid()), Some(set));
            (entry.opened, entry.absent) = (Some(cache.device.presence()), None);
            let (discard, replacement) = (superblock.discard(), superblock.replacement());
            entry.kept = Some(Settings { discard: Some(discard), replacement: Some(replacement) });
        }
        let note = notes::of_set(&self.notes, set)?;
        self.tell_bucket_memory(index, superblock.buckets());
        let options = self.engine_options(index, nodes);
        let progress = Arc::clone(&options.opening);
        let bucket_memory = self.counted_table(&cache.superblock) as u64;
        let is_new = !cache.superblock.is_synchronous();
        let (device, note) = (cache.device, Some(note));
        let start = EngineParameters { device, set_uuid: set, note, is_new, options, bucket_memory };
        self.start_thread(index, &name, start, progress)
    }

    /// Refuses a second device of a set. A copy of the device that becomes visible shares the set's
    /// note and its volumes with the device that is served.
    fn check_twin(&self, index: usize, set: Uuid) -> Result<(), Failure> {
        let shared = self.shared();
        let mut others = shared.table.real_caches();
        let twin = others.find(|(other, cache)| *other != index && cache.set() == Some(set));
        twin.map_or(Ok(()), |(_, twin)| {
            Err(reasons::two_of_one_set(&shared.table.caches[index].device, &twin.device, set))
        })
    }

    fn start_thread(
        &self,
        index: usize,
        name: &str,
        start: EngineParameters,
        progress: Arc<OpenProgress>,
    ) -> Result<CacheState, Failure> {
        let (sender, set) = (self.sender.clone(), start.set_uuid);
        let news = move |news| drop(sender.send(Event::Cache(index, CacheEvent::Engine(news))));
        let thread = engine_thread::start(name, start, news).map_err(|error| {
            Failure::new(Kind::Io, "cannot start the thread of its engine").why(error.to_string())
        })?;
        Ok(CacheState::Opening { set, progress, thread })
    }

    /// Returns the engine that serves volumes without a cache whose devices have blocks of this
    /// size. The first call starts it.
    pub fn engine_of_none(&self, block_sectors: u64) -> Result<(usize, Engine), UnservedReason> {
        // Blocks smaller than the device's cannot be written to it; larger ones cost more.
        let block_sectors = if block_sectors < 8 { 1 } else { 8 };
        let found =
            self.shared().table.caches.iter().position(|cache| cache.is_none_of == Some(block_sectors));
        if let Some(index) = found {
            return match &self.shared().table.caches[index].state {
                CacheState::Open { engine, .. } => Ok((index, engine.clone())),
                CacheState::Failed(failure) => Err(UnservedReason::Failed(failure.clone())),
                _ => Err(UnservedReason::Waiting(reasons::goes_without())),
            };
        }
        let index = self.shared().table.caches.len();
        let state = devices::memory::make(block_sectors).and_then(|cache| {
            let set_uuid = cache.superblock.set_uuid();
            let nodes = bcached_engine::node_budget_min(cache.superblock.bucket_sectors(), 1);
            let options = Options { node_budget_bytes: nodes, ..Options::default() };
            let progress = Arc::clone(&options.opening);
            let (device, is_new) = (cache.device, true);
            let start = EngineParameters { device, set_uuid, note: None, is_new, options, bucket_memory: 0 };
            self.start_thread(index, NO_CACHE, start, progress)
        });
        let state = state.unwrap_or_else(CacheState::Failed);
        self.shared().table.caches.push(CacheEntry::none(block_sectors, state));
        Err(UnservedReason::Waiting(reasons::goes_without()))
    }

    /// The engine's options, with `bytes` of memory for nodes and the bucket table together.
    fn engine_options(&self, index: usize, bytes: usize) -> Options {
        let mut shared = self.shared();
        let entry = &mut shared.table.caches[index];
        let node_budget_bytes = bytes.saturating_sub(entry.nodes.table);
        let mut options = Options { node_budget_bytes, ..Options::default() };
        entry.options.apply_to_cache(&mut options);
        entry.told = entry.options.clone();
        entry.nodes = NodeMemory::of(bytes, entry.nodes.table);
        options
    }

    /// Handles an engine's answer: it has opened its set, or says why not.
    pub fn cache_opened(&mut self, index: usize, result: Result<OpenedSet, Failure>) {
        match result {
            Err(failure) => self.set_refused(index, failure),
            Ok(opened) => {
                self.cache_is_well(index);
                if let Some(place) = &opened.note_path {
                    tracing::info!(event = "cache-opened", "{}", opened.backend);
                    tell_note(&opened.note, place);
                }
                let flash_only = opened.volumes.iter().filter(|volume| volume.flash_only).cloned().collect();
                let unwanted = self.shared().table.cache_opened(index, opened);
                if let Some(engine) = unwanted {
                    let name = self.shared().table.caches[index].display_name().to_owned();
                    return engine.stop(Box::new(move |stopped| match stopped.outcome {
                        Ok(()) => tracing::info!(
                            event = "cache-released",
                            "cache {name}: closed, as it was released or replaced while it was opening"
                        ),
                        Err(error) => tracing::warn!(
                            event = "cache-not-stopped",
                            "cache {name}: it was not stopped in order: {error}"
                        ),
                    }));
                }
                self.shared().table.set_has_come(index);
                self.take_up_flash(index, flash_only);
                self.apply_settings(index, Completion::nobody());
            }
        }
    }

    /// Handles the unexpected end of an engine's thread. With the last engine the program ends, so
    /// that its service manager starts it again; the next start recovers the set. A set that never
    /// opened is refused like any other that cannot be served: a restart would end the same way.
    pub fn cache_ended(&mut self, index: usize) -> Result<(), Failure> {
        if self.cache_retries.has_ended(index) {
            return Ok(());
        }
        let mut shared = self.shared();
        let why = "its thread panicked; the log has the message of the panic";
        match shared.table.caches.get(index).map(|cache| &cache.state) {
            Some(CacheState::Opening { .. }) => {
                let failure = Failure::new(Kind::Io, "the recovery of a cache ended unexpectedly")
                    .why(why)
                    .next("keep its devices as they are; `bcached check` examines them and writes nothing");
                shared.table.set_cache(index, CacheState::Failed(failure));
                return Ok(());
            }
            Some(CacheState::Open { .. }) => {}
            Some(CacheState::Ending { .. }) => {
                drop(shared);
                self.cache_let_go(index, Err(Error::Stopping));
                return Ok(());
            }
            _ => return Ok(()),
        }
        let failure = Failure::new(Kind::Io, "the engine of a cache ended unexpectedly")
            .why(why)
            .next("start the daemon again: it recovers the set as after a crash");
        let gone = shared.table.engine_gone(index, &failure);
        let others =
            shared.table.real_caches().any(|(_, cache)| matches!(cache.state, CacheState::Open { .. }));
        drop(shared);
        for entry in &gone {
            self.let_clients_go(entry);
            self.name_export(entry);
        }
        self.end_jobs_of(index, &failure);
        if others { Ok(()) } else { Err(failure) }
    }

    /// Logs the progress of the openings now and then.
    pub fn tell_openings(&mut self) {
        let openings = self.shared().table.openings();
        for (name, progress) in self.openings.due(self.started.elapsed(), openings) {
            tracing::info!(event = "cache-opening", "cache {name} is opening: {}", progress_of(&progress));
        }
    }

    /// Logs, once, which unserved volumes have dirty data in the cache: a stop names only volumes
    /// that were served.
    pub fn tell_unserved(&self, index: usize, status: &Status) {
        let mut shared = self.shared();
        if shared.phase == Phase::Ready {
            for told in shared.table.note_unserved(index, status) {
                tracing::warn!(event = "dirty-not-served", "{told}");
            }
            for told in shared.table.note_table(index, status) {
                tracing::error!(event = "table-damaged", "{told}");
            }
        }
    }

    /// Logs, once, which writes were given up before the set was opened: when the names of the
    /// volumes are known, or if this `is_last` chance to log it.
    pub fn tell_given_up(&self, index: usize, status: &Status, is_last: bool) {
        let mut shared = self.shared();
        let given_up = &status.given_up_before;
        let may_be_named_yet = shared.phase != Phase::Ready && !is_last;
        if may_be_named_yet && !volume_names::are_known(&shared.table.volumes, given_up) {
            return;
        }
        if let Some(told) = shared.table.note_given_up(index, given_up) {
            tracing::warn!(event = "writes-given-up", "{told}");
        }
    }

    /// Logs, once, that freed buckets are not discarded although discard is configured.
    fn tell_discards(&self, index: usize, status: &Status) {
        let mut shared = self.shared();
        let Some(entry) = shared.table.caches.get_mut(index) else { return };
        let why = match status.discard {
            DiscardState::Off | DiscardState::On => None,
            DiscardState::Unsupported => Some("its device does not support discard".to_owned()),
            DiscardState::Failed(error) => Some(error.to_string()),
        };
        if entry.no_discard_logged != why
            && let Some(why) = &why
        {
            tracing::warn!(
                event = "discard-off",
                "cache {}: freed buckets are not discarded: {why}",
                entry.display_name()
            );
        }
        entry.no_discard_logged = why;
        entry.kept = Some(status.kept);
    }

    /// Returns the open cache of this name, or the only one if no name is given. A request for a
    /// job has resolved the name already ([`crate::supervisor::jobs::api::begin`]).
    pub fn cache_called(&self, name: Option<&str>) -> Result<usize, Failure> {
        let shared = self.shared();
        let caches: Vec<_> = shared.table.lasting_caches().collect();
        let is_meant =
            |cache: &CacheEntry| name.is_none_or(|name| cache.display_name() == name || cache.device == name);
        let meant: Vec<_> = caches.iter().filter(|(_, cache)| is_meant(cache)).collect();
        let names = || caches.iter().map(|(_, cache)| cache.display_name().to_owned()).collect::<Vec<_>>();
        match (meant.as_slice(), name) {
            ([(index, cache)], _) => match &cache.state {
                CacheState::Open { .. } => Ok(*index),
                _ => Err(cache.closed()),
            },
            ([], Some(name)) => Err(no_cache(name, &names())),
            ([], None) => {
                let failure = no_cache("", &[]);
                Err(Failure { what: "there is no cache".into(), ..failure })
            }
            (_, _) => Err(Failure::new(Kind::AmbiguousName, "there are several caches")
                .next(format!("name one of: {}", names().join(", ")))
                .option("--cache")),
        }
    }

    /// Logs, once, that a set that had stopped writing works again. It may have stopped anew by
    /// now.
    pub fn set_works_again(&self, cache: usize) {
        let name = self.shared().table.note_recovery(cache);
        if let Some(name) = name {
            tracing::info!(event = "cache-writes-again", "cache {name} works again");
        }
    }

    /// Checks all open sets and logs, once each, what has changed: a set has stopped writing or
    /// works again, and other news of its index, its devices and its volumes.
    pub fn look_after_sets(&mut self) {
        let engines = self.shared().table.open_engines();
        for (index, engine) in engines {
            let Some(status) = engine.status() else { continue };
            if let Some(told) = self.shared().table.note_failure(index, &status) {
                tracing::error!(event = "cache-stopped-writing", "{told}");
            }
            self.tell_given_up(index, &status, false);
            if status.failed.is_none() {
                self.set_works_again(index);
            }
            match self.shared().table.note_failing(index, status.is_failing) {
                Some(name) if status.is_failing => {
                    tracing::error!(
                        event = "cache-failing",
                        "cache {name}: {}",
                        health::failing(status.io_errors, &status.cache_health)
                    );
                }
                Some(name) => tracing::info!(event = "cache-used-again", "cache {name} takes new data again"),
                None => {}
            }
            let is_walking = status.walked_percent < 100;
            match self.shared().table.note_walking(index, is_walking) {
                Some(name) if is_walking => tracing::info!(
                    event = "index-being-read",
                    "cache {name} is served while its index is being read ({}%)",
                    status.walked_percent
                ),
                Some(name) => tracing::info!(event = "index-read", "cache {name}: its index has been read"),
                None => {}
            }
            if !is_walking {
                self.tell_unserved(index, &status);
            }
            self.tell_discards(index, &status);
            let unreadable = self.shared().table.note_unreadable(index, &status.unreadable, &status.volumes);
            for told in unreadable {
                tracing::error!(event = "node-unreadable", "{told}");
            }
            let zeroings: Vec<_> =
                status.volumes.iter().filter_map(|info| Some((info.id, info.zeroing?))).collect();
            let zeroings = self.shared().table.note_zeroings(index, &zeroings, &status.volumes);
            for told in zeroings {
                tracing::info!(event = "zeroing", "{told}");
            }
            let devices = self.shared().table.devices_of(index, &status);
            for (device, found) in devices {
                let said = self.said.entry(device.clone()).or_default();
                match health::news(&device, &found, said) {
                    Some(health::HealthChange::Bad(told)) => {
                        tracing::error!(event = "device-trouble", "{told}");
                    }
                    Some(health::HealthChange::Good(told)) => {
                        tracing::info!(event = "device-answers", "{told}");
                    }
                    None => {}
                }
            }
            self.tell_flash_sizes(index, &status);
            self.look_for_absent(index, &status);
            self.look_for_absent_cache(index, &status);
        }
    }
}

/// Logs what a former process left in the note, and what became of it.
fn tell_note((found, fate): &NoteOutcome, place: &Path) {
    let is_lost = matches!(found, NoteContents::Records(_)) && fate.are_taken() == Some(false);
    let fate = match (found, fate.are_taken()) {
        (NoteContents::Records(_), Some(true)) => ": they are replayed",
        (NoteContents::Records(_), Some(false)) => {
            ": they are not replayed, because the set has been run since, or its superblock is a different one. \
             Writes that were acknowledged before and not flushed may be lost"
        }
        (NoteContents::Damaged { .. }, Some(false)) => {
            "; none of it is replayed, because the set has been run since, or its superblock is a different one"
        }
        _ => "",
    };
    let place = place.display();
    if matches!(found, NoteContents::Damaged { .. }) {
        tracing::warn!(event = "note-damaged", "{found}{fate} ({place})");
    } else if is_lost {
        tracing::warn!(event = "note-read", "{found}{fate} ({place})");
    } else {
        tracing::info!(event = "note-read", "{found}{fate} ({place})");
    }
}

impl CacheEntry {
    /// The failure for a request that requires this cache to be open.
    pub fn closed(&self) -> Failure {
        let closed = Failure::new(Kind::NotFound, format!("the cache {} is not open", self.display_name()));
        let status = "`bcached status` shows its progress";
        match &self.state {
            CacheState::Waiting(reason) | CacheState::Failed(reason) => {
                let next = reason.next.clone().unwrap_or_else(|| status.into());
                closed.why(reason.reason()).next(next)
            }
            CacheState::Opening { .. } => closed.why("it is being opened").next(status),
            CacheState::Ending { .. } => closed.why("it is being stopped").next(status),
            CacheState::Stopped => {
                closed.why("the daemon is stopping").next("try again when it has been started again")
            }
            CacheState::Released => {
                closed.why("it was released or replaced").next("`bcached import` takes a set back")
            }
            // The cache has opened since the request failed.
            CacheState::Open { .. } => closed.why("it has opened only just now").next("try again"),
        }
    }
}

/// When the log last reported each cache that is being opened, counted from the daemon's start.
#[derive(Default)]
pub struct OpeningReports(BTreeMap<String, Duration>);

impl OpeningReports {
    /// Returns those of the current openings that are due to be logged.
    pub fn due(
        &mut self,
        now: Duration,
        all: Vec<(String, Arc<OpenProgress>)>,
    ) -> Vec<(String, Arc<OpenProgress>)> {
        self.0.retain(|name, _| all.iter().any(|(opening, _)| opening == name));
        let mut is_due = |name: &String| {
            let told = self.0.entry(name.clone()).or_insert(now);
            let is_due = now.saturating_sub(*told) >= OPENING_TOLD;
            if is_due {
                *told = now;
            }
            is_due
        };
        all.into_iter().filter(|(name, _)| is_due(name)).collect()
    }
}
