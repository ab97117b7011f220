//! `bcached replace`: a cache moves to another device while its volumes are served. Each volume
//! leaves the old set, with all of its data on its backing device, and joins the new one.
//!
//! The configuration names the new device before the first volume moves, and keeps the old one
//! until the last has moved. A start in between therefore opens both. Each volume is served by the
//! set that its superblock names, and the job goes on.
//!
//! The request is judged, and the device is formatted, on the thread of the caller. Neither waits
//! for the loop, and the loop does not wait for a device.

use crate::engine_thread::Engine;
use crate::supervisor::jobs::api::lock;
use crate::supervisor::options::owner::{CacheFilter, resolve_cache};
use crate::supervisor::table::{CacheState, VolumeEntry, VolumeState};
use crate::supervisor::volumes::rejoin::RejoinState;
use crate::supervisor::{Event, Shared};
use bcached_config::NO_CACHE;
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{JobKind, JobReport, JobSpec, JobState};
use bcached_control::names::TypedName;
use bcached_control::status::DirtyData;
use bcached_engine::Status;
use bcached_format::{BackingState, CacheSuperblock, Uuid};
use bcached_offline::devices::{self, CacheDevice};
use bcached_offline::lost_sets::{ConfiguredNames, DirtyVolume, LostSets};
use bcached_offline::make_checks::{self, RequiredGeometry, UnusedCache};
use bcached_uring::{Access, Device, DevicePresence};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Longest time a caller waits until the job has begun: less than the client waits for an answer.
const LIMIT: Duration = Duration::from_secs(4);

/// Block and bucket size of a new cache, in sectors, unless something else determines them.
const BLOCK: u16 = 8;
const BUCKET: u16 = 1024;

/// What the loop is asked to do.
pub struct ReplaceRequest {
    pub name: String,
    pub device: String,
    pub what: ReplaceAction,
    pub uid: Option<u32>,
    /// The cache that is replaced was judged to be dead.
    pub is_dead: bool,
    pub answer: Sender<Result<JobReport, Failure>>,
}

pub enum ReplaceAction {
    /// Check whether the replacement can be kept.
    Check,
    /// Begin with this device, whose claim passes to the loop.
    Begin(Box<CacheDevice>),
    /// Resume a replacement that was begun and cancelled.
    Resume,
    /// The replacement is done: wait for the volumes that are still on their way.
    Wait,
}

/// The cache as it is.
struct CurrentCache {
    name: String,
    device: String,
    /// The identity of that device, if it was opened.
    opened: Option<DevicePresence>,
    engine: Option<Engine>,
    /// Why the cache is not open.
    trouble: Option<Failure>,
    /// What the cache was before: index, device and engine.
    former: Option<(usize, String, Option<Engine>)>,
    /// How far its volumes are, if it replaces a dead one.
    arrival: RejoinState,
    /// The sets that are open here.
    sets: Vec<Uuid>,
    /// The volumes that are not served, or only without their cache, and what their sections say of
    /// the cache.
    volumes: Vec<(VolumeEntry, CacheAssignment)>,
    /// Where to look for missing sets.
    known: ConfiguredNames,
}

/// What a volume's section says of the cache.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CacheAssignment {
    /// The volume is to have this cache.
    Here,
    /// It is to have another, or none.
    Elsewhere,
    /// Nothing, and there are several.
    Unspecified,
}

/// Judges and begins a replacement. Refusals here are logged here; the loop logs what it refuses.
pub fn begin(
    shared: &Arc<Mutex<Shared>>,
    events: &Sender<Event>,
    begin: &JobSpec,
    uid: Option<u32>,
) -> Result<JobReport, Failure> {
    let is_told = Cell::new(false);
    judge_and_begin(shared, events, (begin, uid), &is_told).inspect_err(|failure| {
        if !is_told.get() {
            let uid = crate::supervisor::jobs::user(uid);
            tracing::info!(event = "job-refused", uid, "replace {}: {failure}", begin.volume);
        }
    })
}

