//! Extents of a volume that write-back failed to write. Each is retried with exponential back-off
//! from one second to one hour; sweeps skip it until then. A bad sector of a disk takes seconds per
//! try, and all other data is to be written back at full pace.
//!
//! An extent leaves the list when its data was written back or is not dirty any more. If the cache
//! could not read it, it also leaves when its data was replaced. A caller that waits for all of a
//! volume makes every extent due at once. So does the success of a failed extent: an absent device
//! is back.
//!
//! The list is short. Beyond [`PLACES_MAX`] the two nearest extents are merged, with what lies
//! between them; the merged extent waits as long as they do.

use crate::error::Error;
use crate::writeback::dirty_age::DirtyAge;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use bcached_env::Time;
use bcached_format::Key;
use core::time::Duration;

/// Maximum number of extents per volume; some 50 KiB of memory.
pub const PLACES_MAX: usize = 256;
/// Delay of the first retry; it doubles with each further one.
const FIRST: Duration = Duration::from_secs(1);
/// Maximum delay.
const LAST: Duration = Duration::from_secs(3600);

/// One failed extent.
#[derive(Clone, Debug)]
struct FailedExtent {
    end: u64,
    /// Number of tries.
    tries: u32,
    /// Number of tries since it was last made due at once.
    delays: u32,
    due: Time,
    /// All its dirty data became dirty at this time or later; `None`: unknown, which sorts before
    /// any time.
    since: Option<Time>,
    error: Error,
    /// The key that the cache could not read.
    unread: Option<Key>,
    /// It was merged from several.
    is_merged: bool,
}

/// The failed extents of a volume, by their start. Key space.
#[derive(Clone, Debug, Default)]
pub struct FailedExtents {
    by_start: BTreeMap<u64, FailedExtent>,
}

/// The parts of a dirty key that may be written back now.
#[derive(Default)]
pub struct WritableParts {
    /// The parts, and whether each should be written alone, because it has failed before: otherwise
    /// its neighbours would fail with it.
    pub free: Vec<(Key, bool)>,
    /// Why other parts are left out, if some are.
    pub barred: Option<Error>,
}

/// Dirty data that could not be written back at the last try.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct UnwritableData {
    /// Number of ranges.
    pub ranges: u64,
    /// Their total length, in sectors.
    pub sectors: u64,
    /// Number of tries of the first range.
    pub tries: u32,
    /// Time until the first range is retried.
    pub retry_in: Duration,
}

