//! Serves a read from start to end. Cached pieces come from the cache, the rest from the backing
//! device. Missing pieces are then put into the cache, and the caller does not wait for that.

use crate::btree::{Attempt, Content, Piece, pointer_to_read};
use crate::error::{Error, ErrorContext};
use crate::latency::RequestPath;
use crate::request::fill::{self, Fill};
use crate::request::ranges::Claim;
use crate::request::{SectorRange, Target, flush, insert, write};
use crate::set::CacheSet;
use crate::short_list::ShortList;
use crate::space::flushes::RunningFlush;
use crate::state::State;
use crate::volume::backing_flushes::IoToken;
use crate::writeback::contention::beside;
use alloc::boxed::Box;
use alloc::vec::Vec;
use bcached_env::{Buffer, Disk, IoError, IoErrorKind, Time, join_all};
use bcached_format::{Key, Pointer, Pointers};

/// Most sectors of one request that are put into the cache after a miss (the kernel's limit).
pub(super) const FILL_SECTORS_MAX: u64 = 2048;

/// A piece of a read, with the claims entered for it.
#[derive(Clone, Copy)]
pub(super) struct PlannedPiece {
    pub(super) piece: Piece,
    /// The fill of a hole.
    pub(super) fill: Option<Claim>,
    /// The read of a hole from the backing device, unless the fill's claim covers it.
    miss: Option<Claim>,
}

/// Where the data of a read came from, in sectors.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReadSources {
    cache: u64,
    elsewhere: u64,
}

impl ReadSources {
    pub(super) fn of(piece: &Piece) -> Self {
        let sectors = piece.end - piece.start;
        match piece.content {
            Content::Cached { .. } => Self { cache: sectors, elsewhere: 0 },
            Content::Hole => Self { cache: 0, elsewhere: sectors },
        }
    }

    /// Sources of a read that came from the cache alone.
    pub(super) const fn of_cache(sectors: u64) -> Self {
        Self { cache: sectors, elsewhere: 0 }
    }

    const fn add(&mut self, other: Self) {
        self.cache += other.cache;
        self.elsewhere += other.elsewhere;
    }
}

/// Serves a client's read of `range` into `buffer`.
pub async fn read(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    buffer: Buffer,
) -> (Result<(), Error>, Buffer) {
    let (result, buffer) = read_any(set, target, range, buffer).await;
    if let Ok(sources) = result {
        set.with(|s| count(s, target, sources));
    }
    (result.map(drop), buffer)
}

/// Counts a read as hit or miss. A volume without a cache neither hits nor misses, nor does a
/// flash-only one, as in the kernel. The engine's own reads are not counted.
pub(super) fn count(s: &mut State, target: &Target, sources: ReadSources) {
    s.stats.hit_bytes += sources.cache * 512;
    s.stats.miss_bytes += if target.backing.is_some() { sources.elsewhere * 512 } else { 0 };
    let (is_hit, is_bypassed) = (sources.elsewhere == 0, target.bypass.is_some());
    target.goes(match (is_hit, is_bypassed) {
        _ if target.inode.is_none() => RequestPath::ReadUncached,
        (true, false) => RequestPath::ReadHit,
        (false, false) => RequestPath::ReadMiss,
        (true, true) => RequestPath::ReadBypassHit,
        (false, true) => RequestPath::ReadBypassMiss,
    });
    if target.inode.is_some() && target.backing.is_some() {
        let (stats, volume) = s.stats_of(target.id);
        stats.reads.add(is_hit, is_bypassed);
        if let Some(volume) = volume {
            volume.reads.add(is_hit, is_bypassed);
        }
    }
}

/// Reads any range. A request that is not of whole blocks is read as whole blocks and copied out.
async fn read_any(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    mut buffer: Buffer,
) -> (Result<ReadSources, Error>, Buffer) {
    let whole = match target.blocks_around(range) {
        Some(blocks)
            if blocks.start < range.start || blocks.end > range.end && range.end < target.cacheable_end =>
        {
            SectorRange { start: blocks.start.min(range.start), end: blocks.end.max(range.end) }
        }
        _ => return read_whole(set, target, range, buffer).await,
    };
    let scratch = Buffer::zeroed(usize::try_from(whole.sectors() * 512).expect("a request fits in memory"));
    let (result, scratch) = read_whole(set, target, whole, scratch).await;
    let skip = usize::try_from((range.start - whole.start) * 512).expect("less than a block");
    buffer.put(&scratch.as_slice()[skip..skip + buffer.len()]);
    (result, buffer)
}