fn judge_and_begin(
    shared: &Arc<Mutex<Shared>>,
    events: &Sender<Event>,
    (begin, uid): (&JobSpec, Option<u32>),
    is_told: &Cell<bool>,
) -> Result<JobReport, Failure> {
    let found = find(shared, &begin.volume)?;
    let cannot = |kind| Failure::new(kind, format!("cannot replace {}", found.name));
    let device = begin.with.clone().ok_or_else(|| {
        cannot(Kind::Usage).why("the new device is not named").next("name it with --with").option("--with")
    })?;
    let mut shown = JobReport::new(JobKind::Replace, found.name.clone(), JobState::Planned);
    let is_there = found.is_at(&device);
    let ask = |what, uid| ask(events, &found, &device, what, uid);
    let what = match &found.former {
        None if is_there => match &found.arrival {
            RejoinState::Done => return Ok(JobReport { already: true, state: JobState::Done, ..shown }),
            RejoinState::Failed(failure) if begin.dry_run => return Err(failure.clone()),
            RejoinState::Waiting(_) if begin.dry_run => return Ok(shown),
            RejoinState::Waiting(_) | RejoinState::Failed(_) => ReplaceAction::Wait,
        },
        Some((former, ..)) if is_there => {
            let running = lock(shared).jobs.replacing(*former);
            if let Some(number) = running {
                return crate::supervisor::jobs::api::show(shared, number);
            }
            let judged = judge(&found, former_engine(&found))?;
            shown.dirty_bytes_at_start = judged.dirty_bytes;
            if begin.dry_run {
                return Ok(shown);
            }
            judged.forsake()?;
            ReplaceAction::Resume
        }
        Some((_, _, _)) => {
            return Err(cannot(Kind::InUse)
                .why(format!("its volumes are already moving to {}", found.device))
                .next(format!("`bcached replace {} --with {}` continues that", found.name, found.device)));
        }
        None => {
            let look = || ask(ReplaceAction::Check, uid).map(drop);
            match plan_new(&found, (begin, &device), look, &mut shown)? {
                Some(what) => what,
                None => return Ok(shown),
            }
        }
    };
    is_told.set(true);
    let job = ask(what, uid)?;
    if let Some(number) = job.id {
        // A client that waits for the job looks at it again, and finds them there.
        lock(shared).jobs.note(number, &shown.notes);
    }
    Ok(JobReport { notes: shown.notes, ..job })
}

/// Plans the replacement of a cache that is still on its old device: `device` becomes a new cache
/// in its place. Returns `None` for a dry run. `look` checks whether the loop would begin it.
fn plan_new(
    found: &CurrentCache,
    (begin, device): (&JobSpec, &str),
    look: impl FnOnce() -> Result<(), Failure>,
    shown: &mut JobReport,
) -> Result<Option<ReplaceAction>, Failure> {
    let judged = judge(found, found.engine.as_ref())?;
    look()?;
    let lost = LostSets::look(&[], &found.known);
    let allowed = (&begin.overwrites, &lost);
    let fresh = make_checks::cache(Path::new(device), judged.geometry, allowed, begin.dry_run)?;
    judged.check_new(found, &fresh.superblock)?;
    shown.dirty_bytes_at_start = judged.dirty_bytes;
    shown.notes.push(match (fresh.was_made, begin.dry_run) {
        (true, _) => format!("{device} is a cache already, and is used as it is"),
        // Its UUIDs are drawn when it is made.
        (false, true) => format!("{device} becomes a new cache set, with a UUID that is chosen then"),
        (false, false) => format!("{device} becomes the cache set {}", fresh.superblock.set_uuid()),
    });
    shown.notes.extend(fresh.warning.clone());
    if found.engine.is_none() {
        // For volumes that were removed before: nothing else reports them.
        shown.notes.extend(lost.stranded().iter().map(DirtyVolume::loss));
    }
    if begin.dry_run {
        return Ok(None);
    }
    let UnusedCache { device, superblock, .. } = fresh;
    device.require_blocks(u32::try_from(superblock.block_sectors()).unwrap_or(u32::MAX))?;
    judged.forsake()?;
    Ok(Some(ReplaceAction::Begin(Box::new(CacheDevice { device, superblock }))))
}

