//! Volumes that are detached from the cache and attached again while they are served. No write is
//! lost, no stale copy is served, and any failure in between leaves the volume in its former state.

use crate::background_tasks::{BackgroundTask, asking};
use crate::forged_set::stopped;
use crate::memory::OpFault;
use crate::rig::{BACKING, CACHE, DATA_OFFSET, Rig, Sizes, ask, backing_superblock, bytes, open, run, write};
use bcached_engine::{CacheSet, CancelToken, Error, Options, Request, VolumeId, VolumeOptions};
use bcached_env::{Env, Op, Payload};
use bcached_format::superblock::SUPERBLOCK_SECTOR;
use bcached_format::{BackingState, CacheMode, Uuid};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 200_000 };

/// Write-back is off.
fn options() -> Options {
    Options {
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        parked_delay: Duration::from_millis(5),
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

fn is_of(payload: &Payload, byte: u8) -> bool {
    payload.as_slice().iter().all(|found| *found == byte)
}

/// Returns whether some sector of the payload is filled with `byte`.
fn holds(payload: &Payload, byte: u8) -> bool {
    payload.as_slice().chunks(512).any(|sector| sector.iter().all(|found| *found == byte))
}

fn detaching(env: &Env, set: &CacheSet, volume: VolumeId) -> BackgroundTask<Result<(), Error>> {
    let set = set.clone();
    BackgroundTask::start(env, async move { set.detach(volume, &CancelToken::default()).await })
}

/// Number of places of two sectors that a client writes, and of rounds over all of them.
const PLACES: usize = 300;
const ROUNDS: u8 = 100;

const fn place(client: u8, number: usize) -> u64 {
    client as u64 * 1000 + number as u64 * 3
}

/// Rewrites the client's own sectors repeatedly; returns what was last acknowledged for each.
fn rewriting(
    env: &Env,
    set: &CacheSet,
    volume: VolumeId,
    client: u8,
    goes_on: &Rc<Cell<bool>>,
) -> BackgroundTask<Vec<u8>> {
    let (set, goes_on) = (set.clone(), Rc::clone(goes_on));
    BackgroundTask::start(env, async move {
        let mut last = vec![client + 1; PLACES];
        for round in 0..ROUNDS {
            for (number, last_byte) in last.iter_mut().enumerate() {
                if goes_on.get() {
                    *last_byte = 10 + (round % 20) * 10 + client;
                    ask(&set, volume, write(place(client, number), 2, *last_byte)).await;
                }
            }
        }
        last
    })
}

/// Clients keep rewriting their own sectors without a pause while a volume full of dirty data is
/// detached. The detach completes although the writes go on, and the backing device alone has
/// everything that was acknowledged last. Proves invariant D16.
#[test]
fn a_volume_is_detached_under_load_and_its_backing_device_has_everything() {
    const CLIENTS: u8 = 4;
    let mut rig = Rig::new(SIZES, 3);
    let written = run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        for (client, number) in
            (0..CLIENTS).flat_map(|client| (0..PLACES).map(move |number| (client, number)))
        {
            ask(&set, volume, write(place(client, number), 2, client + 1)).await;
        }
        assert!(set.status().dirty_sectors >= 2 * PLACES as u64 * u64::from(CLIENTS));
        let goes_on = Rc::new(Cell::new(true));
        let clients: Vec<_> =
            (0..CLIENTS).map(|client| rewriting(&env, &set, volume, client, &goes_on)).collect();
        set.detach(volume, &CancelToken::default()).await.expect("its backing device takes everything");
        assert!(!clients.iter().any(BackgroundTask::is_over), "it has outlasted those who write");
        let info = set.volumes().remove(0);
        assert_eq!((info.attached, info.state, info.dirty_sectors), (false, Some(BackingState::None), 0));
        env.sleep(Duration::from_millis(20)).await;
        assert_eq!(set.status().dirty_sectors, 0);
        goes_on.set(false);
        let mut written = Vec::new();
        for client in clients {
            written.push(client.result(&env).await);
        }
        assert_eq!(bytes(&set, volume, place(1, 0), 2).await, [written[1][0]; 2]);
        set.stop().await.expect("it stops");
        written
    });
    let superblock = backing_superblock(&rig);
    assert_eq!((superblock.state(), superblock.set_uuid()), (BackingState::None, Uuid::NIL));
    for (client, last) in (0..CLIENTS).zip(written) {
        for (number, byte) in last.into_iter().enumerate() {
            let mut found = [0; 1024];
            rig.world.borrow().look(1, DATA_OFFSET + place(client, number), &mut found);
            assert_eq!((found[0], found[1023]), (byte, byte), "client {client}, place {number}");
        }
    }
}

