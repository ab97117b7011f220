//! Models of real devices in virtual time, and the benchmarks that run the engine on them.
//!
//! The simulated devices of [`crate::disk`] lose writes, tear them and fail at random latencies.
//! Those here never fail; they take the time that a real drive would. Nothing reads a wall clock,
//! and every random choice comes from a seed, so each run gives the same figures.
//! `docs/performance.md` lists the parameters and how they were calibrated.
//!
//! Bottom up:
//! - [`mechanism`]: the interface of a device model: commands in, completion times out, in
//!   nanoseconds;
//! - [`hdd`], [`ssd`]: the two kinds of drive, each with presets for known drives;
//! - [`gauge`]: a device alone, under a load of a given queue depth;
//! - [`latencies`]: exact quantiles of the measured latencies;
//! - [`content`], [`world`]: what the devices hold, and all of the devices as the engine's driver;
//! - [`load`], [`zipf`], [`bed`]: clients, and the engine that serves them;
//! - [`kernel`]: a model of the kernel's write-back, for comparison;
//! - [`heap`]: how much memory the engine allocates;
//! - [`bench`]: the promised figures beside their bounds.
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
