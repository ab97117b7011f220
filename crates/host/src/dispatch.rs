//! Carries requests out. One that needs a device which does not work, the cache or a backing
//! device, waits for it or is refused, by the policy of its volume.
//!
//! This is the one queue of waiting requests, between the port and the sets, so it outlives a set
//! that is reopened. It is bounded in requests (for each volume, and for all) and in bytes (by the
//! front end's budget, of which each connection has a part); a request that finds it full fails. A
//! waiting request is tried again from its beginning, as if it came now: nobody has been told that
//! it was carried out, so it does not matter whether some of it was. Waiting requests are therefore
//! carried out after those that did not have to wait, even where both write to one place; a client
//! cannot count on any order while neither is answered.

use crate::Host;
use crate::absence::InFlight;
use crate::retry::Retry;
use crate::translate::{self, Work};
use bcached_engine::{CacheSet, Client, Error, OnError, Reply as EngineReply, Request, Rest, VolumeId};
use bcached_env::sync::{Notify, Permit, Semaphore};
use bcached_env::{Buffer, DiskId, Time};
use bcached_port::{ErrorKind, Operation, Reply};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::Duration;

/// Requests of one volume that wait at most.
const OF_VOLUME_MAX: usize = 512;
/// Requests of all volumes of a set that wait at most: with those in flight no more tasks than the
/// executor has room for.
const OF_ALL_MAX: usize = 4096;

/// How soon a request is tried again that met a place which cannot be read, in a set that works.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// Carries the requests of a host out.
pub struct Dispatcher {
    /// Serves them.
    pub host: Host,
    /// Bounds the requests in flight. Others wait in the port.
    pub room: Semaphore,
    /// Rings when there is room, if [`Dispatcher::find_room`] found none.
    pub freed: Notify,
    is_room_wanted: Cell<bool>,
    waiting: Waiting,
}

/// How far a request has come.
pub enum Stage {
    /// No set has it.
    New(Operation),
    /// This set has begun it, and needs a task for the rest.
    Begun(Attempt, CacheSet, Rest),
    /// The set needed a device that does not work. A read's buffer has come back.
    Trouble(Attempt, Error, Option<Buffer>),
}

/// An attempt at a request, by a set that has or had it.
pub struct Attempt {
    /// The request, for another attempt.
    pub retry: Retry,
    /// [`Host::moves`] when the attempt began.
    pub moves: u64,
    /// Counts it.
    pub in_flight: InFlight,
}

/// What came of an attempt.
pub enum Served {
    /// The request is done, or refused.
    Answered(Reply),
    /// It needs a device that does not work. A read's buffer comes back.
    Trouble(Error, Option<Buffer>),
}

/// How many requests wait, by volume.
#[derive(Default)]
struct Waiting(RefCell<BTreeMap<VolumeId, usize>>);

/// The place of a waiting request.
struct Place<'a>(&'a Waiting, VolumeId);

impl Waiting {
    /// `None`: all places are taken.
    fn take(&self, volume: VolumeId) -> Option<Place<'_>> {
        let mut waiting = self.0.borrow_mut();
        let of_volume = waiting.get(&volume).copied().unwrap_or(0);
        if of_volume >= OF_VOLUME_MAX || waiting.values().sum::<usize>() >= OF_ALL_MAX {
            return None;
        }
        waiting.insert(volume, of_volume + 1);
        Some(Place(self, volume))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut waiting = self.0.0.borrow_mut();
        if let Some(count) = waiting.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.1);
            }
        }
    }
}

impl Dispatcher {
    /// Of this host, as many in flight at once as there is `room` for.
    #[must_use]
    pub fn new(host: Host, room: Semaphore) -> Self {
        let (freed, is_room_wanted) = (Notify::new(), Cell::new(false));
        Self { host, room, freed, is_room_wanted, waiting: Waiting::default() }
    }

    /// Room for one more. `None`: [`Dispatcher::freed`] rings when there is some.
    pub fn find_room(&self) -> Option<Permit> {
        let permit = self.room.try_acquire(1);
        self.is_room_wanted.set(permit.is_none());
        permit
    }

    /// Gives room back, if the request still has it.
    pub fn free_room(&self, permit: Option<Permit>) {
        drop(permit);
        if self.is_room_wanted.take() {
            self.freed.notify_all();
        }
    }

