//! The engine alone: one thread, devices that complete each operation at once without copying data,
//! and clients that send one request after the other.
#![allow(dead_code, reason = "each bench uses some of it")]

pub mod callgrind;
pub mod devices;
pub mod stage;
