//! Serves requests in flight without a task each. A request of one piece begins in one transition
//! and ends in another; between them a device works. No task waits for that: the state for the
//! second transition is kept here, under a number, and the requester is told the result.
//!
//! A request that needs more is served step by step by a task: from its beginning
//! ([`Submission::NeedsTask`]), or from where it met an obstacle.

use crate::error::Error;
use crate::policy::ClientId;
use crate::request::fast_hit::HitInFlight;
use crate::request::fast_miss::MissInFlight;
use crate::request::fast_write::FastWriteInFlight;
use crate::request::fill::FillInFlight;
use crate::request::{Reply, Request, Target, refuse};
use crate::set::{CacheSet, Inner};
use crate::volume::VolumeId;
use crate::volume::backing_flushes::RequestToken;
use alloc::rc::Rc;
use bcached_env::sync::OneShot;
use bcached_env::{Buffer, CompletionListener, Disk, IoError, Payload, Time};
use slab::Slab;

/// Receives the answers to requests.
pub trait Requester {
    /// Delivers the answer to the request with this number, which is the requester's own. This must
    /// not wait; it may begin another request.
    fn answered(self: Rc<Self>, number: usize, reply: Reply);
}

/// The outcome of [`CacheSet::ask`].
#[must_use = "the rest of a request must be served, and a refusal must be reported"]
pub enum Submission {
    /// The requester will be told the result, once.
    InFlight,
    /// The request was refused, and the requester will not be told.
    Refused(Reply),
    /// The request has begun and needs a task. The task serves the rest of it
    /// ([`CacheSet::serve_rest`]) and delivers the answer.
    NeedsTask(PendingRequest),
}

/// A request that has begun and is to be served step by step. It must be served: the set counts it.
#[must_use = "the set waits for its end"]
pub struct PendingRequest {
    pub(super) target: Target,
    pub(super) asked: Option<RequestToken>,
    pub(super) request: Request,
    pub(super) began: Time,
}

impl From<Result<PendingRequest, Reply>> for Submission {
    fn from(begun: Result<PendingRequest, Reply>) -> Self {
        begun.map_or_else(Self::Refused, Self::NeedsTask)
    }
}

/// The requester, and the request's number.
pub(super) struct ReplyTo {
    requester: Rc<dyn Requester>,
    number: usize,
}

impl ReplyTo {
    pub(super) fn tell(self, reply: Reply) {
        self.requester.answered(self.number, reply);
    }
}

/// The origin of a request: client, volume and time.
#[derive(Clone, Copy)]
pub(super) struct RequestOrigin {
    pub(super) client: ClientId,
    pub(super) volume: VolumeId,
    pub(super) began: Time,
}

impl RequestOrigin {
    /// Wraps a `request` that has only been counted so far, or refuses it.
    pub(super) fn rest(
        self,
        request: Request,
        begun: Result<(Target, Option<RequestToken>), Error>,
    ) -> Result<PendingRequest, Reply> {
        match begun {
            Ok((target, asked)) => Ok(PendingRequest { target, asked, request, began: self.began }),
            Err(error) => Err(refuse(request, error)),
        }
    }
}

/// Operations in flight on the devices that no task waits for.
#[derive(Default)]
pub(crate) struct InFlightTable {
    pub(super) hits: Slab<HitInFlight>,
    pub(super) misses: Slab<MissInFlight>,
    pub(super) puts: Slab<FastWriteInFlight>,
    pub(super) fills: Slab<FillInFlight>,
}

/// Where such an operation is kept.
#[derive(Clone, Copy)]
pub(super) enum InFlightSlot {
    Hit(usize),
    Miss(usize),
    Write(usize),
    Fill(usize),
}

impl InFlightSlot {
    /// Returns the number under which the listener knows the operation.
    #[inline]
    const fn number(self) -> usize {
        match self {
            Self::Hit(place) => 4 * place,
            Self::Miss(place) => 4 * place + 1,
            Self::Write(place) => 4 * place + 2,
            Self::Fill(place) => 4 * place + 3,
        }
    }

    #[inline]
    const fn of(number: usize) -> Self {
        let place = number / 4;
        match number % 4 {
            0 => Self::Hit(place),
            1 => Self::Miss(place),
            2 => Self::Write(place),
            _ => Self::Fill(place),
        }
    }
}

