//! Begins requests, and runs the tasks that some of them need. A set begins and completes most
//! requests without a task. Each task carries out one request after the other, so a request that
//! finds an idle task allocates nothing and starts none.
//!
//! Serving allocates as little as possible: the kernel's dirty pages may wait for a request, and an
//! allocation may wait for those pages to be written. The number of tasks is the largest number of
//! requests that ever needed one at the same time, and most of these tasks are kept.

use crate::dispatch::{Attempt, AttemptResult, Dispatcher, RequestSource, RequestStage};
use crate::missing_devices::InFlightGuard;
use crate::retry::Retry;
use crate::translate::{self, EngineWork};
use bcached_engine::{CacheSet, ClientId, Reply as EngineReply, Requester, Submission, VolumeId};
use bcached_env::sync::{Notify, Permit};
use bcached_env::{Env, Time};
use bcached_port::{Operation, Reply, ReplyTo};
use slab::Slab;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

/// Maximum number of requests in flight in a host.
pub const IN_FLIGHT_MAX: usize = bcached_engine::REQUESTS_MAX;

/// Where the answer to a request goes.
pub trait ReplySink: 'static {
    /// Sends the answer. Implementations must not block.
    fn send(self, reply: Reply);
}

impl ReplySink for ReplyTo {
    fn send(self, reply: Reply) {
        Self::send(self, reply);
    }
}

/// A request to be carried out.
pub struct HostRequest<A> {
    /// The client, the volume and the time of the request.
    pub caller: RequestSource,
    /// What to do.
    pub operation: Operation,
    /// Where the answer goes.
    pub answer_to: A,
}

impl HostRequest<ReplyTo> {
    /// Converts a request from the port, with its time converted to that of this environment.
    #[must_use]
    pub fn from_port(request: bcached_port::Request, env: &Env) -> Self {
        let bcached_port::Request { client, volume, operation, submitted, reply_to } = request;
        let asked = submitted.map_or_else(Time::default, |submitted| {
            // The clocks are read in this order, so that the time is rather too early than too
            // late.
            let now = env.now();
            Time::default() + now.since(Time::default()).saturating_sub(submitted.elapsed())
        });
        let caller = RequestSource { client: ClientId(client.0), volume: VolumeId(volume.0), asked };
        Self { caller, operation, answer_to: reply_to }
    }
}

/// The workers of one host.
pub struct Workers<A> {
    env: Env,
    dispatcher: Dispatcher,
    /// Requests that wait for a task to begin them. One task has been woken or started for each,
    /// and the task that runs first takes the first request. So requests begin in the order of
    /// their arrival, whatever the order of the tasks.
    queue: RefCell<VecDeque<QueuedRequest<A>>>,
    /// Each wakes one idle task.
    idle: RefCell<Vec<Rc<Notify>>>,
    /// Requests in flight in a set, without a task.
    asked: RefCell<Slab<InFlightRequest<A>>>,
}

/// A request for a task.
struct QueuedRequest<A> {
    origin: RequestContext<A>,
    stage: RequestStage,
}

/// The source of a request, and its room until the answer.
struct RequestContext<A> {
    caller: RequestSource,
    answer_to: A,
    permit: Permit,
}

/// A request in flight in a set, without a task.
struct InFlightRequest<A> {
    origin: RequestContext<A>,
    attempt: Attempt,
}

impl<A: ReplySink> Workers<A> {
    /// Creates the workers; no task is started yet.
    pub fn new(env: Env, dispatcher: Dispatcher) -> Rc<Self> {
        let (queue, idle, asked) = Default::default();
        Rc::new(Self { env, dispatcher, queue, idle, asked })
    }

    /// Returns the dispatcher that carries out requests.
    pub const fn dispatcher(&self) -> &Dispatcher {
        &self.dispatcher
    }

    /// Returns whether requests wait for a task to begin them.
    #[must_use]
    pub fn has_queued(&self) -> bool {
        !self.queue.borrow().is_empty()
    }

    /// Begins a request; it is answered when it completes.
    pub fn begin(self: &Rc<Self>, request: HostRequest<A>, permit: Permit) {
        let HostRequest { caller, operation, answer_to } = request;
        let origin = RequestContext { caller, answer_to, permit };
        let may_end_at_once =
            matches!(operation, Operation::Read { .. } | Operation::Write { fua: false, .. });
        // Requests begin in the order of their arrival.
        let entered = if may_end_at_once && !self.has_queued() {
            self.dispatcher.host.enter_at_once(origin.caller.volume)
        } else {
            None
        };
        match entered {
            Some(entered) => self.ask(origin, operation, entered),
            None => self.queue(QueuedRequest { origin, stage: RequestStage::New(operation) }),
        }
    }

    /// Passes a request to a set, without a task if possible.
    fn ask(
        self: &Rc<Self>,
        origin: RequestContext<A>,
        operation: Operation,
        (in_flight, set, moves): (InFlightGuard, CacheSet, u64),
    ) {
        let RequestSource { client, volume, .. } = origin.caller;
        let retry = Retry::of(&operation);
        let EngineWork::Request(work) = translate::work_of(operation, origin.caller.asked) else {
            unreachable!("reads and writes are one request")
        };
        let attempt = Attempt { retry, moves, in_flight };
        let number = self.asked.borrow_mut().insert(InFlightRequest { origin, attempt });
        let requester: Rc<dyn Requester> = Rc::<Self>::clone(self);
        match set.ask(client, volume, work, &requester, number) {
            Submission::InFlight => {}
            Submission::Refused(reply) => requester.answered(number, reply),
            Submission::NeedsTask(rest) => {
                let InFlightRequest { origin, attempt } = self.asked.borrow_mut().remove(number);
                self.queue(QueuedRequest { origin, stage: RequestStage::Started(attempt, set, rest) });
            }
        }
    }

