//! The operating system under the engine: devices, the drivers that do I/O on them, and the note.
//!
//! Two drivers implement [`bcached_env::Driver`]: one on `io_uring`, one on a pool of threads for
//! places where `io_uring` is absent or forbidden (containers, hardened kernels). [`open_driver`]
//! probes and chooses, and reports its choice in one line. Both drivers share the meaning of an
//! operation (`prepared_op`): checks, bouncing, errors. So the same tests run on both.
//!
//! Ownership:
//! - an operation in flight owns its memory, and keeps its device open and claimed until its
//!   completion;
//! - [`Device`] holds the claim on a block device or file for as long as it lives;
//! - [`Disks`] numbers devices and can be used while the executor runs;
//! - [`Bell`] is the only way into the engine's thread from another one.
//!
//! `unsafe` is confined to these files: `ring.rs` with `ring/clients.rs` and
//! `ring/client_reads.rs`, and `eventfd_call.rs` (submission); `ioctl.rs` and `memory.rs` (calls
//! that no crate wraps); `note/mapping.rs` (the shared mapping); `inherited_fds.rs` (descriptors
//! known only by number).

mod blocking_io;
mod buffer_slots;
mod busy_poll;
mod clock;
mod counters;
pub mod device;
mod disks;
mod driver;
mod errno;
mod eventfd_call;
mod ioctl;
pub mod memory;
pub mod note;
pub mod passed_fds;
mod prepared_op;
pub mod probe;
mod ring;
pub mod ring_client;
mod ring_lifetime;
mod rings;
mod threads;
pub mod udev;
mod wakeup;

pub use counters::CounterSnapshot;
pub use device::{
    Access, Device, DeviceError, DeviceErrorKind, DeviceIdentity, DeviceKind, DevicePresence, Holder,
};
pub use disks::Disks;
pub use eventfd_call::EventfdCaller;
pub use note::{MappedNote, NoteContents, NoteError, NoteIdentity, NoteReplay};
pub use probe::{Backend, BackendChoice, DriverError, DriverOptions, OpenedDriver, open_driver};
pub use ring_client::{Command, RingClient, RingHandle, UblkCommand};
pub use rings::VolumeRings;
pub use wakeup::Bell;
