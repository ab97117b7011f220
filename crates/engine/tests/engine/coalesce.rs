//! Trees most of whose keys are dead: GC merges their nodes.

use crate::memory::OpFault;
use crate::rig::{CACHE, Rig, Sizes, ask, bytes, in_flight, open, run, write};
use bcached_engine::{CacheSet, Options, Request, Status, VolumeId, VolumeOptions};
use bcached_env::{Buffer, Env, Op};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

/// Sectors of a bucket, and of a node.
const BUCKET: u16 = 16;
/// Number of sectors that are written, every other one: a key each, for some forty leaves.
const KEYS: u64 = 6000;
const BACKING: u64 = 100_000;

/// An eighth of the cache is a fifth of the keys, or a half, depending on `buckets`.
const fn sizes(buckets: u64) -> Sizes {
    Sizes { block: 1, bucket: BUCKET, buckets, backing: BACKING }
}

fn options() -> Options {
    Options {
        leaf_delay: Duration::from_millis(50),
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

fn byte_of(number: u64) -> u8 {
    u8::try_from(number % 251).expect("below 251") + 1
}

/// Grows a tree of many leaves. Returns its status, and the number of metadata buckets before.
async fn grown(env: &Env, set: &CacheSet, volume: VolumeId) -> (Status, u64) {
    let before = set.status().buckets_metadata;
    let writer = set.clone();
    in_flight(env, KEYS, 8, move |number| {
        let set = writer.clone();
        async move {
            ask(&set, volume, write(2 * number, 1, byte_of(number))).await;
        }
    })
    .await;
    let status = set.status();
    assert!(status.buckets_metadata > before + 30, "a tree of many leaves: {status:?}");
    (status, before)
}

/// Waits until GC has done all that is due and is idle.
async fn passes(env: &Env, set: &CacheSet) {
    env.sleep(Duration::from_secs(5)).await;
    let passes = set.status().stats.gc_passes;
    env.sleep(Duration::from_secs(5)).await;
    assert!(passes > 0 && set.status().stats.gc_passes == passes, "{:?}", set.status());
}

/// All but a few keys are discarded. The tree then has as few nodes as it needs and the same
/// content, also after a restart.
#[test]
fn a_tree_whose_keys_are_discarded_has_few_nodes() {
    let is_kept = |number: u64| number.is_multiple_of(100);
    let mut rig = Rig::new(sizes(700), 1);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("a new set");
        let (full, metadata) = grown(&env, &set, volume).await;
        for number in (0..KEYS).step_by(100) {
            let between = Request::Discard { sector: 2 * number + 1, sectors: 199 };
            ask(&set, volume, between).await;
        }
        passes(&env, &set).await;
        let status = set.status();
        let (many, few) = (full.buckets_metadata - metadata, status.buckets_metadata - metadata);
        assert!(few * 4 < many, "{few} nodes more than at first, of {many}");
        assert!(status.stats.btree_coalesces * 2 > many, "{status:?}");
        assert_eq!(status.tree_depth, full.tree_depth, "the tree keeps its height");
        set.assert_invariants();
        set.stop().await.expect("it stops");
    });
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("it opens again");
        let status = set.status();
        assert_eq!(status.dirty_sectors, KEYS / 100, "what is left, and nothing of what is not");
        for number in 0..KEYS {
            let wanted = if is_kept(number) { byte_of(number) } else { 0 };
            assert_eq!(bytes(&set, volume, 2 * number, 1).await, [wanted], "sector {}", 2 * number);
        }
        set.assert_invariants();
        set.stop().await.expect("it stops again");
    });
}

/// The whole volume is rewritten in large pieces while clients read it. Of many keys, few are left.
#[test]
fn a_tree_that_is_written_over_has_few_nodes() {
    const PIECE: u64 = 16;
    let mut rig = Rig::new(sizes(1500), 2);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("a new set");
        let (full, metadata) = grown(&env, &set, volume).await;
        let many = full.buckets_metadata - metadata;
        let mut few = many;
        // The time of the last pass is random, and keys that die after it wait for the next one.
        for _ in 0..4 {
            let writer = set.clone();
            in_flight(&env, 2 * KEYS / PIECE, 4, move |number| {
                let set = writer.clone();
                async move {
                    ask(&set, volume, write(number * PIECE, 16, 252)).await;
                    let other = number * 7919 % KEYS;
                    let found = bytes(&set, volume, 2 * other, 1).await;
                    assert!(found == [252] || found == [byte_of(other)], "sector {}: {found:?}", 2 * other);
                }
            })
            .await;
            passes(&env, &set).await;
            few = set.status().buckets_metadata - metadata;
            if few * 3 < many {
                break;
            }
        }
        assert!(few * 3 < many, "{few} nodes more than at first, of {many}");
        for number in 0..2 * KEYS / PIECE {
            assert_eq!(bytes(&set, volume, number * PIECE, 16).await, [252; 16], "piece {number}");
        }
        set.assert_invariants();
        set.stop().await.expect("it stops");
    });
}

