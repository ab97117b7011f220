//! A single-threaded executor over a [`Driver`]. Production drains ready tasks in order; simulation picks the next one
//! by seed. Tasks are never dropped before they end, except when the world halts.
//!
//! Liveness: a task sleeps only on an operation, a timer or a notification of `sync`. Each holds its waker; a waker
//! sets the task's bit in the ready set; the run loop polls every task whose bit is set before it waits on the driver.

use crate::disk::{Disk, Errors, Operation, Pending, Slot};
use crate::driver::{DiskId, DiskInfo, Driver, Event, Op, Token};
use crate::rng::Rng;
use crate::sync::Notify;
use crate::time::Time;
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::rc::Rc;
use alloc::sync::Arc;
use alloc::task::Wake;
use alloc::vec::Vec;
use core::cell::{Cell, RefCell};
use core::future::Future;
use core::pin::Pin;
use core::sync::atomic::{AtomicU64, Ordering};
use core::task::{Context, Poll, Waker};
use core::time::Duration;
use slab::Slab;

/// Tasks alive at once; further ones wait in a queue until one ends. Whoever waits for a task that he has started must know that it
/// is let in: all that may be in flight together stays below this (the engine's `request` module counts it).
pub const TASKS_MAX: usize = 8192;

/// Polls between two looks at the driver, so that completions are collected under load too.
const POLLS_PER_TURN: usize = 256;
/// Events that a look at the driver brings without asking for memory.
const EVENTS_ROOM: usize = 1024;
/// CPU time charged between two looks at the driver, in nanoseconds, beyond which the next comes at once: what nobody may be kept
/// waiting for.
const TURN_NS_MAX: u64 = 200_000;

/// Is ready when it is polled for the second time. The first time it calls `arrange`, which sees to that there is another.
async fn pending_once(arrange: impl FnOnce(&mut Context<'_>)) {
    let mut arrange = Some(arrange);
    core::future::poll_fn(|context| match arrange.take() {
        Some(arrange) => {
            arrange(context);
            Poll::Pending
        }
        None => Poll::Ready(()),
    })
    .await;
}

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// Which ready task runs next.
#[derive(Clone, Debug)]
pub enum Order {
    /// By number, each ready task once a round, new ones first in the order of their beginning; of those that breathe one a turn, after them.
    Fifo,
    /// A random one, whether it breathes or not; the simulator's choice.
    Seeded(Rng),
}

/// Why a run ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// What was waited for has happened.
    Done,
    /// The driver said [`Event::Halt`].
    Halted,
}

/// One bit a task, and one for each word of those that has any: most of the time few tasks are ready, and it is asked at each turn. Wakers
/// must be `Send`, so the bits are atomics; in practice one thread touches them.
struct ReadySet {
    words: [AtomicU64; WORDS],
    /// A word's bit is set after the word, and cleared before it.
    filled: [AtomicU64; WORDS / 64],
}

/// Words of a set of tasks.
const WORDS: usize = TASKS_MAX / 64;
const _: () = assert!(TASKS_MAX.is_multiple_of(64 * 64), "a bit for each word, in whole words");

impl ReadySet {
    const fn new() -> Self {
        Self {
            words: [const { AtomicU64::new(0) }; WORDS],
            filled: [const { AtomicU64::new(0) }; WORDS / 64],
        }
    }

    fn set(&self, task: usize) {
        let word = task / 64;
        self.words[word].fetch_or(1 << (task % 64), Ordering::Release);
        self.filled[word / 64].fetch_or(1 << (word % 64), Ordering::Release);
    }

    /// Moves all set bits into `ready`, in order.
    #[inline]
    fn drain(&self, ready: &mut VecDeque<usize>) {
        for (index, filled) in self.filled.iter().enumerate() {
            if filled.load(Ordering::Relaxed) != 0 {
                self.drain_words(index, filled.swap(0, Ordering::Acquire), ready);
            }
        }
    }

