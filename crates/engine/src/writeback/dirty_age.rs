//! How long data may have been dirty, without a stamp for each key: sweeps come past the whole volume in address order, so
//! what is dirty when one has ended became so after it began. An upper bound, kept in two moments.
//!
//! The format has no room for it, so nobody knows how old that is which a former process has left: it counts as too old, if there
//! is a limit, until a sweep has come past everything.

use alloc::vec::Vec;
use bcached_env::Time;
use core::time::Duration;

/// How long data has been dirty.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum DirtyAge {
    /// For so long, or less.
    AtMost(Duration),
    /// Some of it has been left by a former process.
    Unknown,
}

impl DirtyAge {
    /// Of what is dirty since `since`.
    #[must_use]
    pub fn of(since: Option<Time>, now: Time) -> Self {
        since.map_or(Self::Unknown, |since| Self::AtMost(now.since(since)))
    }

    /// If it is known.
    #[must_use]
    pub const fn known(self) -> Option<Duration> {
        match self {
            Self::AtMost(age) => Some(age),
            Self::Unknown => None,
        }
    }
}

/// The age of a volume's dirty data.
#[derive(Clone, Debug, Default)]
pub struct Age {
    /// Everything dirty became so since; `None`: nothing is.
    since: Option<Time>,
    /// Some of it may have been so before this process began.
    is_inherited: bool,
    sweep_began: Time,
    /// The sweep has passed by something.
    has_gaps: bool,
    /// Sweeps that have ended.
    sweeps: u64,
    /// The last of them had passed by something.
    had_gaps: bool,
    /// What the sweep has left to writes in progress, by where it begins and ends.
    replaced: Vec<(u64, u64)>,
    /// The same of the sweep before.
    replaced_before: Vec<(u64, u64)>,
}

/// More places than requests can be in flight: a sweep that leaves more to writes has passed by something.
const REPLACED_MAX: usize = 4096;

impl Age {
    /// Something is about to become dirty. True if nothing was: a sweep begins, from the start of the volume.
    pub fn dirtied(&mut self, now: Time) -> bool {
        if self.since.is_some() {
            return false;
        }
        self.since = Some(now);
        self.sweep_begins(now);
        true
    }

    /// A former process may have left something dirty. True if nothing was known to be: a sweep begins, from the start of the
    /// volume.
    pub fn inherits(&mut self, now: Time) -> bool {
        let is_first = self.dirtied(now);
        self.is_inherited |= is_first;
        is_first
    }

    /// Nothing is dirty, nor about to become so.
    pub const fn cleaned(&mut self) {
        self.since = None;
        self.is_inherited = false;
    }

    /// A sweep begins anew, from the start of the volume.
    pub fn sweep_begins(&mut self, now: Time) {
        self.sweep_began = now;
        self.has_gaps = false;
        self.replaced_before = core::mem::take(&mut self.replaced);
    }

    /// The sweep leaves something behind that it could not write back.
    pub const fn passes_by(&mut self) {
        self.has_gaps = true;
    }

    /// The sweep leaves `[start, end)` to writes in progress that cover it.
    pub fn leaves_to_writes(&mut self, start: u64, end: u64) {
        if self.replaced.len() < REPLACED_MAX {
            self.replaced.push((start, end));
        } else {
            self.has_gaps = true;
        }
    }

    /// A write to `[start, end)` has failed: what was left to it is older than the sweep.
    pub fn write_failed(&mut self, start: u64, end: u64) {
        let is_hit = |places: &[(u64, u64)]| places.iter().any(|place| place.0 < end && start < place.1);
        self.has_gaps |= is_hit(&self.replaced);
        self.had_gaps |= is_hit(&self.replaced_before);
    }

    /// A sweep has come to the end of the volume, and all that it found is clean; the next begins.
    pub fn sweep_ends(&mut self, now: Time) {
        if !self.has_gaps {
            self.since = self.since.map(|since| since.max(self.sweep_began));
            self.is_inherited = false;
        }
        self.sweeps += 1;
        self.had_gaps = self.has_gaps;
        self.sweep_begins(now);
    }

    /// How many sweeps have ended, and whether the last of them had passed by something.
    #[must_use]
    pub const fn ended(&self) -> (u64, bool) {
        (self.sweeps, self.had_gaps)
    }

    /// Everything dirty became so since; `None`: nobody knows, or nothing is.
    #[must_use]
    pub fn since(&self) -> Option<Time> {
        self.since.filter(|_| !self.is_inherited)
    }

