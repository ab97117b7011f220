//! Leaves have replaced others, but on the device their parent does not point to them yet. Until it
//! does, only the journal has their contents, and it keeps them however many entries follow.

use crate::forged_set::{geometry, newest_entry};
use crate::memory::{OpFault, World};
use crate::rig::{CACHE, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, Options, Request, VolumeId, VolumeOptions};
use bcached_env::{Buffer, Env, Op};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// A node has 16 blocks of a sector.
const SIZES: Sizes = Sizes { block: 1, bucket: 16, buckets: 4000, backing: 100_000 };
const BUCKET: u64 = SIZES.bucket as u64;
/// Number of sectors that are written, every other one: keys for some thirty leaves.
const KEYS: u64 = 4000;
/// The first of the sectors that grow one leaf; they lie behind all others.
const GROWTH: u64 = 60_000;
/// The first of the sectors that only the journal knows.
const LATE: u64 = GROWTH + 1;
const LATE_KEYS: u64 = 8;
/// More entries than the journal has room for.
const ENTRIES: u64 = 3000;

fn options() -> Options {
    Options {
        leaf_delay: Duration::from_millis(20),
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

/// The first sector of the root, according to the newest journal entry.
fn root(world: &World) -> u64 {
    let (header, _) = newest_entry(world, &geometry(world));
    header.root.pointers.as_slice()[0].sector()
}

async fn write_durably(set: &CacheSet, volume: VolumeId, sector: u64, byte: u8) {
    ask(set, volume, write(sector, 1, byte)).await;
    ask(set, volume, Request::Flush).await;
}

/// Grows a tree of leaves, all of them written, below a root that points to them durably.
async fn grown(env: &Env) -> (CacheSet, VolumeId) {
    let (set, volume) = open(env.clone(), options()).await.expect("a new set");
    for number in 0..KEYS {
        ask(&set, volume, write(2 * number, 1, 1)).await;
    }
    env.sleep(Duration::from_secs(2)).await;
    write_durably(&set, volume, 0, 1).await;
    assert_eq!(set.status().tree_depth, 1, "leaves below a root");
    env.sleep(Duration::from_secs(2)).await;
    (set, volume)
}

/// Why the leaf is rewritten.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Growth {
    /// By keys that the journal has as well. The last of them exist nowhere else but in nodes that
    /// nothing points to.
    ByWrites,
    /// By clean copies of data that was read, which the journal does not have. The replaced leaf
    /// keeps nothing in the journal; only keys that arrive later do.
    ByFills,
}

/// Grows a leaf until its parent is being written, which stalls. Returns the number of keys that it
/// took.
async fn grow(set: &CacheSet, volume: VolumeId, (env, stands): (&Env, &Cell<bool>), grows: Growth) -> u64 {
    for number in 0..1000 {
        let sector = GROWTH + 2 * number;
        match grows {
            Growth::ByWrites => ask(set, volume, write(sector, 1, 1)).await,
            Growth::ByFills => ask(set, volume, Request::Read { sector, buffer: Buffer::zeroed(512) }).await,
        };
        env.sleep(Duration::from_micros(200)).await;
        if stands.get() {
            return number + 1;
        }
    }
    unreachable!("the leaf is never full")
}

/// The write of the leaf's parent stalls halfway, and the leaf has keys that only the journal has.
/// Then as many entries for other leaves follow as the journal accepts, and the power fails.
/// Everything that was made durable is there afterwards. Proves invariant D3 and invariant D4.
fn keeps_what_its_parent_does_not_name(grows: Growth) {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    let (grown, late, others) = run(&mut rig, move |env| async move {
        let (set, volume) = self::grown(&env).await;
        let root = root(&world.borrow());
        let stands = Rc::new(Cell::new(false));
        let told = Rc::clone(&stands);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let is_of_root = |sector: u64| (root..root + BUCKET).contains(&sector);
            let waits = disk == CACHE && matches!(op, Op::Write { sector, .. } if is_of_root(*sector));
            told.set(told.get() || waits);
            waits.then_some(OpFault::Waits)
        }));
        let grown = grow(&set, volume, (&env, &stands), grows).await;
        let late = if grows == Growth::ByFills { LATE_KEYS } else { 0 };
        for number in 0..late {
            write_durably(&set, volume, LATE + 2 * number, 2).await;
        }
        ask(&set, volume, Request::Flush).await;
        let others = Rc::new(Cell::new(0));
        let (writer, told) = (set.clone(), Rc::clone(&others));
        env.spawn(async move {
            for number in 0..ENTRIES {
                write_durably(&writer, volume, 2 * (number * 997 % KEYS), 3).await;
                told.set(number + 1);
            }
        });
        let mut before = u64::MAX;
        while others.get() != before {
            before = others.get();
            env.sleep(Duration::from_secs(1)).await;
        }
        assert!(set.failure().is_none(), "{:?}", set.failure());
        (grown, late, before)
    });
    rig.world.borrow_mut().fate = None;
    assert!(others > 50, "{others} entries followed");
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("it opens again");
        for number in (0..grown).filter(|_| grows == Growth::ByWrites) {
            let found = bytes(&set, volume, GROWTH + 2 * number, 1).await;
            assert_eq!(found, [1], "key {number} of {grown}, and {others} entries");
        }
        for number in 0..late {
            assert_eq!(bytes(&set, volume, LATE + 2 * number, 1).await, [2], "late key {number} of {late}");
        }
        for number in 0..others {
            let sector = 2 * (number * 997 % KEYS);
            assert_eq!(bytes(&set, volume, sector, 1).await, [3], "the write of entry {number} of {others}");
        }
        set.assert_invariants();
        set.stop().await.expect("it stops");
    });
}

#[test]
fn a_leaf_that_grew_by_writes_loses_nothing_when_its_parent_is_cut_short() {
    keeps_what_its_parent_does_not_name(Growth::ByWrites);
}

#[test]
fn a_leaf_that_grew_by_fills_loses_nothing_when_its_parent_is_cut_short() {
    keeps_what_its_parent_does_not_name(Growth::ByFills);
}
