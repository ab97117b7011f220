//! Durations and frequency of the set's internal operations: the kernel's time statistics.

use bcached_env::Time;
use core::time::Duration;

/// Weight of a new value in a moving average: one in so many, as in the kernel.
const SHARE: u32 = 8;

/// Durations of one kind of operation since the set was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeStats {
    /// Number of times that it was done.
    pub count: u64,
    /// Moving average of its duration; each new value has a weight of an eighth.
    pub average: Duration,
    /// Moving average of the time from one end to the next. Zero before the second.
    pub between: Duration,
    /// The longest duration.
    pub longest: Duration,
    /// When it last ended.
    last: Option<Time>,
}

impl TimeStats {
    /// Records that the operation began at `begun` and has ended `now`.
    pub(crate) fn add(&mut self, begun: Time, now: Time) {
        let taken = now.since(begun);
        self.average = if self.count == 0 { taken } else { moved(self.average, taken) };
        if let Some(last) = self.last {
            let between = now.since(last);
            self.between = if self.count == 1 { between } else { moved(self.between, between) };
        }
        self.longest = self.longest.max(taken);
        self.last = Some(now);
        self.count += 1;
    }

    /// Time since it last ended. `None`: never.
    #[must_use]
    pub fn since_last(&self, now: Time) -> Option<Duration> {
        self.last.map(|last| now.since(last))
    }
}

fn moved(average: Duration, new: Duration) -> Duration {
    average - average / SHARE + new / SHARE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_average_moves_by_an_eighth() {
        let mut times = TimeStats::default();
        assert_eq!(times.since_last(Time(5)), None);
        times.add(Time(0), Time(800));
        assert_eq!((times.average.as_nanos(), times.between.as_nanos()), (800, 0));
        times.add(Time(1000), Time(2600));
        assert_eq!((times.average.as_nanos(), times.between.as_nanos()), (900, 1800));
        times.add(Time(2600), Time(2600));
        assert_eq!((times.average.as_nanos(), times.between.as_nanos()), (788, 1575));
        assert_eq!((times.count, times.longest.as_nanos()), (3, 1600));
        assert_eq!(times.since_last(Time(3000)), Some(Duration::from_nanos(400)));
    }
}
