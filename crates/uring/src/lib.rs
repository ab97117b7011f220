//! The real world under the engine: devices, the driver that does I/O on them, and the note.
//!
//! Two drivers implement [`bcached_env::Driver`]: one on `io_uring`, one on a pool of threads for places where
//! `io_uring` is absent or forbidden (containers, hardened kernels). [`open_driver`] tries and chooses, and says which
//! in one line. Both share what an operation means (`work`): checks, bouncing, errors; so the same tests run on both.
//!
//! Who owns what:
//! - an operation in flight owns its memory and keeps its device open and claimed until its completion;
//! - [`Device`] holds the claim on a block device or file for as long as it lives;
//! - [`Disks`] gives devices their numbers and can be used while the executor runs;
//! - [`Bell`] is the only way into the engine's thread from another one.
//!
//! `unsafe` is in five files: `ring.rs` and `caller.rs` (submission), `ioctl.rs` (calls no crate wraps), `note/mapping.rs` (the
//! shared mapping), `passed.rs` (descriptors known by number).

mod bell;
mod caller;
mod clock;
mod counters;
pub mod device;
mod disks;
mod driver;
mod errno;
pub mod guest;
mod ioctl;
mod lasting;
pub mod memory;
pub mod note;
pub mod passed;
mod perform;
pub mod probe;
mod ring;
mod rings;
mod slots;
mod spin;
mod threads;
pub mod udev;
mod work;

pub use bell::Bell;
pub use caller::Caller;
pub use counters::Counts;
pub use device::{Access, Device, DeviceError, DeviceErrorKind, DeviceKind, Holder, Identity, Presence};
pub use disks::Disks;
pub use guest::{Command, Guest, Guests, UblkCommand};
pub use note::{MappedNote, NoteError, NoteFate, NoteFound, NoteIdentity};
pub use probe::{Backend, Choice, DriverError, DriverOptions, Opened, open_driver};
pub use rings::Rings;
