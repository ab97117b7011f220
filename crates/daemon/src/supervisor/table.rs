//! The table of configured caches and volumes: one entry each, with a state and a reason.

use crate::engine_thread::{Engine, OpenedSet};
use crate::supervisor::lifecycle::memory_budget::NodeMemory;
use crate::supervisor::options::pending_settings::{PendingModes, PendingSettings};
use crate::supervisor::options::runtime::FlashRuntimeOptions;
use crate::supervisor::report::reasons;
use crate::supervisor::volumes::numbering::VolumeNumber;
use crate::supervisor::volumes::reconnect::RetryState;
use crate::supervisor::volumes::without_cache::{self, MissingCache};
use bcached_config::Config;
use bcached_config::options::layers::{ConfiguredOptions, OptionLayers};
use bcached_control::failure::{Failure, Kind};
use bcached_control::names;
use bcached_engine::{DiskHealth, LostAcks, OpenProgress, Settings, VolumeId, VolumeInfo, VolumeOptions};
use bcached_format::{BackingState, BackingSuperblock, CacheMode, Label, Uuid};
use bcached_offline::lost_sets::DirtyVolume;
use bcached_port::FrontendSet;
use bcached_uring::DevicePresence;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// The reason to wait of a new entry.
fn not_looked() -> Failure {
    Failure::new(Kind::NotLooked, "its device has not been looked for yet")
}

/// The state of a cache.
pub enum CacheState {
    /// Its device is missing; it is looked for again.
    Waiting(Failure),
    /// Its engine recovers the set.
    Opening { set: Uuid, progress: Arc<OpenProgress>, thread: JoinHandle<()> },
    /// It is served.
    Open { set: Uuid, engine: Engine, io: String, thread: JoinHandle<()> },
    /// It is being stopped while others continue.
    Ending { thread: JoinHandle<()> },
    /// It was stopped in order; the daemon is about to end.
    Stopped,
    /// It was stopped and its device released: treated as not configured.
    Released,
    /// It cannot be served.
    Failed(Failure),
}

/// A cache.
pub struct CacheEntry {
    /// `None` until its device has been read.
    pub name: Option<String>,
    /// As configured.
    pub device: String,
    /// The device's own UUID, once read.
    pub uuid: Option<Uuid>,
    /// The set that was last read from it.
    pub last_set: Option<Uuid>,
    /// Set if this is the former device of the cache of this name, to which its volumes are to
    /// move.
    pub former_of: Option<String>,
    /// The volumes are moving now.
    pub is_moving: bool,
    /// It replaced a dead cache, and not all of its volumes have arrived.
    pub is_awaited: bool,
    /// Set if this stands for "no cache": it serves volumes whose devices have blocks of this many
    /// sectors.
    pub is_none_of: Option<u16>,
    /// The requested options.
    pub options: OptionLayers,
    /// The options that its engine has been given.
    pub told: OptionLayers,
    /// The settings in its superblock, once read.
    pub kept: Option<Settings>,
    /// Settings that its superblock is to have and does not have yet.
    pub pending_settings: PendingSettings,
    pub state: CacheState,
    /// Why it could not be opened the last time, if its device answers with errors.
    pub trouble: Option<Failure>,
    /// The device that was opened, once it was.
    pub opened: Option<DevicePresence>,
    /// Why its device is gone, or is not taken up again.
    pub absent: Option<Box<str>>,
    /// The memory that its engine has for nodes.
    pub nodes: NodeMemory,
    /// The log has reported that it stopped writing.
    pub failure_logged: bool,
    /// The reason that the log gave why it discards nothing.
    pub no_discard_logged: Option<String>,
    /// The log has reported that its device fails too often.
    pub failing_logged: bool,
    /// The log has reported that its index is being read while it is served.
    pub walking_logged: bool,
    /// First sectors of the unreadable btree nodes that the log has reported.
    pub unreadable_logged: BTreeSet<u64>,
    /// Unserved volumes with dirty data here that the log has reported.
    pub unserved_logged: BTreeSet<[u8; 16]>,
    /// What the log has reported of a damaged volume table and of dirty data without an owner.
    pub table_logged: BTreeSet<String>,
    /// The age of each running zeroing when the log last reported it.
    pub zeroing_logged: BTreeMap<VolumeId, Duration>,
    /// What was given up before its set was opened, as the log reported it.
    pub given_up_logged: Arc<[LostAcks]>,
    /// The log has reported what it waits for.
    pub wait_logged: bool,
    /// The log has reported how much memory its bucket table takes.
    pub bucket_memory_logged: bool,
}

