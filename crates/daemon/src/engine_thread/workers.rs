//! Tasks that carry requests out, one after the other: for a request that finds one idle no memory is asked for, and no task begins.
//!
//! The kernel's dirty pages may wait for a request, and the kernel for them to have memory again: so serving asks for none that can be had
//! beforehand. As many tasks begin as requests were ever under way together; most of them are kept.

use super::IN_FLIGHT_MAX;
use super::frozen::Desk;
use bcached_engine::{Client, VolumeId};
use bcached_env::Env;
use bcached_env::sync::{Notify, Permit};
use bcached_port::Request;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

/// Those of one pump.
pub struct Workers {
    desk: Desk,
    /// Requests that no task has begun. For each of them one has been woken or started, and whichever runs first takes the first: so they begin
    /// in the order in which they came, in whatever order tasks run.
    given: RefCell<VecDeque<(Request, Permit)>>,
    /// Each wakes one task that has nothing to do.
    idle: RefCell<Vec<Rc<Notify>>>,
}

impl Workers {
    pub fn new(desk: Desk) -> Rc<Self> {
        Rc::new(Self { desk, given: RefCell::default(), idle: RefCell::default() })
    }

    pub const fn desk(&self) -> &Desk {
        &self.desk
    }

    /// Has a request carried out and answered.
    pub fn begin(self: &Rc<Self>, env: &Env, request: Request, permit: Permit) {
        self.given.borrow_mut().push_back((request, permit));
        match self.idle.borrow_mut().pop() {
            Some(idle) => idle.notify_all(),
            None => env.spawn(Rc::clone(self).work()),
        }
    }

    /// The life of a task.
    async fn work(self: Rc<Self>) {
        let woken = Rc::new(Notify::new());
        loop {
            let given = self.given.borrow_mut().pop_front();
            let Some((request, permit)) = given else { return };
            let (client, volume) = (Client(request.client.0), VolumeId(request.volume.0));
            let reply = self.desk.answer(client, volume, request.operation, permit).await;
            request.reply_to.send(reply);
            self.desk.freed.notify_all();
            // Those that wait for a device are not under way, and there may be many.
            if self.idle.borrow().len() >= IN_FLIGHT_MAX {
                return;
            }
            self.idle.borrow_mut().push(Rc::clone(&woken));
            woken.wait().await;
        }
    }
}
