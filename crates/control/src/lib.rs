//! What the daemon and the commands that talk to it share: the types of the control API, a client
//! for it, and how sizes, names, paths and failures are read and written.
//!
//! Nothing here depends on the engine, so a command line, a plug-in of a monitoring system or a
//! test can use this crate alone. The types of each answer are versioned: within a version fields
//! are only added, and a field whose value is not known is absent.
//!
//! | module | content |
//! |---|---|
//! | [`status`], [`statistics`], [`hardware`] | the state of everything served |
//! | [`jobs`], [`stop`], [`take_over`] | long operations: the request, and their progress |
//! | [`options`], [`config_diff`] | options in force, changes, differences to the files |
//! | [`events`], [`explain`] | what happened, and where one offset's data is |
//! | [`client`], [`connect`], [`deadline`] | one request to the daemon, one answer |
//! | [`failure`], [`names`], [`sizes`] | errors, names and numbers as people see them |
//! | [`paths`], [`atomic_file`] | where files are on this machine, and how they are replaced |
#![forbid(unsafe_code)]

pub mod atomic_file;
pub mod client;
pub mod config_diff;
pub mod connect;
pub mod deadline;
pub mod events;
pub mod explain;
pub mod failure;
pub mod hardware;
pub mod jobs;
pub mod names;
pub mod options;
pub mod paths;
pub mod sizes;
pub mod statistics;
pub mod status;
pub mod stop;
pub mod take_over;
mod typed;

use failure::{Failure, Kind};
use sizes::human;

/// Longest body of a request, in bytes: far more than a change of every option needs.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;

/// The refusal of a request longer than [`REQUEST_BYTES_MAX`].
#[must_use]
pub fn too_long() -> Failure {
    Failure::new(Kind::Usage, "the request is too long")
        .why(format!("it may have at most {}, with all names and values", human(REQUEST_BYTES_MAX as u64)))
        .next("check what was typed: a label has at most 32 bytes, and no other value needs thousands")
}
