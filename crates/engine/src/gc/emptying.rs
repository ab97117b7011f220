//! Empties buckets of their dirty data. Each piece is copied, and its key replaced if it is still
//! the same. This is journalled like a write, so the old bucket is reused only after that entry is
//! durable.
//!
//! The buckets' summaries say where the keys are (`space::summaries`): one lookup in the tree for
//! each extent. Only for buckets without a summary the whole tree is walked. Everything that moves
//! together moves in the order of the volumes, so that neighbours lie side by side afterwards.

use crate::btree::pointer_to_read;
use crate::cache_writes::WriteCause;
use crate::cpu_cost::SORT_MAX;
use crate::error::Error;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::{Allocation, Buckets, DataClass, summaries};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use bcached_env::{Buffer, join_all};
use bcached_format::summary::Extent;
use bcached_format::{BucketId, Key, Position};

/// Keys copied at once, and summaries read at once. There are enough of them that moving waits for
/// the processor and not for the device; otherwise it would fall behind clients whose writes take
/// no longer than its reads.
const DEPTH: usize = 64;

/// Returns what the summaries of `ids` say, in key order, and the buckets without a complete
/// summary.
pub async fn extents_of(set: &CacheSet, ids: &BTreeSet<BucketId>) -> (BTreeSet<Extent>, Vec<BucketId>) {
    let ids: Vec<BucketId> = ids.iter().copied().collect();
    let (mut extents, mut unsummed) = (BTreeSet::new(), Vec::new());
    for some in ids.chunks(DEPTH) {
        for (id, found) in some.iter().zip(summaries::read(set, some).await) {
            // A bucket that would not become empty is left alone: copies of its data would take
            // room and free none.
            let Some(found) = found else {
                unsummed.push(*id);
                continue;
            };
            for piece in found.chunks(SORT_MAX) {
                set.env().breathe().await;
                set.with(|s| s.work.sort(piece.len()));
                extents.extend(piece.iter().copied());
            }
        }
    }
    (extents, unsummed)
}

/// Moves the dirty data that is in `victims` and lies in `extents`; returns how many sectors were
/// moved.
pub async fn by_extents(
    set: &CacheSet,
    victims: &BTreeSet<BucketId>,
    extents: &BTreeSet<Extent>,
) -> Result<u64, Error> {
    let mut moved = 0;
    let mut keys: Vec<Key> = Vec::new();
    let mut readable_from = Position::ZERO;
    // The leaf of the previous extent: most extents are in the same one.
    let mut leaf = None;
    for extent in extents {
        let mut at = extent.start;
        if extent.position() < readable_from {
            continue;
        }
        while at < extent.end() && !set.with(|s| s.stopping) {
            let before = keys.len();
            let looked = set
                .attempt(|s| {
                    keys.truncate(before);
                    s.keys_in_leaf_from(&mut leaf, extent.inode, (at, extent.end()), &mut |buckets, key| {
                        if is_in(buckets, key, victims) && keys.last() != Some(key) {
                            keys.push(*key);
                        }
                    })
                })
                .await;
            at = match looked {
                Ok(upto) => upto,
                Err(error) => {
                    passes_by(set, victims, error)?;
                    let missing = Position { inode: extent.inode, offset: at };
                    readable_from = set.with(|s| s.end_of_missing_node(missing, 0));
                    break;
                }
            };
        }
        if keys.len() >= DEPTH {
            moved += move_keys(set, &keys).await?;
            keys.clear();
        }
        set.env().breathe().await;
    }
    Ok(moved + move_keys(set, &keys).await?)
}

/// Moves the dirty data in `victims`, wherever in the tree its keys are; returns how many sectors
/// were moved.
pub async fn by_walk(set: &CacheSet, victims: &BTreeSet<BucketId>) -> Result<u64, Error> {
    let mut at = Position::ZERO;
    let mut moved = 0;
    loop {
        let mut keys: Vec<Key> = Vec::new();
        let looked = set
            .attempt(|s| {
                keys.clear();
                s.visit_leaf(at, |buckets, run| {
                    keys.extend(run.iter().filter(|key| is_in(buckets, key, victims)));
                })
            })
            .await;
        let (next, is_end) = match looked {
            Ok(visited) => (visited.next, visited.is_end),
            Err(error) => {
                keys.clear();
                passes_by(set, victims, error)?;
                (set.with(|s| s.end_of_missing_node(at, 0)), true)
            }
        };
        moved += move_keys(set, &keys).await?;
        if next == Position::MAX || set.with(|s| s.stopping) {
            return Ok(moved);
        }
        at = next;
        if is_end {
            set.env().yield_now().await;
        }
    }
}

