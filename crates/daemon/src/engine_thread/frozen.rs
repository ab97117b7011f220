//! Requests that need a device and cannot have it, the cache or the backing device: by the volume's policy they wait for it, or not.
//!
//! Here is the one queue of such requests, between the port and the sets: it outlives a set that is opened again. It is bounded, in
//! requests (for each volume and for all) and in bytes (by the front end's budget, of which a connection has a part); who comes when
//! it is full fails. A request that waits is asked again from its beginning, as if it came now: nobody has been told that it was
//! carried out, so whether some of it was makes no difference. So those that wait are carried out after those that need not wait, also
//! where both write to one place; no client can count on anything else while neither is answered.

use super::absent::Inside;
use super::keeper::Keeper;
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
/// Requests of all volumes of a set that wait at most: with those in flight no more tasks than the executor has room for.
const OF_ALL_MAX: usize = 4096;

/// How soon a place of a working set that could not be read is tried again.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// Who carries requests out.
pub struct Desk {
    pub keeper: Keeper,
    /// Bounds the requests in flight; what does not fit waits in the port.
    pub room: Semaphore,
    /// There is more room, for who has found none.
    pub freed: Notify,
    /// Somebody has.
    is_wanted: Cell<bool>,
    places: Places,
}

/// How far a request has come.
pub enum Stage {
    /// No set has it.
    New(Operation),
    /// This set has begun it, and wants a task for the rest.
    Begun(Attempt, CacheSet, Rest),
    /// The set needed a device that does not work. A read's memory has come back.
    Trouble(Attempt, Error, Option<Buffer>),
}

/// An attempt at a request, which a set has or had.
pub struct Attempt {
    pub again: Again,
    /// [`Keeper::turn`] when it began.
    pub turn: u64,
    pub inside: Inside,
}

/// How many requests wait, by volume.
#[derive(Default)]
struct Places(RefCell<BTreeMap<VolumeId, usize>>);

/// What came of an attempt to carry a request out.
pub enum Came {
    Answered(Reply),
    /// It needs a device that does not work. A read's memory comes back.
    Trouble(Error, Option<Buffer>),
}

/// A place among those that wait.
struct Place<'a>(&'a Places, VolumeId);

impl Places {
    /// One more; `None`: all are taken.
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

impl Desk {
    /// For whoever is in the care of `keeper`; as many requests at once as there is `room` for.
    pub fn new(keeper: Keeper, room: Semaphore) -> Self {
        let (freed, is_wanted) = (Notify::new(), Cell::new(false));
        Self { keeper, room, freed, is_wanted, places: Places::default() }
    }

    /// Room for one more, or whoever asks is told when there is some.
    pub fn find_room(&self) -> Option<Permit> {
        let permit = self.room.try_acquire(1);
        self.is_wanted.set(permit.is_none());
        permit
    }

    /// That is given back, if whoever had it still has it.
    pub fn give_back(&self, permit: Option<Permit>) {
        drop(permit);
        if self.is_wanted.take() {
            self.freed.notify_all();
        }
    }

    /// Carries a request out that has come so far, if need be when its volume has the device again that it needs. Who waits for that is not in
    /// flight, and gives back its `permit` until then.
    pub async fn answer(&self, client: Client, volume: VolumeId, stage: Stage, permit: Permit) -> Reply {
        let mut permit = Some(permit);
        let reply = self.answer_with(client, volume, stage, &mut permit).await;
        self.give_back(permit);
        reply
    }

    async fn answer_with(
        &self,
        client: Client,
        volume: VolumeId,
        stage: Stage,
        permit: &mut Option<Permit>,
    ) -> Reply {
        let mut stage = stage;
        // Who has a place keeps it until the answer: nobody who comes later takes it from him.
        let (mut since, mut place) = (None, None);
        loop {
            let (again, turn, came) = self.go_on(client, volume, stage).await;
            let (error, buffer) = match came {
                Came::Answered(reply) => return reply,
                Came::Trouble(error, buffer) => (error, buffer),
            };
            let misses_backing = self.keeper.misses_backing(&error);
            if !misses_backing {
                self.keeper.alarm();
            }
            if self.keeper.turn() != turn && self.keeper.home(volume).is_some() {
                // It has moved meanwhile.
                stage = Stage::New(again.with(buffer));
                continue;
            }
            let until = match misses_backing {
                true => self.keeper.waits_for_backing(volume),
                false => self.waits_until(volume, &error, &mut since),
            };
            place = place.or_else(|| until.and_then(|_| self.places.take(volume)));
            let Some(until) = until.filter(|_| place.is_some()) else {
                return self.refusal(volume, &error, again.changes_content(), buffer);
            };
            self.give_back(permit.take());
            let works = self.keeper.home(volume).is_some_and(|set| set.failure().is_none());
            let look = if works && !misses_backing { until.min(self.now() + TRY_AGAIN) } else { until };
            self.keeper.turns_until(turn, look).await;
            if self.now() >= until {
                if misses_backing {
                    self.keeper.has_waited(volume);
                }
                return self.refusal(volume, &error, again.changes_content(), buffer);
            }
            *permit = Some(self.room.acquire(1).await);
            stage = Stage::New(again.with(buffer));
        }
    }

    /// What comes of an attempt, which may have begun: how to make another one, and in which turn it began.
    async fn go_on(&self, client: Client, volume: VolumeId, stage: Stage) -> (Again, u64, Came) {
        match stage {
            Stage::New(operation) => {
                let (turn, again) = (self.keeper.turn(), Again::of(&operation));
                (again, turn, self.try_once(client, volume, operation).await)
            }
            Stage::Begun(Attempt { again, turn, inside }, set, rest) => {
                let reply = set.serve_rest(rest).await;
                drop((set, inside));
                (again, turn, self.came_of(turn, reply))
            }
            Stage::Trouble(Attempt { again, turn, .. }, error, buffer) => {
                (again, turn, Came::Trouble(error, buffer))
            }
        }
    }

