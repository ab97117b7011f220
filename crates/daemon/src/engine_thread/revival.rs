//! Opens a set again that has failed, when its device answers again, and brings its volumes home.
//!
//! Nothing is given up before the device has shown that it works: the block at which it failed last is read and written back. Then
//! the set is stopped and let go of, and opened as after a crash: from its journal and its note, so that all that was acknowledged
//! is there. A volume is added to it under its number, and what waited for it goes on. What fails on the way is tried again, ever
//! less often.

use super::cache_back;
use super::keeper::{Keeper, Sets};
use super::letting_go::let_go;
use super::{NoNote, open_note};
use crate::devices::memory;
use crate::engine_failure;
use bcached_engine::{CacheSet, Error, Options, VolumeId};
use bcached_env::{Buffer, Note, Time};
use bcached_format::BackingState;
use bcached_uring::note::NoteError;
use std::time::Duration;

/// How long nothing is tried after a failure; each attempt in vain, and each failure soon after a success, doubles it.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// A set that has worked for so long has failed anew.
const WORKS_AFTER: Duration = Duration::from_secs(60);

/// The task: as long as the engine runs.
pub async fn run(keeper: Keeper) {
    let env = keeper.inner().env.clone();
    let (mut pause, mut well_since) = (PAUSE_MIN, None::<Time>);
    // A device that is back was tried at once, and could not be taken yet.
    let mut is_tried = false;
    loop {
        while !is_wanted(&keeper) {
            if keeper.with(|sets| sets.is_stopping) {
                return;
            }
            keeper.alarmed(None).await;
        }
        if well_since.take().is_some_and(|since| env.now() - since >= WORKS_AFTER) {
            pause = PAUSE_MIN;
        }
        let until = env.now() + pause;
        let is_back = |sets: &mut Sets| sets.returned.is_some() && !is_tried;
        while env.now() < until && !keeper.with(|sets| sets.is_stopping || is_back(sets)) {
            keeper.alarmed(Some(until)).await;
        }
        if keeper.with(|sets| sets.is_stopping) {
            return;
        }
        pause = (pause * 2).min(PAUSE_MAX);
        let was_well = has_all(&keeper);
        keeper.with(|sets| sets.is_trying = true);
        let is_well = attempt(&keeper).await;
        is_tried = keeper.change(|sets| {
            sets.is_trying = false;
            sets.returned.is_some()
        });
        if is_well && !was_well {
            well_since = Some(env.now());
            tracing::info!(
                event = "cache-works-again",
                "the cache set is open again: all of its volumes have it"
            );
        }
    }
}

/// There is something that may pass.
fn is_wanted(keeper: &Keeper) -> bool {
    if keeper.with(|sets| sets.returned.is_some()) {
        return true;
    }
    let (main, is_lost, is_owed) = keeper.with(|sets| {
        let is_owed = !sets.away.is_empty() || !sets.owed_modes.is_empty();
        (sets.main.clone(), sets.is_lost, is_owed)
    });
    match main {
        None => !is_lost,
        Some(set) => set.failure().map_or(is_owed, |error| error.may_pass()),
    }
}

/// The set works, and has all of its volumes.
fn has_all(keeper: &Keeper) -> bool {
    let (main, is_anybody_away) = keeper.with(|sets| (sets.main.clone(), !sets.away.is_empty()));
    !is_anybody_away && main.is_some_and(|set| set.failure().is_none())
}

