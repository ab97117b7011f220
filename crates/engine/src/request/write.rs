//! Serves a write, by the table of modes:
//!
//! | way | when | data goes to |
//! |---|---|---|
//! | back | dirty range or stripe; mode writeback with room; flash-only volumes | cache, dirty |
//! | through | mode writethrough, or writeback without room | backing device and cache, clean |
//! | around | bypassed writes (`admission`); volume being detached or attached | backing device |
//!
//! Dirty data in the range sends a write *back* in every mode. Dirty data in its stripe does so in
//! mode writeback, while there is room, if partial stripes are expensive, even for a bypassed write
//! (`writeback/stripes`). While a volume is being detached or attached all its writes go *around*,
//! except in flash-only volumes.
//!
//! *Room* is what can be allocated without writing back dirty data, so a cache that is full of
//! clean data has all of it. Durable writes use the cache up to a higher level than others:
//! anywhere else they cost a flush of the backing device.
//!
//! Before a write goes to the backing device, whatever the tree says of its range is invalidated
//! *durably* (invariant D22). Otherwise a crash could leave an old clean copy in the cache that
//! hides the newer data until it is evicted, and then the sector would change its value without a
//! write.

use crate::btree::{Attempt, InsertKind};
use crate::cache_writes::WriteCause;
use crate::error::{Error, ErrorContext};
use crate::journal::writer;
use crate::latency::RequestPath;
use crate::phases::Phase;
use crate::request::holes::{invalidate, invalidate_clean, punch};
use crate::request::insert::Chunk;
use crate::request::parked::{self, CleanOutcome};
use crate::request::ranges::{Claim, RangeTable};
use crate::request::without_cache::from_queue;
use crate::request::{SectorRange, Target, flush, read};
use crate::set::CacheSet;
use crate::space::DataClass;
use crate::state::{BTREE_RESERVE, MOVING_RESERVE, State};
use crate::volume::backing_flushes::{BackingFlushes, FlushStamp, IoToken};
use crate::volume::{Volume, record};
use crate::writeback::contention::beside;
use crate::writeback::dirty_throttle;
use bcached_env::{Buffer, IoError, Payload};
use bcached_format::{BackingState, CacheMode, Inode};

/// What the tree says of a range.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RangeState {
    /// Some of it is dirty.
    pub dirty: bool,
    /// Some of it has a key that a crash could revive: the key must be invalidated before the
    /// backing device changes.
    pub present: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WriteMode {
    Back,
    Through,
    Around,
}

/// Writes `payload` over `range` when it has its turn. The cacheable part is written by the table;
/// a rest after the last whole block goes to the backing device. Returns the oldest stamp of what
/// was written there and is not proven durable.
pub async fn write(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    payload: Payload,
    fua: bool,
) -> Result<Option<FlushStamp>, Error> {
    let length = payload.len() as u64;
    // The turn covers whole blocks, whether the volume is cached or not. Requests that began before
    // the volume left the cache still write whole blocks, and must not overwrite what is written
    // here with old content.
    let write = async |target: &Target| write_anywhere(set, target, range, payload.clone(), fua).await;
    let blocks = target.whole_blocks(range);
    let claim = queue(set, target, blocks)?;
    dirty_throttle::wait(set, target, blocks).await;
    let written = from_queue(set, target, claim, write).await;
    if written.is_ok() {
        set.with(|s| s.stats.write_bytes += length);
    }
    written
}

pub(super) async fn write_anywhere(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    payload: Payload,
    fua: bool,
) -> Result<Option<FlushStamp>, Error> {
    match target.blocks_around(range) {
        Some(blocks) => write_locked(set, target, range, blocks, payload, fua).await,
        None => {
            target.goes(if target.inode.is_none() {
                RequestPath::WriteUncached
            } else {
                RequestPath::WriteAround
            });
            write_backing(set, target, range, payload, fua).await.map(|stamp| unproven(stamp, fua))
        }
    }
}

async fn write_locked(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    blocks: SectorRange,
    payload: Payload,
    fua: bool,
) -> Result<Option<FlushStamp>, Error> {
    let end = range.end.min(target.cacheable_end);
    let part = SectorRange { start: range.start, end };
    let body = payload.slice(0..bytes(part.sectors()));
    let body = if part == blocks { body } else { widen(set, target, part, blocks, &body).await? };
    let first = write_blocks(set, target, blocks, &body, fua).await?;
    if end == range.end {
        return Ok(first);
    }
    let rest = payload.slice(bytes(part.sectors())..payload.len());
    let stamp = write_backing(set, target, SectorRange { start: end, end: range.end }, rest, fua).await?;
    Ok(FlushStamp::older(first, unproven(stamp, fua)))
}

