//! The control socket: HTTP and JSON on a unix socket that only its owner may open.
//!
//! This version has one resource, `GET /v1/status`, whose body is that of `bcached status --json`.

pub mod client;
mod server;
mod socket;
pub mod status;

pub(crate) use server::{Control, Handlers, Signal};
