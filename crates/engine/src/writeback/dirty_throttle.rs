//! How fast clients may make data dirty in a cache that is nearly full of it.
//!
//! Below the cut-off of write-back lies a band. When it is reached write-back hurries, sparse buckets are gathered
//! (`gc::moving`), and writes are let in at the pace at which write-back makes data clean, somewhat more where much is left of the
//! band and somewhat less where little is: so dirty data stays at about what it is, in the band. (A sweep that begins
//! frees few buckets, and then many: the band has to last until sparse ones can be gathered.) So clients have the pace of
//! sorted write-back instead of that of a disk that is written at random places.
//!
//! Nor do they fall to it: above the band the pace sinks by a part of it each second, as early as it takes to be there in time.
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
const BAND_PERCENT: u64 = 25;
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
/// The pace sinks to a third in so many milliseconds, if there is room for it.
const SINKS_MS: u64 = 4000;
/// Dirty data that lies scattered takes so much room, in percent of itself, when sparse buckets have been emptied. What is written over at
/// random comes to 139 when buckets are emptied that are half full, as they are while there is room.
const GATHERED_PERCENT: u64 = 150;
/// In the last of so many parts of the band the pace sinks to nothing.
const LAST_PART: u64 = 4;
/// Most writes over what is dirty already, for one that makes more dirty, that are reckoned with; in percent.
const REWRITES_MAX: u64 = 400;
const SECOND_NS: u128 = 1_000_000_000;

/// The pace at which clients are let in.
#[derive(Clone, Debug, Default)]
pub struct Room {
    /// Sectors that were let in, since the set was opened.
    admitted: u64,
    /// When the counters were last looked at, and what they were: sectors let in, made clean, made dirty.
    sampled: Time,
    seen: [u64; 3],
    /// The same by second, of late.
    rates: [u64; 3],
    /// Sectors a second, while there is a limit.
    pace: Option<u64>,
    /// In so many milliseconds it sinks to a third.
    sinks_ms: u64,
    /// When there was one last.
    limited: Option<Time>,
    /// When the next write may begin.
    next: Time,
    /// Somebody has waited in vain when so much had become free, in sectors: until it is more nobody waits.
    in_vain: Option<u64>,
}

/// What the pace depends on, in sectors.
#[derive(Clone, Copy, Debug)]
struct Level {
    /// Up to the cut-off.
    whole: u64,
    /// Of the band.
    band: u64,
    /// Left up to the cut-off; 0: it is reached.
    left: u64,
    /// What would be left if sparse buckets were emptied, where moving can do so and keeps up.
    gathered_left: Option<u64>,
    /// `left` is that.
    is_scattered: bool,
    /// That are dirty.
    dirty: u64,
    /// That have turned clean since the set was opened.
    cleaned: u64,
    /// The same of what has become free.
    freed: u64,
}

impl Level {
    /// What is left of the band when the pace has sunk to the lasting one.
    const fn landing(&self) -> u64 {
        self.band / 4 * 3
    }

    /// What is left until then.
    fn above(&self) -> u128 {
        u128::from(self.left.saturating_sub(self.landing()))
    }
}

impl Room {
    /// Looks at the counters, and sets the pace anew; false if the last look was a moment ago.
    fn sample(&mut self, now: Time, level: Level) -> bool {
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
        // Room that moving can make is used up by what becomes dirty, and not by what is written over that.
        // So such writes never take more buckets than dirty data takes once it is gathered: if those are enough,
        // it does not matter how fast the others go before a pass has found what became free.
        self.pace = match level.gathered_left {
            Some(left) if self.lasts(Level { left, ..level }, dirtied) => None,
            _ => self.limit(level, if level.is_scattered { dirtied } else { admitted }),
        };
        if self.pace.is_some() {
            self.limited = Some(now);
        }
        true
    }

    /// The pace from now on: `None` if there is so much room that there need be none. Room is used up at
    /// `rate`, sectors a second.
    fn limit(&mut self, level: Level, rate: u64) -> Option<u64> {
        if self.lasts(level, rate) {
            return None;
        }
        self.sinks_ms = self.sinks_ms(level, rate);
        // What is in proportion to what is left of the way sinks by the same part of itself each second.
        let sinking = u64::try_from(1000 * level.above() / u128::from(self.sinks_ms)).unwrap_or(u64::MAX);
        Some(sinking.max(self.lasting(level)))
    }

    /// Whether there is so much room that there need be no pace while it is used up at `rate`, sectors a second.
    fn lasts(&self, level: Level, rate: u64) -> bool {
        // It ends later than it begins.
        let ahead = if self.pace.is_some() { 2 } else { 1 };
        1000 * level.above() > ahead * u128::from(rate) * u128::from(self.sinks_ms(level, rate))
    }

    /// In how many milliseconds the pace sinks to a third: what was chosen when it began.
    fn sinks_ms(&self, level: Level, rate: u64) -> u64 {
        if self.pace.is_some() && self.sinks_ms > 0 {
            return self.sinks_ms;
        }
        // Of what there is at most half.
        let most = 1000 * level.whole.saturating_sub(level.landing()) / 2;
        SINKS_MS.min(most / rate.max(1)).max(1)
    }

