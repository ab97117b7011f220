//! Writing: seals the pending keys as the next set of the log, and builds fresh nodes with their
//! first set.

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
    /// Converts the bytes to another type.
    pub fn map<N>(self, make: impl FnOnce(M) -> N) -> SetWrite<N> {
        SetWrite { block: self.block, bytes: make(self.bytes) }
    }
}

impl Node {
    /// Seals the pending keys as the next set and advances the log behind it. `zeroed` allocates
    /// the set's memory: that many zero bytes. Returns `None` if there is nothing to write. The
    /// first set of a fresh node may be empty.
    ///
    /// From here on the node considers the set written. If the write fails, the node in memory is
    /// ahead of its disk and must not be written again.
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

    /// Blocks that a set with `words` words of keys takes.
    pub(crate) fn set_blocks(&self, words: usize) -> usize {
        self.geometry.whole_blocks(set_bytes(words)) / self.geometry.block_bytes()
    }

    /// Allocates the memory for that set.
    fn memory<M: AsMut<[u8]>>(&self, words: usize, zeroed: impl FnOnce(usize) -> M) -> M {
        let bytes = self.set_blocks(words) * self.geometry.block_bytes();
        let mut memory = zeroed(bytes);
        assert_eq!(memory.as_mut().len(), bytes, "the buffer is as long as the log counts");
        memory
    }

    /// Adds a sealed set with `words` words of keys to the end of the log.
    fn extend_log<M>(&mut self, bytes: M, words: usize) -> SetWrite<M> {
        let block = self.written_blocks;
        let blocks = self.set_blocks(words);
        self.words_on_disk += words;
        self.written_blocks += u32::try_from(blocks).expect("a set is smaller than its node");
        assert!(self.written_blocks <= self.total_blocks, "the log stays inside the node");
        SetWrite { block, bytes }
    }
}

/// Builds a fresh node from living keys that arrive in order and in pieces. They form its view and
/// its first set.
pub struct NodeBuilder<M> {
    node: Node,
    set: BsetWriter<M>,
    words: usize,
}

impl<M: AsMut<[u8]>> NodeBuilder<M> {
    /// Starts a node for `words` words of keys. `own` and `seq` are as for [`Node::create`].
    /// `zeroed` allocates the set's memory: that many zero bytes.
    ///
    /// # Panics
    /// As [`Node::create`]; also if the keys do not fit into the node.
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

    /// Appends the next keys, in the form in which [`LiveKeys`](crate::LiveKeys) has them.
    ///
    /// # Panics
    /// If they are not in order, in the node's range and alive, or have more words than announced.
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

    /// Returns the node and its first set, which the node considers written: see
    /// [`Node::seal_pending`].
    ///
    /// # Panics
    /// If keys are missing.
    pub fn seal(mut self) -> (Node, SetWrite<M>) {
        let first = self.node.extend_log(self.set.seal(), self.words);
        (self.node, first)
    }
}
