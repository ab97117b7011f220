//! Who writes into a leaf does not wait for the nodes that take its place: those keys are kept until these do.
//!
//! While a leaf is [`Gate::Closing`], it shows what enters it, and the journal has it; nothing more of it is written.
//! Before the fresh nodes can be found they get these keys, as any others that are still to be written, and from then
//! on the journal keeps them for the fresh ones. How many there may be is such that they surely find room
//! ([`bcached_node::Node::late_keys_max`]); beyond that writers wait.

use crate::btree::cache::{Gate, Late};
use crate::btree::part_within;
use crate::btree::replace::FreshNode;
use crate::set::CacheSet;
use crate::state::State;
use alloc::boxed::Box;
use alloc::vec::Vec;
use bcached_format::Key;
use bcached_node::Node;

/// Keys that are handed over in one piece.
const PIECE: usize = 8;

/// Closes the node in `slot`. It takes at most `most` keys from here on, and if that is any, nothing opens it again.
pub fn close(s: &mut State, slot: usize, most: usize) {
    let late = Late { keys: Vec::with_capacity(most), handed_over: 0, most, since: None };
    s.nodes.get_mut(slot).gate = Gate::Closing(Box::new(late));
    if most > 0 {
        s.nodes.change(slot, Node::close);
    }
}

/// Gives the keys that came since the leaves in `old` were closed to the nodes that take their place. Others run between the pieces. When
/// this returns there are no more, until somebody else runs.
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

/// The journal entry of the oldest key that has been handed over from one of `old`.
pub fn since(s: &mut State, old: &[usize]) -> Option<u64> {
    old.iter().filter_map(|slot| late(s, *slot)?.since).min()
}

fn late(s: &mut State, slot: usize) -> Option<&mut Late> {
    match &mut s.nodes.get_mut(slot).gate {
        Gate::Closing(late) => Some(late),
        Gate::Open | Gate::Unlinked => None,
    }
}

/// What depends on the key, but for the fresh nodes, has been changed when it came.
fn enter_key(fresh: &mut [FreshNode], key: &Key) {
    let mut rest = Some(*key);
    while let Some(key) = rest {
        let start = key.start_position();
        let node = fresh.iter_mut().map(|fresh| &mut fresh.node).find(|node| node.position() > start);
        let node = node.expect("together they reach to where the old ones do");
        let part = part_within(&key, node.position());
        node.insert(&part, &mut |_| ());
        rest = key.cut(part.end, key.end);
    }
}

impl Late {
    /// How many more there may be.
    #[must_use]
    pub fn room(&self) -> usize {
        self.most - self.keys.len()
    }

    /// The next keys that have not been handed over, and are from now on.
    fn next_piece(&mut self) -> Vec<Key> {
        let piece: Vec<Key> = self.keys[self.handed_over..].iter().take(PIECE).copied().collect();
        self.handed_over += piece.len();
        piece
    }
}
