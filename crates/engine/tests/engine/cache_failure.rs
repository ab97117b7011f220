//! A volume whose data is all on its backing device keeps working when its cache fails, whatever
//! the first request is. The data that the cache held never comes back.

use crate::memory::{NoNote, OpFault};
use crate::rig::{BACKING, CACHE, Rig, Sizes, ask, bytes, in_flight, open, run, write};
use bcached_engine::{CacheSet, Options, Request, VolumeId, VolumeOptions};
use bcached_env::{Buffer, Op};
use bcached_format::{BackingState, CacheMode};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// Small buckets, so that a tree soon has several leaves.
const SIZES: Sizes = Sizes { block: 1, bucket: 16, buckets: 600, backing: 200_000 };

/// Number of reads, of every other sector, that make a tree of several leaves.
const READS: u64 = 1500;

fn options() -> Options {
    Options {
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

/// The requests that change something, in all their variants.
fn changes() -> Vec<fn() -> Request> {
    vec![
        || Request::Flush,
        || write(64, 8, 3),
        || Request::Discard { sector: 0, sectors: 64 },
        || Request::WriteZeroes { sector: 0, sectors: 64, fua: false, may_unmap: false },
        || Request::WriteZeroes { sector: 0, sectors: 64, fua: true, may_unmap: false },
    ]
}

/// The cache device fails all writes. A file system on a write-through volume keeps working,
/// whatever its first request is. A flush used to fail until some write had noticed the failure,
/// and a discard always failed.
#[test]
fn a_dead_cache_is_no_reason_to_fail_whatever_is_asked_first() {
    for first in changes() {
        let mut rig = Rig::new(SIZES, 1);
        let world = Rc::clone(&rig.world);
        run(&mut rig, move |env| async move {
            let leaf_delay = Duration::from_millis(50);
            let (set, volume) = open(env.clone(), Options { leaf_delay, ..options() }).await.expect("sound");
            set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
            ask(&set, volume, Request::Flush).await;
            bytes(&set, volume, 100, 8).await;
            // The copy enters the tree after the answer.
            env.sleep(Duration::from_millis(10)).await;
            world.borrow_mut().fate = Some(Box::new(|disk, op| {
                (disk == CACHE && matches!(op, Op::Write { .. } | Op::Flush)).then_some(OpFault::Fails)
            }));
            env.sleep(Duration::from_secs(1)).await;
            assert!(set.status().failed.is_some(), "the leaf could not be written");
            for change in [first].into_iter().chain(changes()) {
                ask(&set, volume, change()).await;
            }
        });
    }
}

/// Fills the cache with clean copies, so that the tree has several leaves.
async fn fill(set: &CacheSet, volume: VolumeId) {
    ask(set, volume, Request::Flush).await;
    for n in 0..READS {
        ask(set, volume, Request::Read { sector: 2 * n, buffer: Buffer::zeroed(512) }).await;
    }
}

/// One leaf cannot be read. A write-through volume keeps working without the cache and reports
/// that. The fault is temporary: when the set is reopened, the leaf is readable, and its stale
/// copies must not hide what was written meanwhile.
#[test]
fn an_unreadable_leaf_is_no_reason_to_fail_and_its_copies_never_come_back() {
    // Proves invariant D38.
    for first in changes() {
        let mut rig = Rig::new(SIZES, 1);
        run(&mut rig, |env| async move {
            let (set, volume) = open(env, options()).await.expect("sound");
            set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
            fill(&set, volume).await;
            assert!(set.status().tree_depth > 0, "there are several leaves");
            set.stop().await.expect("it stops");
        });
        let world = Rc::clone(&rig.world);
        run(&mut rig, move |env| async move {
            let (set, volume) = open(env, options()).await.expect("sound");
            world.borrow_mut().fate = Some(Box::new(|disk, op| {
                (disk == CACHE && matches!(op, Op::Read { .. })).then_some(OpFault::Fails)
            }));
            ask(&set, volume, first()).await;
            ask(&set, volume, write(0, 64, 9)).await;
            assert_eq!(bytes(&set, volume, 0, 64).await, [9; 64]);
            world.borrow_mut().fate = None;
            assert_eq!(bytes(&set, volume, 0, 64).await, [9; 64]);
            let info = set.volumes().remove(0);
            assert_eq!((info.attached, info.state), (false, Some(BackingState::Stale)));
            set.stop().await.expect("it stops");
        });
        run(&mut rig, |env| async move {
            let (set, volume) = open(env, options()).await.expect("sound");
            assert_eq!(bytes(&set, volume, 0, 64).await, [9; 64]);
        });
    }
}

/// While a volume leaves the cache because of one leaf, clients write to it in writeback mode where
/// the leaves are sound. If they are first, the volume has dirty data and stays; otherwise it
/// leaves, and they bypass the cache. No acknowledged write may be lost in between.
#[test]
fn nobody_makes_dirty_data_in_a_cache_that_the_volume_is_leaving() {
    // Proves invariant D37.
    let (mut left, mut stayed) = (0, 0);
    for seed in 1..30 {
        let mut rig = Rig::new(SIZES, seed);
        run(&mut rig, |env| async move {
            let (set, volume) = open(env, options()).await.expect("sound");
            fill(&set, volume).await;
            set.stop().await.expect("it stops");
        });
        let world = Rc::clone(&rig.world);
        let acknowledged: Rc<RefCell<BTreeMap<u64, u8>>> = Rc::default();
        let seen = Rc::clone(&acknowledged);
        let is_attached = run(&mut rig, move |env| async move {
            let (set, volume) = open(env.clone(), options()).await.expect("sound");
            // The leaf of the first sectors is in memory; no other can be read from now on.
            bytes(&set, volume, 0, 1).await;
            world.borrow_mut().fate = Some(Box::new(|disk, op| {
                (disk == CACHE && matches!(op, Op::Read { .. })).then_some(OpFault::Fails)
            }));
            let (worker, log) = (set.clone(), Rc::clone(&seen));
            in_flight(&env, 40, 4, move |n| {
                let (set, log) = (worker.clone(), Rc::clone(&log));
                let sector = if n % 16 == seed % 16 { 2 * READS - 100 + n } else { n };
                async move {
                    let byte = u8::try_from(n).expect("few") + 1;
                    if set.serve(volume, write(sector, 1, byte)).await.result.is_ok() {
                        log.borrow_mut().insert(sector, byte);
                    }
                }
            })
            .await;
            world.borrow_mut().fate = None;
            let acknowledged = seen.borrow().clone();
            for (sector, byte) in acknowledged {
                assert_eq!(bytes(&set, volume, sector, 1).await, [byte], "seed {seed}, sector {sector}");
            }
            set.stop().await.expect("it stops");
            set.volumes().remove(0).attached
        });
        *(if is_attached { &mut stayed } else { &mut left }) += 1;
        run(&mut rig, move |env| async move {
            let (set, volume) = open(env, options()).await.expect("sound");
            let acknowledged = acknowledged.borrow().clone();
            for (sector, byte) in acknowledged {
                assert_eq!(bytes(&set, volume, sector, 1).await, [byte], "seed {seed}, sector {sector}");
            }
        });
    }
    assert!(left > 0 && stayed > 0, "left {left}, stayed {stayed}");
}

/// A damaged leaf found while the set is served is reported. It used to be reported nowhere:
/// requests failed, and `status` did not say why.
#[test]
fn a_node_that_cannot_be_read_is_named_until_it_can_be() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        fill(&set, volume).await;
        // Dirty data, so that the volume cannot leave.
        ask(&set, volume, write(2 * READS, 8, 7)).await;
        set.stop().await.expect("it stops");
    });
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        let read = |sector| set.serve(volume, Request::Read { sector, buffer: Buffer::zeroed(512) });
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            (disk == CACHE && matches!(op, Op::Read { .. })).then_some(OpFault::Fails)
        }));
        let sector = READS;
        assert!(read(sector).await.result.is_err() && read(sector).await.result.is_err());
        let status = set.status();
        let [node] = &status.unreadable[..] else { panic!("one leaf: {:?}", status.unreadable) };
        assert_eq!((node.level, node.sector / 16, status.stats.node_read_failures), (0, node.bucket, 2));
        let [covered] = node.covers[..] else { panic!("one volume: {node:?}") };
        assert!(covered.volume == volume && (covered.start..covered.end).contains(&sector), "{covered:?}");
        assert!(covered.end - covered.start < READS, "one leaf of several: {covered:?}");

        // The ranges reported for its neighbours match its own. (The last leaf is in memory.)
        for neighbour in [covered.start - 1, covered.end, 0] {
            assert!(read(neighbour).await.result.is_err());
        }
        let mut all: Vec<_> = set.status().unreadable.iter().flat_map(|node| node.covers.clone()).collect();
        all.sort_by_key(|covered| covered.start);
        let at = all.iter().position(|found| *found == covered).expect("still there");
        assert_eq!((all[at - 1].end, all[at + 1].start), (covered.start, covered.end), "{all:?}");
        assert_eq!(all[0].start, 0, "{all:?}");

        world.borrow_mut().fate = None;
        assert_eq!(read(sector).await.result, Ok(()));
        assert_eq!(set.status().unreadable.len(), all.len() - 1, "the fault was a passing one");
    });
}

