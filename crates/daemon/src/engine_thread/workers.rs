//! How requests are carried out. Most of them a set begins and ends without a task; the others are for tasks, each of which carries them out one
//! after the other: for a request that finds one idle no memory is asked for, and no task begins.
//!
//! The kernel's dirty pages may wait for a request, and the kernel for them to have memory again: so serving asks for none that can be had
//! beforehand. As many tasks begin as requests that want one were ever under way together; most of them are kept.

use super::IN_FLIGHT_MAX;
use super::absent::Inside;
use super::frozen::{Again, Attempt, Came, Desk, Stage};
use crate::translate::{self, Work};
use bcached_engine::{Asker, Begun, CacheSet, Client, Reply as EngineReply, VolumeId};
use bcached_env::Env;
use bcached_env::sync::{Notify, Permit};
use bcached_port::{Operation, ReplyTo, Request};
use slab::Slab;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

/// Those of one pump.
pub struct Workers {
    env: Env,
    desk: Desk,
    /// Requests that no task has begun. For each of them one has been woken or started, and whichever runs first takes the first: so they begin
    /// in the order in which they came, in whatever order tasks run.
    given: RefCell<VecDeque<Given>>,
    /// Each wakes one task that has nothing to do.
    idle: RefCell<Vec<Rc<Notify>>>,
    /// Requests that a set has, which will say what came of them.
    asked: RefCell<Slab<Asked>>,
}

/// A request for a task.
struct Given {
    whose: Whose,
    stage: Stage,
}

/// Who has asked, and what that takes until the answer.
struct Whose {
    client: Client,
    volume: VolumeId,
    reply_to: ReplyTo,
    permit: Permit,
}

/// A request that a set has.
struct Asked {
    whose: Whose,
    attempt: Attempt,
}

impl Workers {
    pub fn new(env: Env, desk: Desk) -> Rc<Self> {
        let (given, idle, asked) = Default::default();
        Rc::new(Self { env, desk, given, idle, asked })
    }

    pub const fn desk(&self) -> &Desk {
        &self.desk
    }

    /// Requests wait for a task to begin them.
    pub fn has_given(&self) -> bool {
        !self.given.borrow().is_empty()
    }

    /// Has a request carried out and answered.
    pub fn begin(self: &Rc<Self>, request: Request, permit: Permit) {
        let Request { client, volume, operation, reply_to } = request;
        let whose = Whose { client: Client(client.0), volume: VolumeId(volume.0), reply_to, permit };
        let may_end_at_once =
            matches!(operation, Operation::Read { .. } | Operation::Write { fua: false, .. });
        // Whoever came before begins before.
        let home = if may_end_at_once && !self.has_given() {
            self.desk.keeper.enters_at_once(whose.volume)
        } else {
            None
        };
        match home {
            Some(home) => self.ask(whose, operation, home),
            None => self.give(Given { whose, stage: Stage::New(operation) }),
        }
    }

    /// Has a set carry it out.
    fn ask(
        self: &Rc<Self>,
        whose: Whose,
        operation: Operation,
        (inside, set, turn): (Inside, CacheSet, u64),
    ) {
        let (client, volume) = (whose.client, whose.volume);
        let again = Again::of(&operation);
        let Work::Request(work) = translate::work_of(operation) else {
            unreachable!("reads and writes are one request")
        };
        let number =
            self.asked.borrow_mut().insert(Asked { whose, attempt: Attempt { again, turn, inside } });
        let asker: Rc<dyn Asker> = Rc::<Self>::clone(self);
        match set.ask(client, volume, work, &asker, number) {
            Begun::UnderWay => {}
            Begun::Refused(reply) => asker.answered(number, reply),
            Begun::InSteps(rest) => {
                let Asked { whose, attempt } = self.asked.borrow_mut().remove(number);
                self.give(Given { whose, stage: Stage::Begun(attempt, set, rest) });
            }
        }
    }

    /// Has a task carry it out.
    fn give(self: &Rc<Self>, given: Given) {
        self.given.borrow_mut().push_back(given);
        match self.idle.borrow_mut().pop() {
            Some(idle) => idle.notify_all(),
            None => self.env.spawn(Rc::clone(self).work()),
        }
    }

