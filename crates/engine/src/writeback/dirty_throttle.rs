//! Throttles how fast clients may make data dirty in a cache that is nearly full of dirty data.
//!
//! Below the write-back cut-off lies a band. When dirty data reaches it, write-back hurries, sparse
//! buckets are merged (`gc::moving`), and writes are admitted at the pace at which write-back makes
//! data clean. The pace is somewhat higher while much of the band is left, and somewhat lower when
//! little is. So the amount of dirty data stays about constant, within the band. (A sweep frees few
//! buckets at first, and then many: the band has to last until sparse ones can be merged.) So
//! clients get the pace of sorted write-back instead of that of a disk with random writes.
//!
//! Nor does their pace drop abruptly. Above the band it falls by a fraction of itself each second,
//! early enough to be down in time.
//!
//! No write waits long for space that does not become free. Such a write bypasses the cache if
//! there is no space, and so do others until some has become free.

use crate::request::{SectorRange, Target};
use crate::set::CacheSet;
use crate::state::State;
use bcached_env::Time;
use bcached_format::CacheMode;
use core::time::Duration;

/// The band begins this many percent of the buckets below the cut-off.
const BAND_PERCENT: u64 = 25;
/// Maximum wait of a write.
const WAIT_MAX: Duration = Duration::from_secs(1);
/// How often a write whose turn has come checks for space, without a notification.
const LOOK: Duration = Duration::from_millis(20);
/// Minimum time between two samples of the counters.
const SAMPLE: Duration = Duration::from_millis(100);
/// Older measurements have no weight any more.
const FADES: Duration = Duration::from_secs(2);
/// Expected pace of write-back, in sectors per second, before it has been measured: the least that
/// a disk achieves with ordered requests.
const EXPECTED: u64 = 16 << 10;
/// Milliseconds in which the pace falls to a third, if there is space for it.
const SINKS_MS: u64 = 4000;
/// Space that scattered dirty data takes once sparse buckets have been emptied, in percent of its
/// size. Random overwrites lead to 139 percent when half-full buckets are emptied, as they are
/// while there is space.
const GATHERED_PERCENT: u64 = 150;
/// In the last 1/`LAST_PART` of the band the pace falls to zero.
const LAST_PART: u64 = 4;
/// Maximum assumed ratio of admitted writes to newly dirty data, in percent; the rest overwrites
/// dirty data.
const REWRITES_MAX: u64 = 400;
const SECOND_NS: u128 = 1_000_000_000;

/// The pace at which client writes are admitted.
#[derive(Clone, Debug, Default)]
pub struct DirtyThrottle {
    /// Sectors admitted since the set was opened.
    admitted: u64,
    /// When the counters were last sampled, and their values: sectors admitted, made clean, made
    /// dirty.
    sampled: Time,
    seen: [u64; 3],
    /// The recent rates of the same, per second.
    rates: [u64; 3],
    /// The limit in sectors per second, while there is one.
    pace: Option<u64>,
    /// Milliseconds in which the pace falls to a third.
    sinks_ms: u64,
    /// When a limit was last in force.
    limited: Option<Time>,
    /// When the next write may begin.
    next: Time,
    /// A write has waited in vain when this many sectors had become free: no write waits until
    /// there are more.
    in_vain: Option<u64>,
}

/// What the pace depends on, in sectors.
#[derive(Clone, Copy, Debug)]
struct FillLevel {
    /// Space up to the cut-off.
    whole: u64,
    /// Size of the band.
    band: u64,
    /// Space left up to the cut-off; 0: the cut-off is reached.
    left: u64,
    /// Space that would be left if sparse buckets were emptied; `None` if moving cannot do that, or
    /// does not keep up.
    gathered_left: Option<u64>,
    /// `left` is `gathered_left`.
    is_scattered: bool,
    /// Dirty sectors.
    dirty: u64,
    /// Sectors that have turned clean since the set was opened.
    cleaned: u64,
    /// Sectors that have become free since then.
    freed: u64,
}

impl FillLevel {
    /// The space left at which the pace has fallen to the sustainable one.
    const fn landing(&self) -> u64 {
        self.band / 4 * 3
    }

    /// The space left until then.
    fn above(&self) -> u128 {
        u128::from(self.left.saturating_sub(self.landing()))
    }
}