    fn now(&self) -> Time {
        self.keeper.inner().env.now()
    }

    /// How long a request waits for the volume's cache; `None`: not at all. `since` is when it first met a place that cannot be read,
    /// though the set works.
    fn waits_until(&self, volume: VolumeId, error: &Error, since: &mut Option<Time>) -> Option<Time> {
        let home = self.keeper.home(volume);
        let options = self.keeper.options_of(volume);
        // Who does not wait for a cache that fails is served by it as far as it goes, but not while it is being opened again.
        let is_moment = home.is_none() && self.keeper.with(|sets| sets.is_trying);
        let may_wait = options.on_cache_error == OnError::Freeze || is_moment;
        let works = home.is_some_and(|set| set.failure().is_none());
        let may_pass = if works { error.may_be_awaited() } else { self.keeper.may_come_back() };
        if !may_wait || !may_pass {
            return None;
        }
        let begun = match works {
            true => *since.get_or_insert_with(|| self.now()),
            false => self.keeper.waits_since(volume),
        };
        let until = begun + options.freeze_timeout;
        (self.now() < until).then_some(until)
    }

    /// What a request is told that needs a device and does not wait for it.
    fn refusal(&self, volume: VolumeId, error: &Error, changes: bool, buffer: Option<Buffer>) -> Reply {
        let options = self.keeper.options_of(volume);
        let policy = match error {
            Error::Failed(_) => Some(options.on_cache_error),
            _ if self.keeper.misses_backing(error) => Some(options.on_backing_error),
            _ => None,
        };
        let kind = match policy {
            Some(OnError::ReadOnly) if changes => ErrorKind::NotPermitted,
            _ => translate::kind_of(error),
        };
        Reply::failed(kind, buffer)
    }

    async fn try_once(&self, client: Client, volume: VolumeId, operation: Operation) -> Came {
        let is_durable = is_durable(&operation);
        if is_durable && self.keeper.with(|sets| sets.owes.remove(&volume)) {
            let buffer = None;
            return Came::Answered(translate::reply_of(EngineReply {
                result: Err(Error::LostWrites),
                buffer,
            }));
        }
        let (work, flushes) = match translate::work_of(operation) {
            Work::Request(work) => (work, false),
            Work::Durable(work) => (work, true),
            Work::Answered(reply) => return Came::Answered(reply),
        };
        let first = self.serve(client, volume, work).await;
        match first {
            Came::Answered(reply) if flushes && reply.result.is_ok() => {
                self.serve(client, volume, Request::Flush).await
            }
            other => other,
        }
    }

    async fn serve(&self, client: Client, volume: VolumeId, work: Request) -> Came {
        let Some((_inside, set, turn)) = self.keeper.enters(volume).await else {
            let buffer = if let Request::Read { buffer, .. } = work { Some(buffer) } else { None };
            return Came::Trouble(self.keeper.reason(), buffer);
        };
        let reply = set.serve_in_steps(client, volume, work).await;
        drop(set);
        self.came_of(turn, reply)
    }

    /// What a set's answer to a request that it got in that turn comes to.
    pub fn came_of(&self, turn: u64, reply: EngineReply) -> Came {
        match reply.result {
            Err(error)
                if is_of_cache(&error, self.keeper.inner().recipe.cache.get())
                    || self.keeper.misses_backing(&error) =>
            {
                Came::Trouble(error, reply.buffer)
            }
            // It came in the moment in which the volume moved.
            Err(Error::Stopping | Error::NoVolume) if self.keeper.turn() != turn => {
                Came::Trouble(self.keeper.reason(), reply.buffer)
            }
            _ => Came::Answered(translate::reply_of(reply)),
        }
    }
}

/// The cache failed, which is this disk, not the backing device and not the request.
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

/// A request that can be asked once more.
pub enum Again {
    /// A read from this sector, when its memory has come back.
    Read(u64),
    Other(Operation),
}

impl Again {
    pub fn of(operation: &Operation) -> Self {
        Self::Other(match operation {
            Operation::Read { sector, .. } => return Self::Read(*sector),
            Operation::Write { sector, payload, fua } => {
                Operation::Write { sector: *sector, payload: payload.clone(), fua: *fua }
            }
            Operation::Flush => Operation::Flush,
            Operation::Discard { sector, sectors, fua } => {
                Operation::Discard { sector: *sector, sectors: *sectors, fua: *fua }
            }
            Operation::WriteZeroes { sector, sectors, fua, may_discard } => Operation::WriteZeroes {
                sector: *sector,
                sectors: *sectors,
                fua: *fua,
                may_discard: *may_discard,
            },
            Operation::BlockStatus { sector, sectors, extents_max } => {
                Operation::BlockStatus { sector: *sector, sectors: *sectors, extents_max: *extents_max }
            }
        })
    }

    const fn changes_content(&self) -> bool {
        matches!(self, Self::Other(operation) if operation.changes_content())
    }

    fn with(self, buffer: Option<Buffer>) -> Operation {
        match self {
            Self::Read(sector) => Operation::Read { sector, buffer: buffer.unwrap_or_default() },
            Self::Other(operation) => operation,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_engine::Doing;
    use bcached_env::{IoError, IoErrorKind};

    /// Requests that need dirty data wait for a cache that fails, also if what it says makes no sense.
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
        let places = Places::default();
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
