//! One of two devices was replaced by an older copy of itself, such as a restored backup or a
//! rolled-back snapshot. The contents of cache and backing device are then from different times,
//! and the volume is not served from both.

use crate::forged_set::{as_a_kernel_writes_it, geometry};
use crate::memory::NoNote;
use crate::rig::{BACKING, CACHE, Rig, SECOND, Sizes, ask, backing_superblock, bytes, open, run, write};
use crate::serve_before_walk::{self, EXTENTS, RESERVE};
use crate::uuid_table::lose_table;
use bcached_engine::{CacheSet, CancelToken, Error, Options, Request, VolumeId, VolumeOptions};
use bcached_env::{DiskId, Env};
use bcached_format::{BackingState, Inode, Label, SUPERBLOCK_SECTOR};
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 8, bucket: 16, buckets: 4000, backing: 20_000 };

fn options() -> Options {
    Options {
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

async fn added(env: Env) -> Result<(CacheSet, VolumeId), Error> {
    let set = CacheSet::open(env, CACHE, Box::new(NoNote), options()).await.expect("the set opens");
    let volume = set.add_backing(BACKING, None).await;
    match volume {
        Ok(volume) => Ok((set, volume)),
        Err(error) => {
            set.stop().await.expect("it stops");
            Err(error)
        }
    }
}

/// Runs a session that writes `byte`, writes all of it back if `writes_back`, and stops in order.
fn session(rig: &mut Rig, byte: u8, writes_back: bool) {
    run(rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        ask(&set, volume, write(0, 64, byte)).await;
        ask(&set, volume, Request::Flush).await;
        if writes_back {
            set.write_back(volume, &CancelToken::default()).await.expect("it is written back");
        }
        set.stop().await.expect("it stops");
    });
}

fn is_refused(rig: &mut Rig, wanted: fn(&Error) -> bool) {
    run(rig, move |env| async move {
        let error = added(env).await.map(drop).expect_err("they are not of one time");
        assert!(wanted(&error), "{error}");
    });
}

/// Asserts that the devices match and the newest data is there.
fn is_served(rig: &mut Rig) {
    run(rig, |env| async move {
        let (set, volume) = added(env).await.expect("this is the right one");
        assert_eq!(bytes(&set, volume, 0, 64).await, [2; 64]);
        set.stop().await.expect("it stops");
    });
}

fn is_older_cache(error: &Error) -> bool {
    matches!(error, Error::OlderCache { .. })
}

/// The older cache has dirty data, while the backing device is clean and newer. That data used to
/// be written over the newer data.
#[test]
fn a_cache_that_was_restored_from_a_copy_is_refused() {
    for first_is_dirty in [true, false] {
        let mut rig = Rig::new(SIZES, 1);
        session(&mut rig, 1, !first_is_dirty);
        let copy = rig.world.borrow_mut().copy(CACHE);
        session(&mut rig, 2, true);
        rig.world.borrow_mut().restore(CACHE, copy);
        is_refused(&mut rig, is_older_cache);
    }
}

/// The copy was made while the set ran, so its session is the same.
#[test]
fn a_cache_that_was_copied_while_it_ran_is_refused() {
    let mut rig = Rig::new(SIZES, 1);
    session(&mut rig, 1, false);
    let world = std::rc::Rc::clone(&rig.world);
    let copy: DiskId = run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        ask(&set, volume, write(0, 64, 2)).await;
        ask(&set, volume, Request::Flush).await;
        let copy = world.borrow_mut().copy(CACHE);
        ask(&set, volume, write(0, 64, 3)).await;
        ask(&set, volume, Request::Flush).await;
        set.stop().await.expect("it stops");
        copy
    });
    rig.world.borrow_mut().restore(CACHE, copy);
    is_refused(&mut rig, is_older_cache);
}

/// Proves invariant D20.
#[test]
fn a_backing_device_that_was_restored_from_a_copy_is_refused() {
    let mut rig = Rig::new(SIZES, 1);
    session(&mut rig, 1, true);
    let copy = rig.world.borrow_mut().copy(BACKING);
    session(&mut rig, 2, true);
    rig.world.borrow_mut().restore(BACKING, copy);
    is_refused(&mut rig, |error| *error == Error::OlderBacking);
}

/// The disk is imaged after the daemon has stopped, as it should be. The next run is killed, and
/// then the image is restored.
#[test]
fn a_backing_device_that_was_restored_after_a_crash_is_refused() {
    for writes_back in [true, false] {
        let mut rig = Rig::new(SIZES, 1);
        session(&mut rig, 1, true);
        let copy = rig.world.borrow_mut().copy(BACKING);
        run(&mut rig, move |env| async move {
            let (set, volume) = open(env, options()).await.expect("sound");
            ask(&set, volume, write(0, 64, 2)).await;
            ask(&set, volume, Request::Flush).await;
            if writes_back {
                set.write_back(volume, &CancelToken::default()).await.expect("it is written back");
            }
        });
        let newest = rig.world.borrow_mut().copy(BACKING);
        rig.world.borrow_mut().restore(BACKING, copy);
        is_refused(&mut rig, |error| *error == Error::OlderBacking);
        rig.world.borrow_mut().restore(BACKING, newest);
        is_served(&mut rig);
    }
}

