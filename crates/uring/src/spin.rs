//! Waiting awake, for what comes soon.
//!
//! To fall asleep and to be woken takes a processor longer than a small request does; where one client asks one thing at a time, the next
//! comes before that is over. So a driver whose last waits were short looks on for a while before it sleeps. One whose waits are long sleeps at
//! once: a machine with nothing to do is left alone. How long it is worth while depends on who is waited for.

use std::time::{Duration, Instant};

/// Less is none.
const AWAKE_MIN: Duration = Duration::from_micros(5);

/// How long a driver looks on.
pub(crate) struct Spin {
    limit: Duration,
    /// So long at most.
    most: Duration,
    /// Who is alone on the only processor keeps those from it for whom it waits.
    is_alone: bool,
}

impl Spin {
    /// For `most` at most.
    pub(crate) fn new(most: Duration) -> Self {
        let is_alone = std::thread::available_parallelism().is_ok_and(|processors| processors.get() == 1);
        Self { limit: Duration::ZERO, most, is_alone }
    }

    /// Looks on until `is_here`, as long as the last waits make it worth while and no longer than `left`; whether it came.
    pub(crate) fn look_on(&self, left: Duration, mut is_here: impl FnMut() -> bool) -> bool {
        let limit = self.limit.min(left);
        if limit < AWAKE_MIN {
            return false;
        }
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
        self.limit = if time <= self.most && !self.is_alone { self.most } else { self.limit / 2 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_waits_are_waited_for_awake_and_long_ones_are_not() {
        let most = Duration::from_micros(50);
        let mut spin = Spin { limit: Duration::ZERO, most, is_alone: false };
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
        let mut alone = Spin { limit: Duration::ZERO, most, is_alone: true };
        alone.waited(Duration::ZERO);
        assert!(!alone.look_on(most, || true));
    }
}
