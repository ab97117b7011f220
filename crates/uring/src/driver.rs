//! The [`Driver`] on `io_uring`.
//!
//! In one turn, submission entries are collected while tasks run. They go to the kernel together
//! when the executor waits, with the same system call that returns completions. Operations that the
//! ring cannot do go to helper threads, which are started on first use. Their completions and the
//! bell reach a sleeping driver through one eventfd. The driver sleeps in the ring or, if the ring
//! has nothing in flight, in an `epoll` that watches what ring clients wait to read
//! (`ring/client_reads.rs`).

use crate::blocking_io::perform;
use crate::busy_poll::BusyPoll;
use crate::clock::{Clock, wall_seconds};
use crate::counters::{Counters, count};
use crate::disks::{DiskTable, Disks};
use crate::prepared_op::{Action, PreparedOp};
use crate::ring::{ClientInputs, ReapOutcome, Ring};
use crate::ring_client::RingHandle;
use crate::threads::ThreadPool;
use crate::wakeup::{CLIENT, FINISHED, RUNG, Signals};
use bcached_env::{Completion, DiskId, DiskInfo, Driver, Event, Op, Time, Token};
use io_uring::IoUring;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The driver on `io_uring`; see the module documentation.
pub(crate) struct RingDriver {
    ring: Ring,
    helpers: ThreadPool,
    table: DiskTable,
    counters: Arc<Counters>,
    signals: Arc<Signals>,
    clock: Clock,
    /// Operations that completed without the ring: refused, or done inline.
    ended: Vec<Completion>,
    ring_handle: RingHandle,
    /// Number of operations that helper threads have.
    helping: usize,
    /// Busy-polling while only clients can bring work.
    clients: BusyPoll,
    /// Busy-polling while devices have work in flight, too.
    devices: BusyPoll,
    /// Bytes copied inline in this turn.
    copied: usize,
    /// Turns since the driver last checked what ring clients can read.
    turns: u32,
}

impl RingDriver {
    pub(crate) fn new(
        (ring, inputs): (IoUring, ClientInputs),
        helpers_max: usize,
        signals: Arc<Signals>,
        disks: Disks,
        ring_handle: RingHandle,
    ) -> Self {
        let counters = disks.counters();
        Self {
            ring: Ring::new(ring, inputs, Arc::clone(&signals), Arc::clone(&counters)),
            helpers: ThreadPool::new(helpers_max, Arc::clone(&signals), Arc::clone(&counters)),
            table: DiskTable::new(disks),
            counters,
            signals,
            clock: Clock::new(),
            ended: Vec::new(),
            ring_handle,
            helping: 0,
            clients: BusyPoll::new(CLIENT_MAX),
            devices: BusyPoll::new(DEVICE_MAX),
            copied: 0,
            turns: 0,
        }
    }

    /// Returns true if the operation is only a memory copy and fits into this turn's copy budget.
    fn may_copy(&mut self, work: &PreparedOp) -> bool {
        let bytes = match &work.action {
            Action::Read { buffer, .. } => buffer.len(),
            Action::Write { payload, .. } => payload.len(),
            Action::Flush => 0,
            Action::Discard { .. } | Action::Zero { .. } => return false,
        };
        let may = work.device.in_memory() && bytes <= COPY_MAX && self.copied + bytes <= COPIES_MAX;
        self.copied += if may { bytes } else { 0 };
        may
    }

    /// Waits until something may have happened or a ring client needs a turn, for at most `left`.
    /// Busy-polls first if recent waits were short enough to make that worthwhile, then sleeps.
    fn look_on_and_sleep(&mut self, left: Duration) {
        let Self { ring, signals, clients, devices, helping, .. } = self;
        let spin = if *helping == 0 && ring.is_idle() { clients } else { devices };
        let only_inputs = ring.has_only_inputs();
        let is_told = only_inputs || !ring.has_inputs() || ring.poll_inputs();
        // Commands that completions have made ready are submitted first: nothing else announces
        // them.
        ring.submit();
        if !is_told || only_inputs && !ring.has_only_inputs() {
            return;
        }
        let began = Instant::now();
        let mut is_here = || signals.is_raised() || ring.has_news() || only_inputs && ring.take_inputs();
        if spin.look_on(left, &mut is_here) || !ring.clients_may_sleep() || !signals.fall_asleep() {
            return;
        }
        if only_inputs {
            ring.sleep_for_inputs(left);
        } else {
            ring.sleep(left);
            signals.wake_up();
        }
        spin.waited(began.elapsed());
    }

