//! A backing device that disappears under its volume and returns as another device.

use crate::background_tasks::{BackgroundTask, asking};
use crate::memory::{OpFault, World};
use crate::rig::{BACKING, CACHE, DATA_OFFSET, Rig, Sizes, ask, bytes, open, run, superblock_on, write};
use bcached_engine::{
    CacheSet, CancelToken, Error, Options, RemovedVolume, Request, VolumeId, VolumeOptions,
};
use bcached_env::{Buffer, DiskId, Env, Op};
use bcached_format::superblock::SUPERBLOCK_SECTOR;
use bcached_format::{BackingState, BackingSuperblock, CacheMode, Label, Uuid};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 20_000 };

/// Write-back is off, and data that waits for a flush stays parked for long.
fn options() -> Options {
    Options {
        parked_delay: Duration::from_secs(600),
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

/// Makes everything fail that the device is asked for from now on.
fn pull(world: &RefCell<World>) {
    world.borrow_mut().fate = Some(Box::new(|disk, _| (disk == BACKING).then_some(OpFault::Fails)));
}

/// Makes writes to the device fail from now on although they are carried out.
fn takes_and_fails(world: &RefCell<World>, device: DiskId) {
    let lands =
        move |disk, op: &Op| (disk == device && matches!(op, Op::Write { .. })).then_some(OpFault::Lands);
    world.borrow_mut().fate = Some(Box::new(lands));
}

fn taking(
    env: &Env,
    set: &CacheSet,
    volume: VolumeId,
    disk: DiskId,
) -> BackgroundTask<Result<RemovedVolume, Error>> {
    let set = set.clone();
    BackgroundTask::start(env, async move { set.take_back(volume, disk).await })
}

/// Changes the superblock of a device.
fn change(world: &RefCell<World>, disk: DiskId, change: impl FnOnce(&mut BackingSuperblock)) {
    let mut superblock = superblock_on(&world.borrow(), disk);
    change(&mut superblock);
    world.borrow_mut().place(disk.0 as usize, SUPERBLOCK_SECTOR, &superblock.seal()[..]);
}

const fn not_as_it_was(why: &'static str) -> Result<RemovedVolume, Error> {
    Err(Error::DeviceMismatch(why))
}

/// Dirty data stays dirty, is readable as before, and is written back to the new device. The old
/// device gets no more requests.
#[test]
fn the_new_device_has_the_place_of_the_old_one() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        ask(&set, volume, Request::Flush).await;
        let new = world.borrow_mut().copy(BACKING);
        pull(&world);
        let missed = set.serve(volume, Request::Read { sector: 800, buffer: Buffer::zeroed(4096) }).await;
        assert!(matches!(missed.result, Err(Error::Io { .. })), "{:?}", missed.result);
        assert!(set.write_back(volume, &CancelToken::default()).await.is_err());
        assert!(set.volumes()[0].writeback_trouble.is_some());

        let asked = Rc::new(RefCell::new(0));
        let counted = Rc::clone(&asked);
        let taken = set.take_back(volume, new).await;
        assert_eq!(taken, Ok(RemovedVolume { disk: Some(BACKING), lost: None }));
        world.borrow_mut().fate = Some(Box::new(move |disk, _| {
            *counted.borrow_mut() += u32::from(disk == BACKING);
            None
        }));
        let now = &set.volumes()[0];
        assert_eq!((now.id, now.dirty_sectors), (volume, 8));
        assert_eq!(bytes(&set, volume, 0, 8).await, [1; 8]);
        ask(&set, volume, write(16, 8, 2)).await;
        assert_eq!(bytes(&set, volume, 800, 8).await, [0; 8]);
        set.write_back(volume, &CancelToken::default()).await.expect("the new one is well");
        assert_eq!(set.volumes()[0].writeback_trouble, None, "it was written to the new one");
        set.remove_volume(volume).await.expect("it is there");
        set.stop().await.expect("it stops");
        assert_eq!(*asked.borrow(), 0, "the old one was asked for something");
        let mut found = vec![0; 24 * 512];
        world.borrow().look(new.0 as usize, DATA_OFFSET, &mut found);
        assert_eq!((found[0], found[7 * 512], found[16 * 512]), (1, 1, 2));
        assert_eq!(superblock_on(&world.borrow(), new).state(), BackingState::Clean);
        set.assert_invariants();
    });
}