/// Returns the stamp of a write that a failed flush can still lose; a durable write has none.
fn unproven(stamp: FlushStamp, fua: bool) -> Option<FlushStamp> {
    (!fua).then_some(stamp)
}

fn bytes(sectors: u64) -> usize {
    usize::try_from(sectors * 512).expect("a request fits in memory")
}

/// Reads the blocks around a part and lays the part over them: extents and holes are always aligned
/// to blocks. The range is locked, so the neighbouring sectors cannot change
/// meanwhile.
async fn widen(
    set: &CacheSet,
    target: &Target,
    part: SectorRange,
    blocks: SectorRange,
    body: &Payload,
) -> Result<Payload, Error> {
    let (result, mut whole) =
        read::read_whole(set, target, blocks, Buffer::zeroed(bytes(blocks.sectors()))).await;
    result?;
    let skip = bytes(part.start - blocks.start);
    let body = body.stable().map_err(Error::BufferUnavailable)?;
    whole.as_mut_slice()[skip..skip + body.len()].copy_from_slice(body.as_slice());
    Ok(whole.freeze())
}

/// Writes whole blocks, while the caller has its turn in the range; returns the same as [`write`].
pub(crate) async fn write_blocks(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    payload: &Payload,
    fua: bool,
) -> Result<Option<FlushStamp>, Error> {
    if target.inode.is_none() {
        target.goes(RequestPath::WriteUncached);
        let stamp = write_backing(set, target, range, payload.clone(), fua).await?;
        return Ok(unproven(stamp, fua));
    }
    let survey = survey(set, target, range).await?;
    let way = set.with(|s| way(s, target, range, survey, fua));
    target.goes(match way {
        WriteMode::Back => RequestPath::WriteBack,
        WriteMode::Through => RequestPath::WriteThrough,
        WriteMode::Around => RequestPath::WriteAround,
    });
    let unproven = match way {
        WriteMode::Back => write_back(set, target, range, payload, survey, fua).await?,
        WriteMode::Through => return write_through(set, target, range, payload, survey, fua).await,
        WriteMode::Around => return write_out(set, target, (range, range), payload, survey, fua).await,
    };
    if fua {
        writer::commit(set).await?;
    }
    Ok(unproven)
}

pub(super) fn way(
    s: &State,
    target: &Target,
    range: SectorRange,
    survey: RangeState,
    fua: bool,
) -> WriteMode {
    // The volume may have begun to attach or detach after the request had begun.
    let is_on_its_way = s.volumes.get(target.id).is_some_and(Volume::is_bypassed);
    if target.backing.is_none() || survey.dirty && !is_on_its_way {
        return WriteMode::Back;
    }
    if is_on_its_way {
        return WriteMode::Around;
    }
    let sync = s.options.cutoff_writeback_sync.max(s.options.cutoff_writeback);
    let has_room = s.in_use_percent() < sync && !s.is_worn();
    if target.mode == CacheMode::Writeback && has_room && s.completes_a_stripe(target, range) {
        return WriteMode::Back;
    }
    if target.bypass.is_some() {
        return WriteMode::Around;
    }
    let cutoff = if fua { sync } else { s.options.cutoff_writeback };
    match target.mode {
        CacheMode::Writeback if s.in_use_percent() < cutoff => WriteMode::Back,
        CacheMode::Writeback | CacheMode::Writethrough => WriteMode::Through,
        CacheMode::Writearound | CacheMode::None => WriteMode::Around,
    }
}

/// Queues a write for a range. The caller waits until it is granted, and releases it.
pub(crate) fn queue(set: &CacheSet, target: &Target, range: SectorRange) -> Result<Claim, Error> {
    let queued = set.with(|s| Some(s.volumes.get_mut(target.id)?.ranges.queue_write(range.start, range.end)));
    queued.ok_or(Error::NoVolume)
}

/// Waits until a queued write may begin: earlier overlapping writes have ended.
pub(crate) async fn granted(set: &CacheSet, target: &Target, claim: Claim) {
    loop {
        let granted = set.with(|s| {
            let State { volumes, buckets, .. } = s;
            let volume = volumes.get_mut(target.id).expect("a volume stays while it has requests");
            volume.ranges.try_grant(claim, &mut |cut| {
                for pointer in cut.pointers.as_slice() {
                    match cut.parts {
                        0 => buckets.unpin(*pointer),
                        parts => (1..parts).for_each(|_| buckets.pin(*pointer)),
                    }
                }
            })
        });
        if granted {
            return;
        }
        set.signals().ranges.wait().await;
    }
}

