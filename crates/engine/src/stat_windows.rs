//! Statistics of the last five minutes, hour and day, weighted as in Linux bcache, but computed
//! exactly.
//!
//! Time is divided into ticks of 300 s / 22, about 13.6 s, of the engine's own clock. At the end of
//! a tick, its counts are added to every window. Each window decays to 31/32 of its value: the
//! five-minute one at every tick, the hour at every 12th, the day at every 288th. So half of a
//! window's value decays within the time in its name.
//!
//! | | the kernel | here |
//! |---|---|---|
//! | counts of the current tick | visible when it ends, up to 13.6 s late | visible at once |
//! | maximum count per tick | 65535 events or sectors; beyond, it wraps | 64 bits |
//! | a window | 16 fractional bits in a 32-bit number | 64 integer and 64 fractional bits |
//! | bypassed | sectors | bytes |
//!
//! Nothing runs at a tick. Code that counts or reads passes the current time first. The ticks that
//! have ended since, however many, cost a few multiplications; between ticks the cost is one
//! comparison. A set and its volumes have the same ticks, so their numbers agree in every window as
//! they do in total.

use bcached_env::Time;

/// Ticks in five minutes.
const TICKS: u128 = 22;
/// Five minutes, in nanoseconds.
const FIVE_MINUTES_NS: u128 = 300_000_000_000;

/// A window of time that ends now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Window {
    /// `stats_five_minute`.
    FiveMinutes,
    /// `stats_hour`.
    Hour,
    /// `stats_day`.
    Day,
}

impl Window {
    /// All windows, shortest first.
    pub const ALL: [Self; 3] = [Self::FiveMinutes, Self::Hour, Self::Day];

    /// The kernel's name of the window.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FiveMinutes => "five_minute",
            Self::Hour => "hour",
            Self::Day => "day",
        }
    }

    /// The window decays when the number of a tick is a multiple of this.
    const fn ticks(self) -> u64 {
        match self {
            Self::FiveMinutes => 1,
            Self::Hour => 12,
            Self::Day => 288,
        }
    }
}

/// The kernel's request counters for a set or a volume, in total or in a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestCounts {
    /// `cache_hits`.
    pub hits: u64,
    /// `cache_misses`.
    pub misses: u64,
    /// `cache_bypass_hits`.
    pub bypass_hits: u64,
    /// `cache_bypass_misses`.
    pub bypass_misses: u64,
    /// `cache_miss_collisions`.
    pub miss_collisions: u64,
    /// `bypassed`, in bytes.
    pub bypassed_bytes: u64,
}

/// Number of fields of [`RequestCounts`].
const NUMBERS: usize = 6;

impl RequestCounts {
    /// Percentage of unbypassed reads that found everything in the cache, rounded down
    /// (`cache_hit_ratio`). `None`: there were no such reads.
    #[must_use]
    pub fn hit_percent(&self) -> Option<u64> {
        let asked = u128::from(self.hits) + u128::from(self.misses);
        let percent = (u128::from(self.hits) * 100).checked_div(asked)?;
        Some(u64::try_from(percent).expect("a percentage is at most 100"))
    }

    const fn numbers(self) -> [u64; NUMBERS] {
        let Self { hits, misses, bypass_hits, bypass_misses, miss_collisions, bypassed_bytes } = self;
        [hits, misses, bypass_hits, bypass_misses, miss_collisions, bypassed_bytes]
    }

    const fn of(numbers: [u64; NUMBERS]) -> Self {
        let [hits, misses, bypass_hits, bypass_misses, miss_collisions, bypassed_bytes] = numbers;
        Self { hits, misses, bypass_hits, bypass_misses, miss_collisions, bypassed_bytes }
    }
}

