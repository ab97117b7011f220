//! Volumes as files, and trees of control files beside them, in a mounted directory.
//!
//! ```text
//!   DIR/volumes/NAME            each served volume, a regular file of its size
//!   DIR/TREE/..                 what the daemon brings along: a [`Tree`] of small texts, as sysfs has them
//!
//!   kernel ──► session threads ── requests ──────────────► port ──► engine
//!                    │  what has to wait ──► lane thread ──► port      │
//!   kernel ◄── reply thread of the open file ◄── replies ◄── port ◄────┘
//! ```
//!
//! - **The page cache hides nothing.** Files are opened with direct I/O: each read and write of a program is one of the
//!   engine's, in pieces of at most 1 MiB, and what the engine says is what the program gets.
//! - **Any offset and length.** The port knows whole sectors; what is not is made whole here (see `lane.rs`).
//! - **The session threads serve all files**, so they do not wait for an engine: what cannot be submitted at once goes to a
//!   thread of its open file. They wait for memory only, that is for the engine of a volume to which so much is being
//!   written that its share of [`Limits`] is used up.
//! - **Who may write** is the port's rule, one client at a time: here each open file is a client.
//! - **The end of a mount**: see [`FuseServer::shutdown`]. A daemon that dies leaves a dead mount, which the next one replaces;
//!   programs with open files get "Transport endpoint is not connected".
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
pub use server::{Client, FuseServer, Limits, Options, StartError, StillBusy};
pub use tree::{Entry, Tree};
