//! Volumes that grow and shrink while they are served. Nothing written is lost or hidden, and what
//! a device held at its former size never comes back.

use crate::background_tasks::{BackgroundTask, asking};
use crate::memory::{OpFault, World};
use crate::rig::{BACKING, CACHE, DATA_OFFSET, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, CancelToken, Error, Options, Request, VolumeId, VolumeOptions, WriteCause};
use bcached_env::{Env, Op};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// The device ends three sectors behind its last whole block.
const ODD: u64 = DATA_OFFSET + 1003;
const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: ODD };

/// Write-back is off.
fn options() -> Options {
    Options {
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        // Each block is zeroed in a turn of its own.
        zero_batch_sectors: 8,
        ..Options::default()
    }
}

fn sectors(set: &CacheSet) -> u64 {
    set.volumes()[0].sectors
}

/// Makes sure that data which is read has an open bucket to fill from here on.
async fn warm(env: &Env, set: &CacheSet, volume: VolumeId) {
    for place in 0..4 {
        bytes(set, volume, place * 8, 8).await;
        env.sleep(Duration::from_millis(10)).await;
    }
    assert!(set.status().stats.written.of(WriteCause::Fill) > 0);
}

fn shrinking(env: &Env, set: &CacheSet, volume: VolumeId, sectors: u64) -> BackgroundTask<Result<(), Error>> {
    let set = set.clone();
    BackgroundTask::start(env, async move { set.shrink(volume, sectors, &CancelToken::default()).await })
}

/// After the device has grown, its tail, which was never cached, becomes part of a cached block
/// with everything that was written to it. The rest of the device follows, and the next start sees
/// the same.
#[test]
fn a_device_that_grew_is_taken_up_with_its_odd_end() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        ask(&set, volume, write(990, 13, 1)).await;
        let refused = Error::Size { sectors: 1100, sectors_min: 1003, sectors_max: 1003 };
        assert_eq!(
            set.grow(volume, 1100, &CancelToken::default()).await,
            Err(refused),
            "the device ends before that"
        );
        assert_eq!(set.grow(volume, 1003, &CancelToken::default()).await, Ok(()), "so it is");
        world.borrow_mut().resize(1, DATA_OFFSET + 2001);
        assert!(set.serve(volume, write(1003, 1, 2)).await.result.is_err(), "not taken up yet");
        assert_eq!(set.grow(volume, 2001, &CancelToken::default()).await, Ok(()));
        assert_eq!(sectors(&set), 2001);
        assert_eq!(bytes(&set, volume, 990, 16).await, [[1; 13].as_slice(), &[0; 3]].concat());
        ask(&set, volume, write(1002, 2, 3)).await;
        ask(&set, volume, write(1990, 11, 4)).await;
        let at_old_end = [1, 1, 3, 3, 0];
        assert_eq!(bytes(&set, volume, 1000, 5).await, at_old_end);
        set.write_back(volume, &CancelToken::default()).await.expect("the device is well");
        assert_eq!(bytes(&set, volume, 1000, 5).await, at_old_end);
        let smaller = Error::Size { sectors: 1003, sectors_min: 2001, sectors_max: 2001 };
        assert_eq!(
            set.grow(volume, 1003, &CancelToken::default()).await,
            Err(smaller),
            "that is another thing"
        );
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        assert_eq!(sectors(&set), 2001);
        assert_eq!(bytes(&set, volume, 1000, 5).await, [1, 1, 3, 3, 0]);
        assert_eq!(bytes(&set, volume, 1988, 13).await, [[0; 2].as_slice(), &[4; 11]].concat());
        set.stop().await.expect("it stops");
    });
}

/// Requests zeroes up to the odd end and stalls them; the device then has 2000 sectors.
async fn zeroing_as_the_device_grows(
    env: &Env,
    world: &RefCell<World>,
    set: &CacheSet,
    volume: VolumeId,
) -> BackgroundTask<Result<(), Error>> {
    ask(set, volume, write(1000, 3, 9)).await;
    world.borrow_mut().resize(1, DATA_OFFSET + 2000);
    world.borrow_mut().fate = Some(Box::new(|_, op| matches!(op, Op::Zero { .. }).then_some(OpFault::Waits)));
    let zeroes = Request::WriteZeroes { sector: 985, sectors: 18, fua: false, may_unmap: false };
    let old = asking(env, set, volume, zeroes);
    env.sleep(Duration::from_millis(1)).await;
    old
}

