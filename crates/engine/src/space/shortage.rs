//! How short of buckets a set is, and how background work reacts.
//!
//! Buckets that can be reused without writing dirty data back are *available*. Those of them that
//! can be handed out immediately are *free*. A number of free buckets is kept ready. When few are
//! left, CPU time is shared differently: client requests run as often as before, but tasks that
//! free buckets do more work per turn, and other background tasks yield.

use crate::set::CacheSet;
use crate::state::{BTREE_RESERVE, MOVING_RESERVE, State};
use bcached_env::exec::{BREATH_NS, BREATH_NS_MAX};
use core::time::Duration;

/// Sparse buckets are emptied when fewer than one bucket in `AVAILABLE_SHARE` is available, or when
/// the available buckets exceed the number at which writes bypass the cache by less than one bucket
/// in `MARGIN_SHARE`. Below half of that margin, the set is under space pressure
/// ([`State::presses`]).
const AVAILABLE_SHARE: u64 = 8;
const MARGIN_SHARE: u64 = 12;

/// Pause before each piece of background work that frees no buckets, under space pressure.
const WAY: Duration = Duration::from_millis(1);

impl State {
    /// Number of free buckets kept ready in addition to the reserves.
    #[must_use]
    pub fn kept_ready(&self) -> usize {
        usize::try_from(self.geometry.buckets / 64).unwrap_or(usize::MAX).clamp(8, 1024)
    }

    /// How many of the buckets to be kept ready are missing.
    fn missing(&self) -> usize {
        let wanted = BTREE_RESERVE + MOVING_RESERVE + self.kept_ready();
        wanted.saturating_sub(self.buckets.free_count()).min(self.kept_ready())
    }

    /// CPU time after which background work yields, in nanoseconds. It grows as the last quarter of
    /// the buckets kept ready is used up.
    #[must_use]
    pub fn breath_ns(&self) -> u64 {
        let (missing, ready) = (self.missing() as u64, self.kept_ready() as u64);
        BREATH_NS + (BREATH_NS_MAX - BREATH_NS) * (4 * missing).saturating_sub(3 * ready) / ready
    }

    /// Available buckets beyond the number at which writes bypass the cache.
    fn margin(&self) -> u64 {
        let count = self.buckets.count();
        let past = count * 100_u64.saturating_sub(self.options.cutoff_writeback) / 100;
        self.buckets.available().saturating_sub(past)
    }

    /// Returns whether so few buckets are available that sparse ones are emptied.
    #[must_use]
    pub fn are_buckets_scarce(&self) -> bool {
        let count = self.buckets.count();
        // Requests that wait for space start to wait at the reserve.
        let reserve = (BTREE_RESERVE + MOVING_RESERVE) as u64;
        let few = (count / AVAILABLE_SHARE).max(reserve + 1);
        self.buckets.available() < few || self.margin() < count / MARGIN_SHARE || self.is_short_of_room()
    }

    /// Returns whether writes will soon bypass the cache, or find no bucket, unless more buckets
    /// are freed.
    #[must_use]
    pub fn presses(&self) -> bool {
        self.margin() < self.buckets.count() / MARGIN_SHARE / 2 || 2 * self.missing() > self.kept_ready()
    }
}

impl CacheSet {
    /// Yields before a piece of background work that frees no buckets, under space pressure.
    pub(crate) async fn make_way(&self) {
        if self.with(|s| s.presses() && !s.stopping) {
            self.env().sleep(WAY).await;
        }
    }
}
