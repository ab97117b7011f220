//! Handles discards.
//!
//! A discard invalidates what the cache holds and is passed down to the backing device. The hole is
//! durable before the backing device drops its copy. So a crash cannot bring back a cached value
//! that differs from what was read since. A discard is a hint, so only whole blocks inside the
//! range are touched. It writes no data to either device, and its cost depends on what is cached in
//! the range, not on the length of the range.

use crate::error::Error;
use crate::request::without_cache::in_turn;
use crate::request::{SectorRange, Target, holes, write};
use crate::set::CacheSet;
use crate::writeback::contention::beside;

/// Gives up the content of a range.
pub async fn discard(set: &CacheSet, target: &Target, range: SectorRange) -> Result<(), Error> {
    let block = target.block_sectors;
    let start = range.start.next_multiple_of(block);
    let end = range.end.min(target.cacheable_end);
    let inside = SectorRange { start, end: end - end % block };
    if inside.start >= inside.end {
        return Ok(());
    }
    // Discards take their turn in the order of the calls, even if there is nothing to do: once a
    // discard is answered, the client may rely on earlier requests.
    in_turn(set, target, inside, async |target| discard_blocks(set, target, inside).await).await
}

/// Gives up whole blocks, while the caller has its turn in the range.
async fn discard_blocks(set: &CacheSet, target: &Target, range: SectorRange) -> Result<(), Error> {
    if target.inode.is_none() {
        return if passes_down(target) { pass_down(set, target, range).await } else { Ok(()) };
    }
    let survey = write::survey(set, target, range).await?;
    if !passes_down(target) {
        // Write-back in progress must have reached the backing device before any request reads the
        // range there.
        write::wait_for_cleaning(set, target, range).await?;
        return if survey.present { holes::punch_found(set, target, range).await } else { Ok(()) };
    }
    // The hole is durable before the device is told: invariant D25.
    holes::invalidate(set, target, range, survey).await?;
    pass_down(set, target, range).await
}

fn passes_down(target: &Target) -> bool {
    target.backing.as_ref().is_some_and(|disk| disk.info().discard)
}

async fn pass_down(set: &CacheSet, target: &Target, range: SectorRange) -> Result<(), Error> {
    let (disk, begun) = write::begin_backing_write(set, target, range).await?;
    // Whether the device carries it out is up to the device. The discard is answered as done, even
    // if the device was absent.
    let said = beside(set, target, disk.discard(range.start, range.sectors())).await;
    write::end_client_write(set, target, begun, &said).map(drop)
}
