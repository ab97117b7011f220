//! Volumes as block devices of the kernel, `/dev/ublkbN`, by its ublk driver.
//!
//! | file | what |
//! |---|---|
//! | `abi` | the driver's numbers and layouts |
//! | `control` | commands to the driver, each with a limit |
//! | `descriptors` | what the driver has put for each request |
//! | `features` | what the driver can do, in words |
//! | `queue` | requests and answers, on the ring of the volume's engine |
//! | `privilege` | whether the kernel makes devices for us that outlive their server |
//! | `device` | one device, from its making or taking over to its end |
//! | `server` | the devices of all volumes, a thread for each |
//!
//! **Recovery.** A device outlives its server: when the process dies, I/O on it waits, and the next process takes it over, found by
//! the volume's UUID, of which the driver keeps a word. Requests that the dead one had are given to the next one again. The same
//! happens within one process when an engine ends whose ring had the queue.
//!
//! `unsafe` is in two files: `control.rs` (the memory of commands), `descriptors.rs` (the driver's mapping).

mod abi;
mod control;
mod descriptors;
mod device;
mod error;
mod features;
mod orphan;
mod pages;
mod privilege;
mod queue;
pub mod server;
pub mod table;

pub use device::Features;
pub use error::{ControlError, DeviceError, Unavailable};
pub use orphan::{Orphan, is_volume};
pub use queue::BYTES_MAX;
pub use server::{Leaving, Served, UblkServer};
pub use table::{DeviceState, Transfer};
