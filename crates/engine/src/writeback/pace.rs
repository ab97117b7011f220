//! Decides when dirty data of a volume is written back, and how much at a time, from the
//! controller, the age of the data and the state of the set. Contains transitions only.

use crate::options::VolumeOptions;
use crate::request::Target;
use crate::state::{BTREE_RESERVE, MOVING_RESERVE, State};
use crate::volume::VolumeId;
use crate::writeback::dirty_age::DirtyAgeTracker;
use crate::writeback::rate::{self, RateController, RateInputs, UNLIMITED};
use bcached_env::Time;
use core::time::Duration;

/// Without requests for this long, write-back need not spare clients.
const IDLE: Duration = Duration::from_secs(30);
/// Target duration of a batch. A caller that has to wait for a batch waits no longer, and the
/// batch's flush costs little in comparison.
const BATCH_TIME: Duration = Duration::from_secs(1);
const BATCH_KEYS_MIN: usize = 128;
const BATCH_KEYS_MAX: usize = 2048;
/// Maximum sectors of a batch.
const BATCH_SECTORS_MAX: u64 = 128 << 11;
/// Maximum writes in flight to a backing device: as many as a disk can order.
const DEPTH_MAX: usize = 32;
/// Maximum pause between two writes when only one is in flight.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The pace of one volume.
#[derive(Clone, Debug)]
pub struct Pace {
    /// The controller and the limiter.
    pub rate: RateController,
    /// The age of the dirty data.
    pub age: DirtyAgeTracker,
    /// Number of keys of the next batch, adjusted to the duration of the last ones.
    batch_keys: usize,
    /// Number of writes in flight, adjusted to the latency of the last ones.
    depth: usize,
    /// Time between the starts of two writes, when even one in flight is too many.
    pause: Duration,
    /// When the next write may start.
    paused_until: Time,
    /// Until then, between two sweeps, only what is necessary is written back.
    rest_until: Time,
    /// A batch has made no progress: no other is tried before then.
    retry_at: Time,
    /// Clients wait for space, or data is too old: clients are not spared.
    is_urgent: bool,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            rate: RateController::default(),
            age: DirtyAgeTracker::default(),
            batch_keys: BATCH_KEYS_MIN,
            depth: DEPTH_MAX,
            pause: Duration::ZERO,
            paused_until: Time::default(),
            rest_until: Time::default(),
            retry_at: Time::default(),
            is_urgent: false,
        }
    }
}

/// The size of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchSize {
    /// Maximum keys.
    pub keys: usize,
    /// Maximum sectors, except for the last key.
    pub sectors: u64,
    /// Maximum writes in flight.
    pub depth: usize,
    /// `depth` spares clients as far as known, so the measured latency tells how many writes there
    /// may be.
    pub spares: bool,
}

/// What a volume's write-back is to do now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PaceDecision {
    /// Write a batch.
    Write,
    /// Do nothing before then.
    Wait(Time),
}

/// The result of a step.
struct PaceStep {
    options: VolumeOptions,
    is_urgent: bool,
    /// The disk is taken to sleep.
    is_asleep: bool,
    /// The volume rests until then.
    rest_until: Time,
    has_dirty: bool,
    /// When the next sectors may be written.
    due: Time,
}

impl Pace {
    /// Rests between two sweeps, until `until`.
    pub const fn rest_until(&mut self, until: Time) {
        self.rest_until = until;
    }

    /// Puts off the next try to `at`, after a batch without progress.
    pub const fn retry_at(&mut self, at: Time) {
        self.retry_at = at;
    }

    /// The size of the next batch; if it `hurries`, of one that does not spare clients.
    #[must_use]
    pub fn size(&self, hurries: bool) -> BatchSize {
        let rate = if hurries { UNLIMITED } else { self.rate.allowed() };
        let spares = !hurries && !self.is_urgent;
        BatchSize {
            keys: self.batch_keys,
            sectors: rate.saturating_mul(BATCH_TIME.as_secs()).min(BATCH_SECTORS_MAX),
            depth: if spares { self.depth } else { DEPTH_MAX },
            spares,
        }
    }

    /// Adjusts the number of keys after a batch of `keys` keys took `taken`.
    pub fn learns_time(&mut self, keys: usize, taken: Duration) {
        // A batch that was smaller than allowed says nothing about larger ones.
        let is_telling = keys >= self.batch_keys || taken > BATCH_TIME;
        if keys == 0 || taken == Duration::ZERO || !is_telling {
            return;
        }
        let fitting = keys as u128 * BATCH_TIME.as_nanos() / taken.as_nanos();
        let fitting = usize::try_from(fitting).unwrap_or(usize::MAX).min(2 * keys);
        self.batch_keys = fitting.clamp(BATCH_KEYS_MIN, BATCH_KEYS_MAX);
    }

