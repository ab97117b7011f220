//! A cache becomes another device, while its volumes are served: each leaves the set that is there, with all of its data on its backing
//! device, and comes to the new one.
//!
//! That the cache is the new device is kept before the first volume goes, and which device it was before until the last has gone. So both
//! are opened by a start in between, each volume is served by the one that its superblock names, and the work goes on. What is asked for is
//! judged, and the device is made, on the thread of who asks: neither waits for the loop, nor does that for a device.

use crate::engine_thread::Engine;
use crate::supervisor::jobs::api::lock;
use crate::supervisor::options::owner::{Among, resolve_cache};
use crate::supervisor::table::{CacheState, VolumeEntry, VolumeState};
use crate::supervisor::volumes::rejoin::Arrival;
use crate::supervisor::{Event, Shared};
use bcached_config::NO_CACHE;
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{Begin, Job as Shown, State, Verb};
use bcached_control::names::Called;
use bcached_control::status::Dirty;
use bcached_engine::Status;
use bcached_format::{BackingState, CacheSuperblock, Uuid};
use bcached_offline::devices::{self, CacheDevice};
use bcached_offline::lost_sets::{Known, LostSets, Stranded};
use bcached_offline::make_checks::{self, Fresh, Geometry};
use bcached_uring::{Access, Device, Presence};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long somebody waits until it has begun: less than the client waits for an answer.
const LIMIT: Duration = Duration::from_secs(4);

/// Blocks and buckets of a new cache that nothing says otherwise of, in sectors.
const BLOCK: u16 = 8;
const BUCKET: u16 = 1024;

/// What the loop is to do.
pub struct Asked {
    pub name: String,
    pub device: String,
    pub what: What,
    pub uid: Option<u32>,
    /// What it is to leave was judged to be dead.
    pub is_dead: bool,
    pub answer: Sender<Result<Shown, Failure>>,
}

pub enum What {
    /// To see whether it can be kept.
    Look,
    /// With this device, of which the loop gets the claim.
    Begin(Box<CacheDevice>),
    /// It has been begun, and given up.
    GoOn,
    /// It has been done: for what still is on its way.
    Wait,
}

/// The cache as it is.
struct Found {
    name: String,
    device: String,
    /// Which one that is, if it was opened.
    opened: Option<Presence>,
    engine: Option<Engine>,
    /// Why it is not open.
    trouble: Option<Failure>,
    /// What it was before.
    former: Option<(usize, String, Option<Engine>)>,
    /// How far its volumes are, if it was made in place of a dead one.
    arrival: Arrival,
    /// The sets that are open here.
    sets: Vec<Uuid>,
    /// Those that nobody serves, or only without their cache, and what their sections say of it.
    volumes: Vec<(VolumeEntry, Meant)>,
    /// What there is to look at for sets that are missing.
    known: Known,
}

/// What a volume's section says of the cache.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meant {
    /// It is to have that.
    Here,
    /// It is to have another, or none.
    Elsewhere,
    /// Nothing, and there are several.
    Unsaid,
}

/// Judges and begins it. What is refused here the log hears of here; the loop tells of what it refuses to begin.
pub fn begin(
    shared: &Arc<Mutex<Shared>>,
    events: &Sender<Event>,
    begin: &Begin,
    uid: Option<u32>,
) -> Result<Shown, Failure> {
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
    (begin, uid): (&Begin, Option<u32>),
    is_told: &Cell<bool>,
) -> Result<Shown, Failure> {
    let found = find(shared, &begin.volume)?;
    let cannot = |kind| Failure::new(kind, format!("cannot replace {}", found.name));
    let device = begin.with.clone().ok_or_else(|| {
        cannot(Kind::Usage).why("the new device is not named").next("name it with --with").option("--with")
    })?;
    let mut shown = Shown::new(Verb::Replace, found.name.clone(), State::Planned);
    let is_there = found.is_at(&device);
    let ask = |what, uid| ask(events, &found, &device, what, uid);
    let what = match &found.former {
        None if is_there => match &found.arrival {
            Arrival::Done => return Ok(Shown { already: true, state: State::Done, ..shown }),
            Arrival::Fails(failure) if begin.dry_run => return Err(failure.clone()),
            Arrival::Waits(_) if begin.dry_run => return Ok(shown),
            Arrival::Waits(_) | Arrival::Fails(_) => What::Wait,
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
            What::GoOn
        }
        Some((_, _, _)) => {
            return Err(cannot(Kind::InUse)
                .why(format!("its volumes are on their way to {}", found.device))
                .next(format!(
                    "`bcached replace {} --with {}` goes on with that",
                    found.name, found.device
                )));
        }
        None => {
            let look = || ask(What::Look, uid).map(drop);
            match plan_new(&found, (begin, &device), look, &mut shown)? {
                Some(what) => what,
                None => return Ok(shown),
            }
        }
    };
    is_told.set(true);
    let job = ask(what, uid)?;
    if let Some(number) = job.id {
        // Whoever waits for it looks at it again.
        lock(shared).jobs.note(number, &shown.notes);
    }
    Ok(Shown { notes: shown.notes, ..job })
}

