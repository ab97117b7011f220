//! The journal: one sequence of entries in a ring of buckets, one entry in flight at a time.
//!
//! Why it cannot deadlock on itself: entries that carry keys leave [`ring::RESERVE_ENTRIES`] worth of blocks and one
//! whole bucket (the gap) untouched. What frees space (writing the oldest leaves, splitting one that is full, storing
//! generations so that a split has buckets) needs only entries without keys, a bounded number for each oldest leaf, and
//! each of those entries carries the newest `last_seq`, which frees the oldest bucket.
//!
//! A replay puts a long stretch of entries at a time, and lets nothing of it go before all its keys are in leaves; if there is no room
//! for that, entry after entry. Meanwhile it needs an entry only for buckets, and
//! then it takes many at once. Should the ring that somebody left behind not even have room for that, the set is refused
//! as it is ([`crate::Error::JournalFull`]).
//!
//! The last stretch of a long journal is put beside requests ([`overlay`]). Each of its keys holds its entry as a key does that is in a leaf,
//! so when there is little room those of the oldest entries are put first and their leaves written, and clients wait for that as they always do.

pub mod drain;
pub mod latest;
pub mod overlay;
pub mod replay;
pub mod ring;
pub mod scan;
pub mod writer;

pub use ring::Journal;
