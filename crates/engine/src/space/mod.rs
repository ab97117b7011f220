//! Buckets: what each holds, which are free, where the next data goes, and how one becomes free.
//!
//! The life of a bucket (on-disk format, section 12.2):
//!
//! ```text
//!   Data --invalidate: gen + 1 in memory--> Pending --priorities and their journal entry durable--> Free
//!    ^                                                                                               |
//!    +------- full --------- Open <------------------ data -------------------------------------------+
//!    +------- node or table freed, durably replaced -- Meta <---- node, uuid table, priorities -------+
//! ```
//!
//! A bucket is handed out only from `Free`, that is after its new generation is durable: no pointer that a crash can
//! bring back names it; so it can also be discarded there. It is invalidated only when nothing dirty points to it, no I/O is in flight to it, and the
//! journal entry that took its last dirty pointer away is durable.

pub mod allocator;
pub mod buckets;
pub mod discards;
pub mod flushes;
pub mod free;
pub mod open_buckets;
pub mod priority_stats;
pub mod prios;
pub mod reserve;
pub mod shortage;
pub mod starvation;
pub mod summaries;

pub use buckets::{Bucket, Buckets, Usage};
pub use discards::{DiscardState, Discards};
pub use flushes::Flushes;
pub use free::FreeList;
pub use open_buckets::{Class, Closed, OpenBuckets, Space};
pub use starvation::Starvation;
