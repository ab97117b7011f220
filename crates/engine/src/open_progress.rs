//! The progress of opening a set. The engine only counts. Observers on any thread can read the
//! numbers at any time, so they are atomics that nothing waits on and that impose no ordering.
//!
//! The number of nodes in a tree is unknown until all have been read. What is known is its shape so
//! far: a node's share is that of its parent, divided evenly among the parent's children. The
//! shares of the leaves that have been read add up to a number that never falls, and that is the
//! whole exactly when the walk has ended.

use core::sync::atomic::{AtomicU64, Ordering};

/// The share of the root. After division by the 500 children of a large node at each of six levels,
/// it is still not zero.
pub(crate) const WHOLE: u64 = 1 << 62;

/// Progress of an opening; all zeroes before it.
#[derive(Debug, Default)]
pub struct OpenProgress {
    nodes: AtomicU64,
    share: AtomicU64,
}

impl OpenProgress {
    /// Number of B-tree nodes read and verified. Never falls.
    #[must_use]
    pub fn nodes_read(&self) -> u64 {
        self.nodes.load(Ordering::Relaxed)
    }

    /// Percentage of the tree that has been read, as far as its shape is known. An estimate until
    /// it is 100, which means all. Never falls.
    #[must_use]
    pub fn tree_percent(&self) -> u64 {
        let share = u128::from(self.share.load(Ordering::Relaxed));
        u64::try_from(share * 100 / u128::from(WHOLE)).unwrap_or(100)
    }

    /// Records a verified node; `share` is the part of the tree that it accounts for and no node
    /// below it does.
    pub(crate) fn node_read(&self, share: u64) {
        self.nodes.fetch_add(1, Ordering::Relaxed);
        self.share.fetch_add(share, Ordering::Relaxed);
    }
}
