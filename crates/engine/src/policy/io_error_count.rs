//! Counts how often the cache device has failed recently.
//!
//! The count is that of Linux bcache: each failed operation adds one. With a half-life, the count
//! decays with the number of operations: each 88th part of the half-life removes 1/128 of it, and
//! 88 such steps remove half. Two things differ from the kernel:
//!
//! - A place that keeps failing is counted once. It is retried again and again, and one bad sector
//!   is no reason to give up the rest of the cache.
//! - When the count reaches its limit, the kernel gives up the whole set with its dirty data. Here
//!   nothing is added to the cache any more, and dirty data is written back as fast as possible
//!   ([`crate::Options::io_error_limit`]).

use alloc::collections::BTreeMap;
use core::ops::Range;

/// One error, in fixed point.
const ONE: u64 = 1 << 20;

/// Maximum number of places remembered as bad. If there are more, some are counted again.
const PLACES_MAX: usize = 256;

/// Number of steps in which the count halves.
const STEPS: u64 = 88;

/// The error count.
#[derive(Clone, Default, Debug)]
pub struct IoErrorCount {
    /// Errors, in units of [`ONE`].
    count: u64,
    /// Operations since the last step.
    operations: u64,
    /// Where operations have failed and none has succeeded since: ends by starts, in sectors. None
    /// overlap.
    places: BTreeMap<u64, u64>,
}

impl IoErrorCount {
    /// Records that an operation on the sectors `range` of the device has ended; `failed`: it
    /// failed. `halflife`: in operations; 0: no decay.
    pub fn take_in(&mut self, range: &Range<u64>, failed: bool, halflife: u64) {
        self.fade(halflife);
        // A healthy device costs no more than this.
        let is_known = !self.places.is_empty() && self.bad_place(range).is_some();
        match (failed, is_known) {
            (true, false) => {
                self.count = self.count.saturating_add(ONE);
                if self.places.len() == PLACES_MAX {
                    self.places.pop_first();
                }
                self.places.insert(range.start, range.end);
            }
            (false, true) => {
                while let Some(start) = self.bad_place(range) {
                    self.places.remove(&start);
                }
            }
            (true, true) | (false, false) => {}
        }
    }

    /// The start of a bad place that shares a sector with `range`.
    fn bad_place(&self, range: &Range<u64>) -> Option<u64> {
        let last = self.places.range(..range.end).next_back();
        last.filter(|(_, end)| **end > range.start).map(|(start, _)| *start)
    }

    const fn fade(&mut self, halflife: u64) {
        if halflife > 0 {
            self.operations += 1;
            // With fractions of an operation per step, the loop would never end.
            let step = if halflife < STEPS { 1 } else { halflife / STEPS };
            while self.operations >= step {
                self.operations -= step;
                self.count -= self.count.div_ceil(128);
            }
        }
    }

    /// The count in whole errors.
    #[must_use]
    pub const fn errors(&self) -> u64 {
        self.count / ONE
    }

    /// Returns true if the device has failed at least `limit` times. The first error reaches a
    /// limit of 0, as it does 1.
    #[must_use]
    pub const fn has_reached(&self, limit: u64) -> bool {
        let errors = self.errors();
        errors > 0 && errors >= limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sectors of block `number` of the device.
    const fn block(number: u64) -> Range<u64> {
        8 * number..8 * number + 8
    }

    #[test]
    fn errors_add_up_to_the_limit() {
        let mut errors = IoErrorCount::default();
        assert!(!errors.has_reached(0), "nothing has failed");
        for error in 1..=8 {
            assert!(!errors.has_reached(8));
            errors.take_in(&block(100), false, 0);
            errors.take_in(&block(error), true, 0);
            assert_eq!(errors.errors(), error);
        }
        assert!(errors.has_reached(8) && errors.has_reached(0) && !errors.has_reached(9));
    }

    #[test]
    fn half_of_them_fade_in_a_half_life() {
        for halflife in [88, 880, 88_000] {
            let mut errors = IoErrorCount::default();
            (0..1000).for_each(|number| errors.take_in(&block(number), true, 0));
            (0..halflife).for_each(|_| errors.take_in(&block(2000), false, halflife));
            assert!((495..=505).contains(&errors.errors()), "{halflife}: {}", errors.errors());
        }
        let mut errors = IoErrorCount::default();
        errors.take_in(&block(0), true, 1);
        (0..5000).for_each(|_| errors.take_in(&block(1), false, 1));
        assert_eq!(errors.count, 0, "in the end all of it");
    }

    /// One bad sector, retried by each write-back or requested by each read, must not disable the
    /// whole cache.
    #[test]
    fn a_place_that_goes_on_failing_is_counted_once() {
        let mut errors = IoErrorCount::default();
        let counted = |errors: &mut IoErrorCount, range: Range<u64>| {
            errors.take_in(&range, true, 0);
            errors.errors()
        };
        assert_eq!(counted(&mut errors, 80..88), 1);
        assert_eq!(counted(&mut errors, 80..88), 1, "again");
        assert_eq!(counted(&mut errors, 64..128), 1, "with what lies around it");
        assert_eq!(counted(&mut errors, 84..85), 1, "a part of it");
        assert_eq!(counted(&mut errors, 88..96), 2, "beside it");
        assert_eq!(counted(&mut errors, 72..80), 3);
        errors.take_in(&(84..85), false, 0);
        assert_eq!(counted(&mut errors, 80..88), 4, "it had done well meanwhile");
        for number in 0..10_000 {
            errors.take_in(&block(1000 + number), true, 0);
        }
        assert!(errors.places.len() <= PLACES_MAX, "memory is bounded");
    }
}