/// True if all volumes are home. What is owed beside that is tried again after a pause.
async fn attempt(keeper: &Keeper) -> bool {
    let main = keeper.with(|sets| sets.main.clone());
    let works = main.is_some_and(|set| set.failure().is_none());
    if works {
        cache_back::decline(keeper);
    } else {
        let is_back = keeper.with(|sets| sets.returned.is_some());
        if !is_back && !answers(keeper).await || !has_boat(keeper).await || !let_go(keeper).await {
            return false;
        }
        board(keeper).await;
        if is_back {
            cache_back::exchange(keeper);
        }
        if keeper.with(|sets| sets.is_lost) {
            return false;
        }
        if let Err(error) = open_again(keeper).await {
            tracing::warn!(event = "cache-not-opened-again", "the cache set cannot be opened again: {error}");
            let is_lost = !error.may_pass();
            keeper.change(|sets| {
                sets.is_lost = is_lost;
                sets.why = Some(error.clone());
                if let Some(before) = &mut sets.before {
                    before.failed = Some(error);
                }
            });
            return false;
        }
    }
    let all = bring_home(keeper).await;
    if all {
        land(keeper).await;
    }
    pay_modes(keeper).await;
    all
}

/// The cache device reads and writes the block again at which it failed last. Nobody else writes there: a set that has failed
/// writes no more.
async fn answers(keeper: &Keeper) -> bool {
    let inner = keeper.inner();
    let disk = inner.env.disk(inner.recipe.cache.get());
    let health = disk.health();
    if health.waiting > 0 {
        return false;
    }
    let block = disk.info().logical_block_sectors.max(1);
    let sector = health.last_error.map_or(0, |error| error.sector - error.sector % u64::from(block));
    let bytes = usize::try_from(block).expect("a block is small") * 512;
    let (read, buffer) = disk.read(sector, Buffer::zeroed(bytes)).await;
    read.is_ok() && disk.write(sector, buffer.freeze()).await.is_ok()
}

/// Volumes whose data is all on their backing devices are served from those.
async fn board(keeper: &Keeper) {
    let mut waiting: Vec<_> = keeper.with(|sets| {
        let may_go = sets.away.iter().filter(|(_, away)| !away.is_aboard && !away.info.may_be_dirty());
        may_go.map(|(id, away)| (*id, away.disk)).collect()
    });
    if waiting.is_empty() {
        return;
    }
    let Ok(boat) = boat(keeper).await else { return };
    for (id, disk) in waiting.drain(..) {
        if let Err(error) = boat.add_uncached_as(id, disk).await {
            tracing::warn!(event = "no-way-past-the-cache", "a volume waits for its cache: {error}");
            continue;
        }
        // Somebody may have changed them meanwhile.
        let options = keeper.options_of(id);
        let _it_is_there = boat.change_volume_options(id, |begun| *begun = options);
        keeper.change(|sets| {
            if let Some(away) = sets.away.get_mut(&id) {
                away.is_aboard = true;
            }
        });
    }
}

/// Whoever can do without the cache has a way to, before that is let go of: until then the set itself serves them so.
async fn has_boat(keeper: &Keeper) -> bool {
    let needs_one = keeper.status().volumes.iter().any(|info| !info.flash_only && !info.may_be_dirty());
    if !needs_one {
        return true;
    }
    let made = boat(keeper).await;
    if let Err(error) = &made {
        tracing::warn!(
            event = "cache-not-opened-again",
            "volumes could not go without it meanwhile: {error}"
        );
    }
    made.is_ok()
}

/// A set on a device in memory.
async fn boat(keeper: &Keeper) -> Result<CacheSet, Error> {
    if let Some((boat, _)) = keeper.with(|sets| sets.boat.clone()) {
        return Ok(boat);
    }
    let inner = keeper.inner();
    let block = keeper.status().block_sectors;
    // Smaller blocks than a device has cannot be written to it; larger ones than it has cost more.
    let cache = memory::make(if block < 8 { 1 } else { 8 }).map_err(|failure| Keeper::refused(&failure))?;
    let nodes = bcached_engine::node_budget_min(cache.superblock.bucket_sectors(), 1);
    let options = Options { node_budget_bytes: nodes, ..Options::default() };
    let disk = inner.disks.add(cache.device);
    let opened = CacheSet::open(inner.env.clone(), disk, Box::new(NoNote), options).await;
    match &opened {
        Ok(boat) => keeper.change(|sets| sets.boat = Some((boat.clone(), disk))),
        Err(_) => drop(inner.disks.remove(disk)),
    }
    opened
}

