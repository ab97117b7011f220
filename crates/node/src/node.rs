//! The node type: its fields and its queries.
//!
//! Invariants:
//! * The view has no hole and no key of size zero; in a leaf its extents do not overlap.
//! * The view equals the result of re-reading the sets on disk plus the pending keys (less the keys
//!   that [`Node::drop_dead`] removed, which the caller knows to mean nothing).
//! * The pending keys fit behind the log: `written_blocks` plus the next set is at most
//!   `total_blocks`.
//! * The words of the view are at most twice those on disk plus those pending, so two fresh nodes
//!   can always hold them.

use alloc::vec::Vec;
use core::mem::size_of;

use bcached_format::bset::{NodeIdentity, set_bytes};
use bcached_format::units::{WORD_BYTES, bytes_of};
use bcached_format::{Geometry, Inode, Key, Pointer, Position};

use crate::extents;
use crate::sorted_keys::{self, KeyCursor, SortedKeys};

/// Words kept free in a leaf's next set beside the keys to be added: an insert may cut a key in
/// two, in the view and in the pending set.
pub(crate) const LEAF_SPARE_WORDS: usize = 8;

/// Words of the smallest key, one without pointers.
const KEY_WORDS_MIN: usize = 2;

/// A B-tree node in memory.
#[derive(Clone, Debug)]
pub struct Node {
    /// The key that points to the node: its upper bound, its size, its location.
    pub(crate) own: Key,
    pub(crate) level: u8,
    pub(crate) seq: u64,
    pub(crate) geometry: Geometry,
    pub(crate) total_blocks: u32,
    /// End of the log, where the next set goes.
    pub(crate) written_blocks: u32,
    /// Words of keys in the sets of the log.
    pub(crate) words_on_disk: usize,
    /// The merged content of all sets and the pending keys.
    pub(crate) view: SortedKeys,
    /// The next set. In an interior node, without its freeing keys.
    pub(crate) pending: SortedKeys,
    /// The freeing keys of the next set.
    pub(crate) pending_freeing: Vec<Key>,
    /// Pointers of the freeing keys that were read. Emptied by [`Node::drop_dead`].
    pub(crate) freed: Vec<Pointer>,
    /// [`memory_bytes_limit`] of the node's size, cached because each insert needs it.
    pub(crate) memory_limit: u32,
}

/// Whole blocks in a node of this size.
pub(crate) fn blocks_of(geometry: &Geometry, node_sectors: u16) -> u32 {
    let blocks = u64::from(node_sectors) / geometry.block_sectors;
    u32::try_from(blocks).expect("a node has no more blocks than sectors")
}

/// Returns the most memory that a node of `node_sectors` can ever take, in bytes: its view cut into
/// as many pieces as two nodes can hold, its pending set full of holes. A typical node takes a
/// fraction of it; see [`Node::memory_bytes`].
#[must_use]
pub fn memory_bytes_max(node_sectors: u16) -> usize {
    let words = words_of(node_sectors);
    let pieces = 2 * words / (KEY_WORDS_MIN + 1);
    let pending = words / KEY_WORDS_MIN;
    let freeing = 2 * (words / (KEY_WORDS_MIN + 1)) * size_of::<Key>();
    size_of::<Node>()
        + sorted_keys::memory_bytes_max(pieces)
        + sorted_keys::memory_bytes_max(pending)
        + freeing
}

/// Returns the most memory, in bytes, that a node of `node_sectors` takes after it was read or
/// created and got a few more inserts. A node that would exceed it should be rewritten: its living
/// keys take less than half of this.
#[must_use]
pub fn memory_bytes_limit(node_sectors: u16) -> usize {
    let pieces = 2 * words_of(node_sectors) / (KEY_WORDS_MIN + 1);
    size_of::<Node>() + sorted_keys::memory_bytes_filled(pieces) + GROWTH_CHUNKS * sorted_keys::CHUNK_BYTES
}

/// Chunks of keys for which a node that has just been read always has room.
const GROWTH_CHUNKS: usize = 4;

fn words_of(node_sectors: u16) -> usize {
    usize::try_from(bytes_of(u64::from(node_sectors))).expect("a node fits in memory") / WORD_BYTES
}

