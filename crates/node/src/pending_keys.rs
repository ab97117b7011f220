//! Late keys: keys that enter a leaf while fresh nodes replace it, so that writers need not wait
//! for the replacement.
//!
//! The old leaf shows them but never writes them; the fresh nodes receive them when they have taken
//! its place. So only as many are admitted as are certain to fit there, on the device and in
//! memory: [`Node::late_keys_max`]. And as few leaves as possible should become full before they
//! are replaced: [`Node::is_nearly_full`].

use bcached_format::bset::set_bytes;
use bcached_format::key::MAX_POINTERS;
use bcached_format::units::WORD_BYTES;
use bcached_format::{Key, Position};

use crate::extents::{self, is_hole};
use crate::node::Node;
use crate::sorted_keys::SortedKeys;

/// As many as typical nodes of 256 KiB have room for: enough for a millisecond of the fastest
/// devices.
const LATE_KEYS_MAX: usize = 256;
/// Words of a node per late key. At worst two fresh keys in the view and two in the next set fit
/// into half of a node.
const WORDS_OF_A_LATE_KEY: usize = 128;
/// Words of the longest key.
const KEY_WORDS_MAX: usize = 2 + MAX_POINTERS;
/// A node of fewer blocks may have no block left behind its first set, which takes up to four
/// fifths of them.
const BLOCKS_MIN: u32 = 8;

/// A leaf is nearly full when its memory has room for fewer keys than this: each may need a new
/// chunk.
const KEYS_BEFORE_FULL: usize = 2;

/// A node of fewer blocks is never nearly full before it is full: one block is too large a part of
/// it to waste.
const BLOCKS_OF_A_ROOMY_NODE: u32 = 16;

impl Node {
    /// Returns how many late keys are certain to fit into the one or two nodes of the same size
    /// that replace this leaf.
    ///
    /// Returns 0 if the leaf is so cut up that its keys take much more than one node: then a fresh
    /// node may be full from the start. Of five quarters of a node, the left one of two gets three
    /// fifths, which are three quarters of a node.
    #[must_use]
    pub fn late_keys_max(&self) -> usize {
        let bytes = self.total_blocks as usize * self.geometry.block_bytes();
        let keys = (bytes / WORD_BYTES / WORDS_OF_A_LATE_KEY).min(LATE_KEYS_MAX);
        // A key may cut another in two.
        let leave_room = set_bytes(self.view.words() + 2 * KEY_WORDS_MAX * keys) <= bytes / 4 * 5;
        if self.is_leaf() && self.total_blocks >= BLOCKS_MIN && leave_room { keys } else { 0 }
    }

    /// Marks that nothing more of this leaf will be written. Releases the memory of its pending
    /// keys, which late keys may need.
    pub fn close(&mut self) {
        self.pending = SortedKeys::default();
    }

    /// The most that `keys` late keys can add to [`Node::memory_bytes`].
    #[must_use]
    pub fn late_growth_bytes_max(&self, keys: usize) -> usize {
        self.view.growth_bytes_max(keys)
    }

    /// Inserts `key` over whatever the leaf has in its range, for lookups only: this node never
    /// writes it. `removed` is called as by [`Node::insert`].
    ///
    /// # Panics
    /// As [`Node::insert`].
    pub fn insert_late(&mut self, key: &Key, removed: &mut dyn FnMut(Key)) {
        assert!(self.is_leaf(), "extents live in leaves");
        assert!(
            key.size > 0 && key.position() <= self.position(),
            "the caller cuts keys at the end of the leaf"
        );
        let visible = (!is_hole(key)).then_some(key);
        extents::put(&mut self.view, key, visible, self.geometry.bucket_sectors, removed);
    }

    /// Returns whether only a few more sets fit, or only a few keys into the node's memory. Then
    /// fresh nodes should replace it, before a writer has to wait for that.
    #[must_use]
    pub fn is_nearly_full(&self) -> bool {
        if !self.is_leaf() || self.total_blocks < BLOCKS_OF_A_ROOMY_NODE {
            return false;
        }
        let next = self.set_blocks(self.pending_words());
        let spare = self.total_blocks / BLOCKS_OF_A_ROOMY_NODE;
        let is_log_full = self.written_blocks as usize + next + spare as usize > self.total_blocks as usize;
        let room = (self.memory_limit as usize).saturating_sub(self.memory_bytes());
        let is_memory_full = self.insert_growth_bytes_bound(KEYS_BEFORE_FULL) > room
            && self.insert_growth_bytes_max(KEYS_BEFORE_FULL) > room;
        is_log_full || is_memory_full
    }
}

/// Returns the part of an extent that lies behind `position`.
pub(crate) fn behind(key: &Key, position: Position) -> Option<Key> {
    if key.inode == position.inode { key.cut(position.offset, key.end) } else { Some(*key) }
}
