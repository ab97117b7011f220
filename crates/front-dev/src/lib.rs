//! Presents volumes as block devices of the kernel, by the best method that the machine supports.
//!
//! | file | content |
//! |---|---|
//! | `methods` | the methods, best first, and why one is unavailable |
//! | `nbd` | a device of the kernel's NBD client, whose server is in this process |
//! | `loop_devices` | a loop device over a file of our own FUSE mount |
//! | `helper_program` | helper programs, each with a time limit |
//! | `server` | the devices of all volumes, with a thread for each |
//!
//! ublk has a crate of its own (`front-ublk`), because its devices outlive their server. The
//! devices here do not: requests to them fail once the server is gone.
//!
//! **No thread of this process waits for its own devices.** A thread that waits in the kernel for a
//! file of our FUSE mount, or for a loop device over it, cannot be killed before its request is
//! answered. This process is the one that answers: if it were killed at that moment, it would never
//! end. So another process (`losetup`) sets up and removes loop devices, and this process never has
//! one open. The NBD client's devices are different: when the thread that has one open is killed,
//! it first ends the connection, and everything that waits for the device fails.
//!
//! `unsafe` is in one file: `nbd/ioctl.rs`.

mod helper_program;
mod loop_devices;
pub mod methods;
mod nbd;
pub mod server;

pub use loop_devices::detach;
pub use methods::{DeviceMethod, NoMethodError};
pub use server::{DevServer, DeviceBackend, NbdConnection, ServedVolume};
