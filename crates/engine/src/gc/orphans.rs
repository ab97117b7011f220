//! Makes void what is dirty of volumes that are no more: those of slots that bcached has given up (format 11).
//!
//! Only of those: a slot that a kernel gave up, or of which the table is in doubt, may be called invalidated by mistake while its
//! volume is alive. What is dirty under such a number is kept, and told ([`crate::status::Status::ownerless_dirty_sectors`]).
//!
//! Their keys pin buckets, and nobody can want them. A slot is given up when its volume was detached, with everything
//! written back; when its backing device was used without the cache since (*stale*, *none*), so that what it holds is the
//! newer; or when it was destroyed. What names the volume is gone from the slot then, and its number is not given to
//! another before nothing of it is left ([`crate::volume::slots`]). Such dirty keys come from crashes and failed sets, whose last
//! words (*this is clean*, *this is void*) reached the memory only, and from destroyed volumes; a kernel keeps them for ever.
//!
//! They become holes, journalled like those of a discard. After a crash in the middle the next start does the rest.

use crate::btree::Record;
use crate::error::Error;
use crate::request::Range;
use crate::request::holes::holes;
use crate::set::CacheSet;
use crate::space::Buckets;
use crate::state::State;
use alloc::vec::Vec;
use bcached_format::{Inode, Key, Position};
use core::time::Duration;

/// How often to look for such volumes, which is cheap, and to try again after an error.
const PAUSE: Duration = Duration::from_secs(30);

/// The task.
pub async fn run(set: CacheSet) {
    set.walk_ends().await;
    while !set.is_ending() {
        for inode in set.with(|s| orphans(s)) {
            let _alone = set.inner.orphans.acquire(1).await;
            // Its number may have become another's.
            if !set.with(|s| s.uuids.is_released(inode)) {
                continue;
            }
            // What cannot be reached is named (a node that cannot be read) or ends everything (a failed write).
            let is_done = |s: &State| s.dirty.of(inode) == 0;
            let _ = make_void(&set, inode, is_done, |buckets, key| key.dirty && !buckets.is_dead(key)).await;
        }
        let until = set.env().now() + PAUSE;
        while set.env().now() < until && !set.is_ending() {
            set.env().wait_until(&set.signals().gc_work, until).await;
        }
    }
}

/// The volumes that are no more and have dirty data.
fn orphans(s: &State) -> Vec<Inode> {
    s.dirty.inodes().filter(|inode| s.uuids.is_released(*inode)).collect()
}

/// Puts holes, in pieces, over those keys of a volume that are `unwanted`, until all have been looked at or it `is_done`. What lies
/// between two of them may become void, too.
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
        let mut found: Option<Range> = None;
        let upto = set
            .attempt(|s| {
                found = None;
                s.keys_in_leaf(inode, at, end, &mut |buckets, key| {
                    if unwanted(buckets, key) {
                        let start = found.map_or(key.start(), |before| before.start);
                        found = Some(Range { start, end: key.end });
                    }
                })
            })
            .await?;
        // Whatever lies between them is as void.
        for hole in found.into_iter().flat_map(|range| holes(inode, range)) {
            if set.with(|s| s.stopping) {
                return Err(Error::Stopping);
            }
            set.put_key(&hole, Record::Journal).await?;
        }
        at = upto;
    }
    Ok(())
}
