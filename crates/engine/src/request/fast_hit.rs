//! Serves reads of one piece, cached or not, without a task. Most reads are of this kind. A read of
//! several pieces, or one that needs something that is not in memory, is served step by step
//! (`read`).

use crate::btree::Content;
use crate::btree::cache::LeafHint;
use crate::request::fast_miss::MissInFlight;
use crate::request::inflight::{InFlightSlot, ReplyTo, RequestOrigin, Submission};
use crate::request::read::{self, CachedPiece, HitOutcome, ReadSources};
use crate::request::{Reply, Request, SectorRange, Target};
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::backing_flushes::RequestToken;
use bcached_env::{Buffer, IoError, Time};

/// A read of cached data that is in flight.
pub struct HitInFlight {
    pub(super) target: Target,
    pub(super) cached: CachedPiece,
    pub(super) began: Time,
    pub(super) reply_to: ReplyTo,
}

/// How a read of one piece has begun.
enum ReadStart {
    /// Read from the cache device: the slot of the request, and the first sector.
    Hit(usize, u64),
    /// Read from the backing device: the slot of the request.
    Miss(usize),
    /// Only counted; it needs a task.
    NeedsTask(Target, Option<RequestToken>),
}

impl State {
    /// Returns the content of `range`, if it is one piece; otherwise nothing has changed.
    fn piece(&mut self, target: &Target, range: SectorRange) -> Option<(Content, LeafHint)> {
        let inode = target.inode?;
        if target.blocks_around(range) != Some(range) {
            return None;
        }
        self.whole(inode, range.start, range.end)
    }
}

impl CacheSet {
    /// Begins a read.
    pub(super) fn ask_to_read(
        &self,
        origin: RequestOrigin,
        request: Request,
        reply_to: impl FnOnce() -> ReplyTo,
    ) -> Submission {
        let RequestOrigin { client, volume, began } = origin;
        let started = self.with(|s| {
            let (target, asked, range) = s.begin_request(client, volume, &request)?;
            let piece = range.and_then(|range| Some((range, s.piece(&target, range)?)));
            let mut under_way = self.inner.under_way.borrow_mut();
            Ok(match piece {
                Some((range, (Content::Cached { pointers, dirty }, _))) => {
                    s.begin_to_read(&pointers);
                    let cached = CachedPiece::new(range, pointers, dirty);
                    let sector = cached.sector();
                    ReadStart::Hit(
                        under_way.hits.insert(HitInFlight { target, cached, began, reply_to: reply_to() }),
                        sector,
                    )
                }
                Some((range, (Content::Hole, leaf))) => match s.begin_miss(&target, range, leaf) {
                    Some(miss) => {
                        let missing = MissInFlight { target, miss, began, lent: None, reply_to: reply_to() };
                        ReadStart::Miss(under_way.misses.insert(missing))
                    }
                    None => ReadStart::NeedsTask(target, asked),
                },
                None => ReadStart::NeedsTask(target, asked),
            })
        });
        match (started, request) {
            (Ok(ReadStart::Hit(place, sector)), Request::Read { buffer, .. }) => {
                self.read_for(self.cache(), sector, buffer, InFlightSlot::Hit(place));
            }
            (Ok(ReadStart::Miss(place)), Request::Read { buffer, .. }) => self.begin_to_miss(place, buffer),
            (Ok(ReadStart::NeedsTask(target, asked)), request) => {
                return origin.rest(request, Ok((target, asked))).into();
            }
            (Err(error), request) => return origin.rest(request, Err(error)).into(),
            (Ok(ReadStart::Hit(..) | ReadStart::Miss(_)), _) => {
                unreachable!("only a read is a hit or a miss")
            }
        }
        Submission::InFlight
    }

    /// Handles the completion of the read that is kept in slot `place`.
    pub(super) fn hit_ended(&self, place: usize, read: Result<(), IoError>, buffer: Buffer) {
        let ended = {
            // Used where it lies: moving it takes longer than the work on it.
            let under_way = self.inner.under_way.borrow();
            let hit = &under_way.hits[place];
            self.with(|s| {
                let ended = s.read_ended(&hit.cached, hit.began, &read);
                if matches!(ended, HitOutcome::Valid) {
                    s.end_hit(&hit.target, &hit.cached, hit.began);
                }
                ended
            })
        };
        let take = || self.inner.under_way.borrow_mut().hits.remove(place);
        if !matches!(ended, HitOutcome::Valid) {
            let (set, hit) = (self.clone(), take());
            return self.env().spawn(async move { set.hit_in_doubt(hit, ended, read, buffer).await });
        }
        let HitInFlight { reply_to, .. } = take();
        self.signals().ranges.notify_all();
        reply_to.tell(Reply { result: Ok(()), buffer: Some(buffer) });
    }

    async fn hit_in_doubt(
        &self,
        hit: HitInFlight,
        ended: HitOutcome,
        read: Result<(), IoError>,
        buffer: Buffer,
    ) {
        let HitInFlight { target, cached, began, reply_to } = hit;
        let (result, buffer) = read::in_doubt(self, &target, cached, ended, read, buffer).await;
        self.with(|s| match result {
            Ok(()) => s.end_hit(&target, &cached, began),
            Err(_) => s.end_read(&target, began, false),
        });
        self.signals().ranges.notify_all();
        reply_to.tell(Reply { result, buffer: Some(buffer) });
    }
}

impl State {
    /// Ends a cache hit that has its data.
    fn end_hit(&mut self, target: &Target, cached: &CachedPiece, began: Time) {
        read::count(self, target, ReadSources::of_cache(cached.sectors()));
        self.end_read(target, began, true);
    }
}
