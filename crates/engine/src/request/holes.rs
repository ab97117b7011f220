//! Holes: what makes void what the tree says of a range of a volume.

use crate::btree::Record;
use crate::error::Error;
use crate::journal::writer;
use crate::request::write::Survey;
use crate::request::{Range, Target};
use crate::set::CacheSet;
use alloc::vec::Vec;
use bcached_format::{Inode, Key};

/// Longest hole put in the tree at once (the kernel's limit).
const HOLE_SECTORS_MAX: u64 = 32768;

/// Makes void what the tree says of a range, durably. Nothing is written if nothing is there and nothing was.
pub(crate) async fn invalidate(
    set: &CacheSet,
    target: &Target,
    range: Range,
    survey: Survey,
) -> Result<(), Error> {
    if survey.present {
        punch_found(set, target, range).await?;
    }
    let last_hole = set.with(|s| s.volumes.get(target.id).map_or(0, |volume| volume.last_hole));
    writer::commit_through(set, last_hole).await
}

/// Makes void, durably, what is cached clean in a range with dirty data: a crash in the middle of what follows must not
/// leave an old clean copy over what is new on the backing device. Stale keys too: their buckets have been given up, and until
/// that is durable a crash brings them back.
pub(super) async fn invalidate_clean(set: &CacheSet, target: &Target, range: Range) -> Result<(), Error> {
    let inode = target.inode.expect("only attached volumes have keys");
    let mut copies: Vec<Range> = Vec::new();
    let mut at = range.start;
    while at < range.end {
        at = set
            .attempt(|s| {
                s.keys_in_leaf(inode, at, range.end, &mut |buckets, key| {
                    if buckets.could_return(key) && (!key.dirty || buckets.is_dead(key)) {
                        copies
                            .push(Range { start: key.start().max(range.start), end: key.end.min(range.end) });
                    }
                })
            })
            .await?;
    }
    for copy in copies {
        punch(set, target, copy).await?;
    }
    // The keys of the dirty data, too: until they are durable an old clean copy may stand on the device in their place.
    writer::commit(set).await
}

/// Puts holes over a range: journalled, not waited for.
pub(crate) async fn punch(set: &CacheSet, target: &Target, range: Range) -> Result<(), Error> {
    let inode = target.inode.expect("only attached volumes have keys");
    for hole in holes(inode, range) {
        let punched = set.put_key(&hole, Record::Journal).await;
        // Whatever came of it: some of its leaves may have their hole.
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

/// The same over what there is in a range: it costs what is there, however long the range is.
pub(crate) async fn punch_found(set: &CacheSet, target: &Target, range: Range) -> Result<(), Error> {
    let inode = target.inode.expect("only attached volumes have keys");
    let mut found: Vec<Range> = Vec::new();
    let mut at = range.start;
    while at < range.end {
        found.clear();
        at = set
            .attempt(|s| {
                s.keys_in_leaf(inode, at, range.end, &mut |buckets, key| {
                    let (start, end) = (key.start().max(range.start), key.end.min(range.end));
                    match found.last_mut() {
                        _ if !buckets.could_return(key) => {}
                        // One hole over both.
                        Some(last) if end - last.start <= HOLE_SECTORS_MAX => last.end = last.end.max(end),
                        _ => found.push(Range { start, end }),
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

/// The keys that make a range of a volume void.
pub(crate) fn holes(inode: Inode, range: Range) -> impl Iterator<Item = Key> {
    let mut at = range.start;
    core::iter::from_fn(move || {
        let start = at;
        at = range.end.min(start + HOLE_SECTORS_MAX);
        (start < range.end).then(|| Key::hole(inode, start, at))
    })
}
