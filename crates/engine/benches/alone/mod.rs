//! The engine with nothing around it: one thread, devices that end each operation at once and copy no data, clients that ask one thing
//! after the other.
#![allow(dead_code, reason = "each bench uses some of it")]

pub mod callgrind;
pub mod devices;
pub mod stage;
