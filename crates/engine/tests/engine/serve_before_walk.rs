//! A set with a reserve is served before its tree has been walked, also after a crash during the
//! walk. No bucket is reused before it has been counted.

use crate::memory::{OpFault, World};
use crate::rig::{BACKING, CACHE, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, CancelToken, Error, ErrorContext, Options, Request, VolumeId, VolumeOptions};
use bcached_env::{DiskId, Env, Op};
use bcached_format::stamp::is_stamped;
use bcached_format::{Gen, Label, SetMagic, Uuid};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

const BUCKET: u64 = 16;
pub const SIZES: Sizes = Sizes { block: 1, bucket: 16, buckets: 2400, backing: 200_000 };
/// Enough for two starts, not for three.
pub const RESERVE: u64 = 100;
/// Number of dirty extents, none adjacent to another: keys for several leaves.
pub const EXTENTS: u64 = 20_000;

pub fn options() -> Options {
    Options {
        reserve: Some(RESERVE),
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

pub fn byte_of(number: u64) -> u8 {
    u8::try_from(number % 251).expect("below 251") + 1
}

/// A set with many leaves and a full reserve, whose process has died.
fn crashed(seed: u64) -> Rig {
    let mut rig = Rig::new(SIZES, seed);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("a new set");
        for number in 0..EXTENTS {
            ask(&set, volume, write(2 * number, 1, byte_of(number))).await;
        }
        ask(&set, volume, Request::Flush).await;
        while set.status().buckets_reserved < RESERVE {
            env.sleep(Duration::from_millis(10)).await;
        }
        // All leaves are written, and a replay affects only the first.
        env.sleep(Duration::from_secs(40)).await;
        ask(&set, volume, write(0, 1, byte_of(0))).await;
        ask(&set, volume, Request::Flush).await;
        assert_eq!(set.status().walked_percent, 100);
    });
    rig
}

/// First sectors of everything that looks like a node.
pub fn nodes(world: &World) -> BTreeSet<u64> {
    let magic = SetMagic::of(Uuid([1; 16])).bset().to_le_bytes();
    let mut sector = [0; 512];
    (0..SIZES.buckets)
        .map(|bucket| bucket * BUCKET)
        .filter(|first| {
            world.look(0, *first, &mut sector);
            sector[16..24] == magic || sector[8..16] == magic
        })
        .collect()
}

/// The buckets that hold a stamp.
fn stamps(world: &World) -> Vec<u64> {
    let magic = SetMagic::of(Uuid([1; 16]));
    let mut sector = [0; 512];
    (0..SIZES.buckets)
        .filter(|bucket| {
            world.look(0, bucket * BUCKET, &mut sector);
            (0..=255).any(|generation| is_stamped(&sector, magic, *bucket, Gen(generation)))
        })
        .collect()
}

/// How nodes can be read after the opening.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum NodeReads {
    /// Slowly.
    Slowly,
    /// Not at all.
    Held,
    /// At full speed.
    Freely,
}

/// Slows down reads of nodes, so that an opening ends long before the walk. The returned cell
/// changes the pace later.
pub fn slow_down(rig: &Rig) -> Rc<Cell<NodeReads>> {
    const POLLS: u32 = 20;
    let (pace, nodes) = (Rc::new(Cell::new(NodeReads::Slowly)), nodes(&rig.world.borrow()));
    let (told, mut polls) = (Rc::clone(&pace), BTreeMap::<u64, u32>::new());
    rig.world.borrow_mut().fate = Some(Box::new(move |disk: DiskId, op: &Op| match op {
        Op::Read { sector, .. } if disk == CACHE && nodes.contains(sector) => {
            let polls = polls.entry(*sector).or_default();
            *polls += 1;
            let waits =
                told.get() == NodeReads::Held || told.get() == NodeReads::Slowly && *polls % POLLS > 0;
            waits.then_some(OpFault::Waits)
        }
        _ => None,
    }));
    pace
}

async fn check(set: &CacheSet, volume: VolumeId) {
    for number in 0..EXTENTS {
        assert_eq!(bytes(set, volume, 2 * number, 1).await, [byte_of(number)], "extent {number}");
    }
}

fn dirty(set: &CacheSet) -> u64 {
    set.status().dirty_sectors
}