/// Sends the request to the loop and waits for the answer.
fn ask(
    events: &Sender<Event>,
    found: &CurrentCache,
    device: &str,
    what: ReplaceAction,
    uid: Option<u32>,
) -> Result<JobReport, Failure> {
    let (answer, answered) = mpsc::channel();
    let (name, device) = (found.name.clone(), device.to_owned());
    let asked = ReplaceRequest { name, device, what, uid, is_dead: found.trouble.is_some(), answer };
    let _refused_below =
        events.send(Event::Request(crate::supervisor::ClientRequest::Replace(Box::new(asked))));
    match answered.recv_timeout(LIMIT) {
        Ok(answer) => answer,
        Err(RecvTimeoutError::Timeout) => {
            let what = format!("replace of {} has not begun within {} s", found.name, LIMIT.as_secs());
            Err(crate::supervisor::late(what).next("try again: a job that has begun by then is joined"))
        }
        Err(RecvTimeoutError::Disconnected) => {
            Err(Failure::new(Kind::Io, "nothing was begun").why("the daemon is stopping"))
        }
    }
}

/// Returns the engine of the former cache.
fn former_engine(found: &CurrentCache) -> Option<&Engine> {
    found.former.as_ref().and_then(|(_, _, engine)| engine.as_ref())
}

impl CurrentCache {
    /// Checks whether `device`, by whatever name, is the cache's device.
    fn is_at(&self, device: &str) -> bool {
        let identity = |path: PathBuf| Device::open(path, Access::Look).ok().map(|device| device.identity());
        let known = || devices::resolve(&self.device).ok().and_then(identity);
        self.device == device
            || match &self.opened {
                Some(opened) => opened.is_at(Path::new(device)),
                None => known().is_some_and(|known| identity(PathBuf::from(device)) == Some(known)),
            }
    }
}

fn find(shared: &Mutex<Shared>, typed: &str) -> Result<CurrentCache, Failure> {
    let index = resolve_cache(shared, TypedName::by_owner(typed), CacheFilter::All)?;
    let shared = lock(shared);
    let table = &shared.table;
    let cannot = |kind, name: &str| Failure::new(kind, format!("cannot replace {name}"));
    let named = |name: &String| table.lasting_caches().find(|(_, cache)| cache.name.as_ref() == Some(name));
    // The name of a former cache means the cache.
    let index = table.caches[index].former_of.as_ref().and_then(named).map_or(index, |(index, _)| index);
    let entry = &table.caches[index];
    let name = entry.display_name().to_owned();
    if table.strict {
        return Err(cannot(Kind::Usage, &name)
            .why("the daemon serves devices of its command line, without a configuration")
            .next("start it with a configuration: `bcached config scan` writes one"));
    }
    let former = table.former_of(index);
    let trouble = match &table.caches[former.unwrap_or(index)].state {
        CacheState::Waiting(failure) | CacheState::Failed(failure) => Some(failure.clone()),
        CacheState::Open { .. } => None,
        _ => {
            return Err(cannot(Kind::NotFound, &name)
                .why("it is not open yet")
                .next("`bcached status` shows its progress: try again when it is open"));
        }
    };
    let is_only = table.lasting_caches().count() == 1;
    let is_left = |entry: &&VolumeEntry| {
        let is_served = matches!(entry.state, VolumeState::Served(_) | VolumeState::Attaching);
        // A volume that is served without the cache would join it.
        !entry.is_leaving() && (!is_served || entry.missing_cache.is_some()) && entry.backing.is_some()
    };
    let meant = |entry: &VolumeEntry| match &entry.wanted_cache {
        Some(wanted) if *wanted == name => CacheAssignment::Here,
        Some(_) => CacheAssignment::Elsewhere,
        None if is_only => CacheAssignment::Here,
        None => CacheAssignment::Unspecified,
    };
    let left = table.volumes.iter().filter(is_left);
    let caches =
        table.real_caches().map(|(_, cache)| (cache.display_name().to_owned(), cache.device.clone()));
    let backings = table.volumes.iter().filter_map(|entry| {
        Some((entry.display_name().to_owned(), entry.backing.clone()?, entry.wanted_cache.clone()))
    });
    let known = ConfiguredNames { caches: caches.collect(), volumes: backings.collect() };
    Ok(CurrentCache {
        known,
        volumes: left.map(|entry| (entry.clone(), meant(entry))).collect(),
        sets: table.real_caches().filter_map(|(_, cache)| cache.set()).collect(),
        engine: entry.engine(),
        trouble,
        arrival: table.arrival_after_dead(index),
        former: former.map(|at| (at, table.caches[at].device.clone(), table.caches[at].engine())),
        device: entry.device.clone(),
        opened: entry.opened,
        name,
    })
}

/// What may be replaced, and by what.
struct CheckedReplacement {
    geometry: RequiredGeometry,
    dirty_bytes: u64,
    /// Devices that say that they belong to a missing set, and that have no dirty data in it.
    bound: Vec<String>,
    /// The missing sets.
    missing: Vec<Uuid>,
}

