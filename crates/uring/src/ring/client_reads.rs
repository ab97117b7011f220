//! Watches what the clients of a ring wait to read, and lets the thread sleep there if nothing else
//! can arrive.
//!
//! An `epoll` watches the ring clients' sockets. It costs nothing while nothing arrives, and
//! nothing per request; a poll of the ring for each read takes one more entry and one more system
//! call. While the ring has nothing in flight, the thread checks the `epoll` and sleeps in it.
//! Otherwise the ring polls the `epoll` and reports when it becomes readable.
//!
//! Why no readable input is missed: the `epoll` reports it for as long as it is not read, to every
//! caller and any number of times. A driver sleeps in one of two places. One is the `epoll`, which
//! holds the signals' eventfd beside the sockets. The other is a ring that polls the `epoll`; that
//! poll completes at once if there is something already. A ring client that starts to wait
//! meanwhile has been given a turn because of a signal, and the signal ends the sleep. A driver
//! that always has other work checks every few turns (`driver.rs`).
#![allow(unsafe_code, reason = "a poll is submitted, which refers to no memory")]

use super::{Ring, clients::HostedClient, poll_in};
use crate::wakeup::Signals;
use io_uring::opcode;
use io_uring::types::Fd;
use rustix::event::{Timespec, epoll};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// `user_data` of the ring's poll.
pub(super) const INPUTS: u64 = u64::MAX - 1;

/// Number of events taken at once; the rest comes with the next call.
const TOLD_MAX: usize = 32;

/// `epoll` data of the signals' eventfd, in place of a ring client's number.
const SIGNALS: u64 = u64::MAX;

/// The descriptors that ring clients wait to read.
pub(crate) struct ClientInputs {
    epoll: OwnedFd,
    signals: Arc<Signals>,
    watched: usize,
    /// The ring polls the `epoll`.
    is_polled: bool,
    /// The system can wait with a resolution finer than milliseconds.
    is_exact: bool,
    /// Ring clients that have input; kept to reuse its allocation.
    told: Vec<u64>,
}

impl ClientInputs {
    /// Creates an empty set. `signals` is what else may wake a thread that sleeps here.
    pub(crate) fn new(signals: Arc<Signals>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &signals, epoll::EventData::new_u64(SIGNALS), epoll::EventFlags::IN)?;
        let told = Vec::with_capacity(TOLD_MAX);
        let mut inputs = Self { epoll, signals, watched: 0, is_polled: false, is_exact: true, told };
        // A container's filter may allow `epoll_wait` but not the newer call.
        inputs.is_exact = inputs.ask(Duration::from_nanos(1)).is_ok();
        inputs.ask(Duration::ZERO)?;
        Ok(inputs)
    }

    /// Reports ring client `number` for as long as `device` is readable; returns false if the
    /// system cannot.
    pub(super) fn watch(&mut self, number: usize, device: BorrowedFd<'_>) -> bool {
        let data = epoll::EventData::new_u64(number as u64);
        let is_watched = epoll::add(&self.epoll, device, data, epoll::EventFlags::IN).is_ok();
        self.watched += usize::from(is_watched);
        is_watched
    }

    /// Stops watching `device`.
    pub(super) fn unwatch(&mut self, device: BorrowedFd<'_>) {
        let _was_watched = epoll::delete(&self.epoll, device);
        self.watched -= 1;
    }

    /// Waits until something is readable, a signal is raised, or `limit` has passed.
    fn wait(&mut self, limit: Duration) {
        // An error is a wake-up without news: a signal.
        let _interrupted = self.ask(if self.is_exact { limit } else { whole_millis(limit) });
    }

    fn ask(&mut self, limit: Duration) -> io::Result<()> {
        let none = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [none; TOLD_MAX];
        let limit = Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        let count = epoll::wait(&self.epoll, &mut events, Some(&limit))?;
        for event in &events[..count] {
            match event.data.u64() {
                SIGNALS => self.signals.drain(),
                number => self.told.push(number),
            }
        }
        Ok(())
    }
}

/// Rounds `limit` up to whole milliseconds.
fn whole_millis(limit: Duration) -> Duration {
    Duration::from_millis(u64::try_from(limit.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX))
}

impl Ring {
    /// Returns true if ring clients wait to read something.
    pub(crate) const fn has_inputs(&self) -> bool {
        self.inputs.watched > 0
    }

    /// Returns true if ring clients wait to read something and nothing else but signals can arrive.
    pub(crate) fn has_only_inputs(&self) -> bool {
        let has_none = |hosted: &HostedClient| hosted.in_kernel == 0 && hosted.dedicated.is_none();
        self.has_inputs() && self.is_idle() && self.clients.iter().all(|(_, hosted)| has_none(hosted))
    }

    /// Notifies the ring clients that have something to read; returns true if any has.
    pub(crate) fn take_inputs(&mut self) -> bool {
        self.inputs.wait(Duration::ZERO);
        self.tell_inputs()
    }

    /// The same, unless the ring's poll will report them.
    pub(crate) fn take_untold_inputs(&mut self) -> bool {
        self.has_inputs() && !self.inputs.is_polled && self.take_inputs()
    }

    /// Sleeps until ring clients have something to read and notifies them, or until a signal is
    /// raised or `limit` has passed.
    pub(crate) fn sleep_for_inputs(&mut self, limit: Duration) {
        self.inputs.wait(limit);
        // The caller's loop sees raised signals by itself.
        self.signals.wake_up();
        self.tell_inputs();
    }

    fn tell_inputs(&mut self) -> bool {
        let mut has_any = false;
        for number in self.inputs.told.drain(..) {
            let number = usize::try_from(number).expect("numbers of ring clients are slab indices");
            if let Some(hosted) = self.clients.get_mut(number) {
                hosted.client.input();
                has_any = true;
            }
        }
        has_any
    }

    /// Makes the ring poll for inputs from the next [`Ring::submit`] on; returns false if there is
    /// no room for that.
    pub(crate) fn poll_inputs(&mut self) -> bool {
        if !self.inputs.is_polled {
            let poll = opcode::PollAdd::new(Fd(self.inputs.epoll.as_raw_fd()), poll_in()).build();
            // SAFETY: the entry refers to no memory, and `inputs` keeps the descriptor open as long
            // as the ring.
            self.inputs.is_polled = unsafe { self.ring.submission().push(&poll.user_data(INPUTS)) }.is_ok();
        }
        self.inputs.is_polled
    }

    /// Handles the completion of the ring's poll for inputs.
    pub(super) fn inputs_told(&mut self) {
        self.inputs.is_polled = false;
        self.take_inputs();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_wakes_too_early_where_only_milliseconds_are_waited_for() {
        let mut inputs = ClientInputs::new(Signals::new().expect("an eventfd")).expect("an epoll");
        inputs.is_exact = false;
        for limit in [1, 999_999, 1_000_001].map(Duration::from_nanos) {
            let began = std::time::Instant::now();
            inputs.wait(limit);
            assert!(began.elapsed() >= limit, "{limit:?}");
        }
        assert_eq!(whole_millis(Duration::ZERO), Duration::ZERO, "a look is no wait");
    }
}
