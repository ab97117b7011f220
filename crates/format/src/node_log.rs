//! A whole B-tree node: the log of its sets.
//!
//! Old contents of a bucket are not erased, so only the rules here say where the log ends: sets follow each other at
//! block boundaries while their headers carry the first one's sequence number. Behind the end anything may stand,
//! except that number at a header's place: that means a set between was lost.

use crate::bset::{Bset, BsetPlace, BsetReader, seq_at};
use crate::error::{BsetError, NodeError};
use alloc::vec::Vec;

/// A set and where it stands in its node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NodeSet<'a> {
    /// Block of the node at which it starts.
    pub block: u32,
    /// The set.
    pub bset: Bset<'a>,
}

/// The checked sets of a node, oldest first; there is at least one, and only the first may be empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NodeLog<'a> {
    /// The sets.
    pub sets: Vec<NodeSet<'a>>,
    /// Block at which the next set would be written.
    pub end_block: u32,
}

impl<'a> NodeLog<'a> {
    /// The sets of the node that `bytes` hold: as many as the size of the node's key says, and no more.
    ///
    /// # Errors
    /// The first failed check, and the block of the set that it is about.
    ///
    /// # Panics
    /// If `block_bytes` is zero.
    pub fn parse(bytes: &'a [u8], block_bytes: usize, place: BsetPlace) -> Result<Self, NodeError> {
        let mut reader = NodeLogReader::new(bytes, block_bytes, place)?;
        loop {
            if let Some(log) = reader.step(usize::MAX)? {
                return Ok(log);
            }
        }
    }

    /// The random number that marks the node's sets.
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
    place: BsetPlace,
    /// What marks the node's sets.
    seq: u64,
    sets: Vec<NodeSet<'a>>,
    /// Block of the set that is being checked, or where the next would begin.
    block: usize,
    set: Option<BsetReader<'a>>,
    /// Bytes of the sets before it, each twice.
    found: usize,
}

impl<'a> NodeLogReader<'a> {
    /// As [`NodeLog::parse`]; none of the sets is looked at yet.
    ///
    /// # Errors
    /// There is no first set.
    ///
    /// # Panics
    /// If `block_bytes` is zero.
    pub fn new(bytes: &'a [u8], block_bytes: usize, place: BsetPlace) -> Result<Self, NodeError> {
        let bytes = &bytes[..bytes.len() / block_bytes * block_bytes];
        let seq = match seq_at(bytes) {
            None | Some(0) => return Err(NodeError { block: 0, error: BsetError::ZeroSeq }),
            Some(seq) => seq,
        };
        Ok(Self { bytes, block_bytes, place, seq, sets: Vec::new(), block: 0, set: None, found: 0 })
    }

    /// Bytes that have been summed, and those that have been looked through for keys: what the steps have cost.
    #[must_use]
    pub fn found(&self) -> usize {
        self.found + self.set.as_ref().map_or(0, BsetReader::found)
    }

    /// Goes on by the sum of so many bytes, or by the keys in about so many; the log, when all of it is checked.
    ///
    /// # Errors
    /// As [`NodeLog::parse`]. There is nothing to go on with afterwards.
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

    /// All sets are checked. Behind them no header carries their number.
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

/// A node has at most 65535 sectors, so its blocks fit; more bytes than that are a caller's mistake.
fn to_block(block: usize) -> u32 {
    u32::try_from(block).expect("a node has less than 2^32 blocks")
}
