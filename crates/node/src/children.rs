//! Changes to an interior node, and access to its children.
//!
//! The old and the new child of one position exist side by side on disk. The set of the new child
//! also carries a **freeing key**: the old key at position zero with the next generation. A reader
//! of the node raises the generations of buckets with it, which makes the old key stale. So an
//! interior node that has just been read still shows dead children. Its reader raises the
//! generations with [`Node::freed`], then calls [`Node::drop_dead`].

use bcached_format::{Key, Pointer, Pointers, Position};

use crate::error::{NodeError, NodeFault};
use crate::node::Node;
use crate::sorted_keys::{KeyCursor, SortedKeys};

impl Node {
    /// Returns the children, in order.
    pub fn children(&self) -> impl DoubleEndedIterator<Item = &Key> + Clone {
        assert!(!self.is_leaf(), "a leaf has no children");
        self.view.iter()
    }

    /// Returns the child whose range holds an extent that starts at `start`: the first whose
    /// position is greater.
    #[must_use]
    pub fn child_for(&self, start: Position) -> Option<&Key> {
        assert!(!self.is_leaf(), "a leaf has no children");
        self.view.get(self.view.after(start))
    }

    /// Counts the children before the one that [`Node::child_for`] returns.
    #[must_use]
    pub fn children_before(&self, start: Position) -> usize {
        assert!(!self.is_leaf(), "a leaf has no children");
        self.view.keys_before(self.view.after(start))
    }

    /// Returns the children from the one that [`Node::child_for`] returns.
    pub fn children_from(&self, start: Position) -> impl Iterator<Item = &Key> + Clone {
        assert!(!self.is_leaf(), "a leaf has no children");
        self.view.iter_from(self.view.after(start))
    }

    /// Replaces the children `old` by `new`, with a freeing key for each old one. All of it is in
    /// one set, so the change is atomic. The caller has checked [`fits`](Node::fits) with the words
    /// of all these keys; each old key counts, because its freeing key takes as many words.
    ///
    /// # Panics
    /// If this is a leaf, an old key is not a child, a new one lies behind the node's range, or the
    /// next set overflows.
    pub fn replace_children(&mut self, old: &[Key], new: &[Key]) {
        assert!(!self.is_leaf(), "a leaf has no children");
        self.pending_freeing.reserve_exact(old.len());
        for key in old {
            assert!(remove(&mut self.view, key), "only a child can be replaced");
            // An old key that has not been written yet need not be written. Its freeing key still
            // records the generation.
            remove(&mut self.pending, key);
            self.pending_freeing.push(freeing_key(key));
        }
        for key in new {
            assert!(key.size > 0 && !key.dirty, "a child's key is that of a node");
            assert!(
                key.position() > Position::ZERO && key.position() <= self.position(),
                "the child lies in the node's range"
            );
            for keys in [&mut self.view, &mut self.pending] {
                keys.splice(keys.at(key.position()), 0, core::slice::from_ref(key));
            }
        }
        self.assert_room();
    }

    /// Returns the pointers of the freeing keys that were read: the generations of those buckets
    /// are at least these.
    pub fn freed(&self) -> impl Iterator<Item = Pointer> + Clone {
        self.freed.iter().copied()
    }

    /// Returns every bucket and generation that an interior node names when it has just been read:
    /// its children, dead ones included, and the pointers that its freeing keys replaced. All of it
    /// stays on the device until the node is rewritten, so each must stay comparable with its
    /// bucket's generation.
    pub fn named(&self) -> impl Iterator<Item = Pointer> + Clone {
        let freed = self.freed.iter().map(|pointer| pointer.with_generation(pointer.generation().previous()));
        self.children().flat_map(|key| key.pointers.as_slice().iter().copied()).chain(freed)
    }

    /// Drops the children whose pointer is stale according to `is_dead`, and discards the freeing
    /// keys. Call this when the generations are known, before any child is looked up.
    pub fn drop_dead(&mut self, is_dead: &mut dyn FnMut(Pointer) -> bool) {
        assert!(!self.is_leaf(), "a leaf has no children");
        self.freed = alloc::vec::Vec::new();
        self.view.retain(&mut |key| !key.pointers.as_slice().iter().any(|pointer| is_dead(*pointer)));
    }

    /// Checks the children of a node without dead ones: distinct positions, all after `lo` (where
    /// the node's range begins), the last at the node's own position. Reading already checked that
    /// no child lies behind the node's position.
    ///
    /// # Errors
    /// [`NodeFault::TwoChildren`], [`NodeFault::BeforeRange`] or [`NodeFault::ChildrenEndEarly`].
    pub fn check_children(&self, lo: Position) -> Result<(), NodeError> {
        let mut previous = None;
        for key in self.children() {
            let position = key.position();
            if position <= lo {
                return Err(self.error(NodeFault::BeforeRange { limit: lo, found: position }));
            }
            if previous == Some(position) {
                return Err(self.error(NodeFault::TwoChildren { position }));
            }
            previous = Some(position);
        }
        let (wanted, found) = (self.position(), previous.unwrap_or(Position::ZERO));
        if found != wanted {
            return Err(self.error(NodeFault::ChildrenEndEarly { wanted, found }));
        }
        Ok(())
    }

    pub(crate) fn error(&self, fault: NodeFault) -> NodeError {
        NodeError { pointer: self.pointer(), level: self.level, fault }
    }
}

/// Returns the key that makes `old` dead: at position zero, with the next generation.
fn freeing_key(old: &Key) -> Key {
    let mut pointers = Pointers::NONE;
    if let [pointer] = old.pointers.as_slice() {
        pointers = Pointers::one(pointer.with_generation(pointer.generation().next()));
    }
    assert!(!pointers.as_slice().is_empty(), "a child has one pointer");
    let Position { inode, offset } = Position::ZERO;
    Key { inode, end: offset, pointers, ..*old }
}

/// Removes exactly `key`; returns whether it was present.
fn remove(keys: &mut SortedKeys, key: &Key) -> bool {
    let mut place: KeyCursor = keys.at(key.position());
    while let Some(found) = keys.get(place) {
        if found == key {
            keys.splice(place, 1, &[]);
            return true;
        }
        if found.position() != key.position() {
            return false;
        }
        place = keys.next(place);
    }
    false
}