    /// No data has been dirty for longer; `None`: nothing is dirty.
    #[must_use]
    pub fn oldest(&self, now: Time) -> Option<DirtyAge> {
        self.since.map(|_| DirtyAge::of(self.since(), now))
    }

    /// Sectors a second that keep data from growing older than `limit`, if `dirty` sectors are before the sweep:
    /// [`super::rate::UNLIMITED`] if it has. Data may have to wait for two sweeps, so each has half of the time.
    #[must_use]
    pub fn needed(&self, now: Time, dirty: u64, limit: Option<Duration>) -> u64 {
        let (Some(since), Some(limit)) = (self.since, limit) else { return 0 };
        if self.is_inherited {
            return super::rate::UNLIMITED;
        }
        let until = (since + limit).min(self.sweep_began + limit / 2);
        let left = until.since(now).as_nanos();
        if left == 0 {
            return super::rate::UNLIMITED;
        }
        let needed = (u128::from(dirty) * 1_000_000_000).div_ceil(left);
        u64::try_from(needed).unwrap_or(super::rate::UNLIMITED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::writeback::rate::UNLIMITED;

    fn at(seconds: u64) -> Time {
        Time::default() + Duration::from_secs(seconds)
    }

    const fn seconds(count: u64) -> Option<Duration> {
        Some(Duration::from_secs(count))
    }

    const fn at_most(count: u64) -> Option<DirtyAge> {
        Some(DirtyAge::AtMost(Duration::from_secs(count)))
    }

    #[test]
    fn a_sweep_proves_that_what_is_left_came_after_it_began() {
        let mut age = Age::default();
        assert_eq!(age.oldest(at(9)), None);
        assert!(age.dirtied(at(10)));
        assert!(!age.dirtied(at(20)));
        assert_eq!(age.oldest(at(30)), at_most(20));
        age.sweep_ends(at(30));
        assert_eq!(age.oldest(at(30)), at_most(20), "what came at once after the sweep had begun");
        age.sweep_ends(at(50));
        assert_eq!(age.oldest(at(50)), at_most(20), "the second began at 30");
        age.passes_by();
        age.sweep_ends(at(60));
        assert_eq!(age.oldest(at(60)), at_most(30), "it has passed by what may be older");
        age.sweep_ends(at(70));
        assert_eq!(age.oldest(at(70)), at_most(10));
        age.cleaned();
        assert_eq!(age.oldest(at(80)), None);
        assert!(age.dirtied(at(90)));
        assert_eq!(age.oldest(at(91)), at_most(1));
    }

    #[test]
    fn each_sweep_has_half_of_the_time() {
        let mut age = Age::default();
        assert_eq!(age.needed(at(5), 1000, seconds(100)), 0);
        age.dirtied(at(10));
        assert_eq!(age.needed(at(10), 1000, None), 0);
        assert_eq!(age.needed(at(10), 1000, seconds(100)), 20);
        assert_eq!(age.needed(at(50), 1000, seconds(100)), 100);
        assert_eq!(age.needed(at(60), 1000, seconds(100)), UNLIMITED);
        age.sweep_ends(at(60));
        assert_eq!(age.needed(at(60), 1000, seconds(100)), 20, "the second has until 110");
        age.sweep_ends(at(80));
        assert_eq!(age.needed(at(80), 900, seconds(100)), 18, "until 130");
        assert_eq!(age.needed(at(131), 1, seconds(100)), UNLIMITED);
    }

    /// A restart made it young again: with one each ten hours a limit of twelve bounded nothing.
    #[test]
    fn what_a_former_process_has_left_is_too_old_until_a_sweep_has_come_past_everything() {
        let mut age = Age::default();
        age.inherits(at(10));
        assert!(!age.dirtied(at(11)));
        assert_eq!((age.oldest(at(20)), age.since()), (Some(DirtyAge::Unknown), None));
        assert_eq!((age.needed(at(20), 8, None), age.needed(at(20), 8, seconds(100))), (0, UNLIMITED));
        age.passes_by();
        age.sweep_ends(at(30));
        assert_eq!(age.oldest(at(30)), Some(DirtyAge::Unknown), "it has passed by something");
        age.sweep_ends(at(40));
        assert_eq!(age.oldest(at(40)), at_most(10), "the second began at 30");
        age.inherits(at(41));
        assert_eq!(age.oldest(at(41)), at_most(11), "what is dirty by now is of this process");
        age.inherits(at(42));
        age.cleaned();
        assert!(age.dirtied(at(50)));
        assert_eq!(age.oldest(at(50)), at_most(0));
    }
}
