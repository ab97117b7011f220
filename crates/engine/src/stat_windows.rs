//! The last five minutes, hour and day, as Linux bcache weighs them, but exactly.
//!
//! Time is cut into ticks of 300 s / 22, about 13.6 s, by the engine's own clock. When a tick ends what it counted goes into
//! every window, and a window keeps 31/32 of what is in it: that of five minutes at every tick, that of an hour at every
//! 12th, that of a day at every 288th. So half of what a window held is forgotten in as long as its name says.
//!
//! | | the kernel | here |
//! |---|---|---|
//! | what the present tick has counted | seen when it ends, up to 13.6 s late | seen at once |
//! | what a tick may count | 65535 events or sectors; beyond, it wraps | 64 bits |
//! | a window | 16 bits behind the point, within 32 | 64 bits behind the point, before it 64 |
//! | bypassed | sectors | bytes |
//!
//! Nothing runs at a tick. Whoever counts or looks first says what time it is, and the ticks that have ended since, however
//! many, cost a few multiplications; between ticks one comparison. Ticks are the same for a set and its volumes, so that they
//! agree in every window as they do in total.

use bcached_env::Time;

/// Ticks in five minutes.
const TICKS: u128 = 22;
/// Five minutes, in nanoseconds.
const FIVE_MINUTES_NS: u128 = 300_000_000_000;

/// A window of time that looks back from now.
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
    /// All of them, the shortest first.
    pub const ALL: [Self; 3] = [Self::FiveMinutes, Self::Hour, Self::Day];

    /// In the kernel's word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FiveMinutes => "five_minute",
            Self::Hour => "hour",
            Self::Day => "day",
        }
    }

    /// It forgets a part when the number of a tick is a multiple of this.
    const fn ticks(self) -> u64 {
        match self {
            Self::FiveMinutes => 1,
            Self::Hour => 12,
            Self::Day => 288,
        }
    }
}

/// What the kernel counts of requests, of a set or a volume: in total or in a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
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

/// How many numbers [`Counted`] has.
const NUMBERS: usize = 6;

impl Counted {
    /// Reads that found everything in the cache, of those that were not bypassed, in percent, rounded down
    /// (`cache_hit_ratio`). `None`: there were none.
    #[must_use]
    pub fn hit_percent(&self) -> Option<u64> {
        let asked = u128::from(self.hits) + u128::from(self.misses);
        let percent = (u128::from(self.hits) * 100).checked_div(asked)?;
        Some(u64::try_from(percent).expect("at most a hundred"))
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

/// What is remembered of the ticks that have ended. What the present one counts stands in the totals, which belong to
/// whoever keeps this.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Windows {
    /// The present tick.
    tick: u64,
    /// When it ends.
    end: Time,
    /// The totals when it began.
    begun_with: [u64; NUMBERS],
    kept: [[Kept; NUMBERS]; Window::ALL.len()],
}

impl Windows {
    /// It is `now`, and nothing has been counted since the totals were so. Before anything is counted, and before a look.
    pub fn turn(&mut self, now: Time, totals: impl FnOnce() -> Counted) {
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

    /// What `window` holds, if the totals are `totals` now; fractions are left out.
    #[must_use]
    pub fn of(&self, window: Window, totals: Counted) -> Counted {
        let kept = &self.kept[window as usize];
        let mut numbers = totals.numbers();
        for (number, (kept, before)) in numbers.iter_mut().zip(kept.iter().zip(&self.begun_with)) {
            *number = kept.whole().saturating_add(*number - before);
        }
        Counted::of(numbers)
    }
}

/// The tick that `now` is in.
fn tick_of(now: Time) -> u64 {
    u64::try_from(u128::from(now.0) * TICKS / FIVE_MINUTES_NS).expect("fewer ticks than nanoseconds")
}

/// The first moment of the tick behind `tick`.
fn end_of(tick: u64) -> Time {
    let end = ((u128::from(tick) + 1) * FIVE_MINUTES_NS).div_ceil(TICKS);
    Time(u64::try_from(end).unwrap_or(u64::MAX))
}

/// A number with 64 bits before the point and 64 behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Kept(u128);

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

impl Kept {
    const fn add(&mut self, number: u64) {
        self.0 = self.0.saturating_add((number as u128) << 64);
    }

    /// Keeps 31/32, so many times.
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

    /// Counts like the kernel, tick by tick, without rounding: 128 bits behind the point are more than enough.
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
        total: Counted,
        windows: Windows,
    }

    impl Counter {
        fn new() -> Self {
            Self { total: Counted::default(), windows: Windows::default() }
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

    /// Seen on a kernel: 300 hits, and then at each tick (behaviour of `stats_five_minute`).
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

    /// However long nobody looked, the ticks are all there; and what came in a tick is forgotten from its end on.
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

    /// The kernel takes what it counts in a tick modulo 65536.
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
        let ratio = |hits, misses| Counted { hits, misses, ..Counted::default() }.hit_percent();
        assert_eq!(
            (ratio(0, 0), ratio(0, 1), ratio(2, 1), ratio(1, 0)),
            (None, Some(0), Some(66), Some(100))
        );
        assert_eq!(ratio(u64::MAX, u64::MAX), Some(50));
    }
}
