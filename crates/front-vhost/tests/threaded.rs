//! Runs the tests again without a ring: each volume is served by its own thread.

#![allow(clippy::duplicate_mod, reason = "each of the files has the support for itself when it runs alone")]

mod support;

#[path = "clients.rs"]
mod clients;
#[path = "guest_resets.rs"]
mod guest_resets;
#[path = "hostile.rs"]
mod hostile;
#[path = "requests.rs"]
mod requests;
#[path = "revoked_memory.rs"]
mod revoked_memory;