/// Write-back had made everything clean, but the cache device failed all writes, so the journal did
/// not record it, and the volume continued without the cache. At the next start the volume has a
/// new inode. Under the old one, all of the data used to be dirty again and kept its buckets
/// forever.
#[test]
fn what_is_dirty_of_a_volume_that_is_no_more_gives_its_buckets_back() {
    // Proves invariant D38.
    const SECTORS: usize = 1600;
    let writes_back = || {
        let writeback_delay = Duration::from_millis(5);
        Options {
            volume: VolumeOptions {
                writeback_running: true,
                writeback_percent: 0,
                writeback_delay,
                ..options().volume
            },
            ..options()
        }
    };
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), writes_back()).await.expect("sound");
        ask(&set, volume, write(0, SECTORS, 1)).await;
        ask(&set, volume, Request::Flush).await;
        let mut is_copied = false;
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            is_copied |= disk == BACKING && matches!(op, Op::Flush);
            let fails = is_copied && disk == CACHE && matches!(op, Op::Write { .. });
            fails.then_some(OpFault::Fails)
        }));
        env.sleep(Duration::from_secs(2)).await;
        ask(&set, volume, write(50_000, 8, 2)).await;
        assert_eq!(set.volumes()[0].state, Some(BackingState::Stale));
    });
    rig.world.borrow_mut().fate = None;
    run(&mut rig, move |env| async move {
        let set = CacheSet::open(env.clone(), CACHE, Box::new(NoNote), writes_back()).await.expect("sound");
        assert_eq!(set.status().dirty_sectors, SECTORS as u64);
        let volume = set.add_backing(BACKING, None).await.expect("sound");
        ask(&set, volume, write(60_000, 8, 3)).await;
        env.sleep(Duration::from_secs(60)).await;
        assert_eq!(set.status().dirty_sectors, set.volumes()[0].dirty_sectors);
    });
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        assert_eq!(set.status().dirty_sectors, set.volumes()[0].dirty_sectors, "it was durable");
        for (sector, byte) in [(0, 1), (SECTORS as u64 - 1, 1), (50_000, 2), (60_000, 3)] {
            assert_eq!(bytes(&set, volume, sector, 1).await, [byte], "sector {sector}");
        }
    });
}
