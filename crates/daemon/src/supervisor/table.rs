//! What is configured and how far it has come: one entry a cache and a volume, each with a state and a reason.

use crate::engine_thread::{Engine, Opened};
use crate::supervisor::lifecycle::memory_budget::Nodes;
use crate::supervisor::options::pending_settings::{OfMode, OfSettings};
use crate::supervisor::options::runtime::SaidOfLodgers;
use crate::supervisor::report::reasons;
use crate::supervisor::volumes::cacheless::{self, Lack};
use crate::supervisor::volumes::numbering::Numbered;
use crate::supervisor::volumes::reconnect::Absent;
use bcached_config::Config;
use bcached_config::options::layers::{Configured, Layers};
use bcached_control::failure::{Failure, Kind};
use bcached_control::names;
use bcached_engine::{DiskHealth, GivenUp, Opening, Settings, VolumeId, VolumeInfo, VolumeOptions};
use bcached_format::{BackingState, BackingSuperblock, CacheMode, Label, Uuid};
use bcached_offline::lost_sets::Stranded;
use bcached_port::Ways;
use bcached_uring::Presence;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Why something waits that has just been configured.
fn not_looked() -> Failure {
    Failure::new(Kind::NotLooked, "its device was not looked for yet")
}

/// How far a cache has come.
pub enum CacheState {
    /// Its device is missing; it is looked for again.
    Waiting(Failure),
    /// Its engine recovers.
    Opening { set: Uuid, progress: Arc<Opening>, thread: JoinHandle<()> },
    /// It serves.
    Open { set: Uuid, engine: Engine, io: String, thread: JoinHandle<()> },
    /// It is being stopped, while others go on.
    Ending { thread: JoinHandle<()> },
    /// It was stopped in order; the daemon is about to end.
    Stopped,
    /// It was stopped, and its device is nobody's business here any more: as if it was not configured.
    Released,
    /// It will not be served.
    Failed(Failure),
}

/// A cache.
pub struct CacheEntry {
    /// `None` until its device tells.
    pub name: Option<String>,
    /// As configured.
    pub device: String,
    /// The device's own, once seen.
    pub uuid: Option<Uuid>,
    /// The set that it was seen to be last.
    pub last_set: Option<Uuid>,
    /// It is what the cache of this name was before, and its volumes are to go there.
    pub former_of: Option<String>,
    /// They go, at this time.
    pub is_moving: bool,
    /// It was made in place of a dead one, and not all of its volumes have come to it.
    pub is_awaited: bool,
    /// It is none: it stands for having no cache, of volumes with devices of such blocks, in sectors.
    pub is_none_of: Option<u16>,
    /// What has been said of its options.
    pub options: Layers,
    /// What its engine has been told of them.
    pub told: Layers,
    /// What its superblock says, once seen.
    pub kept: Option<Settings>,
    /// What it is to say and does not yet.
    pub said_settings: OfSettings,
    pub state: CacheState,
    /// Why it could not be opened the last time, if its device answers with errors.
    pub trouble: Option<Failure>,
    /// Which device that is, once it was opened.
    pub opened: Option<Presence>,
    /// Its device is gone, or is not taken up again, and why.
    pub absent: Option<Box<str>>,
    /// What its engine has for nodes.
    pub nodes: Nodes,
    /// That it stopped writing has been logged.
    pub failure_logged: bool,
    /// Why it discards nothing, as the log was told.
    pub no_discard_logged: Option<String>,
    /// That its device fails too often has been logged.
    pub failing_logged: bool,
    /// That its index is being read beside requests has been logged.
    pub walking_logged: bool,
    /// First sectors of the btree nodes that the log was told of.
    pub unreadable_logged: BTreeSet<u64>,
    /// Volumes of which the log was told that their dirty data lies here and they are not served.
    pub unserved_logged: BTreeSet<[u8; 16]>,
    /// What was said of a damaged table of volumes, and of dirty data without an owner.
    pub table_logged: BTreeSet<String>,
    /// How long the zeroings had gone on of which the log was told last.
    pub zeroing_logged: BTreeMap<VolumeId, Duration>,
    /// What had been given up when its set was opened, as the log was told.
    pub given_up_logged: Arc<[GivenUp]>,
    /// The log has said what it waits for.
    pub wait_logged: bool,
    /// What the table of its buckets takes has been logged.
    pub bucket_memory_logged: bool,
}

