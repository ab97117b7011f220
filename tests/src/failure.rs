//! The error type of the tests, which controls what a failing test prints.
//!
//! Rust's test runner prints the `Debug` form of an error, in which the output of a daemon or a
//! kernel would be one escaped line. A [`Failure`] prints text as it is, causes included, and gains
//! a line of context at each step up.

use std::error::Error;
use std::fmt;

/// Why a test failed, as readable text.
pub struct Failure(String);

/// The result of the tests of this package.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// Creates a failure with this text.
    pub fn new(words: impl Into<String>) -> Self {
        Self(words.into())
    }

    /// Returns whether the text contains `words`.
    #[must_use]
    pub fn mentions(&self, words: &str) -> bool {
        self.0.contains(words)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<E: Error> From<E> for Failure {
    fn from(error: E) -> Self {
        let mut text = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            // Some errors already include their cause.
            if !text.contains(&cause_text) {
                text += &format!(": {cause_text}");
            }
            source = cause.source();
        }
        Self(text)
    }
}

/// Adds to an error where it happened.
pub trait Context<T> {
    /// Puts `what` in front of the failure. For a missing value (`None`), `what` is the failure.
    ///
    /// # Errors
    /// The failure, if there was one.
    fn context(self, what: impl fmt::Display) -> Outcome<T>;
}

impl<T, E: Into<Failure>> Context<T> for Result<T, E> {
    fn context(self, what: impl fmt::Display) -> Outcome<T> {
        self.map_err(|error| Failure(format!("{what}: {}", error.into().0)))
    }
}

impl<T> Context<T> for Option<T> {
    fn context(self, what: impl fmt::Display) -> Outcome<T> {
        self.ok_or_else(|| Failure(what.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::side::LegError;
    use crate::workload::Mismatch;

    #[test]
    fn lines_stay_lines_and_causes_are_told_once() {
        let source = Mismatch::Read { sector: 3, source: std::io::Error::other("gone") };
        let error = LegError::Content { side: "x", volume: 1, source, said: "one\ntwo".to_owned() };
        let failure: Outcome = Err(error).context("leg 4").context("seed 7");
        let text = format!("{:?}", failure.expect_err("an error above"));
        assert!(text.starts_with("seed 7: leg 4: x: volume 1: read the content at sector 3"), "{text}");
        assert!(text.contains("one\ntwo"), "{text}");
        assert_eq!(text.matches("gone").count(), 1, "{text}");
    }
}
