//! A write, by the table of modes:
//!
//! | way | when | data goes to |
//! |---|---|---|
//! | back | dirty data in the range, in every mode; mode writeback while there is room; flash-only volumes | cache, dirty |
//! | through | mode writethrough, or writeback without room | backing device and cache, clean |
//! | around | otherwise | backing device |
//!
//! Before a write goes to the backing device, whatever the tree says of its range is made void *durably* (decision
//! 11): otherwise a crash could leave an old clean copy in the cache that hides the newer data, until it is evicted
//! and the sector changes its value without a write.

use crate::btree::{Attempt, Record};
use crate::error::{Doing, Error};
use crate::journal::writer;
use crate::request::insert::Chunk;
use crate::request::ranges::{Claim, Parked};
use crate::request::{Range, Target, flush, read};
use crate::set::CacheSet;
use crate::space::Class;
use crate::state::{BTREE_RESERVE, MOVING_RESERVE, State};
use crate::volume::record;
use bcached_env::{Buffer, Payload};
use bcached_format::{BackingState, CacheMode, Key};

/// Longest hole put in the tree at once (the kernel's limit).
const HOLE_SECTORS_MAX: u64 = 32768;

/// What the tree says of a range.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Survey {
    /// Some of it is dirty.
    pub dirty: bool,
    /// Some of it has a key that a crash could bring back: it must be made void before the backing device changes.
    pub present: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Back,
    Through,
    Around,
}

/// Writes `payload` over `range`. The part that can be cached goes by the table; a rest behind the last whole block
/// goes to the backing device.
pub async fn write(
    set: &CacheSet,
    target: &Target,
    range: Range,
    payload: Payload,
    fua: bool,
) -> Result<(), Error> {
    set.with(|s| s.stats.write_bytes += payload.len() as u64);
    let Some(blocks) = target.blocks_around(range) else {
        return write_backing(set, target, range, payload, fua).await;
    };
    let whole = Range { start: blocks.start, end: blocks.end.max(range.end) };
    let claim = lock(set, target, whole).await?;
    let written = write_locked(set, target, range, blocks, payload, fua).await;
    unlock(set, target, claim);
    written
}

async fn write_locked(
    set: &CacheSet,
    target: &Target,
    range: Range,
    blocks: Range,
    payload: Payload,
    fua: bool,
) -> Result<(), Error> {
    let end = range.end.min(target.cacheable_end);
    let part = Range { start: range.start, end };
    let body = payload.slice(0..bytes(part.sectors()));
    let body = if part == blocks { body } else { widen(set, target, part, blocks, &body).await? };
    let written = write_blocks(set, target, blocks, &body, fua).await;
    match written {
        Err(Error::Failed(_)) => write_degraded(set, target, blocks, &body, fua).await?,
        other => other?,
    }
    if end < range.end {
        let rest = payload.slice(bytes(part.sectors())..payload.len());
        write_backing(set, target, Range { start: end, end: range.end }, rest, fua).await?;
    }
    Ok(())
}

fn bytes(sectors: u64) -> usize {
    usize::try_from(sectors * 512).expect("a request fits in memory")
}

/// Reads the blocks around a part and lays it over them: extents and holes never lie off the block grid (decision
/// 13). The range is locked, so the neighbours cannot change meanwhile.
async fn widen(
    set: &CacheSet,
    target: &Target,
    part: Range,
    blocks: Range,
    body: &Payload,
) -> Result<Payload, Error> {
    let (result, mut whole) =
        read::read_whole(set, target, blocks, Buffer::zeroed(bytes(blocks.sectors()))).await;
    result?;
    let skip = bytes(part.start - blocks.start);
    whole.as_mut_slice()[skip..skip + body.len()].copy_from_slice(body.as_slice());
    Ok(whole.freeze())
}

