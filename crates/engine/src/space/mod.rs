//! Buckets: what each holds, which are free, where new data is written, and how a bucket becomes
//! free.
//!
//! The life of a bucket:
//!
//! ```text
//!   Data --invalidate: gen + 1 in memory--> Pending --priorities and their entry durable--> Free
//!    ^                                                                                       |
//!    +------- full --------- Open <------------------ data ----------------------------------+
//!    +-- node or table freed, durably replaced -- Meta <-- node, uuid table, priorities -----+
//! ```
//!
//! A bucket is handed out only from `Free`, after its new generation is durable, so no pointer that
//! a crash can bring back refers to it. For the same reason it can be discarded there. A bucket is
//! invalidated only when no dirty data points to it, no I/O to it is in flight, and the journal
//! entry that removed its last dirty pointer is durable.

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

pub use buckets::{Bucket, BucketUsage, Buckets};
pub use discards::{DiscardState, DiscardStats};
pub use flushes::CacheFlushes;
pub use free::FreeList;
pub use open_buckets::{Allocation, ClosedBucket, DataClass, OpenBuckets};
pub use starvation::Starvation;