/// The cache holds clean copies of everything. The volume is detached, written and attached again.
/// Under its former inode the copies would hide what was written. It must also be cached again, now
/// and after a restart.
#[test]
fn a_volume_that_is_put_back_shows_no_old_copy_and_is_cached_again() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        ask(&set, volume, write(0, 64, 1)).await;
        for round in 2..6 {
            set.detach(volume, &CancelToken::default()).await.expect("sound");
            assert_eq!(set.detach(volume, &CancelToken::default()).await, Err(Error::NotAttached));
            ask(&set, volume, write(0, 32, round)).await;
            set.attach(volume, &CancelToken::default()).await.expect("sound");
            assert_eq!(set.attach(volume, &CancelToken::default()).await, Err(Error::Attached));
            let info = set.volumes().remove(0);
            assert_eq!((info.attached, info.state), (true, Some(BackingState::Clean)));
            let all = bytes(&set, volume, 0, 64).await;
            assert_eq!((&all[..32], &all[32..]), (&[round; 32][..], &[1; 32][..]));
            ask(&set, volume, write(32, 32, 1)).await;
            assert_eq!(set.status().dirty_sectors, 32, "it is cached");
            ask(&set, volume, write(0, 32, 100)).await;
        }
        ask(&set, volume, Request::Flush).await;
    });
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        assert_eq!(set.status().dirty_sectors, 64);
        let all = bytes(&set, volume, 0, 64).await;
        assert_eq!((&all[..32], &all[32..]), (&[100; 32][..], &[1; 32][..]));
    });
}

/// While a volume is detached, a write waits behind another one, and it is in flight when the
/// volume is attached again. The write does not know of the cache, so data that is read and cached
/// in between must not hide it. Proves invariant D17.
#[test]
fn a_write_from_before_an_attach_is_not_hidden_by_what_was_read_since() {
    const OLD: u8 = 1;
    const NEW: u8 = 2;
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        ask(&set, volume, write(0, 16, OLD)).await;
        set.detach(volume, &CancelToken::default()).await.expect("sound");
        let holds = Rc::new(Cell::new(true));
        let is_held = Rc::clone(&holds);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let Op::Write { payload, .. } = op else { return None };
            (disk == BACKING && is_of(payload, NEW) && is_held.get()).then_some(OpFault::Waits)
        }));
        let first = asking(&env, &set, volume, write(0, 8, NEW));
        env.sleep(Duration::from_millis(1)).await;
        let second = asking(&env, &set, volume, write(4, 12, NEW));
        env.sleep(Duration::from_millis(1)).await;
        let attaching = {
            let set = set.clone();
            BackgroundTask::start(&env, async move { set.attach(volume, &CancelToken::default()).await })
        };
        for _ in 0..50 {
            assert_eq!(bytes(&set, volume, 8, 8).await, [OLD; 8]);
            env.sleep(Duration::from_millis(1)).await;
        }
        assert!(set.volumes()[0].attached && !first.is_over() && !attaching.is_over());
        holds.set(false);
        for write in [first, second] {
            write.result(&env).await.expect("it is let go");
        }
        attaching.result(&env).await.expect("nothing is in the way");
        assert_eq!(bytes(&set, volume, 0, 16).await, [NEW; 16]);
    });
}

/// An attach waits for earlier requests without a limit. It can be cancelled at once, and the
/// volume is detached again.
#[test]
fn an_attach_that_waits_for_earlier_requests_is_cancelled() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        set.detach(volume, &CancelToken::default()).await.expect("sound");
        let holds = Rc::new(Cell::new(true));
        let is_held = Rc::clone(&holds);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let Op::Write { payload, .. } = op else { return None };
            (disk == BACKING && is_of(payload, 2) && is_held.get()).then_some(OpFault::Waits)
        }));
        let earlier = asking(&env, &set, volume, write(0, 8, 2));
        env.sleep(Duration::from_millis(1)).await;
        for _ in 0..2 {
            let cancel = CancelToken::default();
            let attaching = {
                let (set, cancel) = (set.clone(), cancel.clone());
                BackgroundTask::start(&env, async move { set.attach(volume, &cancel).await })
            };
            env.sleep(Duration::from_secs(5)).await;
            assert!(set.volumes()[0].attached && !attaching.is_over());
            assert_eq!(bytes(&set, volume, 8, 8).await, [0; 8]);
            set.cancel(&cancel);
            env.sleep(Duration::from_secs(1)).await;
            assert_eq!(attaching.result(&env).await, Err(Error::Cancelled));
            let info = &set.volumes()[0];
            assert!(!info.attached && !earlier.is_over());
            assert_eq!(info.state, Some(BackingState::None));
            ask(&set, volume, write(8, 8, 3)).await;
            assert_eq!(bytes(&set, volume, 8, 8).await, [3; 8]);
            ask(&set, volume, write(8, 8, 0)).await;
        }
        holds.set(false);
        earlier.result(&env).await.expect("it is let go");
        set.attach(volume, &CancelToken::default()).await.expect("nothing is in the way");
        assert_eq!(bytes(&set, volume, 0, 8).await, [2; 8]);
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
    assert_eq!(backing_superblock(&rig).state(), BackingState::Clean);
}

