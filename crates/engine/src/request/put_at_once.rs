//! A write that goes to the cache alone, in one piece, with nobody else in its range: most writes are. It begins in one transition and ends in
//! another; between them its data is written. What wants more than that is done step by step (`write`), as is the rest of a write that meets
//! something on its way.

use crate::btree::cache::Leaf;
use crate::btree::{Attempt, Record};
use crate::error::{Doing, Error};
use crate::latency::Path;
use crate::request::insert::{Chunk, Left};
use crate::request::ranges::Claim;
use crate::request::uncached::from_queue;
use crate::request::write::{self, Survey, Way};
use crate::request::{Range, Reply, Request, Target};
use crate::set::CacheSet;
use crate::space::Class;
use crate::state::State;
use crate::volume::epoch::Asked;
use crate::written::Cause;
use alloc::boxed::Box;
use bcached_env::{IoError, Payload, Time};
use bcached_format::{Key, Position};
use core::cell::Cell;

/// A write that has begun so: it has its range and its space.
pub struct Put {
    range: Range,
    claim: Claim,
    chunk: Chunk,
    survey: Survey,
    /// Where its key goes.
    leaf: Leaf,
    /// Nothing of the volume was dirty.
    is_first: bool,
    left: Left,
}

/// How one ended, of which the data has been written, or not.
enum Ended {
    /// As it should.
    Well(Result<(), Error>),
    /// This of its key is not in the tree.
    Without(Key),
}

impl State {
    /// Begins a write, if it can go to the cache as a whole and at once; else nothing has changed.
    pub(super) fn put_at_once(&mut self, target: &Target, request: &Request) -> Option<Put> {
        let Request::Write { sector, payload, fua: false } = request else { return None };
        let inode = target.inode?;
        let range = target.range(*sector, payload.len() as u64 / 512).ok()?;
        if self.failed.is_some() || target.blocks_around(range) != Some(range) {
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
            || self.open.left(class) < range.sectors()
        {
            return None;
        }
        let place = Position { inode, offset: range.start };
        let space = self.take_space(class, Some(place), range.sectors())?;
        if is_limited {
            self.room.admit(range.sectors());
        }
        let volume = self.volumes.get_mut(target.id).expect("it was there");
        let claim = volume.ranges.begin_write(range.start, range.end);
        let is_first = target.backing.is_some() && volume.begins_dirty(self.now);
        self.stats.written.add(Cause::Data, payload.len());
        Some(Put {
            range,
            claim,
            chunk: Chunk { start: range.start, space },
            survey,
            leaf,
            is_first,
            left: self.space_left(),
        })
    }

    /// The data of a write has been written, so: its key goes into the tree, if nothing is in the way of that, and it ends.
    fn end_put(
        &mut self,
        target: &Target,
        put: &Put,
        (asked, began): (Option<Asked>, Time),
        written: &Result<(), IoError>,
        may_go_on: bool,
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
        let is_ready = volume.is_some_and(|volume| volume.dirty_marked);
        // A failed write is never indexed.
        if written.is_err() || !may_go_on || !is_ready || self.failed.is_some() {
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
    /// The rest of such a write, which `began` then.
    pub(super) async fn serve_put(
        &self,
        target: &Target,
        asked: Option<Asked>,
        put: &Put,
        payload: Payload,
        began: Time,
    ) -> Reply {
        self.tell_of_space(put.left);
        if put.is_first {
            self.signals().writeback_work.notify_all();
        }
        let sector = put.chunk.space.pointers.as_slice().first().expect("space is somewhere").sector();
        let written = self.cache().write(sector, payload.clone()).await;
        let may_go_on = self.env().has_breath();
        let (ended, told) = self.with(|s| {
            let had_failed = s.failed.is_some();
            let ended = s.end_put(target, put, (asked, began), &written, may_go_on);
            (ended, s.is_to_be_told(had_failed))
        });
        self.tell_if(told);
        let result = match ended {
            Ended::Well(result) => {
                self.signals().ranges.notify_all();
                result
            }
            Ended::Without(rest) => {
                Box::pin(self.put_in_steps(target, (asked, began), put, payload, written, rest)).await
            }
        };
        Reply { result, buffer: None }
    }

    /// The same step by step, from where `rest` of its key is not in the tree.
    async fn put_in_steps(
        &self,
        target: &Target,
        (asked, began): (Option<Asked>, Time),
        put: &Put,
        payload: Payload,
        written: Result<(), IoError>,
        rest: Key,
    ) -> Result<(), Error> {
        let Put { range, claim, chunk, survey, .. } = *put;
        target.goes(Path::WriteBack);
        let stored = match written {
            Ok(()) => self.put_dirty(target, rest).await,
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
        let written = from_queue(self, target, claim, flow).await;
        if written.is_ok() {
            self.with(|s| s.stats.write_bytes += range.sectors() * 512);
        }
        let (result, unproven) = match written {
            Ok(unproven) => (Ok(()), unproven),
            Err(error) => (Err(error), None),
        };
        let result = self.with(|s| s.end_change(target, (asked, unproven), Some(range), result, began));
        self.signals().ranges.notify_all();
        result
    }
}
