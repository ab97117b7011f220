//! Busy-polls for events that are expected soon.
//!
//! Falling asleep and being woken takes a processor longer than a small request does. If one client
//! sends one request at a time, the next arrives before that is over. So a driver whose recent
//! waits were short busy-polls for a while before it sleeps. A driver whose waits are long sleeps
//! at once, so an idle machine is left alone. How long busy-polling is worthwhile depends on what
//! the driver waits for.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Number of drivers of this process that are busy-polling.
static LOOKING: AtomicUsize = AtomicUsize::new(0);

/// A shorter limit means no busy-polling at all.
const AWAKE_MIN: Duration = Duration::from_micros(5);

/// How long a driver busy-polls.
pub(crate) struct BusyPoll {
    limit: Duration,
    /// Upper bound of `limit`.
    most: Duration,
    /// How many drivers may busy-poll at once: the threads they wait for need a processor, too.
    lookers_max: usize,
}

impl BusyPoll {
    /// Creates one that busy-polls for at most `most`.
    pub(crate) fn new(most: Duration) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self { limit: Duration::ZERO, most, lookers_max: processors - 1 }
    }

    /// Busy-polls until `is_here` returns true, as long as recent waits make that worthwhile and no
    /// longer than `left`. Returns true if it succeeded.
    pub(crate) fn look_on(&self, left: Duration, mut is_here: impl FnMut() -> bool) -> bool {
        let limit = self.limit.min(left);
        if limit < AWAKE_MIN {
            return false;
        }
        let Some(_looking) = BusyPollGuard::begin(self.lookers_max) else { return false };
        let start = Instant::now();
        loop {
            for _ in 0..16 {
                if is_here() {
                    return true;
                }
                core::hint::spin_loop();
            }
            if start.elapsed() >= limit {
                return false;
            }
        }
    }

    /// Records how long a wait has taken, busy-polling and sleep together.
    pub(crate) fn waited(&mut self, time: Duration) {
        self.limit = if time <= self.most { self.most } else { self.limit / 2 };
    }
}

/// A registration as busy-polling.
struct BusyPollGuard;

impl BusyPollGuard {
    /// Registers, if fewer than `most` are registered.
    fn begin(most: usize) -> Option<Self> {
        let one_more = |looking: usize| (looking < most).then_some(looking + 1);
        LOOKING.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok().map(|_| Self)
    }
}

impl Drop for BusyPollGuard {
    fn drop(&mut self) {
        LOOKING.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_waits_are_waited_for_awake_and_long_ones_are_not() {
        let most = Duration::from_micros(50);
        let mut spin = BusyPoll { limit: Duration::ZERO, most, lookers_max: usize::MAX };
        assert!(!spin.look_on(most, || true), "nothing is known: it sleeps at once");
        spin.waited(Duration::from_micros(20));
        assert!(spin.look_on(most, || true));
        assert!(!spin.look_on(most, || false), "it ends");
        assert!(!spin.look_on(Duration::ZERO, || true), "there is no time");
        for _ in 0..4 {
            // Busy-polled for 50 µs of these, in vain.
            spin.waited(Duration::from_micros(60));
        }
        assert!(!spin.look_on(most, || true), "they have been long for a while");
        let mut alone = BusyPoll { limit: Duration::ZERO, most, lookers_max: 0 };
        alone.waited(Duration::ZERO);
        assert!(
            !alone.look_on(most, || true),
            "on the only processor it would keep those from it for whom it waits"
        );
    }

    #[test]
    fn one_processor_is_left_to_others() {
        let first = BusyPollGuard::begin(2).expect("nobody looks on: the other test is allowed any number");
        let second = BusyPollGuard::begin(usize::MAX).expect("any number may");
        assert!(BusyPollGuard::begin(2).is_none());
        drop((first, second));
    }
}
