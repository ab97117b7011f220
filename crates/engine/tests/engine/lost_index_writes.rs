//! A device reports a write to the index as durable and has lost it. The lost index entries are
//! unknown, and what was before them is stale. After an orderly stop, no request is ever answered
//! with stale data.

use crate::memory::World;
use crate::rig::{BACKING, CACHE, Rig, Sizes, ask, open, run, write};
use bcached_engine::{CacheSet, CancelToken, Error, Options, Request, VolumeId, VolumeOptions};
use bcached_env::Buffer;
use bcached_format::{SetMagic, Uuid};

/// Nodes of 4 KiB: a tree soon has three levels.
const SIZES: Sizes = Sizes { block: 1, bucket: 8, buckets: 9000, backing: 200_000 };
const NODE_BYTES: usize = 4096;
const NODE: u64 = NODE_BYTES as u64 / 512;
/// Number of extents, none adjacent to another.
const EXTENTS: u64 = 24_000;
const STEP: u64 = 8;
/// The contents of the backing device and of the cache.
const OLD: u8 = 1;
const NEW: u8 = 2;
/// What a lost write leaves where nothing was before.
const ZEROES: [u8; 512] = [0; 512];

fn options(reserve: u64) -> Options {
    let volume = VolumeOptions { writeback_running: false, ..VolumeOptions::default() };
    Options {
        reserve: Some(reserve),
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        volume,
        ..Options::default()
    }
}

async fn write_all(set: &CacheSet, volume: VolumeId, byte: u8) {
    for number in 0..EXTENTS {
        ask(set, volume, write(STEP * number, 1, byte)).await;
    }
    ask(set, volume, Request::Flush).await;
}

/// A set that was stopped in good order with all of its data dirty.
fn stopped(reserve: u64) -> Rig {
    let mut rig = Rig::new(SIZES, reserve);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options(reserve)).await.expect("a new set");
        write_all(&set, volume, OLD).await;
        set.write_back(volume, &CancelToken::default()).await.expect("the device works");
        write_all(&set, volume, NEW).await;
        set.stop().await.expect("it stops");
    });
    rig
}

/// The first device sectors of the last sets of every `every`-th leaf, and of nearly each parent,
/// unless it is the node's only set.
fn last_sets(world: &World, every: usize) -> Vec<u64> {
    let magic = SetMagic::of(Uuid([1; 16])).bset().to_le_bytes();
    let (mut parents, mut leaves) = (Vec::new(), Vec::new());
    for first in (0..SIZES.buckets).map(|bucket| bucket * NODE) {
        let mut node = [0; NODE_BYTES];
        world.look(CACHE.0 as usize, first, &mut node);
        let is_set = |block: &[u8]| block[8..16] == magic && block[16..24] == node[16..24];
        let last = node.chunks_exact(512).rposition(is_set).filter(|last| *last > 0);
        let header = u64::from_le_bytes(node[32..40].try_into().expect("eight bytes"));
        // A parent's key covers as many sectors as a node has.
        let kind = if header >> 20 & 0xFFFF == NODE { &mut parents } else { &mut leaves };
        kind.extend(last.map(|last| first + last as u64));
    }
    parents.into_iter().step_by(every / 40).chain(leaves.into_iter().step_by(every)).collect()
}

/// Reads all extents; returns how many could not be read.
async fn refused(set: &CacheSet, volume: VolumeId, lost: u64) -> u64 {
    let mut refused = 0;
    for number in 0..EXTENTS {
        let read = Request::Read { sector: STEP * number, buffer: Buffer::zeroed(512) };
        let reply = set.serve(volume, read).await;
        match reply.result {
            Err(Error::Node { .. }) => refused += 1,
            other => {
                other.expect("nothing but a node is damaged");
                let found = reply.buffer.expect("a read gives its memory back").as_slice()[0];
                assert_eq!(found, NEW, "extent {number}, without the set at sector {lost}");
            }
        }
    }
    refused
}

/// Counts what each lost last set led to.
#[derive(Default, Debug)]
struct LossCounts {
    /// Opening the set was refused.
    starts_refused: u64,
    /// A leaf was found damaged.
    leaves: u64,
    /// A parent was found damaged.
    parents: u64,
}

/// Loses the last sets of some nodes, one at a time.
fn some_lost(mut rig: Rig, reserve: u64, every: usize) -> LossCounts {
    let (cache, backing) = {
        let mut world = rig.world.borrow_mut();
        (world.copy(CACHE), world.copy(BACKING))
    };
    let lost = last_sets(&rig.world.borrow(), every);
    let mut met = LossCounts::default();
    for lost in lost {
        {
            let mut world = rig.world.borrow_mut();
            world.restore(CACHE, cache);
            world.restore(BACKING, backing);
            world.place(CACHE.0 as usize, lost, &ZEROES);
        }
        let levels = run(&mut rig, move |env| async move {
            let (set, volume) = match open(env, options(reserve)).await {
                Err(Error::Node { .. }) => return None,
                other => other.expect("nothing but a node is damaged"),
            };
            let refused = refused(&set, volume, lost).await;
            let levels: Vec<u8> = set.status().unreadable.iter().map(|damaged| damaged.level).collect();
            assert_eq!(refused > 0, !levels.is_empty(), "what is damaged is refused, and told");
            Some(levels)
        });
        match levels {
            None => met.starts_refused += 1,
            Some(levels) => {
                met.leaves += u64::from(levels.contains(&0));
                met.parents += u64::from(levels.iter().any(|level| *level > 0));
            }
        }
    }
    met
}

/// Proves invariant D5.
#[test]
fn a_lost_write_to_a_node_is_never_answered_with_what_was_before_it() {
    let met = some_lost(stopped(100), 100, 40);
    assert!(met.leaves > 2 && met.parents > 0, "{met:?}");
}

/// Without a reserve, all nodes are read before anything is served. Too few buckets are known to be
/// free for a set with an unreadable node.
#[test]
fn a_start_that_walks_first_meets_a_lost_write() {
    let met = some_lost(stopped(0), 0, 80);
    assert!(met.starts_refused > 2, "{met:?}");
}
