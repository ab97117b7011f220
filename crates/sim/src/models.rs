//! Devices as fast and as slow as real ones, in virtual time, and the engine measured on them.
//!
//! The simulated devices of [`crate::disk`] lose, tear and fail at random latencies; those here do nothing wrong and take the time
//! that a drive would. Nothing looks at a wall clock, and nothing is drawn but by seed, so every figure is the same in
//! each run. What they are calibrated by stands in their tests.
//!
//! Bottom up:
//! - [`mechanism`]: what a device takes and answers, in nanoseconds;
//! - [`hdd`], [`ssd`]: the two kinds, and the drives that are known by name;
//! - [`gauge`]: a device alone, under a load of a given depth;
//! - [`latencies`]: exact quantiles of what was measured.
pub mod gauge;
pub mod hdd;
pub mod latencies;
pub mod mechanism;
pub mod ssd;

#[cfg(test)]
mod calibration;
