//! Fuzz targets. `targets` and `note` hold their bodies, which tests of the main workspace replay over the corpora as well.

pub mod note;
pub mod targets;
