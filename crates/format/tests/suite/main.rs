//! Tests of the format with bytes of real sets, bytes that are refused, and random bytes.
//!
//! One program contains all of them, so that they are linked once; `cargo xtask test` starts it
//! once for each module.

mod any_bytes;
mod golden;
mod journal_entries;
mod layout_tables;
mod node_length;
mod superblock_errors;
mod worked_examples;
