//! The driver on `io_uring`.
//!
//! One turn: entries are collected while tasks run and go to the kernel together when the executor waits, with the
//! same system call that brings completions. What the ring cannot do goes to helper threads, which are started when
//! first needed; their completions and the bell reach a sleeping driver through one eventfd. It sleeps in the ring, or, where nothing is in that,
//! with what guests wait to read (`ring/inputs.rs`).

use crate::blocking_io::perform;
use crate::busy_poll::Spin;
use crate::clock::{Clock, wall_seconds};
use crate::counters::{Counters, count};
use crate::disks::{DiskTable, Disks};
use crate::prepared_op::{Action, Work};
use crate::ring::{Inputs, Reaped, Ring};
use crate::ring_client::Guests;
use crate::threads::Pool;
use crate::wakeup::{FINISHED, GUEST, RUNG, Signals};
use bcached_env::{Completion, DiskId, DiskInfo, Driver, Event, Op, Time, Token};
use io_uring::IoUring;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// See the file's head.
pub(crate) struct RingDriver {
    ring: Ring,
    helpers: Pool,
    table: DiskTable,
    counters: Arc<Counters>,
    signals: Arc<Signals>,
    clock: Clock,
    /// Ended without the ring: refused, or done at once.
    ended: Vec<Completion>,
    guests: Guests,
    /// Operations that helpers have.
    helping: usize,
    /// Of waits for nobody but clients.
    clients: Spin,
    /// Of those for devices, too.
    devices: Spin,
    /// Bytes that were copied in this turn.
    copied: usize,
    /// Turns since it was looked what guests can read.
    turns: u32,
}

impl RingDriver {
    pub(crate) fn new(
        (ring, inputs): (IoUring, Inputs),
        helpers_max: usize,
        signals: Arc<Signals>,
        disks: Disks,
        guests: Guests,
    ) -> Self {
        let counters = disks.counters();
        Self {
            ring: Ring::new(ring, inputs, Arc::clone(&signals), Arc::clone(&counters)),
            helpers: Pool::new(helpers_max, Arc::clone(&signals), Arc::clone(&counters)),
            table: DiskTable::new(disks),
            counters,
            signals,
            clock: Clock::new(),
            ended: Vec::new(),
            guests,
            helping: 0,
            clients: Spin::new(CLIENT_MAX),
            devices: Spin::new(DEVICE_MAX),
            copied: 0,
            turns: 0,
        }
    }

    /// Whether a copy in memory is all there is to do, and this turn has time for it.
    fn may_copy(&mut self, work: &Work) -> bool {
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

    /// Waits until something may have happened, or a guest wants a turn, for no longer than `left`: awake at first, if the last waits make that
    /// worth while, and then asleep.
    fn look_on_and_sleep(&mut self, left: Duration) {
        let Self { ring, signals, clients, devices, helping, .. } = self;
        let spin = if *helping == 0 && ring.is_idle() { clients } else { devices };
        let only_inputs = ring.has_only_inputs();
        let is_told = only_inputs || !ring.has_inputs() || ring.poll_inputs();
        // What completions have made ready goes first: nothing else tells of it.
        ring.submit();
        if !is_told || only_inputs && !ring.has_only_inputs() {
            return;
        }
        let began = Instant::now();
        let mut is_here = || signals.is_raised() || ring.has_news() || only_inputs && ring.take_inputs();
        if spin.look_on(left, &mut is_here) || !ring.guests_may_sleep() || !signals.fall_asleep() {
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

    /// Everything that has happened, as far as memory tells. True if guests want a turn.
    fn collect(&mut self, events: &mut Vec<Event>) -> bool {
        events.extend(self.ended.drain(..).map(Event::Done));
        self.ring.reap(|reaped| match reaped {
            Reaped::Done(completion) => events.push(Event::Done(completion)),
            Reaped::Helper(work) => {
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
        let is_wanted = raised & GUEST != 0;
        if is_wanted {
            self.guests.take().into_iter().for_each(|guest| self.ring.take_in(guest));
        }
        is_wanted
    }
}

impl Driver for RingDriver {
    fn submit(&mut self, disk: DiskId, token: Token, op: Op) {
        match Work::new(self.table.get(disk), token, op, &self.counters) {
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
                // What came short goes on at once, not at the next wait.
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

/// Bytes that are copied by the engine's own thread where that is all there is to do: a tenth of a millisecond at most. The kernel's workers
/// would copy no faster, and to be woken for each piece makes a stream of them three times as slow.
const COPY_MAX: usize = 512 << 10;

/// Bytes in one turn: others are looked after, too.
const COPIES_MAX: usize = 2 << 20;

/// After so many turns in a row that had something else to do it is looked what guests can read: nothing else would tell of that.
const TURNS_MAX: u32 = 8;

/// How long it looks on for clients: one that asks one thing after the other comes again that soon, though it has to be woken first, which takes
/// a virtual machine with a halted processor 20 to 80 µs.
const CLIENT_MAX: Duration = Duration::from_micros(200);

/// How long if a device has something to do. Its answer takes longer, and nobody looks on for that.
const DEVICE_MAX: Duration = Duration::from_micros(50);

impl Drop for RingDriver {
    fn drop(&mut self) {
        self.guests.close("the engine has ended");
    }
}