/// Surveys a range in the tree, leaf by leaf.
pub(crate) async fn survey(set: &CacheSet, target: &Target, range: SectorRange) -> Result<RangeState, Error> {
    let inode = target.inode.expect("only attached volumes have keys");
    let mut survey = RangeState::default();
    let mut at = range.start;
    while at < range.end {
        at = set.attempt(|s| s.survey_leaf(inode, at, range.end, &mut survey)).await?;
    }
    Ok(survey)
}

/// Writes to the cache, dirty. If the cache cannot take the data, it goes to the backing device and
/// is flushed before the dirty data in its range is invalidated.
async fn write_back(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    payload: &Payload,
    survey: RangeState,
    fua: bool,
) -> Result<Option<FlushStamp>, Error> {
    let inode = target.inode.expect("only attached volumes are cached");
    let is_first = ensure_dirty(set, target).await?;
    let mut unproven = None;
    let mut at = range.start;
    let rounds_then = set.with(|s| s.moving.begun());
    while at < range.end {
        let rest = SectorRange { start: at, end: range.end };
        let chunks = set.take_chunks(DataClass::Dirty(inode), rest);
        let Some(end) = chunks.last().map(Chunk::end) else {
            if wait_for_space(set, target, rounds_then).await? {
                continue;
            }
            let written = write_out(set, target, (range, rest), payload, survey, fua).await?;
            return Ok(FlushStamp::older(unproven, written));
        };
        at = end;
        for (chunk, stored) in set.store_dirty(target, chunks, range.start, payload).await {
            match stored {
                Err(Error::Io { doing: ErrorContext::Data, .. }) if target.backing.is_some() => {
                    let part = SectorRange { start: chunk.start, end: chunk.end() };
                    let written = write_out(set, target, (range, part), payload, survey, fua).await?;
                    unproven = FlushStamp::older(unproven, written);
                }
                other => other?,
            }
        }
    }
    if is_first {
        set.signals().writeback_work.notify_all();
    }
    Ok(unproven)
}

/// Handles a cache without space. Waits if space will come without any write-back, and returns
/// false if not. Data that can be nowhere else also waits for the write-back of other volumes, and
/// for moving, of which `rounds_then` rounds had begun.
async fn wait_for_space(set: &CacheSet, target: &Target, rounds_then: u64) -> Result<bool, Error> {
    set.check_alive()?;
    set.signals().allocator_work.notify_all();
    let reserve = (BTREE_RESERVE + MOVING_RESERVE) as u64;
    let is_vain = set.with(|s| {
        let is_patient =
            target.backing.is_none() && (!s.moving.are_in_vain(rounds_then) || s.others_give_way());
        // Neither moving nor GC runs before the journal's keys are in the tree.
        let is_stuck = s.replay_is_in_vain().is_some();
        let is_patient = is_patient && !is_stuck;
        // A flash-only volume waits for the walk, too.
        let comes_late = !s.frontier.is_complete() && target.backing.is_some();
        let none_comes = s.frontier.is_complete() && s.buckets.available() <= reserve && !is_patient;
        let in_vain = s.starved().is_some()
            || s.walk_is_in_vain().is_some()
            || is_stuck && (s.starvation.needs_pass_now() || s.is_replay_pressed());
        s.stopping || in_vain || comes_late || none_comes
    });
    if is_vain || target.backing.is_none() {
        set.signals().writeback_work.notify_all();
        set.signals().gc_work.notify_all();
    }
    if is_vain {
        return Ok(false);
    }
    set.signals().space.wait().await;
    Ok(true)
}

impl State {
    /// Returns whether any volume has dirty data that is being written back.
    fn others_give_way(&self) -> bool {
        self.volumes.iter().any(|(_, volume)| {
            let is_dirty = volume.inode.is_some_and(|inode| self.dirty.of(inode) > 0);
            is_dirty && volume.is_written_back()
        })
    }
}