impl FailedExtents {
    /// Returns true if there are no failed extents.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_start.is_empty()
    }

    /// Their total length, in sectors.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.by_start.iter().map(|(start, place)| place.end - start).sum()
    }

    /// Start, end and error of the first extent.
    #[must_use]
    pub fn first(&self) -> Option<(u64, u64, &Error)> {
        self.by_start.iter().next().map(|(start, place)| (*start, place.end, &place.error))
    }

    /// The summary for status output.
    #[must_use]
    pub fn shown(&self, now: Time) -> UnwritableData {
        let first = self.by_start.values().next();
        UnwritableData {
            ranges: self.by_start.len() as u64,
            sectors: self.sectors(),
            tries: first.map_or(0, |place| place.tries),
            retry_in: first.map_or(Duration::ZERO, |place| place.due.since(now)),
        }
    }

    /// Upper bound for the age of their data; `None`: there are none.
    #[must_use]
    pub fn oldest(&self, now: Time) -> Option<DirtyAge> {
        self.by_start.values().map(|place| DirtyAge::of(place.since, now)).max()
    }

    /// The parts of a dirty key that may be tried now.
    pub fn parts(&mut self, key: &Key, now: Time) -> WritableParts {
        if self.is_empty() {
            return WritableParts { free: alloc::vec![(*key, false)], barred: None };
        }
        self.forget_replaced(key);
        let mut parts = WritableParts::default();
        let mut at = key.start();
        for (start, place) in self.overlapping(key.start(), key.end) {
            parts.free.extend(key.cut(at, start).map(|part| (part, false)));
            if place.due > now {
                parts.barred.get_or_insert_with(|| place.error.clone());
            } else {
                parts.free.extend(key.cut(start, place.end).map(|part| (part, !place.is_merged)));
            }
            at = place.end;
        }
        parts.free.extend(key.cut(at, key.end).map(|part| (part, false)));
        parts
    }

    /// Updates the list: in `[start, end)` exactly `keys`, which are in order, are dirty.
    pub fn keep_dirty(&mut self, start: u64, end: u64, keys: &[Key]) {
        if self.is_empty() {
            return;
        }
        let mut at = start;
        for key in keys {
            self.cut(at, key.start());
            at = key.end;
        }
        self.cut(at, end);
    }

    /// Adds `key`, whose data became dirty at `since` or later and could not be written back.
    /// `is_unread`: the data could not even be read, which may be the cache's fault.
    pub fn fails(&mut self, key: &Key, is_unread: bool, now: Time, since: Option<Time>, error: Error) {
        let (start, end) = (key.start(), key.end);
        let (mut tries, mut delays, mut oldest) = (0, 0, since);
        for (_, place) in self.overlapping(start, end) {
            tries = place.tries.max(tries);
            delays = place.delays.max(delays);
            oldest = oldest.min(place.since);
        }
        self.take_out(start, end);
        let place = FailedExtent {
            end,
            tries: tries.saturating_add(1),
            delays: delays.saturating_add(1),
            due: now + delay(delays),
            since: oldest,
            error,
            unread: is_unread.then_some(*key),
            is_merged: false,
        };
        self.by_start.insert(start, place);
        self.bound();
    }

    /// Records that `[start, end)` was written back. If it had failed before, all other extents
    /// become due now.
    pub fn succeeds(&mut self, start: u64, end: u64, now: Time) {
        if self.overlapping(start, end).next().is_none() {
            return;
        }
        self.cut(start, end);
        for place in self.by_start.values_mut() {
            place.due = place.due.min(now);
        }
    }

    /// Makes every extent due now, and restarts its back-off, because a caller waits.
    pub fn retry(&mut self, now: Time) {
        for place in self.by_start.values_mut() {
            (place.due, place.delays) = (now, 0);
        }
    }

    /// Clears the list, because nothing is dirty.
    pub fn clear(&mut self) {
        self.by_start.clear();
    }

    fn overlapping(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, &FailedExtent)> {
        let before = self.by_start.range(..start).next_back().filter(|(_, place)| place.end > start);
        let from = before.map_or(start, |(at, _)| *at).min(end);
        self.by_start.range(from..end).map(|(at, place)| (*at, place))
    }

    /// Removes extents that the cache could not read and that hold other data now, so that they may
    /// be tried.
    fn forget_replaced(&mut self, key: &Key) {
        let is_other = |place: &FailedExtent| {
            let then = place.unread.as_ref()?.cut(key.start(), key.end)?;
            let now = key.cut(then.start(), then.end)?;
            (then.pointers != now.pointers).then_some((then.start(), then.end))
        };
        let replaced: Vec<_> =
            self.overlapping(key.start(), key.end).filter_map(|(_, place)| is_other(place)).collect();
        for (start, end) in replaced {
            self.cut(start, end);
        }
    }

    /// Removes `[start, end)` from the list.
    fn cut(&mut self, start: u64, end: u64) {
        if start < end {
            self.take_out(start, end);
            self.bound();
        }
    }

    /// Like `cut`, but may exceed the maximum by one, when an extent is cut in the middle.
    fn take_out(&mut self, start: u64, end: u64) {
        loop {
            let Some(at) = self.overlapping(start, end).next().map(|(at, _)| at) else { break };
            let place = self.by_start.remove(&at).expect("the extent was just found");
            if place.end > end {
                self.by_start.insert(end, place.clone());
            }
            if at < start {
                self.by_start.insert(at, FailedExtent { end: start, ..place });
            }
        }
    }

    /// Merges neighbours until the maximum is kept.
    fn bound(&mut self) {
        while self.by_start.len() > PLACES_MAX {
            let pairs = self.by_start.iter().zip(self.by_start.iter().skip(1));
            let nearest = pairs.min_by_key(|((_, place), (start, _))| **start - place.end);
            let Some(next) = nearest.map(|(_, (start, _))| *start) else { return };
            let next = self.by_start.remove(&next).expect("the extent was just found");
            let before = self.by_start.range_mut(..next.end).next_back().expect("an extent lies before it").1;
            before.end = next.end;
            before.tries = before.tries.max(next.tries);
            before.delays = before.delays.max(next.delays);
            before.due = before.due.min(next.due);
            before.since = before.since.min(next.since);
            (before.unread, before.is_merged) = (None, true);
        }
    }
}