/// The decayed counts of the ticks that have ended. The counts of the current tick are in the
/// totals, which the owner of this keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatWindows {
    /// Number of the current tick.
    tick: u64,
    /// When it ends.
    end: Time,
    /// The totals when it began.
    begun_with: [u64; NUMBERS],
    kept: [[FixedPoint; NUMBERS]; Window::ALL.len()],
}

impl StatWindows {
    /// Advances to `now`. Nothing may have been counted since the totals had these values. Call it
    /// before counting and before reading.
    pub fn turn(&mut self, now: Time, totals: impl FnOnce() -> RequestCounts) {
        if now < self.end {
            return;
        }
        let (tick, totals) = (tick_of(now), totals().numbers());
        for (window, kept) in Window::ALL.into_iter().zip(&mut self.kept) {
            let times = tick / window.ticks() - self.tick / window.ticks();
            for (kept, (total, before)) in kept.iter_mut().zip(totals.iter().zip(&self.begun_with)) {
                kept.add(total - before);
                kept.forget(times);
            }
        }
        (self.tick, self.end, self.begun_with) = (tick, end_of(tick), totals);
    }

    /// The value of `window` if the totals are now `totals`; fractions are dropped.
    #[must_use]
    pub fn of(&self, window: Window, totals: RequestCounts) -> RequestCounts {
        let kept = &self.kept[window as usize];
        let mut numbers = totals.numbers();
        for (number, (kept, before)) in numbers.iter_mut().zip(kept.iter().zip(&self.begun_with)) {
            *number = kept.whole().saturating_add(*number - before);
        }
        RequestCounts::of(numbers)
    }
}

/// The tick that contains `now`.
fn tick_of(now: Time) -> u64 {
    u64::try_from(u128::from(now.0) * TICKS / FIVE_MINUTES_NS).expect("fewer ticks than nanoseconds")
}

/// The first moment after `tick`.
fn end_of(tick: u64) -> Time {
    let end = ((u128::from(tick) + 1) * FIVE_MINUTES_NS).div_ceil(TICKS);
    Time(u64::try_from(end).unwrap_or(u64::MAX))
}

/// A fixed-point number with 64 integer bits and 64 fractional bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct FixedPoint(u128);

/// `FACTORS[i]` is (31/32) to the power of 2^i, in units of 2^-64. The next one would be 0.
const FACTORS: [u64; 11] = {
    let mut factors = [31 << 59; 11];
    let mut index = 1;
    while index < factors.len() {
        let root = factors[index - 1] as u128;
        factors[index] = ((root * root) >> 64) as u64;
        index += 1;
    }
    factors
};

impl FixedPoint {
    const fn add(&mut self, number: u64) {
        self.0 = self.0.saturating_add((number as u128) << 64);
    }

    /// Decays the number to 31/32, so many times.
    fn forget(&mut self, times: u64) {
        if times >> FACTORS.len() > 0 {
            self.0 = 0;
            return;
        }
        for (_, factor) in FACTORS.into_iter().enumerate().filter(|(index, _)| times >> index & 1 == 1) {
            let (whole, fraction) = (self.0 >> 64, self.0 & u128::from(u64::MAX));
            self.0 = whole * u128::from(factor) + ((fraction * u128::from(factor)) >> 64);
        }
    }

