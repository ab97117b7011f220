//! Keeping the tree and the buckets tidy. Nobody waits for either to find out what is free: counts are exact all the
//! time.
//!
//! `pass` drops stale keys before generations wrap, and makes sparse nodes fewer; `moving` gathers the live data of sparse
//! buckets; `orphans` makes void what is left of volumes that are no more.

pub mod moving;
pub mod orphans;
pub mod pass;

use crate::btree::Attempt;
use crate::space::Buckets;
use crate::state::State;
use bcached_format::{Key, Position};

/// What the walk of one leaf saw.
pub(crate) struct Visited {
    /// Where the next leaf begins.
    pub end: Position,
    /// The leaf holds much that is dead.
    pub wants_rewrite: bool,
    /// So little in it is alive that it may become one with its neighbour.
    pub is_sparse: bool,
}

impl State {
    /// Shows every key of the leaf for `at`, stale ones included.
    pub(crate) fn visit_leaf(
        &mut self,
        at: Position,
        visit: &mut dyn FnMut(&Buckets, &Key),
    ) -> Attempt<Visited> {
        let slot = match self.descend(at, 0) {
            Ok(slot) => slot,
            Err(need) => return Attempt::Needs(need),
        };
        let Self { nodes, buckets, work, .. } = self;
        let node = nodes.get(slot).node();
        work.visit(node.len());
        let (mut live_words, mut stale_max) = (0, 0);
        for key in node.keys() {
            visit(buckets, key);
            live_words += if buckets.is_dead(key) { 0 } else { key.words() };
            for (id, pointer) in
                key.pointers.as_slice().iter().filter_map(|pointer| buckets.of(*pointer).zip(Some(pointer)))
            {
                stale_max = stale_max.max(buckets.get(id).generation.after(pointer.generation()));
            }
        }
        let half_dead = node.words_on_disk() > 64 && live_words * 2 < node.words_on_disk();
        let end = node.position();
        let wants_rewrite = stale_max > STALE_REWRITE || half_dead;
        Attempt::Done(Visited { end, wants_rewrite, is_sparse: self.is_one_node(live_words) })
    }
}

/// A node with a key staler than this is rewritten (the kernel's number).
const STALE_REWRITE: u8 = 10;
