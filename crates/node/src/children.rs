//! Changes to an interior node, and the children it names (format section 8).
//!
//! Old and new child of one position stand side by side on disk: the new one's set also carries a **freeing key**,
//! the old key at position zero with the next generation. Whoever reads the node raises the generations of buckets
//! with it, which makes the old key stale. So an interior node that has just been read shows children that are dead;
//! its reader raises generations with [`Node::freed`], then calls [`Node::drop_dead`].

use bcached_format::{Key, Pointer, Pointers, Position};

use crate::error::{NodeError, NodeFault};
use crate::node::Node;
use crate::sorted_keys::{Place, SortedKeys};

impl Node {
    /// The children, in order.
    pub fn children(&self) -> impl DoubleEndedIterator<Item = &Key> + Clone {
        assert!(!self.is_leaf(), "a leaf has no children");
        self.view.iter()
    }

    /// The child whose range holds an extent that starts at `start`: the first whose position is greater.
    #[must_use]
    pub fn child_for(&self, start: Position) -> Option<&Key> {
        assert!(!self.is_leaf(), "a leaf has no children");
        self.view.get(self.view.after(start))
    }

    /// How many children come before that one.
    #[must_use]
    pub fn children_before(&self, start: Position) -> usize {
        assert!(!self.is_leaf(), "a leaf has no children");
        self.view.keys_before(self.view.after(start))
    }

    /// The children from that one on.
    pub fn children_from(&self, start: Position) -> impl Iterator<Item = &Key> + Clone {
        assert!(!self.is_leaf(), "a leaf has no children");
        self.view.iter_from(self.view.after(start))
    }

    /// Puts the children `new` in the place of `old`, with a freeing key for each of the old ones. All of it stands
    /// in one set, so it happens at once. The caller has asked
    /// [`fits`](Node::fits) with the words of all of them: each old key takes those of its freeing key.
    ///
    /// # Panics
    /// If this is a leaf, an old key is not a child, a new one lies behind the node's range, or the next set
    /// overflows.
    pub fn replace_children(&mut self, old: &[Key], new: &[Key]) {
        assert!(!self.is_leaf(), "a leaf has no children");
        self.pending_freeing.reserve_exact(old.len());
        for key in old {
            assert!(remove(&mut self.view, key), "only a child can be replaced");
            // If the old one has not been written yet, it need not be; its freeing key still tells its generation.
            remove(&mut self.pending, key);
            self.pending_freeing.push(freeing_key(key));
        }
        for key in new {
            assert!(key.size > 0 && !key.dirty, "a child's key is that of a node");
            assert!(
                key.position() > Position::ZERO && key.position() <= self.position(),
                "it lies in the range"
            );
            for keys in [&mut self.view, &mut self.pending] {
                keys.splice(keys.at(key.position()), 0, core::slice::from_ref(key));
            }
        }
        self.assert_room();
    }

    /// Pointers of the freeing keys that were read: the buckets there are at least at these generations.
    pub fn freed(&self) -> impl Iterator<Item = Pointer> + Clone {
        self.freed.iter().copied()
    }

    /// What an interior node says of buckets and their generations as it has just been read: its children, those that are
    /// dead, and what its freeing keys replaced. All of it is on the device until the node is rewritten, and each must stay
    /// comparable with its bucket's generation.
    pub fn named(&self) -> impl Iterator<Item = Pointer> + Clone {
        let freed = self.freed.iter().map(|pointer| pointer.with_generation(pointer.generation().previous()));
        self.children().flat_map(|key| key.pointers.as_slice().iter().copied()).chain(freed)
    }

    /// Drops the children that `is_dead` says yes to, their pointer being stale, and forgets the freeing keys.
    /// To be called once the generations are known, before any child is asked for.
    pub fn drop_dead(&mut self, is_dead: &mut dyn FnMut(Pointer) -> bool) {
        assert!(!self.is_leaf(), "a leaf has no children");
        self.freed = alloc::vec::Vec::new();
        self.view.retain(&mut |key| !key.pointers.as_slice().iter().any(|pointer| is_dead(*pointer)));
    }

    /// Checks the children of a node without dead ones: distinct positions, all after `lo` (where the node's range
    /// begins), the last at the node's own position. That none lies behind it was checked when reading.
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

/// The key that makes `old` dead: at position zero, one generation on.
fn freeing_key(old: &Key) -> Key {
    let mut pointers = Pointers::NONE;
    if let [pointer] = old.pointers.as_slice() {
        pointers = Pointers::one(pointer.with_generation(pointer.generation().next()));
    }
    assert!(!pointers.as_slice().is_empty(), "a child has one pointer");
    let Position { inode, offset } = Position::ZERO;
    Key { inode, end: offset, pointers, ..*old }
}

/// Removes exactly `key`; says whether it was there.
fn remove(keys: &mut SortedKeys, key: &Key) -> bool {
    let mut place: Place = keys.at(key.position());
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