/// The state of a volume.
#[derive(Clone)]
pub enum VolumeState {
    /// A device is missing; it is looked for again.
    Waiting(Failure),
    /// Its engine attaches it.
    Attaching,
    /// It is served.
    Served(Box<VolumeInfo>),
    /// It cannot be served.
    Failed(Failure),
    /// It leaves with its cache, which is being released; nothing is done to it until that has
    /// ended.
    Releasing,
    /// It was removed, or released with its cache: treated as not configured.
    Removed,
    /// It was stopped: not served before the next start, or until it is added.
    Stopped,
}

/// A volume.
#[derive(Clone)]
pub struct VolumeEntry {
    /// The N of its `bcacheN`.
    pub number: usize,
    /// Its section asks for this number.
    pub is_numbered: bool,
    /// `None` until its device has been read.
    pub name: Option<String>,
    /// `None` for a flash-only volume.
    pub backing: Option<String>,
    /// The backing device's UUID, once read.
    pub uuid: Option<Uuid>,
    /// The backing device's label, once read.
    pub label: Option<Label>,
    /// Name of the cache that its section names.
    pub wanted_cache: Option<String>,
    /// Index of its cache, once known.
    pub cache: Option<usize>,
    /// The requested options.
    pub options: OptionLayers,
    /// The options that its engine has been given.
    pub told: VolumeOptions,
    /// Where the volume begins on its backing device, in sectors, once read.
    pub data_offset: Option<u64>,
    /// The cache mode in its superblock, once read.
    pub kept_mode: Option<CacheMode>,
    /// The state in its superblock, when it was last read.
    pub kept_state: Option<BackingState>,
    /// Cache modes that were requested and are not settled yet.
    pub pending_modes: PendingModes,
    pub read_only: bool,
    pub shared: bool,
    pub ways: FrontendSet,
    pub wait: Duration,
    /// At most this much of it is served, in bytes.
    pub limit: Option<u64>,
    /// An acknowledged write may not be durable. The next flush reports it, whichever engine serves
    /// it.
    pub owes: bool,
    /// Its backing device, as last opened.
    pub opened: Option<DevicePresence>,
    /// Why its backing device is gone, or why the device in its place is not taken up.
    pub absent: Option<Box<str>>,
    /// The set that its superblock named when its cache was unavailable.
    pub missed_set: Option<Uuid>,
    /// Read from its device while it could not be served: whether its newest data is in a set.
    pub stranded: Option<Option<DirtyVolume>>,
    /// Its cache is missing, and the volume can be served without it.
    pub missing_cache: Option<MissingCache>,
    /// The retry state after a transient failure to serve it, with back-off.
    pub again: Option<RetryState>,
    pub state: VolumeState,
    /// The reason to wait that the log last reported.
    pub wait_logged: Option<Box<str>>,
}

/// Everything that is configured.
pub struct Table {
    pub caches: Vec<CacheEntry>,
    pub volumes: Vec<VolumeEntry>,
    /// The devices are those of the command line, all required at once. `ready` waits for all of
    /// them, and the first final reason ends the program, which prints it; otherwise it is logged
    /// here.
    pub strict: bool,
    /// Runtime values from the previous process, for flash-only volumes whose caches are not open
    /// yet.
    pub flash_runtime_options: FlashRuntimeOptions,
}

impl Table {
    /// Builds the table; no device has been looked for yet.
    pub fn of(config: &Config, strict: bool) -> Self {
        let formers = config.caches.iter().filter_map(CacheEntry::former);
        Self {
            strict,
            flash_runtime_options: FlashRuntimeOptions::default(),
            caches: config.caches.iter().map(CacheEntry::of).chain(formers).collect(),
            volumes: config.volumes.iter().map(VolumeEntry::of).collect(),
        }
    }

    /// Returns true if a missing device is looked for again.
    pub fn is_waiting(&self) -> bool {
        self.caches.iter().any(|cache| matches!(cache.state, CacheState::Waiting(_)))
            || self.volumes.iter().any(|volume| matches!(volume.state, VolumeState::Waiting(_)))
    }

    /// The devices that are looked for: of caches, and of volumes.
    pub fn awaited(&self) -> (BTreeSet<String>, BTreeSet<String>) {
        let caches = self.caches.iter().filter(|cache| matches!(cache.state, CacheState::Waiting(_)));
        let volumes = self.volumes.iter().filter(|volume| matches!(volume.state, VolumeState::Waiting(_)));
        let backings = volumes.filter_map(|volume| volume.backing.clone()).collect();
        (caches.map(|cache| cache.device.clone()).collect(), backings)
    }