/// Opens the set as after a crash.
pub(super) async fn open_again(keeper: &Keeper) -> Result<(), Error> {
    let inner = keeper.inner();
    let note: Box<dyn Note> = match &inner.recipe.note {
        Some(place) => {
            let refused = |error: NoteError| Keeper::refused(&engine_failure::of_note(None, &error));
            open_note(place, inner.recipe.set_uuid, &inner.recipe.note_gone).map_err(refused)?.0
        }
        None => Box::new(NoNote),
    };
    let fresh = Options::default();
    // What counts for one opening is not for another.
    let options =
        Options { opening: fresh.opening, phases: fresh.phases, ..inner.recipe.options.borrow().clone() };
    let set = CacheSet::open(inner.env.clone(), inner.recipe.cache.get(), note, options).await?;
    keeper.is_open_again(set.clone());
    // The note may have gone while there was no set to be told.
    let _until_the_next_file = set.keep_note().await;
    Ok(())
}

/// Gives the volumes to the set that has been opened again; true if it has all of them.
pub(super) async fn bring_home(keeper: &Keeper) -> bool {
    let away: Vec<_> = keeper.with(|sets| sets.away.keys().copied().collect());
    let mut all = true;
    for id in away {
        if keeper.with(|sets| sets.is_stopping) {
            return false;
        }
        if let Err(error) = bring(keeper, id).await {
            tracing::warn!(event = "volume-not-back", "a volume has not come back to its cache: {error}");
            all = false;
        }
    }
    all
}

async fn bring(keeper: &Keeper, id: VolumeId) -> Result<(), Error> {
    let (Ok(set), Some(boat)) = (keeper.main(), leaves_boat(keeper, id)) else { return Ok(()) };
    if let Some(boat) = boat {
        let removed = boat.remove_volume(id).await?;
        if removed.lost.is_some() {
            keeper.with(|sets| sets.owes.insert(id));
        }
    }
    let found = keeper.with(|sets| {
        let away = sets.away.get(&id)?;
        Some((away.disk, away.info.mode, away.info.state, away.info.attached))
    });
    let Some((disk, mode, state, attached)) = found else { return Ok(()) };
    // Who had been taken from the cache by somebody stays without.
    if state == Some(BackingState::None) && !attached {
        set.add_uncached_as(id, disk).await?;
    } else {
        set.add_backing_as(id, disk).await?;
    }
    let options = keeper.options_of(id);
    set.change_volume_options(id, |begun| *begun = options)?;
    // It may have been said until the daemon stops, and not be in the superblock.
    let mode = keeper.with(|sets| sets.away.get(&id).map_or(mode, |away| away.info.mode));
    set.set_cache_mode_for_now(id, mode)?;
    keeper.is_home(id);
    Ok(())
}

/// Has superblocks say the cache modes that were said of their volumes while those were away.
async fn pay_modes(keeper: &Keeper) {
    let Ok(set) = keeper.main() else { return };
    let owed: Vec<VolumeId> = keeper.with(|sets| {
        let is_home = |id: &&VolumeId| !sets.away.contains_key(*id);
        sets.owed_modes.keys().filter(is_home).copied().collect()
    });
    for id in owed {
        // Somebody may have said another one while those before it were written. From here on whoever does comes after us: the
        // superblock of a volume is changed in the order in which that is asked for.
        let mode = keeper.with(|sets| sets.owed_modes.get(&id).copied().filter(|_| !sets.is_stopping));
        let Some(mode) = mode else { continue };
        match set.keep_cache_mode(id, mode).await {
            Err(error) if !matches!(error, Error::NoVolume) => {
                let what = "the superblock of a volume keeps its former cache mode for now";
                tracing::error!(event = "cache-mode-failed", "{what}: {error}");
            }
            // Somebody may have said another one meanwhile.
            _ => keeper.with(|sets| {
                if sets.owed_modes.get(&id) == Some(&mode) {
                    sets.owed_modes.remove(&id);
                }
            }),
        }
    }
}