#[test]
fn requests_are_served_before_the_tree_has_been_walked() {
    let mut rig = crashed(1);
    let pace = slow_down(&rig);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("it opens");
        assert!(set.status().walked_percent < 60 && set.counted().is_none());
        assert_eq!(bytes(&set, volume, 0, 1).await, [byte_of(0)]);
        ask(&set, volume, write(1, 1, 77)).await;
        ask(&set, volume, write(2, 1, byte_of(1))).await;
        ask(&set, volume, Request::Flush).await;
        assert!(set.status().walked_percent < 60, "they did not wait for it");
        pace.set(NodeReads::Freely);
        set.walked().await.expect("it comes to its end");
        assert_eq!(set.status().walked_percent, 100);
        assert_eq!(dirty(&set), EXTENTS + 1);
        check(&set, volume).await;
        let counted = set.counted().expect("it has been walked");
        assert_eq!(counted.iter().map(|bucket| u64::from(bucket.dirty)).sum::<u64>(), EXTENTS + 1);
        set.assert_invariants();
        set.stop().await.expect("it stops");
    });
}

/// Data that is written during the walk, before or behind it, is counted exactly once.
/// Proves invariant D9.
#[test]
fn what_changes_beside_the_walk_is_counted_once() {
    for seed in 0..8 {
        let mut rig = crashed(10 + seed);
        slow_down(&rig);
        run(&mut rig, move |env| async move {
            let (set, volume) = open(env.clone(), options()).await.expect("it opens");
            let mut changes = 0;
            while set.status().walked_percent < 100 {
                // New data, over old data and beside it, and holes.
                let number = (changes * 7919 + seed * 31) % EXTENTS;
                match changes % 3 {
                    0 => ask(&set, volume, write(2 * number, 1, byte_of(number))).await,
                    1 => ask(&set, volume, write(2 * number, 2, byte_of(number))).await,
                    _ => ask(&set, volume, Request::Discard { sector: 2 * number + 1, sectors: 1 }).await,
                };
                changes += 1;
            }
            assert!(changes > 10, "{changes} changes beside the walk");
            check(&set, volume).await;
            let counted = set.counted().expect("it has been walked");
            set.assert_invariants();
            set.stop().await.expect("it stops");
            // A start that walks first counts the same.
            let (again, volume) =
                open(env.clone(), Options { reserve: Some(0), ..options() }).await.expect("it opens");
            again.walked().await.expect("it is walked");
            check(&again, volume).await;
            let dirty_of = |counted: &[bcached_engine::BucketCount]| -> Vec<(u32, u32)> {
                counted.iter().map(|bucket| (bucket.live, bucket.dirty)).collect()
            };
            assert_eq!(dirty_of(&again.counted().expect("walked")), dirty_of(&counted), "seed {seed}");
        });
    }
}

/// Half of the reserve is kept for the next start. When too little is left, the tree is walked
/// first, and the reserve is refilled.
#[test]
fn a_crash_before_the_end_of_the_walk_leaves_a_reserve_for_the_next_start() {
    let mut rig = crashed(2);
    for start in 0..3 {
        let pace = slow_down(&rig);
        if start == 2 {
            pace.set(NodeReads::Freely);
        }
        let walked = run(&mut rig, move |env| async move {
            let (set, volume) = open(env.clone(), options()).await.expect("it opens");
            let walked = set.status().walked_percent;
            assert_eq!(bytes(&set, volume, 0, 1).await, [byte_of(0)]);
            for number in 0..40 {
                ask(&set, volume, write(2 * number, 1, byte_of(number))).await;
            }
            ask(&set, volume, Request::Flush).await;
            if start == 2 {
                check(&set, volume).await;
                while set.status().buckets_reserved < RESERVE {
                    env.sleep(Duration::from_millis(10)).await;
                }
            }
            walked
        });
        assert_eq!(walked == 100, start == 2, "start {start}: {walked} %");
    }
}

/// The buckets have been used, and no chain of priorities records that.
#[test]
fn a_bucket_without_its_stamp_is_not_taken_for_free() {
    // Proves invariant D43.
    let mut rig = crashed(3);
    let stamped = stamps(&rig.world.borrow());
    assert!(stamped.len() as u64 >= RESERVE, "{} stamps", stamped.len());
    for bucket in stamped {
        rig.world.borrow_mut().place(0, bucket * BUCKET, &[9; 512]);
    }
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("it opens");
        assert_eq!(set.status().walked_percent, 100, "there is no proof, so it was walked first");
        check(&set, volume).await;
    });
}

