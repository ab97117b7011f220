//! What goes into fresh nodes when a node is full (format 6.5), or when neighbours have become sparse (12.3).
//!
//! The log of a node only grows, so a full node is never tidied in place: its living keys move to one fresh node, or
//! to two, and the parent is told. The functions here only deal out keys; whoever calls them finds the buckets.
//!
//! What is divided does not go together again at once, nor the other way round: two nodes have more than four fifths of
//! one when they are divided, and at most two thirds of that when they become one ([`belong_together`]). In between lie
//! as many inserts, or deaths of keys, as fill more than a quarter of a node.

use alloc::vec::Vec;

use bcached_format::bset::set_bytes;
use bcached_format::units::WORD_BYTES;
use bcached_format::{Geometry, Key, Position};

use crate::extents::{is_hole, push_merged};
use crate::node::Node;
use crate::pending_keys::behind;

/// The keys that fresh nodes in the place of old ones start with, in order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Living {
    keys: Vec<Key>,
    words: usize,
}

impl Living {
    /// Room for so many more keys.
    pub fn reserve(&mut self, keys: usize) {
        self.keys.reserve(keys);
    }

    /// The keys.
    #[must_use]
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// The words that they take.
    #[must_use]
    pub const fn words(&self) -> usize {
        self.words
    }

    /// Deals them out to one fresh node or to two, each of `node_blocks` blocks.
    ///
    /// One, if its set takes at most four fifths of the blocks. Otherwise the left node gets the keys until three fifths
    /// of the words lie behind, and the one after: what is inserted in rising order then finds more room on the right.
    ///
    /// # Panics
    /// If the keys do not fit into two nodes. Those of one node always do.
    #[must_use]
    pub fn divide(&self, node_blocks: u32, geometry: &Geometry) -> Division {
        let Self { keys, words } = self;
        if keys.len() < 2 || !is_crowded(*words, node_blocks, geometry) {
            assert!(fits_node(*words, node_blocks, geometry), "a node holds its keys");
            return Division::One;
        }
        let (mut left, mut left_words) = (0, 0);
        while left_words * 5 < words * 3 {
            left_words += keys[left].words();
            left += 1;
        }
        // Both sides get a key, and neither more than it can hold: a node whose sets had cut each other into many pieces
        // may fill two nodes almost wholly.
        if left < keys.len() {
            left_words += keys[left].words();
            left += 1;
        }
        while left == keys.len() || !fits_node(left_words, node_blocks, geometry) {
            left -= 1;
            left_words -= keys[left].words();
        }
        assert!(fits_node(words - left_words, node_blocks, geometry), "two nodes hold the keys of one");
        Division::Two { left, left_words }
    }
}

impl FromIterator<Key> for Living {
    fn from_iter<T: IntoIterator<Item = Key>>(keys: T) -> Self {
        let keys: Vec<Key> = keys.into_iter().collect();
        Self { words: keys.iter().map(Key::words).sum(), keys }
    }
}

/// How living keys are dealt out to fresh nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Division {
    /// One node holds them all; it keeps the old node's position.
    One,
    /// They are divided. The left node's position is that of its last key; the right one keeps the old position. Neither is
    /// empty.
    Two {
        /// Keys of the left node.
        left: usize,
        /// The words of these.
        left_words: usize,
    },
}

impl Node {
    /// Adds to `living` what a fresh node in this one's place starts with of the first `count` keys behind `after`: those
    /// that `is_live` says yes to; in a leaf adjacent ones are merged (format 7.4). The position to go on behind, if there are
    /// more. Only late keys may enter in between ([`Node::insert_late`]); some of them may be among those added.
    pub fn gather(
        &self,
        after: Position,
        count: usize,
        living: &mut Living,
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
                // A late one may begin where others have been gathered before it came.
                push_merged(&mut living.keys, key, self.geometry.bucket_sectors);
            }
        }
        // One that another was merged into has the words it had.
        living.words += living.keys[known..].iter().map(Key::words).sum::<usize>();
        next
    }
}

/// Whether keys of `words`, those of two neighbours, are so few that one node of `node_blocks` is enough for them: two
/// thirds of what [`Living::divide`] leaves in one. (A kernel fills two thirds of the blocks; of a node of few blocks that would
/// be divided by the next insert.)
#[must_use]
pub fn belong_together(words: usize, node_blocks: u32, geometry: &Geometry) -> bool {
    set_bytes(words) * 3 <= uncrowded_bytes(node_blocks, geometry) * 2
}

/// The most bytes of a set that are not divided.
fn uncrowded_bytes(node_blocks: u32, geometry: &Geometry) -> usize {
    let (blocks, block_bytes) = (node_blocks as usize, geometry.block_bytes());
    if blocks == 1 { block_bytes * 4 / 5 } else { blocks * 4 / 5 * block_bytes }
}

/// A set of `words` takes more than four fifths of the blocks. A node of one block has no room for a second set
/// anyway; there the bytes are looked at, or it would be divided for ever.
fn is_crowded(words: usize, node_blocks: u32, geometry: &Geometry) -> bool {
    set_bytes(words) > uncrowded_bytes(node_blocks, geometry)
}

fn fits_node(words: usize, node_blocks: u32, geometry: &Geometry) -> bool {
    words <= words_max(node_blocks, geometry)
}

/// Words of keys that a node's first set can hold.
fn words_max(node_blocks: u32, geometry: &Geometry) -> usize {
    (node_blocks as usize * geometry.block_bytes() - set_bytes(0)) / WORD_BYTES
}
