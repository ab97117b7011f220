//! Reads a whole B-tree node: the log of its sets.
//!
//! Old contents of a bucket are not erased, so only these rules determine where the log ends:
//!
//! - Sets follow each other at block boundaries as long as their headers carry the sequence number
//!   of the first.
//! - After the end there may be anything, except that number in the place of a header: it means
//!   that a set in between was lost.

use crate::bset::{Bset, BsetReader, NodeIdentity, seq_at};
use crate::error::{BsetError, NodeError};
use alloc::vec::Vec;

/// A set and its place in the node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeSet<'a> {
    /// Block of the node at which it starts.
    pub block: u32,
    /// The set.
    pub bset: Bset<'a>,
}

/// The checked sets of a node, oldest first. There is at least one, and only the first may be
/// empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeLog<'a> {
    /// The sets.
    pub sets: Vec<NodeSet<'a>>,
    /// Block at which the next set will be written.
    pub end_block: u32,
}

impl<'a> NodeLog<'a> {
    /// Parses the sets of the node in `bytes`, which are as long as the size in the node's key.
    ///
    /// # Errors
    /// The first failed check, and the block of the set that failed it.
    ///
    /// # Panics
    /// If `block_bytes` is zero.
    pub fn parse(bytes: &'a [u8], block_bytes: usize, place: NodeIdentity) -> Result<Self, NodeError> {
        let mut reader = NodeLogReader::new(bytes, block_bytes, place)?;
        loop {
            if let Some(log) = reader.step(usize::MAX)? {
                return Ok(log);
            }
        }
    }

    /// Returns the random number that marks the node's sets.
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.sets.first().map_or(0, |set| set.bset.seq)
    }
}

/// Checks a node in pieces.
#[derive(Clone, Debug)]
pub struct NodeLogReader<'a> {
    bytes: &'a [u8],
    block_bytes: usize,
    place: NodeIdentity,
    /// The sequence number that marks the node's sets.
    seq: u64,
    sets: Vec<NodeSet<'a>>,
    /// Block of the set that is being checked, or at which the next one would begin.
    block: usize,
    set: Option<BsetReader<'a>>,
    /// Bytes of the sets before it, counted twice: once for the checksum, once for the keys.
    found: usize,
}

impl<'a> NodeLogReader<'a> {
    /// Starts parsing as [`NodeLog::parse`] does; no set has been checked yet.
    ///
    /// # Errors
    /// There is no first set.
    ///
    /// # Panics
    /// If `block_bytes` is zero.
    pub fn new(bytes: &'a [u8], block_bytes: usize, place: NodeIdentity) -> Result<Self, NodeError> {
        let bytes = &bytes[..bytes.len() / block_bytes * block_bytes];
        let seq = match seq_at(bytes) {
            None | Some(0) => return Err(NodeError { block: 0, error: BsetError::ZeroSeq }),
            Some(seq) => seq,
        };
        Ok(Self { bytes, block_bytes, place, seq, sets: Vec::new(), block: 0, set: None, found: 0 })
    }

    /// Returns the cost of the steps so far: the bytes summed plus the bytes checked for keys.
    #[must_use]
    pub fn found(&self) -> usize {
        self.found + self.set.as_ref().map_or(0, BsetReader::found)
    }

    /// Sums up to `bytes` further bytes, or checks the keys in about as many. Returns the log once
    /// all of it is checked.
    ///
    /// # Errors
    /// As for [`NodeLog::parse`]. After an error the reader must not be used any further.
    pub fn step(&mut self, bytes: usize) -> Result<Option<NodeLog<'a>>, NodeError> {
        let block = to_block(self.block);
        let failed = |error| NodeError { block, error };
        let set = match &mut self.set {
            Some(set) => set,
            None => {
                let rest = self.bytes.get(self.block * self.block_bytes..).unwrap_or_default();
                if seq_at(rest) != Some(self.seq) {
                    return self.finish().map(Some);
                }
                self.set.insert(BsetReader::new(rest, self.place).map_err(failed)?)
            }
        };
        let Some(bset) = set.step(bytes).map_err(failed)? else { return Ok(None) };
        if bset.keys.is_empty() && self.block > 0 {
            return Err(failed(BsetError::Empty));
        }
        self.block += bset.byte_len().div_ceil(self.block_bytes);
        self.found += 2 * bset.byte_len();
        self.sets.push(NodeSet { block, bset });
        self.set = None;
        Ok(None)
    }

    /// Returns the log after all sets are checked, if no header after them carries their sequence
    /// number.
    fn finish(&mut self) -> Result<NodeLog<'a>, NodeError> {
        let end_block = to_block(self.block);
        let mut behind = self.block..self.bytes.len() / self.block_bytes;
        match behind.find(|block| seq_at(&self.bytes[block * self.block_bytes..]) == Some(self.seq)) {
            Some(block) => {
                Err(NodeError { block: to_block(block), error: BsetError::StraySet { end_block } })
            }
            None => Ok(NodeLog { sets: core::mem::take(&mut self.sets), end_block }),
        }
    }
}

/// Converts a block number. A node has at most 65535 sectors, so its blocks fit; a longer buffer is
/// a mistake of the caller.
fn to_block(block: usize) -> u32 {
    u32::try_from(block).expect("a node has less than 2^32 blocks")
}
