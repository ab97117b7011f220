//! The journal: one sequence of entries in a ring of buckets, one entry in flight at a time.
//!
//! Why it cannot deadlock on itself: entries that carry keys leave [`ring::RESERVE_ENTRIES`] worth of blocks and one
//! whole bucket (the gap) untouched. What frees space (writing the oldest leaves, splitting one that is full, storing
//! generations so that a split has buckets, naming a new root) needs only entries without keys, a bounded number for
//! each oldest leaf, and each of those entries carries the newest `last_seq`, which frees the oldest bucket.

pub mod replay;
pub mod ring;
pub mod scan;
pub mod writer;

pub use ring::Journal;
