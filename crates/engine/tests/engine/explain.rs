//! `explain` reports where a sector's data is, and the data is there.

use crate::background_tasks::asking;
use crate::memory::OpFault;
use crate::rig::{BACKING, CACHE, DATA_OFFSET, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{
    CacheSet, CancelToken, DataLocation, Error, Explanation, Options, SectorActivity, VolumeId, VolumeOptions,
};
use bcached_env::Op;
use bcached_format::CacheMode;
use std::rc::Rc;
use std::time::Duration;

/// The device ends three sectors behind its last whole block.
const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: DATA_OFFSET + 4003 };

fn options() -> Options {
    Options {
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

async fn explain(set: &CacheSet, volume: VolumeId, sector: u64) -> Explanation {
    set.explain(volume, sector).await.expect("it is there")
}

/// The byte on the cache device at the reported place.
fn byte_at(rig: &std::cell::RefCell<crate::memory::World>, whereabouts: DataLocation) -> u8 {
    let (DataLocation::Dirty(place) | DataLocation::Clean(place) | DataLocation::Parked(place)) = whereabouts
    else {
        unreachable!("not in the cache: {whereabouts:?}");
    };
    assert_eq!(place.bucket, place.sector / 128);
    let mut found = [0; 512];
    rig.borrow().look(0, place.sector, &mut found);
    found[0]
}

#[test]
fn each_place_that_data_can_be_in_is_told() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        ask(&set, volume, write(800, 16, 1)).await;
        ask(&set, volume, write(3999, 4, 2)).await;
        let dirty = explain(&set, volume, 805).await;
        assert_eq!((dirty.start, dirty.end, dirty.backing_sector), (800, 816, Some(DATA_OFFSET + 805)));
        assert!(matches!(dirty.whereabouts, DataLocation::Dirty(_)), "{dirty:?}");
        assert_eq!(byte_at(&world, dirty.whereabouts), 1);
        assert_eq!(dirty.claims, SectorActivity::default());
        let hole = explain(&set, volume, 700).await;
        assert_eq!((hole.start, hole.end, hole.whereabouts), (0, 800, DataLocation::NotCached));
        let tail = explain(&set, volume, 4001).await;
        assert_eq!((tail.start, tail.end, tail.whereabouts), (4000, 4003, DataLocation::OffGrid));
        set.write_back(volume, &CancelToken::default()).await.expect("the device is well");
        let clean = explain(&set, volume, 805).await;
        assert!(matches!(clean.whereabouts, DataLocation::Clean(_)), "{clean:?}");
        assert_eq!(byte_at(&world, clean.whereabouts), 1);
        let beyond = set.explain(volume, 4003).await;
        assert!(matches!(beyond, Err(Error::Range { volume_sectors: 4003, .. })), "{beyond:?}");
        assert_eq!(set.explain(VolumeId(9), 0).await, Err(Error::NoVolume));
        set.detach(volume, &CancelToken::default()).await.expect("the device is well");
        let alone = explain(&set, volume, 805).await;
        assert_eq!((alone.start, alone.end, alone.whereabouts), (0, 4003, DataLocation::Uncached));
        set.stop().await.expect("it stops");
    });
}

/// Data that waits for the backing device's flush, and operations in progress on a sector, are
/// reported.
#[test]
fn what_is_on_its_way_is_told() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("sound");
        // From here on the cache has an open bucket for it.
        for place in 0..4 {
            bytes(&set, volume, place * 8, 8).await;
            env.sleep(Duration::from_millis(10)).await;
        }
        ask(&set, volume, write(800, 16, 1)).await;
        let parked = explain(&set, volume, 810).await;
        assert!(matches!(parked.whereabouts, DataLocation::Parked(_)), "{parked:?}");
        assert_eq!(
            (parked.start + DATA_OFFSET, parked.end + DATA_OFFSET),
            (800 + DATA_OFFSET, 816 + DATA_OFFSET)
        );
        assert_eq!(byte_at(&world, parked.whereabouts), 1);
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            let is_it = matches!(op, Op::Write { sector, .. } if *sector == DATA_OFFSET + 1600);
            (disk == BACKING && is_it).then_some(OpFault::Waits)
        }));
        let writing = asking(&env, &set, volume, write(1600, 8, 2));
        env.sleep(Duration::from_millis(1)).await;
        assert_eq!(
            explain(&set, volume, 1603).await.claims,
            SectorActivity { writing: true, ..SectorActivity::default() }
        );
        world.borrow_mut().fate = None;
        assert_eq!(writing.result(&env).await, Ok(()));
        set.set_cache_mode(volume, CacheMode::Writeback).await.expect("sound");
        ask(&set, volume, write(2400, 8, 3)).await;
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            (disk == CACHE && matches!(op, Op::Read { .. })).then_some(OpFault::Waits)
        }));
        let flushing = crate::background_tasks::BackgroundTask::start(&env, {
            let set = set.clone();
            async move { set.write_back(volume, &CancelToken::default()).await }
        });
        env.sleep(Duration::from_millis(1)).await;
        assert_eq!(
            explain(&set, volume, 2403).await.claims,
            SectorActivity { writing_back: true, ..SectorActivity::default() }
        );
        world.borrow_mut().fate = None;
        assert_eq!(flushing.result(&env).await, Ok(()));
        set.stop().await.expect("it stops");
    });
}
