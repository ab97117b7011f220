//! Keeps the keys written to a leaf while fresh nodes are replacing it, so that writers do not wait
//! for those nodes.
//!
//! A leaf that is [`NodeState::Closing`] shows the keys that enter it, and the journal holds them,
//! but no more of the leaf is written. Before the fresh nodes become reachable they receive these
//! keys, like any others that are still to be written. From then on the journal keeps the keys for
//! the fresh nodes. The number of such keys is limited so that they certainly fit
//! ([`bcached_node::Node::late_keys_max`]); beyond that writers wait.

use crate::btree::cache::{LateKeys, NodeState};
use crate::btree::part_within;
use crate::btree::replace::FreshNode;
use crate::set::CacheSet;
use crate::state::State;
use alloc::boxed::Box;
use alloc::vec::Vec;
use bcached_format::Key;
use bcached_node::Node;

/// Keys handed over in one piece.
const PIECE: usize = 8;

/// Closes the node in `slot`. It takes at most `most` more keys. If `most` is not 0, the node
/// cannot be reopened.
pub fn close(s: &mut State, slot: usize, most: usize) {
    let late = LateKeys { keys: Vec::with_capacity(most), handed_over: 0, most, since: None };
    s.nodes.get_mut(slot).state = NodeState::Closing(Box::new(late));
    if most > 0 {
        s.nodes.change(slot, Node::close);
    }
}

/// Hands the keys that arrived since the leaves in `old` were closed to the nodes that replace
/// them. Other tasks run between the pieces. On return none are left, until another task runs.
pub async fn hand_over(set: &CacheSet, old: &[usize], fresh: &mut [FreshNode]) {
    loop {
        set.env().breathe().await;
        let piece: Vec<Key> = set.with(|s| {
            let piece = old.iter().find_map(|slot| {
                let piece = late(s, *slot)?.next_piece();
                (!piece.is_empty()).then_some(piece)
            });
            piece.iter().flatten().for_each(|_| s.work.insert(0));
            piece.unwrap_or_default()
        });
        if piece.is_empty() {
            return;
        }
        piece.iter().for_each(|key| enter_key(fresh, key));
    }
}

/// Returns the journal entry of the oldest key kept for the successors of `old`.
pub fn since(s: &mut State, old: &[usize]) -> Option<u64> {
    old.iter().filter_map(|slot| late(s, *slot)?.since).min()
}

fn late(s: &mut State, slot: usize) -> Option<&mut LateKeys> {
    match &mut s.nodes.get_mut(slot).state {
        NodeState::Closing(late) => Some(late),
        NodeState::Open | NodeState::Unlinked => None,
    }
}

/// Inserts a key into the fresh nodes. Everything else that depends on the key was changed when it
/// arrived.
fn enter_key(fresh: &mut [FreshNode], key: &Key) {
    let mut rest = Some(*key);
    while let Some(key) = rest {
        let start = key.start_position();
        let node = fresh.iter_mut().map(|fresh| &mut fresh.node).find(|node| node.position() > start);
        let node = node.expect("the new nodes cover the range of the old ones");
        let part = part_within(&key, node.position());
        node.insert(&part, &mut |_| ());
        rest = key.cut(part.end, key.end);
    }
}

impl LateKeys {
    /// Returns how many more keys it may take.
    #[must_use]
    pub fn room(&self) -> usize {
        self.most - self.keys.len()
    }

    /// Returns the next keys that have not been handed over, and marks them as handed over.
    fn next_piece(&mut self) -> Vec<Key> {
        let piece: Vec<Key> = self.keys[self.handed_over..].iter().take(PIECE).copied().collect();
        self.handed_over += piece.len();
        piece
    }
}