impl Node {
    /// Creates a node without keys, of which nothing is written yet. Its first set, empty or not,
    /// is pending.
    ///
    /// `own` is the key that points to the node. `seq` marks its sets. It must be random, because
    /// older contents of the bucket are not erased and a repeated number would revive them.
    ///
    /// # Panics
    /// If `own` has no pointer or less than a block, or `seq` is zero.
    #[must_use]
    pub fn create(own: Key, level: u8, seq: u64, geometry: &Geometry) -> Self {
        let total_blocks = blocks_of(geometry, own.size);
        assert!(!own.pointers.as_slice().is_empty(), "a node has a pointer");
        assert!(total_blocks > 0, "a node has room for a set");
        assert!(seq != 0, "a sequence number of zero marks a bucket that never held a node");
        Self {
            own,
            level,
            seq,
            geometry: *geometry,
            total_blocks,
            written_blocks: 0,
            words_on_disk: 0,
            view: SortedKeys::default(),
            pending: SortedKeys::default(),
            pending_freeing: Vec::new(),
            freed: Vec::new(),
            memory_limit: u32::try_from(memory_bytes_limit(own.size)).unwrap_or(u32::MAX),
        }
    }

    /// The key that points to the node.
    #[must_use]
    pub const fn own(&self) -> &Key {
        &self.own
    }

    /// The pointer to the node: its location and the seed of its checksums. Only this function
    /// selects it.
    #[must_use]
    pub fn pointer(&self) -> Pointer {
        pointer_of(&self.own)
    }

    /// Level in the tree; 0 is a leaf.
    #[must_use]
    pub const fn level(&self) -> u8 {
        self.level
    }

    /// Whether the node holds extents of volumes, not children.
    #[must_use]
    pub const fn is_leaf(&self) -> bool {
        self.level == 0
    }

    /// End of the node's range, inclusive.
    #[must_use]
    pub const fn position(&self) -> Position {
        self.own.position()
    }

    /// The random number that marks the node's sets.
    #[must_use]
    pub const fn seq(&self) -> u64 {
        self.seq
    }

    /// Blocks that the log takes; the next set goes to this block.
    #[must_use]
    pub const fn written_blocks(&self) -> u32 {
        self.written_blocks
    }

    /// Blocks of the node.
    #[must_use]
    pub const fn total_blocks(&self) -> u32 {
        self.total_blocks
    }

    /// Whether there is something to write: keys in no set yet, or a fresh node's first set.
    #[must_use]
    pub fn has_pending(&self) -> bool {
        self.written_blocks == 0 || self.pending_words() > 0
    }

    /// Bytes of the next set, including its header and not rounded up to blocks; 0 if there is
    /// nothing to write.
    #[must_use]
    pub fn pending_bytes(&self) -> usize {
        if self.has_pending() { set_bytes(self.pending_words()) } else { 0 }
    }

    /// Words of the keys in the sets on disk, dead ones included.
    #[must_use]
    pub const fn words_on_disk(&self) -> usize {
        self.words_on_disk
    }

    /// Words of the keys in the view. Whatever the sets and the pending keys hold beyond this is
    /// certainly dead.
    #[must_use]
    pub fn words_in_view(&self) -> usize {
        self.view.words()
    }

    /// Number of keys in the view.
    #[must_use]
    pub fn len(&self) -> usize {
        self.view.len()
    }

