//! Keeping the tree and the buckets tidy. Nobody waits for either to find out what is free: counts are exact all the
//! time (decision 7).
//!
//! `pass` drops stale keys before generations wrap; `moving` gathers the live data of sparse buckets; `orphans` makes void
//! what is left of volumes that are no more.

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
        let mut dead_words = 0;
        let mut stale_max = 0;
        for key in node.keys() {
            visit(buckets, key);
            for bucket in
                key.pointers.as_slice().iter().filter_map(|pointer| buckets.of(*pointer).zip(Some(pointer)))
            {
                let (id, pointer) = bucket;
                let distance = buckets.get(id).generation.after(pointer.generation());
                stale_max = stale_max.max(distance);
                dead_words += if distance > 0 { key.words() } else { 0 };
            }
        }
        let live_words = node.words_in_view() - dead_words;
        let half_dead = node.words_on_disk() > 64 && live_words * 2 < node.words_on_disk();
        let end = node.position();
        Attempt::Done(Visited { end, wants_rewrite: stale_max > STALE_REWRITE || half_dead })
    }
}

/// A node with a key staler than this is rewritten (the kernel's number).
const STALE_REWRITE: u8 = 10;
