//! Flash-only volumes grow and shrink. Added space reads as zeroes, whatever was there before, and
//! no volume is promised room that another one has.

use crate::background_tasks::{BackgroundTask, asking};
use crate::forged_set::stopped;
use crate::memory::OpFault;
use crate::rig::{CACHE, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, CancelToken, Error, LostRange, Options, Request, VolumeId, VolumeOptions};
use bcached_env::Op;
use bcached_format::Label;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: 4096 };

/// Write-back is off.
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
    let shrinking = set.begin_shrinking(volume, sectors, &CancelToken::default()).await?;
    set.shrink_flash_only(shrinking).await
}

fn found(set: &CacheSet) -> (VolumeId, u64) {
    let info = set.volumes().into_iter().find(|info| info.flash_only).expect("it is there");
    (info.id, info.sectors)
}

fn dirty(set: &CacheSet, volume: VolumeId) -> u64 {
    set.volumes().into_iter().find(|info| info.id == volume).expect("it is there").dirty_sectors
}

/// A volume grows, shrinks, and grows again, across restarts. What it keeps is intact; what it lost
/// reads as zeroes.
#[test]
fn a_volume_in_the_cache_alone_grows_and_shrinks() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, _) = open(env, options()).await.expect("sound");
        let scratch = make(&set, 4000).await;
        ask(&set, scratch, write(3992, 8, 1)).await;
        assert_eq!(set.grow(scratch, 4000, &CancelToken::default()).await, Ok(()), "so it is");
        assert_eq!(set.grow(scratch, 8000, &CancelToken::default()).await, Ok(()));
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
        assert_eq!(set.grow(scratch, 8000, &CancelToken::default()).await, Ok(()));
        assert_eq!(bytes(&set, scratch, 3992, 8).await, [1; 8]);
        assert_eq!(bytes(&set, scratch, 7992, 8).await, [0; 8]);
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// The kernel shrinks such a volume by changing its size field alone. What remains behind the end
/// does not come back when the volume grows.
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
            assert_eq!(set.grow(scratch, 8000, &CancelToken::default()).await, Ok(()));
            assert_eq!(bytes(&set, scratch, 7992, 8).await, [0; 8]);
            set.stop().await.expect("it stops");
            set.assert_invariants();
        });
    }
}

/// A volume is not promised more than can be stored, nor room that another one was promised while
/// it waited.
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
        assert_eq!(set.grow(scratch, sectors_max + 8, &CancelToken::default()).await, Err(too_large));
        let odd = Error::NotWholeBlocks { sectors: 4001, block_sectors: 8 };
        assert_eq!(set.grow(scratch, 4001, &CancelToken::default()).await, Err(odd.clone()));
        let smaller = Error::Size { sectors: 8, sectors_min: 4000, sectors_max };
        assert_eq!(set.grow(scratch, 8, &CancelToken::default()).await, Err(smaller));
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

        // The write of the table waits for the cache; the room is taken from the first moment on.
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            (disk == CACHE && matches!(op, Op::Write { .. })).then_some(OpFault::Waits)
        }));
        let larger = set.clone();
        let growing = BackgroundTask::start(&env, async move {
            larger.grow(scratch, sectors_max - 1024, &CancelToken::default()).await
        });
        env.sleep(Duration::from_millis(10)).await;
        // Less what the table takes meanwhile.
        let left = set.status().flash_room_sectors;
        assert!(left <= 1024 && left > 512, "{left}");
        let behind = asking(&env, &set, scratch, write(4000, 8, 3));
        env.sleep(Duration::from_millis(1)).await;
        assert!(behind.is_over(), "the table does not say so yet: it is refused");
        assert_eq!(set.detach(scratch, &CancelToken::default()).await, Err(Error::FlashOnly));
        assert_eq!(set.grow(scratch, sectors_max, &CancelToken::default()).await, Err(Error::VolumeBusy));
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

