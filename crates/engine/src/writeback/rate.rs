//! The rate at which dirty data of one volume is written back: the kernel's controller, and further
//! goals on top of it. Units are sectors and sectors per second. Nothing here waits or reads a
//! clock.
//!
//! The controller aims at a share of the cache that may stay dirty. Dirty data above the share
//! raises the rate at once (the proportional term) and over time (the integral term). Below the
//! share the rate falls to the minimum, so that data that is overwritten again and again is not
//! written back each time. Dirty data that is scattered over many buckets makes the cache fill
//! before much is dirty. Then the rate rises with the buckets in use.

use crate::options::VolumeOptions;
use bcached_env::Time;
use core::time::Duration;

/// As fast as the devices allow.
pub const UNLIMITED: u64 = u64::MAX;

/// The rate before anything has been measured (that of the kernel).
const FIRST: u64 = 1024;
/// Maximum rate of the controller.
const RATE_MAX: i64 = 1_000_000_000;
/// How long unused rate remains available as credit.
const CREDIT: Duration = Duration::from_secs(2);
/// The device keeps up with the rate if it is behind by at most this.
const LAG: Duration = Duration::from_millis(1);
const SECOND: i128 = 1_000_000_000;

/// The inputs of the controller.
#[derive(Clone, Copy, Debug)]
pub struct RateInputs {
    /// Dirty sectors of the volume.
    pub dirty: u64,
    /// Target for its dirty sectors.
    pub target: u64,
    /// Buckets that cannot be reclaimed without write-back, in percent.
    pub in_use_percent: u64,
    /// The number of those buckets.
    pub dirty_buckets: u64,
    /// Sectors per bucket.
    pub bucket_sectors: u64,
    /// There has been no request for a long time.
    pub is_idle: bool,
    /// Requests suffer from lack of space.
    pub is_full: bool,
}

/// The share of `cache` sectors that one volume may have dirty: `percent` of them, in proportion to
/// the size of its backing device among those of all volumes (the kernel's rule).
#[must_use]
pub fn target(cache: u64, percent: u64, backing: u64, all_backings: u64) -> u64 {
    const SHARE_BITS: u32 = 14;
    let share = ((u128::from(backing) << SHARE_BITS) / u128::from(all_backings.max(1))).max(1);
    let all = u128::from(cache) * u128::from(percent) / 100;
    u64::try_from((all * share) >> SHARE_BITS).unwrap_or(u64::MAX)
}

/// The controller and the limiter of one volume.
#[derive(Clone, Debug)]
pub struct RateController {
    /// Rate of the controller.
    rate: u64,
    /// Rate in force.
    allowed: u64,
    proportional: i64,
    integral: i64,
    /// Change of the rate by the last step.
    change: i64,
    updated: Option<Time>,
    /// Sectors written back ahead of the rate, times nanoseconds per second; negative: credit.
    owed: i128,
    settled: Time,
}

impl Default for RateController {
    fn default() -> Self {
        Self {
            rate: FIRST,
            allowed: FIRST,
            proportional: 0,
            integral: 0,
            change: 0,
            updated: None,
            owed: 0,
            settled: Time::default(),
        }
    }
}

/// The state of the controller, for status output.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RateInfo {
    /// Sectors per second; `None`: as fast as the devices allow.
    pub rate: Option<u64>,
    /// The proportional term, in sectors per second.
    pub proportional: i64,
    /// The integral term, in sectors per second.
    pub integral: i64,
    /// The change by the last step, in sectors per second.
    pub change: i64,
    /// Time until the next data may be written back.
    pub next: Duration,
}

impl RateController {
    /// Returns true if a step is due.
    #[must_use]
    pub fn is_due(&self, now: Time, options: &VolumeOptions) -> bool {
        self.updated.is_none_or(|updated| now >= updated + options.writeback_rate_update)
    }

    /// Runs a step of the controller. `needed` is the minimum rate that the age of the data
    /// requires.
    pub fn update(&mut self, now: Time, options: &VolumeOptions, measured: &RateInputs, needed: u64) {
        self.settle(now);
        let keeps_up = self.owed >= -self.in_time(LAG);
        if !measured.is_idle && options.writeback_percent > 0 && measured.dirty > 0 {
            self.step(options, measured, keeps_up);
        }
        self.updated = Some(now);
        self.allow(now, options, measured, needed);
    }

