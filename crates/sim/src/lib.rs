//! The world of the engine, simulated from one seed: task order, latencies, faults, crashes and time.
//!
//! - [`disk`]: the fault model in words, and the device that has these faults;
//! - [`driver`]: the engine's driver over such devices, in virtual time, with an end of the world at any operation;
//! - [`note`]: the note that outlives a process;
//! - [`oracle`]: which values each sector may be read as;
//! - [`stamp`]: what clients write, so that each sector read names its write.
#![forbid(unsafe_code)]

pub mod digest;
pub mod disk;
pub mod driver;
pub mod note;
pub mod oracle;
pub mod stamp;
