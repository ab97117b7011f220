//! Fills the cache with data that was read from the backing device for a client. A fill is
//! optional: neither its reader nor any other task waits for it. It waits for nothing but its turn
//! on the device, and is dropped if it fails.
//!
//! Most fills are of one piece for which there is space: these begin in one transition and end in
//! another. A fill that needs more is done step by step, and so is the rest of one that meets an
//! obstacle.

use crate::btree::cache::LeafHint;
use crate::btree::{Attempt, InsertKind, Need};
use crate::cache_writes::WriteCause;
use crate::request::inflight::InFlightSlot;
use crate::request::insert::{self, Chunk, SpaceLeft};
use crate::request::parked::{self, CleanOutcome};
use crate::request::ranges::Claim;
use crate::request::{REQUESTS_MAX, SectorRange, Target};
use crate::set::CacheSet;
use crate::space::DataClass;
use crate::state::State;
use crate::volume::VolumeId;
use crate::volume::backing_flushes::FlushStamp;
use bcached_env::{Buffer, IoError, Payload, Time};
use bcached_format::Key;

/// Memory for fills in flight, for all volumes, in bytes; beyond it, a miss does not fill.
const FILL_BYTES_MAX: u64 = 64 << 20;
/// Fills in flight, for all volumes: each may need a task. There are as many as requests, whose
/// misses they are; beyond it, a miss does not fill.
pub const FILLS_MAX: usize = REQUESTS_MAX;

/// A fill that has begun.
pub(super) struct Fill {
    range: SectorRange,
    claim: Claim,
    /// The stamp of the read that brought its data.
    stamp: FlushStamp,
    /// The leaf that its key enters, if known.
    leaf: Option<LeafHint>,
}

impl Fill {
    /// Sets the leaf that lacked the data.
    pub(super) fn of(self, leaf: LeafHint) -> Self {
        Self { leaf: Some(leaf), ..self }
    }

    /// Returns the size of its data, in bytes.
    fn bytes(&self) -> usize {
        usize::try_from(self.range.sectors() * 512).expect("a fill fits in memory")
    }
}

/// A fill with its data.
pub(super) struct FillData {
    target: Target,
    fill: Fill,
    payload: Payload,
}

/// A fill whose data is being written.
pub struct FillInFlight {
    of: FillData,
    chunk: Chunk,
    began: Time,
}

/// What is left to do for a fill whose data has been written, or has failed to be.
enum FillRemainder {
    /// Nothing.
    None,
    /// Nothing; it is parked until a flush.
    Parked,
    /// This key is to enter the tree.
    Key(Key),
}

impl State {
    /// Begins optional background work of `bytes` bytes for volume `id`, if there is a place and
    /// memory for it; [`State::end_favour`] ends it.
    pub(super) fn begin_favour(&mut self, id: VolumeId, bytes: u64) -> bool {
        let has_place = self.fill_bytes < FILL_BYTES_MAX && self.fills < FILLS_MAX;
        if has_place {
            self.begin_background(id);
            self.fills += 1;
            self.fill_bytes += bytes;
        }
        has_place
    }

    /// Ends such work. The caller notifies `ranges`.
    pub(super) fn end_favour(&mut self, id: VolumeId, bytes: u64) {
        self.fills -= 1;
        self.fill_bytes -= bytes;
        self.end_background(id);
    }

    /// Begins a fill, if it may, when the data for which `claim` was entered has been read with
    /// `stamp`. Otherwise the claim is released, and the caller notifies `ranges`.
    pub(super) fn begin_fill(
        &mut self,
        target: &Target,
        claim: Claim,
        stamp: Option<FlushStamp>,
    ) -> Option<Fill> {
        let range = self.volumes.get(target.id)?.ranges.range_of(claim)?;
        let range = SectorRange { start: range.0, end: range.1 };
        if let Some(stamp) = stamp
            && self.begin_favour(target.id, range.sectors() * 512)
        {
            return Some(Fill { range, claim, stamp, leaf: None });
        }
        self.release_fill(target, claim);
        None
    }

