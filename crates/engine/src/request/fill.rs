//! A fill: what was read from the backing device for somebody, who has his answer, goes into the cache. It is a favour: nobody waits for it,
//! it waits for nothing itself but for its place on the device, and if it fails it is forgotten.
//!
//! Most are of one piece, for which there is space: these begin in one transition and end in another. What wants more than that is done step
//! by step, as is the rest of one that meets something on its way.

use crate::btree::cache::Leaf;
use crate::btree::{Attempt, Need, Record};
use crate::request::insert::{self, Chunk, Left};
use crate::request::parked::{self, Clean};
use crate::request::ranges::Claim;
use crate::request::{REQUESTS_MAX, Range, Target};
use crate::set::CacheSet;
use crate::space::Class;
use crate::state::State;
use crate::volume::VolumeId;
use crate::volume::epoch::Stamp;
use crate::written::Cause;
use alloc::boxed::Box;
use bcached_env::{Buffer, IoError, Payload, Time};
use bcached_format::Key;

/// Memory for fills in flight, for all volumes, in bytes; beyond, a miss just does not fill.
const FILL_BYTES_MAX: u64 = 64 << 20;
/// Fills in flight, for all volumes: each is a task. As many as requests, whose misses they are; beyond, a miss just does not fill.
pub const FILLS_MAX: usize = REQUESTS_MAX;

/// A fill that has begun.
pub(super) struct Fill {
    range: Range,
    claim: Claim,
    /// Of the read that brought its data.
    stamp: Stamp,
    /// Where its key goes, if that is known.
    leaf: Option<Leaf>,
}

impl Fill {
    /// The same of what has been missing in `leaf`.
    pub(super) fn of(self, leaf: Leaf) -> Self {
        Self { leaf: Some(leaf), ..self }
    }

    /// Of its data.
    fn bytes(&self) -> usize {
        usize::try_from(self.range.sectors() * 512).expect("a fill fits in memory")
    }
}

/// What is left of a fill whose data has been written, or not.
enum Rest {
    /// Nothing.
    None,
    /// Nothing, but that it waits for a flush.
    Parked,
    /// This is to enter the tree.
    Key(Key),
}

impl State {
    /// There is a place and memory for a favour more, of so many bytes of volume `id`: it begins, to be ended by [`State::end_favour`].
    pub(super) fn begin_favour(&mut self, id: VolumeId, bytes: u64) -> bool {
        let has_place = self.fill_bytes < FILL_BYTES_MAX && self.fills < FILLS_MAX;
        if has_place {
            self.begin_background(id);
            self.fills += 1;
            self.fill_bytes += bytes;
        }
        has_place
    }

    /// The end of that. The caller rings `ranges`.
    pub(super) fn end_favour(&mut self, id: VolumeId, bytes: u64) {
        self.fills -= 1;
        self.fill_bytes -= bytes;
        self.end_background(id);
    }

