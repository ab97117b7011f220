//! One B-tree node of a cache set, in memory.
//!
//! On disk a node is a log of sets of keys inside one bucket; a newer set overrides older ones. In memory it is two
//! things: the **view**, which is what all sets together say, and the **pending** keys, which stand in no set yet
//! and will be the next one. The view serves every question; the pending keys are only ever written.
//!
//! ```text
//!   bucket   | set | set | set |   free blocks   |         pending: the next set, at most what is free
//!               \_____|_____/                                  |
//!                  merged                                      |
//!                     v               every insert             |
//!                   view   <------------------------------>  pending
//! ```
//!
//! The two part company on purpose: a hole (a key without pointers) must reach the disk, where it hides older keys,
//! but the view just has nothing there.
//!
//! A **leaf** holds the extents of volumes ([`Node::insert`], [`Node::matching`]), an **interior** node the keys of
//! its children ([`Node::replace_children`]). The node performs no I/O and knows nothing of buckets: whether a
//! pointer is stale is asked of the caller, never remembered.
//!
//! | file | duty |
//! |---|---|
//! | `node` | the type, its parts and its questions |
//! | `sorted_keys/` | keys in order, with cheap lookups and changes |
//! | `extents` | how extents overlap, are cut and merge |
//! | `leaf`, `children` | changes to a leaf; changes to an interior node |
//! | `read`, `write` | bytes to node; the next set to bytes |
//! | `merge` | what many sets say, in one pass |
//! | `late` | keys that enter a leaf while fresh nodes take its place |
//! | `split` | what goes into fresh nodes when this one is full, or its neighbour and it are too empty |
//! | `error` | what can be wrong with a node's bytes |
//!
//! What it costs, by `benches/keys.rs` with the release profile on one core of a shared virtual machine, for a node
//! of 256 KiB with 10,000 keys of 4 KiB: a lookup 0.1 us; an insert 0.7 us in a node that is in the processor's cache
//! and 2 us when 20 of them take turns; reading 33 sets with 6,300 keys 0.7 ms; collecting the living keys 0.13 ms.
//! A key takes 45 bytes of memory after a read.
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
pub use sorted_keys::Place;
pub use split::{Division, Living, belong_together};
pub use write::{NodeBuilder, SetWrite};
