//! Serves writes of one piece that go to the cache alone, in a range where nothing else is in
//! progress, without a task. Most writes are of this kind. The data is written between two
//! transitions. A write that needs more is served step by step (`write`), and so is the rest of a
//! write that meets an obstacle.

use crate::btree::cache::LeafHint;
use crate::btree::{Attempt, InsertKind};
use crate::cache_writes::WriteCause;
use crate::error::{Error, ErrorContext};
use crate::latency::RequestPath;
use crate::request::inflight::{InFlightSlot, ReplyTo, RequestOrigin, Submission};
use crate::request::insert::{Chunk, SpaceLeft};
use crate::request::ranges::Claim;
use crate::request::without_cache::from_queue;
use crate::request::write::{self, RangeState, WriteMode};
use crate::request::{Reply, Request, SectorRange, Target};
use crate::set::CacheSet;
use crate::space::DataClass;
use crate::state::State;
use crate::volume::backing_flushes::RequestToken;
use bcached_env::{IoError, Payload, Time};
use bcached_format::{Key, Position};
use core::cell::Cell;

/// A write that has begun: it has its range and its space.
pub struct FastWrite {
    range: SectorRange,
    claim: Claim,
    chunk: Chunk,
    survey: RangeState,
    /// The leaf that its key enters.
    leaf: LeafHint,
    /// The volume had no dirty data.
    is_first: bool,
    left: SpaceLeft,
}

/// Such a write in flight.
pub struct FastWriteInFlight {
    pub(super) target: Target,
    pub(super) asked: Option<RequestToken>,
    pub(super) put: FastWrite,
    pub(super) payload: Payload,
    pub(super) began: Time,
    pub(super) reply_to: ReplyTo,
}

/// How a write has begun.
enum WriteStart {
    /// The data is to be written.
    Write { place: usize, sector: u64, left: SpaceLeft, is_first: bool },
    /// Only counted; it needs a task.
    NeedsTask(Target, Option<RequestToken>),
}

/// How a write ended whose data has been written, or has failed to be.
enum WriteOutcome {
    /// It is complete.
    Complete(Result<(), Error>),
    /// This part of its key is not in the tree.
    KeyLeft(Key),
}

impl State {
    /// Begins a write if it can go to the cache as a whole and at once; otherwise nothing has
    /// changed.
    fn put_at_once(
        &mut self,
        target: &Target,
        range: SectorRange,
        request: &Request,
    ) -> Option<(FastWrite, Payload)> {
        let Request::Write { payload, fua: false, .. } = request else { return None };
        let inode = target.inode?;
        if self.failed.is_some() || !self.note.is_kept() || target.blocks_around(range) != Some(range) {
            return None;
        }
        let volume = self.volumes.get(target.id)?;
        let is_ready = volume.may_cache(Some(inode)) && volume.dirty_marked;
        if !is_ready || !volume.ranges.is_free(range.start, range.end) {
            return None;
        }
        let is_limited = self.lets_in_at_once(target)?;
        let (survey, leaf) = self.survey_whole(inode, range.start, range.end)?;
        let class = DataClass::Dirty(inode);
        if write::way(self, target, range, survey, false) != WriteMode::Back
            || !self.open.fits(class, range.sectors())
        {
            return None;
        }
        let place = Position { inode, offset: range.start };
        let space = self.take_space(class, Some(place), range.sectors())?;
        if is_limited {
            self.dirty_throttle.admit(range.sectors());
        }
        let volume = self.volumes.get_mut(target.id).expect("the volume was found in this transition");
        let claim = volume.ranges.begin_write(range.start, range.end);
        let is_first = target.backing.is_some() && volume.begins_dirty(self.now);
        self.stats.written.add(WriteCause::Data, payload.len());
        let chunk = Chunk { start: range.start, space };
        let put = FastWrite { range, claim, chunk, survey, leaf, is_first, left: self.space_left() };
        Some((put, payload.clone()))
    }

    /// Handles the result of writing the data: puts the key into the tree, if nothing is in the
    /// way, and ends the write.
    fn end_put(
        &mut self,
        target: &Target,
        put: &FastWrite,
        (asked, began): (Option<RequestToken>, Time),
        written: &Result<(), IoError>,
    ) -> WriteOutcome {
        let FastWrite { range, claim, chunk, leaf, .. } = put;
        for pointer in chunk.space.pointers.as_slice() {
            let bytes = usize::try_from(range.sectors() * 512).expect("a request fits in memory");
            self.cache_has_done(pointer.sector(), bytes, written.is_ok());
            self.buckets.written(*pointer);
        }
        self.cache_has_written(self.now.since(began));
        self.buckets.age(range.sectors());
        let key = chunk.key(target.inode.expect("only attached volumes are cached"), true);
        let volume = self.volumes.get(target.id).filter(|volume| volume.may_cache(target.inode));
        // *Dirty* is durable on the backing device: invariant D14.
        let is_ready = volume.is_some_and(|volume| volume.dirty_marked);
        // A failed write is never indexed: invariant D1. Without a note the answer waits for the
        // journal: invariant D6.
        if written.is_err() || !is_ready || self.failed.is_some() || !self.note.is_kept() {
            return WriteOutcome::KeyLeft(key);
        }
        match self.insert_in(Some(*leaf), &key, InsertKind::Journal) {
            Attempt::Done(upto) => {
                if let Some(rest) = key.cut(upto, key.end) {
                    return WriteOutcome::KeyLeft(rest);
                }
            }
            Attempt::Needs(_) => return WriteOutcome::KeyLeft(key),
        }
        self.unpin(&chunk.space.pointers);
        self.stats.write_bytes += range.sectors() * 512;
        if let Some(volume) = self.volumes.get_mut(target.id) {
            volume.ranges.release(*claim);
        }
        target.goes(RequestPath::WriteBack);
        WriteOutcome::Complete(self.end_change(target, (asked, None), Some(*range), Ok(()), began))
    }
}

