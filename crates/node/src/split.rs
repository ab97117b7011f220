//! Decides what goes into fresh nodes when a node is full, or when neighbours have
//! become sparse.
//!
//! The log of a node only grows, so a full node is never tidied in place: its living keys move to
//! one or two fresh nodes, and the parent is updated. The functions here only distribute keys; the
//! caller finds the buckets.
//!
//! A division is not undone by a merge at once, nor the other way round. Two nodes hold more than
//! four fifths of one when they are divided, and at most two thirds of that when they are merged
//! ([`belong_together`]). In between lie as many inserts, or deaths of keys, as fill more than a
//! quarter of a node.

use alloc::vec::Vec;

use bcached_format::bset::set_bytes;
use bcached_format::units::WORD_BYTES;
use bcached_format::{Geometry, Key, Position};

use crate::extents::{is_hole, push_merged};
use crate::node::Node;
use crate::pending_keys::behind;

/// The initial keys of the fresh nodes that replace old ones, in order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LiveKeys {
    keys: Vec<Key>,
    words: usize,
}

impl LiveKeys {
    /// Reserves room for this many more keys.
    pub fn reserve(&mut self, keys: usize) {
        self.keys.reserve(keys);
    }

    /// The keys.
    #[must_use]
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// The words that the keys take.
    #[must_use]
    pub const fn words(&self) -> usize {
        self.words
    }

    /// Distributes the keys to one or two fresh nodes of `node_blocks` blocks each.
    ///
    /// One node is enough if its set takes at most four fifths of the blocks. Otherwise the left
    /// node gets keys until it has three fifths of the words, and the key after that. Inserts in
    /// rising order then find more room on the right.
    ///
    /// # Panics
    /// If the keys do not fit into two nodes. Those of one node always do.
    #[must_use]
    pub fn divide(&self, node_blocks: u32, geometry: &Geometry) -> SplitPlan {
        let Self { keys, words } = self;
        if keys.len() < 2 || !is_crowded(*words, node_blocks, geometry) {
            assert!(fits_node(*words, node_blocks, geometry), "a node holds its keys");
            return SplitPlan::One;
        }
        let (mut left, mut left_words) = (0, 0);
        while left_words * 5 < words * 3 {
            left_words += keys[left].words();
            left += 1;
        }
        // Both sides get a key, and neither more than it can hold: a node whose sets had cut each
        // other into many pieces may fill two nodes almost completely.
        if left < keys.len() {
            left_words += keys[left].words();
            left += 1;
        }
        while left == keys.len() || !fits_node(left_words, node_blocks, geometry) {
            left -= 1;
            left_words -= keys[left].words();
        }
        assert!(fits_node(words - left_words, node_blocks, geometry), "two nodes hold the keys of one");
        SplitPlan::Two { left, left_words }
    }
}

impl FromIterator<Key> for LiveKeys {
    fn from_iter<T: IntoIterator<Item = Key>>(keys: T) -> Self {
        let keys: Vec<Key> = keys.into_iter().collect();
        Self { words: keys.iter().map(Key::words).sum(), keys }
    }
}

/// How living keys are distributed to fresh nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SplitPlan {
    /// One node holds all keys and keeps the old node's position.
    One,
    /// The keys are divided between two nodes. The left node's position is that of its last key;
    /// the right one keeps the old position. Neither is empty.
    Two {
        /// Number of keys in the left node.
        left: usize,
        /// Words of these keys.
        left_words: usize,
    },
}

impl Node {
    /// Adds to `living` those of the first `count` keys behind `after` for which `is_live` returns
    /// true. In a leaf, adjacent keys are merged. Returns the position after which to
    /// continue, if there are more keys. Only late keys may enter the node between two calls
    /// ([`Node::insert_late`]); some of them may be among those added.
    pub fn gather(
        &self,
        after: Position,
        count: usize,
        living: &mut LiveKeys,
        is_live: &mut dyn FnMut(&Key) -> bool,
    ) -> Option<Position> {
        let (keys, next) = self.piece(after, count);
        let known = living.keys.len();
        for key in keys {
            debug_assert!(key.size > 0 && !is_hole(key), "the view has no holes");
            if !is_live(key) {
                continue;
            }
            if !self.is_leaf() {
                living.keys.push(*key);
            } else if let Some(key) = behind(key, after) {
                // A late key may begin before `after`, where keys were gathered before it arrived.
                push_merged(&mut living.keys, key, self.geometry.bucket_sectors);
            }
        }
        // Merging a key into the last one does not change that one's number of words.
        living.words += living.keys[known..].iter().map(Key::words).sum::<usize>();
        next
    }
}

/// Returns whether the keys of two neighbours, of `words` in total, are so few that one node of
/// `node_blocks` should hold them: at most two thirds of what [`LiveKeys::divide`] leaves in one
/// node. (The kernel fills two thirds of the blocks; with few blocks, the next insert would divide
/// such a node again.)
#[must_use]
pub fn belong_together(words: usize, node_blocks: u32, geometry: &Geometry) -> bool {
    set_bytes(words) * 3 <= uncrowded_bytes(node_blocks, geometry) * 2
}

/// Returns the most bytes of a set that are not divided.
fn uncrowded_bytes(node_blocks: u32, geometry: &Geometry) -> usize {
    let (blocks, block_bytes) = (node_blocks as usize, geometry.block_bytes());
    if blocks == 1 { block_bytes * 4 / 5 } else { blocks * 4 / 5 * block_bytes }
}

/// Returns whether a set of `words` takes more than four fifths of the blocks. A node of one block
/// has no room for a second set anyway; there the bytes count instead, otherwise it would be
/// divided over and over.
fn is_crowded(words: usize, node_blocks: u32, geometry: &Geometry) -> bool {
    set_bytes(words) > uncrowded_bytes(node_blocks, geometry)
}

fn fits_node(words: usize, node_blocks: u32, geometry: &Geometry) -> bool {
    words <= words_max(node_blocks, geometry)
}

/// Returns the words of keys that a node's first set can hold.
fn words_max(node_blocks: u32, geometry: &Geometry) -> usize {
    (node_blocks as usize * geometry.block_bytes() - set_bytes(0)) / WORD_BYTES
}
