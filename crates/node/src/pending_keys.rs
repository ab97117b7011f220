//! Keys that enter a leaf while fresh nodes take its place: whoever writes does not wait for that.
//!
//! The old leaf shows them, and never writes them; the fresh nodes get them when they are in its place. So there must be as few as
//! surely find room there, on the device and in memory: [`Node::late_keys_max`]. And as few leaves as possible should be full before
//! their place is taken: [`Node::is_nearly_full`].

use bcached_format::bset::set_bytes;
use bcached_format::key::MAX_POINTERS;
use bcached_format::units::WORD_BYTES;
use bcached_format::{Key, Position};

use crate::extents::{self, is_hole};
use crate::node::Node;
use crate::sorted_keys::SortedKeys;

/// As many as the usual nodes of 256 KiB have room for: enough for a millisecond of the fastest devices.
const LATE_KEYS_MAX: usize = 256;
/// One for so many words of a node. Two fresh keys in the view and two in the next set, at worst, find room in half of a node.
const WORDS_OF_A_LATE_KEY: usize = 128;
/// Words of the longest key.
const KEY_WORDS_MAX: usize = 2 + MAX_POINTERS;
/// A node of fewer blocks may have none left behind its first set, which takes up to four fifths of them.
const BLOCKS_MIN: u32 = 8;

/// A leaf is nearly full that may take fewer keys than this before its memory is all used: each may take a new piece of it.
const KEYS_BEFORE_FULL: usize = 2;

/// A node of fewer blocks is not nearly full before it is full: a block is too much of it to be given away.
const BLOCKS_OF_A_ROOMY_NODE: u32 = 16;

impl Node {
    /// How many late keys surely find room in what takes this leaf's place, where it has one or two nodes of the same size.
    ///
    /// None, if this is so cut up that its keys take much more than one node: then a fresh one may be full from the start. Of
    /// five quarters the left one of two gets three fifths, which are three quarters of a node.
    #[must_use]
    pub fn late_keys_max(&self) -> usize {
        let bytes = self.total_blocks as usize * self.geometry.block_bytes();
        let keys = (bytes / WORD_BYTES / WORDS_OF_A_LATE_KEY).min(LATE_KEYS_MAX);
        // A key may cut another in two.
        let leave_room = set_bytes(self.view.words() + 2 * KEY_WORDS_MAX * keys) <= bytes / 4 * 5;
        if self.is_leaf() && self.total_blocks >= BLOCKS_MIN && leave_room { keys } else { 0 }
    }

    /// Nothing more is written of this leaf: what was still to be written takes no memory any more, which late keys may need.
    pub fn close(&mut self) {
        self.pending = SortedKeys::default();
    }

    /// The most that so many late keys can add to [`Node::memory_bytes`].
    #[must_use]
    pub fn late_growth_bytes_max(&self, keys: usize) -> usize {
        self.view.growth_bytes_max(keys)
    }

    /// Puts `key` over whatever the leaf says about its range, for those who look; it will never be written here.
    /// `removed` is told what [`Node::insert`] tells.
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

    /// Few more sets fit, or few keys into its memory: it is time to put fresh nodes in this one's place, before somebody has to wait
    /// for it.
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

/// What of an extent lies behind `position`.
pub(crate) fn behind(key: &Key, position: Position) -> Option<Key> {
    if key.inode == position.inode { key.cut(position.offset, key.end) } else { Some(*key) }
}