impl DirtyThrottle {
    /// Samples the counters and updates the pace. Returns false if the last sample is too recent.
    fn sample(&mut self, now: Time, level: FillLevel) -> bool {
        let passed = now.since(self.sampled);
        if passed < SAMPLE {
            return false;
        }
        let counters = [self.admitted, level.cleaned, level.dirty + level.cleaned];
        let weight = passed.min(FADES).as_nanos();
        let mut newest = [0; 3];
        for (index, (new, old)) in counters.into_iter().zip(self.seen).enumerate() {
            let measured = u128::from(new.saturating_sub(old)) * SECOND_NS / passed.as_nanos();
            let kept = u128::from(self.rates[index]) * (FADES.as_nanos() - weight);
            newest[index] = u64::try_from(measured).unwrap_or(u64::MAX);
            self.rates[index] =
                u64::try_from((kept + measured * weight) / FADES.as_nanos()).unwrap_or(u64::MAX);
        }
        (self.sampled, self.seen) = (now, counters);
        let [admitted, _, dirtied] = core::array::from_fn(|of| newest[of].max(self.rates[of]));
        // Space that moving can make is used up by newly dirty data, not by overwrites of dirty
        // data. So overwrites never take more buckets than the dirty data takes once it is
        // gathered. If these are enough, it does not matter how fast overwrites use up the others
        // before a pass finds what became free.
        self.pace = match level.gathered_left {
            Some(left) if self.lasts(FillLevel { left, ..level }, dirtied) => None,
            _ => self.limit(level, if level.is_scattered { dirtied } else { admitted }),
        };
        if self.pace.is_some() {
            self.limited = Some(now);
        }
        true
    }

    /// The pace from now on; `None` if there is enough space to do without. Space is used up at
    /// `rate` sectors per second.
    fn limit(&mut self, level: FillLevel, rate: u64) -> Option<u64> {
        if self.lasts(level, rate) {
            return None;
        }
        self.sinks_ms = self.sinks_ms(level, rate);
        // A pace proportional to the remaining distance falls by the same fraction of itself each
        // second.
        let sinking = u64::try_from(1000 * level.above() / u128::from(self.sinks_ms)).unwrap_or(u64::MAX);
        Some(sinking.max(self.lasting(level)))
    }

    /// Returns true if there is enough space to do without a limit while it is used up at `rate`
    /// sectors per second.
    fn lasts(&self, level: FillLevel, rate: u64) -> bool {
        // Hysteresis: the limit ends later than it begins.
        let ahead = if self.pace.is_some() { 2 } else { 1 };
        1000 * level.above() > ahead * u128::from(rate) * u128::from(self.sinks_ms(level, rate))
    }

    /// Milliseconds in which the pace falls to a third, as chosen when the limit began.
    fn sinks_ms(&self, level: FillLevel, rate: u64) -> u64 {
        if self.pace.is_some() && self.sinks_ms > 0 {
            return self.sinks_ms;
        }
        // Use at most half of the space above the landing level.
        let most = 1000 * level.whole.saturating_sub(level.landing()) / 2;
        SINKS_MS.min(most / rate.max(1)).max(1)
    }

    /// The sustainable pace, at which the amount of dirty data stays at a level within the band, in
    /// sectors per second.
    fn lasting(&self, level: FillLevel) -> u64 {
        let [admitted, cleaned, dirtied] = self.rates.map(u128::from);
        let rewrites = (100 * admitted / dirtied.max(1)).clamp(100, u128::from(REWRITES_MAX));
        let sustained = cleaned.max(u128::from(EXPECTED)) * rewrites / 100;
        let [band, left] = [level.band.max(1), level.left.min(level.band)].map(u128::from);
        let last = band.div_ceil(u128::from(LAST_PART));
        let lasting = sustained * (7 * band + 6 * left) / (8 * band) * left.min(last) / last;
        u64::try_from(lasting).unwrap_or(u64::MAX)
    }

    /// Counts a write of `sectors` that was admitted at once.
    pub const fn admit(&mut self, sectors: u64) {
        self.admitted += sectors;
    }

    /// When a write of `sectors` may begin; `None` if there is no limit now.
    fn turn(&mut self, now: Time, sectors: u64, level: FillLevel) -> Option<Time> {
        self.admitted += sectors;
        if level.left <= level.landing() {
            // A small cache is full before the counters are sampled again.
            self.pace = Some(self.lasting(level));
            self.limited = Some(now);
        }
        let pace = self.pace?;
        let turn = self.next.max(now);
        if turn < now + WAIT_MAX {
            let takes = u128::from(sectors) * SECOND_NS / u128::from(pace.max(1));
            let takes = Duration::from_nanos(u64::try_from(takes).unwrap_or(u64::MAX));
            self.next = turn + takes.min(WAIT_MAX);
        }
        Some(turn)
    }
}