/// Zeroes are written over a range that begins and ends inside blocks, one end after the other. In
/// between, the volume is detached and a client writes next to the last sectors. That block is
/// zeroed on the backing device, without the copy in the cache.
#[test]
fn a_request_from_before_a_detach_does_not_take_its_neighbours_from_the_cache() {
    const OLD: u8 = 1;
    const NEW: u8 = 2;
    let mut rig = Rig::new(Sizes { block: 8, ..SIZES }, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) =
            open(env.clone(), Options { zero_batch_sectors: 8, ..options() }).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
        ask(&set, volume, write(0, 24, OLD)).await;
        ask(&set, volume, Request::Flush).await;
        env.sleep(Duration::from_millis(20)).await;
        set.set_cache_mode(volume, CacheMode::Writearound).await.expect("set");
        let holds = Rc::new(Cell::new(true));
        let is_held = Rc::clone(&holds);
        // The part of the first block.
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let is_first = |sector: &u64| (DATA_OFFSET..DATA_OFFSET + 8).contains(sector);
            let is_edge = matches!(op, Op::Zero { sector, .. } if is_first(sector));
            (disk == BACKING && is_edge && is_held.get()).then_some(OpFault::Waits)
        }));
        let zeroes = Request::WriteZeroes { sector: 4, sectors: 16, fua: false, may_unmap: false };
        let zeroing = asking(&env, &set, volume, zeroes);
        env.sleep(Duration::from_millis(1)).await;
        set.detach(volume, &CancelToken::default()).await.expect("nothing is dirty");
        ask(&set, volume, write(20, 4, NEW)).await;
        assert!(!zeroing.is_over());
        holds.set(false);
        zeroing.result(&env).await.expect("it goes on without the cache");
        let wanted = [&[OLD; 4][..], &[0; 16], &[NEW; 4]].concat();
        assert_eq!(bytes(&set, volume, 0, 24).await, wanted);
    });
}

/// A write repeated without the cache keeps its turn. It met dirty data, waited for its write-back,
/// and is on its way to the backing device when its volume is detached. The cache then fails to
/// record the rest, so the write is repeated. It must do so in its turn: another write waits behind
/// it, and readers may have seen the first. It used to land on top of the second (found by the
/// simulator).
#[test]
fn a_write_that_is_done_again_without_the_cache_keeps_its_turn() {
    const OLD: u8 = 1;
    const FIRST: u8 = 2;
    const SECOND: u8 = 3;
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        ask(&set, volume, write(0, 8, OLD)).await;
        let held = Rc::new(Cell::new(Some(OLD)));
        let (is_held, is_broken) = (Rc::clone(&held), Rc::new(Cell::new(false)));
        let breaks = Rc::clone(&is_broken);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let Op::Write { payload, .. } = op else { return None };
            let waits = disk == BACKING && is_held.get().is_some_and(|byte| is_of(payload, byte));
            let fails = disk == CACHE && is_broken.get();
            waits.then_some(OpFault::Waits).or(fails.then_some(OpFault::Fails))
        }));
        let detached = detaching(&env, &set, volume);
        env.sleep(Duration::from_millis(1)).await;
        let first = asking(&env, &set, volume, write(0, 8, FIRST));
        env.sleep(Duration::from_millis(1)).await;
        held.set(Some(FIRST));
        detached.result(&env).await.expect("nothing is dirty any more");
        breaks.set(true);
        let second = asking(&env, &set, volume, write(0, 8, SECOND));
        env.sleep(Duration::from_millis(1)).await;
        assert!(!first.is_over() && !second.is_over());
        held.set(None);
        for write in [first, second] {
            write.result(&env).await.expect("it goes past the cache");
        }
        assert!(set.status().failed.is_some(), "the first had something to record");
        assert_eq!(bytes(&set, volume, 0, 8).await, [SECOND; 8]);
    });
}

