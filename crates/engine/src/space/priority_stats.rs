//! How long ago the data in the buckets was last used: the kernel's `priority_stats`. It looks at
//! every bucket, so use it sparingly.

use crate::set::CacheSet;
use alloc::vec::Vec;
use bcached_format::prio::PRIO_FRESH;

/// Number of equal-sized groups that the buckets are divided into, by age.
const GROUPS: u64 = 32;

/// Ages of the buckets that hold no metadata and whose age can still be told. Unit: one step of the
/// cache's clock, which is traffic of 1/1024 of the cache's size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PriorityStats {
    /// Number of such buckets.
    pub buckets: u64,
    /// Their mean age (`Average`). `None`: there are no such buckets.
    pub average: Option<u64>,
    /// Sectors in one 32nd of them (`Sectors per Q`).
    pub sectors_per_quantile: u64,
    /// The ages that divide them into 32 such parts, youngest first (`Quantiles`).
    pub quantiles: Vec<u64>,
}

impl CacheSet {
    /// Computes the ages from every bucket; other tasks run in between.
    pub async fn ages(&self) -> PriorityStats {
        let mut by_age = alloc::vec![0_u64; usize::from(PRIO_FRESH)];
        self.each_bucket(|s, id, _| {
            let prio = s.buckets.prio(id);
            if prio != 0 && prio <= PRIO_FRESH {
                by_age[usize::from(PRIO_FRESH - prio)] += 1;
            }
        })
        .await;
        summed(&by_age, self.with(|s| s.geometry.bucket_sectors))
    }
}

/// Computes the ages. `by_age`: the number of buckets of each age.
fn summed(by_age: &[u64], bucket_sectors: u64) -> PriorityStats {
    let buckets: u64 = by_age.iter().sum();
    let total: u64 = (0..).zip(by_age).map(|(age, count)| age * count).sum();
    let mut ages = (0_u64..).zip(by_age).scan(0, |before, (age, count)| {
        *before += count;
        Some((age, *before))
    });
    let mut quantile = ages.next();
    let mut age_of = |place: u64| {
        while quantile.is_some_and(|(_, upto)| upto <= place) {
            quantile = ages.next();
        }
        quantile.map(|(age, _)| age)
    };
    let quantiles = (1..GROUPS).map_while(|group| age_of(buckets * group / GROUPS)).collect();
    PriorityStats {
        buckets,
        average: total.checked_div(buckets),
        sectors_per_quantile: buckets * bucket_sectors / GROUPS,
        quantiles,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_divide_the_buckets() {
        let mut by_age = alloc::vec![0; 32768];
        (0..320).for_each(|bucket| by_age[bucket * 10] = 1);
        let ages = summed(&by_age, 1024);
        assert_eq!((ages.buckets, ages.average, ages.sectors_per_quantile), (320, Some(1595), 10 * 1024));
        assert_eq!(ages.quantiles, (1..32).map(|group| group * 100).collect::<Vec<u64>>());
        let one = summed(&[0, 0, 7], 8);
        assert_eq!((one.average, one.quantiles), (Some(2), alloc::vec![2; 31]));
        let none = summed(&[0; 5], 8);
        assert_eq!((none.average, none.quantiles), (None, Vec::new()));
    }
}
