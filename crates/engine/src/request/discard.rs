//! Discard and write-zeroes.
//!
//! A discard makes void what the cache holds and is passed down; the hole is durable before the backing device drops
//! its copy, so that a crash cannot bring back a cached value that differs from what was read since. Only whole
//! blocks inside the range are touched: a discard is a hint.

use crate::error::{Doing, Error};
use crate::latency::Path;
use crate::request::uncached::in_turn;
use crate::request::write::{self, Survey};
use crate::request::{Range, Target, flush};
use crate::set::CacheSet;
use crate::volume::epoch::Stamp;
use crate::writeback::company::beside;
use bcached_env::{Buffer, IoErrorKind};

/// Zeroes written through the cache at once, in sectors.
const ZERO_SECTORS_MAX: u64 = 2048;

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
        return if survey.present { write::punch(set, target, range).await } else { Ok(()) };
    }
    write::invalidate(set, target, range, survey).await?;
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

/// Writes zeroes over a range, in parts, each in its turn. The stamp is the oldest of what went to the backing device and is not
/// proven durable.
pub async fn write_zeroes(
    set: &CacheSet,
    target: &Target,
    range: Range,
    fua: bool,
) -> Result<Option<Stamp>, Error> {
    let block = target.block_sectors;
    let body = Range {
        start: range.start.next_multiple_of(block),
        end: range.end.min(target.cacheable_end) / block * block,
    };
    if target.inode.is_none() || body.start >= body.end {
        return write_zero_payload(set, target, range, fua).await;
    }
    let edges = [Range { start: range.start, end: body.start }, Range { start: body.end, end: range.end }];
    let mut unproven = None;
    for edge in edges.into_iter().filter(|edge| edge.start < edge.end) {
        unproven = Stamp::older(unproven, write_zero_payload(set, target, edge, fua).await?);
    }
    let zeroed = in_turn(set, target, body, async |target| zero_body(set, target, body, fua).await).await?;
    Ok(Stamp::older(unproven, zeroed))
}

/// Writes zeroes over whole blocks in the range of a turn.
async fn zero_body(set: &CacheSet, target: &Target, range: Range, fua: bool) -> Result<Option<Stamp>, Error> {
    if target.inode.is_none() {
        return zero_blocks(set, target, range, fua).await;
    }
    let survey = write::survey(set, target, range).await?;
    let Some(backing) = &target.backing else {
        // What a flash-only volume does not hold reads as zero.
        target.goes(Path::WriteBack);
        write::punch(set, target, range).await?;
        if fua {
            crate::journal::writer::commit(set).await?;
        }
        return Ok(None);
    };
    if survey.dirty || !backing.info().write_zeroes {
        return zero_blocks(set, target, range, fua).await;
    }
    match zero_backing(set, target, range, survey).await {
        Err(Error::Io { source, .. }) if source.kind == IoErrorKind::Unsupported => {
            zero_blocks(set, target, range, fua).await
        }
        Ok(stamp) if fua => flush::prove(set, target, stamp).await.map(|()| None),
        other => other.map(Some),
    }
}

async fn zero_backing(set: &CacheSet, target: &Target, range: Range, survey: Survey) -> Result<Stamp, Error> {
    target.goes(Path::WriteAround);
    write::invalidate(set, target, range, survey).await?;
    let (disk, begun) = write::begin_backing_write(set, target, range).await?;
    let zeroed = beside(set, target, disk.zero(range.start, range.sectors())).await;
    let stamp = write::end_client_write(set, target, begun, &zeroed);
    zeroed.map_err(Error::io(Doing::Backing))?;
    stamp
}

/// Writes zeroes like any data, in the range of a turn.
async fn zero_blocks(
    set: &CacheSet,
    target: &Target,
    range: Range,
    fua: bool,
) -> Result<Option<Stamp>, Error> {
    let zeroes = zeroes(range.sectors().min(ZERO_SECTORS_MAX));
    let mut unproven = None;
    let mut at = range.start;
    while at < range.end {
        let end = range.end.min(at + ZERO_SECTORS_MAX);
        let payload = zeroes.slice(0..usize::try_from((end - at) * 512).expect("bounded"));
        let written = write::write_blocks(set, target, Range { start: at, end }, &payload, fua).await?;
        unproven = Stamp::older(unproven, written);
        at = end;
    }
    Ok(unproven)
}

/// Writes zeroes as ordinary writes, each in its turn.
async fn write_zero_payload(
    set: &CacheSet,
    target: &Target,
    range: Range,
    fua: bool,
) -> Result<Option<Stamp>, Error> {
    let zeroes = zeroes(range.sectors().min(ZERO_SECTORS_MAX));
    let mut unproven = None;
    let mut at = range.start;
    while at < range.end {
        let end = range.end.min(at + ZERO_SECTORS_MAX);
        let payload = zeroes.slice(0..usize::try_from((end - at) * 512).expect("bounded"));
        let part = Range { start: at, end };
        unproven = Stamp::older(unproven, write::write(set, target, part, payload, fua).await?);
        at = end;
    }
    Ok(unproven)
}

fn zeroes(sectors: u64) -> bcached_env::Payload {
    Buffer::zeroed(usize::try_from(sectors * 512).expect("bounded")).freeze()
}
