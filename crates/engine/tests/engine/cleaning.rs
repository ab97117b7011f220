//! Write-back on demand: it covers all data that is dirty at that moment, and ends even if clients
//! keep writing.

use crate::background_tasks::{BackgroundTask, asking};
use crate::memory::OpFault;
use crate::rig::{BACKING, CACHE, DATA_OFFSET, Rig, Sizes, ask, open, run, write};
use bcached_engine::{CacheSet, CancelToken, Error, Options, VolumeId, VolumeOptions};
use bcached_env::rng::Rng;
use bcached_env::{Env, Op};
use bcached_format::BackingState;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 200_000 };

/// Write-back is off.
fn still() -> Options {
    let volume = VolumeOptions { writeback_running: false, ..VolumeOptions::default() };
    Options { volume, ..Options::default() }
}

/// Writes `count` pieces of eight sectors of `byte`, sixteen apart.
async fn dirty(set: &CacheSet, volume: VolumeId, count: u64, byte: u8) {
    for n in 0..count {
        ask(set, volume, write(n * 16, 8, byte)).await;
    }
}

async fn cleaned(set: &CacheSet, volume: VolumeId) -> Result<(), Error> {
    set.write_back(volume, &CancelToken::default()).await
}

/// Clients overwrite all of it, single sectors and pieces, from several places and without a pause.
fn writers(env: &Env, set: &CacheSet, volume: VolumeId, goes_on: &Rc<Cell<bool>>) -> Vec<BackgroundTask<()>> {
    let one = |client: u64| {
        let (set, goes_on) = (set.clone(), Rc::clone(goes_on));
        BackgroundTask::start(env, async move {
            let mut random = Rng::new(client);
            while goes_on.get() {
                let sector = random.below(512) * 16 + random.below(4);
                let sectors = 1 + usize::try_from(random.below(4)).expect("few");
                ask(&set, volume, write(sector, sectors, 2)).await;
            }
        })
    };
    (0..8).map(one).collect()
}

/// A write-back on demand ends while clients write. Afterwards the backing device has all data that
/// was dirty at the start, or what was written over it since.
#[test]
fn it_ends_while_others_write_and_what_was_dirty_is_there() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), still()).await.expect("sound");
        dirty(&set, volume, 512, 1).await;
        let goes_on = Rc::new(Cell::new(true));
        let writers = writers(&env, &set, volume, &goes_on);
        env.sleep(Duration::from_millis(2)).await;
        cleaned(&set, volume).await.expect("the device is well");
        for piece in 0..512 {
            let mut found = [0; 8 * 512];
            world.borrow().look(1, DATA_OFFSET + piece * 16, &mut found);
            assert!(found.iter().all(|byte| [1, 2].contains(byte)), "piece {piece}");
        }
        assert!(set.volumes()[0].dirty_sectors > 0, "the writers have gone on");
        goes_on.set(false);
        for writer in writers {
            writer.result(&env).await;
        }
        cleaned(&set, volume).await.expect("the device is well");
        assert_eq!(set.volumes()[0].dirty_sectors, 0);
        env.sleep(Duration::from_secs(1)).await;
        assert_eq!(set.volumes()[0].state, Some(BackingState::Clean), "and it is said");
        cleaned(&set, volume).await.expect("nothing is dirty");
    });
}

/// One extent cannot be written. The rest is written back, the extent is named, nothing is lost,
/// and the write-back can be requested again.
#[test]
fn one_bad_place_is_named_and_the_rest_leaves() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), still()).await.expect("sound");
        dirty(&set, volume, 100, 1).await;
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            let Op::Write { sector, payload, .. } = op else { return None };
            let (start, end) = (*sector, *sector + payload.len() as u64 / 512);
            let is_bad = (start..end).contains(&(DATA_OFFSET + 804));
            (disk == BACKING && is_bad).then_some(OpFault::Fails)
        }));
        let error = cleaned(&set, volume).await.expect_err("it takes not all");
        assert!(matches!(error, Error::Io { .. }), "{error}");
        let info = set.volumes().remove(0);
        assert_eq!(info.dirty_sectors, 8);
        let trouble = info.writeback_trouble.expect("it is named");
        assert_eq!((trouble.sector, trouble.sectors), (800, 8));
        world.borrow_mut().fate = None;
        cleaned(&set, volume).await.expect("it is well again");
        assert_eq!(set.volumes()[0].dirty_sectors, 0);
    });
}

/// A write-back on demand can be cancelled by its caller, and a stop does not wait for it.
#[test]
fn it_can_be_cancelled_and_a_stop_ends_it() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), still()).await.expect("sound");
        dirty(&set, volume, 100, 1).await;
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            let is_data = matches!(op, Op::Write { sector, .. } if *sector >= DATA_OFFSET);
            (disk == BACKING && is_data).then_some(OpFault::Fails)
        }));
        let begin = |cancel: CancelToken| {
            let set = set.clone();
            BackgroundTask::start(&env, async move { set.write_back(volume, &cancel).await })
        };
        let cancel = CancelToken::default();
        let first = begin(cancel.clone());
        env.sleep(Duration::from_millis(500)).await;
        assert!(!first.is_over());
        set.cancel(&cancel);
        assert_eq!(first.result(&env).await, Err(Error::Cancelled));
        let second = begin(CancelToken::default());
        env.sleep(Duration::from_millis(500)).await;
        set.stop().await.expect("nothing that is acknowledged is in danger");
        assert_eq!(second.result(&env).await, Err(Error::Stopping));
        assert_eq!(set.volumes()[0].dirty_sectors, 800);
    });
}

/// Write-back on demand does nothing for a volume without a cache, and fails for an unknown one.
#[test]
fn without_a_cache_nothing_is_dirty() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, still()).await.expect("sound");
        set.detach(volume, &CancelToken::default()).await.expect("sound");
        cleaned(&set, volume).await.expect("nothing is dirty");
        assert_eq!(cleaned(&set, VolumeId(9)).await, Err(Error::NoVolume));
    });
}

/// Write-back leaves an extent to a write in progress that covers it. It waits for that write, and
/// if the write fails, it writes the older data back after all.
#[test]
fn what_is_left_to_a_write_is_waited_for() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), still()).await.expect("sound");
        dirty(&set, volume, 3, 1).await;
        let fails = Rc::new(Cell::new(false));
        let hangs = Rc::new(Cell::new(true));
        let (late, ends) = (Rc::clone(&fails), Rc::clone(&hangs));
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let Op::Write { payload, .. } = op else { return None };
            let is_it = disk == CACHE && payload.as_slice().iter().all(|byte| *byte == 7);
            match (is_it, ends.get(), late.get()) {
                (true, true, _) => Some(OpFault::Waits),
                (true, false, true) => Some(OpFault::Fails),
                _ => None,
            }
        }));
        let over = asking(&env, &set, volume, write(16, 8, 7));
        env.sleep(Duration::from_millis(1)).await;
        let cleaning = {
            let set = set.clone();
            BackgroundTask::start(&env, async move { cleaned(&set, volume).await })
        };
        env.sleep(Duration::from_secs(1)).await;
        assert!(!cleaning.is_over(), "what the write covers is nowhere else");
        fails.set(true);
        hangs.set(false);
        let _ = over.result(&env).await;
        cleaning.result(&env).await.expect("the backing device is well");
        let mut found = [0; 8 * 512];
        world.borrow().look(1, DATA_OFFSET + 16, &mut found);
        assert!(found.iter().all(|byte| *byte == found[0] && [1, 7].contains(byte)), "{}", found[0]);
    });
}