/// Zeroes are in flight, first to a part of a block and then past the cache to the odd end, when
/// the device grows. The odd end is now part of a block. A write to the rest of that block must not
/// put what is about to be zeroed into the cache, where it would stay.
#[test]
fn nothing_of_the_old_end_is_cached_under_a_request_that_does_not_know_the_new_one() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        let old = zeroing_as_the_device_grows(&env, &world, &set, volume).await;
        let growing = BackgroundTask::start(&env, {
            let set = set.clone();
            async move { set.grow(volume, 2000, &CancelToken::default()).await }
        });
        env.sleep(Duration::from_secs(1)).await;
        assert!(!old.is_over() && !growing.is_over());
        ask(&set, volume, write(1003, 5, 7)).await;
        assert_eq!(bytes(&set, volume, 1000, 8).await, [9, 9, 9, 7, 7, 7, 7, 7]);
        world.borrow_mut().fate = None;
        assert_eq!(old.result(&env).await, Ok(()));
        assert_eq!(bytes(&set, volume, 1000, 8).await, [0, 0, 0, 7, 7, 7, 7, 7]);
        assert_eq!(growing.result(&env).await, Ok(()));
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// A growth waits for requests that know only the old size, however long they take. Until they have
/// ended, it can be cancelled.
#[test]
fn a_growth_that_waits_for_earlier_requests_is_cancelled() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        let old = zeroing_as_the_device_grows(&env, &world, &set, volume).await;
        let cancel = CancelToken::default();
        let growing = BackgroundTask::start(&env, {
            let (set, cancel) = (set.clone(), cancel.clone());
            async move { set.grow(volume, 2000, &cancel).await }
        });
        env.sleep(Duration::from_secs(5)).await;
        assert!(!old.is_over() && !growing.is_over());
        set.cancel(&cancel);
        env.sleep(Duration::from_secs(1)).await;
        assert_eq!(growing.result(&env).await, Err(Error::Cancelled));
        assert_eq!(set.volumes()[0].sectors, ODD - DATA_OFFSET);
        assert!(set.serve(volume, write(1003, 5, 7)).await.result.is_err(), "it ends there");
        world.borrow_mut().fate = None;
        assert_eq!(old.result(&env).await, Ok(()));
        assert_eq!(bytes(&set, volume, 1000, 3).await, [0; 3]);
        assert_eq!(set.grow(volume, 2000, &CancelToken::default()).await, Ok(()));
        ask(&set, volume, write(1003, 5, 7)).await;
        assert_eq!(bytes(&set, volume, 1000, 8).await, [0, 0, 0, 7, 7, 7, 7, 7]);
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// A device that was cut and is as long again holds zeroes or foreign data behind the cut. What the
/// cache held from before the cut must not be served for it.
#[test]
fn what_was_cached_behind_a_cut_does_not_come_back() {
    // Proves invariant D47.
    for is_noticed in [true, false] {
        let mut rig = Rig::new(Sizes { backing: DATA_OFFSET + 2000, ..SIZES }, 1);
        let world = Rc::clone(&rig.world);
        run(&mut rig, move |env| async move {
            let (set, volume) = open(env, options()).await.expect("sound");
            ask(&set, volume, write(900, 1100, 5)).await;
            set.write_back(volume, &CancelToken::default()).await.expect("the device is well");
            set.stop().await.expect("it stops");
        });
        world.borrow_mut().resize(1, ODD);
        run(&mut rig, move |env| async move {
            let (set, volume) = open(env, options()).await.expect("sound");
            assert_eq!(set.is_cut_short(volume).await, Ok(true));
            if is_noticed {
                assert_eq!(set.give_up_behind_end(volume).await, Ok(true));
                assert_eq!(set.give_up_behind_end(volume).await, Ok(false), "it is gone");
            }
            world.borrow_mut().resize(1, DATA_OFFSET + 2000);
            assert_eq!(set.grow(volume, 2000, &CancelToken::default()).await, Ok(()));
            assert_eq!(bytes(&set, volume, 1000, 8).await, [5, 5, 5, 0, 0, 0, 0, 0]);
            assert_eq!(bytes(&set, volume, 1000, 1000).await[3..], [0; 997], "the device has nothing there");
            assert_eq!(bytes(&set, volume, 900, 100).await, [5; 100]);
            set.stop().await.expect("it stops");
            set.assert_invariants();
        });
    }
}