impl CheckedReplacement {
    /// Makes the bound devices say so no longer: what the missing set holds of them is void from
    /// now on.
    fn forsake(&self) -> Result<(), Failure> {
        self.bound.iter().try_for_each(|device| devices::forsake(device))
    }

    /// Checks that the new set is none of the existing ones: what devices say of those would apply
    /// to it.
    fn check_new(&self, found: &CurrentCache, superblock: &CacheSuperblock) -> Result<(), Failure> {
        let set = superblock.set_uuid();
        if !found.sets.contains(&set) && !self.missing.contains(&set) {
            return Ok(());
        }
        Err(Failure::new(Kind::WrongSet, format!("cannot replace {}", found.name))
            .why(format!("the new device was made with the UUID of a set that is in use here, {set}"))
            .next("--wipe-bcache makes it again, with a UUID of its own")
            .option("--wipe-bcache"))
    }
}

fn judge(found: &CurrentCache, engine: Option<&Engine>) -> Result<CheckedReplacement, Failure> {
    let name = &found.name;
    let cannot = |kind| Failure::new(kind, format!("cannot replace {name}"));
    let Some(engine) = engine else { return judge_dead(found) };
    let status = engine.status().ok_or_else(|| {
        cannot(Kind::Io).why("its engine does not answer").next("check its device for errors, or try again")
    })?;
    if let Some(flash) = status.volumes.iter().find(|volume| volume.flash_only) {
        let label = flash.label.to_string();
        return Err(lives_there(
            name,
            &label,
            &format!("`bcached remove {label}` and `bcached forget {label}`"),
        ));
    }
    check_unserved(name, &status)?;
    let dirty_bytes = status.dirty_sectors * 512;
    let dirty = DirtyData::of(status.dirty_sectors, status.is_counted);
    if let (Some(error), true) = (&status.failed, dirty.dirty_bytes != Some(0)) {
        return Err(cannot(Kind::DataLoss)
            .why(format!("it has stopped writing ({error}), and its dirty data would be lost: {dirty}"))
            .next("bring its device back; to give the data of a volume up, `bcached remove` it and `bcached forget` it with --accept-loss"));
    }
    let blocks = status.volumes.iter().filter_map(|volume| volume.backing_block_sectors);
    let block = blocks.min().and_then(|block| u16::try_from(block).ok()).unwrap_or(BLOCK).min(BLOCK);
    let bucket = u16::try_from(status.bucket_sectors).unwrap_or(BUCKET);
    Ok(CheckedReplacement {
        geometry: RequiredGeometry { block_sectors: block, bucket_sectors: bucket },
        dirty_bytes,
        bound: Vec::new(),
        missing: Vec::new(),
    })
}

/// Judges a cache that is not open. Only the backing devices can tell. All volumes that are not
/// served count, because the section of one with data in the cache may say anything now.
fn judge_dead(found: &CurrentCache) -> Result<CheckedReplacement, Failure> {
    check_dead(found)?;
    let geometry = RequiredGeometry { block_sectors: BLOCK, bucket_sectors: BUCKET };
    let mut judged = CheckedReplacement { geometry, dirty_bytes: 0, bound: Vec::new(), missing: Vec::new() };
    for (entry, meant) in &found.volumes {
        judged.judge_left(found, entry, *meant)?;
    }
    Ok(judged)
}

/// Refuses a cache whose device may become available soon: it is not dead.
fn check_dead(found: &CurrentCache) -> Result<(), Failure> {
    let Some(trouble) = &found.trouble else { return Ok(()) };
    if !matches!(
        trouble.kind,
        Kind::InUse | Kind::TimeLimit | Kind::Permission | Kind::NotLooked | Kind::Scarce
    ) {
        return Ok(());
    }
    Err(Failure::new(Kind::InUse, format!("cannot replace {}", found.name))
        .why(format!("it is not known to be dead: {trouble}"))
        .next("try again when its device answers, or is gone"))
}

