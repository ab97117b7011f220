//! Makes void what is dirty of volumes that are no more: those of invalidated slots (format 11).
//!
//! Their keys pin buckets, and nobody can want them. A slot is given up when its volume was detached, with everything
//! written back; when its backing device was used without the cache since (*stale*, *none*), so that what it holds is the
//! newer; or when it was destroyed. What names the volume is gone from the slot then, and its number is never given to
//! another. Such dirty keys come from crashes and failed sets, whose last words (*this is clean*, *this is void*) reached
//! the memory only, and from destroyed volumes; a kernel keeps them for ever.
//!
//! They become holes, journalled like those of a discard. After a crash in the middle the next start does the rest.

use crate::btree::Record;
use crate::error::Error;
use crate::request::write::HOLE_SECTORS_MAX;
use crate::set::CacheSet;
use crate::state::State;
use alloc::vec::Vec;
use bcached_format::{Inode, Key, Position};
use core::time::Duration;

/// How often to look for such volumes, which is cheap, and to try again after an error.
const PAUSE: Duration = Duration::from_secs(30);

/// The task.
pub async fn run(set: CacheSet) {
    while !ends(&set) {
        for inode in set.with(|s| orphans(s)) {
            // What cannot be reached is named (a node that cannot be read) or ends everything (a failed write).
            let _ = make_void(&set, inode).await;
        }
        let until = set.env().now() + PAUSE;
        while set.env().now() < until && !ends(&set) {
            set.env().wait_until(&set.signals().gc_work, until).await;
        }
    }
}

fn ends(set: &CacheSet) -> bool {
    set.with(|s| s.stopping || s.failed.is_some())
}

/// The volumes that are no more and have dirty data.
fn orphans(s: &State) -> Vec<Inode> {
    s.dirty.inodes().filter(|inode| s.uuids.is_invalidated(*inode)).collect()
}

async fn make_void(set: &CacheSet, inode: Inode) -> Result<(), Error> {
    let end = Position::MAX.offset;
    let mut at = 0;
    while at < end && set.with(|s| s.dirty.of(inode) > 0 && !s.stopping) {
        let mut found: Option<(u64, u64)> = None;
        let upto = set
            .attempt(|s| {
                found = None;
                s.keys_in_leaf(inode, at, end, &mut |buckets, key| {
                    let is_live = key.pointers.as_slice().iter().any(|pointer| !buckets.is_stale(*pointer));
                    if key.dirty && is_live {
                        found = Some((found.map_or(key.start(), |(start, _)| start), key.end));
                    }
                })
            })
            .await?;
        // Whatever lies between them is as void.
        if let Some((start, end)) = found {
            punch(set, inode, start, end).await?;
        }
        at = upto;
    }
    Ok(())
}

async fn punch(set: &CacheSet, inode: Inode, mut start: u64, end: u64) -> Result<(), Error> {
    while start < end && !ends(set) {
        let upto = end.min(start + HOLE_SECTORS_MAX);
        set.put_key(&Key::hole(inode, start, upto), Record::Journal).await?;
        start = upto;
    }
    Ok(())
}
