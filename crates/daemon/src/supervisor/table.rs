//! What is configured and how far it has come: one entry a cache and a volume, each with a state and a reason.

use crate::config::{self, Config};
use crate::engine_failure;
use crate::engine_thread::{Engine, Opened};
use crate::failure::{Failure, Kind};
use crate::names;
use bcached_engine::{DiskHealth, Error, VolumeInfo};
use bcached_format::{BackingState, BackingSuperblock, CacheMode, Label, Uuid};
use std::collections::BTreeSet;
use std::thread::JoinHandle;
use std::time::Duration;

/// How far a cache has come.
pub enum CacheState {
    /// Its device is missing; it is looked for again.
    Waiting(Failure),
    /// Its engine recovers.
    Opening { set: Uuid, thread: JoinHandle<()> },
    /// It serves.
    Open { set: Uuid, engine: Engine, io: String, thread: JoinHandle<()> },
    /// It was stopped in order; the daemon is about to end.
    Stopped,
    /// It will not be served.
    Failed(Failure),
}

/// A cache.
pub struct CacheEntry {
    /// `None` until its device tells.
    pub name: Option<String>,
    /// As configured.
    pub device: String,
    pub state: CacheState,
    /// That it stopped writing has been logged.
    pub failure_logged: bool,
}

/// How far a volume has come.
#[derive(Clone)]
pub enum VolumeState {
    /// A device is missing; it is looked for again.
    Waiting(Failure),
    /// Its engine attaches it.
    Attaching,
    /// It is served.
    Served(VolumeInfo),
    /// It will not be served.
    Failed(Failure),
}

/// A volume.
#[derive(Clone)]
pub struct VolumeEntry {
    /// `None` until its device tells.
    pub name: Option<String>,
    /// `None` for a volume that lives on the cache alone.
    pub backing: Option<String>,
    /// Name of the cache that it must have.
    pub wanted_cache: Option<String>,
    /// Index of its cache, once known.
    pub cache: Option<usize>,
    pub cache_mode: Option<CacheMode>,
    pub read_only: bool,
    pub shared: bool,
    pub wait: Duration,
    pub state: VolumeState,
}

/// Everything that is configured.
pub struct Table {
    pub caches: Vec<CacheEntry>,
    pub volumes: Vec<VolumeEntry>,
    /// Final reasons are logged here; without it the first of them ends the program, which prints it.
    pub logs_failures: bool,
}

impl VolumeState {
    /// The cache that it needs is not open.
    pub fn waiting_for_cache() -> Self {
        Self::Waiting(Failure::new(Kind::NotFound, "its cache is not open yet"))
    }
}

impl Table {
    /// Nothing has been looked for yet.
    pub fn of(config: &Config, logs_failures: bool) -> Self {
        Self {
            logs_failures,
            caches: config.caches.iter().map(CacheEntry::of).collect(),
            volumes: config.volumes.iter().map(VolumeEntry::of).collect(),
        }
    }

    /// Something is looked for again.
    pub fn is_waiting(&self) -> bool {
        self.caches.iter().any(|cache| matches!(cache.state, CacheState::Waiting(_)))
            || self.volumes.iter().any(|volume| matches!(volume.state, VolumeState::Waiting(_)))
    }

    /// Everything is served or has a final reason, or was waited for long enough.
    pub fn is_settled(&self, since_start: Duration) -> bool {
        // A cache alone may bring volumes of its own: it is waited for as well.
        let patience = self.volumes.iter().map(|volume| volume.wait).max().unwrap_or(config::WAIT_DEFAULT);
        let caches = self.caches.iter().all(|cache| match cache.state {
            CacheState::Open { .. } | CacheState::Stopped | CacheState::Failed(_) => true,
            CacheState::Waiting(_) | CacheState::Opening { .. } => since_start >= patience,
        });
        caches
            && self.volumes.iter().all(|volume| match volume.state {
                VolumeState::Served(_) | VolumeState::Failed(_) => true,
                VolumeState::Waiting(_) | VolumeState::Attaching => since_start >= volume.wait,
            })
    }

