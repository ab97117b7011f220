//! How fast clients may make data dirty in a cache that is nearly full of it.
//!
//! Below the cut-off of write-back lies a band. When writes come to it write-back hurries, sparse buckets are gathered
//! (`gc::moving`), and they are let in at a pace: that at which buckets become free again, and so much more that what is left
//! of the band lasts for half a sweep over all dirty data, since a sweep that begins frees few buckets. Both in proportion to
//! what is left of the band by what is used, so that there is no limit where it begins. So the cache stays somewhere in the
//! band, and its clients have the pace of sorted write-back instead of that of a disk that is written at random places.
//!
//! Nobody waits long for room that does not come: such a write goes past the cache, if there is none, and so do others until
//! some has come.

use crate::request::{Range, Target};
use crate::set::CacheSet;
use crate::state::State;
use bcached_env::Time;
use bcached_format::CacheMode;
use core::time::Duration;

/// The band begins so many percent of the buckets below the cut-off.
const BAND_PERCENT: u64 = 30;
/// No write waits longer.
const WAIT_MAX: Duration = Duration::from_secs(1);
/// How often a write that has had its turn looks whether there is room, if nobody tells it.
const LOOK: Duration = Duration::from_millis(20);
/// Time between two looks at the counters, at least.
const SAMPLE: Duration = Duration::from_millis(100);
/// What was measured so long ago has faded.
const FADES: Duration = Duration::from_secs(2);
/// Sectors a second that write-back is expected to make before it has been seen to: what a disk does at least, asked in order.
const EXPECTED: u64 = 16 << 10;
const SECOND_NS: u128 = 1_000_000_000;

/// The pace at which clients are let in.
#[derive(Clone, Debug, Default)]
pub struct Room {
    /// When the counters were last looked at, and what they were: sectors freed, sectors turned clean.
    sampled: Time,
    seen: [u64; 2],
    /// The same by second, of late.
    rates: [u64; 2],
    /// When the next write may begin.
    next: Time,
    /// Somebody has waited in vain when so much had become free, in sectors: until it is more nobody waits.
    in_vain: Option<u64>,
}

/// What the pace depends on, in sectors.
#[derive(Clone, Copy, Debug)]
struct Level {
    /// Of the band.
    band: u64,
    /// Left of it; 0: the cut-off is reached.
    left: u64,
    dirty: u64,
    /// That have become free, and have turned clean, since the set was opened.
    counters: [u64; 2],
}

impl Room {
    /// Looks at the counters; false if the last look was a moment ago.
    fn sample(&mut self, now: Time, counters: [u64; 2]) -> bool {
        let passed = now.since(self.sampled);
        if passed < SAMPLE {
            return false;
        }
        let weight = passed.min(FADES).as_nanos();
        for (rate, (new, old)) in self.rates.iter_mut().zip(counters.into_iter().zip(self.seen)) {
            let measured = u128::from(new.saturating_sub(old)) * SECOND_NS / passed.as_nanos();
            let mixed =
                (u128::from(*rate) * (FADES.as_nanos() - weight) + measured * weight) / FADES.as_nanos();
            *rate = u64::try_from(mixed).unwrap_or(u64::MAX);
        }
        (self.sampled, self.seen) = (now, counters);
        true
    }

    /// Sectors a second.
    fn rate(&self, level: Level) -> u64 {
        let [freed, cleaned] = self.rates.map(u128::from);
        let [band, left, dirty] = [level.band, level.left, level.dirty].map(u128::from);
        // Half a sweep takes the time in which half of what is dirty is cleaned.
        let lent = 2 * band * cleaned.max(u128::from(EXPECTED)) / dirty.max(1);
        let rate = (freed + lent) * left / (band - left).max(1);
        u64::try_from(rate).unwrap_or(u64::MAX)
    }

    /// When a write of `sectors` may begin.
    fn turn(&mut self, now: Time, sectors: u64, level: Level) -> Time {
        let turn = self.next.max(now);
        if turn < now + WAIT_MAX {
            let takes = u128::from(sectors) * SECOND_NS / u128::from(self.rate(level).max(1));
            let takes = Duration::from_nanos(u64::try_from(takes).unwrap_or(u64::MAX));
            self.next = turn + takes.min(WAIT_MAX);
        }
        turn
    }
}

impl State {
    /// Writes are let in at a pace, or were a moment ago.
    #[must_use]
    pub fn is_short_of_room(&self) -> bool {
        self.room.sampled > Time::default() && self.now < self.room.sampled + FADES
    }