    /// Carries a request out from this stage on, if need be when its volume has the device again
    /// that it needs. A request that waits for that is not in flight, and gives back its `permit`
    /// until then.
    pub async fn answer(&self, client: Client, volume: VolumeId, stage: Stage, permit: Permit) -> Reply {
        let mut permit = Some(permit);
        let reply = self.answer_with(client, volume, stage, &mut permit).await;
        self.free_room(permit);
        reply
    }

    async fn answer_with(
        &self,
        client: Client,
        volume: VolumeId,
        mut stage: Stage,
        permit: &mut Option<Permit>,
    ) -> Reply {
        // A request that has a place keeps it until its answer, so that none that comes later takes
        // it.
        let (mut since, mut place) = (None, None);
        loop {
            let (retry, moves, outcome) = self.go_on(client, volume, stage).await;
            let (error, buffer) = match outcome {
                Served::Answered(reply) => return reply,
                Served::Trouble(error, buffer) => (error, buffer),
            };
            let misses_backing = self.host.misses_backing(&error);
            if !misses_backing {
                self.host.alarm();
            }
            if self.host.moves() != moves && self.host.set_of(volume).is_some() {
                // The volume has moved meanwhile.
                stage = Stage::New(retry.with(buffer));
                continue;
            }
            let until = match misses_backing {
                true => self.host.waits_for_backing(volume),
                false => self.waits_for_cache(volume, &error, &mut since),
            };
            place = place.or_else(|| until.and_then(|_| self.waiting.take(volume)));
            let Some(until) = until.filter(|_| place.is_some()) else {
                return self.refusal(volume, &error, retry.changes_content(), buffer);
            };
            self.free_room(permit.take());
            let works = self.host.set_of(volume).is_some_and(|set| set.failure().is_none());
            let look = if works && !misses_backing { until.min(self.now() + TRY_AGAIN) } else { until };
            self.host.moved_until(moves, look).await;
            if self.now() >= until {
                if misses_backing {
                    self.host.has_waited(volume);
                }
                return self.refusal(volume, &error, retry.changes_content(), buffer);
            }
            *permit = Some(self.room.acquire(1).await);
            stage = Stage::New(retry.with(buffer));
        }
    }

    /// Makes an attempt, or goes on with one: how to make another, [`Host::moves`] when this one
    /// began, and what came of it.
    async fn go_on(&self, client: Client, volume: VolumeId, stage: Stage) -> (Retry, u64, Served) {
        match stage {
            Stage::New(operation) => {
                let (moves, retry) = (self.host.moves(), Retry::of(&operation));
                (retry, moves, self.try_once(client, volume, operation).await)
            }
            Stage::Begun(Attempt { retry, moves, in_flight }, set, rest) => {
                let reply = set.serve_rest(rest).await;
                drop((set, in_flight));
                (retry, moves, self.outcome_of(moves, reply))
            }
            Stage::Trouble(Attempt { retry, moves, .. }, error, buffer) => {
                (retry, moves, Served::Trouble(error, buffer))
            }
        }
    }

    fn now(&self) -> Time {
        self.host.inner().env.now()
    }

    /// Until when a request waits for the cache of its volume; `None`: it does not wait. `since` is
    /// when it first met a place that cannot be read, in a set that works.
    fn waits_for_cache(&self, volume: VolumeId, error: &Error, since: &mut Option<Time>) -> Option<Time> {
        let set = self.host.set_of(volume);
        let options = self.host.options_of(volume);
        // Under the other policies the failed set serves what it can; but while it is being
        // reopened there is none that could.
        let is_moment = set.is_none() && self.host.with(|state| state.is_trying);
        let may_wait = options.on_cache_error == OnError::Freeze || is_moment;
        let works = set.is_some_and(|set| set.failure().is_none());
        let may_pass = if works { error.may_be_awaited() } else { self.host.may_come_back() };
        if !may_wait || !may_pass {
            return None;
        }
        let begun = match works {
            true => *since.get_or_insert_with(|| self.now()),
            false => self.host.waits_since(volume),
        };
        let until = begun + options.freeze_timeout;
        (self.now() < until).then_some(until)
    }

    /// The answer to a request that needs a device and does not wait for it.
    fn refusal(&self, volume: VolumeId, error: &Error, changes: bool, buffer: Option<Buffer>) -> Reply {
        let options = self.host.options_of(volume);
        let policy = match error {
            Error::Failed(_) => Some(options.on_cache_error),
            _ if self.host.misses_backing(error) => Some(options.on_backing_error),
            _ => None,
        };
        let kind = match policy {
            Some(OnError::ReadOnly) if changes => ErrorKind::NotPermitted,
            _ => translate::kind_of(error),
        };
        Reply::failed(kind, buffer)
    }

