//! Bytes of the format: those of real sets, those that are refused, and any.
//!
//! One program has all of them, so that they are linked once; `cargo xtask test` starts it once for
//! each module.

mod any_bytes;
mod golden;
mod journal_entries;
mod page;
mod priorities;
mod refusals;
mod worked_examples;