    /// A set's engine is gone, and with it what it served: those volumes.
    pub fn engine_gone(&mut self, index: usize, failure: &Failure) -> Vec<VolumeEntry> {
        self.set_cache(index, CacheState::Failed(failure.clone()));
        let is_concerned = |volume: &VolumeEntry| {
            volume.cache == Some(index)
                && matches!(volume.state, VolumeState::Attaching | VolumeState::Served(_))
        };
        let concerned: Vec<_> =
            (0..self.volumes.len()).filter(|volume| is_concerned(&self.volumes[*volume])).collect();
        for volume in &concerned {
            self.set_volume(*volume, VolumeState::Failed(cache_not_served(failure)));
        }
        concerned.into_iter().map(|volume| self.volumes[volume].clone()).collect()
    }

    /// The engines of the sets that are open.
    pub fn open_engines(&self) -> Vec<(usize, Engine)> {
        let caches = self.caches.iter().enumerate();
        caches
            .filter_map(|(index, cache)| match &cache.state {
                CacheState::Open { engine, .. } => Some((index, engine.clone())),
                _ => None,
            })
            .collect()
    }

    /// The devices of an open set, as configured, and how they have fared.
    pub fn devices_of(&self, cache: usize, status: &bcached_engine::Status) -> Vec<(String, DiskHealth)> {
        let own = self.caches.get(cache).map(|entry| (entry.device.clone(), status.cache_health));
        let backings = self.volumes.iter().filter(|entry| entry.cache == Some(cache)).filter_map(|entry| {
            let VolumeState::Served(info) = &entry.state else { return None };
            let now = status.volumes.iter().find(|now| now.id == info.id)?;
            Some((entry.backing.clone()?, now.backing_health?))
        });
        own.into_iter().chain(backings).collect()
    }

    /// The cache's name, the first time that it is asked for to log a failure.
    pub fn note_failure(&mut self, index: usize) -> Option<String> {
        let entry = self.caches.get_mut(index)?;
        let first = !std::mem::replace(&mut entry.failure_logged, true);
        first.then(|| entry.name.clone().unwrap_or_else(|| entry.device.clone()))
    }

    /// The first final reason.
    pub fn first_failure(&self) -> Option<Failure> {
        let caches = self.caches.iter().filter_map(|cache| match &cache.state {
            CacheState::Failed(failure) => Some(failure.clone()),
            _ => None,
        });
        let volumes = self.volumes.iter().filter_map(|volume| match &volume.state {
            VolumeState::Failed(failure) => Some(failure.clone()),
            _ => None,
        });
        caches.chain(volumes).next()
    }

    /// The cache's name, given now if it had none.
    pub fn name_cache(&mut self, index: usize, label: Label, set: Uuid) -> String {
        let taken: BTreeSet<_> = self.caches.iter().filter_map(|cache| cache.name.clone()).collect();
        let entry = &mut self.caches[index];
        entry.name.get_or_insert_with(|| names::of_cache(label, set, |name| taken.contains(name))).clone()
    }

    /// Gives the volume its name and its cache.
    pub fn name_volume(&mut self, index: usize, superblock: &BackingSuperblock, cache: usize) {
        let taken = self.volume_names();
        let entry = &mut self.volumes[index];
        entry.cache = Some(cache);
        let name = || names::of_volume(superblock.label(), superblock.uuid(), |name| taken.contains(name));
        entry.name.get_or_insert_with(name);
    }

    fn volume_names(&self) -> BTreeSet<String> {
        self.volumes.iter().filter_map(|volume| volume.name.clone()).collect()
    }

