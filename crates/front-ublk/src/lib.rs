//! Presents volumes as block devices of the kernel, `/dev/ublkbN`, through its ublk driver.
//!
//! | file | content |
//! |---|---|
//! | `abi` | the driver's constants and layouts |
//! | `control` | commands to the driver, each with a time limit |
//! | `request_descriptors` | the driver's description of each request |
//! | `features` | the driver's features, in words |
//! | `queue` | requests and answers, on the ring of the volume's engine |
//! | `pages` | the memory of requests |
//! | `privilege` | whether the kernel makes devices for us that outlive their server |
//! | `device` | one device, from its creation or take-over to its end |
//! | `table` | the devices of a server and their states |
//! | `server` | the devices of all volumes, with a thread for each |
//! | `orphan` | devices of ours that are not being served |
//!
//! **Recovery.** A device outlives its server. When the process dies, I/O on the device waits until
//! the next process takes it over. That process finds it by the volume's UUID, of which the driver
//! keeps a word. In-flight requests of the dead server are reissued to the next one. The same
//! happens within one process when an engine ends whose ring had the queue.
//!
//! `unsafe` is in two files: `control.rs` (the memory of commands), `request_descriptors.rs` (the
//! driver's mapping).

mod abi;
mod control;
mod device;
mod error;
mod features;
mod orphan;
mod pages;
mod privilege;
mod queue;
mod request_descriptors;
pub mod server;
pub mod table;

pub use device::DriverFeatures;
pub use error::{ControlError, DeviceError, UblkUnavailable};
pub use orphan::{OrphanDevice, is_volume};
pub use queue::BYTES_MAX;
pub use server::{Handoff, ServedVolume, UblkServer};
pub use table::{DataTransfer, DeviceState};
