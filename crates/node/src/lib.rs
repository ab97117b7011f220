//! One B-tree node of a cache set, in memory.
//!
//! On disk a node is a log of sets of keys inside one bucket; a newer set overrides older ones. In
//! memory it has two parts: the **view**, which is the merged content of all sets and the pending
//! keys, and the **pending** keys, which are in no set yet and form the next one. The view serves
//! every lookup; the pending keys are only ever written.
//!
//! ```text
//!   bucket   | set | set | set |   free blocks   |         pending: the next set, fits free blocks
//!               \_____|_____/                                  |
//!                  merged                                      |
//!                     v               every insert             |
//!                   view   <------------------------------>  pending
//! ```
//!
//! View and pending keys differ on purpose: a hole (a key without pointers) must reach the disk,
//! where it hides older keys, but the view simply has nothing there.
//!
//! A **leaf** holds the extents of volumes ([`Node::insert`], [`Node::matching`]), an **interior**
//! node the keys of its children ([`Node::replace_children`]). The node performs no I/O and knows
//! nothing of buckets: it asks the caller whether a pointer is stale and does not remember the
//! answer.
//!
//! | file | duty |
//! |---|---|
//! | `node` | the type, its fields and its queries |
//! | `sorted_keys/` | sorted keys, with cheap lookups and changes |
//! | `extents` | how extents overlap, are cut and merge |
//! | `leaf`, `children` | changes to a leaf; changes to an interior node |
//! | `read`, `write` | bytes to node; the next set to bytes |
//! | `merge` | merging many sets in one pass |
//! | `pending_keys` | late keys: those that enter a leaf while fresh nodes replace it |
//! | `split` | the contents of fresh nodes that replace a full node or sparse neighbours |
//! | `error` | what can be wrong with a node's bytes |
//!
//! Costs, measured by `benches/keys.rs` with the release profile on one core of a shared virtual
//! machine, for a node of 256 KiB with 10,000 keys of 4 KiB: a lookup 0.1 us; an insert 0.7 us in a
//! node that is in the processor's cache and 2 us when 20 nodes take turns; reading 33 sets with
//! 6,300 keys 0.7 ms; collecting the living keys 0.13 ms. A key takes 45 bytes of memory after a
//! read.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod children;
mod error;
mod extents;
mod leaf;
mod merge;
mod node;
mod pending_keys;
mod read;
mod sorted_keys;
mod split;
mod write;

pub use error::{NodeError, NodeFault};
pub use node::{Node, memory_bytes_limit, memory_bytes_max};
pub use read::NodeReader;
pub use sorted_keys::KeyCursor;
pub use split::{LiveKeys, SplitPlan, belong_together};
pub use write::{NodeBuilder, SetWrite};
