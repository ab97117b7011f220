//! Presents volumes as files, with trees of control files beside them, in a mounted directory.
//!
//! ```text
//!   DIR/volumes/NAME            each served volume, a regular file of its size
//!   DIR/TREE/..                 the daemon's: a [`ControlTree`] of small texts, as in sysfs
//!
//!   kernel ──► session threads ── requests ──────────────► port ──► engine
//!                    │  what has to wait ──► file thread ──► port      │
//!   kernel ◄── reply thread of the open file ◄── replies ◄── port ◄────┘
//! ```
//!
//! - **The page cache hides nothing.** Files are opened with direct I/O: each read or write of a
//!   program is one to the engine, in pieces of at most 1 MiB. The program gets the engine's
//!   result.
//! - **Any offset and length.** The port takes whole sectors; other requests are completed to whole
//!   sectors here (see `file_thread.rs`).
//! - **The session threads serve all files**, so they do not wait for an engine. A task that cannot
//!   be submitted immediately goes to a thread of its open file. The session threads wait for
//!   memory only: for the engine of a volume whose writes have used up its share of [`Limits`].
//! - **Which client may write** is decided by the port, one client at a time. Here each open file
//!   is a client.
//! - **The end of a mount**: see [`FuseServer::shutdown`]. A daemon that dies leaves a dead mount,
//!   which the next one replaces. Programs with open files get "Transport endpoint is not
//!   connected".
#![forbid(unsafe_code)]

mod answer;
mod control_file;
mod file_thread;
mod filesystem;
mod lookup;
mod mount;
pub mod mountinfo;
mod nodes;
mod open_files;
mod open_limit;
mod opening;
mod ranges;
pub mod server;
mod shutdown;
pub mod tree;
mod volume_file;
mod workers;

pub use mount::{MountError, absolute, clear_stale};
pub use server::{ClientInfo, FuseServer, Limits, Options, ShutdownTimeout, StartError};
pub use tree::{ControlTree, TreeEntry};
