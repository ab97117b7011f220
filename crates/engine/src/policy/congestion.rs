//! Whether the cache device is slower than it should be, and from what length on a request had better go past it.
//!
//! The rules are those of Linux bcache. Each read or write of cached data that takes longer than its threshold pulls a counter
//! down by the milliseconds that it took, at most to -1024; each faster one lets it rise by one, at most to 0, and so does
//! each millisecond since the last slow one. The limit follows the counter by powers of two: just below 0 everything up to
//! some 32 MiB is cached, and each 64 further down halve that, to one sector, less a random number of sectors (16 in the
//! middle), so that not all requests of a size meet one fate. As in the kernel a millisecond is 2^20 ns here, which a shift
//! divides by; thresholds are compared as they are.
//!
//! What makes a device look slow may be no fault of its own (a virtual or remote disk): a threshold of zero takes the
//! reads or the writes out of it, two of them all.

use bcached_env::Time;
use bcached_env::rng::Rng;
use core::time::Duration;

/// As far as the counter goes down.
const DEPTH: i64 = 1024;

/// The counter's steps in which the limit doubles.
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
    /// Data has been read or written on the cache device, in so long a time. A threshold of zero: it does not count.
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

    /// Streams of so many sectors and more are not added to the cache; `None`: not congested.
    pub fn limit(&mut self, now: Time) -> Option<u64> {
        let limit = self.limit_max(now)?;
        // As many as one half of 32 bits is set, in the middle.
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

    /// The kernel's defaults.
    const READ: Duration = Duration::from_micros(2000);
    const WRITE: Duration = Duration::from_micros(20_000);

    /// So many of our milliseconds.
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
        // As was seen of a kernel: 0.5 s after the last slow one some 570 KiB.
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
