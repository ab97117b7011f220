//! The control socket: HTTP and JSON on a unix socket that only its owner may open.
//!
//! ```text
//!   GET    /v1/status                   the body of `bcached status --json`
//!   GET    /v1/volumes/VOLUME/options   of `bcached get VOLUME --json`
//!   PATCH  /v1/volumes/VOLUME/options   of `bcached set` and `unset`; the request: `options::Change`
//! ```
//!
//! VOLUME is what it can be called by, percent-encoded. What is refused has a body of its own, that of
//! [`Failure::to_json`](crate::failure::Failure::to_json).

pub mod client;
pub mod options;
mod routes;
mod server;
mod socket;
pub mod status;

pub(crate) use server::{AskChange, AskOptions, Control, Handlers, Signal};
