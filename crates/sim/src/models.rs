//! Devices as fast and as slow as real ones, in virtual time, and the engine measured on them.
//!
//! The simulated devices of [`crate::disk`] lose, tear and fail at random latencies; those here do nothing wrong and take the time
//! that a drive would. Nothing looks at a wall clock, and nothing is drawn but by seed, so every figure is the same in
//! each run. `docs/performance.md` says what the parameters are and what they were calibrated by.
//!
//! Bottom up:
//! - [`mechanism`]: what a device takes and answers, in nanoseconds;
//! - [`hdd`], [`ssd`]: the two kinds, and the drives that are known by name;
//! - [`gauge`]: a device alone, under a load of a given depth;
//! - [`latencies`]: exact quantiles of what was measured;
//! - [`content`], [`world`]: what devices hold, and all of them as the engine's driver;
//! - [`load`], [`zipf`], [`bed`]: clients, and the engine under them;
//! - [`kernel`]: how a kernel writes back, to compare with;
//! - [`heap`]: what that allocates;
//! - [`bench`]: the figures that are promised, beside their bounds.
pub mod bed;
pub mod bench;
pub mod content;
pub mod gauge;
pub mod hdd;
pub mod heap;
pub mod kernel;
pub mod latencies;
pub mod load;
pub mod mechanism;
pub mod ssd;
pub mod world;
pub mod zipf;

#[cfg(test)]
mod calibration;
