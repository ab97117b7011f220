//! Invalidates the dirty data of volumes that no longer exist: those whose slots bcached has
//! released.
//!
//! No other slots are touched. A slot that a kernel released, or whose entry in the table is in
//! doubt, may be marked invalidated by mistake while its volume is alive. Dirty data under such a
//! number is kept, and reported ([`crate::status::Status::ownerless_dirty_sectors`]).
//!
//! The keys of a released slot pin buckets and are of no use. A slot is released in three cases:
//!
//! - Its volume was detached, with everything written back.
//! - Its backing device has been used without the cache since (*stale*, *none*), so that its data
//!   is the newer.
//! - Its volume was destroyed.
//!
//! The slot then no longer names the volume, and its number is not reassigned until none of its
//! data is left ([`crate::volume::slots`]). Such dirty keys come from destroyed volumes, and from
//! crashes and failed sets whose last records (*this is clean*, *this is void*) reached only the
//! memory. A kernel keeps them forever.
//!
//! The keys are replaced by holes, journalled like those of a discard. After a crash in the middle
//! the next start does the rest.

use crate::btree::InsertKind;
use crate::error::Error;
use crate::request::SectorRange;
use crate::request::holes::holes;
use crate::set::CacheSet;
use crate::space::Buckets;
use crate::state::State;
use alloc::vec::Vec;
use bcached_format::{Inode, Key, Position};
use core::time::Duration;

/// How often to look for such volumes, which is cheap, and to retry after an error.
const PAUSE: Duration = Duration::from_secs(30);

/// Runs the task.
pub async fn run(set: CacheSet) {
    set.walk_ends().await;
    while !set.is_ending() {
        for inode in set.with(|s| orphans(s)) {
            let _alone = set.inner.orphans.acquire(1).await;
            // Its number may have been reassigned.
            if !set.with(|s| s.uuids.is_released(inode)) {
                continue;
            }
            // Nothing of it may come back (invariant D38). An unreadable node is already reported,
            // and a failed write fails the set.
            let is_done = |s: &State| s.dirty.of(inode) == 0;
            let _ = make_void(&set, inode, is_done, |buckets, key| key.dirty && !buckets.is_dead(key)).await;
        }
        let until = set.env().now() + PAUSE;
        while set.env().now() < until && !set.is_ending() {
            set.env().wait_until(&set.signals().gc_work, until).await;
        }
    }
}

/// Returns the volumes that no longer exist and have dirty data.
fn orphans(s: &State) -> Vec<Inode> {
    s.dirty.inodes().filter(|inode| s.uuids.is_released(*inode)).collect()
}

/// Puts holes, in pieces, over those keys of a volume that are `unwanted`, until all have been
/// visited or `is_done` returns true. What lies between two such keys may be invalidated, too.
pub(crate) async fn make_void(
    set: &CacheSet,
    inode: Inode,
    is_done: impl Fn(&State) -> bool,
    unwanted: impl Fn(&Buckets, &Key) -> bool,
) -> Result<(), Error> {
    let end = Position::MAX.offset;
    let mut at = 0;
    while at < end && !set.with(|s| is_done(s)) {
        if set.with(|s| s.stopping) {
            return Err(Error::Stopping);
        }
        let mut found: Option<SectorRange> = None;
        let upto = set
            .attempt(|s| {
                found = None;
                s.keys_in_leaf(inode, at, end, &mut |buckets, key| {
                    if unwanted(buckets, key) {
                        let start = found.map_or(key.start(), |before| before.start);
                        found = Some(SectorRange { start, end: key.end });
                    }
                })
            })
            .await?;
        // Anything between them may be invalidated as well.
        for hole in found.into_iter().flat_map(|range| holes(inode, range)) {
            if set.with(|s| s.stopping) {
                return Err(Error::Stopping);
            }
            set.put_key(&hole, InsertKind::Journal).await?;
        }
        at = upto;
    }
    Ok(())
}
