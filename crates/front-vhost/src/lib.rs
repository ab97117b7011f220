//! Volumes as disks of virtual machines: vhost-user-blk.
//!
//! ```text
//!            messages ──┐                                  ┌─ replies, a bell ◄─┐
//!   VMM ◄── socket      ├─► one thread for each volume ◄───┤                    │
//!   guest ── kicks ─────┘      rings of the guest          └─► port ──► engine ─┘
//!         ◄─ calls ───────────────────┘ lent to the engine's thread, while nothing has to be waited for
//! ```
//!
//! - **Nobody is trusted.** A guest may write anything into its rings, a VMM may say anything: it is answered, refused or
//!   skipped, never a panic, a loop or an allocation of their size. A VMM that cuts the file under its memory ends its own connection
//!   and no other; see `cut.rs`, which has all the `unsafe` that there is here.
//! - **The engine is never waited for**, but by a VMM that stops its queue; see `serving.rs`.
//! - **Reconnecting** works at any moment and without an end. Requests that were under way when a daemon died are noted in
//!   memory of the VMM, and done by the next one; see `inflight.rs`.
//! - **Bounded**: requests and bytes of payload, for each volume ([`Limits`]); at a bound nothing more is taken from the
//!   ring, and the guest waits.
//! - Payload is copied between the guest's memory and the engine's; see `memory.rs`.
#![deny(unsafe_code)]

mod chain;
mod config;
mod config_notice;
mod device;
mod inflight;
mod memory;
mod memory_fault;
mod pending_count;
mod requests;
mod ring;
mod ring_path;
pub mod server;
mod session;
mod signal;
mod volume;
mod writer_claim;

pub use bcached_uring::Rings;
pub use config::GuestBlock;
pub use server::{
    Client, Limits, Options, QUEUES_MAX, ServeError, StartError, StillBusy, VhostServer, VolumeOptions,
};