/// Two volumes are told that there is room and wait for the journal. The second one then finds that
/// none is left.
#[test]
fn two_that_grow_at_once_are_not_promised_the_same_room() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, |env| async move {
        let (set, _) = open(env.clone(), options()).await.expect("sound");
        let both = [make(&set, 4000).await, make(&set, 4000).await];
        let larger = 4000 + (set.status().flash_room_sectors / 8 * 8 - 1024);
        // The journal has an entry to write, and waits for the cache.
        ask(&set, both[0], write(0, 8, 1)).await;
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            (disk == CACHE && matches!(op, Op::Write { .. })).then_some(OpFault::Waits)
        }));
        let growing = both.map(|volume| {
            let set = set.clone();
            BackgroundTask::start(
                &env,
                async move { set.grow(volume, larger, &CancelToken::default()).await },
            )
        });
        env.sleep(Duration::from_millis(10)).await;
        assert!(set.status().flash_room_sectors > 1024, "nobody has been promised anything yet");
        world.borrow_mut().fate = None;
        let [first, second] = growing;
        let results = [first.result(&env).await, second.result(&env).await];
        assert!(
            matches!(results, [Ok(()), Err(Error::NoRoom { .. })] | [Err(Error::NoRoom { .. }), Ok(())]),
            "{results:?}"
        );
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// A write in flight behind the new end completes normally and is dropped after that. A cancel
/// before then loses nothing.
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
                (disk == CACHE && matches!(op, Op::Write { .. })).then_some(OpFault::Waits)
            }));
            let writing = asking(&env, &set, scratch, write(6000, 8, 2));
            env.sleep(Duration::from_millis(1)).await;
            let (smaller, cancel) = (set.clone(), CancelToken::default());
            let cancelled = cancel.clone();
            let shrinking = BackgroundTask::start(&env, async move {
                let shrinking = smaller.begin_shrinking(scratch, 4000, &cancelled).await?;
                assert_eq!(shrinking.dirty_sectors, 16, "also what was under way");
                smaller.shrink_flash_only(shrinking).await
            });
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

/// A shrink first reports what would be lost, accepts no new data there meanwhile, and loses
/// nothing if the caller declines.
#[test]
fn what_a_shrink_would_lose_is_told_first() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        let scratch = make(&set, 8000).await;
        for sector in [3992, 4000, 4008, 7000] {
            ask(&set, scratch, write(sector, 8, 2)).await;
        }
        let none = CancelToken::default();
        assert_eq!(set.shrink(scratch, 4000, &none).await, Err(Error::FlashOnly), "it loses nothing unasked");
        assert_eq!(set.begin_shrinking(volume, 8, &none).await, Err(Error::HasBacking));
        let shrinking = set.begin_shrinking(scratch, 4000, &none).await.expect("it can be");
        assert_eq!(shrinking.dirty_sectors, 24);
        let lost = [LostRange { start: 4000, end: 4016 }, LostRange { start: 7000, end: 7008 }];
        assert_eq!(set.lost_behind(&shrinking, 0).await, Ok((lost.to_vec(), None)));
        assert!(set.serve(scratch, write(4000, 8, 3)).await.result.is_err(), "behind its end");
        assert_eq!(set.grow(scratch, 8000, &CancelToken::default()).await, Err(Error::VolumeBusy));
        set.keep_size(shrinking.clone());
        assert_eq!(bytes(&set, scratch, 4000, 16).await, [2; 16]);
        assert_eq!(set.shrink_flash_only(shrinking).await, Err(Error::Reopened), "it was given up");
        assert_eq!((found(&set).1, dirty(&set, scratch)), (8000, 32));
        // A stop does not wait for a caller that has yet to decide.
        let left = set.begin_shrinking(scratch, 4000, &none).await.expect("it can be");
        set.stop().await.expect("it stops");
        assert_eq!(set.shrink_flash_only(left).await, Err(Error::Stopping));
        set.assert_invariants();
    });
    run(&mut rig, |env| async move {
        let (set, _) = open(env, options()).await.expect("sound");
        let (scratch, sectors) = found(&set);
        assert_eq!((sectors, dirty(&set, scratch)), (8000, 32));
        set.stop().await.expect("it stops");
    });
}

