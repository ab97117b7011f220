//! Carries out requests. A request that needs a failed device, be it the cache or a backing device,
//! waits for the device or is refused, depending on the policy of its volume.
//!
//! This is the only queue of waiting requests. It lies between the port and the sets, so it
//! outlives a set that is reopened. It is bounded in requests (for each volume, and for all) and in
//! bytes (by the front end's budget, of which each connection has a part). A request that finds it
//! full fails.
//!
//! A waiting request is retried from its beginning, as if it had just arrived. It has not been
//! acknowledged, so it does not matter whether part of it was carried out. Waiting requests are
//! therefore carried out after those that did not have to wait, even where both write to the same
//! place. A client cannot rely on any order while neither is acknowledged.

use crate::missing_devices::InFlightGuard;
use crate::retry::Retry;
use crate::translate::{self, EngineWork};
use crate::{Host, Limits};
use bcached_engine::{
    CacheSet, ClientId, Error, ErrorPolicy, PendingRequest, Reply as EngineReply, Request, VolumeId,
};
use bcached_env::sync::{Notify, Permit, Semaphore};
use bcached_env::{Buffer, DiskId, Time};
use bcached_port::{ErrorKind, Operation, Reply};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// Carries out the requests of a host.
pub struct Dispatcher {
    /// The host that serves the requests.
    pub host: Host,
    /// Limits the requests in flight. Others wait in the port.
    pub room: Semaphore,
    /// Notified when there is room, if [`Dispatcher::find_room`] found none.
    pub freed: Notify,
    is_room_wanted: Cell<bool>,
    waiting: WaitCounts,
}

/// The source of a request: client, volume and time.
#[derive(Clone, Copy, Debug)]
pub struct RequestSource {
    /// The client.
    pub client: ClientId,
    /// The volume.
    pub volume: VolumeId,
    /// When the client asked. Relevant for a flush: it covers what was acknowledged before this
    /// time, however long it waits.
    pub asked: Time,
}

/// The progress of a request.
pub enum RequestStage {
    /// No set has it yet.
    New(Operation),
    /// This set has begun it, and needs a task for the rest.
    Started(Attempt, CacheSet, PendingRequest),
    /// The set needed a device that does not work. A read gets its buffer back.
    DeviceFailed(Attempt, Error, Option<Buffer>),
}

/// An attempt at a request, by a set that has it or had it.
pub struct Attempt {
    /// The request, for another attempt.
    pub retry: Retry,
    /// [`Host::moves`] when the attempt began.
    pub moves: u64,
    /// Counts the request as in flight.
    pub in_flight: InFlightGuard,
}

/// The result of an attempt.
pub enum AttemptResult {
    /// The request is done, or refused.
    Answered(Reply),
    /// The request needs a device that does not work. A read gets its buffer back.
    DeviceFailed(Error, Option<Buffer>),
}

/// The number of waiting requests, by volume.
struct WaitCounts {
    by_volume: RefCell<BTreeMap<VolumeId, usize>>,
    /// As [`crate::Limits::waiting_of_volume`].
    of_volume_max: usize,
    /// As [`crate::Limits::waiting_of_all`].
    of_all_max: usize,
}

/// The place of a waiting request in the queue.
struct WaitGuard<'a>(&'a WaitCounts, VolumeId);

impl WaitCounts {
    fn new(limits: &Limits) -> Self {
        Self {
            by_volume: RefCell::default(),
            of_volume_max: limits.waiting_of_volume,
            of_all_max: limits.waiting_of_all,
        }
    }

    /// Takes a place; `None` if all are taken.
    fn take(&self, volume: VolumeId) -> Option<WaitGuard<'_>> {
        let mut waiting = self.by_volume.borrow_mut();
        let of_volume = waiting.get(&volume).copied().unwrap_or(0);
        if of_volume >= self.of_volume_max || waiting.values().sum::<usize>() >= self.of_all_max {
            return None;
        }
        waiting.insert(volume, of_volume + 1);
        Some(WaitGuard(self, volume))
    }
}

impl Drop for WaitGuard<'_> {
    fn drop(&mut self) {
        let mut waiting = self.0.by_volume.borrow_mut();
        if let Some(count) = waiting.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&self.1);
            }
        }
    }
}

