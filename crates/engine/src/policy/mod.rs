//! Which bucket to give up next, which requests are part of a stream, whether the cache device is congested or worn. Policies see
//! numbers, times and touches, no I/O and no keys, and are replayable alone over traces.
//!
//! | file | what |
//! |---|---|
//! | `victims` | least recently used, first filled, or any: the order of giving up |
//! | `lists` | which buckets could be given up |
//! | `streams` | who streams |
//! | `congestion` | how slow the cache device is |
//! | `wear` | how often it has failed of late |

pub mod congestion;
pub mod lists;
pub mod streams;
pub mod victims;
pub mod wear;

pub use congestion::Congestion;
pub use lists::Rank;
pub use streams::{Client, Streams};
pub use victims::{Place, Victims};
pub use wear::Wear;
