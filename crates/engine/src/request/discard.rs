//! Discard.
//!
//! A discard makes void what the cache holds and is passed down; the hole is durable before the backing device drops
//! its copy, so that a crash cannot bring back a cached value that differs from what was read since. Only whole
//! blocks inside the range are touched: a discard is a hint. No data is written for it to either device, and what it costs
//! depends on what is cached there, not on how long it is.

use crate::error::Error;
use crate::request::uncached::in_turn;
use crate::request::{Range, Target, holes, write};
use crate::set::CacheSet;
use crate::writeback::contention::beside;

/// Gives up the content of a range.
pub async fn discard(set: &CacheSet, target: &Target, range: Range) -> Result<(), Error> {
    let block = target.block_sectors;
    let start = range.start.next_multiple_of(block);
    let end = range.end.min(target.cacheable_end);
    let inside = Range { start, end: end - end % block };
    if inside.start >= inside.end {
        return Ok(());
    }
    // In the order of the calls, though there may be nothing to do: whoever is answered may rely on what came before.
    in_turn(set, target, inside, async |target| discard_blocks(set, target, inside).await).await
}

/// Gives up whole blocks in the range of a turn.
async fn discard_blocks(set: &CacheSet, target: &Target, range: Range) -> Result<(), Error> {
    if target.inode.is_none() {
        return if passes_down(target) { pass_down(set, target, range).await } else { Ok(()) };
    }
    let survey = write::survey(set, target, range).await?;
    if !passes_down(target) {
        // What is being written back must have landed before anybody reads the backing device there.
        write::wait_for_cleaning(set, target, range).await?;
        return if survey.present { holes::punch_found(set, target, range).await } else { Ok(()) };
    }
    holes::invalidate(set, target, range, survey).await?;
    pass_down(set, target, range).await
}

fn passes_down(target: &Target) -> bool {
    target.backing.as_ref().is_some_and(|disk| disk.info().discard)
}

async fn pass_down(set: &CacheSet, target: &Target, range: Range) -> Result<(), Error> {
    let (disk, begun) = write::begin_backing_write(set, target, range).await?;
    // Whether it is carried out is the device's business: it is answered as done, also if the device was not there.
    let said = beside(set, target, disk.discard(range.start, range.sectors())).await;
    write::end_client_write(set, target, begun, &said).map(drop)
}
