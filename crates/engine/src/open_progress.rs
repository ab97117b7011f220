//! How far an opening is, for those who wait for it. The engine only counts; who looks, from which thread and when, is
//! not its business, so the numbers are atomics that nobody waits on and that order nothing.
//!
//! How many nodes a tree has is not known before all have been read. What is known is its shape so far: the share of a
//! node is that of its parent, divided evenly among the parent's children. The shares of the leaves that were read add up
//! to a number that never falls, and that is the whole exactly when the walk has ended.

use core::sync::atomic::{AtomicU64, Ordering};

/// The share of the root. Divided by the 500 children of a large node at each of six levels it is still not nothing.
pub(crate) const WHOLE: u64 = 1 << 62;

/// Progress of an opening; all zeroes before it.
#[derive(Debug, Default)]
pub struct Opening {
    nodes: AtomicU64,
    share: AtomicU64,
}

impl Opening {
    /// B-tree nodes read and verified. Grows.
    #[must_use]
    pub fn nodes_read(&self) -> u64 {
        self.nodes.load(Ordering::Relaxed)
    }

    /// How much of the tree has been read, in whole percent, as far as its shape tells: an estimate until it is 100,
    /// which means all. Grows.
    #[must_use]
    pub fn tree_percent(&self) -> u64 {
        let share = u128::from(self.share.load(Ordering::Relaxed));
        u64::try_from(share * 100 / u128::from(WHOLE)).unwrap_or(100)
    }

    /// A node has been verified; it stood for `share` of the tree that nothing below it stands for now.
    pub(crate) fn node_read(&self, share: u64) {
        self.nodes.fetch_add(1, Ordering::Relaxed);
        self.share.fetch_add(share, Ordering::Relaxed);
    }
}
