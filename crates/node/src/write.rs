//! The pending keys as the next set of the log.

use alloc::vec::Vec;

use bcached_format::Key;
use bcached_format::bset;

use crate::node::Node;

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
        let block = self.written_blocks;
        let mut bytes = bset::seal(self.place(), self.seq, &keys);
        bytes.resize(self.geometry.whole_blocks(bytes.len()), 0);
        let blocks = bytes.len() / self.geometry.block_bytes();
        self.words_on_disk += self.pending_words();
        self.written_blocks += u32::try_from(blocks).expect("a set is smaller than its node");
        assert!(self.written_blocks <= self.total_blocks, "the log stays inside the node");
        self.pending.clear();
        self.pending_freeing = Vec::new();
        Some(SetWrite { block, bytes })
    }
}
