//! Puts holes over a range of a volume: they invalidate the keys that the tree has there.

use crate::btree::InsertKind;
use crate::error::Error;
use crate::journal::writer;
use crate::request::write::RangeState;
use crate::request::{SectorRange, Target};
use crate::set::CacheSet;
use alloc::vec::Vec;
use bcached_format::{Inode, Key};

/// Longest hole put into the tree at once, in sectors (the kernel's limit).
const HOLE_SECTORS_MAX: u64 = 32768;

/// Durably invalidates what the tree says of a range. Nothing is written if the range has no keys
/// and earlier holes are durable.
pub(crate) async fn invalidate(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    survey: RangeState,
) -> Result<(), Error> {
    if survey.present {
        punch_found(set, target, range).await?;
    }
    // The backing device changes only after the holes are durable: invariant D22.
    let last_hole = set.with(|s| s.volumes.get(target.id).map_or(0, |volume| volume.last_hole));
    writer::commit_through(set, last_hole).await
}

/// Durably invalidates clean data in a range that also has dirty data. After a crash in a later
/// step, no old clean copy may hide newer data on the backing device. Stale keys are invalidated
/// too: their buckets have been reclaimed, but until that is durable a crash revives the keys.
pub(super) async fn invalidate_clean(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
) -> Result<(), Error> {
    let inode = target.inode.expect("only attached volumes have keys");
    let mut copies: Vec<SectorRange> = Vec::new();
    let mut at = range.start;
    while at < range.end {
        at = set
            .attempt(|s| {
                s.keys_in_leaf(inode, at, range.end, &mut |buckets, key| {
                    if buckets.could_return(key) && (!key.dirty || buckets.is_dead(key)) {
                        copies.push(SectorRange {
                            start: key.start().max(range.start),
                            end: key.end.min(range.end),
                        });
                    }
                })
            })
            .await?;
    }
    for copy in copies {
        punch(set, target, copy).await?;
    }
    // This covers the keys of the dirty data, too (invariant D23): until they are durable, an old
    // clean copy may be on the device in their place (invariant D22).
    writer::commit(set).await
}

/// Puts holes over a range: journalled, without waiting for the journal.
pub(crate) async fn punch(set: &CacheSet, target: &Target, range: SectorRange) -> Result<(), Error> {
    let inode = target.inode.expect("only attached volumes have keys");
    for hole in holes(inode, range) {
        let punched = set.put_key(&hole, InsertKind::Journal).await;
        // This holds even after an error: some leaves may have received their hole.
        set.with(|s| {
            let sequence = s.journal.appended();
            if let Some(volume) = s.volumes.get_mut(target.id) {
                volume.last_hole = volume.last_hole.max(sequence);
            }
        });
        punched?;
    }
    Ok(())
}

/// Puts holes over the keys in a range. The cost depends on how many there are, not on the length
/// of the range.
pub(crate) async fn punch_found(set: &CacheSet, target: &Target, range: SectorRange) -> Result<(), Error> {
    let inode = target.inode.expect("only attached volumes have keys");
    let mut found: Vec<SectorRange> = Vec::new();
    let mut at = range.start;
    while at < range.end {
        found.clear();
        at = set
            .attempt(|s| {
                s.keys_in_leaf(inode, at, range.end, &mut |buckets, key| {
                    let (start, end) = (key.start().max(range.start), key.end.min(range.end));
                    match found.last_mut() {
                        _ if !buckets.could_return(key) => {}
                        // One hole covers both.
                        Some(last) if end - last.start <= HOLE_SECTORS_MAX => last.end = last.end.max(end),
                        _ => found.push(SectorRange { start, end }),
                    }
                })
            })
            .await?;
        for part in &found {
            punch(set, target, *part).await?;
        }
    }
    Ok(())
}

/// Returns the hole keys that invalidate a range of a volume.
pub(crate) fn holes(inode: Inode, range: SectorRange) -> impl Iterator<Item = Key> {
    let mut at = range.start;
    core::iter::from_fn(move || {
        let start = at;
        at = range.end.min(start + HOLE_SECTORS_MAX);
        (start < range.end).then(|| Key::hole(inode, start, at))
    })
}
