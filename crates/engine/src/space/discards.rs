//! The task that discards empty buckets on the cache device: the kernel's `discard`, but in the
//! background.
//!
//! Only `Free` buckets are discarded: their new generation is durable, so no pointer that a crash
//! could bring back refers to them. Metadata buckets, including those of the journal, are never
//! discarded. Enough free buckets are kept back to serve requests immediately, and the allocator
//! frees more as if those under discard did not exist. So no request waits for a discard; only a
//! stop waits for the one in flight.
//!
//! One discard is in flight at a time: devices execute them slowly, and concurrent ones slow down
//! all other I/O. If one fails, or the device does not support them, discards are off until the
//! option is set again or the set is reopened. They only help the device; nothing depends on them.

use crate::set::CacheSet;
use crate::space::free::runs;
use crate::state::State;
use alloc::vec::Vec;
use bcached_env::{IoError, IoErrorKind};
use bcached_format::BucketId;

/// Maximum number of buckets taken from the free list at once.
const BUCKETS_MAX: usize = 256;

/// Maximum number of sectors discarded at once (64 MiB), unless a bucket is larger.
const SECTORS_MAX: u64 = 131_072;

/// Counters of discards since the set was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiscardStats {
    /// Bytes discarded on the device.
    pub bytes: u64,
    /// Number of discards issued.
    pub count: u64,
    /// Why discards are no longer tried; `None` if they still are.
    pub refusal: Option<IoError>,
}

/// Whether buckets are discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiscardState {
    /// Discards are not enabled.
    Off,
    /// Discards are enabled and work.
    On,
    /// Discards are enabled, but the device does not support them.
    Unsupported,
    /// Discards are enabled, but one has failed.
    Failed(IoError),
}

impl State {
    /// Returns whether discards are enabled: by the option if it is set, else by the superblock.
    #[must_use]
    pub fn wants_discard(&self) -> bool {
        self.options.discard.unwrap_or(self.superblock.discard())
    }

    /// Free buckets kept back for allocation while others are under discard: the reserves, and what
    /// is used while the allocator frees more.
    fn discard_keep(&self) -> usize {
        self.free_low() - self.free_batch() / 2
    }

    fn begins_discard(&mut self) -> Vec<BucketId> {
        let is_over = self.settled || self.failed.is_some();
        if is_over || !self.wants_discard() || self.discards.refusal.is_some() {
            return Vec::new();
        }
        let keep = self.discard_keep();
        // Of the free list only: their new generations are durable (invariant D11).
        let taken = self.buckets.free.take_to_discard(keep, BUCKETS_MAX);
        self.work.buckets(taken.len());
        taken
    }
}

/// Runs the task until the set ends and none of its discards is in flight.
pub async fn run(set: CacheSet) {
    while !set.with(|s| s.settled || s.failed.is_some()) {
        let taken = set.with(State::begins_discard);
        if taken.is_empty() {
            set.signals().discard_work.wait().await;
            continue;
        }
        let bucket_sectors = set.with(|s| s.geometry.bucket_sectors);
        let together = usize::try_from(SECTORS_MAX / bucket_sectors).unwrap_or(usize::MAX);
        for run in runs(&taken, together) {
            let was_done = discard(&set, run, bucket_sectors).await;
            set.with(|s| s.buckets.free.discard_ends(run, was_done));
            set.signals().space.notify_all();
        }
    }
}

/// Discards a run of adjacent buckets. Does nothing and returns false if discards have turned out
/// to be useless, are disabled, or the set is ending.
async fn discard(set: &CacheSet, run: &[BucketId], bucket_sectors: u64) -> bool {
    let is_over =
        set.with(|s| s.settled || s.failed.is_some() || s.discards.refusal.is_some() || !s.wants_discard());
    let Some(first) = run.first().filter(|_| !is_over) else { return false };
    let (sector, sectors) = (first.index * bucket_sectors, run.len() as u64 * bucket_sectors);
    let done = if set.cache().info().discard {
        set.cache().discard(sector, sectors).await
    } else {
        Err(IoError { kind: IoErrorKind::Unsupported, disk: set.cache().id(), sector })
    };
    set.with(|s| match done {
        Ok(()) => {
            s.discards.bytes += sectors * 512;
            s.discards.count += 1;
        }
        Err(error) => s.discards.refusal = Some(error),
    });
    done.is_ok()
}

impl State {
    /// Returns the state of discards.
    #[must_use]
    pub fn discard_state(&self, device_can: bool) -> DiscardState {
        match self.discards.refusal {
            _ if !self.wants_discard() => DiscardState::Off,
            Some(IoError { kind: IoErrorKind::Unsupported, .. }) => DiscardState::Unsupported,
            None if !device_can => DiscardState::Unsupported,
            Some(error) => DiscardState::Failed(error),
            None => DiscardState::On,
        }
    }
}