/// Handles a leaf that cannot be read. What it names stays where it is, and it is unknown which of
/// `victims` that concerns. So all of them that do not become empty are left alone for a while.
/// Nothing else waits for it.
fn passes_by(set: &CacheSet, victims: &BTreeSet<BucketId>, error: Error) -> Result<(), Error> {
    if matches!(error, Error::Failed(_)) {
        return Err(error);
    }
    set.with(|s| victims.iter().for_each(|id| s.buckets.set_stuck(*id)));
    Ok(())
}

fn is_in(buckets: &Buckets, key: &Key, victims: &BTreeSet<BucketId>) -> bool {
    let inside =
        |pointer| !buckets.is_stale(pointer) && buckets.of(pointer).is_some_and(|id| victims.contains(&id));
    key.dirty && key.pointers.as_slice().iter().any(|pointer| inside(*pointer))
}

/// Copies the data of `keys`, several at once; returns how many sectors were moved.
async fn move_keys(set: &CacheSet, keys: &[Key]) -> Result<u64, Error> {
    let mut moved = 0;
    for some in keys.chunks(DEPTH) {
        for sectors in join_all(some.iter().map(|key| move_key(set, key))).await {
            moved += sectors?;
        }
    }
    if set.with(|s| s.open.has_closed()) {
        set.signals().summary_work.notify_all();
    }
    Ok(moved)
}

/// Copies one key's data and replaces the key, as far as it is still the same.
async fn move_key(set: &CacheSet, key: &Key) -> Result<u64, Error> {
    // From the check to the end of the copy the old bucket must not be reused.
    let pinned = set.with(|s| {
        let valid = key.pointers.as_slice().iter().all(|pointer| !s.buckets.is_stale(*pointer));
        if valid {
            s.pin(&key.pointers);
        }
        valid
    });
    if !pinned {
        return Ok(0);
    }
    let mut moved = 0;
    let mut at = key.start();
    while at < key.end {
        let of = Position { inode: key.inode, offset: at };
        let Some(space) = set.with(|s| s.take_space(DataClass::Moved, Some(of), key.end - at)) else { break };
        let part = key.cut(at, at + space.sectors).expect("space is not longer than asked for");
        let done = copy(set, &part, space).await;
        set.with(|s| s.unpin(&space.pointers));
        match done {
            Ok(sectors) => moved += sectors,
            Err(error) => {
                set.with(|s| s.unpin(&key.pointers));
                return Err(error);
            }
        }
        at += space.sectors;
    }
    set.with(|s| s.unpin(&key.pointers));
    Ok(moved)
}

async fn copy(set: &CacheSet, part: &Key, space: Allocation) -> Result<u64, Error> {
    let from = pointer_to_read(&part.pointers).expect("a live key has a pointer");
    let length = usize::try_from(part.sectors() * 512).expect("a key is small");
    let (read, buffer) = set.read_cache(from.sector(), Buffer::zeroed(length)).await;
    if read.is_err() {
        // The data stays where it is; a request that needs it gets the error.
        set.with(|s| s.buckets.of(from).into_iter().for_each(|id| s.buckets.set_stuck(id)));
        return Ok(0);
    }
    let payload = buffer.freeze();
    let _phase = set.begin(Phase::Move);
    for pointer in space.pointers.as_slice() {
        if set.write_data(*pointer, payload.clone(), WriteCause::Moved).await.is_err() {
            // The key keeps pointing to where the data is: invariant D1.
            return Ok(0);
        }
    }
    let mut moved = 0;
    let mut rest = Some(*part);
    while let Some(expected) = rest {
        let pointers = space.pointers.advanced(expected.start() - part.start());
        let new = Key { pointers, ..expected };
        let (upto, sectors) = set.attempt(|s| s.replace(&expected, &new)).await?;
        moved += sectors;
        rest = expected.cut(upto, expected.end);
    }
    Ok(moved)
}
