//! Simulates the engine's world from one seed: task order, latencies, faults, crashes and time.
//!
//! From the bottom up:
//! - [`disk`]: the fault model in words, and the device that has these faults;
//! - [`driver`]: the engine's driver over such devices, in virtual time, which can end the world at
//!   any operation;
//! - [`note`]: the note that outlives a process;
//! - [`stamp`]: what clients write, so that each sector read names the write that it came from;
//! - [`oracle`]: which values each sector may be read as;
//! - [`system`]: the system under test, the smallest possible one, and faulty variants of it;
//! - [`workload`]: what clients do, drawn from a seed;
//! - [`rig`]: a system, its devices and its clients over several processes;
//! - [`growth`]: deep trees to start from;
//! - [`run`], [`crashpoints`]: a whole workload; the same workload with a crash at every operation;
//! - [`hunt`]: fresh seeds for as long as there is time;
//! - [`figures`], [`reached`]: counts of what was done, and of which request kinds met which
//!   conditions;
//! - [`scenario`], [`scenarios`]: a stage for named disasters, and the disasters;
//! - [`failure`], [`minimise`]: what went wrong, the command that reproduces it, and a shorter way
//!   there;
//! - [`machines`]: ten virtual machines on one cache;
//! - [`script`]: a workload as a text file;
//! - [`models`]: devices without faults and with realistic latencies, and measurements of the
//!   engine on them.
#![forbid(unsafe_code)]

pub mod crashpoints;
pub mod digest;
pub mod disk;
pub mod driver;
pub mod failure;
pub mod figures;
pub mod growth;
pub mod hunt;
pub mod machines;
pub mod minimise;
pub mod models;
pub mod note;
pub mod oracle;
pub mod reached;
pub mod rig;
pub mod run;
pub mod scenario;
pub mod scenarios;
pub mod script;
pub mod stamp;
pub mod system;
pub mod workload;