/// No more than the reserve is used; further data goes past the cache, and no bucket of unknown
/// state is taken.
#[test]
fn data_beyond_the_reserve_goes_past_the_cache_until_the_walk_has_ended() {
    // Proves invariant D43.
    let mut rig = crashed(4);
    let pace = slow_down(&rig);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("it opens");
        pace.set(NodeReads::Held);
        let bucket = usize::try_from(BUCKET).expect("small");
        for number in 0..2 * RESERVE {
            // In leaves that have been read.
            ask(&set, volume, write(1 + 2 * (number % 50), 1, 200)).await;
        }
        for _ in 0..2 * RESERVE {
            ask(&set, volume, write(0, bucket, 201)).await;
        }
        assert!(set.status().walked_percent < 100);
        assert_eq!(bytes(&set, volume, 0, bucket).await, vec![201; bucket]);
        pace.set(NodeReads::Freely);
        set.walked().await.expect("it comes to its end");
        assert_eq!(bytes(&set, volume, 0, bucket).await, vec![201; bucket]);
        for number in 50..EXTENTS {
            assert_eq!(bytes(&set, volume, 2 * number, 1).await, [byte_of(number)], "extent {number}");
        }
        set.assert_invariants();
    });
}

/// The amount of dirty data is not yet known: a detach would have reported that none was left, and
/// the superblock that all data is on the device.
#[test]
fn who_must_know_what_is_dirty_waits_for_the_walk() {
    // Proves invariant D43.
    let mut rig = crashed(5);
    let pace = slow_down(&rig);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env: Env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("it opens");
        pace.set(NodeReads::Held);
        let detached: Rc<Cell<Option<Result<(), Error>>>> = Rc::default();
        let (waiting, told) = (set.clone(), Rc::clone(&detached));
        env.spawn(async move {
            told.set(Some(waiting.detach(volume, &CancelToken::default()).await));
        });
        env.sleep(Duration::from_millis(300)).await;
        assert_eq!(detached.take(), None, "it waits");
        pace.set(NodeReads::Freely);
        loop {
            env.sleep(Duration::from_secs(1)).await;
            if let Some(result) = detached.take() {
                assert_eq!(result, Ok(()));
                break;
            }
        }
        for number in 0..EXTENTS {
            let mut sector = [0; 512];
            world.borrow().look(1, crate::rig::DATA_OFFSET + 2 * number, &mut sector);
            assert_eq!(sector[0], byte_of(number), "extent {number} is on {BACKING:?}");
        }
    });
}

/// The walk is stuck at an unreadable leaf. A flush or a detach of any volume used to wait for it
/// forever, and requests bypassed the cache meanwhile.
#[test]
fn who_must_know_what_is_dirty_is_told_of_a_leaf_that_cannot_be_read() {
    let mut rig = crashed(9);
    let pace = slow_down(&rig);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env: Env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("it opens");
        pace.set(NodeReads::Held);
        let (nodes, fails) = (nodes(&world.borrow()), Rc::new(Cell::new(true)));
        let told = Rc::clone(&fails);
        world.borrow_mut().fate = Some(Box::new(move |disk: DiskId, op: &Op| match op {
            Op::Read { sector, .. } if disk == CACHE && nodes.contains(sector) && told.get() => {
                Some(OpFault::Fails)
            }
            _ => None,
        }));
        let is_node =
            |result: &Result<(), Error>| matches!(result, Err(Error::Io { doing: ErrorContext::Node, .. }));
        let cancel = CancelToken::default();
        let flushed = set.write_back(volume, &cancel).await;
        assert!(is_node(&flushed), "{flushed:?}");
        let detached = set.detach(volume, &cancel).await;
        assert!(is_node(&detached), "{detached:?}");
        let made = set.create_flash_only(64, Label::default()).await.map(drop);
        assert!(is_node(&made), "{made:?}");
        assert!(set.status().walked_percent < 100);
        fails.set(false);
        env.sleep(Duration::from_secs(5)).await;
        assert_eq!(set.status().walked_percent, 100, "it can be read again");
        set.detach(volume, &cancel).await.expect("and so it is detached");
    });
}