/// How far a volume has come.
#[derive(Clone)]
pub enum VolumeState {
    /// A device is missing; it is looked for again.
    Waiting(Failure),
    /// Its engine attaches it.
    Attaching,
    /// It is served.
    Served(Box<VolumeInfo>),
    /// It will not be served.
    Failed(Failure),
    /// It goes with its cache, which somebody releases: nothing is done to it until that has ended.
    Releasing,
    /// Somebody has removed it, or released it with its cache: as if it was not configured.
    Removed,
    /// Somebody has stopped it: it is not served before the next start, or until it is added.
    Stopped,
}

/// A volume.
#[derive(Clone)]
pub struct VolumeEntry {
    /// What control files call it by.
    pub number: usize,
    /// Its section asks for that.
    pub is_numbered: bool,
    /// `None` until its device tells.
    pub name: Option<String>,
    /// `None` for a volume that lives on the cache alone.
    pub backing: Option<String>,
    /// The backing device's, once seen.
    pub uuid: Option<Uuid>,
    /// The backing device's, once seen.
    pub label: Option<Label>,
    /// Name of the cache that it must have.
    pub wanted_cache: Option<String>,
    /// Index of its cache, once known.
    pub cache: Option<usize>,
    /// What has been said of its options.
    pub options: Layers,
    /// What its engine has been told of them.
    pub told: VolumeOptions,
    /// Where the volume begins on its backing device, in sectors, once seen.
    pub data_offset: Option<u64>,
    /// The cache mode in its superblock, once seen.
    pub kept_mode: Option<CacheMode>,
    /// The state in its superblock, when that was looked at last.
    pub kept_state: Option<BackingState>,
    /// The modes that it was asked to have and has not yet.
    pub said_mode: OfMode,
    pub read_only: bool,
    pub shared: bool,
    pub ways: Ways,
    pub wait: Duration,
    /// So much of it is served at most, in bytes.
    pub limit: Option<u64>,
    /// Something acknowledged of it may not be durable, which the next flush of whoever serves it says.
    pub owes: bool,
    /// Its backing device, as it was opened last.
    pub opened: Option<Presence>,
    /// That is gone, or why what has come in its place is not taken up.
    pub absent: Option<Box<str>>,
    /// The set that its superblock named when its cache could not be had.
    pub missed_set: Option<Uuid>,
    /// Its device was looked at while it could not be served: whether its newest data is in a set.
    pub stranded: Option<Option<Stranded>>,
    /// Its cache is missing, and can be done without.
    pub lack: Option<Lack>,
    /// What is tried again, ever less often, to serve it has failed the last time.
    pub again: Option<Absent>,
    pub state: VolumeState,
    /// The reason to wait that the log was told last.
    pub wait_logged: Option<Box<str>>,
}

/// Everything that is configured.
pub struct Table {
    pub caches: Vec<CacheEntry>,
    pub volumes: Vec<VolumeEntry>,
    /// The devices are those of the command line: all are meant now. `ready` waits for all of them, and the first final
    /// reason ends the program, which prints it; else it is logged here.
    pub strict: bool,
    /// What was said to the process before of volumes whose caches are not open here yet.
    pub said_of_lodgers: SaidOfLodgers,
}

