//! Extents that the backing device cannot write, or that the cache cannot read. They are retried
//! with increasing back-off while everything else is written back, and are written back themselves
//! as soon as that works.

use crate::memory::{FaultHook, OpFault};
use crate::rig::{BACKING, CACHE, DATA_OFFSET, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{
    CacheSet, CancelToken, DataLocation, DirtyAge, Error, Options, Request, UnwritableData, VolumeId,
    VolumeOptions,
};
use bcached_env::{Buffer, Op};
use bcached_format::CacheMode;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 200_000 };
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

/// Sectors per write; writes are adjacent.
const PIECE: u64 = 8;

fn options() -> Options {
    let volume = VolumeOptions { writeback_percent: 0, writeback_delay: SECOND, ..VolumeOptions::default() };
    Options { volume, ..Options::default() }
}

/// Writes `count` adjacent pieces backwards, so that each is a key of its own.
async fn dirty(set: &CacheSet, volume: VolumeId, first: u64, count: u64, byte: u8) {
    for n in (0..count).rev() {
        ask(set, volume, write(first + n * PIECE, 8, byte)).await;
    }
}

/// How often a write of each bad sector was tried, by sector.
type TriesBySector = Rc<RefCell<BTreeMap<u64, u32>>>;

/// Makes the backing device refuse writes to the sectors `bad` of the volume.
fn refuse(bad: Vec<u64>, tries: &TriesBySector) -> FaultHook {
    let tries = Rc::clone(tries);
    Box::new(move |disk, op| {
        let Op::Write { sector, payload, .. } = op else { return None };
        let (start, end) = (*sector, *sector + payload.len() as u64 / 512);
        let hit = bad.iter().filter(|bad| disk == BACKING && (start..end).contains(&(DATA_OFFSET + **bad)));
        let hit: Vec<_> = hit.collect();
        for bad in &hit {
            *tries.borrow_mut().entry(**bad).or_default() += 1;
        }
        (!hit.is_empty()).then_some(OpFault::Fails)
    })
}

/// Bad extents are retried with increasing back-off, and everything else is written back. Each
/// sweep used to retry each bad sector forever, and each retry takes a disk seconds.
#[test]
fn bad_places_are_tried_ever_less_often_and_the_rest_leaves() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        let (tries, bad) = (TriesBySector::default(), (0..40).map(|n| 84 + n * 160).collect::<Vec<_>>());
        world.borrow_mut().fate = Some(refuse(bad.clone(), &tries));
        dirty(&set, volume, 0, 1000, 1).await;
        env.sleep(5 * SECOND).await;
        // A piece may lie in two buckets: then half of it is bad.
        let is_the_rest_gone = || (40..=40 * PIECE).contains(&set.status().dirty_sectors);
        assert!(is_the_rest_gone(), "{} sectors are dirty", set.status().dirty_sectors);
        for hour in 0..4 {
            // A client keeps writing meanwhile.
            dirty(&set, volume, 0, 10, hour).await;
            dirty(&set, volume, 88, 9, hour).await;
            env.sleep(HOUR).await;
            assert!(is_the_rest_gone(), "{} sectors are dirty", set.status().dirty_sectors);
        }
        // Tries: as part of a run, alone, and then after 1, 2, 4 .. 2048, 3600 s.
        let most = tries.borrow().values().copied().max();
        assert!(most.is_some_and(|most| (12..=20).contains(&most)), "{most:?} in four hours");
        let info = set.volumes().remove(0);
        let trouble = info.writeback_trouble.expect("the first is named");
        assert!((trouble.sector..trouble.sector + trouble.sectors).contains(&84), "{trouble:?}");
        assert_eq!((info.unwritable.ranges, info.unwritable.sectors), (40, info.dirty_sectors));
        assert!(info.unwritable.tries >= 12 && info.unwritable.retry_in <= HOUR, "{:?}", info.unwritable);
        let oldest = info.oldest_dirty.and_then(DirtyAge::known).expect("there is some");
        assert!(oldest >= 4 * HOUR, "{oldest:?}: they have been dirty from the beginning");

        world.borrow_mut().fate = None;
        env.sleep(HOUR).await;
        let info = set.volumes().remove(0);
        assert_eq!((info.dirty_sectors, info.writeback_trouble), (0, None), "they can be written again");
        assert_eq!((info.unwritable, info.oldest_dirty), (UnwritableData::default(), None));
    });
}

