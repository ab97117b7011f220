//! Volumes that live in the cache alone become larger and smaller: what comes to them reads as zeroes, whatever lay there once, and nobody
//! is promised what another one has.

use crate::beside::{Beside, asking};
use crate::memory::Mishap;
use crate::rig::{CACHE, Rig, Sizes, ask, bytes, open, run, write};
use crate::stopped::stopped;
use bcached_engine::{CacheSet, Cancel, Error, Options, Request, VolumeId, VolumeOptions};
use bcached_env::Op;
use bcached_format::Label;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: 4096 };

/// Nothing is written back unasked.
fn options() -> Options {
    Options {
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

async fn make(set: &CacheSet, sectors: u64) -> VolumeId {
    let label = Label::from_text("scratch").expect("short");
    set.create_flash_only(sectors, label).await.expect("there is room")
}

async fn shrink(set: &CacheSet, volume: VolumeId, sectors: u64) -> Result<(), Error> {
    set.shrink(volume, sectors, &Cancel::default()).await
}

fn found(set: &CacheSet) -> (VolumeId, u64) {
    let info = set.volumes().into_iter().find(|info| info.flash_only).expect("it is there");
    (info.id, info.sectors)
}

fn dirty(set: &CacheSet, volume: VolumeId) -> u64 {
    set.volumes().into_iter().find(|info| info.id == volume).expect("it is there").dirty_sectors
}

/// Larger, smaller, and larger again, over restarts: what it keeps is there, what it lost reads as zeroes.
#[test]
fn a_volume_in_the_cache_alone_grows_and_shrinks() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, _) = open(env, options()).await.expect("sound");
        let scratch = make(&set, 4000).await;
        ask(&set, scratch, write(3992, 8, 1)).await;
        assert_eq!(set.grow(scratch, 4000).await, Ok(()), "so it is");
        assert_eq!(set.grow(scratch, 8000).await, Ok(()));
        assert_eq!(bytes(&set, scratch, 3992, 16).await, [[1; 8], [0; 8]].concat());
        ask(&set, scratch, write(7992, 8, 2)).await;
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
    run(&mut rig, |env| async move {
        let (set, _) = open(env, options()).await.expect("sound");
        let (scratch, sectors) = found(&set);
        assert_eq!((sectors, dirty(&set, scratch)), (8000, 16));
        assert_eq!(bytes(&set, scratch, 7992, 8).await, [2; 8]);
        assert_eq!(shrink(&set, scratch, 4000).await, Ok(()));
        assert_eq!((found(&set).1, dirty(&set, scratch)), (4000, 8), "what lay behind it is given up");
        assert!(set.serve(scratch, write(4000, 8, 3)).await.result.is_err(), "behind its end");
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
    run(&mut rig, |env| async move {
        let (set, _) = open(env, options()).await.expect("sound");
        let (scratch, sectors) = found(&set);
        assert_eq!(sectors, 4000);
        assert_eq!(set.grow(scratch, 8000).await, Ok(()));
        assert_eq!(bytes(&set, scratch, 3992, 8).await, [1; 8]);
        assert_eq!(bytes(&set, scratch, 7992, 8).await, [0; 8]);
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// A kernel makes such a volume smaller by its number alone. What it leaves behind the end does not come back when it grows.
#[test]
fn what_lay_behind_the_end_does_not_come_back() {
    for asks_for_the_size_it_has in [false, true] {
        let mut stopped = stopped();
        stopped.add_flash_only(8000);
        run(&mut stopped.rig, |env| async move {
            let (set, _) = open(env, options()).await.expect("sound");
            ask(&set, found(&set).0, write(7992, 8, 2)).await;
            set.stop().await.expect("it stops");
        });
        stopped.resize_flash_only(4000);
        run(&mut stopped.rig, move |env| async move {
            let (set, _) = open(env, options()).await.expect("sound");
            let (scratch, sectors) = found(&set);
            assert_eq!((sectors, dirty(&set, scratch)), (4000, 8));
            if asks_for_the_size_it_has {
                assert_eq!(shrink(&set, scratch, 4000).await, Ok(()));
                assert_eq!(dirty(&set, scratch), 0, "it has its room back");
            }
            assert_eq!(set.grow(scratch, 8000).await, Ok(()));
            assert_eq!(bytes(&set, scratch, 7992, 8).await, [0; 8]);
            set.stop().await.expect("it stops");
            set.assert_invariants();
        });
    }
}

/// It is not promised more than can be stored, nor what another one was promised while it waited.
#[test]
fn a_volume_in_the_cache_alone_grows_into_what_is_free() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        let scratch = make(&set, 4000).await;
        let room = set.status().flash_room_sectors;
        let sectors_max = 4000 + room;
        let too_large = Error::NoRoom { sectors: sectors_max + 8, sectors_max };
        assert_eq!(set.grow(scratch, sectors_max + 8).await, Err(too_large));
        let odd = Error::NotWholeBlocks { sectors: 4001, block_sectors: 8 };
        assert_eq!(set.grow(scratch, 4001).await, Err(odd.clone()));
        let smaller = Error::Size { sectors: 8, sectors_min: 4000, sectors_max };
        assert_eq!(set.grow(scratch, 8).await, Err(smaller));
        assert_eq!(
            shrink(&set, scratch, 4001).await.err(),
            Some(Error::Size { sectors: 4001, sectors_min: 8, sectors_max: 4000 })
        );
        assert_eq!(
            shrink(&set, scratch, 3999).await,
            Err(Error::NotWholeBlocks { sectors: 3999, block_sectors: 8 })
        );
        assert_eq!(
            shrink(&set, scratch, 0).await,
            Err(Error::NotWholeBlocks { sectors: 0, block_sectors: 8 })
        );

        // The table waits for the cache; the room is taken from the first moment on.
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            (disk == CACHE && matches!(op, Op::Write { .. })).then_some(Mishap::Waits)
        }));
        let larger = set.clone();
        let growing = Beside::start(&env, async move { larger.grow(scratch, sectors_max - 1024).await });
        env.sleep(Duration::from_millis(10)).await;
        // Less what the table takes meanwhile.
        let left = set.status().flash_room_sectors;
        assert!(left <= 1024 && left > 512, "{left}");
        assert_eq!(set.detach(scratch, &Cancel::default()).await, Err(Error::FlashOnly));
        assert_eq!(set.grow(scratch, sectors_max).await, Err(Error::OnItsWay));
        world.borrow_mut().fate = None;
        assert_eq!(growing.result(&env).await, Ok(()));
        assert!(set.status().flash_room_sectors <= 1024);
        assert_eq!(shrink(&set, scratch, 8).await, Ok(()));
        assert!(set.status().flash_room_sectors >= room + 3900, "it has given its room back");
        ask(&set, volume, write(0, 8, 1)).await;
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// A write that is under way behind the new end ends as it would have ended, and is given up after that; a cancel before then takes
/// nothing.
#[test]
fn a_write_behind_the_new_end_is_waited_for() {
    for is_cancelled in [false, true] {
        let mut rig = Rig::new(SIZES, 1);
        let world = Rc::clone(&rig.world);
        run(&mut rig, |env| async move {
            let (set, _) = open(env.clone(), options()).await.expect("sound");
            let scratch = make(&set, 8000).await;
            ask(&set, scratch, write(7000, 8, 1)).await;
            world.borrow_mut().fate = Some(Box::new(|disk, op| {
                (disk == CACHE && matches!(op, Op::Write { .. })).then_some(Mishap::Waits)
            }));
            let writing = asking(&env, &set, scratch, write(6000, 8, 2));
            env.sleep(Duration::from_millis(1)).await;
            let (smaller, cancel) = (set.clone(), Cancel::default());
            let cancelled = cancel.clone();
            let shrinking =
                Beside::start(&env, async move { smaller.shrink(scratch, 4000, &cancelled).await });
            env.sleep(Duration::from_millis(10)).await;
            assert!(set.serve(scratch, write(6000, 8, 3)).await.result.is_err(), "behind the new end");
            if is_cancelled {
                set.cancel(&cancel);
                assert_eq!(shrinking.result(&env).await, Err(Error::Cancelled));
                world.borrow_mut().fate = None;
                assert_eq!(writing.result(&env).await, Ok(()));
                assert_eq!((found(&set).1, bytes(&set, scratch, 6000, 8).await), (8000, vec![2; 8]));
                assert_eq!(bytes(&set, scratch, 7000, 8).await, [1; 8]);
            } else {
                world.borrow_mut().fate = None;
                assert_eq!(writing.result(&env).await, Ok(()));
                assert_eq!(shrinking.result(&env).await, Ok(()));
                assert_eq!((found(&set).1, dirty(&set, scratch)), (4000, 0));
            }
            ask(&set, scratch, Request::Flush).await;
            set.stop().await.expect("it stops");
            set.assert_invariants();
        });
    }
}
