//! Congestion of the cache device: whether it is slower than it should be, and from which length on
//! requests should bypass it.
//!
//! The rules are those of Linux bcache. Each read or write of cached data that takes longer than
//! its threshold decreases a counter by its latency in milliseconds, down to -1024 at the least.
//! Each faster one increases it by one, up to 0, and so does each millisecond since the last slow
//! one. The limit depends exponentially on the counter: just below 0, requests up to some 32 MiB
//! are cached, and each further 64 down halve that, to one sector. A random number of sectors is
//! subtracted (16 on average), so that not all requests of one size are treated the same. As in the
//! kernel, a millisecond is 2^20 ns here, so that a shift replaces a division; thresholds are
//! compared exactly.
//!
//! A device may look slow for reasons outside it (a virtual or remote disk). A threshold of zero
//! excludes reads or writes; two zeroes exclude both.

use bcached_env::Time;
use bcached_env::rng::Rng;
use core::time::Duration;

/// The lowest value of the counter is minus this.
const DEPTH: i64 = 1024;

/// Counter steps in which the limit doubles.
const STEPS_TO_DOUBLE: u64 = 64;

/// How slow the cache device is.
pub struct Congestion {
    /// From `-DEPTH` to 0.
    counter: i64,
    /// When the last slow operation ended.
    last_slow: Time,
    rng: Rng,
}

impl Default for Congestion {
    fn default() -> Self {
        // Any seed will do: the numbers only spread the limit.
        Self { counter: 0, last_slow: Time::default(), rng: Rng::new(0) }
    }
}

impl Congestion {
    /// Records the latency of a read or write of data on the cache device. A threshold of zero: it
    /// does not count.
    pub fn take_in(&mut self, now: Time, latency: Duration, threshold: Duration) {
        if threshold.is_zero() {
            return;
        }
        if latency > threshold {
            self.counter = (self.counter - milliseconds(latency)).max(-DEPTH);
            self.last_slow = now;
        } else if self.counter < 0 {
            self.counter += 1;
        }
    }

    /// Streams of so many sectors or more are not added to the cache; `None`: not congested.
    pub fn limit(&mut self, now: Time) -> Option<u64> {
        let limit = self.limit_max(now)?;
        // The number of ones among 32 random bits: 16 on average.
        let spread = (self.rng.next() >> 32).count_ones();
        Some(limit.saturating_sub(spread.into()).max(1))
    }

    /// The limit without its random part.
    #[must_use]
    pub fn limit_max(&self, now: Time) -> Option<u64> {
        let below = milliseconds(now.since(self.last_slow)).saturating_add(self.counter);
        let steps = u64::try_from(below.checked_add(DEPTH)?).ok().filter(|_| below < 0)?;
        let (doublings, part) = (steps / STEPS_TO_DOUBLE, steps % STEPS_TO_DOUBLE);
        Some(((STEPS_TO_DOUBLE + part) << doublings) / STEPS_TO_DOUBLE)
    }
}

fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos() >> 20).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's default thresholds.
    const READ: Duration = Duration::from_micros(2000);
    const WRITE: Duration = Duration::from_micros(20_000);

    /// A duration of so many milliseconds of 2^20 ns.
    const fn ms(count: u64) -> Duration {
        Duration::from_nanos(count << 20)
    }

    fn at(milliseconds: u64) -> Time {
        Time(0) + ms(milliseconds)
    }

    #[test]
    fn only_what_is_slower_than_its_threshold_counts() {
        let mut congestion = Congestion::default();
        congestion.take_in(at(10), READ, READ);
        congestion.take_in(at(10), ms(19), WRITE);
        congestion.take_in(at(10), ms(5000), Duration::ZERO);
        assert_eq!(congestion.limit(at(10)), None);
        congestion.take_in(at(10), READ + Duration::from_nanos(300_000), READ);
        assert!(congestion.limit(at(10)).is_some());
    }

    #[test]
    fn the_slower_the_device_the_lower_the_limit() {
        let mut congestion = Congestion::default();
        let mut limits = std::vec::Vec::new();
        for _ in 0..100 {
            congestion.take_in(at(10), ms(25), WRITE);
            limits.push(congestion.limit_max(at(10)).expect("congested"));
        }
        // 999 steps: 15 doublings, and 39 parts of 64 more.
        assert_eq!(limits[0], (64 + 39) << 15 >> 6);
        assert!(limits.is_sorted_by(|before, after| before >= after), "{limits:?}");
        assert_eq!((limits[99], congestion.limit(at(10))), (1, Some(1)), "everything goes past it");
    }

    #[test]
    fn it_is_over_a_millisecond_for_each_or_a_fast_operation_for_each() {
        let mut congestion = Congestion::default();
        (0..100).for_each(|_| congestion.take_in(at(10), ms(25), WRITE));
        // As observed on a kernel: some 570 KiB 0.5 s after the last slow operation.
        let later = congestion.limit_max(at(10 + 560)).expect("congested");
        assert!((300..1000).contains(&later), "{later}");
        assert!(congestion.limit(at(10 + 1023)).is_some());
        assert_eq!(congestion.limit(at(10 + 1024)), None);
        (0..1023).for_each(|_| congestion.take_in(at(10), ms(1), WRITE));
        assert!(congestion.limit(at(10)).is_some());
        congestion.take_in(at(10), ms(1), WRITE);
        assert_eq!(congestion.limit(at(10)), None);
        congestion.take_in(at(10), ms(1), WRITE);
        congestion.take_in(at(20), ms(21), WRITE);
        assert_eq!(congestion.limit(at(20 + 21)), None, "being fast is not saved up");
    }

    #[test]
    fn the_limit_is_spread() {
        let mut congestion = Congestion::default();
        congestion.take_in(at(10), ms(400), WRITE);
        let most = congestion.limit_max(at(10)).expect("congested");
        let limits = [(); 1000].map(|()| congestion.limit(at(10)).expect("congested"));
        assert!(limits.iter().all(|limit| (most - 32..=most).contains(limit)), "{limits:?}");
        let middle = limits.iter().sum::<u64>() / 1000;
        assert!((most - 17..=most - 15).contains(&middle), "{middle} of {most}");
    }

    #[test]
    fn no_time_is_too_long() {
        let mut congestion = Congestion::default();
        congestion.take_in(Time(0), Duration::MAX, READ);
        assert_eq!(congestion.limit_max(Time(0)), Some(1));
        assert_eq!(congestion.limit(Time(u64::MAX)), None);
    }
}