/// Writes whole blocks, the range being locked.
pub(crate) async fn write_blocks(
    set: &CacheSet,
    target: &Target,
    range: Range,
    payload: &Payload,
    fua: bool,
) -> Result<(), Error> {
    let survey = survey(set, target, range).await?;
    match set.with(|s| way(s, target, survey)) {
        Way::Back => write_back(set, target, range, payload, survey).await?,
        Way::Through => return write_through(set, target, range, payload, survey, fua).await,
        Way::Around => {
            invalidate(set, target, range, survey).await?;
            return write_backing(set, target, range, payload.clone(), fua).await;
        }
    }
    if fua {
        writer::commit(set).await?;
    }
    Ok(())
}

fn way(s: &mut State, target: &Target, survey: Survey) -> Way {
    let in_use = s.in_use_percent();
    if target.backing.is_none() || survey.dirty {
        return Way::Back;
    }
    let wanted = match target.mode {
        CacheMode::Writeback if in_use < s.options.cutoff_writeback => Way::Back,
        CacheMode::Writeback | CacheMode::Writethrough if in_use < s.options.cutoff_cache_add => Way::Through,
        _ => Way::Around,
    };
    if wanted == Way::Around {
        s.stats.bypassed_bytes += 1;
    }
    wanted
}

/// Waits until the write may begin: earlier overlapping writes have ended.
pub(crate) async fn lock(set: &CacheSet, target: &Target, range: Range) -> Result<Claim, Error> {
    let queued = set.with(|s| Some(s.volumes.get_mut(target.id)?.ranges.queue_write(range.start, range.end)));
    let claim = queued.ok_or(Error::NoVolume)?;
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
            return Ok(claim);
        }
        set.signals().ranges.wait().await;
    }
}

/// The end of what [`lock`] began.
pub(crate) fn unlock(set: &CacheSet, target: &Target, claim: Claim) {
    set.with(|s| {
        if let Some(volume) = s.volumes.get_mut(target.id) {
            volume.ranges.release(claim);
        }
    });
    set.signals().ranges.notify_all();
}

/// Asks the tree about a range, leaf by leaf.
pub(crate) async fn survey(set: &CacheSet, target: &Target, range: Range) -> Result<Survey, Error> {
    let inode = target.inode.expect("only attached volumes have keys");
    let mut survey = Survey::default();
    let mut at = range.start;
    while at < range.end {
        at = set.attempt(|s| s.survey_leaf(inode, at, range.end, &mut survey)).await?;
    }
    Ok(survey)
}

/// Makes void what the tree says of a range, durably. Nothing is written if nothing is there and nothing was.
pub(crate) async fn invalidate(
    set: &CacheSet,
    target: &Target,
    range: Range,
    survey: Survey,
) -> Result<(), Error> {
    if survey.present {
        punch(set, target, range).await?;
    }
    let last_hole = set.with(|s| s.volumes.get(target.id).map_or(0, |volume| volume.last_hole));
    writer::commit_through(set, last_hole).await
}

/// Puts holes over a range: journalled, not waited for.
pub(crate) async fn punch(set: &CacheSet, target: &Target, range: Range) -> Result<(), Error> {
    let inode = target.inode.expect("only attached volumes have keys");
    let mut at = range.start;
    while at < range.end {
        let end = range.end.min(at + HOLE_SECTORS_MAX);
        set.put_key(&Key::hole(inode, at, end), Record::Journal).await?;
        at = end;
    }
    set.with(|s| {
        let sequence = s.journal.appended();
        if let Some(volume) = s.volumes.get_mut(target.id) {
            volume.last_hole = volume.last_hole.max(sequence);
        }
    });
    Ok(())
}

