//! Serves reads of one piece, cached or not, without a task. Most reads are of this kind. A read of
//! several pieces, or one that needs something that is not in memory, is served step by step
//! (`read`).

use crate::btree::Content;
use crate::btree::cache::Leaf;
use crate::request::fast_miss::Missing;
use crate::request::inflight::{Asks, Begun, Kept, Whom};
use crate::request::read::{self, Cached, Ended, Sources};
use crate::request::{Range, Reply, Request, Target};
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::epoch::Asked;
use bcached_env::{Buffer, IoError, Time};

/// A read of cached data that is in flight.
pub struct Hit {
    pub(super) target: Target,
    pub(super) cached: Cached,
    pub(super) began: Time,
    pub(super) whom: Whom,
}

/// How a read of one piece has begun.
enum Started {
    /// Read from the cache device: the slot of the request, and the first sector.
    Hit(usize, u64),
    /// Read from the backing device: the slot of the request.
    Miss(usize),
    /// Only counted; it needs a task.
    InSteps(Target, Option<Asked>),
}

impl State {
    /// Returns the content of `range`, if it is one piece; otherwise nothing has changed.
    fn piece(&mut self, target: &Target, range: Range) -> Option<(Content, Leaf)> {
        let inode = target.inode?;
        if target.blocks_around(range) != Some(range) {
            return None;
        }
        self.whole(inode, range.start, range.end)
    }
}

impl CacheSet {
    /// Begins a read.
    pub(super) fn ask_to_read(&self, asks: Asks, request: Request, whom: impl FnOnce() -> Whom) -> Begun {
        let Asks { client, volume, began } = asks;
        let started = self.with(|s| {
            let (target, asked, range) = s.begin_request(client, volume, &request)?;
            let piece = range.and_then(|range| Some((range, s.piece(&target, range)?)));
            let mut under_way = self.inner.under_way.borrow_mut();
            Ok(match piece {
                Some((range, (Content::Cached { pointers, dirty }, _))) => {
                    s.begin_to_read(&pointers);
                    let cached = Cached::new(range, pointers, dirty);
                    let sector = cached.sector();
                    Started::Hit(under_way.hits.insert(Hit { target, cached, began, whom: whom() }), sector)
                }
                Some((range, (Content::Hole, leaf))) => match s.begin_miss(&target, range, leaf) {
                    Some(miss) => {
                        let missing = Missing { target, miss, began, lent: None, whom: whom() };
                        Started::Miss(under_way.misses.insert(missing))
                    }
                    None => Started::InSteps(target, asked),
                },
                None => Started::InSteps(target, asked),
            })
        });
        match (started, request) {
            (Ok(Started::Hit(place, sector)), Request::Read { buffer, .. }) => {
                self.read_for(self.cache(), sector, buffer, Kept::Hit(place));
            }
            (Ok(Started::Miss(place)), Request::Read { buffer, .. }) => self.begin_to_miss(place, buffer),
            (Ok(Started::InSteps(target, asked)), request) => {
                return asks.rest(request, Ok((target, asked))).into();
            }
            (Err(error), request) => return asks.rest(request, Err(error)).into(),
            (Ok(Started::Hit(..) | Started::Miss(_)), _) => unreachable!("only a read is a hit or a miss"),
        }
        Begun::UnderWay
    }

    /// Handles the completion of the read that is kept in slot `place`.
    pub(super) fn hit_ended(&self, place: usize, read: Result<(), IoError>, buffer: Buffer) {
        let ended = {
            // Used where it lies: moving it takes longer than the work on it.
            let under_way = self.inner.under_way.borrow();
            let hit = &under_way.hits[place];
            self.with(|s| {
                let ended = s.read_ended(&hit.cached, hit.began, &read);
                if matches!(ended, Ended::Fine) {
                    s.end_hit(&hit.target, &hit.cached, hit.began);
                }
                ended
            })
        };
        let take = || self.inner.under_way.borrow_mut().hits.remove(place);
        if !matches!(ended, Ended::Fine) {
            let (set, hit) = (self.clone(), take());
            return self.env().spawn(async move { set.hit_in_doubt(hit, ended, read, buffer).await });
        }
        let Hit { whom, .. } = take();
        self.signals().ranges.notify_all();
        whom.tell(Reply { result: Ok(()), buffer: Some(buffer) });
    }

    async fn hit_in_doubt(&self, hit: Hit, ended: Ended, read: Result<(), IoError>, buffer: Buffer) {
        let Hit { target, cached, began, whom } = hit;
        let (result, buffer) = read::in_doubt(self, &target, cached, ended, read, buffer).await;
        self.with(|s| match result {
            Ok(()) => s.end_hit(&target, &cached, began),
            Err(_) => s.end_read(&target, began, false),
        });
        self.signals().ranges.notify_all();
        whom.tell(Reply { result, buffer: Some(buffer) });
    }
}

impl State {
    /// Ends a cache hit that has its data.
    fn end_hit(&mut self, target: &Target, cached: &Cached, began: Time) {
        read::count(self, target, Sources::of_cache(cached.sectors()));
        self.end_read(target, began, true);
    }
}