/// What becomes of the cache that is still where it was: `device` is made a new one in its place. `None`: that is only planned. `look`: whether
/// the loop would begin it.
fn plan_new(
    found: &Found,
    (begin, device): (&Begin, &str),
    look: impl FnOnce() -> Result<(), Failure>,
    shown: &mut Shown,
) -> Result<Option<What>, Failure> {
    let judged = judge(found, found.engine.as_ref())?;
    look()?;
    let lost = LostSets::look(&[], &found.known);
    let allowed = (&begin.overwrites, &lost);
    let fresh = make_checks::cache(Path::new(device), judged.geometry, allowed, begin.dry_run)?;
    judged.check_new(found, &fresh.superblock)?;
    shown.dirty_bytes_at_start = judged.dirty_bytes;
    shown.notes.push(match (fresh.was_made, begin.dry_run) {
        (true, _) => format!("{device} was made a cache before, and is taken as it is"),
        // Its UUIDs are drawn then.
        (false, true) => format!("{device} becomes a new cache set, with a UUID that is drawn then"),
        (false, false) => format!("{device} becomes the cache set {}", fresh.superblock.set_uuid()),
    });
    shown.notes.extend(fresh.warning.clone());
    if found.engine.is_none() {
        // Of volumes that were removed before: nobody else tells of them.
        shown.notes.extend(lost.stranded().iter().map(Stranded::loss));
    }
    if begin.dry_run {
        return Ok(None);
    }
    let Fresh { device, superblock, .. } = fresh;
    device.require_blocks(u32::try_from(superblock.block_sectors()).unwrap_or(u32::MAX))?;
    judged.forsake()?;
    Ok(Some(What::Begin(Box::new(CacheDevice { device, superblock }))))
}

/// The loop's answer.
fn ask(
    events: &Sender<Event>,
    found: &Found,
    device: &str,
    what: What,
    uid: Option<u32>,
) -> Result<Shown, Failure> {
    let (answer, answered) = mpsc::channel();
    let (name, device) = (found.name.clone(), device.to_owned());
    let asked = Asked { name, device, what, uid, is_dead: found.trouble.is_some(), answer };
    let _refused_below = events.send(Event::Replace(Box::new(asked)));
    match answered.recv_timeout(LIMIT) {
        Ok(answer) => answer,
        Err(RecvTimeoutError::Timeout) => Err(crate::supervisor::late("the daemon does not come to it")
            .next("ask again: if it has begun by then, that is joined")),
        Err(RecvTimeoutError::Disconnected) => {
            Err(Failure::new(Kind::Io, "nothing was begun").why("the daemon is stopping"))
        }
    }
}

/// The engine of what it was before.
fn former_engine(found: &Found) -> Option<&Engine> {
    found.former.as_ref().and_then(|(_, _, engine)| engine.as_ref())
}

