//! Replaying a long journal at start.

use crate::rig::{Rig, Sizes, ask, bytes, in_flight, open, run, write};
use bcached_engine::{Options, Request, VolumeOptions};
use bcached_env::Env;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 1, bucket: 64, buckets: 8000, backing: 400_000 };
/// Number of sectors that are written, every other one: keys for more than a hundred leaves.
const KEYS: u64 = 80_000;
/// Number of sectors that are written again, all over the volume.
const AGAIN: u64 = 3000;

fn options() -> Options {
    Options {
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        reserve: Some(0),
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

const fn place(number: u64) -> u64 {
    number * 7919 % KEYS
}

/// A replay reads each leaf only a few times. It used to insert the journal's keys one by one in
/// their order. In a set with more leaves than fit into memory, each key then read a leaf, and a
/// start took 18 seconds where two were enough.
#[test]
fn a_replay_reads_each_leaf_a_few_times_however_many_keys_there_are() {
    let mut rig = Rig::new(SIZES, 1);
    let leaves = run(&mut rig, |env: Env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("a new set");
        let before = set.status().buckets_metadata;
        let writer = set.clone();
        in_flight(&env, KEYS, 8, move |number| {
            let set = writer.clone();
            async move {
                ask(&set, volume, write(2 * number, 1, 1)).await;
            }
        })
        .await;
        // All leaves are written; what follows is in the journal alone.
        env.sleep(Duration::from_secs(60)).await;
        ask(&set, volume, Request::Flush).await;
        let writer = set.clone();
        in_flight(&env, AGAIN, 32, move |number| {
            let set = writer.clone();
            async move {
                ask(&set, volume, write(2 * place(number), 1, 2)).await;
            }
        })
        .await;
        ask(&set, volume, Request::Flush).await;
        set.status().buckets_metadata - before
    });
    assert!(leaves > 20, "{leaves} leaves");
    run(&mut rig, move |env| async move {
        let node_budget_bytes = bcached_engine::node_budget_min(SIZES.bucket.into(), 2);
        let (set, volume) =
            open(env, Options { node_budget_bytes, ..options() }).await.expect("it opens again");
        let reads = set.status().stats.node_reads.count;
        assert!(reads < 2 * leaves, "{reads} nodes were read for {AGAIN} keys of {leaves} leaves");
        for number in 0..AGAIN {
            assert_eq!(bytes(&set, volume, 2 * place(number), 1).await, [2], "key {number}");
        }
        set.assert_invariants();
        set.stop().await.expect("it stops");
    });
}
