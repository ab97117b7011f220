//! Handles write-zeroes.
//!
//! Zeroes are not stored as data. They go to the backing device as an operation of their own,
//! bypassing the cache, and what the cache holds of the range is invalidated. A zeroing that may
//! unmap takes no space anywhere: the space below is given up, or was never taken. A zeroing that
//! may not unmap keeps the space below, and its zeroes are data only where the cache holds dirty
//! data.
//!
//! | the cache holds | backing device | then |
//! |---|---|---|
//! | nothing | zeroed | |
//! | clean data | a durable hole first, then zeroed | |
//! | dirty data, may unmap | zeroed and flushed | a durable hole |
//! | dirty data, may not | | zeroes like any data, dirty |
//! | all data (flash-only volume) | | a hole |
//!
//! So after a crash a sector is what it was or zero, and never what the backing device had below
//! flushed dirty data.
//!
//! A device that refuses to unmap is asked to zero and keep its space; if it refuses that as well,
//! zeroes are written to it. In any case a long range is zeroed in pieces, each with its own turn,
//! so that other requests of the range proceed in between.

use crate::error::{Error, ErrorContext};
use crate::phases::Phase;
use crate::request::without_cache::in_turn;
use crate::request::{SectorRange, Target, flush, holes, write};
use crate::set::CacheSet;
use crate::volume::backing_flushes::FlushStamp;
use crate::volume::zeroings::ZeroingId;
use crate::writeback::contention::beside;
use bcached_env::{Buffer, DiskInfo, IoErrorKind, Payload};
use core::cell::Cell;

/// Most zeroes written by one operation, in sectors.
const WRITE_SECTORS_MAX: u64 = 2048;

/// Pieces are smaller by this factor where zeroing takes longer: where zeroes are written, or may
/// become dirty data.
const SLOW_SHARE: u64 = 32;

/// The options of a zeroing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ZeroOptions {
    /// The zeroes are durable when this is answered.
    pub fua: bool,
    /// The space below may be given up.
    pub may_unmap: bool,
}

/// How a backing device is zeroed: the first of these that it supports.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum ZeroMethod {
    /// It is told to zero, and may unmap.
    Unmap,
    /// It is told to zero, and keeps the space.
    Keep,
    /// Zeroes are written to it.
    Write,
}

impl ZeroMethod {
    /// Returns the way of a device, no earlier than `from`.
    fn of(info: &DiskInfo, may_unmap: bool, from: Self) -> Self {
        let can = |way: &Self| match way {
            Self::Unmap => may_unmap && info.unmap,
            Self::Keep => info.write_zeroes,
            Self::Write => true,
        };
        [Self::Unmap, Self::Keep].into_iter().find(|way| *way >= from && can(way)).unwrap_or(Self::Write)
    }

    /// Returns the way to try after this one has been refused.
    const fn next(self) -> Self {
        if matches!(self, Self::Unmap) { Self::Keep } else { Self::Write }
    }
}

/// Makes a range read as zeroes, in pieces, each with its own turn. Returns the oldest stamp of
/// what was written to the backing device and is not proven durable.
pub async fn write_zeroes(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    options: ZeroOptions,
) -> Result<Option<FlushStamp>, Error> {
    let number = set.with(|s| {
        let now = s.now;
        s.volumes.get_mut(target.id).map(|volume| volume.zeroings.begin(now, range.sectors()))
    });
    let number = number.ok_or(Error::NoVolume)?;
    let zeroed = zero_pieces(set, target, range, options, number).await;
    set.with(|s| s.volumes.get_mut(target.id).map(|volume| volume.zeroings.end(number)));
    zeroed
}

async fn zero_pieces(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    options: ZeroOptions,
    number: ZeroingId,
) -> Result<Option<FlushStamp>, Error> {
    let mut unproven = None;
    let mut from = ZeroMethod::Unmap;
    let mut at = range.start;
    while at < range.end {
        let info = target.backing.as_ref().map(bcached_env::Disk::info);
        let way = info.map_or(ZeroMethod::Unmap, |info| ZeroMethod::of(&info, options.may_unmap, from));
        let end = range.end.min(cut_after(set, target, at, way != ZeroMethod::Write && options.may_unmap));
        let piece = SectorRange { start: at, end };
        let done = Cell::new(ZeroedPart { upto: at, unproven: None });
        let zero = async |target: &Target| zero_piece(set, target, piece, way, options, &done).await;
        match in_turn(set, target, target.whole_blocks(piece), zero).await {
            // A refusal may be known only now: for files the only test is to try.
            Err(error) if way != ZeroMethod::Write && is_refusal(&error) => from = way.next(),
            zeroed => zeroed?,
        }
        // Whatever is zero by now is not zeroed again, even after a refusal: other requests may
        // write there before the next turn.
        let done = done.get();
        unproven = FlushStamp::older(unproven, done.unproven);
        set.with(|s| {
            s.volumes.get_mut(target.id).map(|volume| volume.zeroings.goes_on(number, done.upto - at))
        });
        at = done.upto;
    }
    Ok(unproven)
}

/// The part of a piece that is zero, from its start on.
#[derive(Clone, Copy)]
struct ZeroedPart {
    /// End of the zeroed part.
    upto: u64,
    /// The oldest stamp of what was written to the backing device and is not proven durable.
    unproven: Option<FlushStamp>,
}

fn is_refusal(error: &Error) -> bool {
    matches!(error, Error::Io { doing: ErrorContext::Backing, source } if source.kind == IoErrorKind::Unsupported)
}

