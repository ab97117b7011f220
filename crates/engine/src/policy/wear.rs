//! How often the cache device has failed of late.
//!
//! The count is that of Linux bcache: each failed operation adds one, and with a half-life what was counted fades with what is done:
//! every 88th part of so many operations takes a 128th of it, and 88 of those take half. What follows from a count that has
//! reached its limit is not the kernel's: it gives the whole set up, and what is dirty with it. Here nothing is added to the
//! cache any more, and what is dirty leaves it as fast as it can ([`crate::Options::io_error_limit`]).

/// An error, in fixed point.
const ONE: u64 = 1 << 20;

/// Steps in which half of the count fades.
const STEPS: u64 = 88;

/// The count.
#[derive(Clone, Copy, Default, Debug)]
pub struct Wear {
    /// Errors, in units of [`ONE`].
    count: u64,
    /// Operations since the last step.
    operations: u64,
}

impl Wear {
    /// An operation on the device has ended, and `failed` or not. `halflife` in operations; 0: nothing fades.
    pub const fn take_in(&mut self, failed: bool, halflife: u64) {
        if halflife > 0 {
            self.operations += 1;
            // Less than a step a time would never come to its end.
            let step = if halflife < STEPS { 1 } else { halflife / STEPS };
            while self.operations >= step {
                self.operations -= step;
                self.count -= self.count.div_ceil(128);
            }
        }
        if failed {
            self.count = self.count.saturating_add(ONE);
        }
    }

    /// Whole errors.
    #[must_use]
    pub const fn errors(&self) -> u64 {
        self.count / ONE
    }

    /// The device has failed, and as often as `limit` says; 0 is reached by the first error, as 1 is.
    #[must_use]
    pub const fn has_reached(&self, limit: u64) -> bool {
        let errors = self.errors();
        errors > 0 && errors >= limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_add_up_to_the_limit() {
        let mut wear = Wear::default();
        assert!(!wear.has_reached(0), "nothing has failed");
        for error in 1..=8 {
            assert!(!wear.has_reached(8));
            wear.take_in(false, 0);
            wear.take_in(true, 0);
            assert_eq!(wear.errors(), error);
        }
        assert!(wear.has_reached(8) && wear.has_reached(0) && !wear.has_reached(9));
    }

    #[test]
    fn half_of_them_fade_in_a_half_life() {
        for halflife in [88, 880, 88_000] {
            let mut wear = Wear::default();
            (0..1000).for_each(|_| wear.take_in(true, 0));
            (0..halflife).for_each(|_| wear.take_in(false, halflife));
            assert!((495..=505).contains(&wear.errors()), "{halflife}: {}", wear.errors());
        }
        let mut wear = Wear::default();
        wear.take_in(true, 1);
        (0..5000).for_each(|_| wear.take_in(false, 1));
        assert_eq!(wear.count, 0, "in the end all of it");
    }
}
