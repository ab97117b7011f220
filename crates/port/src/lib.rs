//! The port: the only way into an engine from another thread.
//!
//! ```text
//!   front end, any thread                                             engine, its own thread
//!   RequestSender::submit ──► inbox (one per engine, bounded) ──bell──► Server::take
//!   ReplyReceiver::next ◄── outbox (one per client, bounded) ◄───────── ReplyTo::send
//! ```
//!
//! Both directions carry owned memory and are bounded. A client may have `window` submitted
//! requests whose replies it has not taken, and an engine's inbox holds a limited number of
//! requests that the engine has not taken. A full bound makes the submitter wait; it is never an
//! error.
//!
//! **Exactly one reply.** Every submitted request is answered once, whatever happens: [`ReplyTo`]
//! cannot be cloned, sending consumes it, and dropping it unsent (the engine is stopping, or its
//! thread panicked) sends [`ErrorKind::Gone`]. So a front end needs no time limit of its own
//! against an engine that no longer exists.
//!
//! **Liveness: which side wakes which.** Everything shared is behind a mutex, and a waiter decides
//! to wait under that mutex, so no wake-up falls between the check and the sleep.
//! - Engine, by the bell: a submission that finds the inbox *empty* rings after it has put the
//!   request in. One that finds it non-empty does not: the submission that filled it first has
//!   rung, and the engine has not emptied it since. The engine's obligation: after a bell it calls
//!   [`Server::take`] until `None`. If it pauses before that (because it has enough to do), it
//!   continues by itself when it has room.
//! - Submitter waiting for room in the inbox: woken when the engine empties it, and when the server
//!   closes.
//! - Submitter waiting for its window: woken when its replies are taken.
//! - Submitter that found no room and does not sleep: its bell rings when the engine empties the
//!   inbox, when the route is open again, and with the next reply if its window was full.
//! - Receiver of replies: woken by a reply's arrival while it sleeps, and when the submitting half
//!   is dropped.
//!
//! A volume that moves from one engine to another takes its clients along: they submit by its
//! [`Route`].
//!
//! What front ends have in common is here, too: the limits on client payloads in memory
//! ([`budget`]), which of all clients may write to a volume ([`writer_claim`]), and the loop
//! devices over its files ([`loop_devices`]).
//!
//! A client that is gone harms no other: its requests are carried out, their replies dropped on
//! arrival.
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

pub use bcached_env::{Buffer, BufferPool, BufferSlot, Lender, LentBuffer, Payload};
pub use budget::{Budget, BudgetPool, Permit};
pub use client::{Connector, QueueFull, ReplyReceiver, RequestSender};
pub use error::{ErrorCodes, ErrorKind};
pub use expected_volumes::VolumeAbsence;
pub use export::{Export, ExportError, ExportTable, Uuid};
pub use frontend::{Frontend, FrontendSet};
pub use log_limit::LogLimit;
pub use operation::{ClientId, Operation, Reply, SECTOR_BYTES, StatusExtent, VolumeId};
pub use route::Route;
pub use server::{ReplyTo, Request, Server, open};
pub use writer_claim::{Peer, PeerGoneCheck, WriteClaim, WriterGeneration, WriterTable};

use std::sync::Arc;

/// Wakes the other side: rings an engine's eventfd, unparks a thread. Must not block and may be
/// called from any thread, any number of times; two rings before the other side looks may count as
/// one.
pub type Bell = Arc<dyn Fn() + Send + Sync>;
