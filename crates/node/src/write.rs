//! The pending keys as the next set of the log, and fresh nodes with their first.

use alloc::vec::Vec;

use bcached_format::bset::{self, BsetWriter};
use bcached_format::{Geometry, Key};

use crate::extents::is_hole;
use crate::node::{Node, set_bytes};

/// A set to be written, in one request, at its place in the node.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use = "the node counts the set as written; if it never is, the node's log is broken"]
pub struct SetWrite {
    /// Block of the node at which the set starts.
    pub block: u32,
    /// Whole blocks: the sealed set, then zeros.
    pub bytes: Vec<u8>,
}

impl Node {
    /// Seals what was added since the last set as the next one, and advances the log behind it; `None` if there is
    /// nothing to write. The first set of a fresh node may be empty.
    ///
    /// From here on the node takes the set for written. If the write fails, the node in memory is ahead of its disk
    /// and must not be written again.
    pub fn seal_pending(&mut self) -> Option<SetWrite> {
        if !self.has_pending() {
            return None;
        }
        self.assert_room();
        let keys: Vec<Key> = self.pending_freeing.iter().chain(self.pending.iter()).copied().collect();
        let words = self.pending_words();
        let set = bset::seal(self.place(), self.seq, &keys);
        self.pending.clear();
        self.pending_freeing = Vec::new();
        Some(self.extend_log(set, words))
    }

    /// A sealed set with so many words of keys goes behind the log.
    fn extend_log(&mut self, mut bytes: Vec<u8>, words: usize) -> SetWrite {
        let block = self.written_blocks;
        bytes.resize(self.geometry.whole_blocks(bytes.len()), 0);
        let blocks = bytes.len() / self.geometry.block_bytes();
        self.words_on_disk += words;
        self.written_blocks += u32::try_from(blocks).expect("a set is smaller than its node");
        assert!(self.written_blocks <= self.total_blocks, "the log stays inside the node");
        SetWrite { block, bytes }
    }
}

/// A fresh node whose keys, living ones in order, come in pieces: they are its view and its first set.
pub struct NodeBuilder {
    node: Node,
    set: BsetWriter,
    words: usize,
}

impl NodeBuilder {
    /// A node for `words` words of keys. `own` and `seq`: as of [`Node::create`].
    ///
    /// # Panics
    /// As [`Node::create`]; and if the keys do not fit into the node.
    #[must_use]
    pub fn new(own: Key, level: u8, seq: u64, geometry: &Geometry, words: usize) -> Self {
        let node = Node::create(own, level, seq, geometry);
        assert!(set_bytes(words) <= node.room_bytes(), "a fresh node has room for its keys");
        let set = BsetWriter::new(node.place(), seq, words, geometry.whole_blocks(set_bytes(words)));
        Self { node, set, words }
    }

    /// The keys that come next, as [`Living`](crate::Living) has them.
    ///
    /// # Panics
    /// If they are not in order, in the node's range and alive, or have more words than were told.
    pub fn push(&mut self, keys: &[Key]) {
        assert!(
            keys.last().is_none_or(|last| last.position() <= self.node.position()),
            "the keys lie in the range"
        );
        for key in keys {
            assert!(key.size > 0 && !is_hole(key), "only living keys are kept");
            self.node.view.push(*key);
        }
        self.set.push(keys);
    }

    /// The node, and its first set, which it takes for written: see [`Node::seal_pending`].
    ///
    /// # Panics
    /// If keys are missing.
    pub fn seal(mut self) -> (Node, SetWrite) {
        let first = self.node.extend_log(self.set.seal(), self.words);
        (self.node, first)
    }
}
