//! The zeroings of a volume that are under way, for those who look.

use bcached_env::Time;
use core::time::Duration;
use slab::Slab;

/// Names one of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Number(usize);

#[derive(Clone, Copy, Debug)]
struct Zeroing {
    began: Time,
    sectors: u64,
    done: u64,
}

/// All of them.
#[derive(Default, Debug)]
pub struct Zeroings(Slab<Zeroing>);

/// How far a zeroing has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ZeroingInfo {
    /// It has gone on for so long.
    pub since: Duration,
    /// It zeroes so many sectors,
    pub sectors: u64,
    /// and has zeroed these.
    pub done: u64,
}

impl Zeroings {
    /// One of so many sectors begins.
    pub fn begin(&mut self, now: Time, sectors: u64) -> Number {
        Number(self.0.insert(Zeroing { began: now, sectors, done: 0 }))
    }

    /// It has zeroed so many sectors more.
    pub fn goes_on(&mut self, number: Number, sectors: u64) {
        if let Some(zeroing) = self.0.get_mut(number.0) {
            zeroing.done += sectors;
        }
    }

    /// It has ended, well or not.
    pub fn end(&mut self, number: Number) {
        self.0.try_remove(number.0);
    }

    /// The one that began first.
    #[must_use]
    pub fn oldest(&self, now: Time) -> Option<ZeroingInfo> {
        let (_, first) = self.0.iter().min_by_key(|(_, zeroing)| zeroing.began)?;
        Some(ZeroingInfo { since: now - first.began, sectors: first.sectors, done: first.done })
    }
}
