//! How long the engine runs without yielding: no request is kept waiting.

use crate::memory::LONGEST_NS;
use crate::rig::{Rig, Sizes, ask, in_flight, open, run, write};
use bcached_engine::{Options, Request, VolumeOptions};
use bcached_env::Buffer;
use bcached_format::CacheMode;
use std::time::Duration;

#[test]
fn no_transition_takes_longer_than_200_us() {
    // Leaves of 256 KiB, the typical ones.
    assert_short(2048, 30_000);
}

/// Buckets of 4 MiB have leaves of 1 MiB, with four times the keys.
#[test]
fn nor_with_the_largest_nodes() {
    assert_short(8192, 120_000);
}

/// Fills leaves by `blocks` scattered writes, splits them, writes them, reads them again, and
/// empties them by one discard. In virtual CPU time, no step takes longer than the limit.
fn assert_short(bucket: u16, blocks: u64) {
    let sizes = Sizes { block: 8, bucket, buckets: 600, backing: 16 * blocks + 64 };
    let options = || Options {
        leaf_delay: Duration::from_millis(20),
        cutoff_writeback: 101,
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    };
    let mut rig = Rig::new(sizes, 4);
    for life in 0..3 {
        let mut executor = rig.executor();
        let env = executor.env();
        let done = executor.block_on(async move {
            let (set, volume) = open(env.clone(), options()).await.expect("a sound set");
            let worker = set.clone();
            in_flight(&env, blocks, 64, move |number| {
                let set = worker.clone();
                // Every other block, so that keys stay apart, in an order that jumps.
                let sector = 16 * (number * 7_919 % blocks);
                async move {
                    if life == 0 {
                        let payload = Buffer::copied_from(&[7; 4096]).freeze();
                        ask(&set, volume, Request::Write { sector, payload, fua: false }).await;
                    } else if number % 100 == 0 {
                        ask(&set, volume, Request::Read { sector, buffer: Buffer::zeroed(4096) }).await;
                    }
                }
            })
            .await;
            if life == 0 {
                assert!(set.status().stats.btree_rewrites >= 2, "leaves were divided");
            }
            if life == 2 {
                ask(&set, volume, Request::Discard { sector: 0, sectors: 16 * blocks }).await;
                assert_eq!(set.status().dirty_sectors, 0);
            }
            set.stop().await.expect("it stops");
        });
        assert!(done.is_some(), "somebody waits for ever");
    }
    let longest = rig.world.borrow().longest_ns;
    assert!(longest > 10_000, "work is charged: {longest} ns");
    rig.world.borrow().assert_short();
}

/// A flush of the backing device releases a thousand parked copies at once, each of which enters
/// the tree.
#[test]
fn a_flush_that_sets_many_copies_free_holds_nobody_up() {
    const PIECES: u64 = 1000;
    let mut rig = Rig::new(Sizes { block: 8, bucket: 128, buckets: 600, backing: 16 * PIECES + 64 }, 4);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), Options::default()).await.expect("a sound set");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("it is served");
        for number in 0..PIECES {
            ask(&set, volume, write(16 * number, 8, 1)).await;
        }
        ask(&set, volume, Request::Flush).await;
        env.sleep(Duration::from_secs(1)).await;
    });
    let longest = rig.world.borrow().longest_ns;
    assert!(longest <= LONGEST_NS / 2, "{longest} ns");
}