/// The cache stays in use while a detach waits for the walk, which can take a minute. New data used
/// to bypass it.
#[test]
fn requests_use_the_cache_while_a_detach_waits_for_the_walk() {
    let mut rig = crashed(10);
    let pace = slow_down(&rig);
    run(&mut rig, move |env: Env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("it opens");
        pace.set(NodeReads::Held);
        let (waiting, cancel) = (set.clone(), CancelToken::default());
        let cancelled = cancel.clone();
        env.spawn(async move {
            assert_eq!(waiting.detach(volume, &cancelled).await, Err(Error::Cancelled));
        });
        env.sleep(Duration::from_millis(300)).await;
        let before = set.status().stats.written.of(bcached_engine::WriteCause::Data);
        // In a leaf that has been read.
        ask(&set, volume, write(1, 1, 9)).await;
        assert!(
            set.status().stats.written.of(bcached_engine::WriteCause::Data) > before,
            "it went past the cache"
        );
        set.cancel(&cancel);
        pace.set(NodeReads::Freely);
        set.walked().await.expect("it comes to its end");
    });
}

/// An orderly stop does not wait for the walk, and leaves everything as it was.
#[test]
fn a_stop_ends_the_walk() {
    let mut rig = crashed(6);
    let pace = slow_down(&rig);
    run(&mut rig, move |env| async move {
        let (set, _) = open(env.clone(), options()).await.expect("it opens");
        pace.set(NodeReads::Held);
        let stopped: Rc<Cell<bool>> = Rc::default();
        let (stopping, told) = (set.clone(), Rc::clone(&stopped));
        env.spawn(async move {
            stopping.stop().await.expect("it stops");
            told.set(true);
        });
        env.sleep(Duration::from_millis(300)).await;
        // The stop waits for a node that is being read, as for everything in flight.
        pace.set(NodeReads::Freely);
        env.sleep(Duration::from_secs(1)).await;
        assert!(stopped.get());
        assert!(set.status().walked_percent < 100, "it was not walked to its end for that");
    });
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("it opens again");
        check(&set, volume).await;
    });
}

/// A permanently unreadable leaf keeps the walk from ending. Writers that needed a bucket used to
/// wait for that forever, and a stop waited for them.
#[test]
fn nobody_waits_for_ever_for_a_walk_that_cannot_end() {
    let mut rig = crashed(7);
    let pace = slow_down(&rig);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), Options { leaf_delay: Duration::from_micros(50), ..options() })
            .await
            .expect("it opens");
        pace.set(NodeReads::Held);
        let nodes = nodes(&world.borrow());
        // Reads in flight complete; nodes that have not been read cannot be.
        world.borrow_mut().fate = Some(Box::new(move |disk: DiskId, op: &Op| match op {
            Op::Read { sector, .. } if disk == CACHE && nodes.contains(sector) => Some(OpFault::Fails),
            _ => None,
        }));
        for number in 0..5_000 {
            let _refused = set.serve(volume, write(number % 500, 1, 9)).await;
        }
        // Now leaves that have been read are rewritten, until no buckets are left for that.
        for number in 0..4_000 {
            if set.failure().is_none() {
                let _refused = set.serve(volume, Request::Discard { sector: 2 * number, sectors: 1 }).await;
                let _refused = set.serve(volume, Request::Flush).await;
            }
        }
        assert!(
            matches!(set.failure(), Some(Error::Io { doing: ErrorContext::Node, .. })),
            "{:?}",
            set.failure()
        );
        assert!(set.status().walked_percent < 100);
        // It completes, whatever it returns.
        let _ = set.stop().await;
    });
}

/// The amount of its dirty data was not known yet, so this was not checked.
#[test]
fn a_device_that_ends_before_its_dirty_data_is_refused_before_the_walk_too() {
    let mut rig = crashed(8);
    slow_down(&rig);
    rig.world.borrow_mut().resize(1, 2 * EXTENTS - 1000);
    run(&mut rig, move |env| async move {
        let opened = open(env, options()).await.map(drop);
        assert!(matches!(opened, Err(Error::TooSmall { .. })), "{opened:?}");
    });
}