impl State {
    /// Returns true if writes are admitted at a limited pace, or were a moment ago.
    #[must_use]
    pub fn is_short_of_room(&self) -> bool {
        self.dirty_throttle.limited.is_some_and(|limited| self.now < limited + FADES)
    }

    /// How full of dirty data a bucket may be that is emptied, in percent. It rises as the space
    /// falls that has to last until write-back makes more. Up to 50 percent, two such buckets fill
    /// one.
    #[must_use]
    pub fn sparse_percent(&self) -> u64 {
        let ([_, band, left], ..) = self.room();
        if self.is_short_of_room() { 50 + 30 * band.saturating_sub(left) / band.max(1) } else { 50 }
    }

    /// Returns whether a write can be admitted without waiting or sampling: `Some(true)` if it must
    /// be counted with `admit`, `Some(false)` if it is not throttled at all. `None`: call [`wait`].
    pub(crate) fn lets_in_at_once(&self, target: &Target) -> Option<bool> {
        let Some(level) = self.level(target) else { return Some(false) };
        let has_room = self.dirty_throttle.pace.is_none() && level.left > level.landing();
        (has_room && self.now.since(self.dirty_throttle.sampled) < SAMPLE).then_some(true)
    }

    /// Returns the number of buckets up to the cut-off, in the band, and left up to the cut-off;
    /// the number that would be left if sparse buckets were emptied, where moving can do so and
    /// keeps up; and whether the latter counts, because dirty data occupies more buckets than it
    /// would then.
    fn room(&self) -> ([u64; 3], Option<u64>, bool) {
        let (count, cutoff) = (self.buckets.count(), self.options.cutoff_writeback);
        let whole = count * cutoff / 100;
        let used = self.used_buckets();
        let gathered = (self.dirty.total() * GATHERED_PERCENT / 100).div_ceil(self.geometry.bucket_sectors);
        let gathered_left = (!self.presses()).then_some(whole.saturating_sub(gathered));
        let is_scattered = gathered < used && gathered_left.is_some();
        let taken = if is_scattered { gathered } else { used };
        let band = count * BAND_PERCENT.min(cutoff) / 100;
        ([whole, band, whole.saturating_sub(taken)], gathered_left, is_scattered)
    }

    /// The fill level of the cache; `None` if writes to this volume that make data dirty are not
    /// throttled.
    fn level(&self, target: &Target) -> Option<FillLevel> {
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
        let size = self.geometry.bucket_sectors;
        let (room, gathered_left, is_scattered) = self.room();
        let [whole, band, left] = room.map(|buckets| buckets * size);
        Some(FillLevel {
            whole,
            band,
            left,
            gathered_left: gathered_left.map(|buckets| buckets * size),
            is_scattered,
            dirty: self.dirty.total(),
            cleaned: self.stats.written_back_bytes / 512,
            freed: self.buckets.freed() * size,
        })
    }
}