impl Dispatcher {
    /// Creates a dispatcher for this host, with as many requests in flight at once as `room`
    /// allows.
    #[must_use]
    pub fn new(host: Host, room: Semaphore) -> Self {
        let (freed, is_room_wanted) = (Notify::new(), Cell::new(false));
        let waiting = WaitCounts::new(&host.inner().opening.limits);
        Self { host, room, freed, is_room_wanted, waiting }
    }

    /// Returns room for one more request. `None`: [`Dispatcher::freed`] is notified when there is
    /// some.
    pub fn find_room(&self) -> Option<Permit> {
        let permit = self.room.try_acquire(1);
        self.is_room_wanted.set(permit.is_none());
        permit
    }

    /// Returns the room of a request, if the request still has it.
    pub fn free_room(&self, permit: Option<Permit>) {
        drop(permit);
        if self.is_room_wanted.take() {
            self.freed.notify_all();
        }
    }

    /// Carries out a request from this stage on, if necessary once its volume has the required
    /// device again. A request that waits for a device is not in flight, and releases its `permit`
    /// until then.
    pub async fn answer(&self, caller: RequestSource, stage: RequestStage, permit: Permit) -> Reply {
        let mut permit = Some(permit);
        let reply = self.answer_with(caller, stage, &mut permit).await;
        self.free_room(permit);
        reply
    }