impl Table {
    /// Nothing has been looked for yet.
    pub fn of(config: &Config, strict: bool) -> Self {
        let formers = config.caches.iter().filter_map(CacheEntry::former);
        Self {
            strict,
            said_of_lodgers: SaidOfLodgers::default(),
            caches: config.caches.iter().map(CacheEntry::of).chain(formers).collect(),
            volumes: config.volumes.iter().map(VolumeEntry::of).collect(),
        }
    }

    /// Something is looked for again.
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

    /// Everything is served or has a final reason, or was waited for long enough. For the command line's devices no time
    /// is.
    pub fn is_settled(&self, since_start: Duration) -> bool {
        let is_enough = |patience| !self.strict && since_start >= patience;
        // A cache alone may bring volumes of its own: it is waited for as well.
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
                // It was refused, for all that is known at this moment.
                VolumeState::Waiting(_) | VolumeState::Attaching if volume.again.is_some() => true,
                // Who is told that all is ready finds it served, if it can be.
                VolumeState::Waiting(_) | VolumeState::Attaching if volume.lack.is_some() => {
                    is_enough(volume.wait + cacheless::MOMENT)
                }
                VolumeState::Waiting(_) | VolumeState::Attaching => is_enough(volume.wait),
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
            self.set_volume(*volume, VolumeState::Failed(reasons::cache_not_served(failure)));
        }
        concerned.into_iter().map(|volume| self.volumes[volume].clone()).collect()
    }

    /// The UUIDs of the configured devices, as far as they are known, and whether those are all.
    pub fn devices(&self) -> (BTreeSet<[u8; 16]>, bool) {
        let caches = self.real_caches().map(|(_, cache)| cache.uuid);
        // A backing device has one UUID, so its name may say it; with a cache it may be the set's.
        let named = |volume: &VolumeEntry| Uuid::from_text(volume.backing.as_ref()?.strip_prefix("UUID=")?);
        // One that was removed is not given to the kernel either, as long as this daemon runs.
        // Only what was released is.
        let is_released = |volume: &VolumeEntry| {
            let cache = volume.cache.and_then(|cache| self.caches.get(cache));
            volume.is_removed() && cache.is_some_and(|cache| matches!(cache.state, CacheState::Released))
        };
        let backings = self.volumes.iter().filter(|volume| volume.backing.is_some() && !is_released(volume));
        let backings = backings.map(|volume| volume.uuid.or_else(|| named(volume)));
        let all: Vec<_> = caches.chain(backings).collect();
        (all.iter().flatten().map(|uuid| uuid.0).collect(), all.iter().all(Option::is_some))
    }

    /// The caches that are some, with their indices.
    pub fn real_caches(&self) -> impl Iterator<Item = (usize, &CacheEntry)> {
        self.caches.iter().enumerate().filter(|(_, cache)| cache.is_real())
    }

    /// The caches that are being opened, by name, and how far they are.
    pub fn openings(&self) -> Vec<(String, Arc<Opening>)> {
        let caches = self.real_caches().filter_map(|(_, cache)| match &cache.state {
            CacheState::Opening { progress, .. } => {
                Some((cache.name.as_ref().unwrap_or(&cache.device).clone(), Arc::clone(progress)))
            }
            _ => None,
        });
        caches.collect()
    }

    /// The engines of the sets that are open.
    pub fn open_engines(&self) -> Vec<(usize, Engine)> {
        let caches = self.caches.iter().enumerate();
        caches.filter_map(|(index, cache)| Some((index, cache.engine()?))).collect()
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
        // Of several with one label the first one named gets it, though another may be served before it.
        let has_it = |entry: &VolumeEntry| entry.name.is_none() && entry.label == Some(label);
        let is_claimed = self.volumes[..index].iter().any(has_it);
        let entry = &mut self.volumes[index];
        entry.cache = Some(cache);
        let name = || names::of_volume(label, superblock.uuid(), |name| is_claimed || taken.contains(name));
        entry.name.get_or_insert_with(name);
    }

    /// The names that volumes have.
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
                tracing::warn!(event = "cache-waits", "cache {name} is waited for: {failure}");
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
                tracing::warn!(event = "volume-waits", "volume {name} is waited for: {failure}");
                entry.wait_logged = Some(failure.what.clone());
            }
            _ => {}
        }
        if matches!(state, VolumeState::Failed(_)) {
            entry.again = None;
        }
        entry.state = state;
    }

    /// A set is open. Its engine, if nobody waits for that any more.
    pub fn cache_opened(&mut self, index: usize, opened: Opened) -> Option<Engine> {
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

    /// An engine has a volume, which is served now.
    pub fn volume_added(&mut self, index: usize, mut info: VolumeInfo) -> VolumeEntry {
        let entry = &mut self.volumes[index];
        // Its engine says so from now on.
        (entry.kept_mode, entry.owes, entry.again) = (Some(info.mode), false, None);
        // From now on its engine knows better.
        entry.kept_state = None;
        info.sectors = entry.served_sectors(info.sectors, info.block_sectors);
        if info.attached {
            entry.lack = None;
        }
        self.set_volume(index, VolumeState::Served(Box::new(info)));
        self.volumes[index].clone()
    }
}

