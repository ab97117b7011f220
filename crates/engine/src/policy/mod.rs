//! Policies: which bucket to evict next, which requests belong to a stream, whether the cache
//! device is congested or worn. They see numbers, times and accesses, no I/O and no keys, so they
//! can be replayed alone over traces. `request::admission` asks them.
//!
//! | file | contents |
//! |---|---|
//! | `victims` | eviction order: least recently used, first in first out, or random |
//! | `lists` | the buckets that can be evicted |
//! | `sequential` | sequential streams and their clients |
//! | `congestion` | how slow the cache device is |
//! | `io_error_count` | how often the cache device has failed recently |

pub mod congestion;
pub mod io_error_count;
pub mod lists;
pub mod sequential;
pub mod victims;

pub use congestion::Congestion;
pub use io_error_count::IoErrorCount;
pub use lists::Rank;
pub use sequential::{ClientId, Streams};
pub use victims::{EvictionOrder, VictimCursor};