    fn release_fill(&mut self, target: &Target, claim: Claim) {
        if let Some(volume) = self.volumes.get_mut(target.id) {
            volume.ranges.release(claim);
        }
    }

    /// Takes space for a fill, if it is available as a whole and at once.
    fn take_fill_space(&mut self, fill: &Fill) -> Option<(Chunk, SpaceLeft)> {
        let sectors = fill.range.sectors();
        if !self.open.fits(DataClass::Clean, sectors) {
            return None;
        }
        let space = self.take_space(DataClass::Clean, None, sectors)?;
        self.stats.written.add(WriteCause::Fill, fill.bytes());
        Some((Chunk { start: fill.range.start, space }, self.space_left()))
    }

    /// Handles the result of writing a fill's data: puts the key into the tree, if nothing is in
    /// the way.
    fn end_fill(
        &mut self,
        target: &Target,
        (fill, chunk): (&Fill, &Chunk),
        (begun, written): (Time, &Result<(), IoError>),
    ) -> FillRemainder {
        for pointer in chunk.space.pointers.as_slice() {
            self.cache_has_done(pointer.sector(), fill.bytes(), written.is_ok());
            self.buckets.written(*pointer);
        }
        self.cache_has_written(self.now.since(begun));
        self.buckets.age(fill.range.sectors());
        // Data that could not be written gets no key: invariant D1.
        let fate = if written.is_ok() { self.fate(target, chunk, fill) } else { CleanOutcome::Void };
        let rest = match fate {
            CleanOutcome::Ready => self.index(target, (fill, chunk)),
            CleanOutcome::Parked => FillRemainder::Parked,
            CleanOutcome::Void => FillRemainder::None,
        };
        if matches!(fate, CleanOutcome::Void)
            || matches!((fate, &rest), (CleanOutcome::Ready, FillRemainder::None))
        {
            self.unpin(&chunk.space.pointers);
        }
        if !matches!(rest, FillRemainder::Key(_)) {
            self.release_fill(target, fill.claim);
            self.end_favour(target.id, fill.bytes() as u64);
        }
        rest
    }

    /// Decides what becomes of a chunk that is in the cache. If the backing device's copy is
    /// durable, its key enters the tree. Otherwise it is parked until it is, and takes over the
    /// chunk's pin. It is dropped if there was a write to the range since its claim was entered.
    fn fate(&mut self, target: &Target, chunk: &Chunk, fill: &Fill) -> CleanOutcome {
        let volume = self.volumes.get(target.id);
        if volume.is_some_and(|volume| volume.ranges.fill_is_good(fill.claim)) {
            return parked::park(self, target, chunk, fill.stamp);
        }
        self.fill_has_collided(target.id);
        CleanOutcome::Void
    }

    /// Puts the key of a fill into the tree; returns what is left of it.
    fn index(&mut self, target: &Target, (fill, chunk): (&Fill, &Chunk)) -> FillRemainder {
        let key = chunk.key(target.inode.expect("only attached volumes are cached"), false);
        if self.failed.is_some() {
            return FillRemainder::Key(key);
        }
        match self.insert_in(fill.leaf, &key, InsertKind::Fill) {
            Attempt::Done(upto) => key.cut(upto, key.end).map_or(FillRemainder::None, FillRemainder::Key),
            // A fill does not wait for the journal: nothing of it is recorded.
            Attempt::Needs(Need::Journal) => unreachable!("a fill is not journalled"),
            Attempt::Needs(_) => FillRemainder::Key(key),
        }
    }
}

/// Returns the buffer that a miss is read into. If a fill follows, its data is copied from there,
/// which foreign memory does not allow; the read then uses a buffer of our own. Also returns the
/// foreign memory, for [`give_back`].
pub(super) fn land(set: &CacheSet, fills: bool, buffer: Buffer) -> (Option<Buffer>, Buffer) {
    if !fills || buffer.lent().is_none() {
        return (None, buffer);
    }
    let own = set.inner.stock.borrow_mut().take(buffer.len());
    (Some(buffer), own)
}