impl CacheEntry {
    /// What stands for having no cache.
    pub fn none(block_sectors: u16, state: CacheState) -> Self {
        let cache = bcached_config::Cache {
            name: Some(bcached_config::NO_CACHE.to_owned()),
            device: "memory".to_owned(),
            former: None,
            is_awaited: false,
            options: Configured::new(),
        };
        Self { is_none_of: Some(block_sectors), state, ..Self::of(&cache) }
    }

    /// Its name, or what stands for it until its device has told.
    pub fn display_name(&self) -> &str {
        self.name.as_ref().unwrap_or(&self.device)
    }

    /// The UUID of its set, if that is known.
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

    /// It is a cache, and served here or to be.
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
            options: Layers { configured: cache.options.clone(), ..Layers::default() },
            told: Layers::default(),
            kept: None,
            said_settings: OfSettings::default(),
            nodes: Nodes::default(),
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
    /// Its name, or what stands for it until its device has told.
    pub fn display_name(&self) -> &str {
        self.name.as_ref().or(self.backing.as_ref()).map_or("", String::as_str)
    }

    /// It lives on its cache alone.
    pub const fn is_flash_only(&self) -> bool {
        self.backing.is_none()
    }

    /// The most that is served of it, in bytes: whole blocks of so many sectors, if the limit has one.
    pub fn limit_in_blocks(&self, block_sectors: u64) -> Option<u64> {
        let block = block_sectors * 512;
        self.limit.map(|limit| if limit < block { limit } else { limit - limit % block })
    }

    /// So much is served of a volume that has so many sectors, in blocks of so many.
    pub fn served_sectors(&self, sectors: u64, block_sectors: u64) -> u64 {
        self.limit_in_blocks(block_sectors).map_or(sectors, |limit| sectors.min(limit / 512))
    }

    /// Somebody has removed it.
    pub const fn is_removed(&self) -> bool {
        matches!(self.state, VolumeState::Removed)
    }

    /// The same, or it goes with its cache.
    pub const fn is_leaving(&self) -> bool {
        matches!(self.state, VolumeState::Removed | VolumeState::Releasing)
    }

    /// Somebody has removed it, or stopped it.
    pub const fn is_gone(&self) -> bool {
        matches!(self.state, VolumeState::Removed | VolumeState::Stopped)
    }

    /// A volume of the configuration under this number.
    pub fn numbered(volume: &bcached_config::Volume, number: Numbered) -> Self {
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
            options: Layers { configured: volume.options.clone(), ..Layers::default() },
            told: VolumeOptions::default(),
            data_offset: None,
            kept_mode: None,
            kept_state: None,
            said_mode: OfMode::default(),
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
            lack: None,
            again: None,
            state: VolumeState::Waiting(not_looked()),
            wait_logged: None,
        }
    }
}