    fn drain_words(&self, index: usize, mut filled: u64, ready: &mut VecDeque<usize>) {
        while filled != 0 {
            let word = index * 64 + filled.trailing_zeros() as usize;
            filled &= filled - 1;
            let mut bits = self.words[word].swap(0, Ordering::Acquire);
            while bits != 0 {
                ready.push_back(word * 64 + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }
}

struct TaskWaker {
    task: usize,
    ready: Arc<ReadySet>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.ready.set(self.task);
    }
    fn wake_by_ref(self: &Arc<Self>) {
        self.ready.set(self.task);
    }
}

pub(crate) struct Core {
    pub(crate) driver: RefCell<Box<dyn Driver>>,
    pub(crate) operations: RefCell<Slab<Operation>>,
    /// How each device that has ever failed has fared.
    pub(crate) errors: RefCell<BTreeMap<DiskId, Errors>>,
    timers: RefCell<BTreeMap<(Time, u64), Waker>>,
    timer_count: Cell<u64>,
    spawned: RefCell<VecDeque<Task>>,
    rng: RefCell<Rng>,
    bell: Notify,
    /// CPU time charged since the running task was polled, in nanoseconds.
    charged: Cell<u64>,
    /// With that much charged a task lets others run.
    breath_ns: Cell<u64>,
    /// It does so wherever it can.
    is_out_of_breath: Cell<bool>,
    /// The running task breathes.
    is_breathing: Cell<bool>,
    /// A task is running.
    is_polling: Cell<bool>,
    /// What the clock told the running task, if it has asked: for it no time passes until it waits, or has asked very often.
    told: Cell<Option<Time>>,
    /// How often it has asked since.
    looks: Cell<u8>,
}

impl Core {
    /// The clock itself.
    pub(crate) fn clock(&self) -> Time {
        self.driver.borrow().now()
    }

    #[inline]
    fn now(&self) -> Time {
        let looks = self.looks.get().wrapping_add(1);
        self.looks.set(looks);
        // One that waits for a time without letting others run sees it come, and the driver sees such a task.
        if let Some(told) = self.told.get().filter(|_| looks != 0) {
            return told;
        }
        let now = self.clock();
        if self.is_polling.get() {
            self.told.set(Some(now));
        }
        now
    }
}

/// CPU time after which a task lets others run, at the next place where it can ([`Env::breathe`]), until [`Env::set_breath`] says
/// otherwise. A request meets such a piece three or four times on its way, so it stays below a third of a millisecond (B7); with less, clients
/// who write as fast as they can get so much of the processor that what makes room for them falls behind.
pub const BREATH_NS: u64 = 28_000;
/// The most that it can say. A transition begun just before may take as much again, and both together stay below what nobody may be
/// kept waiting for.
pub const BREATH_NS_MAX: u64 = 80_000;

/// The world as flows see it. Cheap to clone.
#[derive(Clone)]
pub struct Env {
    pub(crate) core: Rc<Core>,
}

impl Env {
    /// Starts a task. It runs when the executor gets to it.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        self.core.spawned.borrow_mut().push_back(Box::pin(task));
    }

    /// The clock, as it stood when the running task first asked since it was polled, or 256 looks ago: a request asks dozens of times, and a
    /// piece of work is short.
    #[must_use]
    #[inline]
    pub fn now(&self) -> Time {
        self.core.now()
    }

    /// Wall-clock seconds since 1970.
    #[must_use]
    pub fn wall_seconds(&self) -> u32 {
        self.core.driver.borrow().wall_seconds()
    }

    /// A random number that is not zero.
    #[must_use]
    pub fn random(&self) -> u64 {
        self.core.rng.borrow_mut().nonzero()
    }

    /// Charges CPU time for work done in a transition. The driver is told when the task waits, with all that it did in
    /// one piece.
    #[inline]
    pub fn charge(&self, nanoseconds: u64) {
        self.core.charged.set(self.core.charged.get().saturating_add(nanoseconds));
    }

    /// Whether [`Env::breathe`] would return at once.
    #[inline]
    #[must_use]
    pub fn has_breath(&self) -> bool {
        self.core.charged.get() < self.core.breath_ns.get()
    }

    /// Lets others run first if this task has done much since it last waited: those that are ready, and those that wait for what
    /// has just been answered. For whoever does a lot in pieces: to be called before each.
    pub async fn breathe(&self) {
        // One of several joined futures finds that another has done much since the task was polled again.
        while !self.has_breath() {
            pending_once(|_| self.core.is_breathing.set(true)).await;
        }
    }

    /// From here on a task lets others run after so much CPU time, in nanoseconds.
    ///
    /// # Panics
    /// If that is more than the least that is sure not to keep anybody waiting for too long: 80 us.
    #[inline]
    pub fn set_breath(&self, nanoseconds: u64) {
        assert!(
            nanoseconds <= BREATH_NS_MAX,
            "{nanoseconds} ns, and a transition besides, keep others waiting"
        );
        if !self.core.is_out_of_breath.get() {
            self.core.breath_ns.set(nanoseconds);
        }
    }

    /// A handle on a device.
    #[must_use]
    pub fn disk(&self, id: DiskId) -> Disk {
        Disk { env: self.clone(), id }
    }

    /// What a device is.
    #[must_use]
    pub fn disk_info(&self, id: DiskId) -> DiskInfo {
        self.core.driver.borrow().info(id)
    }

    /// Waits for `duration`.
    pub async fn sleep(&self, duration: Duration) {
        let until = self.core.clock() + duration;
        self.sleep_until(until).await;
    }

    /// Waits until the clock has reached `until`.
    pub fn sleep_until(&self, until: Time) -> Sleep {
        Sleep { env: self.clone(), until, number: None }
    }

    /// Waits for the next notification of `notify`, at most until `until`.
    pub async fn wait_until(&self, notify: &Notify, until: Time) {
        let mut notified = notify.wait();
        let mut sleep = self.sleep_until(until);
        core::future::poll_fn(|context| match Pin::new(&mut notified).poll(context) {
            Poll::Ready(()) => Poll::Ready(()),
            Poll::Pending => Pin::new(&mut sleep).poll(context),
        })
        .await;
    }

    /// Lets other ready tasks run first.
    pub async fn yield_now(&self) {
        pending_once(|context| context.waker().wake_by_ref()).await;
    }

    /// Waits until somebody outside rings ([`Event::Bell`]) after this call.
    pub async fn bell(&self) {
        self.core.bell.wait().await;
    }

    pub(crate) fn submit(&self, disk: DiskId, op: Op) -> Pending {
        let sector = match &op {
            Op::Read { sector, .. }
            | Op::Write { sector, .. }
            | Op::Discard { sector, .. }
            | Op::Zero { sector, .. } => *sector,
            Op::Flush => 0,
        };
        let operation = Operation { slot: Slot::Waiting(None), disk, sector, since: self.now() };
        let slot = self.core.operations.borrow_mut().insert(operation);
        self.core.driver.borrow_mut().submit(disk, Token(slot as u64), op);
        Pending::new(self.clone(), slot)
    }
}

/// The future of [`Env::sleep_until`]; dropping it removes its timer.
pub struct Sleep {
    env: Env,
    until: Time,
    number: Option<u64>,
}

impl Future for Sleep {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.env.now() >= self.until {
            return Poll::Ready(());
        }
        let core = Rc::clone(&self.env.core);
        let number = *self.number.get_or_insert_with(|| {
            let number = core.timer_count.get();
            core.timer_count.set(number + 1);
            number
        });
        core.timers.borrow_mut().insert((self.until, number), context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(number) = self.number
            && let Ok(mut timers) = self.env.core.timers.try_borrow_mut()
        {
            timers.remove(&(self.until, number));
        }
    }
}

/// Runs tasks; the only owner of them.
pub struct Executor {
    env: Env,
    tasks: Slab<Task>,
    wakers: Vec<Waker>,
    set: Arc<ReadySet>,
    ready: VecDeque<usize>,
    /// Tasks that breathe, in order of time. However many they are, who has an answer waits for one of them at most: each
    /// turn polls one.
    breathing: VecDeque<usize>,
    order: Order,
    /// CPU time charged since the driver was looked at, in nanoseconds.
    turn_ns: u64,
}

impl Executor {
    /// An executor over `driver`. `seed` feeds [`Env::random`].
    #[must_use]
    pub fn new(driver: Box<dyn Driver>, order: Order, seed: u64) -> Self {
        let core = Core {
            driver: RefCell::new(driver),
            operations: RefCell::default(),
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
        let (ready, breathing) = (VecDeque::new(), VecDeque::new());
        Self { env, tasks: Slab::new(), wakers: Vec::new(), set, ready, breathing, order, turn_ns: 0 }
    }

    /// Lets tasks breathe wherever they can, however little they have done: the simulator's choice, whose nodes are small.
    #[must_use]
    pub fn out_of_breath(self) -> Self {
        self.env.core.breath_ns.set(1);
        self.env.core.is_out_of_breath.set(true);
        self
    }

    /// The world, for flows to keep.
    #[must_use]
    pub fn env(&self) -> Env {
        self.env.clone()
    }

    /// Runs until `future` has ended; `None` if the world halted first. Other tasks run meanwhile and stay alive.
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
            Outcome::Done => value,
            Outcome::Halted => None,
        }
    }