/// Returns the memory of the request, with the data that was read.
pub(super) fn give_back(set: &CacheSet, lent: Option<Buffer>, landed: Buffer, is_read: bool) -> Buffer {
    let Some(mut lent) = lent else { return landed };
    if is_read {
        lent.put(landed.as_slice());
    }
    set.inner.stock.borrow_mut().put(landed);
    lent
}

/// Combines a fill with its data, a copy of `data`.
pub(super) fn with_data(set: &CacheSet, target: Target, fill: Fill, data: &Buffer) -> FillData {
    let bytes = fill.bytes();
    let mut copy = set.inner.stock.borrow_mut().take(bytes);
    copy.as_mut_slice().copy_from_slice(&data.as_slice()[..bytes]);
    FillData { target, fill, payload: copy.freeze() }
}

impl CacheSet {
    /// Puts data that was read into the cache; its reader does not wait for that.
    pub(super) fn begin_to_fill(&self, fill: FillData) {
        // A fill is optional, so it does not wait for space.
        let Some((chunk, left)) = self.with(|s| s.take_fill_space(&fill.fill)) else {
            let set = self.clone();
            return self.env().spawn(async move { set.fill_in_steps(fill).await });
        };
        self.tell_of_space(left);
        let sector = chunk.sector();
        let payload = fill.payload.clone();
        let filling = FillInFlight { of: fill, chunk, began: self.env().now() };
        let place = self.inner.under_way.borrow_mut().fills.insert(filling);
        self.write_for(sector, payload, InFlightSlot::Fill(place));
    }

    /// Handles the completion of the write for the fill in slot `place`.
    pub(super) fn fill_ended(&self, place: usize, written: Result<(), IoError>) {
        let FillInFlight { of, chunk, began } = self.inner.under_way.borrow_mut().fills.remove(place);
        match self.with_telling(|s| s.end_fill(&of.target, (&of.fill, &chunk), (began, &written))) {
            FillRemainder::None => {}
            FillRemainder::Parked => self.signals().parked_work.notify_all(),
            FillRemainder::Key(key) => {
                let set = self.clone();
                return self.env().spawn(async move {
                    insert::insert_clean(&set, &of.target, &key, of.fill.claim).await;
                    set.end_fill_in_steps(of);
                });
            }
        }
        self.put_fill_away(of.payload);
    }

    /// Does the same for a fill that is not in one piece.
    async fn fill_in_steps(&self, of: FillData) {
        let FillData { target, fill, payload } = &of;
        let chunks = self.take_chunks(DataClass::Clean, fill.range);
        for (chunk, written) in self.write_chunks(chunks, fill.range.start, payload, WriteCause::Fill).await {
            match written.map(|()| self.with(|s| s.fate(target, &chunk, fill))) {
                Ok(CleanOutcome::Ready) => {
                    let key = chunk.key(target.inode.expect("only attached volumes are cached"), false);
                    insert::insert_clean(self, target, &key, fill.claim).await;
                }
                Ok(CleanOutcome::Parked) => self.signals().parked_work.notify_all(),
                Ok(CleanOutcome::Void) | Err(_) => self.release_chunks(&[chunk]),
            }
        }
        self.end_fill_in_steps(of);
    }

    fn end_fill_in_steps(&self, of: FillData) {
        let FillData { target, fill, payload } = of;
        self.with(|s| {
            s.release_fill(&target, fill.claim);
            s.end_favour(target.id, fill.bytes() as u64);
        });
        self.put_fill_away(payload);
    }

    /// Returns its memory to the pool.
    fn put_fill_away(&self, payload: Payload) {
        self.inner.stock.borrow_mut().put_payload(payload);
        self.signals().ranges.notify_all();
    }
}