    async fn answer_with(
        &self,
        caller: RequestSource,
        mut stage: RequestStage,
        permit: &mut Option<Permit>,
    ) -> Reply {
        let volume = caller.volume;
        // A request keeps its place in the queue until its answer, so that no later request takes
        // it.
        let (mut since, mut place) = (None, None);
        loop {
            let (retry, moves, outcome) = self.go_on(caller, stage).await;
            let (error, buffer) = match outcome {
                AttemptResult::Answered(reply) => return reply,
                AttemptResult::DeviceFailed(error, buffer) => (error, buffer),
            };
            let misses_backing = self.host.misses_backing(&error);
            match misses_backing {
                true => self.host.with(|state| state.absences.is_gone(volume)),
                false => self.host.alarm(),
            }
            if self.host.moves() != moves && self.host.set_of(volume).is_some() {
                // The volume has moved in the meantime.
                stage = RequestStage::New(retry.with(buffer));
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
            let look = if works && !misses_backing {
                until.min(self.now() + self.host.inner().opening.limits.try_again)
            } else {
                until
            };
            self.host.moved_until(moves, look).await;
            if self.now() >= until {
                if misses_backing {
                    self.host.has_waited(volume);
                }
                return self.refusal(volume, &error, retry.changes_content(), buffer);
            }
            *permit = Some(self.room.acquire(1).await);
            stage = RequestStage::New(retry.with(buffer));
        }
    }

    /// Makes an attempt, or continues one. Returns what another attempt needs, the value of
    /// [`Host::moves`] when this one began, and its result.
    async fn go_on(&self, caller: RequestSource, stage: RequestStage) -> (Retry, u64, AttemptResult) {
        match stage {
            RequestStage::New(operation) => {
                let (moves, retry) = (self.host.moves(), Retry::of(&operation));
                (retry, moves, self.try_once(caller, operation).await)
            }
            RequestStage::Started(Attempt { retry, moves, in_flight }, set, rest) => {
                let reply = set.serve_rest(rest).await;
                drop((set, in_flight));
                (retry, moves, self.outcome_of(moves, reply))
            }
            RequestStage::DeviceFailed(Attempt { retry, moves, .. }, error, buffer) => {
                (retry, moves, AttemptResult::DeviceFailed(error, buffer))
            }
        }
    }

    fn now(&self) -> Time {
        self.host.inner().env.now()
    }

    /// Returns the time until which a request waits for the cache of its volume. `None`: it does
    /// not wait. `since` is when the request first met an unreadable place in a working set.
    fn waits_for_cache(&self, volume: VolumeId, error: &Error, since: &mut Option<Time>) -> Option<Time> {
        let set = self.host.set_of(volume);
        let options = self.host.options_of(volume);
        // Under the other policies the failed set serves what it can. But while it is being
        // reopened, no set could serve the request.
        let is_moment = set.is_none() && self.host.with(|state| state.is_trying);
        let may_wait = options.on_cache_error == ErrorPolicy::Freeze || is_moment;
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

    /// Returns the answer to a request that needs a device and does not wait for it.
    fn refusal(&self, volume: VolumeId, error: &Error, changes: bool, buffer: Option<Buffer>) -> Reply {
        let options = self.host.options_of(volume);
        let policy = match error {
            Error::Failed(_) => Some(options.on_cache_error),
            _ if self.host.misses_backing(error) => Some(options.on_backing_error),
            _ => None,
        };
        let kind = match policy {
            Some(ErrorPolicy::ReadOnly) if changes => ErrorKind::NotPermitted,
            _ => translate::kind_of(error),
        };
        Reply::failed(kind, buffer)
    }

    async fn try_once(&self, caller: RequestSource, operation: Operation) -> AttemptResult {
        // A flush reports losses of previously acknowledged writes. A write with FUA does not: a
        // client that sees it fail only repeats that write, and believes the rest to be safe.
        let is_flush = matches!(operation, Operation::Flush);
        let lost = || {
            let reply = EngineReply { result: Err(Error::LostWrites), buffer: None };
            AttemptResult::Answered(translate::reply_of(reply))
        };
        if is_flush && self.host.tells_of_loss(caller) {
            return lost();
        }
        let (work, flushes) = match translate::work_of(operation, caller.asked) {
            EngineWork::Request(work) => (work, false),
            EngineWork::Durable(work) => (work, true),
            EngineWork::Answered(reply) => return AttemptResult::Answered(reply),
        };
        let first = self.serve(caller, work).await;
        match first {
            AttemptResult::Answered(reply) if flushes && reply.result.is_ok() => {
                // If this flush fails, that says something about this request only.
                self.serve(caller, Request::FlushRequestedAt(Time::default())).await
            }
            // The flush may have waited for the device that lost the writes, or for its
            // replacement.
            AttemptResult::Answered(reply)
                if is_flush && reply.result.is_ok() && self.host.tells_of_loss(caller) =>
            {
                lost()
            }
            other => other,
        }
    }

    async fn serve(
        &self,
        RequestSource { client, volume, .. }: RequestSource,
        work: Request,
    ) -> AttemptResult {
        let Some((_in_flight, set, moves)) = self.host.enter(volume).await else {
            let buffer = if let Request::Read { buffer, .. } = work { Some(buffer) } else { None };
            return AttemptResult::DeviceFailed(self.host.reason(), buffer);
        };
        let reply = set.serve_in_steps(client, volume, work).await;
        drop(set);
        self.outcome_of(moves, reply)
    }

    /// Returns the result of a set's reply to a request that the set got when [`Host::moves`] was
    /// `moves`.
    #[must_use]
    pub fn outcome_of(&self, moves: u64, reply: EngineReply) -> AttemptResult {
        match reply.result {
            Err(error)
                if is_of_cache(&error, self.host.inner().opening.cache.get())
                    || self.host.misses_backing(&error) =>
            {
                AttemptResult::DeviceFailed(error, reply.buffer)
            }
            // The volume moved at that moment.
            Err(Error::Stopping | Error::NoVolume) if self.host.moves() != moves => {
                AttemptResult::DeviceFailed(self.host.reason(), reply.buffer)
            }
            _ => AttemptResult::Answered(translate::reply_of(reply)),
        }
    }
}

/// Returns whether the cache, which is this disk, failed, rather than the backing device or the
/// request.
fn is_of_cache(error: &Error, cache: DiskId) -> bool {
    match error {
        Error::Failed(_) | Error::Node { .. } | Error::Inconsistent(_) => true,
        Error::Io { source, .. } => source.disk == cache,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{TestHost, backing, served};
    use bcached_engine::ErrorContext;
    use bcached_env::{IoError, IoErrorKind};
    use bcached_format::CacheMode;
    use std::rc::Rc;
    use std::time::Duration;

    /// Proves that requests which need dirty data wait for a failed cache, also if the cache's
    /// content makes no sense.
    #[test]
    fn what_fails_is_the_cache_or_it_is_not() {
        let io = |disk| IoError { kind: IoErrorKind::Io, disk: DiskId(disk), sector: 0 };
        let at = |disk| Error::Io { doing: ErrorContext::Backing, source: io(disk) };
        let is_of_cache = |error: &Error| super::is_of_cache(error, DiskId(0));
        assert!(is_of_cache(&Error::Inconsistent("a btree node is larger than the node size of its set")));
        assert!(is_of_cache(&Error::Failed(Box::new(Error::LostWrites))));
        assert!(is_of_cache(&at(0)) && !is_of_cache(&at(1)));
        assert!(!is_of_cache(&Error::Stopping));
    }

    /// Proves that a loss is reported by flushes requested after it. It was once considered
    /// reported by any durable operation: by a write with FUA, whose client sees only that write
    /// fail and believes the rest to be safe; or by a flush that was requested before part of the
    /// loss. Proves invariant D33.
    #[test]
    fn a_loss_is_told_by_flushes_that_were_asked_for_after_it() {
        let (TestHost { mut executor, host, .. }, volume) = served(&backing(7));
        let env = executor.env();
        let ended = executor.block_on(async move {
            let dispatcher = Dispatcher::new(host.clone(), Semaphore::new(1));
            let ask = async |asked, operation| {
                let permit = dispatcher.room.acquire(1).await;
                let caller = RequestSource { client: ClientId(1), volume, asked };
                dispatcher.answer(caller, RequestStage::New(operation), permit).await.result
            };
            host.change_mode_for_now(volume, CacheMode::None).expect("it is served");
            let early = env.now();
            env.sleep(Duration::from_millis(1)).await;
            host.has_lost([volume]);
            env.sleep(Duration::from_millis(1)).await;
            let payload = Buffer::zeroed(4096).freeze();
            let durable = Operation::Write { sector: 0, payload, fua: true };
            assert_eq!(ask(env.now(), durable).await, Ok(()), "it is durable by itself");
            assert_eq!(ask(early, Operation::Flush).await, Err(ErrorKind::Io));
            assert_eq!(ask(env.now(), Operation::Flush).await, Err(ErrorKind::Io), "nobody was told");
            assert_eq!(ask(env.now(), Operation::Flush).await, Ok(()));
            host.has_lost([volume]);
            host.stop().await
        });
        assert_eq!(ended, Some(Err(Error::LostWrites)), "a stop is the last flush");
    }

    /// Proves that a waiting flush reports a loss. It once checked for losses only before it waited
    /// for the replacement of the device that had lost the writes.
    #[test]
    fn a_flush_that_waits_while_a_loss_becomes_known_tells_of_it() {
        let (TestHost { mut executor, host, .. }, volume) = served(&backing(8));
        let env = executor.env();
        let ended = executor.block_on(async move {
            assert!(host.begin_exchange(volume).await, "nothing is in flight");
            let (told, exchanged) = (Rc::new(Cell::new(None)), host.clone());
            let (tells, asks) = (Rc::clone(&told), env.clone());
            env.spawn(async move {
                let dispatcher = Dispatcher::new(exchanged, Semaphore::new(1));
                let permit = dispatcher.room.acquire(1).await;
                let caller = RequestSource { client: ClientId(1), volume, asked: asks.now() };
                let reply = dispatcher.answer(caller, RequestStage::New(Operation::Flush), permit).await;
                tells.set(Some(reply.result));
            });
            env.sleep(Duration::from_millis(1)).await;
            assert_eq!(told.get(), None, "it waits");
            host.has_lost([volume]);
            host.end_exchange(volume, true);
            while told.get().is_none() {
                env.sleep(Duration::from_millis(1)).await;
            }
            told.get()
        });
        assert_eq!(ended, Some(Some(Err(ErrorKind::Io))));
    }

    #[test]
    fn places_are_limited_for_each_volume_and_for_all() {
        let limits = Limits { waiting_of_volume: 4, waiting_of_all: 28, ..Limits::default() };
        let places = WaitCounts::new(&limits);
        let fill = |volume| -> Vec<_> { std::iter::from_fn(|| places.take(VolumeId(volume))).collect() };
        let mut taken: Vec<Vec<WaitGuard<'_>>> = (0..7).map(fill).collect();
        assert!(taken.iter().all(|of_volume| of_volume.len() == 4));
        assert!(places.take(VolumeId(8)).is_none(), "28 wait");
        drop(taken.pop());
        assert!(places.take(VolumeId(0)).is_none() && places.take(VolumeId(8)).is_some());
        drop(taken);
        assert!(places.by_volume.borrow().is_empty(), "nobody waits any more");
    }
}
