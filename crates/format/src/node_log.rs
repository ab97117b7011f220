//! A whole B-tree node: the log of its sets.
//!
//! Old contents of a bucket are not erased, so only the rules here say where the log ends: sets follow each other at
//! block boundaries while their headers carry the first one's sequence number. Behind the end anything may stand,
//! except that number at a header's place: that means a set between was lost.

use crate::bset::{Bset, BsetPlace, seq_at};
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
        let blocks = bytes.len() / block_bytes;
        let bytes = &bytes[..blocks * block_bytes];
        let seq = match seq_at(bytes) {
            None | Some(0) => return Err(NodeError { block: 0, error: BsetError::ZeroSeq }),
            Some(seq) => seq,
        };
        let mut sets = Vec::new();
        let mut next = 0;
        while let Some(rest) = bytes.get(next * block_bytes..) {
            if seq_at(rest) != Some(seq) {
                break;
            }
            let block = to_block(next);
            let bset = Bset::parse(rest, place).map_err(|error| NodeError { block, error })?;
            if bset.keys.is_empty() && next > 0 {
                return Err(NodeError { block, error: BsetError::Empty });
            }
            next += bset.byte_len().div_ceil(block_bytes);
            sets.push(NodeSet { block, bset });
        }
        let end_block = to_block(next);
        let stray = (next..blocks).find(|block| seq_at(&bytes[block * block_bytes..]) == Some(seq));
        match stray {
            Some(block) => {
                Err(NodeError { block: to_block(block), error: BsetError::StraySet { end_block } })
            }
            None => Ok(Self { sets, end_block }),
        }
    }

    /// The random number that marks the node's sets.
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.sets.first().map_or(0, |set| set.bset.seq)
    }
}

/// A node has at most 65535 sectors, so its blocks fit; more bytes than that are a caller's mistake.
fn to_block(block: usize) -> u32 {
    u32::try_from(block).expect("a node has less than 2^32 blocks")
}