    /// Passes a request to a task.
    fn queue(self: &Rc<Self>, queued: QueuedRequest<A>) {
        self.queue.borrow_mut().push_back(queued);
        match self.idle.borrow_mut().pop() {
            Some(idle) => idle.notify_all(),
            None => self.env.spawn(Rc::clone(self).work()),
        }
    }

    /// Runs a task.
    async fn work(self: Rc<Self>) {
        let woken = Rc::new(Notify::new());
        loop {
            let queued = self.queue.borrow_mut().pop_front();
            let Some(QueuedRequest { origin, stage }) = queued else { return };
            let RequestContext { caller, answer_to, permit } = origin;
            let reply = self.dispatcher.answer(caller, stage, permit).await;
            answer_to.send(reply);
            // Tasks whose requests waited for a device do not count as in flight, so there may be
            // more of them.
            if self.idle.borrow().len() >= IN_FLIGHT_MAX {
                return;
            }
            self.idle.borrow_mut().push(Rc::clone(&woken));
            woken.wait().await;
        }
    }
}

impl<A: ReplySink> Requester for Workers<A> {
    fn answered(self: Rc<Self>, number: usize, reply: EngineReply) {
        let InFlightRequest { origin, attempt } = self.asked.borrow_mut().remove(number);
        match self.dispatcher.outcome_of(attempt.moves, reply) {
            AttemptResult::Answered(reply) => {
                drop(attempt);
                origin.answer_to.send(reply);
                self.dispatcher.free_room(Some(origin.permit));
            }
            AttemptResult::DeviceFailed(error, buffer) => {
                self.queue(QueuedRequest {
                    origin,
                    stage: RequestStage::DeviceFailed(attempt, error, buffer),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::Dispatcher;
    use crate::testing::{TestHost, backing, served_through};
    use bcached_env::sync::Semaphore;
    use bcached_env::{Buffer, RunOutcome};
    use bcached_port::{ErrorKind, ReplyReceiver, RequestSender, Server};
    use std::sync::Arc;

    fn port() -> (RequestSender<u32>, ReplyReceiver<u32>, Server) {
        let (connector, server) = bcached_port::open(8, Arc::new(|| ()));
        let (requests, replies) = connector.connect(8);
        (requests, replies, server)
    }

    fn read(requests: &RequestSender<u32>, number: u32, volume: VolumeId) {
        let operation = Operation::Read { sector: 8, buffer: Buffer::zeroed(4096) };
        requests.submit(number, bcached_port::VolumeId(volume.0), operation);
    }

    /// Proves that clients are told if the engine's thread ends by a panic. Requests in flight and
    /// the sets hold each other, and must be dropped all the same.
    #[test]
    fn what_is_under_way_is_answered_when_nobody_runs_the_set_any_more() {
        let (requests, mut replies, mut server) = port();
        let (TestHost { executor, host, .. }, volume) = served_through(&backing(5), |driver| driver);
        let room = Semaphore::new(8);
        let workers = Workers::new(executor.env(), Dispatcher::new(host.clone(), room.clone()));
        read(&requests, 1, volume);
        let request = server.take().expect("it is there");
        workers.begin(
            HostRequest::from_port(request, &workers.env),
            workers.dispatcher().find_room().expect("there is room"),
        );
        assert_eq!(workers.asked.borrow().len(), 1, "the set has it, and no task");
        let left = Rc::downgrade(&workers);
        drop(workers);
        host.abandon();
        drop((executor, host));
        assert!(left.upgrade().is_none(), "a request keeps who has asked");
        let (number, reply) = replies.try_next().expect("an answer");
        assert_eq!((number, reply.result), (1, Err(ErrorKind::Gone)));
        assert_eq!(room.available(), 8);
    }

    /// Proves that a read needs no task, unless a request that needs one came before it: then the
    /// read queues behind that request.
    #[test]
    fn requests_begin_in_the_order_in_which_they_came() {
        let (requests, mut replies, mut server) = port();
        let (TestHost { mut executor, host, .. }, volume) = served_through(&backing(6), |driver| driver);
        let workers = Workers::new(executor.env(), Dispatcher::new(host, Semaphore::new(8)));
        requests.submit(1, bcached_port::VolumeId(volume.0), Operation::Flush);
        read(&requests, 2, volume);
        while let Some(request) = server.take() {
            workers.begin(
                HostRequest::from_port(request, &workers.env),
                workers.dispatcher().find_room().expect("there is room"),
            );
        }
        assert_eq!((workers.queue.borrow().len(), workers.asked.borrow().len()), (2, 0));
        let ended = executor.run_until(|| requests.outstanding() == 2 && workers.idle.borrow().len() == 2);
        assert_eq!(ended, RunOutcome::Done);
        read(&requests, 3, volume);
        let request = server.take().expect("it is there");
        workers.begin(
            HostRequest::from_port(request, &workers.env),
            workers.dispatcher().find_room().expect("room"),
        );
        assert_eq!((workers.queue.borrow().len(), workers.asked.borrow().len()), (0, 1));
        assert_eq!(executor.run_until(|| workers.asked.borrow().is_empty()), RunOutcome::Done);
        let mut answered: Vec<u32> = std::iter::from_fn(|| replies.try_next())
            .map(|(number, reply)| {
                assert_eq!(reply.result, Ok(()));
                number
            })
            .collect();
        answered.sort_unstable();
        assert_eq!(answered, [1, 2, 3]);
    }
}