/// A bad extent is retried alone. Its neighbours used to be read and written with it at each retry.
#[test]
fn a_place_that_has_failed_is_tried_alone() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        let tries = TriesBySector::default();
        world.borrow_mut().fate = Some(refuse(vec![84], &tries));
        dirty(&set, volume, 0, 20, 1).await;
        env.sleep(300 * SECOND).await;
        let before = tries.borrow()[&84];
        // The extent becomes due, and its neighbours are dirty by then.
        set.change_volume_options(volume, |options| options.writeback_running = false).expect("it is served");
        dirty(&set, volume, 0, 10, 2).await;
        dirty(&set, volume, 88, 9, 2).await;
        env.sleep(300 * SECOND).await;
        assert_eq!(set.volumes()[0].unwritable.retry_in, Duration::ZERO);
        set.change_volume_options(volume, |options| options.writeback_running = true).expect("it is served");
        env.sleep(5 * SECOND).await;
        assert_eq!(tries.borrow()[&84], before + 1, "once, and not with its neighbours before");
        assert_eq!(set.status().dirty_sectors, PIECE);
    });
}

/// A flush or a detach makes each bad extent be tried at once, whatever its back-off, and soon
/// reports what blocks it.
#[test]
fn who_waits_for_all_of_it_has_bad_places_tried_at_once() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        let tries = TriesBySector::default();
        world.borrow_mut().fate = Some(refuse(vec![84, 884], &tries));
        dirty(&set, volume, 0, 200, 1).await;
        env.sleep(2 * HOUR).await;
        for detaches in [false, true] {
            let (before, began) = (tries.borrow()[&884], env.now());
            let ended = if detaches {
                set.detach(volume, &CancelToken::default()).await
            } else {
                set.write_back(volume, &CancelToken::default()).await
            };
            assert!(matches!(ended, Err(Error::Io { .. })), "{ended:?}");
            let (tried, taken) = (tries.borrow()[&884] - before, env.now().since(began));
            assert!((2..=4).contains(&tried) && taken < 10 * SECOND, "{tried} tries in {taken:?}");
            assert_eq!(set.volumes()[0].unwritable.ranges, 2);
        }
        env.sleep(2 * HOUR).await;
        assert!(set.volumes()[0].unwritable.retry_in > 60 * SECOND);
        world.borrow_mut().fate = None;
        set.write_back(volume, &CancelToken::default()).await.expect("they can be written again");
        assert_eq!((set.status().dirty_sectors, set.volumes()[0].unwritable.ranges), (0, 0));
    });
}

/// With more bad extents than the list holds, the list stays short. Data far from them is written
/// back at once, and all data in the end.
#[test]
fn a_device_that_takes_nothing_is_a_list_that_stays_short() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        let takes_from = DATA_OFFSET + 100_000;
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let is_bad =
                matches!(op, Op::Write { sector, .. } if *sector > DATA_OFFSET && *sector < takes_from);
            (disk == BACKING && is_bad).then_some(OpFault::Fails)
        }));
        for n in (1..=1000).rev() {
            ask(&set, volume, write(n * 24, 8, 1)).await;
        }
        dirty(&set, volume, 110_000, 100, 1).await;
        env.sleep(600 * SECOND).await;
        let info = set.volumes().remove(0);
        assert_eq!(info.dirty_sectors, 1000 * PIECE);
        assert!((100..=256).contains(&info.unwritable.ranges), "{:?}", info.unwritable);
        assert!(info.unwritable.sectors >= 1000 * PIECE, "{:?}", info.unwritable);
        world.borrow_mut().fate = None;
        env.sleep(1100 * SECOND).await;
        assert_eq!(set.status().dirty_sectors, 0, "it was away for ten minutes");
        assert_eq!(bytes(&set, volume, 24 * 999, 1).await, [1]);
    });
}

/// A sector of the cache cannot be read. Data written over it is stored elsewhere, and need not
/// wait for the back-off.
#[test]
fn other_data_where_the_cache_could_not_read_is_written_back_at_once() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        // The first piece of data that is read is at a bad sector.
        let bad = RefCell::new(None);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            Op::Read { sector, buffer } if disk == CACHE && buffer.len() == 4096 => {
                (*bad.borrow_mut().get_or_insert(*sector) == *sector).then_some(OpFault::Fails)
            }
            _ => None,
        }));
        ask(&set, volume, write(0, 8, 1)).await;
        env.sleep(2 * HOUR).await;
        assert_eq!((set.status().dirty_sectors, set.volumes()[0].unwritable.ranges), (8, 1));
        assert!(set.volumes()[0].unwritable.retry_in > 60 * SECOND);
        ask(&set, volume, write(0, 4, 2)).await;
        env.sleep(5 * SECOND).await;
        assert_eq!((set.status().dirty_sectors, set.volumes()[0].unwritable.sectors), (4, 4), "a half of it");
        ask(&set, volume, write(4, 4, 3)).await;
        env.sleep(5 * SECOND).await;
        assert_eq!((set.status().dirty_sectors, set.volumes()[0].unwritable.ranges), (0, 0));
        assert_eq!(bytes(&set, volume, 0, 8).await, [2, 2, 2, 2, 3, 3, 3, 3]);
    });
}

