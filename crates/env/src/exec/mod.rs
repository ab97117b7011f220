//! A single-threaded executor over a [`Driver`]. Production runs ready tasks in order; simulation
//! picks the next one by seed. Tasks are never dropped before they end, except when the world
//! halts.
//!
//! Liveness: a task sleeps only on an operation, a timer or a notification of `sync`. Each holds
//! the task's waker; a waker sets the task's bit in the ready set; the run loop polls every task
//! whose bit is set before it waits on the driver. An operation that no task waits for notifies a
//! [`CompletionListener`](crate::CompletionListener) instead, also before the driver is waited on
//! again.

mod executor;
mod ready;

use crate::disk::{
    CompletionListener, Disk, ErrorHistory, ListenedOperation, Operation, OperationInfo, OperationKey,
    OperationState, PendingOperation,
};
use crate::driver::{DiskId, DiskInfo, Driver, Op};
use crate::rng::Rng;
use crate::sync::Notify;
use crate::time::Time;
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::rc::Rc;
use core::cell::{Cell, RefCell};
use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll, Waker};
use core::time::Duration;
pub use executor::{Executor, RunOrder, RunOutcome};
use slab::Slab;

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// Maximum number of live tasks; further ones wait in a queue until one ends. A task that waits for
/// a task it has started must know that the new one is admitted: everything that may be in flight
/// together stays below this (the engine's `request` module counts it).
pub const TASKS_MAX: usize = 8192;

/// Is ready when polled for the second time. The first time it calls `arrange`, which ensures that
/// there is a second.
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

pub(crate) struct Core {
    pub(crate) driver: RefCell<Box<dyn Driver>>,
    pub(crate) operations: RefCell<Slab<Operation>>,
    pub(crate) listened: RefCell<Slab<ListenedOperation>>,
    /// Error history of each device that has ever failed.
    pub(crate) errors: RefCell<BTreeMap<DiskId, ErrorHistory>>,
    timers: RefCell<BTreeMap<(Time, u64), Waker>>,
    timer_count: Cell<u64>,
    spawned: RefCell<VecDeque<Task>>,
    rng: RefCell<Rng>,
    bell: Notify,
    /// CPU time charged since the running task was polled or the running listener was called, in
    /// nanoseconds.
    charged: Cell<u64>,
    /// A task that was charged this much lets others run.
    breath_ns: Cell<u64>,
    /// Tasks let others run wherever they can.
    is_out_of_breath: Cell<bool>,
    /// The running task breathes: it lets others run.
    is_breathing: Cell<bool>,
    /// A task or a listener is running.
    is_polling: Cell<bool>,
    /// The clock as reported to the running task, if it has asked: for the task no time passes
    /// until it waits, or has asked very often.
    told: Cell<Option<Time>>,
    /// How often it has asked since.
    looks: Cell<u8>,
}

impl Core {
    /// Returns the clock itself.
    pub(crate) fn clock(&self) -> Time {
        self.driver.borrow().now()
    }

    #[inline]
    fn now(&self) -> Time {
        let looks = self.looks.get().wrapping_add(1);
        self.looks.set(looks);
        // The clock is re-read now and then, so a task that loops until some time without yielding
        // sees that time arrive, and the driver sees such a task.
        if let Some(told) = self.told.get().filter(|_| looks != 0) {
            return told;
        }
        let now = self.clock();
        if self.is_polling.get() {
            self.told.set(Some(now));
        }
        now
    }

    /// Marks that a task is about to be polled, or a listener about to be called. `now`: the clock,
    /// if it has just been read.
    #[inline]
    fn begin_piece(&self, now: Option<Time>) {
        self.charged.set(0);
        self.is_polling.set(true);
        self.told.set(now);
        if now.is_some() {
            // A listener does not ask so often that the count would overflow, so it may start anew
            // for the next one.
            self.looks.set(0);
        }
    }

    /// Marks the end of that; returns how much CPU time was charged, in nanoseconds.
    #[inline]
    fn end_piece(&self) -> u64 {
        self.is_polling.set(false);
        self.told.set(None);
        let charged = self.charged.replace(0);
        if charged > 0 {
            self.driver.borrow_mut().charge(charged);
        }
        charged
    }
}