/// Reads a range whose ends are block boundaries or the ends of the device, or that is not cached
/// at all.
pub(crate) async fn read_whole(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    buffer: Buffer,
) -> (Result<ReadSources, Error>, Buffer) {
    let plan = match plan(set, target, range).await {
        Ok(plan) => plan,
        Err(error) => {
            let instead = Box::pin(read_without_cache(set, target, range, buffer, error));
            let (result, buffer) = instead.await;
            return (result.map(|()| ReadSources { cache: 0, elsewhere: range.sectors() }), buffer);
        }
    };
    match plan.only() {
        Ok(planned) => {
            let sources = ReadSources::of(&planned.piece);
            let (result, buffer) = read_piece(set, target, planned, buffer).await;
            (result.map(|()| sources), buffer)
        }
        Err(plan) => Box::pin(read_pieces(set, target, plan, buffer)).await,
    }
}

/// Reads adjacent pieces, all at once.
async fn read_pieces(
    set: &CacheSet,
    target: &Target,
    plan: ShortList<PlannedPiece>,
    mut buffer: Buffer,
) -> (Result<ReadSources, Error>, Buffer) {
    let mut sources = ReadSources::default();
    let mut pieces = Vec::new();
    for planned in plan {
        sources.add(ReadSources::of(&planned.piece));
        let sectors = planned.piece.end - planned.piece.start;
        let bytes = usize::try_from(sectors * 512).expect("a request fits in memory");
        pieces.push(read_piece(set, target, planned, buffer.split_to(bytes)));
    }
    let mut result = Ok(());
    for (outcome, piece) in join_all(pieces).await {
        if result.is_ok() {
            result = outcome;
        }
        buffer = joined(buffer, piece);
    }
    (result.map(|()| sources), buffer)
}

/// Handles a read when the tree cannot say where the data is. A volume without dirty data has all
/// of it on its backing device; for any other the read fails with `error`.
async fn read_without_cache(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    buffer: Buffer,
    error: Error,
) -> (Result<(), Error>, Buffer) {
    let is_clean = || set.with(|s| target.inode.is_some_and(|inode| s.is_clean(inode)));
    match &target.backing {
        Some(backing) if is_clean() => {
            let (result, buffer) = read_instead(set, target, backing, range.start, buffer).await;
            // If the volume has become dirty meanwhile, the data may be neither the newest nor what
            // the next read returns.
            (if is_clean() { result } else { Err(error) }, buffer)
        }
        _ => (Err(error), buffer),
    }
}

/// Reads from the backing device instead. It has the same data, so a failing cache is no reason to
/// fail (incident F4).
async fn read_instead(
    set: &CacheSet,
    target: &Target,
    backing: &Disk,
    start: u64,
    buffer: Buffer,
) -> (Result<(), Error>, Buffer) {
    set.with(|s| s.stats.read_retries += 1);
    let (result, buffer) = beside(set, target, backing.read(start, buffer)).await;
    (result.map_err(Error::io(ErrorContext::Backing)), buffer)
}

/// Appends a piece to those joined so far. The rest of a split buffer is empty and comes last.
fn joined(mut before: Buffer, piece: Buffer) -> Buffer {
    if before.is_empty() {
        return piece;
    }
    before.join(piece);
    before
}

