//! Latency of requests, from admission by the engine to the answer, by the path that they took.
//!
//! A histogram has fixed buckets: each power of two of microseconds is divided into eight, from one
//! microsecond to two minutes. So a reported latency is at most an eighth too long. Recording a
//! request costs a few instructions and no memory. The memory is allocated with the volume:
//! [`Latencies`] has a constant size of about 18 KiB.

use alloc::boxed::Box;
use core::time::Duration;

/// The path that a request took.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum RequestPath {
    /// A read fully served from the cache.
    ReadHit,
    /// A read not fully served from the cache.
    ReadMiss,
    /// A bypassed read that was fully served from the cache nevertheless.
    ReadBypassHit,
    /// A bypassed read not fully served from the cache.
    ReadBypassMiss,
    /// A read of a volume without a cache.
    ReadUncached,
    /// A write to the cache only.
    WriteBack,
    /// A write to the backing device and to the cache.
    WriteThrough,
    /// A write to the backing device only: because of the cache mode, because it was bypassed, or
    /// because the cache had no space.
    WriteAround,
    /// A write to a volume without a cache.
    WriteUncached,
    /// A flush.
    Flush,
    /// A discard.
    Discard,
    /// A write of zeroes, on whichever path.
    WriteZeroes,
}

impl RequestPath {
    /// All paths.
    pub const ALL: [Self; 12] = [
        Self::ReadHit,
        Self::ReadMiss,
        Self::ReadBypassHit,
        Self::ReadBypassMiss,
        Self::ReadUncached,
        Self::WriteBack,
        Self::WriteThrough,
        Self::WriteAround,
        Self::WriteUncached,
        Self::Flush,
        Self::Discard,
        Self::WriteZeroes,
    ];

    /// The name of the path, one word.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ReadHit => "read_hit",
            Self::ReadMiss => "read_miss",
            Self::ReadBypassHit => "read_bypass_hit",
            Self::ReadBypassMiss => "read_bypass_miss",
            Self::ReadUncached => "read_uncached",
            Self::WriteBack => "write_back",
            Self::WriteThrough => "write_through",
            Self::WriteAround => "write_around",
            Self::WriteUncached => "write_uncached",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write_zeroes",
        }
    }
}

/// Binary logarithm of the number of places per power of two (eight).
const PART_BITS: u32 = 3;
/// Number of places, up to 2^27 µs; longer latencies are in the last.
const PLACES: usize = (27 - PART_BITS as usize + 1) << PART_BITS;

/// Number of requests by latency.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Histogram {
    /// Entry `p` counts the requests that took at most [`end_us`] of `p` and more than that of the
    /// place before.
    requests: [u64; PLACES],
    total_ns: u128,
    max_ns: u64,
}

/// Returns the place of a latency: the first whose end is not shorter.
fn place(nanoseconds: u64) -> usize {
    let us = nanoseconds.saturating_sub(1) / 1000;
    let bits = us.checked_ilog2();
    let place = match bits {
        Some(bits) if bits >= PART_BITS => {
            (u64::from(bits - PART_BITS) << PART_BITS) + (us >> (bits - PART_BITS))
        }
        _ => us,
    };
    usize::try_from(place).unwrap_or(PLACES).min(PLACES - 1)
}

/// The longest latency of a place, in microseconds. The last place is unbounded; for it, this is
/// where it would end.
const fn end_us(place: usize) -> u64 {
    let (power, part) = (place >> PART_BITS, (place & ((1 << PART_BITS) - 1)) as u64);
    match power {
        0 => part + 1,
        _ => ((1 << PART_BITS) + part + 1) << (power - 1),
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self { requests: [0; PLACES], total_ns: 0, max_ns: 0 }
    }
}

impl Histogram {
    fn add(&mut self, latency: Duration) {
        let nanoseconds = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.requests[place(nanoseconds)] += 1;
        self.total_ns += u128::from(nanoseconds);
        self.max_ns = self.max_ns.max(nanoseconds);
    }