/// CPU time after which a task lets others run, at the next place where it can ([`Env::breathe`]),
/// until [`Env::set_breath`] sets another value. A request waits for such a piece three or four
/// times on its way, so their sum stays below a third of a millisecond (B7). With a smaller value,
/// clients that write as fast as they can get so much of the processor that the tasks which make
/// room for them fall behind.
pub const BREATH_NS: u64 = 28_000;
/// Upper limit of that value. A transition begun just before may take as much again, and both
/// together stay below the longest time that any client may be kept waiting.
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

    /// Returns the clock as it was when the running task first asked since it was polled, or when
    /// the completion was found that the running listener is told of, or up to 256 calls ago. It is
    /// cached because a request asks dozens of times and a piece of work is short.
    #[must_use]
    #[inline]
    pub fn now(&self) -> Time {
        self.core.now()
    }

    /// Returns the wall-clock seconds since 1970.
    #[must_use]
    pub fn wall_seconds(&self) -> u32 {
        self.core.driver.borrow().wall_seconds()
    }

    /// Returns a random number that is not zero.
    #[must_use]
    pub fn random(&self) -> u64 {
        self.core.rng.borrow_mut().nonzero()
    }

    /// Charges CPU time for work done in a transition. The driver is told when the task waits, with
    /// the sum of all that it did in one piece.
    #[inline]
    pub fn charge(&self, nanoseconds: u64) {
        self.core.charged.set(self.core.charged.get().saturating_add(nanoseconds));
    }

    /// Returns whether [`Env::breathe`] would return at once.
    #[inline]
    #[must_use]
    pub fn has_breath(&self) -> bool {
        self.core.charged.get() < self.core.breath_ns.get()
    }

    /// Lets others run first if this task has done much since it last waited: the ready tasks, and
    /// those whose operations have just completed. A task that does much work in pieces calls this
    /// before each piece.
    pub async fn breathe(&self) {
        // One of several joined futures may find that another has done much since the task was
        // polled again.
        while !self.has_breath() {
            pending_once(|_| self.core.is_breathing.set(true)).await;
        }
    }

    /// Sets the CPU time after which a task lets others run, in nanoseconds.
    ///
    /// # Panics
    /// If that is more than 80 us ([`BREATH_NS_MAX`]), which could keep others waiting for too
    /// long.
    #[inline]
    pub fn set_breath(&self, nanoseconds: u64) {
        assert!(
            nanoseconds <= BREATH_NS_MAX,
            "{nanoseconds} ns and one more transition keep other tasks waiting for too long"
        );
        if !self.core.is_out_of_breath.get() {
            self.core.breath_ns.set(nanoseconds);
        }
    }

    /// Returns a handle on a device.
    #[must_use]
    pub fn disk(&self, id: DiskId) -> Disk {
        Disk { env: self.clone(), id }
    }

    /// Returns the properties of a device.
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

    /// Waits until the bell is rung from outside ([`Event::Bell`]) after this call.
    pub async fn bell(&self) {
        self.core.bell.wait().await;
    }

    pub(crate) fn submit(&self, disk: DiskId, op: Op) -> PendingOperation {
        let operation = Operation { slot: OperationState::Waiting(None), what: self.what(disk, &op) };
        let place = self.core.operations.borrow_mut().insert(operation);
        self.core.driver.borrow_mut().submit(disk, OperationKey::Awaited(place).token(), op);
        PendingOperation::new(self.clone(), place)
    }

    /// Starts an operation; `listener` is notified of its completion.
    #[inline]
    pub(crate) fn begin_for(
        &self,
        disk: DiskId,
        op: Op,
        listener: Rc<dyn CompletionListener>,
        number: usize,
    ) {
        let listened = ListenedOperation { listener, number, what: self.what(disk, &op) };
        let place = self.core.listened.borrow_mut().insert(listened);
        self.core.driver.borrow_mut().submit(disk, OperationKey::Listened(place).token(), op);
    }

    #[inline]
    fn what(&self, disk: DiskId, op: &Op) -> OperationInfo {
        let sector = match op {
            Op::Read { sector, .. }
            | Op::Write { sector, .. }
            | Op::Discard { sector, .. }
            | Op::Zero { sector, .. } => *sector,
            Op::Flush => 0,
        };
        OperationInfo { disk, sector, since: self.now() }
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