impl CheckedReplacement {
    /// Judges what the device of a volume that is not served says.
    fn judge_left(
        &mut self,
        found: &CurrentCache,
        entry: &VolumeEntry,
        meant: CacheAssignment,
    ) -> Result<(), Failure> {
        let trouble = found.trouble.as_ref().map_or_else(String::new, |failure| format!(" ({failure})"));
        let cannot = |kind| Failure::new(kind, format!("cannot replace {}", found.name));
        let (volume, device) = (entry.display_name(), entry.backing.as_deref().unwrap_or_default());
        let superblock = match devices::look_at_backing(device) {
            Err(_) if meant == CacheAssignment::Elsewhere && entry.wanted_cache.as_deref() != Some(NO_CACHE) => return Ok(()),
            other => other.map_err(|failure| {
                cannot(Kind::DataLoss)
                    .why(format!("it is not available{trouble}, and it is unknown whether it has dirty data of {volume}: {failure}"))
                    .next(format!("connect {device}, or `bcached remove {volume}` first"))
            })?,
        };
        if meant == CacheAssignment::Here {
            let block = u16::try_from(superblock.block_sectors()).unwrap_or(BLOCK);
            self.geometry.block_sectors = self.geometry.block_sectors.min(block);
        }
        let set = superblock.set_uuid();
        if superblock.state() == BackingState::None || found.sets.contains(&set) {
            return Ok(());
        }
        self.missing.push(set);
        match (superblock.state(), meant) {
            (BackingState::Dirty, _) => Err(cannot(Kind::DataLoss)
                .why(format!(
                    "it is not available{trouble}, and the newest data of {volume} is in it, or in another cache that is not open{}",
                    DirtyVolume::of(volume, device, &superblock).map_or_else(String::new, |lost| format!("; {}", lost.loss()))
                ))
                .next(format!(
                    "bring it back, or leave the volume as it is with `bcached remove {volume}`; `bcached forget` gives dirty data up only where the cache is open"
                ))),
            // Its superblock says already that the cached data is void.
            (_, CacheAssignment::Here) if matches!(entry.state, VolumeState::Served(_)) => Ok(()),
            (_, CacheAssignment::Here) => {
                self.bound.push(device.to_owned());
                Ok(())
            }
            (_, CacheAssignment::Unspecified) => Err(cannot(Kind::Config)
                .why(format!("{volume} belongs to a set that is not open, and its section names no cache"))
                .next(format!("write `cache = \"{}\"`, or another, into [volume.{volume}], and reload", found.name))),
            (_, CacheAssignment::Elsewhere) => Ok(()),
        }
    }
}

/// Checks that no data would be left in a set that nothing would look for.
pub fn check_unserved(name: &str, status: &Status) -> Result<(), Failure> {
    if status.walked_percent < 100 {
        // Which data is dirty, and of which volume, is not known yet.
        return Err(Failure::new(Kind::InUse, format!("cannot replace {name}"))
            .why(format!("its index is still being read after its start ({}%)", status.walked_percent))
            .next("try again in a moment"));
    }
    if status.ownerless_dirty_sectors > 0 {
        let dirty = DirtyData::of(status.ownerless_dirty_sectors, status.is_counted);
        return Err(Failure::new(Kind::DataLoss, format!("cannot replace {name}"))
            .why(format!("{dirty} of no known volume, which exists nowhere else, would be lost"))
            .next("add the volume that it may belong to; docs/failures.md (a lost table of volumes) says what can be done"));
    }
    for left in &status.unserved {
        let called = crate::supervisor::report::unserved(left).name();
        if left.flash_sectors.is_some() {
            // It was removed already. The UUID names it, since a label may be anything.
            return Err(lives_there(name, &called, &format!("`bcached forget {}`", left.uuid)));
        }
        let dirty = DirtyData::of(left.dirty_sectors, left.is_counted);
        if dirty.dirty_bytes != Some(0) {
            return Err(Failure::new(Kind::DataLoss, format!("cannot replace {name}"))
                .why(format!("{dirty} of {called}, which is not served, would be lost"))
                .next(format!("serve that volume, or give its data up: `bcached forget {}`", left.uuid)));
        }
    }
    Ok(())
}

/// Returns the failure for the flash-only volume `flash`, whose data is nowhere else. `deleted`
/// names the commands that delete it.
fn lives_there(name: &str, flash: &str, deleted: &str) -> Failure {
    Failure::new(Kind::DataLoss, format!("cannot replace {name}"))
        .why(format!(
            "the flash-only volume {flash} is in it: there is no backing device that its data could go to"
        ))
        .next(format!("copy its data to a volume elsewhere, then {deleted}"))
}