/// The disk is imaged while it is served, and restored after an orderly stop.
#[test]
fn a_backing_device_that_was_copied_while_it_was_served_is_refused() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    let copy = run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        let copy = world.borrow_mut().copy(BACKING);
        ask(&set, volume, write(0, 64, 2)).await;
        set.write_back(volume, &CancelToken::default()).await.expect("it is written back");
        set.stop().await.expect("it stops");
        copy
    });
    rig.world.borrow_mut().restore(BACKING, copy);
    is_refused(&mut rig, |error| *error == Error::OlderBacking);
}

/// Both devices have the same stamp. But *dirty* is durable on the disk before any dirty data is,
/// and the copy says *clean*. Sets that are walked before they are served detect this by counting.
/// Others detect it by their journals, whether the journal's keys overlay the tree or are already
/// in it.
#[test]
fn a_disk_that_says_clean_while_the_journal_has_dirty_data_is_refused() {
    const LAST: u64 = 2 * EXTENTS;
    for (reserve, replay_beside) in [(0, 1024), (RESERVE, 1024), (RESERVE, 1)] {
        let options = Options { reserve: Some(reserve), replay_beside, ..serve_before_walk::options() };
        let mut rig = Rig::new(serve_before_walk::SIZES, 1);
        let (world, of_set) = (Rc::clone(&rig.world), options.clone());
        let copy = run(&mut rig, move |env| async move {
            let (set, volume) = open(env.clone(), of_set).await.expect("sound");
            // Several leaves, otherwise there is nothing to walk.
            for number in 0..EXTENTS {
                ask(&set, volume, write(2 * number, 1, 1)).await;
            }
            set.write_back(volume, &CancelToken::default()).await.expect("it is written back");
            while set.status().buckets_reserved < reserve
                || set.volumes()[0].state != Some(BackingState::Clean)
            {
                env.sleep(Duration::from_millis(10)).await;
            }
            env.sleep(Duration::from_secs(40)).await;
            let copy = world.borrow_mut().copy(BACKING);
            // Where the walk arrives last.
            ask(&set, volume, write(LAST, 64, 2)).await;
            ask(&set, volume, Request::Flush).await;
            copy
        });
        let newest = rig.world.borrow_mut().copy(BACKING);
        rig.world.borrow_mut().restore(BACKING, copy);
        let of_set = options.clone();
        run(&mut rig, move |env| async move {
            let set = CacheSet::open(env, CACHE, Box::new(NoNote), of_set).await.expect("the set opens");
            assert_eq!(set.status().walked_percent == 100, reserve == 0, "the way to know it");
            let refused = set.add_backing(BACKING, None).await;
            assert_eq!(refused, Err(Error::OlderBacking), "{reserve} {replay_beside}");
        });
        rig.world.borrow_mut().restore(BACKING, newest);
        run(&mut rig, move |env| async move {
            let (set, volume) = open(env, options).await.expect("this is the right one");
            assert_eq!(bytes(&set, volume, LAST, 64).await, [2; 64]);
            set.stop().await.expect("it stops");
        });
    }
}

/// Neither the journal nor a count reveals an older copy when the disk is added; only the walk
/// does. The copy is left as it is, clients and callers get the error, and nothing is written back
/// to it.
#[test]
fn a_copy_that_only_the_walk_can_tell_has_nothing_written_back() {
    let options = Options { reserve: Some(RESERVE), ..serve_before_walk::options() };
    let mut rig = Rig::with_second(serve_before_walk::SIZES, 1);
    let (world, of_set) = (Rc::clone(&rig.world), options.clone());
    let copy = run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), of_set).await.expect("sound");
        for number in 0..EXTENTS {
            ask(&set, volume, write(2 * number, 1, 1)).await;
        }
        set.write_back(volume, &CancelToken::default()).await.expect("it is written back");
        while set.status().buckets_reserved < RESERVE || set.volumes()[0].state != Some(BackingState::Clean) {
            env.sleep(Duration::from_millis(10)).await;
        }
        let copy = world.borrow_mut().copy(BACKING);
        // Where the walk arrives last.
        ask(&set, volume, write(2 * EXTENTS, 64, 2)).await;
        ask(&set, volume, Request::Flush).await;
        // All leaves are written, and the journal holds nothing of this volume.
        env.sleep(Duration::from_secs(40)).await;
        let other = set.add_backing(SECOND, None).await.expect("sound");
        ask(&set, other, write(0, 8, 3)).await;
        ask(&set, other, Request::Flush).await;
        copy
    });
    rig.world.borrow_mut().restore(BACKING, copy);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let set = CacheSet::open(env.clone(), CACHE, Box::new(NoNote), options).await.expect("the set opens");
        let volume = set.add_backing(BACKING, None).await.expect("nothing tells yet");
        set.walked().await.expect("it is sound");
        set.change_volume_options(volume, |options| options.writeback_running = true).expect("it is there");
        assert_eq!(set.write_back(volume, &CancelToken::default()).await, Err(Error::OlderBacking));
        env.sleep(Duration::from_secs(100)).await;
        let info = set.volumes().into_iter().find(|info| info.id == volume).expect("it is served");
        let trouble = info.writeback_trouble.map(|trouble| trouble.error);
        assert_eq!((trouble, info.state), (Some(Error::OlderBacking), Some(BackingState::Clean)));
        assert_eq!(info.dirty_sectors, 64);
        let mut sector = [0; 512];
        world.borrow().look(1, 16 + 2 * EXTENTS, &mut sector);
        assert_eq!(sector, [0; 512], "nothing was written to it");
        set.stop().await.expect("it stops");
    });
}