    /// Runs until `done` says so (asked before every wait and every few polls) or the world halts.
    pub fn run_until(&mut self, mut done: impl FnMut() -> bool) -> Outcome {
        let mut events = Vec::with_capacity(EVENTS_ROOM);
        loop {
            let is_idle = !self.turn() && self.breathing.is_empty();
            if let Some(task) = self.breathing.pop_front() {
                self.poll(task);
            }
            if done() {
                return Outcome::Done;
            }
            let is_idle = is_idle || !self.has_ready();
            // None comes or goes before it is looked at again.
            let timer = self.next_timer();
            let until = if is_idle { timer } else { Some(self.env.core.clock()) };
            self.env.core.driver.borrow_mut().wait(until, &mut events);
            for event in events.drain(..) {
                match event {
                    Event::Done(completion) => Slot::complete(&self.env.core, completion),
                    Event::Bell => self.env.core.bell.notify_all(),
                    Event::Halt => return Outcome::Halted,
                }
            }
            if let Some(first) = timer {
                self.fire_timers(first);
            }
        }
    }

    /// Polls ready tasks, until it is time for a look at the driver; false if none is ready any more.
    fn turn(&mut self) -> bool {
        let mut polls = 0;
        self.turn_ns = 0;
        while polls < POLLS_PER_TURN && self.turn_ns < TURN_NS_MAX {
            if !self.poll_one() {
                return false;
            }
            polls += 1;
        }
        true
    }