    /// Adjusts depth and pause to the longest operation on the backing device, which should not
    /// exceed `limit`.
    pub fn learns_latency(&mut self, longest: Duration, limit: Option<Duration>) {
        match limit {
            Some(limit) if longest > limit && self.depth == 1 => {
                self.pause = (2 * self.pause).max(limit).min(PAUSE_MAX);
            }
            Some(limit) if longest > limit => self.depth /= 2,
            Some(limit) if self.pause > limit => self.pause /= 2,
            _ if !self.pause.is_zero() => self.pause = Duration::ZERO,
            _ => self.depth = (self.depth * 2).min(DEPTH_MAX),
        }
    }
}

impl State {
    /// Number of sectors of the volume that may stay dirty.
    #[must_use]
    pub fn dirty_target(&self, id: VolumeId) -> u64 {
        let Some(volume) = self.volumes.get(id) else { return 0 };
        let mut backings = 0;
        let mut cache = self.geometry.buckets * self.geometry.bucket_sectors;
        for (_, other) in self.volumes.iter() {
            let Some(inode) = other.inode else { continue };
            match other.backing {
                Some(_) => backings += other.sectors,
                None => cache = cache.saturating_sub(self.dirty.of(inode)),
            }
        }
        rate::target(cache, volume.options.writeback_percent, volume.sectors, backings)
    }

    /// Returns true if there has been no request for a long time.
    fn is_idle(&self) -> bool {
        self.options.idle_max_writeback_rate
            && self.now >= self.last_request + IDLE
            && self.volumes.iter().all(|(_, volume)| volume.requests == 0)
    }

    fn measured(&self, id: VolumeId) -> RateInputs {
        let inode = self.volumes.get(id).and_then(|volume| volume.inode);
        let in_use_percent = self.in_use_percent();
        RateInputs {
            dirty: inode.map_or(0, |inode| self.dirty.of(inode)),
            target: self.dirty_target(id),
            in_use_percent,
            dirty_buckets: self.used_buckets(),
            bucket_sectors: self.geometry.bucket_sectors,
            is_idle: self.is_idle(),
            is_full: in_use_percent >= self.options.cutoff_writeback
                || self.is_short_of_room()
                || self.starved().is_some()
                || self.is_worn()
                // Flash-only volumes have nothing else to wait for.
                || self.buckets.available() <= (BTREE_RESERVE + MOVING_RESERVE) as u64,
        }
    }

    /// Runs a step of the volume's controller, if one is due, and updates what is urgent.
    fn step(&mut self, target: &Target) -> Option<PaceStep> {
        let (now, mut measured) = (self.now, self.measured(target.id));
        let volume = self.volumes.get_mut(target.id)?;
        if measured.dirty > 0 && volume.pace.age.inherits(now) {
            // A former process has left it, whatever the superblock says.
            volume.writeback_from = volume.data_offset;
        }
        let (options, pace) = (volume.options, &mut volume.pace);
        let needed = pace.age.needed(now, measured.dirty, options.max_dirty_age);
        let is_urgent = measured.is_full || needed == UNLIMITED;
        pace.is_urgent = is_urgent;
        let has_dirty = measured.dirty > 0;
        let is_too_much = options.writeback_percent > 0 && measured.dirty > 2 * measured.target;
        if has_dirty && volume.client_activity.is_asleep(now, &options) && (is_urgent || is_too_much) {
            volume.client_activity.wakes(now);
        }
        if !has_dirty {
            volume.client_activity.rests();
        }
        let is_asleep = volume.client_activity.is_asleep(now, &options);
        // Once the disk is awake, all dirty data is written back, so that it can sleep again.
        measured.is_idle |= options.spindown_after.is_some() && !is_asleep;
        if pace.rate.is_due(now, &options) {
            pace.rate.update(now, &options, &measured, needed);
        } else {
            pace.rate.allow(now, &options, &measured, needed);
        }
        let may_rest = measured.dirty <= measured.target && !is_urgent;
        let rest_until = if may_rest { pace.rest_until.max(pace.retry_at) } else { pace.retry_at };
        let due = pace.rate.due(now).max(if is_urgent { now } else { pace.paused_until });
        Some(PaceStep { options, is_urgent, is_asleep, rest_until, has_dirty, due })
    }