    /// Returns true if everything is served, has a final reason, or was waited for long enough.
    /// Devices of the command line are waited for without limit.
    pub fn is_settled(&self, since_start: Duration) -> bool {
        let is_enough = |patience| !self.strict && since_start >= patience;
        // A cache without volumes may bring flash-only volumes: it is waited for as well.
        let patience =
            self.volumes.iter().map(|volume| volume.wait).max().unwrap_or(bcached_config::WAIT_DEFAULT);
        let caches = self.caches.iter().all(|cache| match cache.state {
            CacheState::Open { .. }
            | CacheState::Ending { .. }
            | CacheState::Stopped
            | CacheState::Released
            | CacheState::Failed(_) => true,
            CacheState::Waiting(_) | CacheState::Opening { .. } => is_enough(patience),
        });
        caches
            && self.volumes.iter().all(|volume| match volume.state {
                VolumeState::Served(_)
                | VolumeState::Failed(_)
                | VolumeState::Releasing
                | VolumeState::Removed
                | VolumeState::Stopped => true,
                // As far as is known now, it was refused.
                VolumeState::Waiting(_) | VolumeState::Attaching if volume.again.is_some() => true,
                // By the time readiness is announced, it is served, if it can be.
                VolumeState::Waiting(_) | VolumeState::Attaching if volume.missing_cache.is_some() => {
                    is_enough(volume.wait + without_cache::MOMENT)
                }
                VolumeState::Waiting(_) | VolumeState::Attaching => is_enough(volume.wait),
            })
    }

    /// Fails a set whose engine is gone, and returns the volumes that it served.
    pub fn engine_gone(&mut self, index: usize, failure: &Failure) -> Vec<VolumeEntry> {
        self.set_cache(index, CacheState::Failed(failure.clone()));
        let is_concerned = |volume: &VolumeEntry| {
            volume.cache == Some(index)
                && matches!(volume.state, VolumeState::Attaching | VolumeState::Served(_))
        };
        let concerned: Vec<_> =
            (0..self.volumes.len()).filter(|volume| is_concerned(&self.volumes[*volume])).collect();
        for volume in &concerned {
            self.set_volume(*volume, VolumeState::Failed(reasons::cache_not_served(failure)));
        }
        concerned.into_iter().map(|volume| self.volumes[volume].clone()).collect()
    }

    /// The UUIDs of the configured devices, as far as they are known, and whether those are all.
    pub fn devices(&self) -> (BTreeSet<[u8; 16]>, bool) {
        let caches = self.real_caches().map(|(_, cache)| cache.uuid);
        // A backing device has one UUID, so its name may give it. The UUID that names a cache may
        // be the set's.
        let named = |volume: &VolumeEntry| Uuid::from_text(volume.backing.as_ref()?.strip_prefix("UUID=")?);
        // A removed volume is not given to the kernel while this daemon runs; only a released one
        // is.
        let is_released = |volume: &VolumeEntry| {
            let cache = volume.cache.and_then(|cache| self.caches.get(cache));
            volume.is_removed() && cache.is_some_and(|cache| matches!(cache.state, CacheState::Released))
        };
        let backings = self.volumes.iter().filter(|volume| volume.backing.is_some() && !is_released(volume));
        let backings = backings.map(|volume| volume.uuid.or_else(|| named(volume)));
        let all: Vec<_> = caches.chain(backings).collect();
        (all.iter().flatten().map(|uuid| uuid.0).collect(), all.iter().all(Option::is_some))
    }

    /// The real caches, with their indices.
    pub fn real_caches(&self) -> impl Iterator<Item = (usize, &CacheEntry)> {
        self.caches.iter().enumerate().filter(|(_, cache)| cache.is_real())
    }

    /// The caches that are being opened, by name, with their progress.
    pub fn openings(&self) -> Vec<(String, Arc<OpenProgress>)> {
        let caches = self.real_caches().filter_map(|(_, cache)| match &cache.state {
            CacheState::Opening { progress, .. } => {
                Some((cache.name.as_ref().unwrap_or(&cache.device).clone(), Arc::clone(progress)))
            }
            _ => None,
        });
        caches.collect()
    }

    /// The engines of the open sets, with their indices.
    pub fn open_engines(&self) -> Vec<(usize, Engine)> {
        let caches = self.caches.iter().enumerate();
        caches.filter_map(|(index, cache)| Some((index, cache.engine()?))).collect()
    }