    pub fn set_cache(&mut self, index: usize, state: CacheState) {
        let entry = &mut self.caches[index];
        if let (CacheState::Failed(failure), true) = (&state, self.logs_failures) {
            let name = entry.name.as_ref().unwrap_or(&entry.device);
            tracing::error!(event = "cache-failed", "cache {name}: {failure}");
        }
        entry.state = state;
    }

    pub fn set_volume(&mut self, index: usize, state: VolumeState) {
        let entry = &mut self.volumes[index];
        if let (VolumeState::Failed(failure), true) = (&state, self.logs_failures) {
            let name = entry.name.as_ref().or(entry.backing.as_ref()).map_or("", String::as_str);
            tracing::error!(event = "volume-failed", "volume {name}: {failure}");
        }
        entry.state = state;
    }

    /// A set is open. Its volumes without backing devices become entries, which are returned.
    pub fn cache_opened(
        &mut self,
        index: usize,
        opened: Opened,
        flash_only: Vec<VolumeInfo>,
    ) -> Vec<VolumeEntry> {
        let entry = &mut self.caches[index];
        let state =
            std::mem::replace(&mut entry.state, CacheState::Failed(Failure::new(Kind::Io, "not opened")));
        let CacheState::Opening { set, thread } = state else {
            unreachable!("a set opens once, after it was started")
        };
        let io = opened.backend.to_string();
        entry.state = CacheState::Open { set, engine: opened.engine, io, thread };
        let mut entries = Vec::new();
        for info in flash_only {
            let taken = self.volume_names();
            let name = names::of_volume(info.label, info.uuid, |name| taken.contains(name));
            let entry = VolumeEntry {
                name: Some(name),
                backing: None,
                wanted_cache: None,
                cache: Some(index),
                cache_mode: None,
                read_only: false,
                shared: false,
                wait: Duration::ZERO,
                state: VolumeState::Served(info),
            };
            self.volumes.push(entry.clone());
            entries.push(entry);
        }
        entries
    }

    /// The device to be opened for a volume that waits for one and whose cache, if it is named, is open.
    pub fn wanting_device(&mut self, index: usize) -> Option<(String, Option<CacheMode>, Option<usize>)> {
        let entry = self.volumes.get(index)?;
        let VolumeState::Waiting(_) = entry.state else { return None };
        let device = entry.backing.clone()?;
        let mode = entry.cache_mode;
        let cache = match &entry.wanted_cache {
            Some(name) => self.caches.iter().position(|cache| cache.name.as_ref() == Some(name)),
            None if self.caches.len() == 1 => Some(0),
            None => None,
        };
        let state = cache.and_then(|cache| self.caches.get(cache)).map(|cache| &cache.state);
        match state {
            Some(CacheState::Failed(failure)) => {
                let failure = cache_not_served(failure);
                self.set_volume(index, VolumeState::Failed(failure));
                None
            }
            Some(CacheState::Waiting(_) | CacheState::Opening { .. }) => {
                self.volumes[index].state = VolumeState::waiting_for_cache();
                None
            }
            Some(CacheState::Stopped) => None,
            Some(CacheState::Open { .. }) | None => Some((device, mode, cache)),
        }
    }

    /// The engine of the volume's cache: the one that is meant, else the one whose set the superblock names. `None`
    /// while that is not open.
    pub fn engine_for(
        &self,
        cache: Option<usize>,
        superblock: &BackingSuperblock,
    ) -> Result<Option<(usize, Engine)>, Failure> {
        if let Some(index) = cache {
            return Ok(match &self.caches[index].state {
                CacheState::Open { engine, .. } => Some((index, engine.clone())),
                _ => None,
            });
        }
        for (index, cache) in self.caches.iter().enumerate() {
            if let CacheState::Open { set, engine, .. } = &cache.state
                && *set == superblock.set_uuid()
            {
                return Ok(Some((index, engine.clone())));
            }
        }
        if self
            .caches
            .iter()
            .any(|cache| matches!(cache.state, CacheState::Waiting(_) | CacheState::Opening { .. }))
        {
            return Ok(None);
        }
        let (kind, why) = match superblock.state() {
            BackingState::None => {
                (Kind::Usage, "several caches are served, and it names none of them".to_owned())
            }
            _ => (Kind::WrongSet, format!("it belongs to the cache set {}", superblock.set_uuid())),
        };
        Err(Failure::new(kind, "no cache for it is served")
            .why(why)
            .next("say which with `cache = \"NAME\"` in its section, or serve that set too"))
    }