/// Writes a part that the cache cannot take to the backing device: holes over clean data, the
/// write, a flush, then holes over dirty data. So at every moment a crash leaves either the old
/// dirty data or the new data. `payload` is that of the whole range.
pub(super) async fn write_out(
    set: &CacheSet,
    target: &Target,
    (range, part): (SectorRange, SectorRange),
    payload: &Payload,
    survey: RangeState,
    fua: bool,
) -> Result<Option<FlushStamp>, Error> {
    if target.backing.is_none() {
        return Err(Error::NoSpace);
    }
    target.goes(RequestPath::WriteAround);
    let from = bytes(part.start - range.start);
    let piece = payload.slice(from..from + bytes(part.sectors()));
    let put = async || write_backing(set, target, part, piece, fua && !survey.dirty).await;
    let stamp = give_way(set, target, part, survey, put).await?;
    Ok(stamp.filter(|_| !fua))
}

/// Replaces what the cache holds of a range by what `put` writes to the backing device. Returns the
/// stamp of that if it is not proven durable.
pub(super) async fn give_way(
    set: &CacheSet,
    target: &Target,
    part: SectorRange,
    survey: RangeState,
    put: impl AsyncFnOnce() -> Result<FlushStamp, Error>,
) -> Result<Option<FlushStamp>, Error> {
    if !survey.dirty {
        // No old clean copy can come back over what is put there: invariant D22.
        invalidate(set, target, part, survey).await?;
        return put().await.map(Some);
    }
    // Write-back in progress would turn its data clean behind the holes. And by invariant D35 a
    // read that looked before the dirty data came must not return new data while other
    // reads still return the old.
    let _phase = set.begin(Phase::WriteOut);
    wait_for_cleaning(set, target, part).await?;
    wait_for_misses(set, target, part).await?;
    invalidate_clean(set, target, part).await?;
    let stamp = put().await?;
    // Old dirty data is only replaced by data, or zeroes, that are proven durable: invariant D27,
    // and for zeroes invariant D24.
    flush::prove(set, target, stamp).await?;
    punch(set, target, part).await?;
    writer::commit(set).await?;
    Ok(None)
}

/// Writes to both devices at once; the clean key waits for a flush of the backing device.
async fn write_through(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    payload: &Payload,
    survey: RangeState,
    fua: bool,
) -> Result<Option<FlushStamp>, Error> {
    // Both devices get the same data, even if the client writes to the request's memory meanwhile.
    let payload = &payload.stable().map_err(Error::BufferUnavailable)?;
    // No old clean copy can come back over the new data: invariant D22.
    invalidate(set, target, range, survey).await?;
    let chunks = set.take_chunks(DataClass::Clean, range);
    let both = (
        write_backing(set, target, range, payload.clone(), fua),
        set.write_chunks(chunks, range.start, payload, WriteCause::Data),
    );
    let (backing, cached) = bcached_env::join::join_two(both.0, both.1).await;
    for (chunk, written) in cached {
        match (&backing, written) {
            (Ok(stamp), Ok(())) => keep_clean(set, target, chunk, *stamp).await,
            _ => set.release_chunks(&[chunk]),
        }
    }
    backing.map(|stamp| unproven(stamp, fua))
}

/// Parks a clean chunk, or indexes it if the backing device's copy is already durable. Its write
/// holds the range. Afterwards the chunk's pin is released, or belongs to the parked piece.
async fn keep_clean(set: &CacheSet, target: &Target, chunk: Chunk, stamp: FlushStamp) {
    match set.with(|s| parked::park(s, target, &chunk, stamp)) {
        CleanOutcome::Parked => set.signals().parked_work.notify_all(),
        CleanOutcome::Void => set.release_chunks(&[chunk]),
        CleanOutcome::Ready => {
            // This is optional: the data is on the backing device.
            let key = chunk.key(target.inode.expect("only attached volumes are cached"), false);
            let _ = set.put_key(&key, InsertKind::Fill).await;
            set.release_chunks(&[chunk]);
        }
    }
}

/// Writes a client's data to the backing device, after write-back in the range has ended; returns
/// its stamp. With `fua` the data is durable on success.
pub(crate) async fn write_backing(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
    payload: Payload,
    fua: bool,
) -> Result<FlushStamp, Error> {
    let (disk, begun) = begin_backing_write(set, target, range).await?;
    // With FUA requested, a device without FUA would flush beside the one flush that may run, and a
    // failure could be reported to only one of the two.
    let at_once = fua && disk.info().fua;
    let written = match at_once {
        true => beside(set, target, disk.write_fua(range.start, payload)).await,
        false => beside(set, target, disk.write(range.start, payload)).await,
    };
    let stamp = end_client_write(set, target, begun, &written);
    written.map_err(Error::io(ErrorContext::Backing))?;
    let stamp = stamp?;
    if fua && !at_once {
        flush::prove(set, target, stamp).await?;
    }
    Ok(stamp)
}