    /// The pace at which what is dirty stays at a level in the band, in sectors a second.
    fn lasting(&self, level: Level) -> u64 {
        let [admitted, cleaned, dirtied] = self.rates.map(u128::from);
        let rewrites = (100 * admitted / dirtied.max(1)).clamp(100, u128::from(REWRITES_MAX));
        let sustained = cleaned.max(u128::from(EXPECTED)) * rewrites / 100;
        let [band, left] = [level.band.max(1), level.left.min(level.band)].map(u128::from);
        let last = band.div_ceil(u128::from(LAST_PART));
        let lasting = sustained * (7 * band + 6 * left) / (8 * band) * left.min(last) / last;
        u64::try_from(lasting).unwrap_or(u64::MAX)
    }

    /// A write of `sectors` has been let in at once.
    pub const fn admit(&mut self, sectors: u64) {
        self.admitted += sectors;
    }

    /// When a write of `sectors` may begin; `None` if there is no limit now.
    fn turn(&mut self, now: Time, sectors: u64, level: Level) -> Option<Time> {
        self.admitted += sectors;
        if level.left <= level.landing() {
            // A small cache is full before the counters are looked at again.
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
    /// Writes are let in at a pace, or were a moment ago.
    #[must_use]
    pub fn is_short_of_room(&self) -> bool {
        self.room.limited.is_some_and(|limited| self.now < limited + FADES)
    }

    /// How full of dirty data a bucket may be that is emptied, in percent: the fuller, the less is left of the room that is to last until
    /// write-back makes more. Up to a half two of them fill one.
    #[must_use]
    pub fn sparse_percent(&self) -> u64 {
        let ([_, band, left], ..) = self.room();
        if self.is_short_of_room() { 50 + 30 * band.saturating_sub(left) / band.max(1) } else { 50 }
    }

    /// Whether a write need not wait for room, nor look whether it must: true if it is counted. `None`: it is to ask ([`wait`]).
    pub(crate) fn lets_in_at_once(&self, target: &Target) -> Option<bool> {
        let Some(level) = self.level(target) else { return Some(false) };
        let has_room = self.room.pace.is_none() && level.left > level.landing();
        (has_room && self.now.since(self.room.sampled) < SAMPLE).then_some(true)
    }

    /// Buckets up to the cut-off, in the band, and left of both; what would be left if sparse ones were
    /// emptied, where moving can do so and keeps up; and whether that is what counts, because dirty data
    /// lies in more buckets than it would take then.
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

    /// How full the cache is of dirty data, if writes to this volume are slowed down that would add to it.
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
        let size = self.geometry.bucket_sectors;
        let (room, gathered_left, is_scattered) = self.room();
        let [whole, band, left] = room.map(|buckets| buckets * size);
        Some(Level {
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

/// Waits until it is the turn of a write that would make data dirty, or until it need not wait for room any more.
pub async fn wait(set: &CacheSet, target: &Target, range: Range) {
    let begun = set.env().now();
    let Some((turn, is_new)) = set.with(|s| {
        let level = s.level(target)?;
        let is_new = s.room.sample(s.now, level);
        Some((s.room.turn(s.now, range.sectors(), level)?, is_new))
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
            s.room.sample(s.now, level);
            s.room.pace?;
            let last = begun + WAIT_MAX;
            if s.now >= last {
                s.room.in_vain = Some(level.freed);
            }
            if s.room.in_vain == Some(level.freed) || s.now >= turn && level.left > 0 {
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

    fn level(left: u64, cleaned: u64, dirty: u64) -> Level {
        Level {
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

    /// Clients are let in at `rate` or what the pace is, sectors a second, and write-back makes `cleans` clean, for so many tenths
    /// of a second from `from` on; what is left shrinks by what more was let in. Returns the paces.
    fn run(
        room: &mut Room,
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
        let mut room = Room::default();
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
        let mut room = Room { rates: [40_000; 3], ..Room::default() };
        let lasting = |room: &Room, left| room.lasting(level(left, 0, WHOLE - left));
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

    /// Writes over a third of the cache that is dirty, so fast that they would fill the rest within a second, while a pass is about
    /// to find what they leave dead.
    #[test]
    fn what_is_written_over_is_not_paced_where_its_dirty_data_has_room() {
        let left = WHOLE * 6 / 10;
        let paces = |gathered_left: Option<u64>, dirtied: u64| {
            let mut room = Room::default();
            let paces = (0..80).map(|n| {
                room.admitted += 50_000;
                let dirty = WHOLE / 4 + dirtied / 10 * n;
                let level = Level { gathered_left, ..level(left, 0, dirty) };
                room.sample(at(100 * n), level);
                room.pace
            });
            // The first look finds all that is dirty to be new, which fades.
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
        let mut room = Room::default();
        let mut left = BAND;
        assert!(run(&mut room, 0, 10, 50_000, 20_000, &mut left)[9].is_some());
        let paces = run(&mut room, 10, 300, 1000, 60_000, &mut left);
        assert_eq!(paces[299], None, "{left}");
    }

    #[test]
    fn nobody_is_put_off_for_longer_than_a_second_or_two() {
        let mut room = Room::default();
        let now = Time(5_000_000_000);
        for _ in 0..1000 {
            let turn = room.turn(now, 1 << 20, level(0, 0, WHOLE)).expect("there is a limit");
            assert!(turn.since(now) <= 2 * WAIT_MAX);
        }
    }
}