/// An acknowledged write through the cache was only in the old device's volatile cache. It is lost,
/// so its copy in this cache must be invalidated, or it would be visible until the next restart and
/// not after. The next flush must report the loss, whatever the old device would answer.
/// Proves invariant D30.
#[test]
fn what_no_flush_had_proven_is_gone_and_said_to_be() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("it is well");
        ask(&set, volume, write(0, 8, 1)).await;
        ask(&set, volume, Request::Flush).await;
        let new = world.borrow_mut().copy(BACKING);
        ask(&set, volume, write(0, 8, 2)).await;
        assert_eq!(bytes(&set, volume, 0, 8).await, [2; 8]);
        let taken = set.take_back(volume, new).await;
        assert_eq!(taken, Ok(RemovedVolume { disk: Some(BACKING), lost: Some(Error::LostWrites) }));
        assert_eq!(bytes(&set, volume, 0, 8).await, [1; 8]);
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// A host that used the device in between has changed its superblock, and the cache may now hold
/// stale data. Such a device is refused, and nothing changes.
#[test]
fn a_device_that_is_not_as_it_was_changes_nothing() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        let copy = |made: &dyn Fn(&mut BackingSuperblock)| {
            let new = world.borrow_mut().copy(BACKING);
            change(&world, new, made);
            new
        };
        let used = "another program has used it since";
        let stale = copy(&|superblock| superblock.set_state(BackingState::Stale));
        let clean = copy(&|superblock| superblock.set_state(BackingState::Clean));
        let elsewhere = copy(&|superblock| superblock.set_set_uuid(Uuid([9; 16])));
        let shorter = copy(&|_| ());
        world.borrow_mut().resize(shorter.0 as usize, SIZES.backing - 8);
        pull(&world);
        for (new, why) in
            [(stale, used), (clean, used), (elsewhere, used), (shorter, "it is shorter than before")]
        {
            assert_eq!(set.take_back(volume, new).await, not_as_it_was(why));
        }
        assert_eq!(set.take_back(volume, DiskId(0)).await, Err(Error::NotABacking));
        assert_eq!(set.take_back(VolumeId(7), stale).await, Err(Error::NoVolume));
        assert_eq!(bytes(&set, volume, 0, 8).await, [1; 8]);
        world.borrow_mut().fate = None;
        assert_eq!(bytes(&set, volume, 800, 8).await, [0; 8]);
        set.write_back(volume, &CancelToken::default()).await.expect("the old one serves");
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// The disk disappeared during a write of its superblock, which may therefore have the contents
/// from before or after that write. But it may never say that nothing is dirty while something is.
#[test]
fn a_superblock_in_doubt_may_be_either_of_two() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        takes_and_fails(&world, BACKING);
        let refused = set.serve(volume, write(0, 8, 1)).await;
        assert!(refused.result.is_err(), "*dirty* is not known to be durable");
        assert_eq!(set.volumes()[0].state, Some(BackingState::Clean));
        let new = world.borrow_mut().copy(BACKING);
        assert_eq!(superblock_on(&world.borrow(), new).state(), BackingState::Dirty);
        set.take_back(volume, new).await.expect("it may be ours");
        world.borrow_mut().fate = None;
        ask(&set, volume, write(0, 8, 1)).await;

        // Here it is the cache mode.
        world.borrow_mut().fate = Some(Box::new(move |disk, _| (disk == new).then_some(OpFault::Fails)));
        assert!(set.set_cache_mode(volume, CacheMode::Writethrough).await.is_err());
        let clean = world.borrow_mut().copy(new);
        change(&world, clean, |superblock| superblock.set_state(BackingState::Clean));
        let used = "another program has used it since";
        assert_eq!(set.take_back(volume, clean).await, not_as_it_was(used), "8 sectors are dirty");
        let other = world.borrow_mut().copy(new);
        change(&world, other, |superblock| superblock.set_cache_mode(CacheMode::Writethrough));
        set.take_back(volume, other).await.expect("it may be ours");
        assert_eq!(bytes(&set, volume, 0, 8).await, [1; 8]);
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// The returning device is an image from an hour ago, while the cache holds clean copies of newer
/// data. It is refused.
#[test]
fn an_older_copy_is_not_taken_back() {
    for mode in [CacheMode::Writethrough, CacheMode::Writeback] {
        let mut rig = Rig::new(SIZES, 1);
        let world = Rc::clone(&rig.world);
        run(&mut rig, move |env| async move {
            let (set, volume) = open(env.clone(), options()).await.expect("sound");
            set.set_cache_mode(volume, mode).await.expect("it is well");
            ask(&set, volume, write(0, 8, 1)).await;
            set.write_back(volume, &CancelToken::default()).await.expect("it is well");
            let during = world.borrow_mut().copy(BACKING);
            set.stop().await.expect("it stops");
            drop(set);
            let stopped = world.borrow_mut().copy(BACKING);
            let (set, volume) = open(env, options()).await.expect("sound");
            let now = world.borrow_mut().copy(BACKING);
            pull(&world);
            for copy in [during, stopped] {
                let taken = set.take_back(volume, copy).await;
                assert_eq!(taken, not_as_it_was("another program has used it since"));
            }
            set.take_back(volume, now).await.expect("this is what it was");
            world.borrow_mut().fate = None;
            assert_eq!(bytes(&set, volume, 0, 8).await, [1; 8]);
            set.stop().await.expect("it stops");
        });
    }
}

