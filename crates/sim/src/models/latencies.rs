//! Exact latency statistics: every sample is kept, so that quantiles have no bucketing error.

/// Durations in nanoseconds.
#[derive(Clone, Debug, Default)]
pub struct Latencies {
    all: Vec<u64>,
    is_sorted: bool,
}

impl Latencies {
    /// Adds one sample.
    pub fn add(&mut self, nanoseconds: u64) {
        self.all.push(nanoseconds);
        self.is_sorted = false;
    }

    /// Adds all samples of `other`.
    pub fn join(&mut self, other: &Self) {
        self.all.extend_from_slice(&other.all);
        self.is_sorted = false;
    }

    /// Returns the number of samples.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.all.len() as u64
    }

    /// Returns the arithmetic mean in nanoseconds, or 0 if there are no samples.
    #[must_use]
    pub fn mean(&self) -> u64 {
        let sum: u128 = self.all.iter().map(|one| u128::from(*one)).sum();
        u64::try_from(sum / (self.all.len() as u128).max(1)).unwrap_or(u64::MAX)
    }

    /// Returns the smallest sample that `permille` of a thousand samples do not exceed, in
    /// nanoseconds; 0 if there are no samples.
    ///
    /// # Panics
    /// If `permille` is above 1000.
    pub fn quantile(&mut self, permille: usize) -> u64 {
        assert!(permille <= 1000, "a share of the whole");
        if !self.is_sorted {
            self.all.sort_unstable();
            self.is_sorted = true;
        }
        let rank = (self.all.len() * permille).div_ceil(1000).max(1);
        self.all.get(rank - 1).copied().unwrap_or(0)
    }

    /// Returns the longest sample in nanoseconds, or 0 if there are no samples.
    #[must_use]
    pub fn longest(&self) -> u64 {
        self.all.iter().copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_exact() {
        let mut latencies = Latencies::default();
        assert_eq!((latencies.quantile(500), latencies.mean(), latencies.longest()), (0, 0, 0));
        for one in (1..=2000).rev() {
            latencies.add(one);
        }
        assert_eq!(latencies.quantile(500), 1000);
        assert_eq!(latencies.quantile(999), 1998);
        assert_eq!(latencies.quantile(1000), 2000);
        assert_eq!(latencies.quantile(0), 1);
        assert_eq!((latencies.mean(), latencies.longest(), latencies.count()), (1000, 2000, 2000));
        latencies.add(3000);
        assert_eq!(latencies.quantile(500), 1001, "half of them and one more");
    }
}