/// A leaf that cannot be read only keeps its neighbours from being merged. Each pass used to end at
/// the first such leaf, and the next began before it, so nothing behind it was ever merged.
#[test]
fn a_leaf_that_cannot_be_read_keeps_its_neighbours_as_they_are_and_no_others() {
    let mut rig = Rig::new(sizes(700), 4);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let node_budget_bytes = bcached_engine::node_budget_min(BUCKET.into(), 2);
        let options = Options { node_budget_bytes, ..options() };
        let (set, volume) = open(env.clone(), options.clone()).await.expect("a new set");
        let (full, metadata) = grown(&env, &set, volume).await;
        set.stop().await.expect("it stops");
        // The first leaf is no longer in memory: others have been read since.
        let (set, volume) = open(env.clone(), options).await.expect("it opens again");
        let is_bad = Rc::new(Cell::new(true));
        let (holds, first) = (Rc::clone(&is_bad), Cell::new(None));
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            Op::Read { sector, buffer }
                if disk == CACHE && buffer.len() as u64 == u64::from(BUCKET) * 512 =>
            {
                let bad = first.get().unwrap_or(*sector);
                first.set(Some(bad));
                (bad == *sector && holds.get()).then_some(OpFault::Fails)
            }
            _ => None,
        }));
        let read = set.serve(volume, Request::Read { sector: 0, buffer: Buffer::zeroed(512) }).await;
        assert!(read.result.is_err(), "its leaf is the bad one");
        for number in (KEYS / 10..KEYS).step_by(100) {
            ask(&set, volume, Request::Discard { sector: 2 * number + 1, sectors: 199 }).await;
        }
        env.sleep(Duration::from_secs(20)).await;
        let status = set.status();
        assert_eq!((status.stats.gc_passes, status.unreadable.len()), (0, 1), "no pass has seen all");
        let (many, few) = (full.buckets_metadata - metadata, status.buckets_metadata - metadata);
        assert!(few * 3 < many, "{few} nodes more than at first, of {many}");
        is_bad.set(false);
        env.sleep(Duration::from_secs(600)).await;
        assert!(set.status().stats.gc_passes > 0, "it has been read by then");
        set.assert_invariants();
        set.stop().await.expect("it stops");
    });
}

/// Two sparse leaves are merged, which takes longer than a turn, while keys are written into them.
/// No such key is lost or counted twice.
#[test]
fn what_is_written_into_leaves_that_become_one_is_kept() {
    const LARGE: Sizes = Sizes { block: 1, bucket: 256, buckets: 700, backing: 200_000 };
    const MANY: u64 = 40_000;
    let is_kept = |number: u64| number.is_multiple_of(10);
    let mut rig = Rig::new(LARGE, 5);
    // The task that gathers keys yields after each piece.
    let mut executor = rig.executor().out_of_breath();
    let env = executor.env();
    let script = async move {
        let (set, volume) = open(env.clone(), options()).await.expect("a new set");
        let writer = set.clone();
        in_flight(&env, MANY, 8, move |number| {
            let set = writer.clone();
            async move {
                ask(&set, volume, write(2 * number, 1, byte_of(number))).await;
            }
        })
        .await;
        let (mut written, mut beside) = (BTreeSet::new(), BTreeSet::new());
        for round in 0..4 * MANY / 10 {
            // In the order of their addresses. After the last one only the writes continue.
            if round < MANY / 10 {
                ask(&set, volume, Request::Discard { sector: 20 * round + 1, sectors: 19 }).await;
            }
            // Next to the kept sectors, all over the discarded range.
            let number = round * 7919 % (1 + round.min(MANY / 10 - 1)) * 10;
            ask(&set, volume, write(2 * number + 2, 1, 250)).await;
            written.insert(number);
            beside.insert(set.status().stats.btree_coalesces);
        }
        assert!(beside.len() > 3, "leaves become one beside writes: {beside:?}");
        assert_eq!(set.status().dirty_sectors, MANY / 10 + written.len() as u64);
        for number in (0..MANY).filter(|number| is_kept(*number)) {
            assert_eq!(bytes(&set, volume, 2 * number, 1).await, [byte_of(number)], "key {number}");
            let wanted = if written.contains(&number) { 250 } else { 0 };
            assert_eq!(bytes(&set, volume, 2 * number + 2, 1).await, [wanted], "behind key {number}");
        }
        set.assert_invariants();
        set.stop().await.expect("it stops");
    };
    executor.block_on(script).expect("somebody waits for ever");
}
