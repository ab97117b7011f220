//! Random numbers from one seed. Not for secrets: for set sequence numbers, victims and task order.

/// A small, fast, seedable generator (SplitMix64: one add, two multiplies; passes `BigCrush`).
#[derive(Clone, Debug)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// Creates a generator; the same seed gives the same numbers.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Returns the next number.
    pub const fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number in `0..bound`; `bound` must not be zero. The bias is below 2^-32 for bounds
    /// below 2^32.
    pub const fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "the bound is not zero");
        self.next() % bound
    }

    /// Returns a number that is not zero.
    pub const fn nonzero(&mut self) -> u64 {
        loop {
            let number = self.next();
            if number != 0 {
                return number;
            }
        }
    }

    /// Returns true once in `times`, on average.
    pub const fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// Returns an independent generator, so that one consumer's draws do not shift another's.
    #[must_use]
    pub const fn fork(&mut self) -> Self {
        Self::new(self.next())
    }
}