    /// Like [`RateController::update`] without a step: applies what has become urgent, or has
    /// ceased to be, since the last step.
    pub fn allow(&mut self, now: Time, options: &VolumeOptions, measured: &RateInputs, needed: u64) {
        self.settle(now);
        let hurries = options.writeback_percent == 0 || measured.is_full || measured.is_idle;
        let wanted = if hurries { UNLIMITED } else { self.rate.max(needed) };
        self.allowed = wanted.min(options.writeback_rate_maximum.unwrap_or(UNLIMITED)).max(1);
        self.limit_credit();
    }

    /// Sets the rate until the next step.
    pub fn say(&mut self, now: Time, options: &VolumeOptions, rate: u64) {
        self.settle(now);
        self.rate = rate.max(1);
        if self.allowed != UNLIMITED {
            self.allowed = self.rate.min(options.writeback_rate_maximum.unwrap_or(UNLIMITED)).max(1);
        }
        self.limit_credit();
    }

    fn step(&mut self, options: &VolumeOptions, measured: &RateInputs, keeps_up: bool) {
        let signed = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let error = signed(measured.dirty) - signed(measured.target);
        let inverse = |number: u64| signed(number.max(1));
        self.proportional = error / inverse(options.writeback_rate_p_term_inverse);
        // The integral does not accumulate what a device cannot do, nor what lies below the target.
        if (error < 0 && self.integral > 0) || (error > 0 && keeps_up) {
            let seconds = signed(options.writeback_rate_update.as_secs().max(1));
            self.integral = self.integral.saturating_add(error.saturating_mul(seconds));
        }
        if let Some(faster) = scattered(options, measured) {
            self.proportional = self.proportional.max(faster);
        }
        let least = signed(options.writeback_rate_minimum.max(1)).min(RATE_MAX);
        let wanted = self.proportional.saturating_add(self.integral_term(options));
        let rate = wanted.clamp(least, RATE_MAX).unsigned_abs();
        self.change = signed(rate) - signed(self.rate);
        self.rate = rate;
    }

    fn integral_term(&self, options: &VolumeOptions) -> i64 {
        self.integral / i64::try_from(options.writeback_rate_i_term_inverse.max(1)).unwrap_or(i64::MAX)
    }

    /// Counts `sectors` that are being written.
    pub fn charge(&mut self, now: Time, sectors: u64) {
        self.settle(now);
        self.owed += i128::from(sectors) * SECOND;
    }

    /// When the next sectors may be written.
    #[must_use]
    pub fn due(&self, now: Time) -> Time {
        if self.owed <= 0 || self.allowed == UNLIMITED {
            return now;
        }
        let wait = (self.owed + i128::from(self.allowed) - 1) / i128::from(self.allowed);
        now + Duration::from_nanos(u64::try_from(wait).unwrap_or(u64::MAX))
    }

    /// The rate in force, in sectors per second; [`UNLIMITED`] if there is no limit.
    #[must_use]
    pub const fn allowed(&self) -> u64 {
        self.allowed
    }

    /// The state for status output.
    #[must_use]
    pub fn info(&self, now: Time, options: &VolumeOptions) -> RateInfo {
        let mut then = self.clone();
        then.settle(now);
        RateInfo {
            rate: (self.allowed != UNLIMITED).then_some(self.allowed),
            proportional: self.proportional,
            integral: self.integral_term(options),
            change: self.change,
            next: then.due(now).since(now),
        }
    }

    /// Pays what is owed for the time that has passed since the last call.
    fn settle(&mut self, now: Time) {
        let elapsed = now.since(self.settled);
        self.settled = now.max(self.settled);
        self.owed = if self.allowed == UNLIMITED { 0 } else { self.owed - self.in_time(elapsed) };
        self.limit_credit();
    }

    /// What the rate in force pays in `duration`.
    fn in_time(&self, duration: Duration) -> i128 {
        if self.allowed == UNLIMITED {
            0
        } else {
            i128::from(self.allowed) * duration.as_nanos().cast_signed()
        }
    }