/// Waits until a write that would make data dirty has its turn, or need not wait for space any
/// more.
pub async fn wait(set: &CacheSet, target: &Target, range: SectorRange) {
    let begun = set.env().now();
    let Some((turn, is_new)) = set.with(|s| {
        let level = s.level(target)?;
        let is_new = s.dirty_throttle.sample(s.now, level);
        Some((s.dirty_throttle.turn(s.now, range.sectors(), level)?, is_new))
    }) else {
        return;
    };
    if is_new {
        // Write-back and GC may be resting, and have something to do now.
        set.signals().writeback_work.notify_all();
        set.signals().gc_work.notify_all();
    }
    loop {
        let until = set.with(|s| {
            let level = s.level(target)?;
            s.dirty_throttle.sample(s.now, level);
            s.dirty_throttle.pace?;
            let last = begun + WAIT_MAX;
            if s.now >= last {
                s.dirty_throttle.in_vain = Some(level.freed);
            }
            if s.dirty_throttle.in_vain == Some(level.freed) || s.now >= turn && level.left > 0 {
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
    use alloc::vec::Vec;

    const BAND: u64 = 300_000;
    const WHOLE: u64 = 900_000;

    fn level(left: u64, cleaned: u64, dirty: u64) -> FillLevel {
        FillLevel {
            whole: WHOLE,
            band: BAND,
            left,
            gathered_left: None,
            is_scattered: false,
            dirty,
            cleaned,
            freed: 0,
        }
    }

    const fn at(ms: u64) -> Time {
        Time(1_000_000_000 + ms * 1_000_000)
    }

    /// Admits clients at `rate` or the pace, in sectors per second, while write-back makes `cleans`
    /// per second clean, for `tenths` tenths of a second from `from` on. The difference reduces
    /// `left`. Returns the paces.
    fn run(
        room: &mut DirtyThrottle,
        from: u64,
        tenths: u64,
        rate: u64,
        cleans: u64,
        left: &mut u64,
    ) -> Vec<Option<u64>> {
        (from..from + tenths)
            .map(|n| {
                let let_in = room.pace.unwrap_or(rate).min(rate) / 10;
                room.admitted += let_in;
                *left = (*left + cleans / 10).saturating_sub(let_in).min(WHOLE);
                let dirty = WHOLE - *left;
                room.sample(at(100 * n), level(*left, cleans / 10 * n, dirty));
                room.pace
            })
            .collect()
    }

    #[test]
    fn the_pace_sinks_by_a_part_each_second_and_comes_to_that_of_write_back() {
        let mut room = DirtyThrottle::default();
        let mut left = WHOLE;
        let paces = run(&mut room, 0, 400, 100_000, 30_000, &mut left);
        let first = paces.iter().position(Option::is_some).expect("it comes to a limit");
        assert!(first > 20, "half of what lies above the band is filled at once: {first}");
        let limited: Vec<u64> = paces[first..].iter().map(|pace| pace.expect("for good")).collect();
        for (n, pair) in limited.windows(11).enumerate() {
            assert!(pair[10] * 100 >= pair[0] * 70, "{} after {} in tenth {n}", pair[10], pair[0]);
        }
        let last = limited[limited.len() - 1];
        assert!(last.abs_diff(30_000) < 3000, "{last}");
        assert!(left > BAND / 5, "{left}");
    }

    #[test]
    fn room_that_is_left_makes_the_pace_faster_and_the_last_of_it_is_kept() {
        let mut room = DirtyThrottle { rates: [40_000; 3], ..DirtyThrottle::default() };
        let lasting = |room: &DirtyThrottle, left| room.lasting(level(left, 0, WHOLE - left));
        assert_eq!(lasting(&room, BAND), 65_000);
        assert_eq!(lasting(&room, BAND / 2), 50_000);
        assert!(lasting(&room, BAND / 16) < 15_000, "{}", lasting(&room, BAND / 16));
        assert_eq!(lasting(&room, 0), 0);
        room.rates = [60_000, 40_000, 40_000];
        assert_eq!(lasting(&room, BAND / 2), 75_000, "what is written over takes no room for long");
        room.rates = [0; 3];
        assert_eq!(
            lasting(&room, BAND / 2),
            EXPECTED * 5 / 4,
            "before anything was written back a disk is expected"
        );
    }

    /// Overwrites a dirty third of the cache so fast that it would fill the rest within a second,
    /// while a pass is about to find the dead data.
    #[test]
    fn what_is_written_over_is_not_paced_where_its_dirty_data_has_room() {
        let left = WHOLE * 6 / 10;
        let paces = |gathered_left: Option<u64>, dirtied: u64| {
            let mut room = DirtyThrottle::default();
            let paces = (0..80).map(|n| {
                room.admitted += 50_000;
                let dirty = WHOLE / 4 + dirtied / 10 * n;
                let level = FillLevel { gathered_left, ..level(left, 0, dirty) };
                room.sample(at(100 * n), level);
                room.pace
            });
            // The first sample takes all dirty data for new, which fades.
            paces.skip(70).collect::<Vec<_>>()
        };
        let gathered = left - BAND / 10;
        assert!(paces(Some(gathered), 1000).iter().all(Option::is_none), "what is dirty stays as it is");
        assert!(paces(Some(gathered), 500_000).iter().all(Option::is_some), "all of it is newly dirty");
        assert!(paces(None, 1000).iter().all(Option::is_some), "moving does not keep up");
        assert!(paces(Some(BAND / 2), 1000).iter().all(Option::is_some), "gathered it would not fit, either");
    }

    #[test]
    fn a_pace_ends_when_there_is_room_again() {
        let mut room = DirtyThrottle::default();
        let mut left = BAND;
        assert!(run(&mut room, 0, 10, 50_000, 20_000, &mut left)[9].is_some());
        let paces = run(&mut room, 10, 300, 1000, 60_000, &mut left);
        assert_eq!(paces[299], None, "{left}");
    }

    #[test]
    fn nobody_is_put_off_for_longer_than_a_second_or_two() {
        let mut room = DirtyThrottle::default();
        let now = Time(5_000_000_000);
        for _ in 0..1000 {
            let turn = room.turn(now, 1 << 20, level(0, 0, WHOLE)).expect("there is a limit");
            assert!(turn.since(now) <= 2 * WAIT_MAX);
        }
    }
}