    async fn try_once(&self, client: Client, volume: VolumeId, operation: Operation) -> Served {
        let is_durable = is_durable(&operation);
        if is_durable && self.host.with(|state| state.owes.remove(&volume)) {
            let reply = EngineReply { result: Err(Error::LostWrites), buffer: None };
            return Served::Answered(translate::reply_of(reply));
        }
        let (work, flushes) = match translate::work_of(operation) {
            Work::Request(work) => (work, false),
            Work::Durable(work) => (work, true),
            Work::Answered(reply) => return Served::Answered(reply),
        };
        let first = self.serve(client, volume, work).await;
        match first {
            Served::Answered(reply) if flushes && reply.result.is_ok() => {
                self.serve(client, volume, Request::Flush).await
            }
            other => other,
        }
    }

    async fn serve(&self, client: Client, volume: VolumeId, work: Request) -> Served {
        let Some((_in_flight, set, moves)) = self.host.enter(volume).await else {
            let buffer = if let Request::Read { buffer, .. } = work { Some(buffer) } else { None };
            return Served::Trouble(self.host.reason(), buffer);
        };
        let reply = set.serve_in_steps(client, volume, work).await;
        drop(set);
        self.outcome_of(moves, reply)
    }

    /// What a set's reply comes to, to a request that the set got at that count of [`Host::moves`].
    #[must_use]
    pub fn outcome_of(&self, moves: u64, reply: EngineReply) -> Served {
        match reply.result {
            Err(error)
                if is_of_cache(&error, self.host.inner().opening.cache.get())
                    || self.host.misses_backing(&error) =>
            {
                Served::Trouble(error, reply.buffer)
            }
            // The volume moved at that moment.
            Err(Error::Stopping | Error::NoVolume) if self.host.moves() != moves => {
                Served::Trouble(self.host.reason(), reply.buffer)
            }
            _ => Served::Answered(translate::reply_of(reply)),
        }
    }
}

/// Whether the cache failed, which is this disk, and not the backing device or the request.
fn is_of_cache(error: &Error, cache: DiskId) -> bool {
    match error {
        Error::Failed(_) | Error::Node { .. } | Error::Inconsistent(_) => true,
        Error::Io { source, .. } => source.disk == cache,
        _ => false,
    }
}

fn is_durable(operation: &Operation) -> bool {
    match operation {
        Operation::Flush => true,
        Operation::Write { fua, .. }
        | Operation::Discard { fua, .. }
        | Operation::WriteZeroes { fua, .. } => *fua,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_engine::Doing;
    use bcached_env::{IoError, IoErrorKind};

    /// Requests that need dirty data wait for a cache that fails, also if what it says makes no
    /// sense.
    #[test]
    fn what_fails_is_the_cache_or_it_is_not() {
        let io = |disk| IoError { kind: IoErrorKind::Io, disk: DiskId(disk), sector: 0 };
        let at = |disk| Error::Io { doing: Doing::Backing, source: io(disk) };
        let is_of_cache = |error: &Error| super::is_of_cache(error, DiskId(0));
        assert!(is_of_cache(&Error::Inconsistent("a btree node is larger than those of its set")));
        assert!(is_of_cache(&Error::Failed(Box::new(Error::LostWrites))));
        assert!(is_of_cache(&at(0)) && !is_of_cache(&at(1)));
        assert!(!is_of_cache(&Error::Stopping));
    }

    #[test]
    fn places_are_limited_for_each_volume_and_for_all() {
        let places = Waiting::default();
        let fill = |volume| -> Vec<_> { std::iter::from_fn(|| places.take(VolumeId(volume))).collect() };
        let mut taken: Vec<Vec<Place<'_>>> = (0..8).map(fill).collect();
        assert!(taken.iter().all(|of_volume| of_volume.len() == OF_VOLUME_MAX));
        assert!(places.take(VolumeId(8)).is_none(), "{OF_ALL_MAX} wait");
        drop(taken.pop());
        assert!(places.take(VolumeId(0)).is_none() && places.take(VolumeId(8)).is_some());
        drop(taken);
        assert!(places.0.borrow().is_empty(), "nobody waits any more");
    }
}
