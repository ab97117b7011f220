//! The daemon: what `bcached serve` runs, and what asks it.
//!
//! ```text
//!   main thread   supervisor: opens devices, starts the rest, waits for signals, stops everything in order
//!   engine NAME   one thread a cache set: executor, engine, and the pump of its port     (engine_thread)
//!   control       HTTP and JSON on a unix socket, and signals; tokio lives here only     (control)
//!   log           writes the log's lines, so that nobody waits for its reader              (log)
//!   nbd-*, vhost-*, fuse-*, ublk *   the front ends' own threads, which meet the engines at the port (supervisor/fronts)
//! ```
//!
//! The configuration is checked whole before any device is opened; devices are opened and claimed before any thread
//! starts. What fails for one volume is its own reason in `status` and stops no other volume.
//!
//! `failure`, `sizes`, `names`, the table of `options` and the place of the notes are shared with the commands: the same sentence goes to a person and
//! into the log.
#![forbid(unsafe_code)]

pub mod bucket_memory;
pub mod config;
pub mod control;
mod descriptors;
mod devices;
mod engine_failure;
mod engine_thread;
mod events;
pub mod failure;
mod handing;
pub mod log;
pub mod lost;
pub mod metrics;
pub mod names;
pub mod notes;
pub mod offline;
mod oom;
pub mod options;
mod owned;
mod passed;
pub mod places;
pub mod sizes;
mod supervisor;
mod sysfs;
pub mod whole_file;

pub use devices::block_devices;
pub use supervisor::serve;
