//! What a crash could bring back: data whose bucket was invalidated in memory only, in a leaf that
//! is being rewritten.

use crate::background_tasks::asking;
use crate::memory::OpFault;
use crate::rig::{CACHE, DATA_OFFSET, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, DataLocation, Options, Request, VolumeId};
use bcached_env::{Env, Op};
use bcached_format::CacheMode;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// A node has 128 blocks of a sector.
const SIZES: Sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 400_000 };
/// The first half of the UUID of the rig's set, which is part of every magic number.
const SET_MAGIC: u64 = 0x0101_0101_0101_0101;
const BSET_MAGIC: u64 = 0x9013_5C78_B99E_07F5 ^ SET_MAGIC;
const PRIO_MAGIC: u64 = 0x6750_E15F_8733_7F91 ^ SET_MAGIC;
/// Byte range in a set of the offset word of its first key.
const FIRST_END: core::ops::Range<usize> = 40..48;
/// Number of sectors with clean data, every other one.
const KEYS: u64 = 6000;
/// The first so many of them are written while the leaf is being rewritten. They are in the bucket
/// that is invalidated first.
const RETURNING: u64 = 100;

/// Which writes to the cache device are stalled, and what has been observed.
#[derive(Default)]
struct StallState {
    /// Stalls writes of priorities, and so of generations: invalidation happens in memory only.
    priorities: Cell<bool>,
    /// Stalls appends to nodes once a fresh node has been written: the update of its parent.
    appends: Cell<bool>,
    fresh: Cell<bool>,
    stands: Cell<bool>,
    given_up: Cell<bool>,
}

impl StallState {
    fn waits(&self, op: &Op) -> bool {
        let Op::Write { sector, payload, .. } = op else { return false };
        let magic =
            payload.as_slice().get(8..16).map(|magic| u64::from_le_bytes(magic.try_into().expect("eight")));
        let begins_bucket = sector.is_multiple_of(u64::from(SIZES.bucket));
        let first_end = || u64::from_le_bytes(payload.as_slice()[FIRST_END].try_into().expect("eight"));
        match magic {
            Some(PRIO_MAGIC) if self.priorities.get() => {
                self.given_up.set(true);
                true
            }
            Some(BSET_MAGIC) if self.appends.get() && begins_bucket => {
                self.fresh.set(self.fresh.get() || first_end() < DATA_OFFSET + 2 * RETURNING);
                false
            }
            Some(BSET_MAGIC) if self.appends.get() && self.fresh.get() => {
                self.stands.set(true);
                true
            }
            _ => false,
        }
    }
}

async fn put(set: &CacheSet, volume: VolumeId, number: u64, byte: u8) {
    ask(set, volume, write(2 * number, 1, byte)).await;
}

/// Creates clean data under a tree of leaves, whose oldest buckets have been invalidated; no stored
/// priorities say so yet.
async fn give_up_the_oldest(env: &Env, held: &StallState) -> (CacheSet, VolumeId) {
    let (set, volume) = open(env.clone(), Options::default()).await.expect("a new set");
    set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
    for number in 0..KEYS {
        put(&set, volume, number, 1).await;
    }
    assert!(set.status().tree_depth > 0, "leaves below a root");
    for bucket in 0..2 * SIZES.buckets {
        held.priorities.set(true);
        ask(&set, volume, write(20_000 + bucket * 128, 128, 1)).await;
        env.sleep(Duration::from_micros(100)).await;
        if held.given_up.take() {
            let first = set.explain(volume, 0).await.expect("it is there");
            if first.whereabouts == DataLocation::NotCached {
                return (set, volume);
            }
            // Other buckets were invalidated.
            held.priorities.set(false);
            env.sleep(Duration::from_millis(1)).await;
        }
    }
    unreachable!("more was written than the cache holds");
}

/// A fresh leaf replaces an old one in memory. Neither the update of its parent nor the generations
/// of buckets with dead keys are on the device yet. Data written past the cache meanwhile must
/// survive, although a crash brings back the old leaf and the keys to its data.
#[test]
fn what_a_crash_brings_back_with_an_old_leaf_is_void() {
    let mut rig = Rig::new(SIZES, 1);
    let held = Rc::new(StallState::default());
    let seen = Rc::clone(&held);
    rig.world.borrow_mut().fate =
        Some(Box::new(move |disk, op| (disk == CACHE && seen.waits(op)).then_some(OpFault::Waits)));
    run(&mut rig, move |env| async move {
        let (set, volume) = give_up_the_oldest(&env, &held).await;
        set.set_cache_mode(volume, CacheMode::Writearound).await.expect("set");
        // Holes fill the leaf until it is rewritten.
        held.appends.set(true);
        let mut number = RETURNING;
        while !held.stands.get() {
            assert!(number < KEYS, "no leaf was rewritten");
            put(&set, volume, number, 2).await;
            number += 1;
        }
        let newer: Vec<_> =
            (0..RETURNING).map(|number| asking(&env, &set, volume, write(2 * number, 1, 3))).collect();
        for newer in newer {
            assert_eq!(newer.result(&env).await, Ok(()), "it waits for nothing that stands still");
        }
        ask(&set, volume, Request::Flush).await;
    });
    rig.world.borrow_mut().fate = None;
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), Options::default()).await.expect("it opens again");
        for number in 0..RETURNING {
            assert_eq!(bytes(&set, volume, 2 * number, 1).await, [3], "sector {} came back", 2 * number);
        }
        set.stop().await.expect("it stops");
        set.assert_invariants();
    });
}
