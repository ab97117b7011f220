//! Failed tries of work that cannot proceed for now and is retried.

use crate::error::Error;

/// The number of consecutive failed tries, and the error of the last one.
#[derive(Default)]
pub struct Backoff(Option<(u32, Error)>);

impl Backoff {
    /// The last try succeeded.
    pub const NONE: Self = Self(None);

    /// Records one more try that failed with `error`.
    pub fn meets(&mut self, error: Error) {
        let before = self.0.as_ref().map_or(0, |(tries, _)| *tries);
        self.0 = Some((before + 1, error));
    }

    /// Returns the error of the last try if at least `tries_min` tries have failed in a row.
    #[must_use]
    pub fn error_after(&self, tries_min: u32) -> Option<Error> {
        self.0.as_ref().filter(|(tries, _)| *tries >= tries_min).map(|(_, error)| error.clone())
    }
}
