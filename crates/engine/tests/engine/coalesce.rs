//! Trees whose keys have died: what GC makes of them.

use crate::rig::{Rig, Sizes, ask, bytes, in_flight, open, run, write};
use bcached_engine::{CacheSet, Options, Request, Status, VolumeId, VolumeOptions};
use bcached_env::Env;
use std::time::Duration;

/// Sectors of a bucket, and of a node.
const BUCKET: u16 = 16;
/// Sectors that are written, every other one: a key each, for some forty leaves.
const KEYS: u64 = 6000;
const BACKING: u64 = 100_000;

/// A sixteenth of the cache is a tenth of the keys, or a quarter.
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

/// A tree of many leaves. What it is then, and how many buckets are metadata without it.
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

/// Waits until GC has done what is due, and rests.
async fn passes(env: &Env, set: &CacheSet) {
    env.sleep(Duration::from_secs(5)).await;
    let passes = set.status().stats.gc_passes;
    env.sleep(Duration::from_secs(5)).await;
    assert!(passes > 0 && set.status().stats.gc_passes == passes, "{:?}", set.status());
}

/// All but a few keys are discarded: the tree has as few nodes as it needs, and says the same, also after a start.
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

/// The whole volume is written anew in large pieces, while others read it: of many keys few are left.
#[test]
fn a_tree_that_is_written_over_has_few_nodes() {
    const PIECE: u64 = 16;
    let mut rig = Rig::new(sizes(1500), 2);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("a new set");
        let (full, metadata) = grown(&env, &set, volume).await;
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
        let (many, few) = (full.buckets_metadata - metadata, set.status().buckets_metadata - metadata);
        assert!(few * 3 < many, "{few} nodes more than at first, of {many}");
        for number in 0..2 * KEYS / PIECE {
            assert_eq!(bytes(&set, volume, number * PIECE, 16).await, [252; 16], "piece {number}");
        }
        set.assert_invariants();
        set.stop().await.expect("it stops");
    });
}