    /// Number of requests.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests.iter().sum()
    }

    /// Total latency of all requests, in nanoseconds.
    #[must_use]
    pub const fn total_ns(&self) -> u128 {
        self.total_ns
    }

    /// The longest latency. `None`: there were no requests.
    #[must_use]
    pub fn longest(&self) -> Option<Duration> {
        (self.requests() > 0).then(|| Duration::from_nanos(self.max_ns))
    }

    /// Number of requests that took at most 2^`power` microseconds; exact for powers up to 26.
    #[must_use]
    pub fn within_power_us(&self, power: u32) -> u64 {
        let limit = 1_u64.checked_shl(power).unwrap_or(u64::MAX);
        let within = |place: &usize| end_us(*place) <= limit && *place < PLACES - 1;
        (0..PLACES).take_while(within).map(|place| self.requests[place]).sum()
    }

    /// The latency that `permille` of all requests did not exceed. The result is at most an eighth
    /// too long and never longer than the longest latency. `None`: there were no requests.
    #[must_use]
    pub fn permille(&self, permille: u16) -> Option<Duration> {
        let requests = self.requests();
        let wanted = (u128::from(requests) * u128::from(permille)).div_ceil(1000).max(1);
        let mut seen = 0;
        let found = self.requests.iter().position(|requests| {
            seen += u128::from(*requests);
            seen >= wanted
        })?;
        let longest = Duration::from_nanos(self.max_ns);
        let is_last = found == PLACES - 1;
        Some(if is_last { longest } else { Duration::from_micros(end_us(found)).min(longest) })
    }
}

/// Latencies of a volume's requests since it has been served, failed requests excluded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Latencies {
    by_path: Box<[Histogram; RequestPath::ALL.len()]>,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { by_path: Box::new(core::array::from_fn(|_| Histogram::default())) }
    }
}

impl Latencies {
    /// The histogram of the requests that took this path.
    #[must_use]
    pub const fn of(&self, path: RequestPath) -> &Histogram {
        &self.by_path[path as usize]
    }

    pub(crate) fn add(&mut self, path: RequestPath, latency: Duration) {
        self.by_path[path as usize].add(latency);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn of(latencies: &[u64]) -> Histogram {
        let mut histogram = Histogram::default();
        latencies.iter().for_each(|latency| histogram.add(Duration::from_nanos(*latency)));
        histogram
    }

    /// Every place begins where the previous one ends, and its length is at most an eighth of its
    /// end.
    #[test]
    fn places_lie_side_by_side() {
        let mut before = 0;
        for number in 0..PLACES - 1 {
            let end = end_us(number);
            assert_eq!((place(before * 1000 + 1), place(end * 1000)), (number, number), "{number}");
            assert!(end - before <= (end / 8).max(1), "{number}: {before} to {end}");
            before = end;
        }
        assert_eq!((place(before * 1000 + 1), place(u64::MAX)), (PLACES - 1, PLACES - 1));
        assert_eq!(place(0), 0);
        assert!(before >= 1 << 26, "{before}");
    }

    #[test]
    fn a_power_of_two_is_an_end() {
        let powers: Vec<u64> = (0..=26).map(|power| 1000 << power).collect();
        let histogram = of(&powers);
        for power in 0..=26 {
            assert_eq!(histogram.within_power_us(power), u64::from(power) + 1, "2^{power} us");
        }
        let histogram = of(&[16_000, 16_001]);
        assert_eq!((histogram.within_power_us(4), histogram.within_power_us(5)), (1, 2));
        let last = of(&[u64::MAX]);
        assert_eq!((last.within_power_us(26), last.requests()), (0, 1));
    }

    #[test]
    fn parts_of_a_thousand() {
        assert_eq!(of(&[]).permille(500), None);
        assert_eq!(of(&[]).longest(), None);
        let histogram = of(&(1..=1000).map(|us| us * 1000).collect::<Vec<_>>());
        for (permille, exact) in [(1, 1), (500, 500), (900, 900), (990, 990), (999, 999), (1000, 1000)] {
            let told = histogram.permille(permille).expect("there are some").as_micros();
            assert!((exact..=exact + exact / 8 + 1).contains(&told), "{permille}: {told} for {exact}");
        }
        assert_eq!(histogram.permille(1000), Some(Duration::from_millis(1)), "never longer than the longest");
        assert_eq!(histogram.longest(), Some(Duration::from_millis(1)));
        assert_eq!(histogram.total_ns(), 500_500_000);
        let slow = of(&[u64::MAX]);
        assert_eq!(slow.permille(500), Some(Duration::from_nanos(u64::MAX)));
    }
}