/// The boat, if the volume is on it: from here on it is nowhere. `None`: it is not away.
fn leaves_boat(keeper: &Keeper, id: VolumeId) -> Option<Option<CacheSet>> {
    keeper.change(|sets| {
        let boat = sets.boat.as_ref().map(|(boat, _)| boat.clone());
        let away = sets.away.get_mut(&id)?;
        Some(boat.filter(|_| std::mem::replace(&mut away.is_aboard, false)))
    })
}

/// Nobody is on the boat any more.
async fn land(keeper: &Keeper) {
    let Some((boat, disk)) = keeper.change(|sets| sets.boat.take()) else { return };
    let _nothing_is_on_it = boat.stop().await;
    drop(keeper.inner().disks.remove(disk));
}

#[cfg(test)]
pub mod tests {
    use super::super::keeper::Recipe;
    use super::*;
    use bcached_env::{Driver, Executor, Order};
    use bcached_format::{BackingFormat, BackingSuperblock, CacheMode, SUPERBLOCK_SECTOR, Uuid};
    use bcached_uring::{Access, Device, DriverOptions, open_driver};
    use rustix::fs::{MemfdFlags, SealFlags};
    use std::fs::File;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::FileExt as _;

    const SECTORS: u64 = 4096;

    /// A backing device in memory without a cache.
    pub fn backing(number: u8) -> File {
        let superblock = BackingSuperblock::format(BackingFormat {
            uuid: Uuid([number; 16]),
            set_uuid: Uuid([0; 16]),
            block_sectors: 8,
            bucket_sectors: 128,
            data_offset: None,
            cache_mode: CacheMode::Writeback,
            device_sectors: SECTORS,
        });
        let bytes = superblock.expect("sizes that can be run").seal();
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("backing", flags).expect("memory"));
        file.set_len(SECTORS * 512).expect("a size");
        file.write_all_at(&bytes[..], SUPERBLOCK_SECTOR * 512).expect("room");
        file
    }

    /// What the superblock says.
    fn mode_in(file: &File) -> CacheMode {
        let mut bytes = [0; 4096];
        file.read_exact_at(&mut bytes, SUPERBLOCK_SECTOR * 512).expect("it is there");
        match bcached_format::RawSuperblock::from_bytes(&bytes)
            .expect("a superblock")
            .check(bcached_format::DeviceFacts { sectors: SECTORS, logical_block_sectors: 1 })
        {
            Ok(bcached_format::Superblock::Backing(superblock)) => superblock.cache_mode(),
            _ => panic!("it is one of a backing device"),
        }
    }

    /// A set with that one volume.
    fn served(file: &File) -> (Executor, Keeper, VolumeId) {
        served_through(file, |driver| driver)
    }

    /// The same on another driver that has the real one.
    pub fn served_through(
        file: &File,
        wrap: impl FnOnce(Box<dyn Driver>) -> Box<dyn Driver>,
    ) -> (Executor, Keeper, VolumeId) {
        let driver = open_driver(&DriverOptions::default()).expect("a driver");
        let cache = memory::make(8).expect("memory");
        let nodes = bcached_engine::node_budget_min(cache.superblock.bucket_sectors(), 1);
        let options = Options { node_budget_bytes: nodes, ..Options::default() };
        let set_uuid = cache.superblock.set_uuid();
        let disk = driver.disks.add(cache.device);
        let mut executor = Executor::new(wrap(driver.driver), Order::Fifo, 1);
        let opening = CacheSet::open(executor.env(), disk, Box::new(NoNote), options.clone());
        let set = executor.block_on(opening).expect("a driver").expect("it is whole");
        let recipe = Recipe {
            cache: disk.into(),
            set_uuid,
            note: None,
            note_gone: std::sync::Arc::new(|| {}),
            options: options.into(),
        };
        let keeper = Keeper::new(executor.env(), driver.disks, recipe, set);
        let id = added(&mut executor, &keeper, file);
        (executor, keeper, id)
    }

    /// The set has that volume, too.
    pub fn added(executor: &mut Executor, keeper: &Keeper, file: &File) -> VolumeId {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let disk = keeper.inner().disks.add(Device::open(path, Access::Own).expect("memory"));
        let adds = keeper.main().expect("it works");
        let added = executor.block_on(async move { adds.add_backing(disk, None).await });
        added.expect("a driver").expect("it is taken")
    }

    /// What was said while the set was let go of was refused, and the configuration said it all the same.
    #[test]
    fn a_cache_mode_said_while_the_set_is_let_go_of_is_kept() {
        let file = backing(3);
        let (mut executor, keeper, id) = served(&file);
        let env = executor.env();
        let said = keeper.clone();
        env.spawn(async move {
            said.until(|sets| sets.main.is_none()).await;
            assert!(said.with(|sets| sets.away.is_empty()), "it is being let go of");
            said.change_mode(id, CacheMode::Writearound).await.expect("it will be so");
            assert!(said.with(|sets| sets.away.is_empty()), "it still is");
        });
        let ended = executor.block_on(async move {
            assert!(let_go(&keeper).await);
            assert_eq!(keeper.status().volumes[0].mode, CacheMode::Writearound);
            open_again(&keeper).await.expect("nothing has happened to it");
            assert!(bring_home(&keeper).await);
            pay_modes(&keeper).await;
            assert!(keeper.with(|sets| sets.owed_modes.is_empty()) && has_all(&keeper));
            let mode = keeper.status().volumes[0].mode;
            keeper.stop().await.expect("in order");
            mode
        });
        assert_eq!((ended, mode_in(&file)), (Some(CacheMode::Writearound), CacheMode::Writearound));
    }

    /// While the mode of one volume was written, another one was said of the next, and the one of before was written over that.
    #[test]
    fn what_was_owed_is_not_written_over_a_newer_word() {
        let files = [backing(3), backing(4)];
        let (mut executor, keeper, first) = served(&files[0]);
        let second = added(&mut executor, &keeper, &files[1]);
        let env = executor.env();
        let stopped = executor.block_on(async move {
            for id in [first, second] {
                keeper.with(|sets| sets.owed_modes.insert(id, CacheMode::Writearound));
            }
            let said = keeper.clone();
            env.spawn(async move {
                // The first of them is being written by now.
                said.change_mode(second, CacheMode::None).await.expect("it can be written");
            });
            pay_modes(&keeper).await;
            assert!(keeper.with(|sets| sets.owed_modes.is_empty()));
            keeper.stop().await
        });
        assert_eq!(stopped, Some(Ok(())));
        assert_eq!(files.each_ref().map(mode_in), [CacheMode::Writearound, CacheMode::None]);
    }

    /// One attempt to write it was all that was made.
    #[test]
    fn a_cache_mode_that_could_not_be_written_is_still_owed() {
        let file = backing(3);
        let (mut executor, keeper, id) = served(&file);
        let device = file.try_clone().expect("a descriptor");
        let (owed, left) = executor
            .block_on(async move {
                keeper.with(|sets| sets.owed_modes.insert(id, CacheMode::Writearound));
                rustix::fs::fcntl_add_seals(&device, SealFlags::FUTURE_WRITE).expect("nobody has mapped it");
                assert!(is_wanted(&keeper) && attempt(&keeper).await && is_wanted(&keeper), "all are home");
                let owed = keeper.with(|sets| sets.owed_modes.get(&id).copied());
                // Another word takes its place, and fails in its turn, which whoever said it hears.
                keeper.change_mode(id, CacheMode::None).await.expect_err("it cannot be written");
                (owed, keeper.with(|sets| sets.owed_modes.get(&id).copied()))
            })
            .expect("a driver");
        assert_eq!((owed, left), (Some(CacheMode::Writearound), Some(CacheMode::Writearound)));
        assert_eq!(mode_in(&file), CacheMode::Writeback);
    }
}
