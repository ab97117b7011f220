//! Keeps the ranges of the index that are frozen: their nodes are damaged (the read succeeded, but
//! its bytes make no sense). They were found by the walk of a cache set that is served before it
//! has been walked.
//!
//! What such a node names is unknown, and may be the newest data. So as long as the set is open:
//!
//! - The node is never treated as empty. A request that needs it gets the error; no other request
//!   is affected.
//! - The node is not read again, though the next read might succeed: what it names has not been
//!   counted. The next start tries again.
//! - A volume with a part in the range counts as clean only if its superblock says so
//!   ([`State::is_clean`]).
//! - No bucket that may hold data of the range is reclaimed. Its buckets are known only from their
//!   summaries, so buckets without a summary stay as they are (`BucketUsage::Unknown`).

use crate::btree::Need;
use crate::btree::unreadable::FailedNode;
use crate::error::Error;
use crate::space::reserve;
use crate::state::State;
use alloc::vec::Vec;
use bcached_format::summary::Extent;
use bcached_format::{Inode, Key, Pointer, Position};

/// Most ranges that are kept. A device with more damage than this loses what was written to it.
const RANGES_MAX: usize = 32;

/// The frozen ranges.
#[derive(Default)]
pub struct FrozenRanges {
    ranges: Vec<FailedNode>,
}

impl FrozenRanges {
    /// Returns true if no range is frozen.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns the error of the first range.
    #[must_use]
    pub fn first(&self) -> Option<Error> {
        self.ranges.first().map(|range| range.error.clone())
    }

    /// Iterates over the ranges.
    pub fn iter(&self) -> impl Iterator<Item = &FailedNode> {
        self.ranges.iter()
    }

    /// Returns the error of the node at `pointer`, if it is not to be read.
    #[must_use]
    pub fn error_of(&self, pointer: Pointer) -> Option<Error> {
        self.ranges.iter().find(|range| range.child.pointer() == pointer).map(|range| range.error.clone())
    }

    /// Returns an error if a frozen range may hide data of volume `inode`.
    #[must_use]
    pub fn hides(&self, inode: Inode) -> Option<Error> {
        let may_hold = |range: &&FailedNode| {
            let low = range.low.unwrap_or(Position::ZERO);
            (low.inode..=range.child.key.inode).contains(&inode)
        };
        self.ranges.iter().find(may_hold).map(|range| range.error.clone())
    }

    /// Returns true if no frozen range had data in a bucket to which only `extents` were written.
    #[must_use]
    pub fn is_apart(&self, extents: &[Extent]) -> bool {
        !extents.iter().any(|extent| self.ranges.iter().any(|range| meets(range, extent)))
    }

    /// Returns whether a key overlaps a frozen range.
    #[must_use]
    pub fn holds(&self, key: &Key) -> bool {
        self.ranges.iter().any(|range| overlap(range, key.start_position(), key.position()))
    }

    /// Adds a range.
    ///
    /// # Errors
    /// The error of the range itself, if there are too many.
    pub fn add(&mut self, range: FailedNode) -> Result<(), Error> {
        if self.ranges.len() == RANGES_MAX {
            return Err(range.error);
        }
        self.ranges.push(range);
        Ok(())
    }
}

fn meets(range: &FailedNode, extent: &Extent) -> bool {
    overlap(range, extent.position(), Position { offset: extent.end(), ..extent.position() })
}

/// An extent belongs to a range if it ends after the range's start and begins before its end.
fn overlap(range: &FailedNode, start: Position, end: Position) -> bool {
    range.low.unwrap_or(Position::ZERO) < end && start < range.child.key.position()
}

impl State {
    /// Freezes the damaged node at which the walk has stopped, and moves the walk past it. Returns
    /// false if the node is in memory by now, or another has replaced it. An error means that there
    /// are too many, or that the node contradicts what is known.
    pub(crate) fn freeze(&mut self, error: &Error) -> Result<bool, Error> {
        let low = self.frontier.at();
        let Err(Need::Node(child)) = self.descend(low, 0) else { return Ok(false) };
        if self.nodes.is_loading(child.pointer()) {
            return Ok(false);
        }
        self.pass_by(child)?;
        self.frozen.add(FailedNode { child, low: Some(low), error: error.clone() })?;
        // Its keys in the journal stay there. Any other obstacle for journalled keys is found
        // again.
        self.overlay.tried(None);
        // The next start finds the same damage, and can then be served like this one.
        self.reserve_wanted = self.reserve_wanted.max(reserve::enough(&self.geometry));
        Ok(true)
    }
}