/// Data that an earlier session left behind the end takes room beside what may still be written
/// before the end.
#[test]
fn what_lies_behind_an_end_is_promised_to_nobody() {
    let mut stopped = stopped();
    stopped.add_flash_only(8000);
    run(&mut stopped.rig, |env| async move {
        let (set, _) = open(env, options()).await.expect("sound");
        for sector in (4000..8000).step_by(400) {
            ask(&set, found(&set).0, write(sector, 400, 2)).await;
        }
        set.stop().await.expect("it stops");
    });
    stopped.resize_flash_only(4000);
    run(&mut stopped.rig, |env| async move {
        let (set, _) = open(env, options()).await.expect("sound");
        let (scratch, _) = found(&set);
        let sectors_max = set.flash_sectors_max(scratch).await.expect("it is known");
        let room = set.status().flash_room_sectors;
        assert_eq!(sectors_max, 8000 + room, "what lies behind its end it has already");
        let label = Label::from_text("more").expect("short");
        let more = set.create_flash_only(room + 8, label).await;
        assert_eq!(more, Err(Error::NoRoom { sectors: room + 8, sectors_max: room }));
        let too_large = Error::NoRoom { sectors: sectors_max + 8, sectors_max };
        assert_eq!(set.grow(scratch, sectors_max + 8, &CancelToken::default()).await, Err(too_large));
        assert_eq!(shrink(&set, scratch, 4000).await, Ok(()));
        // The index of that data takes room as well, and is freed with it.
        assert!(set.status().flash_room_sectors >= room + 4000, "it has given its room back");
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}

/// The table cannot be written: the volume keeps its size and all of its data, now and after the
/// next start.
#[test]
fn a_table_that_cannot_be_written_leaves_the_size() {
    // Proves invariant D48.
    for grows in [false, true] {
        let mut rig = Rig::new(SIZES, 1);
        let world = Rc::clone(&rig.world);
        run(&mut rig, |env| async move {
            let (set, _) = open(env, options()).await.expect("sound");
            let scratch = make(&set, 4000).await;
            ask(&set, scratch, write(3992, 8, 2)).await;
            ask(&set, scratch, Request::Flush).await;
            world.borrow_mut().fate = Some(Box::new(|disk, op| {
                (disk == CACHE && matches!(op, Op::Write { .. })).then_some(OpFault::Fails)
            }));
            let failed = match grows {
                true => set.grow(scratch, 8000, &CancelToken::default()).await,
                false => shrink(&set, scratch, 2000).await,
            };
            assert!(failed.is_err(), "the table cannot be written");
            world.borrow_mut().fate = None;
            assert_eq!((found(&set).1, bytes(&set, scratch, 3992, 8).await), (4000, vec![2; 8]));
            let _failed = set.stop().await;
        });
        run(&mut rig, |env| async move {
            let (set, _) = open(env, options()).await.expect("sound");
            let (scratch, sectors) = found(&set);
            assert_eq!((sectors, bytes(&set, scratch, 3992, 8).await), (4000, vec![2; 8]));
            set.stop().await.expect("it stops");
            set.assert_invariants();
        });
    }
}

/// The set is stopped in the middle of a shrink, or its cache fails from some write on. The volume
/// has the old size with all of its data, or the new size. In the latter case repeating the shrink
/// releases the rest.
#[test]
fn a_shrink_that_ends_in_the_middle_is_completed_by_the_next() {
    // Proves invariant D48.
    for fails in [false, true] {
        let mut ends = [0; 3];
        for nth in 0..60 {
            let mut rig = Rig::new(SIZES, 1);
            let world = Rc::clone(&rig.world);
            run(&mut rig, |env| async move {
                let (set, _) = open(env.clone(), options()).await.expect("sound");
                let scratch = make(&set, 8000).await;
                for sector in (0..8000).step_by(800) {
                    ask(&set, scratch, write(sector, 8, 2)).await;
                }
                ask(&set, scratch, Request::Flush).await;
                let (smaller, mut left) = (set.clone(), nth);
                if fails {
                    world.borrow_mut().fate = Some(Box::new(move |disk, op| {
                        let is_write = disk == CACHE && matches!(op, Op::Write { .. });
                        left -= u64::from(is_write && left > 0);
                        (is_write && left == 0).then_some(OpFault::Fails)
                    }));
                }
                let shrinking =
                    BackgroundTask::start(&env, async move { shrink(&smaller, scratch, 4000).await });
                if fails {
                    let _outcome = shrinking.result(&env).await;
                    world.borrow_mut().fate = None;
                    let _failed = set.stop().await;
                } else {
                    env.sleep(Duration::from_micros(nth)).await;
                    set.stop().await.expect("it stops");
                    let _outcome = shrinking.result(&env).await;
                }
            });
            let end = Rc::new(Cell::new(0));
            let found_to_be = Rc::clone(&end);
            run(&mut rig, |env| async move {
                let (set, _) = open(env, options()).await.expect("sound");
                let ((scratch, sectors), dirty_sectors) = (found(&set), dirty(&set, found(&set).0));
                found_to_be.set(match (sectors, dirty_sectors) {
                    (8000, 80) => 0,
                    (4000, 80) => 1,
                    (4000, 40) => 2,
                    other => panic!("{nth}: {other:?}"),
                });
                assert_eq!(shrink(&set, scratch, 4000).await, Ok(()));
                assert_eq!(dirty(&set, scratch), 40);
                assert_eq!(set.grow(scratch, 8000, &CancelToken::default()).await, Ok(()));
                let all = bytes(&set, scratch, 0, 8000).await;
                assert_eq!((all[3200], all[4000], all[4800]), (2, 0, 0));
                set.stop().await.expect("it stops");
                set.assert_invariants();
            });
            ends[end.get()] += 1;
        }
        assert!(ends.iter().all(|times| *times > 0), "before, in the middle, and after: {ends:?}");
    }
}
