//! Keeping the tree and the buckets tidy. Nobody waits for either to find out what is free: counts are exact all the
//! time.
//!
//! `pass` drops stale keys before generations wrap, and makes sparse nodes fewer; `moving` gathers the live data of sparse
//! buckets, which `emptying` copies; `orphans` makes void what is left of volumes that are no more.

pub mod emptying;
pub mod moving;
pub mod orphans;
pub mod pass;

use crate::btree::{Attempt, Need};
use crate::space::Buckets;
use crate::state::State;
use crate::work::PIECE_KEYS;
use bcached_format::{Key, Position};

/// What a walk has come to in a leaf.
pub(crate) struct Visited {
    /// Where the next keys begin.
    pub next: Position,
    /// That is the next leaf.
    pub is_end: bool,
    /// Words that the keys of the leaf take on the device.
    pub words_on_disk: usize,
}

impl State {
    /// Where the keys behind a leaf for `at` begin that could not be read.
    pub(crate) fn end_of_missing_leaf(&mut self, at: Position) -> Position {
        match self.visit_leaf(at, &mut |_, _| ()) {
            Attempt::Needs(Need::Node(child)) => child.key.position(),
            Attempt::Needs(_) => Position::MAX,
            // It can be read by now, and is left out all the same.
            Attempt::Done(visited) => visited.next,
        }
    }

    /// Shows the keys behind `at` of the leaf for it, stale ones included: as many as go into one piece.
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
        work.visit(PIECE_KEYS.min(node.len()));
        let (keys, next) = node.piece(at, PIECE_KEYS);
        keys.for_each(|key| visit(buckets, key));
        Attempt::Done(Visited {
            next: next.unwrap_or(node.position()),
            is_end: next.is_none(),
            words_on_disk: node.words_on_disk(),
        })
    }
}
