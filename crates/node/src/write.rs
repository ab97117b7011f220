//! The pending keys as the next set of the log, and fresh nodes with their first.

use alloc::vec::Vec;

use bcached_format::bset::{BsetWriter, set_bytes};
use bcached_format::{Geometry, Key};

use crate::extents::is_hole;
use crate::node::Node;

/// A set to be written, in one request, at its place in the node.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use = "the node counts the set as written; if it never is, the node's log is broken"]
pub struct SetWrite<M> {
    /// Block of the node at which the set starts.
    pub block: u32,
    /// Whole blocks: the sealed set, then zeros.
    pub bytes: M,
}

impl<M> SetWrite<M> {
    /// The same in other memory, or in memory of which something else may be done.
    pub fn map<N>(self, make: impl FnOnce(M) -> N) -> SetWrite<N> {
        SetWrite { block: self.block, bytes: make(self.bytes) }
    }
}

impl Node {
    /// Seals what was added since the last set as the next one, in memory of so many zero bytes that `zeroed` makes, and advances the log behind
    /// it; `None` if there is nothing to write. The first set of a fresh node may be empty.
    ///
    /// From here on the node takes the set for written. If the write fails, the node in memory is ahead of its disk
    /// and must not be written again.
    pub fn seal_pending<M: AsMut<[u8]>>(&mut self, zeroed: impl FnOnce(usize) -> M) -> Option<SetWrite<M>> {
        if !self.has_pending() {
            return None;
        }
        self.assert_room();
        let words = self.pending_words();
        let mut set = BsetWriter::new(self.memory(words, zeroed), self.place(), self.seq, words);
        set.push(&self.pending_freeing);
        self.pending.runs().for_each(|keys| set.push(keys));
        self.pending.clear();
        self.pending_freeing = Vec::new();
        Some(self.extend_log(set.seal(), words))
    }

    /// Blocks that a set with so many words of keys takes.
    pub(crate) fn set_blocks(&self, words: usize) -> usize {
        self.geometry.whole_blocks(set_bytes(words)) / self.geometry.block_bytes()
    }

    /// Memory for that set.
    fn memory<M: AsMut<[u8]>>(&self, words: usize, zeroed: impl FnOnce(usize) -> M) -> M {
        let bytes = self.set_blocks(words) * self.geometry.block_bytes();
        let mut memory = zeroed(bytes);
        assert_eq!(memory.as_mut().len(), bytes, "what is written is what the log counts");
        memory
    }

    /// A sealed set with so many words of keys goes behind the log.
    fn extend_log<M>(&mut self, bytes: M, words: usize) -> SetWrite<M> {
        let block = self.written_blocks;
        let blocks = self.set_blocks(words);
        self.words_on_disk += words;
        self.written_blocks += u32::try_from(blocks).expect("a set is smaller than its node");
        assert!(self.written_blocks <= self.total_blocks, "the log stays inside the node");
        SetWrite { block, bytes }
    }
}

/// A fresh node whose keys, living ones in order, come in pieces: they are its view and its first set.
pub struct NodeBuilder<M> {
    node: Node,
    set: BsetWriter<M>,
    words: usize,
}

impl<M: AsMut<[u8]>> NodeBuilder<M> {
    /// A node for `words` words of keys. `own` and `seq`: as of [`Node::create`]; its set is made in memory of so many zero
    /// bytes that `zeroed` makes.
    ///
    /// # Panics
    /// As [`Node::create`]; and if the keys do not fit into the node.
    #[must_use]
    pub fn new(
        own: Key,
        level: u8,
        seq: u64,
        geometry: &Geometry,
        words: usize,
        zeroed: impl FnOnce(usize) -> M,
    ) -> Self {
        let node = Node::create(own, level, seq, geometry);
        assert!(set_bytes(words) <= node.room_bytes(), "a fresh node has room for its keys");
        let set = BsetWriter::new(node.memory(words, zeroed), node.place(), seq, words);
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
    pub fn seal(mut self) -> (Node, SetWrite<M>) {
        let first = self.node.extend_log(self.set.seal(), self.words);
        (self.node, first)
    }
}
