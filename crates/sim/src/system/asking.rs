//! How a request is put to the engine, and what its answer is in our words.

use super::lending::Loan;
use super::{Refusal, Reply, Request, Soon, Told};
use bcached_engine::{Asker, CacheSet, Client, Reply as Answer, Request as Question, VolumeId};
use bcached_env::sync::Coming;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

/// Of so many blocks of 8 sectors the requests for one go step by step, as those do for which a front end has a task; all others as the engine will.
const IN_STEPS: u64 = 11;

/// Who waits for the answer to a request.
struct Asking {
    loan: Option<Arc<Loan>>,
    told: Cell<Option<Told>>,
    reply: Coming<Reply>,
}

impl Asker for Asking {
    fn answered(self: Rc<Self>, _number: usize, answer: Answer) {
        let Answer { result, buffer } = answer;
        let buffer = match self.loan.as_ref().map(|loan| loan.end()) {
            Some(held) => buffer.map(|_| held),
            None => buffer,
        };
        let reply = Reply { result: result.map_err(Refusal::from_error), buffer };
        if let Some(told) = self.told.take() {
            told(&reply);
        }
        self.reply.bring(reply);
    }
}

/// Puts a request to the engine; `told` hears of its end before anything else happens.
#[must_use]
pub fn serve(set: &CacheSet, id: VolumeId, request: Request, told: Told) -> Soon<Reply> {
    let set = set.clone();
    let (question, loan) = question(request);
    let place = match &question {
        Question::Read { sector, .. } | Question::Write { sector, .. } => *sector,
        _ => 0,
    };
    let asking = Rc::new(Asking { loan, told: Cell::new(Some(told)), reply: Coming::default() });
    Box::pin(async move {
        let asker = Rc::<Asking>::clone(&asking);
        if place / 8 % IN_STEPS == 3 {
            asker.answered(0, set.serve_in_steps(Client::default(), id, question).await);
        } else {
            set.ask_and_serve(Client::default(), id, question, asker).await;
        }
        asking.reply.comes().await
    })
}

/// A request in the engine's words, and what its memory is lent from.
fn question(request: Request) -> (Question, Option<Arc<Loan>>) {
    let mut loan = None;
    let question = match request {
        Request::Read { sector, mut buffer } => {
            if let Some((lender, lent)) = Loan::to_read(sector, &buffer) {
                (loan, buffer) = (Some(lender), lent);
            }
            Question::Read { sector, buffer }
        }
        Request::Write { sector, mut payload, fua } => {
            if let Some((lender, lent)) = Loan::to_write(sector, &payload) {
                (loan, payload) = (Some(lender), lent);
            }
            Question::Write { sector, payload, fua }
        }
        Request::Flush => Question::Flush,
        Request::Discard { sector, sectors } => Question::Discard { sector, sectors },
        Request::WriteZeroes { sector, sectors, fua, may_unmap } => {
            Question::WriteZeroes { sector, sectors, fua, may_unmap }
        }
    };
    (question, loan)
}
