//! Which bucket to give up next. Policies see bucket numbers and touches, no I/O and no keys, and are replayable
//! alone over traces.
//!
//! | file | what |
//! |---|---|
//! | `victims` | least recently used, first filled, or any: the order of giving up |
//! | `lists` | which buckets could be given up |

pub mod lists;
pub mod victims;

pub use lists::Rank;
pub use victims::{Place, Victims};