/// Splits the range into cached pieces, which are pinned, and holes, for which fills are entered
/// where wanted.
async fn plan(set: &CacheSet, target: &Target, range: SectorRange) -> Result<ShortList<PlannedPiece>, Error> {
    let mut plan = ShortList::default();
    let cached_end = if target.inode.is_some() { range.end.min(target.cacheable_end) } else { range.start };
    let mut at = range.start;
    let mut fill_left = FILL_SECTORS_MAX;
    while at < cached_end {
        let rest = SectorRange { start: at, end: cached_end };
        let planned = set.attempt_reading(|s| plan_leaf(s, target, rest, &mut fill_left, &mut plan)).await;
        match planned {
            Ok(upto) => at = upto,
            Err(error) => {
                abandon(set, target, &plan);
                return Err(error);
            }
        }
    }
    if at < range.end {
        let piece = Piece { start: at, end: range.end, content: Content::Hole };
        plan.push(PlannedPiece { piece, fill: None, miss: None });
    }
    Ok(plan)
}

/// Plans what one leaf says; returns how far that reaches.
fn plan_leaf(
    s: &mut State,
    target: &Target,
    range: SectorRange,
    fill_left: &mut u64,
    plan: &mut ShortList<PlannedPiece>,
) -> Attempt<u64> {
    let inode = target.inode.expect("only attached volumes are looked up");
    let mut pieces = ShortList::default();
    let upto = match s.lookup(inode, range.start, range.end, &mut |piece| pieces.push(piece)) {
        Attempt::Done(upto) => upto,
        Attempt::Needs(need) => return Attempt::Needs(need),
    };
    for piece in pieces {
        if matches!(piece.content, Content::Cached { .. }) {
            plan.push(plan_piece(s, target, piece, fill_left));
            continue;
        }
        let volume = s.volumes.get(target.id).expect("a volume stays while it has requests");
        for piece in with_parked(&volume.ranges, piece) {
            plan.push(plan_piece(s, target, piece, fill_left));
        }
    }
    Attempt::Done(upto)
}

/// Pins a cached piece. For a hole, enters its read, and its fill if it may be filled.
pub(super) fn plan_piece(s: &mut State, target: &Target, piece: Piece, fill_left: &mut u64) -> PlannedPiece {
    let (mut fill, mut miss) = (None, None);
    match piece.content {
        Content::Cached { pointers, .. } => s.begin_to_read(&pointers),
        Content::Hole => {
            let has_failed = s.failed.is_some();
            let volume = s.volumes.get_mut(target.id).expect("a volume stays while it has requests");
            let may_fill = !has_failed
                && volume.inode == target.inode
                && !volume.is_bypassed()
                && target.bypass.is_none()
                && target.backing.is_some();
            let end = if may_fill { piece.end.min(piece.start + *fill_left) } else { piece.start };
            if end == piece.end {
                fill = volume.ranges.begin_miss_to_fill(piece.start, end);
            }
            if fill.is_none() {
                miss = target.backing.as_ref().map(|_| volume.ranges.begin_miss(piece.start, piece.end));
                if piece.start < end && end < piece.end {
                    fill = volume.ranges.begin_fill(piece.start, end);
                }
            }
            if fill.is_some() {
                *fill_left -= end - piece.start;
            }
        }
    }
    PlannedPiece { piece, fill, miss }
}

/// Splits a hole at parked pieces: data that is in the cache, but not in the tree yet.
fn with_parked(ranges: &crate::request::ranges::RangeTable, hole: Piece) -> ShortList<Piece> {
    let mut pieces = ShortList::default();
    let mut at = hole.start;
    for (start, parked) in ranges.parked_in(hole.start, hole.end) {
        let (from, to) = (start.max(hole.start), parked.end.min(hole.end));
        if at < from {
            pieces.push(Piece { start: at, end: from, content: Content::Hole });
        }
        let content = Content::Cached { pointers: parked.pointers.advanced(from - start), dirty: false };
        pieces.push(Piece { start: from, end: to, content });
        at = to;
    }
    if at < hole.end {
        pieces.push(Piece { start: at, end: hole.end, content: Content::Hole });
    }
    pieces
}

fn abandon(set: &CacheSet, target: &Target, plan: &ShortList<PlannedPiece>) {
    set.with(|s| {
        for planned in plan.iter() {
            if let Content::Cached { pointers, .. } = planned.piece.content {
                s.unpin(&pointers);
            }
            if let Some(volume) = s.volumes.get_mut(target.id) {
                planned.fill.into_iter().chain(planned.miss).for_each(|claim| volume.ranges.release(claim));
            }
        }
    });
    set.signals().ranges.notify_all();
}