    /// What `claim` was entered for has been read, with that stamp: a fill begins, if it may. If not its claim is released, and the caller
    /// rings `ranges`.
    pub(super) fn begin_fill(&mut self, target: &Target, claim: Claim, stamp: Option<Stamp>) -> Option<Fill> {
        let range = self.volumes.get(target.id)?.ranges.range_of(claim)?;
        let range = Range { start: range.0, end: range.1 };
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

    /// Space for a fill, if that is there as a whole and at once.
    fn take_fill_space(&mut self, fill: &Fill) -> Option<(Chunk, Left)> {
        let sectors = fill.range.sectors();
        if self.open.left(Class::Clean) < sectors {
            return None;
        }
        let space = self.take_space(Class::Clean, None, sectors)?;
        self.stats.written.add(Cause::Fill, fill.bytes());
        Some((Chunk { start: fill.range.start, space }, self.space_left()))
    }

    /// The data of a fill has been written, so: its key goes into the tree, if nothing is in the way of that.
    fn end_fill(
        &mut self,
        target: &Target,
        (fill, chunk): (&Fill, &Chunk),
        (begun, written): (Time, &Result<(), IoError>),
        may_go_on: bool,
    ) -> Rest {
        for pointer in chunk.space.pointers.as_slice() {
            self.cache_has_done(pointer.sector(), fill.bytes(), written.is_ok());
            self.buckets.written(*pointer);
        }
        self.cache_has_written(self.now.since(begun));
        self.buckets.age(fill.range.sectors());
        let fate = if written.is_ok() { self.fate(target, chunk, fill) } else { Clean::Void };
        let rest = match fate {
            Clean::Ready => self.index(target, (fill, chunk), may_go_on),
            Clean::Parked => Rest::Parked,
            Clean::Void => Rest::None,
        };
        if matches!(fate, Clean::Void) || matches!((fate, &rest), (Clean::Ready, Rest::None)) {
            self.unpin(&chunk.space.pointers);
        }
        if !matches!(rest, Rest::Key(_)) {
            self.release_fill(target, fill.claim);
            self.end_favour(target.id, fill.bytes() as u64);
        }
        rest
    }

    /// What becomes of a chunk that is in the cache: its key enters the tree if what it copies is durable on the backing device, else it
    /// is parked until it is, and has the chunk's pin. Dropped if somebody wrote to the range since its claim was entered.
    fn fate(&mut self, target: &Target, chunk: &Chunk, fill: &Fill) -> Clean {
        let volume = self.volumes.get(target.id);
        if volume.is_some_and(|volume| volume.ranges.fill_is_good(fill.claim)) {
            return parked::park(self, target, chunk, fill.stamp);
        }
        self.fill_has_collided(target.id);
        Clean::Void
    }

    /// Puts the key of a fill into the tree; what is left of it.
    fn index(&mut self, target: &Target, (fill, chunk): (&Fill, &Chunk), may_go_on: bool) -> Rest {
        let key = chunk.key(target.inode.expect("only attached volumes are cached"), false);
        if !may_go_on || self.failed.is_some() {
            return Rest::Key(key);
        }
        match self.insert_in(fill.leaf, &key, Record::Fill) {
            Attempt::Done(upto) => key.cut(upto, key.end).map_or(Rest::None, Rest::Key),
            // A favour does not make the tree's caller wait for the journal: nothing of it is recorded.
            Attempt::Needs(Need::Journal) => unreachable!("a fill is not journalled"),
            Attempt::Needs(_) => Rest::Key(key),
        }
    }
}

/// Where a miss is read to instead of `buffer` if a fill follows: that is copied from it, which lent memory does not let us. With the
/// memory that is lent, for [`give_back`].
pub(super) fn land(set: &CacheSet, fills: bool, buffer: Buffer) -> (Option<Buffer>, Buffer) {
    if !fills || buffer.lent().is_none() {
        return (None, buffer);
    }
    let own = set.inner.stock.borrow_mut().take(buffer.len());
    (Some(buffer), own)
}

/// The memory of the request, with what was read.
pub(super) fn give_back(set: &CacheSet, lent: Option<Buffer>, landed: Buffer, is_read: bool) -> Buffer {
    let Some(mut lent) = lent else { return landed };
    if is_read {
        lent.put(landed.as_slice());
    }
    set.inner.stock.borrow_mut().put(landed);
    lent
}

/// Starts putting what was read into the cache. The caller has its answer first.
pub(super) fn spawn(set: &CacheSet, target: Target, fill: Fill, data: &Buffer) {
    let bytes = fill.bytes();
    let mut copy = set.inner.stock.borrow_mut().take(bytes);
    copy.as_mut_slice().copy_from_slice(&data.as_slice()[..bytes]);
    let payload = copy.freeze();
    let set = set.clone();
    set.env().clone().spawn(async move {
        put(&set, &target, &fill, &payload).await;
        set.inner.stock.borrow_mut().put_payload(payload);
        set.signals().ranges.notify_all();
    });
}

async fn put(set: &CacheSet, target: &Target, fill: &Fill, payload: &Payload) {
    // No waiting for space: a clean insert is a favour, not a duty.
    let Some((chunk, left)) = set.with(|s| s.take_fill_space(fill)) else {
        return Box::pin(put_in_steps(set, target, fill, payload)).await;
    };
    set.tell_of_space(left);
    let begun = set.env().now();
    let sector = chunk.space.pointers.as_slice().first().expect("space is somewhere").sector();
    let written = set.cache().write(sector, payload.clone()).await;
    let may_go_on = set.env().has_breath();
    let (rest, told) = set.with(|s| {
        let had_failed = s.failed.is_some();
        let rest = s.end_fill(target, (fill, &chunk), (begun, &written), may_go_on);
        (rest, s.is_to_be_told(had_failed))
    });
    set.tell_if(told);
    match rest {
        Rest::None => {}
        Rest::Parked => set.signals().parked_work.notify_all(),
        Rest::Key(key) => Box::pin(index_in_steps(set, target, fill, key)).await,
    }
}

/// The same for what is not in one piece.
async fn put_in_steps(set: &CacheSet, target: &Target, fill: &Fill, payload: &Payload) {
    let chunks = set.take_chunks(Class::Clean, fill.range);
    for (chunk, written) in set.write_chunks(chunks, fill.range.start, payload, Cause::Fill).await {
        match written.map(|()| set.with(|s| s.fate(target, &chunk, fill))) {
            Ok(Clean::Ready) => {
                let key = chunk.key(target.inode.expect("only attached volumes are cached"), false);
                insert::insert_clean(set, target, &key, fill.claim).await;
            }
            Ok(Clean::Parked) => set.signals().parked_work.notify_all(),
            Ok(Clean::Void) | Err(_) => set.release_chunks(&[chunk]),
        }
    }
    end(set, target, fill);
}

async fn index_in_steps(set: &CacheSet, target: &Target, fill: &Fill, rest: Key) {
    insert::insert_clean(set, target, &rest, fill.claim).await;
    end(set, target, fill);
}

fn end(set: &CacheSet, target: &Target, fill: &Fill) {
    set.with(|s| {
        s.release_fill(target, fill.claim);
        s.end_favour(target.id, fill.bytes() as u64);
    });
}