/// The backing device refuses a part of the dirty data. The detach fails with that error, and the
/// volume is as before: attached and cached, with its dirty data. Once the device works again, the
/// detach succeeds.
#[test]
fn a_detach_that_cannot_write_back_is_given_up_and_can_be_repeated() {
    const BAD: u8 = 0x77;
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        ask(&set, volume, write(0, 640, 1)).await;
        // Not adjacent to the rest: what is one key is refused as one.
        ask(&set, volume, write(648, 8, BAD)).await;
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            let Op::Write { payload, .. } = op else { return None };
            (disk == BACKING && holds(payload, BAD)).then_some(OpFault::Fails)
        }));
        let began = env.now();
        let error = set.detach(volume, &CancelToken::default()).await.expect_err("the device refuses");
        assert!(matches!(error, Error::Io { .. }), "{error}");
        assert!(env.now().0 - began.0 < 60_000_000_000, "it is not tried for ever");
        let info = set.volumes().remove(0);
        assert_eq!((info.attached, info.state, info.dirty_sectors), (true, Some(BackingState::Dirty), 8));
        assert!(info.writeback_trouble.is_some(), "it is said where");
        assert_eq!(bytes(&set, volume, 648, 8).await, [BAD; 8]);
        ask(&set, volume, write(2000, 8, 3)).await;
        assert_eq!(set.status().dirty_sectors, 16, "it is cached as before");
        world.borrow_mut().fate = None;
        set.detach(volume, &CancelToken::default()).await.expect("the device is well");
        let info = set.volumes().remove(0);
        assert_eq!((info.attached, info.writeback_trouble), (false, None));
        for (sector, byte) in [(0, 1), (648, BAD), (2000, 3)] {
            assert_eq!(bytes(&set, volume, sector, 1).await, [byte]);
        }
    });
}

/// *None* reaches the superblock, but the write is reported as failed. Dirty data on its way into
/// the cache had already checked that the superblock said *dirty*. If it entered without checking
/// again, it would be void after the next start.
#[test]
fn dirty_data_beside_a_detach_that_failed_is_not_lost() {
    const NEW: u8 = 2;
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        let (holds, lands) = (Rc::new(Cell::new(true)), Rc::new(Cell::new(true)));
        let (is_held, is_landing) = (Rc::clone(&holds), Rc::clone(&lands));
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            Op::Write { payload, .. } if disk == CACHE && is_of(payload, NEW) => {
                is_held.get().then_some(OpFault::Waits)
            }
            Op::Write { sector: SUPERBLOCK_SECTOR, .. } if disk == BACKING => {
                is_landing.replace(false).then_some(OpFault::Lands)
            }
            _ => None,
        }));
        let writing = asking(&env, &set, volume, write(640, 8, NEW));
        env.sleep(Duration::from_millis(1)).await;
        let error =
            set.detach(volume, &CancelToken::default()).await.expect_err("its superblock cannot be written");
        assert!(matches!(error, Error::Io { .. }) && !lands.get(), "{error}");
        assert!(set.volumes()[0].attached && !writing.is_over());
        holds.set(false);
        writing.result(&env).await.expect("it goes into the cache");
        ask(&set, volume, Request::Flush).await;
        assert_eq!(set.status().dirty_sectors, 8);
    });
    assert_eq!(backing_superblock(&rig).state(), BackingState::Dirty);
    rig.world.borrow_mut().fate = None;
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        assert_eq!(bytes(&set, volume, 640, 8).await, [NEW; 8]);
    });
}

/// A client writes into the cache while the superblock is about to say *none*. The write bypasses
/// the cache, after that change.
#[test]
fn nobody_makes_dirty_data_in_a_cache_that_the_volume_is_detached_from() {
    const NEW: u8 = 2;
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        let (holds_data, holds_none) = (Rc::new(Cell::new(true)), Rc::new(Cell::new(true)));
        let (data_is_held, none_is_held) = (Rc::clone(&holds_data), Rc::clone(&holds_none));
        let says_none = Rc::new(Cell::new(false));
        let is_saying = Rc::clone(&says_none);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            Op::Write { payload, .. } if is_of(payload, NEW) => {
                assert!(disk == CACHE || !none_is_held.get(), "past the cache before the superblock says so");
                (disk == CACHE && data_is_held.get()).then_some(OpFault::Waits)
            }
            Op::Write { sector: SUPERBLOCK_SECTOR, .. } if disk == BACKING => {
                is_saying.set(true);
                none_is_held.get().then_some(OpFault::Waits)
            }
            _ => None,
        }));
        let writing = asking(&env, &set, volume, write(640, 8, NEW));
        env.sleep(Duration::from_millis(1)).await;
        let detaching = detaching(&env, &set, volume);
        while !says_none.get() {
            env.sleep(Duration::from_micros(50)).await;
        }
        holds_data.set(false);
        env.sleep(Duration::from_millis(1)).await;
        assert!(!writing.is_over(), "it waits for what comes of the detach");
        holds_none.set(false);
        detaching.result(&env).await.expect("nothing is in the way");
        writing.result(&env).await.expect("it goes past the cache");
        assert_eq!(set.status().dirty_sectors, 0);
        set.stop().await.expect("it stops");
    });
    let mut found = [0; 512];
    rig.world.borrow().look(1, DATA_OFFSET + 640, &mut found);
    assert_eq!(found, [NEW; 512]);
}