async fn read_piece(
    set: &CacheSet,
    target: &Target,
    planned: PlannedPiece,
    buffer: Buffer,
) -> (Result<(), Error>, Buffer) {
    match planned.piece.content {
        Content::Cached { pointers, dirty } => {
            let range = SectorRange { start: planned.piece.start, end: planned.piece.end };
            read_cached(set, target, CachedPiece::new(range, pointers, dirty), buffer).await
        }
        Content::Hole => read_hole(set, target, planned, buffer).await,
    }
}

/// A cached piece, pinned while it is read.
#[derive(Clone, Copy)]
pub(super) struct CachedPiece {
    range: SectorRange,
    pointers: Pointers,
    dirty: bool,
}

impl CachedPiece {
    pub(super) const fn new(range: SectorRange, pointers: Pointers, dirty: bool) -> Self {
        Self { range, pointers, dirty }
    }

    /// Returns the copy that is read.
    #[inline]
    fn pointer(&self) -> Pointer {
        pointer_to_read(&self.pointers).expect("a cached piece has a pointer")
    }

    /// Returns its length in sectors.
    pub(super) const fn sectors(&self) -> u64 {
        self.range.sectors()
    }

    /// Returns where it is on the cache device.
    pub(super) fn sector(&self) -> u64 {
        self.pointer().sector()
    }
}

/// How a read of a cached piece has ended.
#[derive(Clone, Copy)]
pub(super) enum HitOutcome {
    /// The data is what was written there.
    Valid,
    /// If this running flush fails, the data may already be lost, and the read may have returned
    /// anything. The piece is still pinned.
    BeingFlushed(RunningFlush),
    /// The device has failed, or had failed to keep what was written there, so the data may be
    /// anything.
    Doubtful,
}

impl State {
    /// Pins data that is about to be read.
    pub(super) fn begin_to_read(&mut self, pointers: &Pointers) {
        for pointer in pointers.as_slice() {
            self.buckets.begin(*pointer);
        }
    }

    /// Ends a read of `cached` that began at `begun`. Writes are tracked per bucket, so durable
    /// data also waits for a running flush while its bucket is still being written to.
    pub(super) fn read_ended(
        &mut self,
        cached: &CachedPiece,
        begun: Time,
        result: &Result<(), IoError>,
    ) -> HitOutcome {
        let bytes = usize::try_from(cached.sectors() * 512).expect("a request fits in memory");
        self.cache_has_done(cached.sector(), bytes, result.is_ok());
        self.cache_has_read(self.now.since(begun));
        // The result of a running flush is waited for: invariant D31.
        match self.buckets.being_flushed(cached.pointer()) {
            Some(flush) if result.is_ok() => HitOutcome::BeingFlushed(flush),
            _ => self.let_go(cached, result.is_ok()),
        }
    }

    /// Releases the piece. The pin kept the bucket from being reused while it was read.
    fn let_go(&mut self, cached: &CachedPiece, is_read: bool) -> HitOutcome {
        self.unpin(&cached.pointers);
        self.buckets.age(cached.sectors());
        // What a failed flush may have dropped is not used: invariant D31.
        let is_fine = is_read && !self.buckets.is_suspect(cached.pointer());
        if is_fine { HitOutcome::Valid } else { HitOutcome::Doubtful }
    }
}

async fn read_cached(
    set: &CacheSet,
    target: &Target,
    cached: CachedPiece,
    buffer: Buffer,
) -> (Result<(), Error>, Buffer) {
    let begun = set.env().now();
    let (read, buffer) = set.cache().read(cached.sector(), buffer).await;
    match set.with(|s| s.read_ended(&cached, begun, &read)) {
        HitOutcome::Valid => (Ok(()), buffer),
        ended => Box::pin(in_doubt(set, target, cached, ended, read, buffer)).await,
    }
}

