//! The control socket: HTTP and JSON on a unix socket that only its owner may open.
//!
//! ```text
//!   GET    /v1/status                   the body of `bcached status --json`
//!   GET    /v1/volumes/VOLUME/options   of `bcached get VOLUME --json`
//!   PATCH  /v1/volumes/VOLUME/options   of `bcached set` and `unset`; the request: `options::Change`
//!   POST   /v1/jobs                     of `bcached flush`, `detach`, `attach`; the request: `jobs::Begin`
//!   GET    /v1/jobs, /v1/jobs/NUMBER    how far they are
//!   DELETE /v1/jobs/NUMBER              of `bcached cancel`
//! ```
//!
//! VOLUME is what it can be called by, percent-encoded. What is refused has a body of its own, that of
//! [`Failure::to_json`](crate::failure::Failure::to_json).

pub mod client;
pub mod jobs;
pub mod options;
mod routes;
mod server;
mod socket;
pub mod status;

pub(crate) use server::{AskBegin, AskChange, AskJob, AskJobs, AskOptions, Control, Handlers, Signal};