    /// What the volume's write-back may do now.
    pub fn call_write_back(&mut self, target: &Target) -> PaceDecision {
        let now = self.now;
        let Some(PaceStep { options, is_urgent, is_asleep, rest_until, has_dirty, due }) = self.step(target)
        else {
            return PaceDecision::Wait(now + IDLE);
        };
        // Whatever it waits for, ask the controller again after that time: a missed notification
        // costs no more than that.
        let next_step = now + options.writeback_rate_update;
        let is_still = !options.writeback_running || options.writeback_quiet && !is_urgent;
        if is_still && let Some(volume) = self.volumes.get_mut(target.id) {
            volume.client_activity.rests();
        }
        if !has_dirty || is_still || is_asleep {
            return PaceDecision::Wait(next_step);
        }
        let due = due.max(rest_until);
        if due > now { PaceDecision::Wait(due.min(next_step)) } else { PaceDecision::Write }
    }

    /// Returns whether `sectors` of a running batch may be written now, and counts them; if not,
    /// when to ask again. A running batch continues whatever the options have become, because it
    /// holds its ranges.
    pub fn may_copy(&mut self, target: &Target, sectors: u64) -> Result<(), Time> {
        let now = self.now;
        match self.step(target) {
            Some(step) if step.due > now => Err(step.due.min(now + step.options.writeback_rate_update)),
            Some(_) => {
                if let Some(volume) = self.volumes.get_mut(target.id) {
                    volume.pace.rate.charge(now, sectors);
                    volume.pace.paused_until = now + volume.pace.pause;
                }
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Returns true if more is dirty than the target, or space is needed: the next sweep does not
    /// wait.
    #[must_use]
    pub fn is_behind(&self, target: &Target) -> bool {
        let measured = self.measured(target.id);
        measured.dirty > measured.target || measured.is_full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_grow_and_shrink_with_the_time_they_take() {
        let mut pace = Pace::default();
        let (short, second) = (Duration::from_millis(10), Duration::from_secs(1));
        assert_eq!(
            pace.size(true),
            BatchSize { keys: 128, sectors: BATCH_SECTORS_MAX, depth: 32, spares: false }
        );
        pace.learns_time(128, short);
        assert_eq!(pace.size(true).keys, 256, "twice as many, not a hundred times");
        for _ in 0..9 {
            pace.learns_time(pace.batch_keys, short);
        }
        assert_eq!(pace.size(true).keys, BATCH_KEYS_MAX);
        pace.learns_time(10, short);
        assert_eq!(pace.size(true).keys, BATCH_KEYS_MAX, "there were not more");
        pace.learns_time(8192, 4 * second);
        assert_eq!(pace.size(true).keys, 2048);
        pace.learns_time(2048, 100 * second);
        assert_eq!(pace.size(true).keys, BATCH_KEYS_MIN);
        pace.learns_time(0, second);
        assert_eq!(pace.size(true).keys, BATCH_KEYS_MIN, "a batch of nothing teaches nothing");
        assert_eq!(pace.size(false).sectors, 1024, "a second's worth of the first rate");
    }

    #[test]
    fn fewer_writes_at_once_while_they_take_long() {
        let mut pace = Pace::default();
        let (short, second) = (Duration::from_millis(10), Duration::from_secs(1));
        let depths = [Some(short); 7].map(|limit| {
            pace.learns_latency(second, limit);
            pace.depth
        });
        assert_eq!(depths, [16, 8, 4, 2, 1, 1, 1]);
        let pauses = [second, second, 2 * second, short, short].map(|longest| {
            pace.learns_latency(longest, Some(short));
            (pace.depth, pace.pause.as_millis())
        });
        assert_eq!(pauses, [(1, 40), (1, 80), (1, 160), (1, 80), (1, 40)], "and pauses between them");
        for _ in 0..9 {
            pace.learns_latency(second, Some(short));
        }
        assert_eq!(pace.pause, second, "none is longer");
        assert_eq!(pace.size(false).depth, 1);
        assert_eq!(pace.size(true).depth, 32, "who was asked for a flush or a detach spares nobody");
        pace.is_urgent = true;
        assert_eq!(
            (pace.size(false).depth, pace.size(false).spares),
            (32, false),
            "nor does who has no room"
        );
        pace.is_urgent = false;
        assert_eq!((pace.size(false).depth, pace.size(false).spares), (1, true));
        pace.learns_latency(second, None);
        assert_eq!((pace.depth, pace.pause), (1, Duration::ZERO));
        pace.learns_latency(short, Some(short));
        assert_eq!(pace.depth, 2);
    }
}