/// Makes reads of the cache device fail that include sector `place` of that device.
fn unreadable(place: u64) -> FaultHook {
    Box::new(move |disk, op| {
        let Op::Read { sector, buffer } = op else { return None };
        let range = *sector..*sector + buffer.len() as u64 / 512;
        (disk == CACHE && range.contains(&place)).then_some(OpFault::Fails)
    })
}

/// Returns the volume sector's location on the cache device, if it is cached.
async fn place(set: &CacheSet, volume: VolumeId, sector: u64) -> Option<u64> {
    match set.explain(volume, sector).await.expect("served").whereabouts {
        DataLocation::Dirty(place) | DataLocation::Clean(place) => Some(place.sector),
        _ => None,
    }
}

/// One bad extent does not make the volumes bypass the cache. Each retry used to count as an error
/// of the device, and after the eighth, within two minutes, all volumes of the set bypassed the
/// cache.
#[test]
fn one_bad_place_is_no_reason_to_do_without_the_cache() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        set.change_volume_options(volume, |options| options.writeback_running = false).expect("it is served");
        dirty(&set, volume, 0, 100, 1).await;
        let bad = place(&set, volume, 84).await.expect("just written");
        world.borrow_mut().fate = Some(unreadable(bad));
        set.change_volume_options(volume, |options| options.writeback_running = true).expect("it is served");
        env.sleep(HOUR).await;
        let (status, info) = (set.status(), set.volumes().remove(0));
        assert!(info.unwritable.tries >= 8 && status.dirty_sectors == PIECE, "{:?}", info.unwritable);
        assert!(!status.is_failing && status.io_errors == 1, "{} errors", status.io_errors);
        ask(&set, volume, write(10_000, 8, 2)).await;
        assert!(place(&set, volume, 10_000).await.is_some(), "the cache is used");
    });
}

/// A clean copy that cannot be read is invalidated and then made anew. It used to stay: each read
/// of it waited for the device's error, and after the eighth all volumes bypassed the cache.
#[test]
fn a_clean_copy_that_cannot_be_read_is_given_up_and_made_anew() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        let rest = || env.sleep(10 * SECOND);
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("it is served");
        ask(&set, volume, write(80, 8, 1)).await;
        rest().await;
        let bad = place(&set, volume, 80).await.expect("just written");
        world.borrow_mut().fate = Some(unreadable(bad));
        assert_eq!(bytes(&set, volume, 80, 8).await, [1; 8], "the original is read");
        rest().await;
        assert_eq!(place(&set, volume, 80).await, None, "nobody waits for that error again");
        for _ in 0..20 {
            assert_eq!(bytes(&set, volume, 80, 8).await, [1; 8]);
            rest().await;
        }
        let found = place(&set, volume, 80).await;
        assert!(found.is_some_and(|found| found != bad), "{found:?}");
        assert_eq!((set.status().io_errors, set.status().is_failing), (1, false));
    });
}

/// An invalidated copy does not come back over data written past the cache. The copy is first
/// invalidated in memory only. A later write past the cache finds nothing to invalidate, yet must
/// wait until the invalidation is durable. Otherwise a crash brings the old copy back over the
/// written data.
#[test]
fn a_copy_that_was_given_up_does_not_come_back_over_what_is_written_past_the_cache() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("it is served");
        ask(&set, volume, write(80, 8, 1)).await;
        env.sleep(10 * SECOND).await;
        set.set_cache_mode(volume, CacheMode::Writearound).await.expect("it is served");
        // The copy is now in the tree on the device.
        set.stop().await.expect("sound");
    });
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        let bad = place(&set, volume, 80).await.expect("just written");
        world.borrow_mut().fate = Some(unreadable(bad));
        assert_eq!(bytes(&set, volume, 80, 8).await, [1; 8], "the original is read");
        while place(&set, volume, 80).await.is_some() {
            env.sleep(Duration::from_micros(100)).await;
        }
        let payload = Buffer::copied_from(&[2; 8 * 512]).freeze();
        ask(&set, volume, Request::Write { sector: 80, payload, fua: true }).await;
        world.borrow_mut().fate = None;
    });
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        assert_eq!(bytes(&set, volume, 80, 8).await, [2; 8]);
    });
}