/// Waits until no older data is in flight to the range of the backing device. The range is locked,
/// so no new write-back starts.
pub(crate) async fn wait_for_cleaning(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
) -> Result<(), Error> {
    wait_until(set, target, |ranges| ranges.backing_is_free(range.start, range.end)).await
}

/// Waits for all reads of the range from the backing device that began before.
async fn wait_for_misses(set: &CacheSet, target: &Target, range: SectorRange) -> Result<(), Error> {
    let then = set.with(|s| s.volumes.get(target.id).map(|volume| volume.ranges.now()));
    let then = then.ok_or(Error::NoVolume)?;
    wait_until(set, target, |ranges| !ranges.has_misses(range.start, range.end, then)).await
}

async fn wait_until(
    set: &CacheSet,
    target: &Target,
    is_so: impl Fn(&RangeTable) -> bool,
) -> Result<(), Error> {
    loop {
        let is_so = set.with(|s| Some(is_so(&s.volumes.get(target.id)?.ranges)));
        if is_so.ok_or(Error::NoVolume)? {
            return Ok(());
        }
        set.signals().ranges.wait().await;
    }
}

/// Waits for write-back in the range, and counts a write to the backing device as open.
pub(crate) async fn begin_backing_write(
    set: &CacheSet,
    target: &Target,
    range: SectorRange,
) -> Result<(bcached_env::Disk, IoToken), Error> {
    let disk = target.backing.clone().ok_or(Error::NoSpace)?;
    wait_for_cleaning(set, target, range).await?;
    let begun = flush::flushes(set, target.id, BackingFlushes::write_begins).ok_or(Error::NoVolume)?;
    Ok((disk, begun))
}

/// Ends a write of a client's data to the backing device; `said` is the device's result.
pub(crate) fn end_client_write(
    set: &CacheSet,
    target: &Target,
    begun: IoToken,
    said: &Result<(), IoError>,
) -> Result<FlushStamp, Error> {
    // A device that was absent has taken nothing that a client is told of.
    if said.as_ref().is_err_and(|error| error.kind.is_final()) {
        return end_backing_write(set, target, begun);
    }
    flush::flushes(set, target.id, |flushes| flushes.client_write_ends(begun)).ok_or(Error::NoVolume)
}

/// Ends a write to the backing device; returns its stamp.
pub(crate) fn end_backing_write(
    set: &CacheSet,
    target: &Target,
    begun: IoToken,
) -> Result<FlushStamp, Error> {
    flush::flushes(set, target.id, |flushes| flushes.write_ends(begun)).ok_or(Error::NoVolume)
}

/// Makes *dirty* durable on the backing superblock, before the first dirty key can be. Returns true
/// if the volume had no dirty data: the caller then notifies write-back when it has made the first
/// key.
pub(crate) async fn ensure_dirty(set: &CacheSet, target: &Target) -> Result<bool, Error> {
    let (id, inode) = (target.id, target.inode);
    if target.backing.is_none() {
        return Ok(false);
    }
    if !set.with(|s| s.volumes.get(id).is_some_and(|volume| volume.dirty_marked)) {
        record::update(set, id, |s, superblock| {
            // The superblock of a volume that is leaving the cache only records that it leaves.
            if s.volumes.get(id).is_some_and(|volume| volume.may_cache(inode)) {
                superblock.set_state(BackingState::Dirty);
            }
        })
        .await?;
    }
    Ok(set.with(|s| s.volumes.get_mut(id).is_some_and(|volume| volume.begins_dirty(s.now))))
}

impl State {
    /// Adds what one leaf says of `[start, end)` to a survey; returns how far that reaches.
    pub(crate) fn survey_leaf(
        &mut self,
        inode: Inode,
        start: u64,
        end: u64,
        survey: &mut RangeState,
    ) -> Attempt<u64> {
        let mut found = RangeState::default();
        let upto = match self.keys_in_leaf(inode, start, end, &mut |s, key| {
            found.present |= s.could_return(key);
            found.dirty |= key.dirty && !s.is_dead(key);
        }) {
            Attempt::Done(upto) => upto,
            Attempt::Needs(need) => return Attempt::Needs(need),
        };
        survey.present |= found.present;
        survey.dirty |= found.dirty;
        Attempt::Done(upto)
    }
}
