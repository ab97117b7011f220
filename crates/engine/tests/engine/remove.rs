//! Volumes that are removed while their set keeps running.

use crate::background_tasks::{BackgroundTask, asking};
use crate::memory::OpFault;
use crate::rig::{BACKING, DATA_OFFSET, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{
    CacheSet, CancelToken, Error, Options, RemovedVolume, Request, VolumeId, VolumeOptions,
};
use bcached_env::{Buffer, Env, Op};
use bcached_format::{BackingState, CacheMode};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 200_000 };

/// Write-back is off, and data that is read stays parked for long.
fn options() -> Options {
    Options {
        parked_delay: Duration::from_secs(600),
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

fn removing(env: &Env, set: &CacheSet, volume: VolumeId) -> BackgroundTask<Result<RemovedVolume, Error>> {
    let set = set.clone();
    BackgroundTask::start(env, async move { set.remove_volume(volume).await })
}

/// Dirty data of a removed volume stays, is reported as unserved, and is there when the volume is
/// added again; buckets of clean data are reused.
#[test]
fn dirty_data_stays_and_is_found_again() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        let removed = set.remove_volume(volume).await.expect("it is there");
        assert_eq!(removed, RemovedVolume { disk: Some(BACKING), lost: None });
        assert_eq!(set.volumes(), []);
        let unserved = set.status().unserved;
        assert_eq!(unserved.iter().map(|left| left.dirty_sectors).collect::<Vec<_>>(), [8]);
        assert_eq!(set.serve(volume, Request::Flush).await.result, Err(Error::NoVolume));
        assert_eq!(set.remove_volume(volume).await, Err(Error::NoVolume));

        let volume = set.add_backing(BACKING, None).await.expect("it comes back");
        assert_eq!(bytes(&set, volume, 0, 8).await, [1; 8]);
        assert_eq!(set.volumes()[0].dirty_sectors, 8);
        set.write_back(volume, &CancelToken::default()).await.expect("the device is well");
        set.remove_volume(volume).await.expect("it is there");
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
    assert_eq!(crate::rig::backing_superblock(&rig).state(), BackingState::Clean, "marked on the way out");
}

/// Requests from before the removal are completed, however slow the backing device is; later ones
/// are refused.
#[test]
fn requests_in_flight_end_and_no_other_begins() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            let is_read = disk == BACKING && matches!(op, Op::Read { .. });
            is_read.then_some(OpFault::Waits)
        }));
        let read = asking(&env, &set, volume, Request::Read { sector: 0, buffer: Buffer::zeroed(4096) });
        env.sleep(Duration::from_millis(1)).await;
        let leaving = removing(&env, &set, volume);
        env.sleep(Duration::from_secs(1)).await;
        assert!(!read.is_over() && !leaving.is_over());
        let late = set.serve(volume, write(0, 8, 1)).await;
        assert_eq!(late.result, Err(Error::NoVolume));
        assert_eq!(set.detach(volume, &CancelToken::default()).await, Err(Error::VolumeBusy));
        world.borrow_mut().fate = None;
        assert_eq!(read.result(&env).await, Ok(()));
        leaving.result(&env).await.expect("nothing keeps it");
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// Data written past the cache is made durable; data parked in the cache until then is released,
/// and its buckets too.
#[test]
fn what_went_past_the_cache_is_flushed_and_what_is_parked_is_let_go() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("sound");
        let writes_since_flush = Rc::new(RefCell::new(0));
        let seen = Rc::clone(&writes_since_flush);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            match op {
                Op::Flush if disk == BACKING => *seen.borrow_mut() = 0,
                Op::Write { sector, .. } if disk == BACKING && *sector >= DATA_OFFSET => {
                    *seen.borrow_mut() += 1;
                }
                _ => {}
            }
            None
        }));
        for n in 0..200 {
            ask(&set, volume, write(n * 64, 64, 3)).await;
        }
        assert!(*writes_since_flush.borrow() >= 200, "nobody has flushed");
        let removed = set.remove_volume(volume).await.expect("it is there");
        assert_eq!(removed.lost, None);
        assert_eq!(*writes_since_flush.borrow(), 0, "flushed on the way out");
        world.borrow_mut().fate = None;
        let volume = set.add_backing(BACKING, None).await.expect("it comes back");
        // Every bucket is available: none is pinned any more.
        for n in 0..700 {
            ask(&set, volume, write(n * 128, 128, 4)).await;
        }
        set.stop().await.expect("it stops");
    });
}

/// A device whose last flush fails is removed all the same, and the failure is reported.
#[test]
fn a_failing_last_flush_is_told() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writearound).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        world.borrow_mut().fate =
            Some(Box::new(|disk, op| (disk == BACKING && matches!(op, Op::Flush)).then_some(OpFault::Fails)));
        let removed = set.remove_volume(volume).await.expect("it goes");
        assert!(removed.lost.is_some(), "{removed:?}");
        assert_eq!(set.volumes(), []);
        set.stop().await.expect("what was its is told");
    });
}

/// A device can be served without a cache: reads return its own data, and any cache's copies of it
/// are void from then on.
#[test]
fn a_volume_can_be_served_without_a_cache() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        set.remove_volume(volume).await.expect("it is there");
        assert_eq!(
            set.add_uncached(BACKING).await,
            Err(Error::DirtyElsewhere(bcached_format::Uuid([1; 16])))
        );

        let volume = set.add_backing(BACKING, None).await.expect("it comes back");
        set.write_back(volume, &CancelToken::default()).await.expect("the device is well");
        set.remove_volume(volume).await.expect("it is there");
        let volume = set.add_uncached(BACKING).await.expect("all of it is there");
        let info = set.volumes().remove(0);
        assert_eq!((info.attached, info.state), (false, Some(BackingState::Stale)));
        ask(&set, volume, write(0, 4, 2)).await;
        assert_eq!(bytes(&set, volume, 0, 8).await, [2, 2, 2, 2, 1, 1, 1, 1]);
        assert_eq!(set.add_uncached(BACKING).await, Err(Error::Duplicate));
        set.remove_volume(volume).await.expect("it is there");
        // The cache still holds a stale copy.
        let volume = set.add_backing(BACKING, None).await.expect("it comes back");
        assert_eq!(bytes(&set, volume, 0, 8).await, [2, 2, 2, 2, 1, 1, 1, 1]);
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// Without a cache a discard has little to do, but it is still answered in its turn.
#[test]
fn without_a_cache_a_discard_waits_for_the_write_before_it() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        set.detach(volume, &CancelToken::default()).await.expect("sound");
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            (disk == BACKING && matches!(op, Op::Write { .. })).then_some(OpFault::Waits)
        }));
        let before = asking(&env, &set, volume, write(0, 8, 1));
        env.sleep(Duration::from_millis(1)).await;
        let discard = asking(&env, &set, volume, Request::Discard { sector: 0, sectors: 8 });
        env.sleep(Duration::from_secs(1)).await;
        assert!(!before.is_over() && !discard.is_over());
        world.borrow_mut().fate = None;
        assert_eq!((before.result(&env).await, discard.result(&env).await), (Ok(()), Ok(())));
    });
}
