//! What a status reports about the set itself.

use crate::forged_set::stopped;
use crate::rig::{Rig, Sizes, ask, bytes, in_flight, open, run, write};
use bcached_engine::{Options, ReadStats, Request, WriteCause};
use bcached_env::Buffer;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 8, bucket: 64, buckets: 1024, backing: 1 << 18 };

/// Every bucket is in exactly one of the groups, whatever happened to its data.
#[test]
fn the_buckets_are_divided_without_a_rest() {
    run(&mut Rig::new(SIZES, 3), |env| async move {
        let (set, volume) = open(env.clone(), Options::default()).await.expect("a new set opens");
        let asked = set.clone();
        in_flight(&env, 2000, 8, move |number| {
            let set = asked.clone();
            async move {
                let sector = number * 7919 % 30_000 * 8;
                match number % 3 {
                    0 => drop(set.serve(volume, write(sector, 8, 1)).await),
                    1 => {
                        let buffer = Buffer::zeroed(4096);
                        drop(set.serve(volume, Request::Read { sector, buffer }).await);
                    }
                    _ => drop(set.serve(volume, Request::Discard { sector, sectors: 64 }).await),
                }
                let status = set.status();
                let groups = [
                    status.buckets_unused,
                    status.buckets_clean,
                    status.buckets_dirty,
                    status.buckets_open,
                    status.buckets_metadata,
                ];
                assert_eq!(groups.iter().sum::<u64>(), status.buckets, "{groups:?}");
            }
        })
        .await;
        let status = set.status();
        assert!(status.buckets_dirty > 0 && status.buckets_metadata > 0, "{status:?}");
        let written = status.stats.written;
        assert!(
            written.of(WriteCause::Data) >= 667 * 4096 && written.of(WriteCause::Fill) > 0,
            "{written:?}"
        );
        assert_eq!(written.data() + written.metadata(), written.total());
        let ages = set.ages().await;
        assert!(ages.buckets > 0 && ages.quantiles.len() == 31, "{ages:?}");
        assert!(ages.quantiles.is_sorted(), "{ages:?}");
        set.assert_invariants();
    });
}

/// A GC pass and a start find what was written: eight extents of two blocks, far from each other.
#[test]
fn a_pass_of_gc_and_a_start_count_what_is_alive() {
    let mut rig = Rig::new(SIZES, 4);
    let (passed, found) = run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), Options::default()).await.expect("a new set opens");
        let found = set.status().stats.found;
        assert_eq!((found.nodes, found.leaves, found.keys), (1, 1, 0), "a new tree");
        for number in 0..8 {
            ask(&set, volume, write(1000 * 8 * number, 16, 1)).await;
        }
        // An eighth of the cache dies, so a pass is due.
        for number in 0..1024 * 64 / 8 / 128 + 1 {
            ask(&set, volume, write(100_000 + 128 * number, 128, 1)).await;
            ask(&set, volume, Request::Discard { sector: 100_000 + 128 * number, sectors: 128 }).await;
        }
        env.sleep(Duration::from_secs(5)).await;
        let stats = set.status().stats;
        assert_eq!(stats.gc.count, stats.gc_passes);
        assert!(stats.splits.count > 0 || stats.btree_rewrites == 0);
        set.stop().await.expect("stops in order");
        (stats.gc_passes, stats.found)
    });
    assert!(passed > 0, "a pass was due");
    let started = run(&mut rig, |env| async move {
        let (set, _) = open(env, Options::default()).await.expect("opens again");
        set.status().stats.found
    });
    for found in [found, started] {
        assert_eq!((found.keys, found.key_sectors, found.nodes, found.leaves), (8, 128, 1, 1));
        assert_eq!(found.key_bytes, 8 * 24, "two words and a pointer each");
    }
}

/// Volumes without a backing device do not affect the hit rate: as in the kernel, their reads count
/// neither as hits nor as misses.
#[test]
fn reads_of_flash_only_volumes_are_no_hits() {
    let mut stopped = stopped();
    stopped.add_flash_only(4096);
    run(&mut stopped.rig, |env| async move {
        let (set, backed) = open(env, Options::default()).await.expect("sound");
        let flash = set.volumes().iter().find(|info| info.flash_only).expect("in the table").id;
        ask(&set, flash, write(0, 8, 1)).await;
        assert_eq!(bytes(&set, flash, 0, 16).await[7..9], [1, 0], "data, and a hole behind it");
        assert_eq!(set.status().stats.reads, ReadStats::default());
        assert!(set.volumes().iter().all(|info| info.stats.reads == ReadStats::default()));
        bytes(&set, backed, 0, 8).await;
        assert_eq!(set.status().stats.reads, ReadStats { hits: 1, ..ReadStats::default() });
    });
}