    const fn whole(self) -> u64 {
        (self.0 >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    /// Counts like the kernel, tick by tick, without rounding: 128 fractional bits are more than
    /// enough.
    fn slowly(events: &[(u64, u64)], until: u64, period: u64) -> f64 {
        let mut kept = 0.0;
        for tick in 0..until {
            let counted: u64 = events.iter().filter(|(at, _)| *at == tick).map(|(_, count)| *count).sum();
            kept += counted as f64;
            if (tick + 1).is_multiple_of(period) {
                kept *= 31.0 / 32.0;
            }
        }
        kept
    }

    fn in_tick(tick: u64) -> Time {
        Time(end_of(tick).0 - 1)
    }

    struct Counter {
        total: RequestCounts,
        windows: StatWindows,
    }

    impl Counter {
        fn new() -> Self {
            Self { total: RequestCounts::default(), windows: StatWindows::default() }
        }

        fn hit(&mut self, now: Time, count: u64) {
            self.windows.turn(now, || self.total);
            self.total.hits += count;
        }

        fn hits(&mut self, now: Time, window: Window) -> u64 {
            self.windows.turn(now, || self.total);
            self.windows.of(window, self.total).hits
        }
    }

    /// Observed on a kernel: 300 hits, then the value at each tick (behaviour of
    /// `stats_five_minute`).
    #[test]
    fn five_minutes_forget_as_the_kernel_does() {
        let mut counter = Counter::new();
        counter.hit(in_tick(0), 300);
        assert_eq!(counter.hits(in_tick(0), Window::FiveMinutes), 300, "not only when the tick ends");
        let seen: Vec<_> = (1..5).map(|tick| counter.hits(in_tick(tick), Window::FiveMinutes)).collect();
        assert_eq!(seen, [290, 281, 272, 264]);
    }

    #[test]
    fn half_is_forgotten_in_the_time_of_the_name() {
        for (window, seconds) in [(Window::FiveMinutes, 300), (Window::Hour, 3600), (Window::Day, 86_400)] {
            let mut counter = Counter::new();
            counter.hit(Time(0), 1_000_000);
            let half = counter.hits(Time(seconds * 1_000_000_000), window);
            assert!((497_000..=515_000).contains(&half), "{window:?}: {half}");
        }
    }

    /// Ticks are accounted for after any pause between calls, and the counts of a tick decay from
    /// its end on.
    #[test]
    fn many_ticks_at_once_are_as_many_as_one_by_one() {
        let events = [(0, 1 << 40), (1, 77), (5, 12_345_678_901), (30, 1), (1000, 5_000_000_000), (1001, 3)];
        for until in [1, 2, 3, 6, 31, 287, 288, 289, 999, 1000, 1001, 1002, 1500, 3000] {
            let mut counter = Counter::new();
            for (tick, count) in events.into_iter().filter(|(tick, _)| *tick < until) {
                counter.hit(in_tick(tick), count);
            }
            for window in Window::ALL {
                let (kept, exact) =
                    (counter.hits(in_tick(until), window), slowly(&events, until, window.ticks()));
                assert!((kept as f64 - exact).abs() <= 1.0, "{window:?}, {until}: {kept}, {exact}");
            }
        }
    }

    /// The kernel counts modulo 65536 within a tick.
    #[test]
    fn nothing_wraps() {
        let mut counter = Counter::new();
        counter.hit(Time(0), 70_001);
        assert_eq!(counter.hits(in_tick(0), Window::Day), 70_001);
        assert_eq!(counter.hits(in_tick(1), Window::Day), 70_001);
        counter.hit(in_tick(1), u64::MAX - 70_001);
        assert_eq!(counter.hits(in_tick(1), Window::Day), u64::MAX);
        assert!(counter.hits(in_tick(2), Window::FiveMinutes) > u64::MAX / 32 * 30);
    }

    #[test]
    fn what_is_long_gone_is_forgotten() {
        let mut counter = Counter::new();
        counter.hit(Time(0), u64::MAX);
        assert_eq!(counter.hits(Time(u64::MAX), Window::Day), 0);
        assert_eq!(counter.total.hits, u64::MAX, "but not in total");
    }

    #[test]
    fn a_ratio_is_rounded_down_and_there_is_none_of_nothing() {
        let ratio = |hits, misses| RequestCounts { hits, misses, ..RequestCounts::default() }.hit_percent();
        assert_eq!(
            (ratio(0, 0), ratio(0, 1), ratio(2, 1), ratio(1, 0)),
            (None, Some(0), Some(66), Some(100))
        );
        assert_eq!(ratio(u64::MAX, u64::MAX), Some(50));
    }
}
