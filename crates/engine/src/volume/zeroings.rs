//! The zeroing requests of a volume that are in progress, for status output.

use bcached_env::Time;
use core::time::Duration;
use slab::Slab;

/// Identifies a zeroing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ZeroingId(usize);

#[derive(Clone, Copy, Debug)]
struct Zeroing {
    began: Time,
    sectors: u64,
    done: u64,
}

/// All zeroings in progress.
#[derive(Default, Debug)]
pub struct Zeroings(Slab<Zeroing>);

/// Progress of a zeroing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ZeroingInfo {
    /// How long it has been in progress.
    pub since: Duration,
    /// Total number of sectors to zero.
    pub sectors: u64,
    /// Sectors zeroed so far.
    pub done: u64,
}

impl Zeroings {
    /// Begins a zeroing of `sectors` sectors.
    pub fn begin(&mut self, now: Time, sectors: u64) -> ZeroingId {
        ZeroingId(self.0.insert(Zeroing { began: now, sectors, done: 0 }))
    }

    /// Adds `sectors` to the progress of a zeroing.
    pub fn goes_on(&mut self, number: ZeroingId, sectors: u64) {
        if let Some(zeroing) = self.0.get_mut(number.0) {
            zeroing.done += sectors;
        }
    }

    /// Ends a zeroing, successful or not.
    pub fn end(&mut self, number: ZeroingId) {
        self.0.try_remove(number.0);
    }

    /// The zeroing that began first.
    #[must_use]
    pub fn oldest(&self, now: Time) -> Option<ZeroingInfo> {
        let (_, first) = self.0.iter().min_by_key(|(_, zeroing)| zeroing.began)?;
        Some(ZeroingInfo { since: now - first.began, sectors: first.sectors, done: first.done })
    }
}