    /// How full the cache is of dirty data, if so much that writes to this volume are slowed down that would add to it.
    fn level(&self, target: &Target) -> Option<Level> {
        let cutoff = self.options.cutoff_writeback;
        let is_slowed =
            target.mode == CacheMode::Writeback && target.bypass.is_none() && target.inode.is_some();
        let is_cleaned = self.volumes.get(target.id).is_some_and(|volume| {
            let options = &volume.options;
            let may_hurry = !options.writeback_quiet && options.writeback_rate_maximum.is_none();
            volume.is_written_back() && may_hurry && !volume.is_bypassed()
        });
        if !is_slowed || !is_cleaned || self.stopping || self.failed.is_some() || cutoff > 100 {
            return None;
        }
        let (count, size) = (self.buckets.count(), self.geometry.bucket_sectors);
        let band = count * BAND_PERCENT.min(cutoff) / 100;
        let left = (count * cutoff / 100).saturating_sub(self.used_buckets());
        (left < band).then(|| Level {
            band: band * size,
            left: left * size,
            dirty: self.dirty.total(),
            counters: [self.buckets.freed() * size, self.stats.written_back_bytes / 512],
        })
    }
}

/// Waits until it is the turn of a write that would make data dirty, or until it need not wait for room any more.
pub async fn wait(set: &CacheSet, target: &Target, range: Range) {
    let begun = set.env().now();
    let Some((turn, is_new)) = set.with(|s| {
        let level = s.level(target)?;
        let is_new = s.room.sample(s.now, level.counters);
        Some((s.room.turn(s.now, range.sectors(), level), is_new))
    }) else {
        return;
    };
    if is_new {
        // They may be resting, and have something to do now.
        set.signals().writeback_work.notify_all();
        set.signals().gc_work.notify_all();
    }
    loop {
        let until = set.with(|s| {
            let level = s.level(target)?;
            let last = begun + WAIT_MAX;
            if s.now >= last {
                s.room.in_vain = Some(level.counters[0]);
            }
            if s.room.in_vain == Some(level.counters[0]) || s.now >= turn && level.left > 0 {
                return None;
            }
            Some(if s.now < turn { turn } else { s.now + LOOK }.min(last))
        });
        let Some(until) = until else { return };
        set.env().wait_until(&set.signals().space, until).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BAND: u64 = 300_000;

    fn level(left: u64, freed: u64, cleaned: u64) -> Level {
        Level { band: BAND, left, dirty: 900_000, counters: [freed, cleaned] }
    }

    /// Writes of `sectors` that begin in a second from `from` on.
    fn admitted(room: &mut Room, from: Time, sectors: u64, level: Level) -> usize {
        (0..1_000_000)
            .take_while(|_| room.turn(from, sectors, level) < from + Duration::from_millis(999))
            .count()
    }

    #[test]
    fn the_pace_is_that_of_room_that_comes_and_sinks_with_what_is_left() {
        let mut room = Room::default();
        let at = |ms: u64| Time(1_000_000_000) + Duration::from_millis(ms);
        for n in 0..100 {
            // 40,000 sectors turn clean in a second, and 20,000 become free.
            room.sample(at(100 * n), [2000 * n, 4000 * n]);
        }
        let rates = [BAND * 9 / 10, BAND / 2, BAND / 4, 0].map(|left| room.rate(level(left, 0, 0)));
        let lent = 2 * 40_000 * BAND / 900_000;
        assert!(
            rates[1].abs_diff(20_000 + lent) < 500,
            "{rates:?}: in the middle as much as comes and is lent"
        );
        assert!(rates[0] > 8 * rates[1] && rates[2].abs_diff(rates[1] / 3) < 100, "{rates:?}");
        assert_eq!(rates[3], 0);
        let begun = at(10_000);
        let level = level(BAND / 2, 200_000, 400_000);
        let admitted = admitted(&mut room, begun, 8, level) as u64 * 8;
        assert!(admitted.abs_diff(rates[1]) < rates[1] / 20, "{admitted} of {}", rates[1]);
    }

    #[test]
    fn before_anything_was_written_back_a_disk_is_expected() {
        let mut room = Room::default();
        room.sample(Time(1_000_000_000), [0, 0]);
        let expected = 2 * EXPECTED * BAND / 900_000;
        assert!(room.rate(level(BAND / 2, 0, 0)).abs_diff(expected) < 10);
    }

    #[test]
    fn nobody_is_put_off_for_longer_than_a_second_or_two() {
        let mut room = Room::default();
        let now = Time(5_000_000_000);
        for _ in 0..1000 {
            let turn = room.turn(now, 1 << 20, level(0, 0, 0));
            assert!(turn.since(now) <= 2 * WAIT_MAX);
        }
    }
}
