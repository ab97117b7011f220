//! Keeps the tree and the buckets tidy. Which buckets are free is known without it, because the
//! counts of live sectors are exact (invariant D9). A task waits for it only where every bucket
//! that could be evicted is kept by old pointers (invariant L7).
//!
//! `pass` marks the oldest generation that each bucket's pointers have, drops stale keys before
//! generations wrap, and merges sparse nodes. `moving` gathers the live data of sparse buckets,
//! which `emptying` copies. `orphans` invalidates the remaining dirty data of volumes that no
//! longer exist.

pub mod emptying;
pub mod moving;
pub mod orphans;
pub mod pass;

use crate::btree::{Attempt, Need};
use crate::cpu_cost::PIECE_KEYS;
use crate::space::Buckets;
use crate::state::State;
use bcached_format::{Inode, Key, Position};

/// What a walk has seen of a leaf.
pub(crate) struct LeafVisit {
    /// Where the next keys begin.
    pub next: Position,
    /// The next keys are in the next leaf.
    pub is_end: bool,
    /// Words that the keys of the leaf take on the device.
    pub words_on_disk: usize,
}

impl State {
    /// Returns where the node at `level` for `at` ends, or the unreadable node above it.
    pub(crate) fn end_of_missing_node(&mut self, at: Position, level: u8) -> Position {
        match self.descend(at, level) {
            Ok(slot) => self.nodes.get(slot).node().position(),
            Err(Need::Node(child)) => child.key.position(),
            Err(_) => Position::MAX,
        }
    }

    /// Returns where the leaf for sector `at` of a volume ends, or the unreadable node above it; at
    /// most `end`.
    pub(crate) fn end_of_missing_leaf(&mut self, inode: Inode, at: u64, end: u64) -> u64 {
        let missing = self.end_of_missing_node(Position { inode, offset: at }, 0);
        if missing.inode == inode { missing.offset.min(end) } else { end }
    }

    /// Visits the keys after `at` in the leaf for it, including stale ones: as many as one piece
    /// takes, in runs.
    pub(crate) fn visit_leaf(
        &mut self,
        at: Position,
        mut visit: impl FnMut(&Buckets, &[Key]),
    ) -> Attempt<LeafVisit> {
        let slot = match self.descend(at, 0) {
            Ok(slot) => slot,
            Err(need) => return Attempt::Needs(need),
        };
        let Self { nodes, buckets, work, .. } = self;
        let node = nodes.get(slot).node();
        work.visit(PIECE_KEYS.min(node.len()));
        let (runs, next) = node.runs(at, PIECE_KEYS);
        for run in runs {
            visit(buckets, run);
        }
        Attempt::Done(LeafVisit {
            next: next.unwrap_or(node.position()),
            is_end: next.is_none(),
            words_on_disk: node.words_on_disk(),
        })
    }
}