/// The device disappeared while its superblock was to become *none* at a detach, or *clean* at an
/// attach, and it has the new contents. It is taken back: the volume's state is unchanged, and the
/// first change restores the superblock. A superblock with any further difference was written by
/// another host, and is refused.
#[test]
fn a_superblock_that_failed_to_say_whose_the_device_is_may_say_it() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        takes_and_fails(&world, BACKING);
        assert!(set.detach(volume, &CancelToken::default()).await.is_err());
        let nobodys = world.borrow_mut().copy(BACKING);
        assert_eq!(superblock_on(&world.borrow(), nobodys).state(), BackingState::None);
        let used = world.borrow_mut().copy(BACKING);
        change(&world, used, |superblock| superblock.set_label(Label::from_text("another").expect("short")));
        assert_eq!(set.take_back(volume, used).await, not_as_it_was("another program has used it since"));
        set.take_back(volume, nobodys).await.expect("this set has written that");
        world.borrow_mut().fate = None;
        ask(&set, volume, write(0, 8, 1)).await;
        let superblock = superblock_on(&world.borrow(), nobodys);
        assert_eq!(superblock.state(), BackingState::Dirty);
        assert_ne!(superblock.set_uuid(), Uuid::NIL);
        set.detach(volume, &CancelToken::default()).await.expect("the new one takes it");

        takes_and_fails(&world, nobodys);
        assert!(set.attach(volume, &CancelToken::default()).await.is_err());
        let ours = world.borrow_mut().copy(nobodys);
        assert_eq!(superblock_on(&world.borrow(), ours).state(), BackingState::Clean);
        set.take_back(volume, ours).await.expect("this set has written that, too");
        world.borrow_mut().fate = None;
        assert!(!set.volumes()[0].attached);
        assert_eq!(bytes(&set, volume, 0, 8).await, [1; 8]);
        set.attach(volume, &CancelToken::default()).await.expect("nothing is in its way");
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// The superblock was to become *clean*, and did, although that write failed. It is marked *dirty*
/// before the next data becomes dirty.
#[test]
fn a_device_that_a_failed_write_has_made_clean_is_marked_again() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        let lands = |disk, op: &Op| {
            let is_superblock = matches!(op, Op::Write { sector, .. } if *sector == SUPERBLOCK_SECTOR);
            (disk == BACKING && is_superblock).then_some(OpFault::Lands)
        };
        world.borrow_mut().fate = Some(Box::new(lands));
        set.write_back(volume, &CancelToken::default()).await.expect("data is written");
        let says = |disk| superblock_on(&world.borrow(), disk).state();
        for _ in 0..100 {
            if says(BACKING) == BackingState::Dirty {
                env.sleep(Duration::from_secs(1)).await;
            }
        }
        assert_eq!((says(BACKING), set.volumes()[0].state), (BackingState::Clean, Some(BackingState::Dirty)));
        let new = world.borrow_mut().copy(BACKING);
        set.take_back(volume, new).await.expect("this set has written that");
        world.borrow_mut().fate = None;
        ask(&set, volume, write(64, 8, 2)).await;
        assert_eq!(says(new), BackingState::Dirty);
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// Earlier requests are answered by the old device, however late, and a stop waits for all of them.
#[test]
fn requests_in_flight_end_on_the_old_device() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        let new = world.borrow_mut().copy(BACKING);
        let waits =
            |disk, op: &Op| (disk == BACKING && matches!(op, Op::Read { .. })).then_some(OpFault::Waits);
        world.borrow_mut().fate = Some(Box::new(waits));
        let read = asking(&env, &set, volume, Request::Read { sector: 0, buffer: Buffer::zeroed(4096) });
        env.sleep(Duration::from_millis(1)).await;
        let taking = taking(&env, &set, volume, new);
        env.sleep(Duration::from_secs(1)).await;
        assert!(!read.is_over() && !taking.is_over());
        assert_eq!(set.serve(volume, write(0, 8, 1)).await.result, Err(Error::NoVolume));
        assert_eq!(set.take_back(volume, new).await, Err(Error::VolumeBusy));
        let its = set.clone();
        let stopping = BackgroundTask::start(&env, async move { its.stop().await });
        env.sleep(Duration::from_secs(1)).await;
        assert!(!stopping.is_over());
        pull(&world);
        assert!(matches!(read.result(&env).await, Err(Error::Io { .. })));
        let taken = taking.result(&env).await.expect("nothing keeps it");
        assert_eq!(taken.disk, Some(BACKING));
        stopping.result(&env).await.expect("it stops");
        set.assert_invariants();
    });
}

