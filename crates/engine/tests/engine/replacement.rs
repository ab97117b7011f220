//! Which clean data is evicted when more arrives than the cache holds: the replacement policy of
//! the superblock.

use crate::rig::{Rig, Sizes, ask, open, run, write};
use bcached_engine::{Options, Request, Settings};
use bcached_env::Buffer;
use bcached_format::{CacheMode, ReplacementPolicy};

const SIZES: Sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 400_000 };

/// Sectors of a piece: two of them fill a bucket.
const PIECE: usize = 64;

/// Fills the cache, then writes half as much again, while the first piece is read all the time.
/// Returns how many of the pieces are hits at the end, and whether the first is one. `first` is the
/// policy in the superblock until `replacement` was set.
fn left(first: ReplacementPolicy, replacement: ReplacementPolicy) -> (usize, bool) {
    const PIECES: u64 = 1500;
    let mut rig = Rig::with_replacement(SIZES, 1, first);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), Options::default()).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
        set.keep_settings(Settings { discard: None, replacement: Some(replacement) }).await.expect("written");
        assert_eq!(set.status().replacement, replacement);
        let read = |piece: u64| Request::Read { sector: 200 * piece, buffer: Buffer::zeroed(PIECE * 512) };
        let is_hit = async |piece| {
            let hits = || {
                let reads = set.status().stats.reads;
                reads.hits + reads.bypass_hits
            };
            let before = hits();
            ask(&set, volume, read(piece)).await;
            hits() > before
        };
        for piece in 0..PIECES {
            ask(&set, volume, write(200 * piece, PIECE, 1)).await;
            if piece % 50 == 49 {
                // Clean data enters the tree after a flush.
                ask(&set, volume, Request::Flush).await;
                env.sleep(std::time::Duration::from_millis(10)).await;
                // This touches the piece but fills nothing.
                set.set_cache_mode(volume, CacheMode::None).await.expect("set");
                is_hit(0).await;
                set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
            }
        }
        set.set_cache_mode(volume, CacheMode::None).await.expect("nothing is filled any more");
        let first = is_hit(0).await;
        let mut hits = 0;
        for piece in 1..PIECES {
            hits += usize::from(is_hit(piece).await);
        }
        (hits, first)
    })
}

#[test]
fn what_is_read_stays_if_the_last_use_counts() {
    let (hits, first) = left(ReplacementPolicy::Lru, ReplacementPolicy::Lru);
    assert!(first, "it was read all the time");
    assert!(hits > 900, "{hits} pieces are left");
}

#[test]
fn what_came_first_leaves_first_if_the_order_counts() {
    let (hits, first) = left(ReplacementPolicy::Fifo, ReplacementPolicy::Fifo);
    assert!(!first, "it came first, however often it was read");
    assert!(hits > 900, "{hits} pieces are left");
}

#[test]
fn any_may_leave() {
    let (hits, _) = left(ReplacementPolicy::Random, ReplacementPolicy::Random);
    assert!(hits > 900, "{hits} pieces are left");
}

/// A policy that is changed while the set runs is in force from then on.
#[test]
fn a_policy_that_changes_counts_at_once() {
    let (_, first) = left(ReplacementPolicy::Lru, ReplacementPolicy::Fifo);
    assert!(!first, "it came first, however often it was read");
    let (_, first) = left(ReplacementPolicy::Fifo, ReplacementPolicy::Lru);
    assert!(first, "it was read all the time");
}