/// Into the cache, dirty. Where the cache cannot take it the data goes to the backing device, flushed, before what is
/// dirty in its range is made void.
async fn write_back(
    set: &CacheSet,
    target: &Target,
    range: Range,
    payload: &Payload,
    survey: Survey,
) -> Result<(), Error> {
    let inode = target.inode.expect("only attached volumes are cached");
    ensure_dirty(set, target).await?;
    let mut at = range.start;
    while at < range.end {
        let rest = Range { start: at, end: range.end };
        let chunks = set.take_chunks(Class::Dirty(inode), rest);
        let Some(last) = chunks.last() else {
            if wait_for_space(set).await? {
                continue;
            }
            return write_out(set, target, range, rest, payload, survey).await;
        };
        at = last.end();
        for (chunk, written) in set.write_chunks(&chunks, range.start, payload).await {
            let stored = match written {
                Ok(()) => set.put_key(&chunk.key(inode, true), Record::Journal).await,
                Err(error) => Err(error),
            };
            set.release_chunks(&[chunk]);
            match stored {
                Ok(()) => {}
                Err(Error::Io { doing: Doing::Data, .. }) if target.backing.is_some() => {
                    let part = Range { start: chunk.start, end: chunk.end() };
                    write_out(set, target, range, part, payload, survey).await?;
                }
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

/// The cache has no space: waits if it will have some without anything being written back; false if not.
async fn wait_for_space(set: &CacheSet) -> Result<bool, Error> {
    set.check_alive()?;
    set.signals().allocator_work.notify_all();
    let reserve = (BTREE_RESERVE + MOVING_RESERVE) as u64;
    if set.with(|s| s.buckets.available() <= reserve || s.stopping) {
        set.signals().writeback_work.notify_all();
        return Ok(false);
    }
    set.signals().space.wait().await;
    Ok(true)
}

/// A part that the cache cannot take goes to the backing device: write, flush, then the hole, so that at every moment
/// either the old dirty data or the new data is what a crash leaves.
async fn write_out(
    set: &CacheSet,
    target: &Target,
    range: Range,
    part: Range,
    payload: &Payload,
    survey: Survey,
) -> Result<(), Error> {
    if target.backing.is_none() {
        return Err(Error::NoSpace);
    }
    let from = bytes(part.start - range.start);
    let piece = payload.slice(from..from + bytes(part.sectors()));
    if !survey.dirty {
        invalidate(set, target, part, survey).await?;
        return write_backing(set, target, part, piece, false).await;
    }
    write_backing(set, target, part, piece, false).await?;
    flush::flush_backing(set, target).await?;
    punch(set, target, part).await?;
    writer::commit(set).await
}

/// To both devices at once; the clean key waits for the backing device's flush.
async fn write_through(
    set: &CacheSet,
    target: &Target,
    range: Range,
    payload: &Payload,
    survey: Survey,
    fua: bool,
) -> Result<(), Error> {
    invalidate(set, target, range, survey).await?;
    let chunks = set.take_chunks(Class::Clean, range);
    let both = (
        write_backing(set, target, range, payload.clone(), fua),
        set.write_chunks(&chunks, range.start, payload),
    );
    let (backing, cached) = bcached_env::join::join_two(both.0, both.1).await;
    for (chunk, written) in cached {
        if backing.is_err() || written.is_err() || !keep_clean(set, target, chunk).await {
            set.release_chunks(&[chunk]);
        }
    }
    backing
}

/// Parks a clean chunk, or indexes it if the backing device keeps what it has acknowledged. Its range is locked by
/// its write. False: it was not kept, the pin is the caller's.
async fn keep_clean(set: &CacheSet, target: &Target, chunk: Chunk) -> bool {
    let parked = set.with(|s| {
        let volume = s.volumes.get_mut(target.id)?;
        let epoch = volume.backing.as_ref()?.epoch;
        if !epoch.is_volatile() {
            return Some(false);
        }
        let piece = Parked { end: chunk.end(), pointers: chunk.space.pointers, stamp: epoch.read_now() };
        volume.ranges.park(chunk.start, piece);
        Some(true)
    });
    match parked {
        None => false,
        Some(true) => {
            set.signals().parked_work.notify_all();
            true
        }
        Some(false) => {
            let key = chunk.key(target.inode.expect("attached"), false);
            let kept = set.put_key(&key, Record::Fill).await.is_ok();
            if kept {
                set.release_chunks(&[chunk]);
            }
            kept
        }
    }
}

/// Writes to the backing device, after write-back in the range has ended.
pub(crate) async fn write_backing(
    set: &CacheSet,
    target: &Target,
    range: Range,
    payload: Payload,
    fua: bool,
) -> Result<(), Error> {
    let disk = begin_backing_write(set, target, range).await?;
    let written =
        if fua { disk.write_fua(range.start, payload).await } else { disk.write(range.start, payload).await };
    end_backing_write(set, target);
    written.map_err(Error::io(Doing::Backing))
}

/// Waits until nothing older is on its way to the range of the backing device. The range is locked, so that nothing new
/// sets out.
pub(crate) async fn wait_for_cleaning(set: &CacheSet, target: &Target, range: Range) -> Result<(), Error> {
    loop {
        let free =
            set.with(|s| Some(s.volumes.get(target.id)?.ranges.backing_is_free(range.start, range.end)));
        if free.ok_or(Error::NoVolume)? {
            return Ok(());
        }
        set.signals().ranges.wait().await;
    }
}

/// Waits for write-back in the range, and counts a write to the backing device as open.
pub(crate) async fn begin_backing_write(
    set: &CacheSet,
    target: &Target,
    range: Range,
) -> Result<bcached_env::Disk, Error> {
    let disk = target.backing.clone().ok_or(Error::NoSpace)?;
    wait_for_cleaning(set, target, range).await?;
    set.with(|s| {
        if let Some(backing) = s.volumes.get_mut(target.id).and_then(|volume| volume.backing.as_mut()) {
            backing.epoch.write_begins();
        }
    });
    Ok(disk)
}

/// The end of what [`begin_backing_write`] began.
pub(crate) fn end_backing_write(set: &CacheSet, target: &Target) {
    set.with(|s| {
        if let Some(backing) = s.volumes.get_mut(target.id).and_then(|volume| volume.backing.as_mut()) {
            backing.epoch.write_ends();
        }
    });
}

/// *Dirty* on the backing superblock is durable before the first dirty key can be (decision 9).
async fn ensure_dirty(set: &CacheSet, target: &Target) -> Result<(), Error> {
    if target.backing.is_none()
        || set.with(|s| s.volumes.get(target.id).is_some_and(|volume| volume.dirty_marked))
    {
        return Ok(());
    }
    record::set_state(set, target.id, BackingState::Dirty).await
}

/// The set has failed. A volume without dirty data goes on without its cache, once its superblock says, durably, that
/// the cached data is void (decision 9).
async fn write_degraded(
    set: &CacheSet,
    target: &Target,
    range: Range,
    payload: &Payload,
    fua: bool,
) -> Result<(), Error> {
    go_uncached(set, target).await?;
    write_backing(set, target, range, payload.clone(), fua).await
}

/// Makes a volume of a failed set independent of it; refused while it has dirty data there.
pub(crate) async fn go_uncached(set: &CacheSet, target: &Target) -> Result<(), Error> {
    let clean =
        set.with(|s| target.backing.is_some() && target.inode.is_some_and(|inode| s.dirty.of(inode) == 0));
    if !clean {
        return Err(set.check_alive().err().unwrap_or(Error::NoVolume));
    }
    record::set_state(set, target.id, BackingState::Stale).await?;
    // What the tree says of the volume is old from the first write on that goes past it.
    set.with(|s| {
        if let Some(volume) = s.volumes.get_mut(target.id) {
            volume.inode = None;
        }
    });
    Ok(())
}

impl State {
    /// Adds what one leaf says of `[start, end)` to a survey; returns where the leaf ends.
    pub(crate) fn survey_leaf(
        &mut self,
        inode: bcached_format::Inode,
        start: u64,
        end: u64,
        survey: &mut Survey,
    ) -> Attempt<u64> {
        let mut found = Survey::default();
        let upto = match self.keys_in_leaf(inode, start, end, &mut |s, key| {
            let could_return = key.pointers.as_slice().iter().any(|pointer| !s.is_durably_stale(*pointer));
            found.present |= could_return;
            found.dirty |= key.dirty && key.pointers.as_slice().iter().any(|pointer| !s.is_stale(*pointer));
        }) {
            Attempt::Done(upto) => upto,
            Attempt::Needs(need) => return Attempt::Needs(need),
        };
        survey.present |= found.present;
        survey.dirty |= found.dirty;
        Attempt::Done(upto)
    }
}
