//! Ranges of the index that nobody comes to any more: their nodes are damaged (bytes came, and they make no sense), and were met by the
//! walk of a set that is served before it has been walked.
//!
//! What such a node names is not known, and may be the newest data. So, as long as the set is open:
//!
//! - it is never read as if it named nothing: who comes to it is told what is the matter, and nobody else is kept from anything;
//! - it is not read again, though its bytes may be sound the next time: what it names has not been counted. The next start asks again;
//! - a volume with a part in it counts as clean only if its superblock says so ([`State::is_clean`]);
//! - no bucket is taken from what it holds that may hold something of it. Its buckets are known only from their summaries, so those without
//!   one stay as they are (`Usage::Unknown`).

use crate::btree::Need;
use crate::btree::unreadable::Kept;
use crate::error::Error;
use crate::space::reserve;
use crate::state::State;
use alloc::vec::Vec;
use bcached_format::summary::Extent;
use bcached_format::{Inode, Key, Pointer, Position};

/// Most ranges that are kept. Who meets more of them has a device that forgets what it was given.
const RANGES_MAX: usize = 32;

/// The ranges.
#[derive(Default)]
pub struct Frozen {
    ranges: Vec<Kept>,
}

impl Frozen {
    /// There are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Why the first of them is.
    #[must_use]
    pub fn first(&self) -> Option<Error> {
        self.ranges.first().map(|range| range.error.clone())
    }

    /// Each of them.
    pub fn iter(&self) -> impl Iterator<Item = &Kept> {
        self.ranges.iter()
    }

    /// Why the node at `pointer` is not to be read, if so.
    #[must_use]
    pub fn error_of(&self, pointer: Pointer) -> Option<Error> {
        self.ranges.iter().find(|range| range.child.pointer() == pointer).map(|range| range.error.clone())
    }

    /// Why nobody knows all that is there of volume `inode`, if so.
    #[must_use]
    pub fn hides(&self, inode: Inode) -> Option<Error> {
        let may_hold = |range: &&Kept| {
            let low = range.low.unwrap_or(Position::ZERO);
            (low.inode..=range.child.key.inode).contains(&inode)
        };
        self.ranges.iter().find(may_hold).map(|range| range.error.clone())
    }

    /// Nothing of the ranges was written to a bucket all of which were `extents`.
    #[must_use]
    pub fn is_apart(&self, extents: &[Extent]) -> bool {
        !extents.iter().any(|extent| self.ranges.iter().any(|range| meets(range, extent)))
    }

    /// Some of a key lies in one of the ranges.
    #[must_use]
    pub fn holds(&self, key: &Key) -> bool {
        self.ranges.iter().any(|range| overlap(range, key.start_position(), key.position()))
    }

    /// One more.
    ///
    /// # Errors
    /// Its own, if there are too many.
    pub fn add(&mut self, range: Kept) -> Result<(), Error> {
        if self.ranges.len() == RANGES_MAX {
            return Err(range.error);
        }
        self.ranges.push(range);
        Ok(())
    }
}

fn meets(range: &Kept, extent: &Extent) -> bool {
    overlap(range, extent.position(), Position { offset: extent.end(), ..extent.position() })
}

/// What ends behind where a range begins, and begins before its end, is of that.
fn overlap(range: &Kept, start: Position, end: Position) -> bool {
    range.low.unwrap_or(Position::ZERO) < end && start < range.child.key.position()
}

impl State {
    /// The node that the walk cannot come to is damaged: the walk goes on behind it. False: it is here by now, or another is in its place. An
    /// error: there are too many, or it contradicts what is known.
    pub(crate) fn freeze(&mut self, error: &Error) -> Result<bool, Error> {
        let low = self.frontier.at();
        let Err(Need::Node(child)) = self.descend(low, 0) else { return Ok(false) };
        if self.nodes.is_loading(child.pointer()) {
            return Ok(false);
        }
        self.pass_by(child)?;
        self.frozen.add(Kept { child, low: Some(low), error: error.clone() })?;
        // Its keys in the journal stay there; what else keeps some is met again.
        self.overlay.tried(None);
        // The next start finds the same, and can be served like this one.
        self.reserve_wanted = self.reserve_wanted.max(reserve::enough(&self.geometry));
        Ok(true)
    }
}