/// The set is stopped while a detach keeps retrying. The detach ends and reports the stop, and
/// after the next start the volume is attached, with its dirty data.
#[test]
fn a_stop_ends_a_detach_and_the_volume_is_what_it_was() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        ask(&set, volume, write(0, 64, 1)).await;
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            (disk == BACKING && matches!(op, Op::Write { .. })).then_some(OpFault::Fails)
        }));
        let first = detaching(&env, &set, volume);
        env.sleep(Duration::from_millis(1500)).await;
        assert_eq!(set.detach(volume, &CancelToken::default()).await, Err(Error::VolumeBusy));
        assert_eq!(set.attach(volume, &CancelToken::default()).await, Err(Error::VolumeBusy));
        set.stop().await.expect("it stops");
        assert_eq!(first.result(&env).await, Err(Error::Stopping));
        assert_eq!(set.detach(volume, &CancelToken::default()).await, Err(Error::Stopping));
    });
    assert_eq!(backing_superblock(&rig).state(), BackingState::Dirty);
    rig.world.borrow_mut().fate = None;
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        assert_eq!(set.status().dirty_sectors, 64);
        assert_eq!(bytes(&set, volume, 0, 64).await, [1; 64]);
    });
}

/// A failed set cannot record anything: neither a detach nor an attach is possible, and the volume
/// stays as it is.
#[test]
fn a_set_that_has_failed_detaches_and_attaches_nothing() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            (disk == CACHE && matches!(op, Op::Write { .. })).then_some(OpFault::Fails)
        }));
        assert!(set.serve(volume, Request::Flush).await.result.is_err());
        assert!(matches!(set.detach(volume, &CancelToken::default()).await, Err(Error::Failed(_))));
        assert!(matches!(set.attach(volume, &CancelToken::default()).await, Err(Error::Failed(_))));
        assert_eq!(set.volumes()[0].state, Some(BackingState::Dirty));
        assert_eq!(bytes(&set, volume, 0, 8).await, [1; 8]);
    });
}

/// A flash-only volume cannot be detached, since it has no backing device.
#[test]
fn a_flash_only_volume_is_not_detached() {
    let mut stopped = stopped();
    stopped.add_flash_only(4096);
    run(&mut stopped.rig, |env| async move {
        let (set, _) = open(env, options()).await.expect("sound");
        let volume = set.volumes().iter().find(|info| info.flash_only).expect("in the table").id;
        ask(&set, volume, write(0, 8, 1)).await;
        assert_eq!(set.detach(volume, &CancelToken::default()).await, Err(Error::FlashOnly));
        assert_eq!(set.attach(volume, &CancelToken::default()).await, Err(Error::FlashOnly));
        assert_eq!(set.detach(VolumeId(77), &CancelToken::default()).await, Err(Error::NoVolume));
        assert_eq!(bytes(&set, volume, 0, 8).await, [1; 8]);
    });
}

/// Each attachment has an open bucket of its own for data. Those of former attachments get no more
/// data; they are released and not leaked.
#[test]
fn detaching_again_and_again_takes_no_buckets() {
    let mut rig = Rig::new(SIZES, 6);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        for round in 0..450_u64 {
            ask(&set, volume, write(8 * (round % 50), 8, 1)).await;
            set.detach(volume, &CancelToken::default()).await.expect("sound");
            set.attach(volume, &CancelToken::default()).await.expect("sound");
        }
        // All buckets but the reserves, so that buckets become scarce.
        for at in (0..100 * 128).step_by(128) {
            ask(&set, volume, write(at, 128, 2)).await;
        }
        let status = set.status();
        assert!(status.buckets_open < 80, "{} of {} are open", status.buckets_open, status.buckets);
        assert_eq!(status.dirty_sectors, 100 * 128, "it is cached");
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}
