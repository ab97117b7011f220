//! What one leaf says of a range at once, for requests of one piece: most are.

use crate::btree::cache::Leaf;
use crate::btree::{Content, live_pointers};
use crate::request::write::Survey;
use crate::state::State;
use bcached_format::{Inode, Key, Position};
use bcached_node::{Node, Place};

/// Keys that lie over such a range at most, dead ones among them.
const KEYS_MAX: usize = 4;

impl State {
    /// The leaf that has the word of all of `[start, end)`, if it is in memory.
    fn leaf_of_all(&mut self, inode: Inode, start: u64, end: u64) -> Option<usize> {
        if self.overlay.first_in(inode, start, end).is_some() {
            return None;
        }
        let slot = self.descend(Position::new(inode, start), 0).ok()?;
        let position = self.nodes.get(slot).node().position();
        (position.inode > inode || position.offset >= end).then_some(slot)
    }

    /// What all of `[start, end)` of volume `inode` is, if that is one thing, of which one leaf says so, and that leaf. `None`: ask piece by
    /// piece.
    pub(crate) fn whole(&mut self, inode: Inode, start: u64, end: u64) -> Option<(Content, Leaf)> {
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

    /// What a write to all of `[start, end)` must know, if one leaf says that at once, and that leaf.
    pub(crate) fn survey_whole(&mut self, inode: Inode, start: u64, end: u64) -> Option<(Survey, Leaf)> {
        let slot = self.leaf_of_all(inode, start, end)?;
        let node = self.nodes.get(slot).node();
        let place = node.place_of(Position::new(inode, start));
        let (mut seen, mut survey) = (0, Survey::default());
        for key in few(node, place, inode, end) {
            seen += 1;
            survey.present |= self.buckets.could_return(key);
            survey.dirty |= key.dirty && !self.buckets.is_dead(key);
        }
        self.work.visit(seen);
        (seen <= KEYS_MAX).then(|| (survey, self.nodes.remember(slot, place)))
    }
}

/// The keys that overlap what begins at `place` and ends at `end`, and no more than one more than there may be.
fn few(node: &Node, place: Place, inode: Inode, end: u64) -> impl Iterator<Item = &Key> {
    node.overlapping_from(place, inode, end).take(KEYS_MAX + 1)
}
