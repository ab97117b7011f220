//! Serves requests in flight without a task each. A request of one piece begins in one transition
//! and ends in another; between them a device works. No task waits for that: the state for the
//! second transition is kept here, under a number, and the asker is told the result.
//!
//! A request that needs more is served step by step by a task: from its beginning
//! ([`Begun::InSteps`]), or from where it met an obstacle.

use crate::error::Error;
use crate::policy::Client;
use crate::request::fast_hit::Hit;
use crate::request::fast_miss::Missing;
use crate::request::fast_write::Putting;
use crate::request::fill::Filling;
use crate::request::{Reply, Request, Target, refuse};
use crate::set::{CacheSet, Inner};
use crate::volume::VolumeId;
use crate::volume::epoch::Asked;
use alloc::rc::Rc;
use bcached_env::sync::Coming;
use bcached_env::{Buffer, Disk, IoError, Listener, Payload, Time};
use slab::Slab;

/// Receives the answers to requests.
pub trait Asker {
    /// Delivers the answer to the request with this number, which is the asker's own. This must not
    /// wait; it may begin another request.
    fn answered(self: Rc<Self>, number: usize, reply: Reply);
}

/// The outcome of [`CacheSet::ask`].
#[must_use = "the rest of a request must be served, and a refusal must be reported"]
pub enum Begun {
    /// The asker will be told the result, once.
    UnderWay,
    /// The request was refused, and the asker will not be told.
    Refused(Reply),
    /// The request has begun and needs a task. The task serves the rest of it
    /// ([`CacheSet::serve_rest`]) and delivers the answer.
    InSteps(Rest),
}

/// A request that has begun and is to be served step by step. It must be served: the set counts it.
#[must_use = "the set waits for its end"]
pub struct Rest {
    pub(super) target: Target,
    pub(super) asked: Option<Asked>,
    pub(super) request: Request,
    pub(super) began: Time,
}

impl From<Result<Rest, Reply>> for Begun {
    fn from(begun: Result<Rest, Reply>) -> Self {
        begun.map_or_else(Self::Refused, Self::InSteps)
    }
}

/// The asker of a request, and the request's number.
pub(super) struct Whom {
    asker: Rc<dyn Asker>,
    number: usize,
}

impl Whom {
    pub(super) fn tell(self, reply: Reply) {
        self.asker.answered(self.number, reply);
    }
}

/// The origin of a request: client, volume and time.
#[derive(Clone, Copy)]
pub(super) struct Asks {
    pub(super) client: Client,
    pub(super) volume: VolumeId,
    pub(super) began: Time,
}

impl Asks {
    /// Wraps a `request` that has only been counted so far, or refuses it.
    pub(super) fn rest(
        self,
        request: Request,
        begun: Result<(Target, Option<Asked>), Error>,
    ) -> Result<Rest, Reply> {
        match begun {
            Ok((target, asked)) => Ok(Rest { target, asked, request, began: self.began }),
            Err(error) => Err(refuse(request, error)),
        }
    }
}

/// Operations in flight on the devices that no task waits for.
#[derive(Default)]
pub(crate) struct UnderWay {
    pub(super) hits: Slab<Hit>,
    pub(super) misses: Slab<Missing>,
    pub(super) puts: Slab<Putting>,
    pub(super) fills: Slab<Filling>,
}

/// Where such an operation is kept.
#[derive(Clone, Copy)]
pub(super) enum Kept {
    Hit(usize),
    Miss(usize),
    Put(usize),
    Fill(usize),
}

impl Kept {
    /// Returns the number under which the listener knows the operation.
    #[inline]
    const fn number(self) -> usize {
        match self {
            Self::Hit(place) => 4 * place,
            Self::Miss(place) => 4 * place + 1,
            Self::Put(place) => 4 * place + 2,
            Self::Fill(place) => 4 * place + 3,
        }
    }

    #[inline]
    const fn of(number: usize) -> Self {
        let place = number / 4;
        match number % 4 {
            0 => Self::Hit(place),
            1 => Self::Miss(place),
            2 => Self::Put(place),
            _ => Self::Fill(place),
        }
    }
}

