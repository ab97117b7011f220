//! Bodies of the fuzz targets. Tests of the main workspace include `targets` and `note` as well, to
//! replay the corpora.

// Images built by hand. The module belongs to the tests of `bcached-check`, which also run
// `targets`.
#[path = "../../crates/check/tests/suite/common/mod.rs"]
mod common;
pub mod note;
pub mod targets;
