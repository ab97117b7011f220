//! Passes a client's request to the host of a set, or to a set, and its answer back.

use super::lending::Loan;
use super::seat::Seat;
use super::{Soon, Told};
use bcached_engine::{Asker, CacheSet, Client, Reply as EngineReply, VolumeId};
use bcached_env::sync::Coming;
use bcached_env::{Buffer, Time};
use bcached_host::dispatch::{Caller, Stage};
use bcached_host::retry::Retry;
use bcached_host::translate::{self, Work};
use bcached_host::workers::{AnswerTo, Request, Workers};
use bcached_port::{ErrorKind, Operation, Reply};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

/// One in this many blocks of 8 sectors has its requests served step by step, like requests that
/// have a task. All others are served as the host decides.
const IN_STEPS: u64 = 11;

/// Waits for the answer to a request. The answer is `None` if the request must be submitted again.
struct Waiting {
    told: Cell<Option<Told>>,
    reply: Coming<Option<Reply>>,
}

impl Waiting {
    fn of(told: Told) -> Rc<Self> {
        Rc::new(Self { told: Cell::new(Some(told)), reply: Coming::default() })
    }

    /// Delivers the reply: `told` is called before anything else happens.
    fn hear(&self, reply: Reply) {
        if let Some(told) = self.told.take() {
            told(&reply);
        }
        self.reply.bring(Some(reply));
    }
}

/// Where the answer to a request is sent.
pub struct Answer {
    waiting: Rc<Waiting>,
    loan: Option<Arc<Loan>>,
    /// The seat and the engine's id of a volume that may be re-added; `None` for other volumes.
    seat: Option<(Rc<Seat>, VolumeId)>,
}

impl Answer {
    /// Returns whether the request must be submitted again: a volume that was removed and added
    /// again has another id. A route would have led the client there.
    fn is_to_be_made_again(&self, reply: &Reply) -> bool {
        let has_moved = |(seat, id): &(Rc<Seat>, VolumeId)| seat.served_as() != Some(*id);
        reply.result == Err(ErrorKind::Gone) && self.seat.as_ref().is_some_and(has_moved)
    }
}

impl AnswerTo for Answer {
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

/// Submits a request for the volume on a seat to a host; `told` is called at its end before
/// anything else happens.
#[must_use]
pub fn serve(
    workers: &Rc<Workers<Answer>>,
    seat: Rc<Seat>,
    mut operation: Operation,
    told: Told,
) -> Soon<Reply> {
    let (workers, waiting) = (Rc::clone(workers), Waiting::of(told));
    Box::pin(async move {
        let asked = workers.dispatcher().host.inner().env.now();
        loop {
            let Some(id) = seat.id().await else {
                waiting.hear(Reply::failed(ErrorKind::Gone, None));
                return waiting.reply.comes().await.expect("it was just answered");
            };
            let permit = workers.dispatcher().room.acquire(1).await;
            let retry = Retry::of(&operation);
            let bytes = if let Operation::Read { buffer, .. } = &operation { buffer.len() } else { 0 };
            let is_in_steps = is_in_steps(&operation);
            let (lent, loan) = lent(operation);
            let answer_to = Answer { waiting: Rc::clone(&waiting), loan, seat: Some((Rc::clone(&seat), id)) };
            let caller = Caller { client: Client::default(), volume: id, asked };
            if is_in_steps {
                let answered = workers.dispatcher().answer(caller, Stage::New(lent), permit);
                answer_to.send(answered.await);
            } else {
                let request = Request { caller, operation: lent, answer_to };
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
struct Asking(Cell<Option<Answer>>);

impl Asker for Asking {
    fn answered(self: Rc<Self>, _number: usize, reply: EngineReply) {
        if let Some(answer_to) = self.0.take() {
            answer_to.send(translate::reply_of(reply));
        }
    }
}

/// Submits a request to a set without a host.
#[must_use]
pub fn serve_by_set(set: &CacheSet, id: VolumeId, operation: Operation, told: Told) -> Soon<Reply> {
    let set = set.clone();
    let is_in_steps = is_in_steps(&operation);
    let (operation, loan) = lent(operation);
    // Nothing is queued here before the set has the request.
    let request = match translate::work_of(operation, Time::MAX) {
        Work::Request(request) | Work::Durable(request) => request,
        Work::Answered(_) => unreachable!("block status is not requested here"),
    };
    Box::pin(async move {
        let (client, waiting) = (Client::default(), Waiting::of(told));
        let answer_to = Answer { waiting: Rc::clone(&waiting), loan, seat: None };
        let asker = Rc::new(Asking(Cell::new(Some(answer_to))));
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
fn lent(mut operation: Operation) -> (Operation, Option<Arc<Loan>>) {
    let mut loan = None;
    match &mut operation {
        Operation::Read { sector, buffer } => {
            if let Some((lender, lent)) = Loan::to_read(*sector, buffer) {
                (loan, *buffer) = (Some(lender), lent);
            }
        }
        Operation::Write { sector, payload, .. } => {
            if let Some((lender, lent)) = Loan::to_write(*sector, payload) {
                (loan, *payload) = (Some(lender), lent);
            }
        }
        _ => {}
    }
    (operation, loan)
}