/// The device has disappeared, and every operation reports that.
fn gone(world: &RefCell<World>) {
    world.borrow_mut().fate = Some(Box::new(|disk, _| (disk == BACKING).then_some(OpFault::Gone)));
}

async fn misses_it(set: &CacheSet, volume: VolumeId, request: Request) -> bool {
    let result = set.serve(volume, request).await.result;
    result.is_err_and(|error| error.is_absence())
}

/// Everything that was acknowledged had been flushed. Requests that need the absent device fail,
/// flushes included, but lose nothing. They are repeated when the device is back, and must not get
/// an error that data may be lost.
#[test]
fn what_a_device_was_not_there_for_is_not_lost() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("it is well");
        ask(&set, volume, write(64, 8, 1)).await;
        ask(&set, volume, Request::Flush).await;
        let new = world.borrow_mut().copy(BACKING);
        gone(&world);
        let zeroes = Request::WriteZeroes { sector: 80, sectors: 8, fua: true, may_unmap: false };
        for request in [write(64, 8, 2), zeroes, Request::Flush, write(72, 8, 2), Request::Flush] {
            let shown = format!("{request:?}");
            // A flush has nothing to do on a device that has received nothing.
            let is_flush = matches!(request, Request::Flush);
            assert!(misses_it(&set, volume, request).await || is_flush, "{shown}");
        }
        assert!(set.write_back(volume, &CancelToken::default()).await.is_err());
        let taken = set.take_back(volume, new).await;
        assert_eq!(taken, Ok(RemovedVolume { disk: Some(BACKING), lost: None }));
        ask(&set, volume, write(64, 8, 2)).await;
        ask(&set, volume, Request::Flush).await;
        assert_eq!(bytes(&set, volume, 64, 8).await, [2; 8]);
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// No client learns whether the device was present for a discard; such a discard leaves nothing in
/// doubt either.
#[test]
fn a_discard_that_a_device_was_not_there_for_leaves_nothing_in_doubt() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    world.borrow_mut().discard = true;
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("it is well");
        ask(&set, volume, write(0, 8, 1)).await;
        ask(&set, volume, Request::Flush).await;
        let new = world.borrow_mut().copy(BACKING);
        gone(&world);
        ask(&set, volume, Request::Discard { sector: 64, sectors: 8 }).await;
        let taken = set.take_back(volume, new).await;
        assert_eq!(taken, Ok(RemovedVolume { disk: Some(BACKING), lost: None }));
        ask(&set, volume, Request::Flush).await;
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// A write into the cache is in flight while another one finds that the disk is gone. The cache has
/// the former, so nothing acknowledged is in doubt when the disk is back.
#[test]
fn who_writes_to_the_cache_beside_one_that_misses_the_disk_loses_nothing() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        ask(&set, volume, Request::Flush).await;
        let is_data = |disk, op: &Op| disk == CACHE && matches!(op, Op::Write { .. });
        world.borrow_mut().fate = Some(Box::new(move |disk, op| is_data(disk, op).then_some(OpFault::Waits)));
        let cached = asking(&env, &set, volume, write(64, 8, 2));
        env.sleep(Duration::from_millis(1)).await;
        set.set_cache_mode(volume, CacheMode::Writearound).await.expect("it is well");
        let new = world.borrow_mut().copy(BACKING);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let waits = is_data(disk, op).then_some(OpFault::Waits);
            waits.or((disk == BACKING).then_some(OpFault::Gone))
        }));
        assert!(misses_it(&set, volume, write(128, 8, 3)).await);
        assert!(!cached.is_over());
        gone(&world);
        assert_eq!(cached.result(&env).await, Ok(()));
        let taken = set.take_back(volume, new).await;
        assert_eq!(taken, Ok(RemovedVolume { disk: Some(BACKING), lost: None }));
        assert_eq!(bytes(&set, volume, 64, 8).await, [2; 8]);
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// Data that the device had received and no flush had proven durable may be lost with it. It is not
/// readable meanwhile, and the possible loss is reported when the device is back.
#[test]
fn what_a_device_took_before_it_went_is_in_doubt() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("it is well");
        ask(&set, volume, write(0, 8, 1)).await;
        let new = world.borrow_mut().copy(BACKING);
        assert_eq!(bytes(&set, volume, 0, 8).await, [1; 8]);
        gone(&world);
        assert_eq!(bytes(&set, volume, 0, 8).await, [1; 8], "as any data in the cache");
        assert!(misses_it(&set, volume, Request::Flush).await);
        let read = || Request::Read { sector: 0, buffer: Buffer::zeroed(4096) };
        assert!(misses_it(&set, volume, read()).await, "it may not be there when the device is back");
        let taken = set.take_back(volume, new).await;
        assert_eq!(taken, Ok(RemovedVolume { disk: Some(BACKING), lost: Some(Error::LostWrites) }));
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// A flush issued by the engine has failed, and no client has been told. The next flush must return
/// that error, and not that the device is absent, which a client might wait for.
#[test]
fn a_flush_owed_to_a_client_fails_for_that_also_while_the_device_is_gone() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        set.set_cache_mode(volume, CacheMode::Writearound).await.expect("it is well");
        ask(&set, volume, write(64, 8, 1)).await;
        let flushes = |disk, op: &Op| (disk == BACKING && matches!(op, Op::Flush)).then_some(OpFault::Fails);
        world.borrow_mut().fate = Some(Box::new(flushes));
        assert!(set.write_back(volume, &CancelToken::default()).await.is_err());
        gone(&world);
        assert_eq!(set.serve(volume, Request::Flush).await.result, Err(Error::LostWrites));
        assert!(misses_it(&set, volume, Request::Flush).await, "it has been said");
        world.borrow_mut().fate = None;
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}
