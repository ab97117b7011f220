//! The executor itself.

use super::ready::{ReadySet, TaskWaker};
use super::{BREATH_NS, Core, Env, TASKS_MAX, Task};
use crate::disk::{ListenedOperation, OperationKey, OperationState};
use crate::driver::{Completion, Driver, Event};
use crate::rng::Rng;
use crate::sync::Notify;
use crate::time::Time;
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::rc::Rc;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cell::{Cell, RefCell};
use core::future::Future;
use core::task::{Context, Waker};
use slab::Slab;

/// Number of polls, and separately of listener calls, between two checks of the driver, so that
/// completions are collected under load, too.
const POLLS_PER_TURN: usize = 256;
/// Events that a check of the driver returns without an allocation.
const EVENTS_ROOM: usize = 1024;
/// CPU time charged between two checks of the driver, in nanoseconds, beyond which the next check
/// follows at once: the longest time that any client may be kept waiting.
const TURN_NS_MAX: u64 = 200_000;

/// Which runs next of what is ready: tasks, and completions that a listener is to be told of.
#[derive(Clone, Debug)]
pub enum RunOrder {
    /// Completions and tasks alternate. Completions run in order of arrival. Tasks run by number,
    /// each ready one once per round, new ones first in the order in which they were spawned. After
    /// them, one breathing task per turn.
    Fifo,
    /// A random one, whether it breathes or not; the simulator's choice.
    Seeded(Rng),
}

/// Why a run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunOutcome {
    /// The awaited condition holds.
    Done,
    /// The driver reported [`Event::Halt`].
    Halted,
}

/// Runs tasks, and is their only owner.
pub struct Executor {
    env: Env,
    tasks: Slab<Task>,
    wakers: Vec<Waker>,
    set: Arc<ReadySet>,
    ready: VecDeque<usize>,
    /// Tasks that breathe, in order of time. However many there are, a task whose operation has
    /// completed waits for at most one of them: each turn polls one.
    breathing: VecDeque<usize>,
    /// Completions that their listeners have not been told of, and where the listeners are kept.
    untold: VecDeque<(usize, Completion)>,
    /// Completions passed to listeners as they were found, since the driver was last checked.
    ends: usize,
    /// The last item run was a completion, so it is a task's turn.
    end_was_last: bool,
    order: RunOrder,
    /// CPU time charged since the driver was last checked, in nanoseconds.
    turn_ns: u64,
}

impl Executor {
    /// Creates an executor over `driver`. `seed` feeds [`Env::random`].
    #[must_use]
    pub fn new(driver: Box<dyn Driver>, order: RunOrder, seed: u64) -> Self {
        let core = Core {
            driver: RefCell::new(driver),
            operations: RefCell::default(),
            listened: RefCell::default(),
            errors: RefCell::default(),
            timers: RefCell::default(),
            timer_count: Cell::new(0),
            spawned: RefCell::default(),
            rng: RefCell::new(Rng::new(seed)),
            bell: Notify::new(),
            charged: Cell::new(0),
            breath_ns: Cell::new(BREATH_NS),
            is_out_of_breath: Cell::new(false),
            is_breathing: Cell::new(false),
            is_polling: Cell::new(false),
            told: Cell::new(None),
            looks: Cell::new(0),
        };
        let set = Arc::new(ReadySet::new());
        let env = Env { core: Rc::new(core) };
        Self {
            env,
            tasks: Slab::new(),
            wakers: Vec::new(),
            set,
            ready: VecDeque::new(),
            breathing: VecDeque::new(),
            untold: VecDeque::new(),
            ends: 0,
            end_was_last: false,
            order,
            turn_ns: 0,
        }
    }

    /// Lets tasks breathe wherever they can, however little they have done: the simulator's choice,
    /// whose nodes are small.
    #[must_use]
    pub fn out_of_breath(self) -> Self {
        self.env.core.breath_ns.set(1);
        self.env.core.is_out_of_breath.set(true);
        self
    }

