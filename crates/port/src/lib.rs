//! The port: the one way into an engine from another thread.
//!
//! ```text
//!   front end, any thread                                        engine, its own thread
//!   Requests::submit ──► inbox (one per engine, bounded) ──bell──► Server::take
//!   Replies::next ◄── outbox (one per client, bounded) ◄────────── ReplyTo::send
//! ```
//!
//! Both directions carry owned memory and are bounded: a client may have `window` requests submitted whose replies it
//! has not taken, and an engine's inbox holds so many requests that the engine has not taken. A full bound makes the
//! submitter wait; it is never an error.
//!
//! **Exactly one reply.** Every submitted request is answered once, whatever happens: [`ReplyTo`] cannot be cloned,
//! sending consumes it, and dropping it unsent (the engine is stopping, or its thread came to a bad end) sends
//! [`ErrorKind::Gone`]. So a front end needs no time limit of its own against an engine that is no more.
//!
//! **Liveness: who wakes whom.** Everything shared is behind a mutex, and whoever waits decides to under that mutex,
//! so no wake-up falls between the look and the sleep.
//! - Engine, by the bell: a submission that finds the inbox *empty* rings after it has put the request in. One that
//!   finds it filled does not: whoever filled it first has rung, and the engine has not emptied it since. The engine's
//!   part of the bargain: after a bell it calls [`Server::take`] until `None`, and if it pauses before that
//!   (because it has enough to do) it comes back by itself when it has room.
//! - Submitter waiting for room in the inbox: woken when the engine empties it, and when the server closes.
//! - Submitter waiting for its window: woken when its replies are taken.
//! - Submitter that tried in vain and does not sleep: its bell rings when the engine empties the inbox, when the route leads
//!   somewhere again, and with the next reply if its window was full.
//! - Taker of replies: woken by a reply's arrival while it sleeps, and when the submitting half goes away.
//!
//! A volume that goes from one engine to another takes its clients along: they submit by its [`Route`].
//!
//! What front ends have in common lies here too: how much of clients' payloads may be in memory and whose ([`budget`]), and which
//! of all clients may write to a volume ([`writer_claim`]), and what lies over its files ([`loop_devices`]).
//!
//! A client that is gone hurts nobody: its requests are carried out, their replies dropped on arrival.
#![forbid(unsafe_code)]

pub mod budget;
mod budget_waiters;
pub mod client;
pub mod error;
mod expected_volumes;
pub mod export;
pub mod frontend;
mod inbox;
mod lock;
mod log_limit;
pub mod loop_devices;
pub mod operation;
mod outbox;
pub mod ram;
pub mod route;
pub mod server;
pub mod socket;
pub mod writer_claim;

pub use bcached_env::{Buffer, Lender, Lent, Payload, Slot, Stock};
pub use budget::{Budget, Permit, Pool};
pub use client::{Connector, Full, Replies, Requests};
pub use error::{Codes, ErrorKind};
pub use expected_volumes::Absent;
pub use export::{Export, ExportTable, NoExport, Uuid};
pub use frontend::{Way, Ways};
pub use log_limit::Quiet;
pub use operation::{ClientId, Operation, Reply, SECTOR_BYTES, StatusExtent, VolumeId};
pub use route::Route;
pub use server::{ReplyTo, Request, Server, open};
pub use writer_claim::{Claim, HasLeft, Moment, Peer, Writing};

use std::sync::Arc;

/// Wakes the other side: rings an engine's eventfd, unparks a thread. Must not block and may be called from any
/// thread, any number of times; two rings before the other side looks may count as one.
pub type Bell = Arc<dyn Fn() + Send + Sync>;