impl CacheSet {
    /// Begins a request of one of several clients; streams are detected for each client by itself.
    /// If nothing else is to be done now, `asker` is told of the end, under `number`.
    ///
    /// Any number of requests may be in flight. Overlapping writes take effect in the order of the
    /// calls, if each request that is to be served in steps is served before the next call.
    pub fn ask(
        &self,
        client: Client,
        volume: VolumeId,
        request: Request,
        asker: &Rc<dyn Asker>,
        number: usize,
    ) -> Begun {
        let asks = Asks { client, volume, began: self.env().now() };
        let whom = || Whom { asker: Rc::clone(asker), number };
        // A caller that begins many requests lets other tasks run between them.
        let has_breath = self.env().has_breath();
        match request {
            Request::Read { .. } if has_breath => self.ask_to_read(asks, request, whom),
            Request::Write { fua: false, .. } if has_breath => self.ask_to_write(asks, request, whom),
            request => self.begin_in_steps(asks, request).into(),
        }
    }

    /// Serves one request, for a caller with one client.
    pub async fn serve(&self, volume: VolumeId, request: Request) -> Reply {
        self.serve_for(Client::default(), volume, request).await
    }

    /// Begins one request, as [`CacheSet::ask`] does, and waits for its end.
    pub async fn serve_for(&self, client: Client, volume: VolumeId, request: Request) -> Reply {
        let answer = Rc::<Answer>::default();
        self.ask_and_serve(client, volume, request, Rc::<Answer>::clone(&answer)).await;
        answer.0.comes().await
    }

    /// Like [`CacheSet::ask`], for a caller that has a task. A request that needs a task is served
    /// here. `asker` is told of the end in any case, now or later, under the number 0.
    pub async fn ask_and_serve(
        &self,
        client: Client,
        volume: VolumeId,
        request: Request,
        asker: Rc<dyn Asker>,
    ) {
        match self.ask(client, volume, request, &asker, 0) {
            Begun::UnderWay => {}
            Begun::Refused(reply) => asker.answered(0, reply),
            Begun::InSteps(rest) => {
                let reply = self.serve_rest(rest).await;
                asker.answered(0, reply);
            }
        }
    }

    /// Serves one request step by step, for a caller that has a task for it and wants no allocation
    /// for that.
    pub async fn serve_in_steps(&self, client: Client, volume: VolumeId, request: Request) -> Reply {
        let asks = Asks { client, volume, began: self.env().now() };
        match self.begin_in_steps(asks, request) {
            Ok(rest) => self.serve_rest(rest).await,
            Err(refused) => refused,
        }
    }

    fn begin_in_steps(&self, asks: Asks, request: Request) -> Result<Rest, Reply> {
        let begun = self.with(|s| s.begin_request(asks.client, asks.volume, &request));
        asks.rest(request, begun.map(|(target, asked, _)| (target, asked)))
    }

    /// Starts a read of `disk` for the operation in `kept`.
    pub(super) fn read_for(&self, disk: &Disk, sector: u64, buffer: Buffer, kept: Kept) {
        disk.read_for(sector, buffer, self.listener(), kept.number());
    }

    /// Starts a write to the cache device for the operation in `kept`.
    pub(super) fn write_for(&self, sector: u64, payload: Payload, kept: Kept) {
        self.cache().write_for(sector, payload, self.listener(), kept.number());
    }

    fn listener(&self) -> Rc<dyn Listener> {
        Rc::<Inner>::clone(&self.inner)
    }
}

impl Listener for Inner {
    fn ended(self: Rc<Self>, number: usize, result: Result<(), IoError>, buffer: Option<Buffer>) {
        let set = CacheSet { inner: self };
        match Kept::of(number) {
            Kept::Hit(place) => set.hit_ended(place, result, buffer.unwrap_or_default()),
            Kept::Miss(place) => set.miss_ended(place, result, buffer.unwrap_or_default()),
            Kept::Put(place) => set.put_ended(place, result),
            Kept::Fill(place) => set.fill_ended(place, result),
        }
    }
}

/// Where a task waits for its answer.
#[derive(Default)]
struct Answer(Coming<Reply>);

impl Asker for Answer {
    fn answered(self: Rc<Self>, _number: usize, reply: Reply) {
        self.0.bring(reply);
    }
}