    fn limit_credit(&mut self) {
        self.owed = self.owed.max(-self.in_time(CREDIT));
    }
}

/// The rate that the buckets in use require when dirty data is scattered, in sectors per second.
fn scattered(options: &VolumeOptions, measured: &RateInputs) -> Option<i64> {
    /// Above each of these shares of buckets in use, in percent, another weight applies.
    const STEPS: [u64; 3] = [50, 57, 64];
    /// Dirty data counts as scattered if its buckets have room for more than this many times its
    /// size.
    const SCATTERED_MIN: u64 = 3;
    if !options.writeback_consider_fragment || measured.dirty == 0 {
        return None;
    }
    let in_use = measured.in_use_percent;
    let (weight, above) = match in_use {
        0..=50 => return None,
        51..=57 => (options.writeback_rate_fp_term_low, in_use - STEPS[0]),
        58..=64 => (options.writeback_rate_fp_term_mid, in_use - STEPS[1]),
        _ => (options.writeback_rate_fp_term_high, in_use - STEPS[2]),
    };
    let buckets = measured.dirty_buckets.max(1);
    if buckets.saturating_mul(measured.bucket_sectors) / measured.dirty <= SCATTERED_MIN {
        return None;
    }
    let faster = (measured.dirty / buckets).saturating_mul(weight).saturating_mul(above);
    Some(i64::try_from(faster).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 2048;
    /// The setup on which the kernel's values were measured: 1 GiB of cache in buckets of 512 KiB.
    const CACHE: u64 = 1024 * MIB;

    fn measured(dirty: u64, target: u64) -> RateInputs {
        RateInputs {
            dirty,
            target,
            in_use_percent: 10,
            dirty_buckets: 100,
            bucket_sectors: 1024,
            is_idle: false,
            is_full: false,
        }
    }

    fn at(seconds: u64) -> Time {
        Time::default() + Duration::from_secs(seconds)
    }

    #[test]
    fn the_target_is_shared_by_the_size_of_the_backing_devices() {
        let tenths = |sectors: u64| sectors * 10 / MIB;
        assert_eq!(tenths(target(CACHE, 10, 4096 * MIB, 4096 * MIB)), 1023, "the kernel shows 102.3M");
        assert_eq!(tenths(target(CACHE, 10, 4096 * MIB, 6144 * MIB)), 682, "the kernel shows 68.2M");
        assert_eq!(tenths(target(CACHE, 10, 2048 * MIB, 6144 * MIB)), 341, "the kernel shows 34.1M");
        assert_eq!(target(CACHE, 0, 1, 1), 0);
        assert!(target(u64::MAX >> 9, 40, 1, u64::MAX) > 0, "the least share is no nothing");
    }

    #[test]
    fn below_the_target_the_rate_is_the_minimum() {
        let options = VolumeOptions::default();
        let mut rate = RateController::default();
        rate.update(at(5), &options, &measured(8, target(CACHE, 10, 1, 1)), 0);
        let info = rate.info(at(5), &options);
        assert_eq!(info.rate, Some(8), "the kernel shows 4.0k/sec");
        assert_eq!(info.proportional * 10 / 2048, -25, "the kernel shows -2.5M");
        assert_eq!(info.change, 8 - 1024);
    }

    #[test]
    fn above_the_target_the_rate_grows_at_once_and_with_time() {
        let options = VolumeOptions::default();
        let mut rate = RateController::default();
        // 37.56 MiB above the target.
        let above = measured(89_831, 12_902);
        rate.charge(at(5), 100_000);
        rate.update(at(5), &options, &above, 0);
        assert_eq!(rate.info(at(5), &options).proportional, 1923, "the kernel shows 961.5k");
        assert_eq!(rate.allowed(), 1923 + 76_929 * 5 / 10_000);
        // The device keeps up: more is owed than has been paid.
        rate.charge(at(9), 100_000);
        rate.update(at(10), &options, &above, 0);
        assert_eq!(rate.allowed(), 1923 + 76_929 * 10 / 10_000);
        // It does not keep up: all that was owed has long been paid, and nothing has been added
        // since.
        let before = rate.integral;
        rate.update(at(400), &options, &above, 0);
        assert_eq!(rate.integral, before);
    }

    #[test]
    fn what_has_added_up_goes_first_when_the_target_is_reached() {
        let options = VolumeOptions::default();
        let mut rate = RateController { integral: 1_000_000, ..RateController::default() };
        rate.update(at(5), &options, &measured(1000, 2000), 0);
        assert_eq!(rate.integral, 995_000);
        rate.integral = -5;
        rate.update(at(10), &options, &measured(1000, 2000), 0);
        assert_eq!(rate.integral, -5, "it is not wound up below the target");
    }

    #[test]
    fn scattered_data_is_written_back_faster_as_the_cache_fills() {
        let options = VolumeOptions::default();
        let full = |in_use_percent| RateInputs {
            in_use_percent,
            dirty_buckets: 1000,
            ..measured(100_000, CACHE / 10)
        };
        let of = |in_use, options: &VolumeOptions| {
            let mut rate = RateController::default();
            rate.update(at(5), options, &full(in_use), 0);
            rate.allowed()
        };
        assert_eq!(of(50, &options), 8);
        assert_eq!(of(51, &options), 100, "a hundred sectors a bucket, once");
        assert_eq!(of(57, &options), 700);
        assert_eq!(of(58, &options), 1000);
        assert_eq!(of(64, &options), 7000);
        assert_eq!(of(70, &options), 600_000);
        let blind = VolumeOptions { writeback_consider_fragment: false, ..options };
        assert_eq!(of(70, &blind), 8);
        let dense = RateInputs { dirty_buckets: 200, ..full(70) };
        let mut rate = RateController::default();
        rate.update(at(5), &options, &dense, 0);
        assert_eq!(rate.allowed(), 8, "two buckets' worth in each is not scattered");
    }

    #[test]
    fn who_may_hurry_does_and_a_ceiling_holds() {
        let options = VolumeOptions::default();
        let mut rate = RateController::default();
        let idle = RateInputs { is_idle: true, ..measured(10, 2000) };
        rate.update(at(5), &options, &idle, 0);
        assert_eq!(rate.allowed(), UNLIMITED);
        assert_eq!(rate.info(at(5), &options).rate, None);
        // The first request ends the idle state.
        rate.allow(at(6), &options, &measured(10, 2000), 0);
        assert_eq!(rate.allowed(), 1024);
        rate.allow(at(6), &options, &RateInputs { is_full: true, ..measured(10, 2000) }, 0);
        assert_eq!(rate.allowed(), UNLIMITED);
        rate.allow(at(6), &options, &measured(10, 2000), 5000);
        assert_eq!(rate.allowed(), 5000, "what the age of the data asks for");
        let unthrottled = VolumeOptions { writeback_percent: 0, ..options };
        rate.allow(at(6), &unthrottled, &measured(10, 2000), 0);
        assert_eq!(rate.allowed(), UNLIMITED);
        let slow = VolumeOptions { writeback_rate_maximum: Some(100), ..options };
        rate.allow(at(6), &slow, &idle, 9000);
        assert_eq!(rate.allowed(), 100);
    }

    #[test]
    fn the_limiter_keeps_the_rate_exactly_and_forgets_old_credit() {
        let options = VolumeOptions { writeback_rate_minimum: 100, ..VolumeOptions::default() };
        let mut rate = RateController::default();
        rate.update(at(100), &options, &measured(8, 1000), 0);
        assert_eq!(rate.allowed(), 100);
        assert_eq!(rate.due(at(100)), at(100));
        // Two seconds of credit, however much time has passed.
        rate.charge(at(200), 200);
        assert_eq!(rate.due(at(200)), at(200));
        rate.charge(at(200), 1000);
        assert_eq!(rate.due(at(200)), at(210));
        assert_eq!(rate.info(at(204), &options).next, Duration::from_secs(6));
        // A new rate applies to what is owed.
        rate.allow(at(205), &options, &measured(8, 1000), 500);
        assert_eq!(rate.due(at(205)), at(206));
        let unthrottled = VolumeOptions { writeback_percent: 0, ..options };
        rate.allow(at(205), &unthrottled, &measured(8, 1000), 0);
        assert_eq!(rate.due(at(205)), at(205));
    }
}