/// Handles data `read` from the cache that may be wrong: waits until that is known, or reads it
/// from elsewhere.
pub(super) async fn in_doubt(
    set: &CacheSet,
    target: &Target,
    cached: CachedPiece,
    ended: HitOutcome,
    read: Result<(), IoError>,
    buffer: Buffer,
) -> (Result<(), Error>, Buffer) {
    let mut ended = ended;
    if let HitOutcome::BeingFlushed(flush) = ended {
        while set.with(|s| s.buckets.flushes().runs(flush)) {
            set.signals().cache_flushed.wait().await;
        }
        ended = set.with(|s| s.let_go(&cached, read.is_ok()));
    }
    // Data that a failed flush has dropped is not what was written; the set's failure is the error.
    let result = match ended {
        HitOutcome::Valid => Ok(()),
        HitOutcome::BeingFlushed(_) | HitOutcome::Doubtful => {
            read.map_err(Error::io(ErrorContext::Data)).and_then(|()| set.check_alive())
        }
    };
    let CachedPiece { range, pointers, dirty } = cached;
    match (result, &target.backing) {
        (Ok(()), _) => (Ok(()), buffer),
        (Err(error), Some(_)) if !dirty => {
            if let (Error::Io { source, .. }, Some(inode)) = (&error, target.inode)
                && source.kind == IoErrorKind::Io
            {
                let size = u16::try_from(range.sectors()).expect("a piece is of one key");
                insert::spawn_drop(set, target, Key { inode, size, dirty, end: range.end, pointers });
            }
            read_again(set, target, range, buffer).await
        }
        (Err(error), _) => (Err(error), buffer),
    }
}

/// Reads from the backing device what could not be read from the cache. If some of it has become
/// dirty meanwhile, it is read again in the normal way. A write that bypasses that dirty data does
/// not wait for this read, which may have seen data that the next read does not (invariant D35).
async fn read_again(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    buffer: Buffer,
) -> (Result<(), Error>, Buffer) {
    let backing = target.backing.as_ref().expect("clean data has a backing device");
    let (result, buffer) = read_instead(set, target, backing, range.start, buffer).await;
    match write::survey(set, target, range).await {
        Ok(survey) if !survey.dirty => (result, buffer),
        Ok(_) => {
            let (result, buffer) = Box::pin(read_whole(set, target, range, buffer)).await;
            (result.map(drop), buffer)
        }
        Err(error) => read_without_cache(set, target, range, buffer, error).await,
    }
}

async fn read_hole(
    set: &CacheSet,
    target: &Target,
    planned: PlannedPiece,
    mut buffer: Buffer,
) -> (Result<(), Error>, Buffer) {
    let Some(backing) = &target.backing else {
        buffer.clear();
        return (Ok(()), buffer);
    };
    let begun = flush::flushes(set, target.id, |flushes| flushes.read_begins());
    let (lent, buffer) = fill::land(set, planned.fill.is_some(), buffer);
    let (result, buffer) = beside(set, target, backing.read(planned.piece.start, buffer)).await;
    if let Some(fill) = set.with(|s| s.end_miss(target, &planned, begun.filter(|_| result.is_ok()))) {
        let fill = fill::with_data(set, target.clone(), fill, &buffer);
        set.begin_to_fill(fill);
    }
    set.signals().ranges.notify_all();
    let buffer = fill::give_back(set, lent, buffer, result.is_ok());
    (result.map_err(Error::io(ErrorContext::Backing)), buffer)
}

impl State {
    /// Ends the read of a planned piece from the backing device; `begun` is `None` if it failed.
    /// Returns the fill that may begin. The caller notifies `ranges`.
    pub(super) fn end_miss(
        &mut self,
        target: &Target,
        planned: &PlannedPiece,
        begun: Option<IoToken>,
    ) -> Option<Fill> {
        let volume = self.volumes.get_mut(target.id)?;
        if let Some(claim) = planned.miss {
            volume.ranges.release(claim);
        }
        let claim = planned.fill?;
        volume.ranges.has_read(claim);
        let stamp =
            volume.backing.as_ref().zip(begun).map(|(backing, begun)| backing.flushes.read_ends(begun));
        self.begin_fill(target, claim, stamp)
    }
}