impl CacheSet {
    /// Begins a write.
    pub(super) fn ask_to_write(
        &self,
        origin: RequestOrigin,
        request: Request,
        reply_to: impl FnOnce() -> ReplyTo,
    ) -> Submission {
        let RequestOrigin { client, volume, began } = origin;
        let started = self.with(|s| {
            let (target, asked, range) = s.begin_request(client, volume, &request)?;
            let put = range.and_then(|range| s.put_at_once(&target, range, &request));
            let Some((put, payload)) = put else {
                return Ok(WriteStart::NeedsTask(target, asked));
            };
            let (left, is_first, sector) = (put.left, put.is_first, put.chunk.sector());
            let putting = FastWriteInFlight { target, asked, put, payload, began, reply_to: reply_to() };
            let place = self.inner.under_way.borrow_mut().puts.insert(putting);
            Ok(WriteStart::Write { place, sector, left, is_first })
        });
        match (started, request) {
            (Ok(WriteStart::Write { place, sector, left, is_first }), Request::Write { payload, .. }) => {
                self.tell_of_space(left);
                if is_first {
                    self.signals().writeback_work.notify_all();
                }
                self.write_for(sector, payload, InFlightSlot::Write(place));
            }
            (Ok(WriteStart::NeedsTask(target, asked)), request) => {
                return origin.rest(request, Ok((target, asked))).into();
            }
            (Err(error), request) => return origin.rest(request, Err(error)).into(),
            (Ok(WriteStart::Write { .. }), _) => unreachable!("only a write is put"),
        }
        Submission::InFlight
    }

    /// Handles the completion of the write that is kept in slot `place`.
    pub(super) fn put_ended(&self, place: usize, written: Result<(), IoError>) {
        let ended = {
            // Used where it lies: moving it takes longer than the work on it.
            let under_way = self.inner.under_way.borrow();
            let FastWriteInFlight { target, put, asked, began, .. } = &under_way.puts[place];
            self.with_telling(|s| s.end_put(target, put, (*asked, *began), &written))
        };
        let take = || self.inner.under_way.borrow_mut().puts.remove(place);
        match ended {
            WriteOutcome::Complete(result) => {
                self.signals().ranges.notify_all();
                let FastWriteInFlight { payload, reply_to, .. } = take();
                // The client may reuse its memory as soon as it has its answer.
                drop(payload);
                reply_to.tell(Reply { result, buffer: None });
            }
            WriteOutcome::KeyLeft(rest) => {
                let (set, putting) = (self.clone(), take());
                self.env().spawn(async move { set.put_in_steps(putting, written, rest).await });
            }
        }
    }

    /// Finishes the write step by step, from where `rest` of its key is not in the tree.
    async fn put_in_steps(&self, putting: FastWriteInFlight, written: Result<(), IoError>, rest: Key) {
        let FastWriteInFlight { target, asked, put, payload, began, reply_to } = putting;
        let FastWrite { range, claim, chunk, survey, .. } = put;
        target.goes(RequestPath::WriteBack);
        let stored = match written {
            Ok(()) => self.put_dirty(&target, rest).await,
            Err(source) => Err(Error::Io { doing: ErrorContext::Data, source }),
        };
        self.release_chunks(&[chunk]);
        let was_stored = stored.is_ok();
        let met = Cell::new(stored.err());
        let flow = async |target: &Target| match met.take() {
            None if was_stored => Ok(None),
            Some(Error::Io { doing: ErrorContext::Data, .. })
                if target.backing.is_some() && target.inode.is_some() =>
            {
                write::write_out(self, target, (range, range), &payload, survey, false).await
            }
            Some(error) if target.inode.is_some() => Err(error),
            None | Some(_) => write::write_anywhere(self, target, range, payload.clone(), false).await,
        };
        let written = from_queue(self, &target, claim, flow).await;
        if written.is_ok() {
            self.with(|s| s.stats.write_bytes += range.sectors() * 512);
        }
        let (result, unproven) = match written {
            Ok(unproven) => (self.outlast_process(&target).await, unproven),
            Err(error) => (Err(error), None),
        };
        let result = self.with(|s| s.end_change(&target, (asked, unproven), Some(range), result, began));
        self.signals().ranges.notify_all();
        drop(payload);
        reply_to.tell(Reply { result, buffer: None });
    }
}
