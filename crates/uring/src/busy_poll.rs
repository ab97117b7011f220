//! Waiting awake, for what comes soon.
//!
//! To fall asleep and to be woken takes a processor longer than a small request does; where one client asks one thing at a time, the next
//! comes before that is over. So a driver whose last waits were short looks on for a while before it sleeps. One whose waits are long sleeps at
//! once: a machine with nothing to do is left alone. How long it is worth while depends on who is waited for.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Drivers of this process that look on.
static LOOKING: AtomicUsize = AtomicUsize::new(0);

/// Less is none.
const AWAKE_MIN: Duration = Duration::from_micros(5);

/// How long a driver looks on.
pub(crate) struct Spin {
    limit: Duration,
    /// So long at most.
    most: Duration,
    /// So many may look on at once: those for whom they wait need a processor, too.
    lookers_max: usize,
}

impl Spin {
    /// For `most` at most.
    pub(crate) fn new(most: Duration) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self { limit: Duration::ZERO, most, lookers_max: processors - 1 }
    }

    /// Looks on until `is_here`, as long as the last waits make it worth while and no longer than `left`; whether it came.
    pub(crate) fn look_on(&self, left: Duration, mut is_here: impl FnMut() -> bool) -> bool {
        let limit = self.limit.min(left);
        if limit < AWAKE_MIN {
            return false;
        }
        let Some(_looking) = Looking::begin(self.lookers_max) else { return false };
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

    /// It has waited so long, awake and asleep.
    pub(crate) fn waited(&mut self, time: Duration) {
        self.limit = if time <= self.most { self.most } else { self.limit / 2 };
    }
}

/// One of those that look on.
struct Looking;

impl Looking {
    /// One more, if they are fewer than `most`.
    fn begin(most: usize) -> Option<Self> {
        let one_more = |looking: usize| (looking < most).then_some(looking + 1);
        LOOKING.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok().map(|_| Self)
    }
}

impl Drop for Looking {
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
        let mut spin = Spin { limit: Duration::ZERO, most, lookers_max: usize::MAX };
        assert!(!spin.look_on(most, || true), "nothing is known: it sleeps at once");
        spin.waited(Duration::from_micros(20));
        assert!(spin.look_on(most, || true));
        assert!(!spin.look_on(most, || false), "it ends");
        assert!(!spin.look_on(Duration::ZERO, || true), "there is no time");
        for _ in 0..4 {
            // Awake for 50 of them, in vain.
            spin.waited(Duration::from_micros(60));
        }
        assert!(!spin.look_on(most, || true), "they have been long for a while");
        let mut alone = Spin { limit: Duration::ZERO, most, lookers_max: 0 };
        alone.waited(Duration::ZERO);
        assert!(
            !alone.look_on(most, || true),
            "on the only processor it would keep those from it for whom it waits"
        );
    }

    #[test]
    fn one_processor_is_left_to_others() {
        let first = Looking::begin(2).expect("nobody looks on: the other test is allowed any number");
        let second = Looking::begin(usize::MAX).expect("any number may");
        assert!(Looking::begin(2).is_none());
        drop((first, second));
    }
}
