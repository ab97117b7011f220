//! Passes a client's request to the host of a set, or to a set, and its answer back.

use super::lending::LentMemory;
use super::slot::VolumeSlot;
use super::{BoxFuture, ReplyCallback};
use bcached_engine::{CacheSet, ClientId, Reply as EngineReply, Requester, VolumeId};
use bcached_env::sync::OneShot;
use bcached_env::{Buffer, Time};
use bcached_host::dispatch::{RequestSource, RequestStage};
use bcached_host::retry::Retry;
use bcached_host::translate::{self, EngineWork};
use bcached_host::workers::{HostRequest, ReplySink, Workers};
use bcached_port::{ErrorKind, Operation, Reply};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

/// One in this many blocks of 8 sectors has its requests served step by step, like requests that
/// have a task. All others are served as the host decides.
const IN_STEPS: u64 = 11;

/// Waits for the answer to a request. The answer is `None` if the request must be submitted again.
struct PendingReply {
    callback: Cell<Option<ReplyCallback>>,
    reply: OneShot<Option<Reply>>,
}

impl PendingReply {
    fn of(callback: ReplyCallback) -> Rc<Self> {
        Rc::new(Self { callback: Cell::new(Some(callback)), reply: OneShot::default() })
    }

    /// Delivers the reply: `callback` is called before anything else happens.
    fn hear(&self, reply: Reply) {
        if let Some(callback) = self.callback.take() {
            callback(&reply);
        }
        self.reply.bring(Some(reply));
    }
}

/// Where the answer to a request is sent.
pub struct ReplySender {
    waiting: Rc<PendingReply>,
    loan: Option<Arc<LentMemory>>,
    /// The slot and the engine's id of a volume that may be re-added; `None` for other volumes.
    slot: Option<(Rc<VolumeSlot>, VolumeId)>,
}

impl ReplySender {
    /// Returns whether the request must be submitted again: a volume that was removed and added
    /// again has another id. A route would have led the client there.
    fn is_to_be_made_again(&self, reply: &Reply) -> bool {
        let has_moved = |(slot, id): &(Rc<VolumeSlot>, VolumeId)| slot.served_as() != Some(*id);
        reply.result == Err(ErrorKind::Gone) && self.slot.as_ref().is_some_and(has_moved)
    }
}

impl ReplySink for ReplySender {
    fn send(self, reply: Reply) {
        let is_again = self.is_to_be_made_again(&reply);
        let buffer = match self.loan.map(|loan| loan.end()) {
            Some(held) => reply.buffer.map(|_| held),
            None => reply.buffer,
        };
        if is_again {
            self.waiting.reply.bring(None);
        } else {
            self.waiting.hear(Reply { buffer, ..reply });
        }
    }
}

/// Submits a request for the volume on a slot to a host; `callback` is called at its end before
/// anything else happens.
#[must_use]
pub fn serve(
    workers: &Rc<Workers<ReplySender>>,
    slot: Rc<VolumeSlot>,
    mut operation: Operation,
    callback: ReplyCallback,
) -> BoxFuture<Reply> {
    let (workers, waiting) = (Rc::clone(workers), PendingReply::of(callback));
    Box::pin(async move {
        let asked = workers.dispatcher().host.inner().env.now();
        loop {
            let Some(id) = slot.id().await else {
                waiting.hear(Reply::failed(ErrorKind::Gone, None));
                return waiting.reply.comes().await.expect("it was just answered");
            };
            let permit = workers.dispatcher().room.acquire(1).await;
            let retry = Retry::of(&operation);
            let bytes = if let Operation::Read { buffer, .. } = &operation { buffer.len() } else { 0 };
            let is_in_steps = is_in_steps(&operation);
            let (lent, loan) = lent(operation);
            let answer_to =
                ReplySender { waiting: Rc::clone(&waiting), loan, slot: Some((Rc::clone(&slot), id)) };
            let caller = RequestSource { client: ClientId::default(), volume: id, asked };
            if is_in_steps {
                let answered = workers.dispatcher().answer(caller, RequestStage::New(lent), permit);
                answer_to.send(answered.await);
            } else {
                let request = HostRequest { caller, operation: lent, answer_to };
                workers.begin(request, permit);
            }
            if let Some(reply) = waiting.reply.comes().await {
                return reply;
            }
            operation = retry.with(Some(Buffer::zeroed(bytes)));
        }
    })
}

/// Waits for the answer of a set.
struct SetRequester(Cell<Option<ReplySender>>);

impl Requester for SetRequester {
    fn answered(self: Rc<Self>, _number: usize, reply: EngineReply) {
        if let Some(answer_to) = self.0.take() {
            answer_to.send(translate::reply_of(reply));
        }
    }
}

/// Submits a request to a set without a host.
#[must_use]
pub fn serve_by_set(
    set: &CacheSet,
    id: VolumeId,
    operation: Operation,
    callback: ReplyCallback,
) -> BoxFuture<Reply> {
    let set = set.clone();
    let is_in_steps = is_in_steps(&operation);
    let (operation, loan) = lent(operation);
    // Nothing is queued here before the set has the request.
    let request = match translate::work_of(operation, Time::MAX) {
        EngineWork::Request(request) | EngineWork::Durable(request) => request,
        EngineWork::Answered(_) => unreachable!("block status is not requested here"),
    };
    Box::pin(async move {
        let (client, waiting) = (ClientId::default(), PendingReply::of(callback));
        let answer_to = ReplySender { waiting: Rc::clone(&waiting), loan, slot: None };
        let asker = Rc::new(SetRequester(Cell::new(Some(answer_to))));
        if is_in_steps {
            asker.answered(0, set.serve_in_steps(client, id, request).await);
        } else {
            set.ask_and_serve(client, id, request, asker).await;
        }
        waiting.reply.comes().await.expect("the request is answered")
    })
}

fn is_in_steps(operation: &Operation) -> bool {
    let place = match operation {
        Operation::Read { sector, .. } | Operation::Write { sector, .. } => *sector,
        _ => 0,
    };
    place / 8 % IN_STEPS == 3
}

/// Lends a request's memory, if it is chosen; returns the request and the loan.
fn lent(mut operation: Operation) -> (Operation, Option<Arc<LentMemory>>) {
    let mut loan = None;
    match &mut operation {
        Operation::Read { sector, buffer } => {
            if let Some((lender, lent)) = LentMemory::to_read(*sector, buffer) {
                (loan, *buffer) = (Some(lender), lent);
            }
        }
        Operation::Write { sector, payload, .. } => {
            if let Some((lender, lent)) = LentMemory::to_write(*sector, payload) {
                (loan, *payload) = (Some(lender), lent);
            }
        }
        _ => {}
    }
    (operation, loan)
}
