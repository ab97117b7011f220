//! The task that tells the cache device of buckets that hold nothing: the kernel's `discard`, but in the background.
//!
//! Only what is `Free` is discarded: its new generation is durable, so that no pointer that a crash could bring back names it. Buckets
//! of metadata, those of the journal among them, are never. Of the free ones so many stay that who needs one has it at once, and
//! the allocator works for more as if those under discard were not there: nobody waits for a discard, but that a stop waits
//! for the one under way.
//!
//! One discard runs at a time: devices carry them out slowly, and beside each other they slow down everything else. If one
//! fails, or the device knows none, they are off until somebody sets the option or the set is opened again: they help the
//! device, and nothing needs them.

use crate::set::CacheSet;
use crate::space::free::runs;
use crate::state::State;
use alloc::vec::Vec;
use bcached_env::{IoError, IoErrorKind};
use bcached_format::BucketId;

/// Most buckets that are taken from the free ones at once.
const BUCKETS_MAX: usize = 256;

/// Most sectors that are discarded at once (64 MiB), if a bucket is not larger.
const SECTORS_MAX: u64 = 131_072;

/// What has become of discards since the set was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Discards {
    /// What the device has been told to give up, in bytes.
    pub bytes: u64,
    /// In so many discards.
    pub count: u64,
    /// Why none is tried any more, if so.
    pub refusal: Option<IoError>,
}

/// Whether buckets are discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiscardState {
    /// Nobody asks for it.
    Off,
    /// They are.
    On,
    /// Somebody asks for it, and the device knows no discard.
    Unsupported,
    /// Somebody asks for it, and one has failed.
    Failed(IoError),
}

impl State {
    /// Whether buckets are to be discarded: what was said, or else what the superblock says.
    #[must_use]
    pub fn wants_discard(&self) -> bool {
        self.options.discard.unwrap_or(self.superblock.discard())
    }

    /// Free buckets that are left for who needs some while others are under discard: the reserves, and what is used while the
    /// allocator makes more.
    fn discard_keep(&self) -> usize {
        self.free_low() - self.free_batch() / 2
    }

    fn begins_discard(&mut self) -> Vec<BucketId> {
        let is_over = self.settled || self.failed.is_some();
        if is_over || !self.wants_discard() || self.discards.refusal.is_some() {
            return Vec::new();
        }
        let keep = self.discard_keep();
        let taken = self.buckets.free.take_to_discard(keep, BUCKETS_MAX);
        self.work.buckets(taken.len());
        taken
    }
}

/// The task. It ends when the set does, and when none of its discards is under way any more.
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

/// Discards neighbours, unless that has turned out to be in vain, or something else has to end.
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
    /// What becomes of freed buckets.
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
