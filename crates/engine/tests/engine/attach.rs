//! A backing device is attached completely or not at all.

use crate::background_tasks::BackgroundTask;
use crate::memory::{NoNote, OpFault};
use crate::rig::{BACKING, CACHE, Rig, Sizes, backing_superblock, run, superblock_on};
use bcached_engine::{CacheSet, Error, Options};
use bcached_env::{DiskId, Op};
use bcached_format::superblock::SUPERBLOCK_SECTOR;
use bcached_format::{BackingState, CacheMode};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: 4096 };

/// An attach fails because the device's superblock cannot be written. It leaves nothing behind and
/// can be repeated. The volume used to stay, half attached and in its old mode, and a second
/// attempt was refused as a duplicate.
#[test]
fn an_attach_that_failed_leaves_nothing_and_can_be_repeated() {
    let mut rig = Rig::new(SIZES, 7);
    let mut executor = rig.executor();
    let env = executor.env();
    let (failing, writes) = (Rc::new(Cell::new(true)), Rc::new(Cell::new(0)));
    let (is_failing, count) = (Rc::clone(&failing), Rc::clone(&writes));
    rig.world.borrow_mut().fate = Some(Box::new(move |disk, op| {
        let superblock = matches!(op, Op::Write { sector, .. } if *sector == SUPERBLOCK_SECTOR);
        if disk != DiskId(1) || !superblock {
            return None;
        }
        count.set(count.get() + 1);
        is_failing.get().then_some(OpFault::Fails)
    }));
    let done = executor.block_on(async move {
        let set = CacheSet::open(env, DiskId(0), Box::new(NoNote), Options::default()).await.expect("sound");
        let mode = Some(CacheMode::Writearound);
        let error = set.add_backing(DiskId(1), mode).await.expect_err("its superblock cannot be written");
        assert!(matches!(error, Error::Io { .. }), "{error}");
        assert_eq!(set.volumes(), []);
        failing.set(false);
        writes.set(0);
        set.add_backing(DiskId(1), mode).await.expect("now it can");
        assert_eq!(writes.get(), 1, "the mode is in the record that says whose it is");
        let [info] = &set.volumes()[..] else { unreachable!("one volume was added") };
        assert_eq!(info.mode, CacheMode::Writearound);
        assert_eq!(set.add_backing(DiskId(1), None).await, Err(Error::Duplicate));
    });
    done.expect("somebody waits for ever");
    let superblock = backing_superblock(&rig);
    assert_eq!((superblock.state(), superblock.cache_mode()), (BackingState::Clean, CacheMode::Writearound));
}

/// A device and a copy of it are added at the same time. The second one is refused, nothing is
/// written to it, and it keeps its cache mode. Proves invariant D20.
#[test]
fn of_two_copies_that_come_at_once_one_is_written_to() {
    let mut rig = Rig::new(SIZES, 7);
    let copy = rig.world.borrow_mut().copy(BACKING);
    let world = Rc::clone(&rig.world);
    run(&mut rig, |env| async move {
        let set =
            CacheSet::open(env.clone(), CACHE, Box::new(NoNote), Options::default()).await.expect("sound");
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            let superblock = matches!(op, Op::Write { sector, .. } if *sector == SUPERBLOCK_SECTOR);
            (disk == BACKING && superblock).then_some(OpFault::Waits)
        }));
        let (first, mode) = (set.clone(), Some(CacheMode::Writearound));
        let coming = BackgroundTask::start(&env, async move { first.add_backing(BACKING, mode).await });
        env.sleep(Duration::from_millis(1)).await;
        assert_eq!(set.add_backing(copy, mode).await, Err(Error::Duplicate));
        assert_eq!(set.add_uncached(copy).await, Err(Error::Duplicate));
        world.borrow_mut().fate = None;
        let volume = coming.result(&env).await.expect("it is the first");
        assert_eq!(set.add_backing(copy, mode).await, Err(Error::Duplicate));
        set.remove_volume(volume).await.expect("it can go");
        set.stop().await.expect("it stops");
    });
    let left = superblock_on(&rig.world.borrow(), copy);
    assert_eq!((left.state(), left.cache_mode()), (BackingState::None, CacheMode::Writeback));
}