    /// An engine has answered. The entry, if the volume is served now.
    pub fn volume_added(&mut self, index: usize, result: Result<VolumeInfo, Error>) -> Option<VolumeEntry> {
        match result {
            Ok(info) => {
                self.set_volume(index, VolumeState::Served(info));
                self.volumes.get(index).cloned()
            }
            Err(error) => {
                let name = self.volumes[index].name.clone().unwrap_or_default();
                self.set_volume(index, VolumeState::Failed(engine_failure::of_attach(&name, &error)));
                None
            }
        }
    }

    /// Takes over what is new in `config`; the names of what is not in it any more.
    pub fn adopt(&mut self, config: &Config) -> BTreeSet<String> {
        let mut gone = BTreeSet::new();
        for cache in &config.caches {
            if !self.caches.iter().any(|entry| entry.name == cache.name) {
                self.caches.push(CacheEntry::of(cache));
            }
        }
        for cache in &self.caches {
            if !config.caches.iter().any(|configured| configured.name == cache.name) {
                gone.extend(cache.name.clone());
            }
        }
        for volume in &config.volumes {
            match self.volumes.iter_mut().find(|entry| entry.name == volume.name) {
                None => self.volumes.push(VolumeEntry::of(volume)),
                Some(entry) => entry.cache_mode = volume.cache_mode.map(Into::into),
            }
        }
        for volume in self.volumes.iter().filter(|volume| volume.backing.is_some()) {
            if !config.volumes.iter().any(|configured| configured.name == volume.name) {
                gone.extend(volume.name.clone());
            }
        }
        self.apply_modes();
        gone
    }

    /// Volumes whose configured cache mode is not the one in force get it.
    fn apply_modes(&mut self) {
        for volume in &mut self.volumes {
            let VolumeState::Served(info) = &mut volume.state else { continue };
            let Some(mode) = volume.cache_mode.filter(|mode| *mode != info.mode) else { continue };
            let cache = volume.cache.and_then(|index| self.caches.get(index)).map(|cache| &cache.state);
            if let Some(CacheState::Open { engine, .. }) = cache {
                let name = volume.name.clone().unwrap_or_default();
                let done = move |result: Result<(), Error>| match result {
                    Ok(()) => tracing::info!(event = "cache-mode-set", "{name}: cache mode changed"),
                    Err(error) => tracing::error!(event = "cache-mode-failed", "{name}: {error}"),
                };
                engine.set_cache_mode(info.id, mode, Box::new(done));
                info.mode = mode;
            }
        }
    }
}

impl CacheEntry {
    fn of(cache: &config::Cache) -> Self {
        Self {
            name: cache.name.clone(),
            device: cache.device.clone(),
            failure_logged: false,
            state: CacheState::Waiting(Failure::new(Kind::NotFound, "its device was not looked for yet")),
        }
    }
}

impl VolumeEntry {
    fn of(volume: &config::Volume) -> Self {
        Self {
            name: volume.name.clone(),
            backing: Some(volume.backing.clone()),
            wanted_cache: volume.cache.clone(),
            cache: None,
            cache_mode: volume.cache_mode.map(Into::into),
            read_only: volume.read_only,
            shared: volume.shared,
            wait: volume.wait,
            state: VolumeState::Waiting(Failure::new(Kind::NotFound, "its device was not looked for yet")),
        }
    }
}

fn cache_not_served(failure: &Failure) -> Failure {
    Failure::new(failure.kind, "its cache is not served").why(failure.to_string())
}