/// A shrink writes back what lies behind the new end and no more: data before it stays dirty, and
/// requests behind it are refused.
#[test]
fn a_shrink_writes_back_what_lies_behind_and_no_more() {
    // Proves invariant D46.
    let mut rig = Rig::new(Sizes { backing: DATA_OFFSET + 4000, ..SIZES }, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        ask(&set, volume, write(0, 16, 1)).await;
        ask(&set, volume, write(992, 16, 2)).await;
        ask(&set, volume, write(3990, 10, 3)).await;
        let none = CancelToken::default();
        let odd = Error::NotWholeBlocks { sectors: 1001, block_sectors: 8 };
        assert_eq!(set.shrink(volume, 1001, &none).await, Err(odd));
        let larger = Error::Size { sectors: 4008, sectors_min: 8, sectors_max: 4000 };
        assert_eq!(set.shrink(volume, 4008, &none).await, Err(larger));
        assert_eq!(set.shrink(volume, 4000, &none).await, Ok(()), "so it is");
        // Whole blocks: one block of the second write lies behind the end, and two of the last
        // write.
        assert_eq!(set.dirty_from(volume, 1000).await, Ok(8 + 16));
        assert_eq!(
            (set.dirty_from(volume, 0).await, set.dirty_from(volume, 4000).await),
            (Ok(16 + 16 + 16), Ok(0))
        );
        assert_eq!(set.shrink(volume, 1000, &none).await, Ok(()));
        let now = &set.volumes()[0];
        assert_eq!((now.sectors, now.dirty_sectors), (1000, 16 + 8), "what lies before the end stays");
        let mut found = [0; 512];
        for (sector, byte) in [(1000, 2), (1007, 2), (3995, 3), (0, 0), (999, 0)] {
            world.borrow().look(1, DATA_OFFSET + sector, &mut found);
            assert_eq!(found, [byte; 512], "sector {sector} of the device");
        }
        assert!(matches!(set.serve(volume, write(999, 2, 9)).await.result, Err(Error::Range { .. })));
        assert_eq!(bytes(&set, volume, 992, 8).await, [2; 8]);
        // The device is cut, and grows again.
        world.borrow_mut().resize(1, DATA_OFFSET + 1000);
        assert_eq!(set.is_cut_short(volume).await, Ok(false), "the cache holds nothing of it");
        world.borrow_mut().resize(1, DATA_OFFSET + 4000);
        assert_eq!(set.grow(volume, 4000, &CancelToken::default()).await, Ok(()));
        assert_eq!(bytes(&set, volume, 1000, 3000).await, [0; 3000], "nothing of it was kept");
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// If the device refuses the dirty data behind the new end, or the shrink is cancelled, the volume
/// keeps its old size and all of its data.
#[test]
fn a_shrink_that_fails_or_is_given_up_loses_nothing() {
    // Proves invariant D46.
    let mut rig = Rig::new(Sizes { backing: DATA_OFFSET + 4000, ..SIZES }, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        ask(&set, volume, write(2000, 100, 2)).await;
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            let is_data = matches!(op, Op::Write { sector, .. } if *sector >= DATA_OFFSET);
            (disk == BACKING && is_data).then_some(OpFault::Fails)
        }));
        let failed = set.shrink(volume, 1000, &CancelToken::default()).await;
        assert!(matches!(failed, Err(Error::Io { .. })), "{failed:?}");
        assert_eq!((sectors(&set), set.volumes()[0].dirty_sectors), (4000, 104));
        let cancel = CancelToken::default();
        let going = BackgroundTask::start(&env, {
            let (set, cancel) = (set.clone(), cancel.clone());
            async move { set.shrink(volume, 1000, &cancel).await }
        });
        env.sleep(Duration::from_millis(1)).await;
        assert_eq!(set.detach(volume, &CancelToken::default()).await, Err(Error::VolumeBusy));
        assert_eq!(set.grow(volume, 4000, &CancelToken::default()).await, Err(Error::VolumeBusy));
        set.cancel(&cancel);
        assert_eq!(going.result(&env).await, Err(Error::Cancelled));
        assert_eq!((sectors(&set), bytes(&set, volume, 2000, 100).await), (4000, vec![2; 100]));
        world.borrow_mut().fate = None;
        assert_eq!(set.shrink(volume, 1000, &cancel.clone()).await, Err(Error::Cancelled));
        assert_eq!(set.shrink(volume, 1000, &CancelToken::default()).await, Ok(()));
        assert_eq!(set.volumes()[0].dirty_sectors, 0);
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// A write, and a read that fills the cache, are in flight behind the new end. Both complete as
/// they would have, and neither leaves anything in the cache.
#[test]
fn requests_behind_the_new_end_leave_nothing_in_the_cache() {
    // Proves invariant D46.
    let mut rig = Rig::new(Sizes { backing: DATA_OFFSET + 4000, ..SIZES }, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        warm(&env, &set, volume).await;
        let is_held = |disk, op: &Op| match op {
            Op::Write { .. } => disk == CACHE,
            Op::Read { .. } => disk == BACKING,
            _ => false,
        };
        world.borrow_mut().fate = Some(Box::new(move |disk, op| is_held(disk, op).then_some(OpFault::Waits)));
        let writing = asking(&env, &set, volume, write(2000, 16, 1));
        let reading = asking(
            &env,
            &set,
            volume,
            Request::Read { sector: 3000, buffer: bcached_env::Buffer::zeroed(4096) },
        );
        env.sleep(Duration::from_millis(1)).await;
        let going = shrinking(&env, &set, volume, 1000);
        env.sleep(Duration::from_secs(1)).await;
        assert!(!writing.is_over() && !reading.is_over() && !going.is_over());
        assert!(matches!(set.serve(volume, write(2000, 8, 9)).await.result, Err(Error::Range { .. })));
        world.borrow_mut().fate = None;
        assert_eq!((writing.result(&env).await, reading.result(&env).await), (Ok(()), Ok(())));
        assert_eq!(going.result(&env).await, Ok(()));
        let mut found = [0; 512];
        world.borrow().look(1, DATA_OFFSET + 2015, &mut found);
        assert_eq!(found, [1; 512], "it was acknowledged, so it is on the device");
        env.sleep(Duration::from_secs(60)).await;
        world.borrow_mut().resize(1, DATA_OFFSET + 1000);
        assert_eq!(set.is_cut_short(volume).await, Ok(false), "the cache holds nothing of it");
        world.borrow_mut().resize(1, DATA_OFFSET + 4000);
        assert_eq!(set.grow(volume, 4000, &CancelToken::default()).await, Ok(()));
        assert_eq!(bytes(&set, volume, 2000, 16).await, [0; 16]);
        assert_eq!(bytes(&set, volume, 3000, 8).await, [0; 8]);
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// A fill behind the new end is still in flight when everything else there is invalidated: it is
/// dropped.
#[test]
fn a_fill_behind_the_new_end_does_not_arrive() {
    let mut rig = Rig::new(Sizes { backing: DATA_OFFSET + 4000, ..SIZES }, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        warm(&env, &set, volume).await;
        world.borrow_mut().place(1, DATA_OFFSET + 3000, &[0x5a; 4096]);
        let is_fill = |op: &Op| match op {
            Op::Write { payload, .. } => payload.as_slice().iter().all(|byte| *byte == 0x5a),
            _ => false,
        };
        let held = Rc::new(Cell::new(false));
        let sees = Rc::clone(&held);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let holds = disk == CACHE && is_fill(op);
            sees.set(sees.get() || holds);
            holds.then_some(OpFault::Waits)
        }));
        assert_eq!(bytes(&set, volume, 3000, 8).await, [0x5a; 8]);
        env.sleep(Duration::from_millis(1)).await;
        assert!(held.get(), "it is on its way");
        assert_eq!(set.shrink(volume, 1000, &CancelToken::default()).await, Ok(()));
        world.borrow_mut().fate = None;
        env.sleep(Duration::from_secs(60)).await;
        world.borrow_mut().resize(1, DATA_OFFSET + 1000);
        assert_eq!(set.is_cut_short(volume).await, Ok(false));
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}
