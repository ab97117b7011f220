//! The task that keeps buckets free: invalidates victims in batches, stores their generations, hands them over.
//! Nobody else writes priorities while the set runs.

use crate::error::Error;
use crate::journal::writer;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::buckets::Invalidated;
use crate::space::{Usage, prios};
use crate::state::State;
use alloc::vec::Vec;
use bcached_format::BucketId;
use core::time::Duration;

/// How long to rest when nothing can be invalidated.
const PAUSE: Duration = Duration::from_millis(5);

/// The task.
pub async fn run(set: CacheSet) {
    loop {
        if set.with(|s| s.settled || s.failed.is_some()) {
            return;
        }
        if !set.with(|s| s.buckets.free_count() < s.free_low()) {
            set.signals().allocator_work.wait().await;
            continue;
        }
        let passed_used = invalidate(&set, |s| s.free_batch().max(s.replay_batch())).await.passed_used;
        let _phase = passed_used.then(|| set.begin(Phase::EvictionBesideRead));
        if set.with(|s| !s.buckets.pending().is_empty()) {
            if prios::store(&set).await.is_err() {
                return;
            }
            continue;
        }
        // Perhaps the last dirty pointers of some buckets are gone, but not durably.
        if writer::commit(&set).await.is_err() {
            return;
        }
        if invalidate(&set, |_| 1).await.count == 0 {
            // Waiters look again: what they do without space (bypass) may be possible now. They ring back at once if
            // it is not, so this rest is not cut short.
            set.signals().space.notify_all();
            set.signals().writeback_work.notify_all();
            set.signals().gc_work.notify_all();
            set.env().sleep(PAUSE).await;
        }
    }
}

/// Looks for buckets to invalidate, as many as `wanted` says, until some are found or all have been looked at.
async fn invalidate(set: &CacheSet, wanted: impl Fn(&State) -> usize) -> Invalidated {
    loop {
        set.env().breathe().await;
        let searched = set.with(|s| {
            let durable = s.journal.durable();
            let searched = s.buckets.invalidate(wanted(s), durable);
            s.work.buckets(searched.looked_at);
            searched
        });
        if searched.count > 0 || searched.is_complete {
            return searched;
        }
    }
}

/// Takes `count` free buckets for metadata, all or none, waiting for the allocator.
pub async fn take_metadata(set: &CacheSet, count: usize) -> Result<Vec<BucketId>, Error> {
    loop {
        set.check_alive()?;
        let taken = set.with(|s| {
            (s.buckets.free_count() >= count)
                .then(|| (0..count).filter_map(|_| s.buckets.take(Usage::Meta, 0)).collect())
        });
        set.signals().allocator_work.notify_all();
        match taken {
            Some(buckets) => return Ok(buckets),
            None if set.with(|s| s.journal.is_exhausted()) => return Err(set.fail(Error::JournalFull)),
            None => match set.with(|s| s.starved()) {
                Some(error) => return Err(set.fail(error)),
                None => set.signals().space.wait().await,
            },
        }
    }
}
