//! How short of buckets a set is, and what follows for those who work in the background.
//!
//! Buckets that can be had without writing dirty data back are *available*; those of them that may be handed out at once are *free*. Of
//! these some are kept ready, and when they become few the processor is shared otherwise: clients go on in between as often as ever, but
//! whoever makes room does more at a time, and who does not makes way.

use crate::set::CacheSet;
use crate::state::{BTREE_RESERVE, MOVING_RESERVE, State};
use bcached_env::exec::{BREATH_NS, BREATH_NS_MAX};
use core::time::Duration;

/// Sparse buckets are emptied when fewer than one bucket in so many is available, or fewer than one in so many more than those from which
/// on writes go past the cache; and it presses with half of the latter.
const AVAILABLE_SHARE: u64 = 8;
const MARGIN_SHARE: u64 = 12;

/// What does not make room waits for so long before each piece while it presses.
const WAY: Duration = Duration::from_millis(1);

impl State {
    /// Buckets that are kept ready beside the reserves.
    #[must_use]
    pub fn kept_ready(&self) -> usize {
        usize::try_from(self.geometry.buckets / 64).unwrap_or(usize::MAX).clamp(8, 1024)
    }

    /// Of those that are kept ready, how many are not.
    fn missing(&self) -> usize {
        let wanted = BTREE_RESERVE + MOVING_RESERVE + self.kept_ready();
        wanted.saturating_sub(self.buckets.free_count()).min(self.kept_ready())
    }

    /// CPU time after which background work lets others run, in nanoseconds: more as the last quarter of what is kept ready is used up.
    #[must_use]
    pub fn breath_ns(&self) -> u64 {
        let (missing, ready) = (self.missing() as u64, self.kept_ready() as u64);
        BREATH_NS + (BREATH_NS_MAX - BREATH_NS) * (4 * missing).saturating_sub(3 * ready) / ready
    }

    /// Available buckets beyond those from which on writes go past the cache.
    fn margin(&self) -> u64 {
        let count = self.buckets.count();
        let past = count * 100_u64.saturating_sub(self.options.cutoff_writeback) / 100;
        self.buckets.available().saturating_sub(past)
    }

    /// So few buckets are available that sparse ones are emptied.
    #[must_use]
    pub fn are_buckets_scarce(&self) -> bool {
        let count = self.buckets.count();
        // Whoever waits for space does so from the reserve on.
        let reserve = (BTREE_RESERVE + MOVING_RESERVE) as u64;
        let few = (count / AVAILABLE_SHARE).max(reserve + 1);
        self.buckets.available() < few || self.margin() < count / MARGIN_SHARE || self.is_short_of_room()
    }

    /// Writes go past the cache soon, or find no bucket, if no more room is made than now.
    #[must_use]
    pub fn presses(&self) -> bool {
        self.margin() < self.buckets.count() / MARGIN_SHARE / 2 || 2 * self.missing() > self.kept_ready()
    }
}

impl CacheSet {
    /// For background work that makes no room, before each of its pieces: while it presses others go first.
    pub(crate) async fn make_way(&self) {
        if self.with(|s| s.presses() && !s.stopping) {
            self.env().sleep(WAY).await;
        }
    }
}
