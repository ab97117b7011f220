//! Keeps the nodes that could not be read, so that the status can name what cannot be served. An
//! unreadable node at start-up fails the start. This is for nodes found later, while the rest of
//! the set is served.
//!
//! Only a few are kept, because a device that fails completely would fill the memory with them; the
//! counter still counts all. A node that can be read again is removed: the fault was transient.

use crate::btree::NodeRef;
use crate::error::Error;
use crate::state::State;
use crate::volume::{Volume, VolumeId};
use alloc::vec::Vec;
use bcached_format::{Pointer, Position};

/// Most nodes that are kept.
const KEPT_MAX: usize = 8;

/// A node whose last read failed.
#[derive(Clone, Debug, PartialEq)]
pub struct UnreadableNode {
    /// Its bucket on the cache device.
    pub bucket: u64,
    /// Its first sector there.
    pub sector: u64,
    /// Its level; 0 is a leaf.
    pub level: u8,
    /// The parts of served volumes that it indexes, as far as is known.
    pub covers: Vec<VolumeRange>,
    /// The error of the read.
    pub error: Error,
}

/// A range of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeRange {
    /// The volume.
    pub volume: VolumeId,
    /// First sector of it.
    pub start: u64,
    /// End, exclusive.
    pub end: u64,
}

/// The unreadable nodes that are kept.
#[derive(Default)]
pub struct UnreadableNodes {
    kept: Vec<FailedNode>,
}

/// One of them.
pub struct FailedNode {
    /// As its parent names it.
    pub child: NodeRef,
    /// Where its range begins, if the nodes above it show that.
    pub low: Option<Position>,
    /// The error of the read.
    pub error: Error,
}

impl UnreadableNodes {
    /// Removes a node that has been read, or is no longer in the tree.
    pub fn forget(&mut self, pointer: Pointer) {
        self.kept.retain(|kept| kept.child.pointer() != pointer);
    }
}

impl State {
    /// Records that a node could not be read.
    pub fn meets_unreadable(&mut self, child: NodeRef, error: &Error) {
        self.stats.node_read_failures += 1;
        self.unreadable.forget(child.pointer());
        if self.unreadable.kept.len() < KEPT_MAX {
            let low = self.low_of(child);
            self.unreadable.kept.push(FailedNode { child, low, error: error.clone() });
        }
    }

    /// Returns the nodes that are kept.
    pub fn unreadable_nodes(&self) -> Vec<UnreadableNode> {
        let is_other = |kept: &&FailedNode| self.frozen.error_of(kept.child.pointer()).is_none();
        let all = self.frozen.iter().chain(self.unreadable.kept.iter().filter(is_other));
        let described = all.map(|kept| {
            let sector = kept.child.pointer().sector();
            let covers = |(id, volume): (VolumeId, &Volume)| {
                let (start, end) = part_of(volume, kept.low?, kept.child.key.position())?;
                Some(VolumeRange { volume: id, start, end })
            };
            UnreadableNode {
                bucket: sector / self.geometry.bucket_sectors,
                sector,
                level: kept.child.level,
                covers: self.volumes.iter().filter_map(covers).collect(),
                error: kept.error.clone(),
            }
        });
        described.collect()
    }

    /// Returns where the range of `child` begins: where that of its left neighbour ends, or else
    /// that of the nearest node above that has one. `None` if a node above is not in memory, or the
    /// tree has changed meanwhile.
    fn low_of(&mut self, child: NodeRef) -> Option<Position> {
        let (mut at, mut low) = (self.root, Position::ZERO);
        while at.level > child.level {
            let slot = self.nodes.find(at.pointer())?;
            let node = self.nodes.get(slot).node();
            self.work.pass(node.len());
            let mut right = node.children().skip_while(|key| key.position() < child.key.position());
            let key = *right.next()?;
            let left = node.children().take_while(|left| left.position() < key.position()).last();
            low = left.map_or(low, bcached_format::Key::position);
            at = NodeRef { key, level: at.level - 1 };
        }
        (at.pointer() == child.pointer()).then_some(low)
    }
}

/// Returns the sectors of `volume` whose keys lie between `low` and `high`, if there are any.
fn part_of(volume: &Volume, low: Position, high: Position) -> Option<(u64, u64)> {
    let inode = volume.inode?;
    let limit = volume.data_offset + volume.sectors;
    let from = if low.inode < inode { 0 } else { low.offset };
    let to = if high.inode > inode { limit } else { high.offset };
    let (start, end) = (from.max(volume.data_offset), to.min(limit));
    let is_there = low.inode <= inode && high.inode >= inode && start < end;
    is_there.then(|| (start - volume.data_offset, end - volume.data_offset))
}