/// After an orderly stop, a disk that says *clean* while the tree has dirty data is refused as
/// well, unless a kernel used the set.
#[test]
fn a_kernel_may_leave_a_disk_clean_that_has_dirty_data() {
    // The kernel makes data dirty first and marks the superblock afterwards. If it dies in between,
    // the disk is not an older copy, even if bcached uses the set without the disk in the meantime.
    for (by_kernel, comes_later) in [(false, false), (true, false), (true, true)] {
        let mut rig = Rig::new(SIZES, 1);
        session(&mut rig, 2, false);
        let mut superblock = backing_superblock(&rig);
        superblock.set_state(BackingState::Clean);
        rig.world.borrow_mut().place(1, SUPERBLOCK_SECTOR, &superblock.seal()[..]);
        if !by_kernel {
            is_refused(&mut rig, |error| *error == Error::OlderBacking);
            continue;
        }
        let geometry = geometry(&rig.world.borrow());
        as_a_kernel_writes_it(&mut rig.world.borrow_mut(), &geometry);
        if comes_later {
            run(&mut rig, |env| async move {
                let set =
                    CacheSet::open(env, CACHE, Box::new(NoNote), options()).await.expect("the set opens");
                // bcached rewrites the UUID table, so that it is no longer a kernel's.
                set.create_flash_only(64, Label::default()).await.expect("there is room");
                set.stop().await.expect("it stops");
            });
        }
        run(&mut rig, |env| async move {
            let (set, volume) = added(env).await.expect("this is the right one");
            assert_eq!(bytes(&set, volume, 0, 64).await, [2; 64]);
            let state = set.volumes().iter().find(|info| info.id == volume).and_then(|info| info.state);
            assert_eq!(state, Some(BackingState::Dirty));
            set.stop().await.expect("it stops");
        });
    }
}

/// A lost UUID table has no stamps. But dirty data under the volume's inode means that it is newer
/// than a disk that says *clean*, or belongs to another disk.
#[test]
fn a_clean_disk_does_not_get_a_lost_number_back_under_which_something_is_dirty() {
    let mut rig = Rig::new(SIZES, 1);
    session(&mut rig, 1, true);
    let copy = rig.world.borrow_mut().copy(BACKING);
    session(&mut rig, 2, false);
    let newest = rig.world.borrow_mut().copy(BACKING);
    lose_table(&rig);
    rig.world.borrow_mut().restore(BACKING, copy);
    is_refused(&mut rig, |error| *error == Error::LostNumber { number: Inode(0) });
    rig.world.borrow_mut().restore(BACKING, newest);
    is_served(&mut rig);
}

/// If only the older cache is left, its data of the volume can be given up. Then the backing device
/// has all that there is, and is attached anew.
#[test]
fn what_an_older_cache_holds_can_be_given_up() {
    let mut rig = Rig::new(SIZES, 1);
    session(&mut rig, 1, false);
    let copy = rig.world.borrow_mut().copy(CACHE);
    session(&mut rig, 2, true);
    rig.world.borrow_mut().restore(CACHE, copy);
    is_refused(&mut rig, is_older_cache);
    run(&mut rig, |env| async move {
        let set = CacheSet::open(env, CACHE, Box::new(NoNote), options()).await.expect("the set opens");
        let uuid = set.status().unserved[0].uuid;
        set.walked().await.expect("it is sound");
        let forgetting = set.begin_forgetting(uuid).expect("it is known");
        assert_eq!(forgetting.dirty_sectors, 64);
        set.forget(forgetting).await.expect("it is forgotten");
        let volume = set.add_backing(BACKING, None).await.expect("nothing contradicts it");
        assert_eq!(bytes(&set, volume, 0, 64).await, [2; 64]);
        set.stop().await.expect("it stops");
    });
}
