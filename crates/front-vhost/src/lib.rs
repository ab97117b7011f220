//! Presents volumes as disks of virtual machines: vhost-user-blk.
//!
//! ```text
//!            messages ──┐                                  ┌─ replies, a bell ◄─┐
//!   VMM ◄── socket      ├─► one thread for each volume ◄───┤                    │
//!   guest ── kicks ─────┘      rings of the guest          └─► port ──► engine ─┘
//!         ◄─ calls ───────────────────┘ lent to the engine's thread while nothing has to wait
//! ```
//!
//! - **Guests and VMMs are not trusted.** Whatever a guest writes into its rings or a VMM sends is
//!   answered, refused or skipped. It never causes a panic, a loop or an allocation of a size that
//!   they choose. A VMM that truncates the file of its memory ends only its own connection; see
//!   `memory_fault.rs`, which contains all the `unsafe` of this crate.
//! - **The engine is never waited for**, except by a VMM that stops its queue; see `requests.rs`.
//! - **Reconnecting** works at any time, any number of times. Requests in flight when a daemon dies
//!   are recorded in memory of the VMM, and carried out by the next daemon; see `inflight.rs`.
//! - **Bounded**: requests and bytes of payload are limited for each volume ([`Limits`]). At a
//!   limit nothing more is taken from the ring, and the guest waits.
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

pub use bcached_uring::VolumeRings;
pub use config::GuestBlockSize;
pub use server::{
    ClientInfo, Limits, Options, QUEUES_MAX, ServeError, ShutdownTimeout, StartError, VhostServer,
    VolumeOptions,
};