    /// Collects all events that are visible in memory. Returns true if ring clients need a turn.
    fn collect(&mut self, events: &mut Vec<Event>) -> bool {
        events.extend(self.ended.drain(..).map(Event::Done));
        self.ring.reap(|reaped| match reaped {
            ReapOutcome::Done(completion) => events.push(Event::Done(completion)),
            ReapOutcome::Helper(work) => {
                count(&self.counters.helped);
                self.helping += 1;
                self.helpers.start(work);
            }
        });
        let raised = self.signals.take();
        if raised & FINISHED != 0 {
            let before = events.len();
            self.helpers.collect(events);
            self.helping -= events.len() - before;
        }
        if raised & RUNG != 0 {
            events.push(Event::Bell);
        }
        let is_wanted = raised & CLIENT != 0;
        if is_wanted {
            self.ring_handle.take().into_iter().for_each(|client| self.ring.take_in(client));
        }
        is_wanted
    }
}

impl Driver for RingDriver {
    fn submit(&mut self, disk: DiskId, token: Token, op: Op) {
        match PreparedOp::new(self.table.get(disk), token, op, &self.counters) {
            Err(completion) => self.ended.push(completion),
            Ok(work) if self.may_copy(&work) => self.ended.push(perform(work, &self.counters)),
            Ok(work) if self.ring.can_do(&work) => self.ring.start(work),
            Ok(work) => {
                count(&self.counters.helped);
                self.helping += 1;
                self.helpers.start(work);
            }
        }
    }

    fn wait(&mut self, until: Option<Time>, events: &mut Vec<Event>) {
        self.table.renew();
        self.copied = 0;
        loop {
            self.turns += 1;
            if self.turns >= TURNS_MAX {
                self.turns = 0;
                self.ring.take_untold_inputs();
            }
            self.ring.submit();
            let guests_want = self.collect(events);
            if !events.is_empty() {
                // Continues short transfers at once rather than at the next wait.
                return self.ring.submit();
            }
            if guests_want {
                continue;
            }
            let Some(left) = self.clock.remaining(until) else {
                if self.ring.take_untold_inputs() {
                    continue;
                }
                return;
            };
            self.look_on_and_sleep(left);
            self.turns = 0;
        }
    }

    fn now(&self) -> Time {
        self.clock.now()
    }

    fn wall_seconds(&self) -> u32 {
        wall_seconds()
    }

    fn info(&self, disk: DiskId) -> DiskInfo {
        self.table.disks().info(disk)
    }
}

/// Largest transfer, in bytes, that the engine's thread copies inline if a copy is all there is to
/// do: at most a tenth of a millisecond. The kernel's workers copy no faster, and waking one for
/// each piece makes a stream of them three times as slow.
const COPY_MAX: usize = 512 << 10;

/// Bytes copied inline in one turn at most, so that other clients get their turn.
const COPIES_MAX: usize = 2 << 20;

/// After this many consecutive turns that had other work, the driver checks what ring clients can
/// read: nothing else would announce that.
const TURNS_MAX: u32 = 8;

/// How long the driver busy-polls for clients. A client that sends one request at a time sends its
/// next one within this time, although it has to be woken first, which takes a virtual machine with
/// a halted processor 20 to 80 µs.
const CLIENT_MAX: Duration = Duration::from_micros(200);

/// How long the driver busy-polls if a device has work in flight. Its answer takes longer, and is
/// not worth polling for.
const DEVICE_MAX: Duration = Duration::from_micros(50);

impl Drop for RingDriver {
    fn drop(&mut self) {
        self.ring_handle.close("the engine has ended");
    }
}
