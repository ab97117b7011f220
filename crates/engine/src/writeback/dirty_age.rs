//! Bounds how long data may have been dirty, without a timestamp for each key. Sweeps pass the
//! whole volume in address order, so what is dirty when a sweep has ended became dirty after it
//! began. The upper bound takes two timestamps.
//!
//! The format has no room for the age, so the age of dirty data left by a former process is
//! unknown. If there is a limit, such data counts as too old until a sweep has passed everything.

use alloc::vec::Vec;
use bcached_env::Time;
use core::time::Duration;

/// How long data has been dirty.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum DirtyAge {
    /// At most this long.
    AtMost(Duration),
    /// Some of it was left by a former process.
    Unknown,
}

impl DirtyAge {
    /// The age of data that became dirty at `since`; `None`: unknown.
    #[must_use]
    pub fn of(since: Option<Time>, now: Time) -> Self {
        since.map_or(Self::Unknown, |since| Self::AtMost(now.since(since)))
    }

    /// The age, if known.
    #[must_use]
    pub const fn known(self) -> Option<Duration> {
        match self {
            Self::AtMost(age) => Some(age),
            Self::Unknown => None,
        }
    }
}

/// The age of the dirty data of a volume.
#[derive(Clone, Debug, Default)]
pub struct DirtyAgeTracker {
    /// All dirty data became dirty at this time or later; `None`: nothing is dirty.
    since: Option<Time>,
    /// Some of it may have been dirty before this process began.
    is_inherited: bool,
    sweep_began: Time,
    /// The sweep has skipped something.
    has_gaps: bool,
    /// Number of sweeps that have ended.
    sweeps: u64,
    /// The last of them had skipped something.
    had_gaps: bool,
    /// Ranges that the sweep has left to writes in progress: start and end.
    replaced: Vec<(u64, u64)>,
    /// The same for the previous sweep.
    replaced_before: Vec<(u64, u64)>,
}

/// More ranges than there can be requests in flight: a sweep that leaves more to writes has skipped
/// something.
const REPLACED_MAX: usize = 4096;

impl DirtyAgeTracker {
    /// Records that something is about to become dirty. Returns true if nothing was dirty: then a
    /// sweep begins at the start of the volume.
    pub fn dirtied(&mut self, now: Time) -> bool {
        if self.since.is_some() {
            return false;
        }
        self.since = Some(now);
        self.sweep_begins(now);
        true
    }

    /// Records that a former process may have left dirty data. Returns true if nothing was known to
    /// be dirty: then a sweep begins at the start of the volume.
    pub fn inherits(&mut self, now: Time) -> bool {
        let is_first = self.dirtied(now);
        self.is_inherited |= is_first;
        is_first
    }

    /// Records that nothing is dirty, and nothing is about to become dirty.
    pub const fn cleaned(&mut self) {
        self.since = None;
        self.is_inherited = false;
    }

    /// Begins a new sweep at the start of the volume.
    pub fn sweep_begins(&mut self, now: Time) {
        self.sweep_began = now;
        self.has_gaps = false;
        self.replaced_before = core::mem::take(&mut self.replaced);
    }

    /// Records that the sweep skips something that it could not write back.
    pub const fn passes_by(&mut self) {
        self.has_gaps = true;
    }

    /// Records that the sweep leaves `[start, end)` to writes in progress that cover it.
    pub fn leaves_to_writes(&mut self, start: u64, end: u64) {
        if self.replaced.len() < REPLACED_MAX {
            self.replaced.push((start, end));
        } else {
            self.has_gaps = true;
        }
    }

    /// Records that a write to `[start, end)` has failed: data left to it is older than the sweep.
    pub fn write_failed(&mut self, start: u64, end: u64) {
        let is_hit = |places: &[(u64, u64)]| places.iter().any(|place| place.0 < end && start < place.1);
        self.has_gaps |= is_hit(&self.replaced);
        self.had_gaps |= is_hit(&self.replaced_before);
    }

    /// Ends a sweep at the end of the volume: all that it found is clean. The next one begins.
    pub fn sweep_ends(&mut self, now: Time) {
        if !self.has_gaps {
            self.since = self.since.map(|since| since.max(self.sweep_began));
            self.is_inherited = false;
        }
        self.sweeps += 1;
        self.had_gaps = self.has_gaps;
        self.sweep_begins(now);
    }

    /// The number of sweeps that have ended, and whether the last of them had skipped something.
    #[must_use]
    pub const fn ended(&self) -> (u64, bool) {
        (self.sweeps, self.had_gaps)
    }

    /// All dirty data became dirty at this time or later; `None`: unknown, or nothing is dirty.
    #[must_use]
    pub fn since(&self) -> Option<Time> {
        self.since.filter(|_| !self.is_inherited)
    }

    /// Upper bound for the age of dirty data; `None`: nothing is dirty.
    #[must_use]
    pub fn oldest(&self, now: Time) -> Option<DirtyAge> {
        self.since.map(|_| DirtyAge::of(self.since(), now))
    }

    /// The rate in sectors per second that keeps data from growing older than `limit`, with `dirty`
    /// sectors ahead of the sweep: [`super::rate::UNLIMITED`] if the time is up, or the age is
    /// unknown. Data may have to wait for two sweeps, so each has half of the time.
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
        let mut age = DirtyAgeTracker::default();
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
        let mut age = DirtyAgeTracker::default();
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

    /// Regression: a restart made the age zero, so that with a restart every ten hours a limit of
    /// twelve had no effect.
    #[test]
    fn what_a_former_process_has_left_is_too_old_until_a_sweep_has_come_past_everything() {
        let mut age = DirtyAgeTracker::default();
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
