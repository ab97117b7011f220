//! The control socket: HTTP and JSON on a unix socket that only its owner may open. Beside it is one for its group, too (`monitor.sock`),
//! on which much can be looked at and nothing changed: what is a `GET` below, but for `/v1/stop`, `/v1/take-over` and `/v1/config`.
//!
//! ```text
//!   GET    /v1/status                   the body of `bcached status --json`; with `?full=true` of `--full`, too
//!   GET    /v1/metrics                  the same for Prometheus; with `?names=node` under node_exporter's names
//!   GET    /v1/volumes/VOLUME/options   of `bcached get VOLUME --json`
//!   PATCH  /v1/volumes/VOLUME/options   of `bcached set` and `unset`; the request: `options::Change`
//!   GET, PATCH  /v1/caches/CACHE/options   the same of caches
//!   GET    /v1/volumes/VOLUME/explain?offset=BYTES   of `bcached explain`
//!   POST   /v1/jobs                     of `bcached add`, `remove`, `stop VOLUME`, `forget`, `flush`, `detach`, `attach`, `grow`, `shrink`, `replace`, `release`,
//!                                       `import`; the request: `jobs::Begin`
//!   GET    /v1/jobs, /v1/jobs/NUMBER    how far they are
//!   DELETE /v1/jobs/NUMBER              of `bcached cancel`; with `?dry_run=true` of `--dry-run`
//!   GET    /v1/config/differences       of `bcached config diff`
//!   GET    /v1/events?after=SEQUENCE    of `bcached events`; with `&wait=true` it is answered when there are some, or after some seconds
//!   POST   /v1/stop                     of `bcached stop`; the request: `stop::Stop`
//!   GET    /v1/stop                     how far that is: answered when it has ended, or after some seconds
//!   POST   /v1/take-over                of `bcached take-over`; the request: `take_over::TakeOver`
//!   GET    /v1/take-over                how far that is, whoever answers; after some seconds if it goes on
//! ```
//!
//! The numbers for Prometheus can be had over TCP, too: `metrics` listens on loopback, for nothing else.
//!
//! VOLUME is what it can be called by, percent-encoded. What is refused has a body of its own, that of
//! [`Failure::to_json`](bcached_control::failure::Failure::to_json).

mod admission;
mod connection_limit;
mod listener;
mod metrics;
mod routes;
mod server;
mod signals;
mod socket_file;

pub(crate) use admission::Work;
pub(crate) use server::{
    AskBegin, AskCancel, AskChange, AskDifferences, AskEvents, AskExplain, AskJob, AskJobs, AskOptions,
    AskStatus, AskStop, AskStopped, AskTakeOver, AskTakenOver, Control, Handlers, LeftSockets, Signal,
};
pub(crate) use signals::Signals;

#[cfg(test)]
mod tests;