/// Returns where the piece that begins at `at` ends: pieces meet at block boundaries.
fn cut_after(set: &CacheSet, target: &Target, at: u64, is_fast: bool) -> u64 {
    let most = set.with(|s| s.options.zero_batch_sectors);
    let most = if is_fast { most } else { most / SLOW_SHARE };
    let most = most.max(1).next_multiple_of(target.block_sectors);
    (at / most + 1).saturating_mul(most)
}

/// Zeroes a piece in its turn: whole blocks, and the rest at both ends. `done` says how far that
/// got, also after an error.
async fn zero_piece(
    set: &CacheSet,
    target: &Target,
    piece: SectorRange,
    way: ZeroMethod,
    options: ZeroOptions,
    done: &Cell<ZeroedPart>,
) -> Result<(), Error> {
    done.set(ZeroedPart { upto: piece.start, unproven: None });
    if target.blocks_around(piece).is_none() {
        let unproven = zero_below(set, target, piece, way, options.fua).await?;
        done.set(ZeroedPart { upto: piece.end, unproven });
        return Ok(());
    }
    let block = target.block_sectors;
    let start = piece.start.next_multiple_of(block).min(piece.end);
    let end = (piece.end.min(target.cacheable_end) / block * block).max(start);
    for (start, end) in [(piece.start, start), (start, end), (end, piece.end)] {
        if start < end {
            let stamp = zero_part(set, target, SectorRange { start, end }, way, options).await?;
            let unproven = FlushStamp::older(done.get().unproven, stamp);
            done.set(ZeroedPart { upto: end, unproven });
        }
    }
    Ok(())
}

/// Zeroes whole blocks, or a part of one.
async fn zero_part(
    set: &CacheSet,
    target: &Target,
    part: SectorRange,
    way: ZeroMethod,
    options: ZeroOptions,
) -> Result<Option<FlushStamp>, Error> {
    let Some(blocks) = target.blocks_around(part) else {
        return zero_below(set, target, part, way, options.fua).await;
    };
    let survey = write::survey(set, target, blocks).await?;
    let Some(backing) = &target.backing else {
        // Whatever such a volume does not hold reads as zero.
        if survey.present && part == blocks {
            holes::punch_found(set, target, part).await?;
        } else if survey.present {
            return write_as_data(set, target, part, options.fua).await;
        }
        if options.fua {
            crate::journal::writer::commit(set).await?;
        }
        return Ok(None);
    };
    let logical = u64::from(backing.info().logical_block_sectors);
    let is_of_device = part.start.is_multiple_of(logical) && part.end.is_multiple_of(logical);
    // A part of a block is left to the device while the block's only data is there.
    let stays_below = if survey.dirty { options.may_unmap && part == blocks } else { is_of_device };
    if !stays_below {
        return write_as_data(set, target, part, options.fua).await;
    }
    let _phase = set.begin(Phase::Zeroing);
    let put = async || zero_backing(set, target, part, way).await;
    // Zeroes over dirty data are durable before the hole is put: invariant D24.
    match write::give_way(set, target, blocks, survey, put).await? {
        Some(stamp) if options.fua => flush::prove(set, target, stamp).await.map(|()| None),
        unproven => Ok(unproven),
    }
}

/// Zeroes a part in which the cache is not involved.
async fn zero_below(
    set: &CacheSet,
    target: &Target,
    part: SectorRange,
    way: ZeroMethod,
    fua: bool,
) -> Result<Option<FlushStamp>, Error> {
    let stamp = zero_backing(set, target, part, way).await?;
    if fua {
        return flush::prove(set, target, stamp).await.map(|()| None);
    }
    Ok(Some(stamp))
}

/// Zeroes a range of the backing device; returns the oldest stamp of what was written.
async fn zero_backing(
    set: &CacheSet,
    target: &Target,
    part: SectorRange,
    way: ZeroMethod,
) -> Result<FlushStamp, Error> {
    if way == ZeroMethod::Write {
        return write_backing(set, target, part).await;
    }
    let (disk, begun) = write::begin_backing_write(set, target, part).await?;
    let zeroing = disk.zero(part.start, part.sectors(), way == ZeroMethod::Unmap);
    let zeroed = beside(set, target, zeroing).await;
    let stamp = write::end_client_write(set, target, begun, &zeroed);
    zeroed.map_err(Error::io(ErrorContext::Backing))?;
    stamp
}

async fn write_backing(set: &CacheSet, target: &Target, part: SectorRange) -> Result<FlushStamp, Error> {
    let mut oldest = None;
    for (part, zeroes) in zeroes(part) {
        oldest =
            FlushStamp::older(oldest, Some(write::write_backing(set, target, part, zeroes, false).await?));
    }
    Ok(oldest.expect("a part has sectors"))
}

/// Writes zeroes like any data, while the caller has its turn in the range.
async fn write_as_data(
    set: &CacheSet,
    target: &Target,
    part: SectorRange,
    fua: bool,
) -> Result<Option<FlushStamp>, Error> {
    let mut unproven = None;
    for (part, zeroes) in zeroes(part) {
        let written = write::write_anywhere(set, target, part, zeroes, fua).await?;
        unproven = FlushStamp::older(unproven, written);
    }
    Ok(unproven)
}

/// Splits a range into parts that are each written at once, with their zeroes.
fn zeroes(range: SectorRange) -> impl Iterator<Item = (SectorRange, Payload)> {
    let bytes = |sectors: u64| usize::try_from(sectors * 512).expect("a write of zeroes fits in memory");
    let all = Buffer::zeroed(bytes(range.sectors().min(WRITE_SECTORS_MAX))).freeze();
    let mut at = range.start;
    core::iter::from_fn(move || {
        let part = SectorRange { start: at, end: range.end.min(at + WRITE_SECTORS_MAX) };
        at = part.end;
        (part.start < part.end).then(|| (part, all.slice(0..bytes(part.sectors()))))
    })
}
