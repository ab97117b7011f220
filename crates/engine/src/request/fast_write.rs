//! Serves writes of one piece that go to the cache alone, in a range where nothing else is in
//! progress, without a task. Most writes are of this kind. The data is written between two
//! transitions. A write that needs more is served step by step (`write`), and so is the rest of a
//! write that meets an obstacle.

use crate::btree::cache::Leaf;
use crate::btree::{Attempt, Record};
use crate::cache_writes::Cause;
use crate::error::{Doing, Error};
use crate::latency::Path;
use crate::request::inflight::{Asks, Begun, Kept, Whom};
use crate::request::insert::{Chunk, Left};
use crate::request::ranges::Claim;
use crate::request::uncached::from_queue;
use crate::request::write::{self, Survey, Way};
use crate::request::{Range, Reply, Request, Target};
use crate::set::CacheSet;
use crate::space::Class;
use crate::state::State;
use crate::volume::epoch::Asked;
use bcached_env::{IoError, Payload, Time};
use bcached_format::{Key, Position};
use core::cell::Cell;

/// A write that has begun: it has its range and its space.
pub struct Put {
    range: Range,
    claim: Claim,
    chunk: Chunk,
    survey: Survey,
    /// The leaf that its key enters.
    leaf: Leaf,
    /// The volume had no dirty data.
    is_first: bool,
    left: Left,
}

/// Such a write in flight.
pub struct Putting {
    pub(super) target: Target,
    pub(super) asked: Option<Asked>,
    pub(super) put: Put,
    pub(super) payload: Payload,
    pub(super) began: Time,
    pub(super) whom: Whom,
}

/// How a write has begun.
enum Started {
    /// The data is to be written.
    Put { place: usize, sector: u64, left: Left, is_first: bool },
    /// Only counted; it needs a task.
    InSteps(Target, Option<Asked>),
}

/// How a write ended whose data has been written, or has failed to be.
enum Ended {
    /// It is complete.
    Well(Result<(), Error>),
    /// This part of its key is not in the tree.
    Without(Key),
}

impl State {
    /// Begins a write if it can go to the cache as a whole and at once; otherwise nothing has
    /// changed.
    fn put_at_once(&mut self, target: &Target, range: Range, request: &Request) -> Option<(Put, Payload)> {
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
        let class = Class::Dirty(inode);
        if write::way(self, target, range, survey, false) != Way::Back
            || !self.open.fits(class, range.sectors())
        {
            return None;
        }
        let place = Position { inode, offset: range.start };
        let space = self.take_space(class, Some(place), range.sectors())?;
        if is_limited {
            self.room.admit(range.sectors());
        }
        let volume = self.volumes.get_mut(target.id).expect("the volume was found in this transition");
        let claim = volume.ranges.begin_write(range.start, range.end);
        let is_first = target.backing.is_some() && volume.begins_dirty(self.now);
        self.stats.written.add(Cause::Data, payload.len());
        let chunk = Chunk { start: range.start, space };
        let put = Put { range, claim, chunk, survey, leaf, is_first, left: self.space_left() };
        Some((put, payload.clone()))
    }

    /// Handles the result of writing the data: puts the key into the tree, if nothing is in the
    /// way, and ends the write.
    fn end_put(
        &mut self,
        target: &Target,
        put: &Put,
        (asked, began): (Option<Asked>, Time),
        written: &Result<(), IoError>,
    ) -> Ended {
        let Put { range, claim, chunk, leaf, .. } = put;
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
            return Ended::Without(key);
        }
        match self.insert_in(Some(*leaf), &key, Record::Journal) {
            Attempt::Done(upto) => {
                if let Some(rest) = key.cut(upto, key.end) {
                    return Ended::Without(rest);
                }
            }
            Attempt::Needs(_) => return Ended::Without(key),
        }
        self.unpin(&chunk.space.pointers);
        self.stats.write_bytes += range.sectors() * 512;
        if let Some(volume) = self.volumes.get_mut(target.id) {
            volume.ranges.release(*claim);
        }
        target.goes(Path::WriteBack);
        Ended::Well(self.end_change(target, (asked, None), Some(*range), Ok(()), began))
    }
}

impl CacheSet {
    /// Begins a write.
    pub(super) fn ask_to_write(&self, asks: Asks, request: Request, whom: impl FnOnce() -> Whom) -> Begun {
        let Asks { client, volume, began } = asks;
        let started = self.with(|s| {
            let (target, asked, range) = s.begin_request(client, volume, &request)?;
            let put = range.and_then(|range| s.put_at_once(&target, range, &request));
            let Some((put, payload)) = put else {
                return Ok(Started::InSteps(target, asked));
            };
            let (left, is_first, sector) = (put.left, put.is_first, put.chunk.sector());
            let putting = Putting { target, asked, put, payload, began, whom: whom() };
            let place = self.inner.under_way.borrow_mut().puts.insert(putting);
            Ok(Started::Put { place, sector, left, is_first })
        });
        match (started, request) {
            (Ok(Started::Put { place, sector, left, is_first }), Request::Write { payload, .. }) => {
                self.tell_of_space(left);
                if is_first {
                    self.signals().writeback_work.notify_all();
                }
                self.write_for(sector, payload, Kept::Put(place));
            }
            (Ok(Started::InSteps(target, asked)), request) => {
                return asks.rest(request, Ok((target, asked))).into();
            }
            (Err(error), request) => return asks.rest(request, Err(error)).into(),
            (Ok(Started::Put { .. }), _) => unreachable!("only a write is put"),
        }
        Begun::UnderWay
    }

    /// Handles the completion of the write that is kept in slot `place`.
    pub(super) fn put_ended(&self, place: usize, written: Result<(), IoError>) {
        let ended = {
            // Used where it lies: moving it takes longer than the work on it.
            let under_way = self.inner.under_way.borrow();
            let Putting { target, put, asked, began, .. } = &under_way.puts[place];
            self.with_telling(|s| s.end_put(target, put, (*asked, *began), &written))
        };
        let take = || self.inner.under_way.borrow_mut().puts.remove(place);
        match ended {
            Ended::Well(result) => {
                self.signals().ranges.notify_all();
                let Putting { payload, whom, .. } = take();
                // The client may reuse its memory as soon as it has its answer.
                drop(payload);
                whom.tell(Reply { result, buffer: None });
            }
            Ended::Without(rest) => {
                let (set, putting) = (self.clone(), take());
                self.env().spawn(async move { set.put_in_steps(putting, written, rest).await });
            }
        }
    }

    /// Finishes the write step by step, from where `rest` of its key is not in the tree.
    async fn put_in_steps(&self, putting: Putting, written: Result<(), IoError>, rest: Key) {
        let Putting { target, asked, put, payload, began, whom } = putting;
        let Put { range, claim, chunk, survey, .. } = put;
        target.goes(Path::WriteBack);
        let stored = match written {
            Ok(()) => self.put_dirty(&target, rest).await,
            Err(source) => Err(Error::Io { doing: Doing::Data, source }),
        };
        self.release_chunks(&[chunk]);
        let was_stored = stored.is_ok();
        let met = Cell::new(stored.err());
        let flow = async |target: &Target| match met.take() {
            None if was_stored => Ok(None),
            Some(Error::Io { doing: Doing::Data, .. })
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
        whom.tell(Reply { result, buffer: None });
    }
}