    /// The devices of an open set, as configured, and their health.
    pub fn devices_of(&self, cache: usize, status: &bcached_engine::Status) -> Vec<(String, DiskHealth)> {
        let own = self.caches.get(cache).map(|entry| (entry.device.clone(), status.cache_health));
        let backings = self.volumes.iter().filter(|entry| entry.cache == Some(cache)).filter_map(|entry| {
            let VolumeState::Served(info) = &entry.state else { return None };
            let now = status.volumes.iter().find(|now| now.id == info.id)?;
            Some((entry.backing.clone()?, now.backing_health?))
        });
        own.into_iter().chain(backings).collect()
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

    /// Returns the cache's name, and gives it one first if it has none.
    pub fn name_cache(&mut self, index: usize, label: Label, set: Uuid) -> String {
        let taken: BTreeSet<_> = self.caches.iter().filter_map(|cache| cache.name.clone()).collect();
        let entry = &mut self.caches[index];
        entry
            .name
            .get_or_insert_with(|| {
                names::of_cache(label, set, |name| name == bcached_config::NO_CACHE || taken.contains(name))
            })
            .clone()
    }

    /// Gives the volume its name and its cache.
    pub fn name_volume(&mut self, index: usize, superblock: &BackingSuperblock, cache: usize) {
        let (taken, label) = (self.volume_names(), superblock.label());
        // If several have this label, the first one in the table gets it, though another may be
        // served earlier.
        let has_it = |entry: &VolumeEntry| entry.name.is_none() && entry.label == Some(label);
        let is_claimed = self.volumes[..index].iter().any(has_it);
        let entry = &mut self.volumes[index];
        entry.cache = Some(cache);
        let name = || names::of_volume(label, superblock.uuid(), |name| is_claimed || taken.contains(name));
        entry.name.get_or_insert_with(name);
    }

    /// The names of all volumes.
    pub fn volume_names(&self) -> BTreeSet<String> {
        self.volumes.iter().filter_map(|volume| volume.name.clone()).collect()
    }

    pub fn set_cache(&mut self, index: usize, state: CacheState) {
        let entry = &mut self.caches[index];
        let name = entry.name.as_ref().unwrap_or(&entry.device);
        match &state {
            CacheState::Failed(failure) if !self.strict => {
                tracing::error!(event = "cache-failed", "cache {name}: {failure}");
            }
            CacheState::Waiting(failure) if !std::mem::replace(&mut entry.wait_logged, true) => {
                tracing::warn!(event = "cache-waits", "cache {name} is waiting: {failure}");
            }
            _ => {}
        }
        entry.state = state;
    }

    pub fn set_volume(&mut self, index: usize, state: VolumeState) {
        let entry = &mut self.volumes[index];
        let name = entry.display_name();
        match &state {
            VolumeState::Failed(failure) if !self.strict => {
                tracing::error!(event = "volume-failed", "volume {name}: {failure}");
            }
            VolumeState::Waiting(failure) if entry.wait_logged.as_ref() != Some(&failure.what) => {
                tracing::warn!(event = "volume-waits", "volume {name} is waiting: {failure}");
                entry.wait_logged = Some(failure.what.clone());
            }
            _ => {}
        }
        if matches!(state, VolumeState::Failed(_)) {
            entry.again = None;
        }
        entry.state = state;
    }

    /// Marks a set as open. Returns its engine if nothing waits for the set any more.
    pub fn cache_opened(&mut self, index: usize, opened: OpenedSet) -> Option<Engine> {
        let entry = &mut self.caches[index];
        let state = std::mem::replace(&mut entry.state, CacheState::Released);
        let CacheState::Opening { set, thread, .. } = state else {
            entry.state = state;
            return Some(opened.engine);
        };
        let io = opened.backend.to_string();
        entry.state = CacheState::Open { set, engine: opened.engine, io, thread };
        None
    }

    /// Marks a volume that an engine has taken up as served.
    pub fn volume_added(&mut self, index: usize, mut info: VolumeInfo) -> VolumeEntry {
        let entry = &mut self.volumes[index];
        // From now on its engine reports these.
        (entry.kept_mode, entry.owes, entry.again) = (Some(info.mode), false, None);
        // From now on its engine knows the state.
        entry.kept_state = None;
        info.sectors = entry.served_sectors(info.sectors, info.block_sectors);
        if info.attached {
            entry.missing_cache = None;
        }
        self.set_volume(index, VolumeState::Served(Box::new(info)));
        self.volumes[index].clone()
    }
}

impl CacheEntry {
    /// The entry that stands for "no cache".
    pub fn none(block_sectors: u16, state: CacheState) -> Self {
        let cache = bcached_config::Cache {
            name: Some(bcached_config::NO_CACHE.to_owned()),
            device: "memory".to_owned(),
            former: None,
            is_awaited: false,
            options: ConfiguredOptions::new(),
        };
        Self { is_none_of: Some(block_sectors), state, ..Self::of(&cache) }
    }

