//! Runs the tests again without a ring: each connection is served by its own threads.

#![allow(clippy::duplicate_mod, reason = "each of the files has the support for itself when it runs alone")]

mod support;

#[path = "hostile.rs"]
mod hostile;
#[path = "requests.rs"]
mod requests;
#[path = "slow_clients.rs"]
mod slow_clients;
#[path = "write_access.rs"]
mod write_access;
