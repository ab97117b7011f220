//! What cannot go on for now, and is tried again.

use crate::error::Error;

/// So many tries in a row have met something, the last of them this.
#[derive(Default)]
pub struct Tries(Option<(u32, Error)>);

impl Tries {
    /// The last one went well.
    pub const NONE: Self = Self(None);

    /// One more has met `error`.
    pub fn meets(&mut self, error: Error) {
        let before = self.0.as_ref().map_or(0, |(tries, _)| *tries);
        self.0 = Some((before + 1, error));
    }

    /// What the last one has met, if there were so many.
    #[must_use]
    pub fn error_after(&self, tries_min: u32) -> Option<Error> {
        self.0.as_ref().filter(|(tries, _)| *tries >= tries_min).map(|(_, error)| error.clone())
    }
}
