//! The daemon: what `bcached serve` runs, and what asks it.
//!
//! ```text
//!   main thread   supervisor: opens devices, starts the rest, waits for signals, stops everything in order
//!   engine NAME   one thread a cache set: executor, engine, and the pump of its port     (engine_thread)
//!   control       HTTP and JSON on a unix socket, and signals; tokio lives here only     (control_server)
//!   log           writes the log's lines, so that nobody waits for its reader              (log)
//!   nbd-*, vhost-*, fuse-*, ublk *   the front ends' own threads, which meet the engines at the port (supervisor/fronts)
//! ```
//!
//! The configuration is checked whole before any device is opened; devices are opened and claimed before any thread
//! starts. What fails for one volume is its own reason in `status` and stops no other volume.
//!
#![forbid(unsafe_code)]

mod control_server;
mod descriptor_limit;
mod engine_error;
mod engine_thread;
mod events;
pub mod log;
pub mod metrics;
mod oom_score;
mod socket_activation;
mod supervisor;
mod sysfs;
mod take_over;
mod udev_owned;

pub use supervisor::serve;
