//! Random numbers with a Zipf distribution.

use bcached_env::rng::Rng;

/// Draws from 0..count. The n-th most frequent number has a share in proportion to 1/n to the power
/// of theta. Which number that is does not depend on n.
#[derive(Debug)]
pub struct Zipf {
    /// The cumulative share of the first n ranks, for each n.
    sums: Vec<f64>,
    seed: u64,
}

impl Zipf {
    /// Creates a distribution over `count` numbers.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    pub fn new(count: u64, theta: f64, seed: u64) -> Self {
        let mut sum = 0.0;
        let mut sums: Vec<f64> = (1..=count)
            .map(|rank| {
                sum += (rank as f64).powf(-theta);
                sum
            })
            .collect();
        sums.iter_mut().for_each(|one| *one /= sum);
        Self { sums, seed }
    }

    /// Draws a number.
    #[expect(clippy::cast_precision_loss, reason = "53 bits are enough")]
    pub fn draw(&self, rng: &mut Rng) -> u64 {
        let share = (rng.next() >> 11) as f64 / (1_u64 << 53) as f64;
        let rank = self.sums.partition_point(|sum| *sum <= share) as u64;
        // Two ranks may map to the same number: a few blocks are a little more frequent, and others
        // are never drawn.
        Rng::new(self.seed ^ rank).next() % self.sums.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_drawn_as_often_as_its_share() {
        let zipf = Zipf::new(1000, 1.1, 3);
        let mut rng = Rng::new(1);
        let mut counts = vec![0_u32; 1000];
        for _ in 0..100_000 {
            counts[usize::try_from(zipf.draw(&mut rng)).unwrap()] += 1;
        }
        counts.sort_unstable();
        // 1 over the sum of n to the power of -1.1 up to 1000, which is 5.58.
        let first = f64::from(counts[999]) / 100_000.0;
        assert!((0.17..0.19).contains(&first), "{first}");
        assert!(counts[500] < 200, "{}", counts[500]);
    }
}
