//! Fuzz targets. `targets` holds their bodies, which a test of the main workspace replays over the corpora as well.

pub mod targets;
