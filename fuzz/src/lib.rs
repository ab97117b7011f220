//! Fuzz targets. `targets` and `note` hold their bodies, which tests of the main workspace replay over the corpora as well.

// Images that are built by hand; of the check's tests, as which those bodies run there.
#[path = "../../crates/check/tests/suite/common/mod.rs"]
mod common;
pub mod note;
pub mod targets;
