//! Which bucket to give up next. Policies see bucket numbers and touches, no I/O and no keys, and are replayable
//! alone over traces.

pub mod lru;

pub use lru::Lru;
