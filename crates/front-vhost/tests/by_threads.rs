//! Runs the tests again without a ring: each volume is served by its own thread.

#![allow(clippy::duplicate_mod, reason = "each of the files has the support for itself when it runs alone")]

mod support;

#[path = "clients.rs"]
mod clients;
#[path = "cut.rs"]
mod cut;
#[path = "hostile.rs"]
mod hostile;
#[path = "leaving.rs"]
mod leaving;
#[path = "requests.rs"]
mod requests;