    fn has_ready(&mut self) -> bool {
        self.gather();
        !self.ready.is_empty() || !self.breathing.is_empty()
    }

    fn next_timer(&self) -> Option<Time> {
        self.env.core.timers.borrow().first_key_value().map(|((time, _), _)| *time)
    }

    /// Wakes those whose time has come, of which that is the `first`.
    fn fire_timers(&self, first: Time) {
        let now = self.env.core.clock();
        if first > now {
            return;
        }
        let mut timers = self.env.core.timers.borrow_mut();
        while let Some(first) = timers.first_entry() {
            if first.key().0 > now {
                break;
            }
            first.remove().wake();
        }
    }

    /// Collects what is ready: what has been spawned, and what has been woken.
    #[inline]
    fn gather(&mut self) {
        if !self.env.core.spawned.borrow().is_empty() {
            self.admit();
        }
        self.set.drain(&mut self.ready);
    }

    /// Turns spawned futures into tasks, as far as there is room. They begin in the order in which they were spawned: what follows each
    /// other on a device should stay so.
    fn admit(&mut self) {
        while self.tasks.len() < TASKS_MAX {
            let Some(task) = self.env.core.spawned.borrow_mut().pop_front() else { return };
            let index = self.tasks.insert(task);
            match self.order {
                Order::Fifo => self.ready.push_back(index),
                Order::Seeded(_) => self.set.set(index),
            }
        }
    }

    /// Polls the next ready task; false if there is none.
    fn poll_one(&mut self) -> bool {
        if matches!(self.order, Order::Seeded(_)) || self.ready.is_empty() {
            self.gather();
        }
        let index = match &mut self.order {
            Order::Fifo => self.ready.pop_front(),
            Order::Seeded(_) if self.ready.is_empty() => None,
            Order::Seeded(rng) => {
                let pick = rng.below(self.ready.len() as u64);
                self.ready.swap_remove_back(usize::try_from(pick).expect("an index below a length"))
            }
        };
        if let Some(index) = index {
            self.poll(index);
        }
        index.is_some()
    }

    fn poll(&mut self, index: usize) {
        // A waker may outlive its task: its bit then names nobody, or a newer task that is polled once too often. So does a breath of
        // which one of several joined futures woke the task.
        let Some(task) = self.tasks.get_mut(index) else { return };
        while self.wakers.len() <= index {
            let task = self.wakers.len();
            self.wakers.push(Waker::from(Arc::new(TaskWaker { task, ready: Arc::clone(&self.set) })));
        }
        let mut context = Context::from_waker(&self.wakers[index]);
        let core = &self.env.core;
        core.charged.set(0);
        core.is_polling.set(true);
        if task.as_mut().poll(&mut context).is_ready() {
            drop(self.tasks.remove(index));
        }
        core.is_polling.set(false);
        core.told.set(None);
        let charged = core.charged.replace(0);
        if charged > 0 {
            self.turn_ns += charged;
            self.env.core.driver.borrow_mut().charge(charged);
        }
        if self.env.core.is_breathing.replace(false) {
            match self.order {
                // One of several joined futures may have been woken, and breathes again: it is still one task.
                Order::Fifo if self.breathing.contains(&index) => {}
                Order::Fifo => self.breathing.push_back(index),
                Order::Seeded(_) => self.set.set(index),
            }
        }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // Tasks hold clones of `env`: break the cycle. This is the crash of a simulated process.
        self.tasks.clear();
        self.env.core.spawned.borrow_mut().clear();
        drop(core::mem::take(&mut *self.env.core.timers.borrow_mut()));
    }
}