impl Found {
    /// Its device is that, by whatever name.
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

fn find(shared: &Mutex<Shared>, typed: &str) -> Result<Found, Failure> {
    let index = resolve_cache(shared, Called::by_owner(typed), Among::All)?;
    let shared = lock(shared);
    let table = &shared.table;
    let cannot = |kind, name: &str| Failure::new(kind, format!("cannot replace {name}"));
    let named = |name: &String| table.lasting_caches().find(|(_, cache)| cache.name.as_ref() == Some(name));
    // What a cache was before stands for the cache.
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
                .next("`bcached status` says how far it is: then ask again"));
        }
    };
    let is_only = table.lasting_caches().count() == 1;
    let is_left = |entry: &&VolumeEntry| {
        let is_served = matches!(entry.state, VolumeState::Served(_) | VolumeState::Attaching);
        // Who is served without it would come to it.
        !entry.is_leaving() && (!is_served || entry.lack.is_some()) && entry.backing.is_some()
    };
    let meant = |entry: &VolumeEntry| match &entry.wanted_cache {
        Some(wanted) if *wanted == name => Meant::Here,
        Some(_) => Meant::Elsewhere,
        None if is_only => Meant::Here,
        None => Meant::Unsaid,
    };
    let left = table.volumes.iter().filter(is_left);
    let caches =
        table.real_caches().map(|(_, cache)| (cache.display_name().to_owned(), cache.device.clone()));
    let backings = table.volumes.iter().filter_map(|entry| {
        Some((entry.display_name().to_owned(), entry.backing.clone()?, entry.wanted_cache.clone()))
    });
    let known = Known { caches: caches.collect(), volumes: backings.collect() };
    Ok(Found {
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
struct Judged {
    geometry: Geometry,
    dirty_bytes: u64,
    /// Devices that say that they belong to a set which is not there; nothing of them is dirty.
    bound: Vec<String>,
    /// The sets that are not there.
    missing: Vec<Uuid>,
}

impl Judged {
    /// They say so no more: what that set holds of them is void from now on.
    fn forsake(&self) -> Result<(), Failure> {
        self.bound.iter().try_for_each(|device| devices::forsake(device))
    }

    /// It is none of the sets that there are: what devices say of those would be said of it.
    fn check_new(&self, found: &Found, superblock: &CacheSuperblock) -> Result<(), Failure> {
        let set = superblock.set_uuid();
        if !found.sets.contains(&set) && !self.missing.contains(&set) {
            return Ok(());
        }
        Err(Failure::new(Kind::WrongSet, format!("cannot replace {}", found.name))
            .why(format!("the new device was made with the UUID of a set that is in use here, {set}"))
            .next("--wipe-bcache makes it anew, with a UUID of its own")
            .option("--wipe-bcache"))
    }
}

fn judge(found: &Found, engine: Option<&Engine>) -> Result<Judged, Failure> {
    let name = &found.name;
    let cannot = |kind| Failure::new(kind, format!("cannot replace {name}"));
    let Some(engine) = engine else { return judge_dead(found) };
    let status = engine.status().ok_or_else(|| {
        cannot(Kind::Io).why("its engine does not answer at present").next("look at its device, or ask again")
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
    let dirty = Dirty::of(status.dirty_sectors, status.is_counted);
    if let (Some(error), true) = (&status.failed, dirty.dirty_bytes != Some(0)) {
        return Err(cannot(Kind::DataLoss)
            .why(format!("it has stopped writing ({error}), and what is dirty in it would be lost: {dirty}"))
            .next("bring its device back; of a volume that is given up, `bcached remove` it and `bcached forget` it with --accept-loss"));
    }
    let blocks = status.volumes.iter().filter_map(|volume| volume.backing_block_sectors);
    let block = blocks.min().and_then(|block| u16::try_from(block).ok()).unwrap_or(BLOCK).min(BLOCK);
    let bucket = u16::try_from(status.bucket_sectors).unwrap_or(BUCKET);
    Ok(Judged {
        geometry: Geometry { block_sectors: block, bucket_sectors: bucket },
        dirty_bytes,
        bound: Vec::new(),
        missing: Vec::new(),
    })
}

/// Only the backing devices can be asked: all that nobody serves, since what was in it may say anything in its section now.
fn judge_dead(found: &Found) -> Result<Judged, Failure> {
    check_dead(found)?;
    let geometry = Geometry { block_sectors: BLOCK, bucket_sectors: BUCKET };
    let mut judged = Judged { geometry, dirty_bytes: 0, bound: Vec::new(), missing: Vec::new() };
    for (entry, meant) in &found.volumes {
        judged.judge_left(found, entry, *meant)?;
    }
    Ok(judged)
}

/// One whose device may be had soon is not dead.
fn check_dead(found: &Found) -> Result<(), Failure> {
    let Some(trouble) = &found.trouble else { return Ok(()) };
    if !matches!(
        trouble.kind,
        Kind::InUse | Kind::TimeLimit | Kind::Permission | Kind::NotLooked | Kind::Scarce
    ) {
        return Ok(());
    }
    Err(Failure::new(Kind::InUse, format!("cannot replace {}", found.name))
        .why(format!("whether it is dead is not known: {trouble}"))
        .next("ask again when its device answers, or is gone"))
}

impl Judged {
    /// What the device of a volume that nobody serves says.
    fn judge_left(&mut self, found: &Found, entry: &VolumeEntry, meant: Meant) -> Result<(), Failure> {
        let trouble = found.trouble.as_ref().map_or_else(String::new, |failure| format!(" ({failure})"));
        let cannot = |kind| Failure::new(kind, format!("cannot replace {}", found.name));
        let (volume, device) = (entry.display_name(), entry.backing.as_deref().unwrap_or_default());
        let superblock = match devices::look_at_backing(device) {
            Err(_) if meant == Meant::Elsewhere && entry.wanted_cache.as_deref() != Some(NO_CACHE) => return Ok(()),
            other => other.map_err(|failure| {
                cannot(Kind::DataLoss)
                    .why(format!("it is not there{trouble}, and whether data of {volume} is dirty in it cannot be told: {failure}"))
                    .next(format!("connect that device, or `bcached remove {volume}` first"))
            })?,
        };
        if meant == Meant::Here {
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
                    "it is not there{trouble}, and the newest data of {volume} is in it, or in another that is not open{}",
                    Stranded::of(volume, device, &superblock).map_or_else(String::new, |lost| format!("; {}", lost.loss()))
                ))
                .next(format!(
                    "bring it back; `bcached forget` gives dirty data up where a cache is open, here only `bcached remove {volume}` leaves the volume as it is"
                ))),
            // Its superblock says already that what is in it is void.
            (_, Meant::Here) if matches!(entry.state, VolumeState::Served(_)) => Ok(()),
            (_, Meant::Here) => {
                self.bound.push(device.to_owned());
                Ok(())
            }
            (_, Meant::Unsaid) => Err(cannot(Kind::Config)
                .why(format!("{volume} belongs to a set that is not open, and its section names no cache"))
                .next(format!("say `cache = \"{}\"`, or another, in [volume.{volume}], and reload", found.name))),
            (_, Meant::Elsewhere) => Ok(()),
        }
    }
}

/// Nothing may be left in a set that nobody would look for.
pub fn check_unserved(name: &str, status: &Status) -> Result<(), Failure> {
    if status.walked_percent < 100 {
        // What is dirty, and of whom, is not known yet.
        return Err(Failure::new(Kind::InUse, format!("cannot replace {name}"))
            .why(format!("its index is still being read after its start ({}%)", status.walked_percent))
            .next("ask again in a moment"));
    }
    if status.ownerless_dirty_sectors > 0 {
        let dirty = Dirty::of(status.ownerless_dirty_sectors, status.is_counted);
        return Err(Failure::new(Kind::DataLoss, format!("cannot replace {name}"))
            .why(format!("{dirty} of no known volume, which is nowhere else, would be lost"))
            .next("add the volume that it may be of; docs/failures.md (a lost table of volumes) says what can be done"));
    }
    for left in &status.unserved {
        let called = crate::supervisor::report::unserved(left).name();
        if left.flash_sectors.is_some() {
            // It was removed already. A label may be anything.
            return Err(lives_there(name, &called, &format!("`bcached forget {}`", left.uuid)));
        }
        let dirty = Dirty::of(left.dirty_sectors, left.is_counted);
        if dirty.dirty_bytes != Some(0) {
            return Err(Failure::new(Kind::DataLoss, format!("cannot replace {name}"))
                .why(format!("{dirty} of {called}, which is not served, would be lost"))
                .next(format!("serve that, or give it up: `bcached forget {}`", left.uuid)));
        }
    }
    Ok(())
}

/// What `flash` holds is nowhere else; `deleted` are the commands after which it is not there any more.
fn lives_there(name: &str, flash: &str, deleted: &str) -> Failure {
    Failure::new(Kind::DataLoss, format!("cannot replace {name}"))
        .why(format!("{flash} lives in it alone: there is no device behind it that its data could go to"))
        .next(format!("copy it to a volume elsewhere, then {deleted}"))
}