    /// Its name, or its device until the device has been read.
    pub fn display_name(&self) -> &str {
        self.name.as_ref().unwrap_or(&self.device)
    }

    /// The UUID of its set, if known.
    pub const fn set(&self) -> Option<Uuid> {
        match &self.state {
            CacheState::Opening { set, .. } | CacheState::Open { set, .. } => Some(*set),
            _ => None,
        }
    }

    /// Its engine, if it is open.
    pub fn engine(&self) -> Option<Engine> {
        match &self.state {
            CacheState::Open { engine, .. } => Some(engine.clone()),
            _ => None,
        }
    }

    /// Returns true for a real cache that is served here or is to be.
    pub const fn is_real(&self) -> bool {
        self.is_none_of.is_none() && !matches!(self.state, CacheState::Released)
    }

    pub fn of(cache: &bcached_config::Cache) -> Self {
        Self {
            name: cache.name.clone(),
            device: cache.device.clone(),
            uuid: None,
            last_set: None,
            former_of: None,
            is_moving: false,
            is_awaited: cache.is_awaited,
            is_none_of: None,
            options: OptionLayers { configured: cache.options.clone(), ..OptionLayers::default() },
            told: OptionLayers::default(),
            kept: None,
            pending_settings: PendingSettings::default(),
            nodes: NodeMemory::default(),
            failure_logged: false,
            no_discard_logged: None,
            failing_logged: false,
            walking_logged: false,
            unreadable_logged: BTreeSet::new(),
            unserved_logged: BTreeSet::new(),
            table_logged: BTreeSet::new(),
            zeroing_logged: BTreeMap::new(),
            given_up_logged: Arc::default(),
            wait_logged: false,
            bucket_memory_logged: false,
            state: CacheState::Waiting(not_looked()),
            trouble: None,
            opened: None,
            absent: None,
        }
    }
}

impl VolumeEntry {
    /// Its name, or its backing device until the device has been read.
    pub fn display_name(&self) -> &str {
        self.name.as_ref().or(self.backing.as_ref()).map_or("", String::as_str)
    }

    /// Returns true for a flash-only volume.
    pub const fn is_flash_only(&self) -> bool {
        self.backing.is_none()
    }

    /// The most of it that is served, in bytes: rounded down to whole blocks of this many sectors,
    /// if the limit has at least one.
    pub fn limit_in_blocks(&self, block_sectors: u64) -> Option<u64> {
        let block = block_sectors * 512;
        self.limit.map(|limit| if limit < block { limit } else { limit - limit % block })
    }

    /// How many of `sectors` sectors are served, given blocks of `block_sectors`.
    pub fn served_sectors(&self, sectors: u64, block_sectors: u64) -> u64 {
        self.limit_in_blocks(block_sectors).map_or(sectors, |limit| sectors.min(limit / 512))
    }

    /// Returns true if it was removed.
    pub const fn is_removed(&self) -> bool {
        matches!(self.state, VolumeState::Removed)
    }

    /// Returns true if it was removed, or leaves with its cache.
    pub const fn is_leaving(&self) -> bool {
        matches!(self.state, VolumeState::Removed | VolumeState::Releasing)
    }

    /// Returns true if it was removed or stopped.
    pub const fn is_gone(&self) -> bool {
        matches!(self.state, VolumeState::Removed | VolumeState::Stopped)
    }

    /// A volume of the configuration under this number.
    pub fn numbered(volume: &bcached_config::Volume, number: VolumeNumber) -> Self {
        Self { number: number.number, is_numbered: number.is_asked, ..Self::of(volume) }
    }

    fn of(volume: &bcached_config::Volume) -> Self {
        Self {
            number: volume.number,
            is_numbered: volume.is_numbered,
            name: volume.name.clone(),
            backing: Some(volume.backing.clone()),
            uuid: None,
            label: None,
            wanted_cache: volume.cache.clone(),
            cache: None,
            options: OptionLayers { configured: volume.options.clone(), ..OptionLayers::default() },
            told: VolumeOptions::default(),
            data_offset: None,
            kept_mode: None,
            kept_state: None,
            pending_modes: PendingModes::default(),
            read_only: volume.read_only,
            shared: volume.shared,
            ways: volume.ways,
            wait: volume.wait,
            limit: volume.size,
            owes: false,
            opened: None,
            absent: None,
            missed_set: None,
            stranded: None,
            missing_cache: None,
            again: None,
            state: VolumeState::Waiting(not_looked()),
            wait_logged: None,
        }
    }
}
