//! The daemon: what `bcached serve` runs, and how it is queried.
//!
//! ```text
//!   main thread   supervisor: opens devices, starts the rest, waits for signals, stops in order
//!   engine NAME   one thread a cache set: executor, engine, the pump of its port (engine_thread)
//!   control       HTTP and JSON on unix sockets                                  (control_server)
//!   signals       catches the signals of the process                    (control_server::signals)
//!   log           writes the log's lines, so that no thread waits for its reader            (log)
//!   nbd-*, vhost-*, fuse-*, ublk *   the threads of the front ends, which meet the engines at
//!                 the port                                                    (supervisor/fronts)
//! ```
//!
//! Tokio runs in the threads of `control_server` only.
//!
//! The whole configuration is checked before any device is opened; devices are opened and claimed
//! before any thread starts. A failure of one volume is reported in `status` with its own reason,
//! and stops no other volume.
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