    /// The life of a task.
    async fn work(self: Rc<Self>) {
        let woken = Rc::new(Notify::new());
        loop {
            let given = self.given.borrow_mut().pop_front();
            let Some(Given { whose, stage }) = given else { return };
            let Whose { client, volume, reply_to, permit } = whose;
            let reply = self.desk.answer(client, volume, stage, permit).await;
            reply_to.send(reply);
            // Those that wait for a device are not under way, and there may be many.
            if self.idle.borrow().len() >= IN_FLIGHT_MAX {
                return;
            }
            self.idle.borrow_mut().push(Rc::clone(&woken));
            woken.wait().await;
        }
    }
}

impl Asker for Workers {
    fn answered(self: Rc<Self>, number: usize, reply: EngineReply) {
        let Asked { whose, attempt } = self.asked.borrow_mut().remove(number);
        match self.desk.came_of(attempt.turn, reply) {
            Came::Answered(reply) => {
                drop(attempt);
                whose.reply_to.send(reply);
                self.desk.give_back(Some(whose.permit));
            }
            Came::Trouble(error, buffer) => {
                self.give(Given { whose, stage: Stage::Trouble(attempt, error, buffer) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::frozen::Desk;
    use super::super::revival::tests::{backing, served_through};
    use super::*;
    use bcached_env::sync::Semaphore;
    use bcached_env::{Buffer, Outcome};
    use bcached_port::{ErrorKind, Replies, Requests, Server};
    use std::sync::Arc;

    fn port() -> (Requests<u32>, Replies<u32>, Server) {
        let (connector, server) = bcached_port::open(8, Arc::new(|| ()));
        let (requests, replies) = connector.connect(8);
        (requests, replies, server)
    }

    fn read(requests: &Requests<u32>, number: u32, volume: VolumeId) {
        let operation = Operation::Read { sector: 8, buffer: Buffer::zeroed(4096) };
        requests.submit(number, bcached_port::VolumeId(volume.0), operation);
    }

    /// Of a thread that ends by a panic clients must hear, and what they wait for must not be kept by what waits for them.
    #[test]
    fn what_is_under_way_is_answered_when_nobody_runs_the_set_any_more() {
        let (requests, mut replies, mut server) = port();
        let (executor, keeper, volume) = served_through(&backing(5), |driver| driver);
        let room = Semaphore::new(8);
        let workers = Workers::new(executor.env(), Desk::new(keeper.clone(), room.clone()));
        read(&requests, 1, volume);
        let request = server.take().expect("it is there");
        workers.begin(request, workers.desk().find_room().expect("there is room"));
        assert_eq!(workers.asked.borrow().len(), 1, "the set has it, and no task");
        let left = Rc::downgrade(&workers);
        drop(workers);
        keeper.is_over();
        drop((executor, keeper));
        assert!(left.upgrade().is_none(), "a request keeps who has asked");
        let (number, reply) = replies.try_next().expect("an answer");
        assert_eq!((number, reply.result), (1, Err(ErrorKind::Gone)));
        assert_eq!(room.available(), 8);
    }

    /// A read goes without a task, unless something that wants one was asked before: then it waits its turn behind that.
    #[test]
    fn requests_begin_in_the_order_in_which_they_came() {
        let (requests, mut replies, mut server) = port();
        let (mut executor, keeper, volume) = served_through(&backing(6), |driver| driver);
        let workers = Workers::new(executor.env(), Desk::new(keeper, Semaphore::new(8)));
        requests.submit(1, bcached_port::VolumeId(volume.0), Operation::Flush);
        read(&requests, 2, volume);
        while let Some(request) = server.take() {
            workers.begin(request, workers.desk().find_room().expect("there is room"));
        }
        assert_eq!((workers.given.borrow().len(), workers.asked.borrow().len()), (2, 0));
        let ended = executor.run_until(|| requests.outstanding() == 2 && workers.idle.borrow().len() == 2);
        assert_eq!(ended, Outcome::Done);
        read(&requests, 3, volume);
        workers.begin(server.take().expect("it is there"), workers.desk().find_room().expect("room"));
        assert_eq!((workers.given.borrow().len(), workers.asked.borrow().len()), (0, 1));
        assert_eq!(executor.run_until(|| workers.asked.borrow().is_empty()), Outcome::Done);
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
