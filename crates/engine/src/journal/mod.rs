//! The journal: one sequence of entries in a ring of buckets, with one entry in flight at a time.
//!
//! Why the journal cannot deadlock on itself: entries that carry keys leave
//! [`ring::RESERVE_ENTRIES`] entries' worth of blocks and one whole bucket (the gap) untouched. The
//! operations that free journal space are writing the oldest leaves, splitting a full leaf, and
//! storing generations so that a split has buckets. They need only entries without keys, a bounded
//! number for each oldest leaf. Each of those entries carries the newest `last_seq`, which frees
//! the oldest bucket.
//!
//! Replay applies a long run of entries at a time and releases none of them until all of their keys
//! are in leaves. Without enough room for that, it replays entry by entry. Meanwhile it writes
//! journal entries only to obtain buckets, and then it obtains many at once. If the ring as found
//! does not have room even for that, the set is refused unchanged ([`crate::Error::JournalFull`]).
//!
//! The last run of a long journal is applied concurrently with requests ([`overlay`]). Each of its
//! keys pins its journal entry just like a key in an unwritten leaf. When the journal runs low, the
//! keys of the oldest entries are applied first and their leaves written. Clients wait for that as
//! they do for any journal space.

pub mod drain;
pub mod latest;
pub mod overlay;
pub mod replay;
pub mod ring;
pub mod scan;
pub mod writer;

pub use ring::Journal;
