//! The world of the engine, simulated from one seed: task order, latencies, faults, crashes and time.
//!
//! Bottom up:
//! - [`disk`]: the fault model in words, and the device that has these faults;
//! - [`driver`]: the engine's driver over such devices, in virtual time, with an end of the world at any operation;
//! - [`note`]: the note that outlives a process;
//! - [`stamp`]: what clients write, so that each sector read names its write;
//! - [`oracle`]: which values each sector may be read as;
//! - [`system`]: what is under test, the smallest such thing, and faulty forms of it;
//! - [`workload`]: what clients do, drawn from a seed;
//! - [`rig`]: a system, its devices and its clients over several processes;
//! - [`growth`]: deep trees to start from;
//! - [`run`], [`crashpoints`]: a whole workload; the same with a crash at every operation;
//! - [`hunt`]: fresh seeds for as long as there is time;
//! - [`figures`], [`reached`]: what was done, and what was asked of what;
//! - [`scenario`], [`scenarios`]: a stage for named disasters, and these;
//! - [`failure`], [`minimise`]: what went wrong, the command that shows it again, and a shorter way there;
//! - [`machines`]: ten virtual machines on one cache;
//! - [`script`]: a workload as a text file;
//! - [`models`]: devices that do nothing wrong and take their time, and the engine measured on them.
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
