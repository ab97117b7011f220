//! The control socket: HTTP and JSON on a unix socket that only its owner may open.
//!
//! Beside it is `monitor.sock`, which its group may open, too. It is read-only: it answers the
//! `GET` requests below, except `/v1/stop`, `/v1/take-over` and `/v1/config`.
//!
//! ```text
//!   GET    /v1/status                   the body of `bcached status --json`;
//!                                       with `?full=true` of `--full`, too
//!   GET    /v1/metrics                  the same for Prometheus;
//!                                       with `?names=node` under node_exporter's names
//!   GET    /v1/volumes/VOLUME/options   of `bcached get VOLUME --json`
//!   PATCH  /v1/volumes/VOLUME/options   of `bcached set` and `unset`;
//!                                       the request: `options::OptionChange`
//!   GET, PATCH  /v1/caches/CACHE/options   the same of caches
//!   GET    /v1/volumes/VOLUME/explain?offset=BYTES   of `bcached explain`
//!   POST   /v1/jobs                     of `bcached add`, `remove`, `stop VOLUME`, `forget`,
//!                                       `flush`, `detach`, `attach`, `grow`, `shrink`, `replace`,
//!                                       `release`, `import`; the request: `jobs::JobSpec`
//!   GET    /v1/jobs, /v1/jobs/NUMBER    the progress of jobs
//!   DELETE /v1/jobs/NUMBER              of `bcached cancel`; with `?dry_run=true` of `--dry-run`
//!   GET    /v1/config/differences       of `bcached config diff`
//!   GET    /v1/events?after=SEQUENCE    of `bcached events`; with `&wait=true` the answer comes
//!                                       once there are some, or after some seconds
//!   POST   /v1/stop                     of `bcached stop`; the request: `stop::StopRequest`
//!   GET    /v1/stop                     the progress of the stop: answered when it has ended,
//!                                       or after some seconds
//!   POST   /v1/take-over                of `bcached take-over`; the request:
//!                                       `take_over::TakeOverRequest`
//!   GET    /v1/take-over                the progress of the hand-over, from whichever process
//!                                       answers; after some seconds if it still runs
//! ```
//!
//! The metrics for Prometheus are available over TCP, too: the option `metrics` names a loopback
//! address on which only they are served.
//!
//! VOLUME is any name of the volume, percent-encoded. A refusal has a body of its own, that of
//! [`Failure::to_json`](bcached_control::failure::Failure::to_json).

mod admission;
mod connection_limit;
mod listener;
mod metrics;
mod routes;
mod server;
mod signals;
mod socket_file;

pub(crate) use admission::WorkPermit;
pub(crate) use server::{
    BeginJobHandler, CancelJobHandler, ChangeHandler, ConfigDiffHandler, ControlServer, ControlSockets,
    EventsHandler, ExplainHandler, Handlers, JobHandler, JobsHandler, OptionsHandler, Signal, StatusHandler,
    StopHandler, StopProgressHandler, TakeOverHandler, TakeOverProgressHandler,
};
pub(crate) use signals::Signals;

#[cfg(test)]
mod tests;
