//! Volumes as block devices of the kernel, by the best way that a machine has.
//!
//! | file | what |
//! |---|---|
//! | `rung` | the ways, from the best down, and why one is missing |
//! | `nbd` | a device of the kernel's NBD client, whose server is in this process |
//! | `loops` | a loop device over a file of a FUSE mount that is ours |
//! | `helper` | programs that do something for us, each with a limit |
//! | `server` | the devices of all volumes, a thread for each |
//!
//! ublk has a crate of its own (`front-ublk`): its devices outlive their server. These do not. What is asked of them fails once it is gone.
//!
//! **No thread of this process waits for its own devices.** A thread that waits in the kernel for a file of our FUSE mount, or for a
//! loop device over it, cannot be killed before it is answered, and who answers is this process: killed at that moment it would never end. So
//! loop devices are set up and taken away by another process (`losetup`), and nothing here has one open. The NBD client's devices are
//! another matter: the thread that has one open ends the connection first when it is killed, and all that waits for the device fails.
//!
//! `unsafe` is in one file: `nbd/ioctl.rs`.

mod helper_program;
mod loop_devices;
pub mod methods;
mod nbd;
pub mod server;

pub use loop_devices::detach;
pub use methods::{Missing, Rung};
pub use server::{Connection, DevServer, Served, Under};