impl CacheSet {
    /// Begins a request of one of several clients; streams are detected for each client by itself.
    /// If nothing else is to be done now, `requester` is told of the end, under `number`.
    ///
    /// Any number of requests may be in flight. Overlapping writes take effect in the order of the
    /// calls, if each request that is to be served in steps is served before the next call.
    pub fn ask(
        &self,
        client: ClientId,
        volume: VolumeId,
        request: Request,
        requester: &Rc<dyn Requester>,
        number: usize,
    ) -> Submission {
        let origin = RequestOrigin { client, volume, began: self.env().now() };
        let reply_to = || ReplyTo { requester: Rc::clone(requester), number };
        // A caller that begins many requests lets other tasks run between them.
        let has_breath = self.env().has_breath();
        match request {
            Request::Read { .. } if has_breath => self.ask_to_read(origin, request, reply_to),
            Request::Write { fua: false, .. } if has_breath => self.ask_to_write(origin, request, reply_to),
            request => self.begin_in_steps(origin, request).into(),
        }
    }

    /// Serves one request, for a caller with one client.
    pub async fn serve(&self, volume: VolumeId, request: Request) -> Reply {
        self.serve_for(ClientId::default(), volume, request).await
    }

    /// Begins one request, as [`CacheSet::ask`] does, and waits for its end.
    pub async fn serve_for(&self, client: ClientId, volume: VolumeId, request: Request) -> Reply {
        let answer = Rc::<ReplySlot>::default();
        self.ask_and_serve(client, volume, request, Rc::<ReplySlot>::clone(&answer)).await;
        answer.0.comes().await
    }

    /// Like [`CacheSet::ask`], for a caller that has a task. A request that needs a task is served
    /// here. `requester` is told of the end in any case, now or later, under the number 0.
    pub async fn ask_and_serve(
        &self,
        client: ClientId,
        volume: VolumeId,
        request: Request,
        requester: Rc<dyn Requester>,
    ) {
        match self.ask(client, volume, request, &requester, 0) {
            Submission::InFlight => {}
            Submission::Refused(reply) => requester.answered(0, reply),
            Submission::NeedsTask(rest) => {
                let reply = self.serve_rest(rest).await;
                requester.answered(0, reply);
            }
        }
    }

    /// Serves one request step by step, for a caller that has a task for it and wants no allocation
    /// for that.
    pub async fn serve_in_steps(&self, client: ClientId, volume: VolumeId, request: Request) -> Reply {
        let origin = RequestOrigin { client, volume, began: self.env().now() };
        match self.begin_in_steps(origin, request) {
            Ok(rest) => self.serve_rest(rest).await,
            Err(refused) => refused,
        }
    }

    fn begin_in_steps(&self, origin: RequestOrigin, request: Request) -> Result<PendingRequest, Reply> {
        let begun = self.with(|s| s.begin_request(origin.client, origin.volume, &request));
        origin.rest(request, begun.map(|(target, asked, _)| (target, asked)))
    }

    /// Starts a read of `disk` for the operation in `slot`.
    pub(super) fn read_for(&self, disk: &Disk, sector: u64, buffer: Buffer, slot: InFlightSlot) {
        disk.read_for(sector, buffer, self.listener(), slot.number());
    }

    /// Starts a write to the cache device for the operation in `slot`.
    pub(super) fn write_for(&self, sector: u64, payload: Payload, slot: InFlightSlot) {
        self.cache().write_for(sector, payload, self.listener(), slot.number());
    }

    fn listener(&self) -> Rc<dyn CompletionListener> {
        Rc::<Inner>::clone(&self.inner)
    }
}

impl CompletionListener for Inner {
    fn ended(self: Rc<Self>, number: usize, result: Result<(), IoError>, buffer: Option<Buffer>) {
        let set = CacheSet { inner: self };
        match InFlightSlot::of(number) {
            InFlightSlot::Hit(place) => set.hit_ended(place, result, buffer.unwrap_or_default()),
            InFlightSlot::Miss(place) => set.miss_ended(place, result, buffer.unwrap_or_default()),
            InFlightSlot::Write(place) => set.put_ended(place, result),
            InFlightSlot::Fill(place) => set.fill_ended(place, result),
        }
    }
}

/// Where a task waits for its answer.
#[derive(Default)]
struct ReplySlot(OneShot<Reply>);

impl Requester for ReplySlot {
    fn answered(self: Rc<Self>, _number: usize, reply: Reply) {
        self.0.bring(reply);
    }
}