    /// Returns the world, for flows to keep.
    #[must_use]
    pub fn env(&self) -> Env {
        self.env.clone()
    }

    /// Runs until `future` has ended; `None` if the world halted first. Other tasks run meanwhile
    /// and stay alive.
    pub fn block_on<T: 'static>(&mut self, future: impl Future<Output = T> + 'static) -> Option<T> {
        let result = Rc::new(RefCell::new(None));
        let place = Rc::clone(&result);
        self.env.spawn(async move {
            let value = future.await;
            *place.borrow_mut() = Some(value);
        });
        let outcome = self.run_until(|| result.borrow().is_some());
        let value = result.borrow_mut().take();
        match outcome {
            RunOutcome::Done => value,
            RunOutcome::Halted => None,
        }
    }

    /// Runs until `done` returns true (called before every wait and every few polls) or the world
    /// halts.
    pub fn run_until(&mut self, mut done: impl FnMut() -> bool) -> RunOutcome {
        let mut events = Vec::with_capacity(EVENTS_ROOM);
        loop {
            let is_idle = !self.turn() && self.breathing.is_empty();
            if let Some(task) = self.breathing.pop_front() {
                self.poll(task);
            }
            if done() {
                return RunOutcome::Done;
            }
            let is_idle = is_idle || !self.has_ready();
            // No timer is added or removed before this value is used again.
            let timer = self.next_timer();
            let until = if is_idle { timer } else { Some(self.env.core.clock()) };
            self.env.core.driver.borrow_mut().wait(until, &mut events);
            (self.turn_ns, self.ends) = (0, 0);
            let now = self.env.core.clock();
            for event in events.drain(..) {
                match event {
                    Event::Done(completion) => self.take_in(completion, now),
                    Event::Bell => self.env.core.bell.notify_all(),
                    Event::Halt => return RunOutcome::Halted,
                }
            }
            if timer.is_some_and(|first| first <= now) {
                self.fire_timers(now);
            }
        }
    }

    /// Handles a completion found at `now`. Wakes the task that waits for it, or calls its listener
    /// at once if other completions have left the time for that.
    #[inline]
    fn take_in(&mut self, completion: Completion, now: Time) {
        match OperationKey::of(completion.token) {
            OperationKey::Awaited(place) => OperationState::complete(&self.env.core, place, completion),
            OperationKey::Listened(place) => {
                // Half of the time is reserved for tasks.
                let has_time = self.turn_ns < TURN_NS_MAX / 2 && self.ends < POLLS_PER_TURN;
                if has_time && self.untold.is_empty() && matches!(self.order, RunOrder::Fifo) {
                    self.ends += 1;
                    self.tell(place, completion, Some(now));
                } else {
                    self.untold.push_back((place, completion));
                }
            }
        }
    }

    /// Calls the listener.
    #[inline]
    fn tell(&mut self, place: usize, completion: Completion, now: Option<Time>) {
        let core = &self.env.core;
        core.begin_piece(now);
        ListenedOperation::complete(core, place, completion);
        self.turn_ns += core.end_piece();
    }

    /// Runs what is ready until the driver must be checked again; returns false if nothing is ready
    /// any more.
    fn turn(&mut self) -> bool {
        let mut polls = 0;
        while polls < POLLS_PER_TURN && self.turn_ns < TURN_NS_MAX {
            if !self.run_one() {
                return false;
            }
            polls += 1;
        }
        true
    }

    fn has_ready(&mut self) -> bool {
        self.gather();
        !self.ready.is_empty() || !self.breathing.is_empty() || !self.untold.is_empty()
    }

    fn next_timer(&self) -> Option<Time> {
        self.env.core.timers.borrow().first_key_value().map(|((time, _), _)| *time)
    }

    /// Wakes the timers that are due by `now`.
    fn fire_timers(&self, now: Time) {
        let mut timers = self.env.core.timers.borrow_mut();
        while let Some(first) = timers.first_entry() {
            if first.key().0 > now {
                break;
            }
            first.remove().wake();
        }
    }

    /// Collects what is ready: spawned tasks and woken ones.
    #[inline]
    fn gather(&mut self) {
        if !self.env.core.spawned.borrow().is_empty() {
            self.admit();
        }
        self.set.drain(&mut self.ready);
    }

    /// Turns spawned futures into tasks, as far as there is room. They begin in the order in which
    /// they were spawned: sequential accesses to a device should stay sequential.
    fn admit(&mut self) {
        while self.tasks.len() < TASKS_MAX {
            let Some(task) = self.env.core.spawned.borrow_mut().pop_front() else { return };
            let index = self.tasks.insert(task);
            match self.order {
                RunOrder::Fifo => self.ready.push_back(index),
                RunOrder::Seeded(_) => self.set.set(index),
            }
        }
    }

    /// Runs the next item; returns false if nothing is ready.
    fn run_one(&mut self) -> bool {
        match &self.order {
            RunOrder::Fifo => self.run_first(),
            RunOrder::Seeded(_) => self.run_any(),
        }
    }

    /// Completions and tasks alternate, so neither keeps the other waiting.
    fn run_first(&mut self) -> bool {
        if self.ready.is_empty() {
            self.gather();
        }
        let tells = !self.untold.is_empty() && (self.ready.is_empty() || !self.end_was_last);
        self.end_was_last = tells;
        if tells && let Some((place, completion)) = self.untold.pop_front() {
            self.tell(place, completion, None);
            return true;
        }
        let task = self.ready.pop_front();
        task.inspect(|task| self.poll(*task)).is_some()
    }

    fn run_any(&mut self) -> bool {
        self.gather();
        let (tasks, all) = (self.ready.len(), self.ready.len() + self.untold.len());
        let RunOrder::Seeded(rng) = &mut self.order else { return false };
        if all == 0 {
            return false;
        }
        let pick = usize::try_from(rng.below(all as u64)).expect("an index below a length");
        if pick < tasks {
            let task = self.ready.swap_remove_back(pick).expect("the index is valid");
            self.poll(task);
        } else {
            let (place, completion) = self.untold.swap_remove_back(pick - tasks).expect("the index is valid");
            self.tell(place, completion, None);
        }
        true
    }

    fn poll(&mut self, index: usize) {
        // A waker may outlive its task: its bit then refers to no task, or to a newer one that is
        // polled once too often. The same holds for a task that breathes and was also woken by one
        // of several joined futures.
        let Some(task) = self.tasks.get_mut(index) else { return };
        while self.wakers.len() <= index {
            let task = self.wakers.len();
            self.wakers.push(Waker::from(Arc::new(TaskWaker { task, ready: Arc::clone(&self.set) })));
        }
        let mut context = Context::from_waker(&self.wakers[index]);
        let core = &self.env.core;
        core.begin_piece(None);
        if task.as_mut().poll(&mut context).is_ready() {
            drop(self.tasks.remove(index));
        }
        self.turn_ns += core.end_piece();
        if self.env.core.is_breathing.replace(false) {
            match self.order {
                // One of several joined futures may have been woken, and breathes again: it is
                // still one task.
                RunOrder::Fifo if self.breathing.contains(&index) => {}
                RunOrder::Fifo => self.breathing.push_back(index),
                RunOrder::Seeded(_) => self.set.set(index),
            }
        }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // Tasks hold clones of `env`: break the cycle. This is the crash of a simulated process.
        self.tasks.clear();
        self.untold.clear();
        self.env.core.spawned.borrow_mut().clear();
        drop(core::mem::take(&mut *self.env.core.timers.borrow_mut()));
        // A listener may hold values that look at the operations when dropped, so nothing is
        // borrowed by then.
        let listened = core::mem::take(&mut *self.env.core.listened.borrow_mut());
        drop(listened);
    }
}