    /// Whether the view has no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.view.is_empty()
    }

    /// Memory that the node takes now, in bytes. Changes with every insert and never exceeds
    /// [`memory_bytes_max`].
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + self.view.memory_bytes()
            + self.pending.memory_bytes()
            + self.pending_freeing.capacity() * size_of::<Key>()
            + self.freed.capacity() * size_of::<Pointer>()
    }

    /// The most that `inserts` inserts of a key can add to [`Node::memory_bytes`].
    #[must_use]
    pub fn insert_growth_bytes_max(&self, inserts: usize) -> usize {
        // Each changes the view once, and the pending set twice if it cuts an old key in two.
        self.view.growth_bytes_max(inserts) + self.pending.growth_bytes_max(2 * inserts)
    }

    /// An upper bound of [`Node::insert_growth_bytes_max`] that is cheaper to compute. It suffices
    /// where there is plenty of memory.
    #[must_use]
    pub fn insert_growth_bytes_bound(&self, inserts: usize) -> usize {
        self.view.growth_bytes_bound(inserts) + self.pending.growth_bytes_bound(2 * inserts)
    }

    /// The most that replacing `old` children by `new` ones can add to [`Node::memory_bytes`].
    #[must_use]
    pub fn replace_growth_bytes_max(&self, old: usize, new: usize) -> usize {
        let freeing = (self.pending_freeing.len() + old).saturating_sub(self.pending_freeing.capacity());
        self.view.growth_bytes_max(new) + self.pending.growth_bytes_max(new) + freeing * size_of::<Key>()
    }

    /// Returns whether keys of `words` can be added so that the next set still fits behind the log.
    /// Includes the words that cutting older keys may take.
    #[must_use]
    pub fn fits(&self, words: usize) -> bool {
        let spare = if self.is_leaf() { LEAF_SPARE_WORDS } else { 0 };
        set_bytes(self.pending_words() + words + spare) <= self.room_bytes()
    }

    /// Returns the keys of a leaf that share a sector with `[start, end)` of `inode`, in order and
    /// uncut. Keys with a stale pointer are included.
    #[inline]
    pub fn overlapping(&self, inode: Inode, start: u64, end: u64) -> impl Iterator<Item = &Key> + Clone {
        extents::overlapping(&self.view, inode, start, end)
    }

    /// Returns the place of the first key that ends behind `start`.
    #[inline]
    #[must_use]
    pub fn place_of(&self, start: Position) -> KeyCursor {
        self.view.after(start)
    }

    /// As [`overlapping`](Node::overlapping), with the place of the range's start known. The node
    /// must not have changed since that place was determined.
    #[inline]
    pub fn overlapping_from(
        &self,
        place: KeyCursor,
        inode: Inode,
        end: u64,
    ) -> impl Iterator<Item = &Key> + Clone {
        extents::overlapping_from(&self.view, place, inode, end)
    }

    /// Returns all keys of the view, in order.
    pub fn keys(&self) -> impl DoubleEndedIterator<Item = &Key> + Clone {
        self.view.iter()
    }

    /// Returns the first `count` keys that end behind `position`, in order, and the position after
    /// which to continue if there are more.
    pub fn piece(
        &self,
        position: Position,
        count: usize,
    ) -> (impl Iterator<Item = &Key> + Clone, Option<Position>) {
        let place = self.view.after(position);
        (self.view.iter_from(place).take(count), self.end_of_piece(place, count))
    }

    /// As [`piece`](Node::piece), in the contiguous runs in which the keys lie in memory, for
    /// callers that scan very many.
    pub fn runs(&self, position: Position, count: usize) -> (impl Iterator<Item = &[Key]>, Option<Position>) {
        let place = self.view.after(position);
        (self.view.runs_from(place, count), self.end_of_piece(place, count))
    }

    /// Returns the position of the last of `count` keys behind `place`, if there are more.
    fn end_of_piece(&self, place: KeyCursor, count: usize) -> Option<Position> {
        let mut rest = self.view.iter_from(place);
        let last = count.checked_sub(1).and_then(|before| rest.nth(before));
        last.filter(|_| rest.next().is_some()).map(Key::position)
    }

    pub(crate) fn pending_words(&self) -> usize {
        self.pending.words() + self.pending_freeing.iter().map(Key::words).sum::<usize>()
    }

    /// Bytes between the end of the log and the end of the node.
    pub(crate) fn room_bytes(&self) -> usize {
        (self.total_blocks - self.written_blocks) as usize * self.geometry.block_bytes()
    }

    /// What the node's sets are sealed with.
    pub(crate) fn place(&self) -> NodeIdentity {
        NodeIdentity { magic: self.geometry.magic, node: self.pointer() }
    }

    /// Asserts that the next set fits. Every change checks [`Node::fits`] first; this verifies it
    /// afterwards.
    pub(crate) fn assert_room(&self) {
        assert!(set_bytes(self.pending_words()) <= self.room_bytes(), "the next set fits behind the log");
    }
}

/// Returns the pointer from which a node is read and with which its checksums are seeded.
pub(crate) fn pointer_of(own: &Key) -> Pointer {
    *own.pointers.as_slice().first().expect("a node has a pointer")
}