/// The delay after `waits` previous delays.
fn delay(waits: u32) -> Duration {
    let factor = 1_u32.checked_shl(waits).unwrap_or(u32::MAX);
    FIRST.saturating_mul(factor).min(LAST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_format::{DeviceIndex, Gen, Inode, Pointer, Pointers};

    fn at(seconds: u64) -> Time {
        Time::default() + Duration::from_secs(seconds)
    }

    /// A key whose data is at `sector` of the cache.
    fn key_at(start: u64, end: u64, sector: u64) -> Key {
        let pointers = Pointers::one(Pointer::new(DeviceIndex(0), sector, Gen(0)));
        let size = u16::try_from(end - start).expect("it is short");
        Key { inode: Inode(0), size, dirty: true, end, pointers }
    }

    fn key(start: u64, end: u64) -> Key {
        key_at(start, end, 1000 + start)
    }

    fn fails(places: &mut FailedExtents, start: u64, end: u64, now: u64) {
        places.fails(&key(start, end), false, at(now), Some(at(0)), Error::LostWrites);
    }

    /// The parts of `[start, end)` that may be tried, and whether each is tried alone.
    fn free(places: &mut FailedExtents, start: u64, end: u64, now: u64) -> Vec<(u64, u64, bool)> {
        let parts = places.parts(&key(start, end), at(now));
        parts.free.iter().map(|(part, alone)| (part.start(), part.end, *alone)).collect()
    }

    #[test]
    fn a_place_is_left_out_for_twice_as_long_each_time() {
        let mut places = FailedExtents::default();
        assert_eq!(free(&mut places, 0, 100, 0), [(0, 100, false)]);
        let (mut now, mut waits) = (0, Vec::new());
        for _ in 0..14 {
            fails(&mut places, 40, 48, now);
            let wait = (0..).find(|wait| free(&mut places, 0, 100, now + wait).len() == 3);
            waits.extend(wait);
            now += wait.unwrap_or(0);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3600, 3600]);
        assert_eq!(free(&mut places, 0, 100, now), [(0, 40, false), (40, 48, true), (48, 100, false)]);
        assert_eq!(free(&mut places, 0, 100, now - 1), [(0, 40, false), (48, 100, false)]);
        assert_eq!(places.shown(at(now)).tries, 14);
        places.retry(at(now - 1));
        assert_eq!(free(&mut places, 0, 100, now - 1).len(), 3, "somebody waits for it");
        fails(&mut places, 40, 48, now);
        let shown = places.shown(at(now));
        assert_eq!((shown.tries, shown.retry_in), (15, FIRST), "and goes on to");
    }

    #[test]
    fn a_place_leaves_when_its_data_does() {
        let mut places = FailedExtents::default();
        fails(&mut places, 40, 48, 0);
        fails(&mut places, 80, 88, 0);
        places.keep_dirty(0, 60, &[key(30, 44)]);
        assert_eq!(free(&mut places, 30, 100, 0), [(30, 40, false), (44, 80, false), (88, 100, false)]);
        assert_eq!((places.shown(at(0)).ranges, places.sectors()), (2, 12));
        fails(&mut places, 80, 88, 1);
        places.succeeds(200, 208, at(1));
        assert_eq!(places.shown(at(1)).ranges, 2, "that was no such place");
        places.succeeds(40, 44, at(1));
        assert_eq!(free(&mut places, 80, 88, 1), [(80, 88, true)], "one has come round: the others are due");
        places.succeeds(80, 88, at(1));
        assert!(places.is_empty());
    }

    #[test]
    fn other_data_may_be_read_where_some_could_not() {
        let mut places = FailedExtents::default();
        places.fails(&key_at(40, 48, 5000), true, at(0), Some(at(0)), Error::LostWrites);
        let parts = places.parts(&key_at(32, 48, 4992), at(0));
        assert_eq!(
            (parts.free.len(), parts.barred),
            (1, Some(Error::LostWrites)),
            "the same data in a longer key"
        );
        let parts = places.parts(&key_at(44, 48, 9000), at(0));
        assert_eq!((parts.free.len(), parts.barred), (1, None));
        assert_eq!(places.sectors(), 4, "the other half is what it was");
    }

    #[test]
    fn the_nearest_become_one_when_there_are_too_many() {
        let mut places = FailedExtents::default();
        for n in 0..PLACES_MAX as u64 {
            fails(&mut places, 100 * n, 100 * n + 8, 10 + n);
        }
        assert_eq!(places.shown(at(0)).ranges, PLACES_MAX as u64);
        fails(&mut places, 516, 524, 5);
        assert_eq!(places.shown(at(0)).ranges, PLACES_MAX as u64);
        assert_eq!(free(&mut places, 490, 600, 5), [(490, 500, false), (524, 600, false)]);
        assert_eq!(
            free(&mut places, 500, 524, 6),
            [(500, 524, false)],
            "due with the first, and not each alone"
        );
        for n in 0..100_000 {
            fails(&mut places, 40_000 + 16 * n, 40_000 + 16 * n + 8, 5);
        }
        assert_eq!(places.shown(at(0)).ranges, PLACES_MAX as u64);
        assert_eq!(places.parts(&key(39_000, 39_008), at(0)).barred, None, "what lies far from all is free");
    }

    #[test]
    fn what_is_there_may_be_as_old_as_it_was_when_it_failed_first() {
        let mut places = FailedExtents::default();
        assert_eq!(places.oldest(at(0)), None);
        places.fails(&key(40, 48), false, at(9), Some(at(5)), Error::LostWrites);
        places.fails(&key(40, 48), false, at(19), Some(at(15)), Error::LostWrites);
        assert_eq!(places.oldest(at(25)), Some(DirtyAge::AtMost(Duration::from_secs(20))));
        places.fails(&key(60, 68), false, at(19), None, Error::LostWrites);
        assert_eq!(places.oldest(at(25)), Some(DirtyAge::Unknown));
    }
}
