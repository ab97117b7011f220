//! Threads that do operations with blocking calls: a driver where `io_uring` is unavailable, and
//! helpers of the ring for what it cannot do.
//!
//! The pool starts a thread when work arrives and no thread is idle, up to its limit; the rest
//! queues. A limitation: a device that never answers keeps the threads that wait for it, so a hung
//! backing device can starve the cache device of threads. The ring has no such limit, which is one
//! reason to prefer it.

use crate::blocking_io::perform;
use crate::clock::{Clock, wall_seconds};
use crate::counters::Counters;
use crate::disks::{DiskTable, Disks};
use crate::prepared_op::PreparedOp;
use crate::wakeup::{FINISHED, RUNG, Signals};
use bcached_env::{Completion, DiskId, DiskInfo, Driver, Event, Op, Time, Token};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a closing pool waits for calls in progress. A thread that stays longer (a dead device)
/// is left behind; it owns its memory and device and does no harm.
const CLOSE_MAX: Duration = Duration::from_secs(5);

#[derive(Default)]
struct WorkQueue {
    works: VecDeque<PreparedOp>,
    threads: usize,
    idle: usize,
    closing: bool,
}

struct PoolShared {
    queue: Mutex<WorkQueue>,
    /// Work has arrived, or the pool is closing.
    arrived: Condvar,
    /// A thread has ended.
    ended: Condvar,
    finished: Mutex<Vec<Completion>>,
    signals: Arc<Signals>,
    counters: Arc<Counters>,
}

/// The pool. Dropping it discards work that has not begun, and waits for the rest for a limited
/// time.
pub(crate) struct ThreadPool {
    shared: Arc<PoolShared>,
    threads_max: usize,
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No holder of one of these locks can panic midway: queues are consistent at every step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ThreadPool {
    pub(crate) fn new(threads_max: usize, signals: Arc<Signals>, counters: Arc<Counters>) -> Self {
        let shared = PoolShared {
            queue: Mutex::default(),
            arrived: Condvar::new(),
            ended: Condvar::new(),
            finished: Mutex::default(),
            signals,
            counters,
        };
        Self { shared: Arc::new(shared), threads_max: threads_max.max(1) }
    }

    /// Queues `work`; its completion is delivered by [`ThreadPool::collect`] after [`FINISHED`] is
    /// raised.
    pub(crate) fn start(&self, work: PreparedOp) {
        let mut queue = locked(&self.shared.queue);
        queue.works.push_back(work);
        if queue.idle >= queue.works.len() {
            drop(queue);
            self.shared.arrived.notify_one();
            return;
        }
        if queue.threads < self.threads_max {
            queue.threads += 1;
            drop(queue);
            self.spawn();
        }
    }

    fn spawn(&self) {
        let shared = Arc::clone(&self.shared);
        let spawned = std::thread::Builder::new().name("bcached-io".into()).spawn(move || shared.serve());
        if spawned.is_ok() {
            return;
        }
        // The system cannot create a thread. The running threads will do the work; if there are
        // none, this thread must.
        let mut queue = locked(&self.shared.queue);
        queue.threads -= 1;
        if queue.threads == 0
            && let Some(work) = queue.works.pop_front()
        {
            drop(queue);
            self.shared.finish(work);
        }
    }

    /// Moves finished operations into `events`.
    pub(crate) fn collect(&self, events: &mut Vec<Event>) {
        events.extend(locked(&self.shared.finished).drain(..).map(Event::Done));
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        let mut queue = locked(&self.shared.queue);
        queue.closing = true;
        queue.works.clear();
        self.shared.arrived.notify_all();
        let ended = self.shared.ended.wait_timeout_while(queue, CLOSE_MAX, |queue| queue.threads > 0);
        drop(ended.unwrap_or_else(PoisonError::into_inner));
    }
}

impl PoolShared {
    /// The main loop of one thread.
    fn serve(&self) {
        let mut queue = locked(&self.queue);
        while !queue.closing {
            if let Some(work) = queue.works.pop_front() {
                drop(queue);
                self.finish(work);
                queue = locked(&self.queue);
            } else {
                queue.idle += 1;
                queue = self.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
            }
        }
        queue.threads -= 1;
        self.ended.notify_all();
    }

    fn finish(&self, work: PreparedOp) {
        let completion = perform(work, &self.counters);
        locked(&self.finished).push(completion);
        self.signals.raise(FINISHED);
    }
}

/// A driver that does every operation with the pool.
pub(crate) struct ThreadDriver {
    pool: ThreadPool,
    table: DiskTable,
    counters: Arc<Counters>,
    signals: Arc<Signals>,
    clock: Clock,
    /// Operations that were refused without being started.
    refused: Vec<Completion>,
}

impl ThreadDriver {
    pub(crate) fn new(threads_max: usize, signals: Arc<Signals>, disks: Disks) -> Self {
        let counters = disks.counters();
        Self {
            pool: ThreadPool::new(threads_max, Arc::clone(&signals), Arc::clone(&counters)),
            table: DiskTable::new(disks),
            counters,
            signals,
            clock: Clock::new(),
            refused: Vec::new(),
        }
    }

    fn collect(&mut self, events: &mut Vec<Event>) {
        events.extend(self.refused.drain(..).map(Event::Done));
        let raised = self.signals.take();
        if raised & FINISHED != 0 {
            self.pool.collect(events);
        }
        if raised & RUNG != 0 {
            events.push(Event::Bell);
        }
    }
}

impl Driver for ThreadDriver {
    fn submit(&mut self, disk: DiskId, token: Token, op: Op) {
        match PreparedOp::new(self.table.get(disk), token, op, &self.counters) {
            Ok(work) => self.pool.start(work),
            Err(completion) => self.refused.push(completion),
        }
    }

    fn wait(&mut self, until: Option<Time>, events: &mut Vec<Event>) {
        self.table.renew();
        loop {
            self.collect(events);
            if !events.is_empty() {
                return;
            }
            let Some(left) = self.clock.remaining(until) else { return };
            if !self.signals.fall_asleep() {
                continue;
            }
            let mut descriptors = [PollFd::new(&self.signals, PollFlags::IN)];
            // An interrupted or failed poll is a spurious wake-up: the loop checks again.
            let woken = rustix::event::poll(&mut descriptors, Some(&timespec(left)));
            self.signals.wake_up();
            if woken.is_ok_and(|count| count > 0) {
                self.signals.drain();
            }
        }
    }

    fn now(&self) -> Time {
        self.clock.now()
    }

    fn wall_seconds(&self) -> u32 {
        wall_seconds()
    }

    fn info(&self, disk: DiskId) -> DiskInfo {
        // The kernel adds a flush of the whole device to a durable write from a thread, and the
        // caller could not tell which of the two failed. The engine has to request that flush
        // itself.
        DiskInfo { fua: false, ..self.table.disks().info(disk) }
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}
