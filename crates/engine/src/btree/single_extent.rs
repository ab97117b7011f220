//! Looks up a range that one leaf covers with one extent. Most requests are of this kind.

use crate::btree::cache::LeafHint;
use crate::btree::{Content, live_pointers};
use crate::request::write::RangeState;
use crate::state::State;
use bcached_format::{Inode, Key, Position};
use bcached_node::{KeyCursor, Node};

/// Most keys that may overlap such a range, including dead ones.
const KEYS_MAX: usize = 4;

impl State {
    /// Returns the leaf that is authoritative for all of `[start, end)`, if it is in memory.
    fn leaf_of_all(&mut self, inode: Inode, start: u64, end: u64) -> Option<usize> {
        if self.overlay.first_in(inode, start, end).is_some() {
            return None;
        }
        let slot = self.descend(Position::new(inode, start), 0).ok()?;
        let position = self.nodes.get(slot).node().position();
        (position.inode > inode || position.offset >= end).then_some(slot)
    }

    /// Returns the content of all of `[start, end)` of volume `inode`, and its leaf, if the content
    /// is uniform and one leaf tells it. `None`: look the range up piece by piece.
    pub(crate) fn whole(&mut self, inode: Inode, start: u64, end: u64) -> Option<(Content, LeafHint)> {
        let slot = self.leaf_of_all(inode, start, end)?;
        let node = self.nodes.get(slot).node();
        let place = node.place_of(Position::new(inode, start));
        let (mut seen, mut content) = (0, Content::Hole);
        for key in few(node, place, inode, end) {
            seen += 1;
            let Some(pointers) = live_pointers(&self.buckets, &key.pointers) else { continue };
            if key.start() > start || key.end < end {
                return None;
            }
            let pointers = pointers.advanced(start - key.start());
            content = Content::Cached { pointers, dirty: key.dirty };
            break;
        }
        self.work.visit(seen);
        (seen <= KEYS_MAX).then(|| (content, self.nodes.remember(slot, place)))
    }

    /// Returns what a write to all of `[start, end)` must know, and the leaf, if one leaf tells
    /// that at once.
    pub(crate) fn survey_whole(
        &mut self,
        inode: Inode,
        start: u64,
        end: u64,
    ) -> Option<(RangeState, LeafHint)> {
        let slot = self.leaf_of_all(inode, start, end)?;
        let node = self.nodes.get(slot).node();
        let place = node.place_of(Position::new(inode, start));
        let (mut seen, mut survey) = (0, RangeState::default());
        for key in few(node, place, inode, end) {
            seen += 1;
            survey.present |= self.buckets.could_return(key);
            survey.dirty |= key.dirty && !self.buckets.is_dead(key);
        }
        self.work.visit(seen);
        (seen <= KEYS_MAX).then(|| (survey, self.nodes.remember(slot, place)))
    }
}

/// Iterates over the keys that overlap the range from `place` to `end`, at most one more than are
/// allowed.
fn few(node: &Node, place: KeyCursor, inode: Inode, end: u64) -> impl Iterator<Item = &Key> {
    node.overlapping_from(place, inode, end).take(KEYS_MAX + 1)
}
