//! What the environment asks of a test beyond its usual share: `docs/testing.md` names the variables.

/// The number in `variable`, if there is one.
#[must_use]
pub fn number_from(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}
