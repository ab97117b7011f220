//! The allocator: the task that keeps buckets free. It invalidates victims in batches, stores their
//! generations, and puts them on the free list. Apart from the allocator, only the reserve stores
//! priorities while the set runs.

use crate::error::Error;
use crate::journal::writer;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::buckets::Invalidation;
use crate::space::starvation::WaitStart;
use crate::space::{BucketUsage, prios};
use crate::state::State;
use alloc::vec::Vec;
use bcached_format::BucketId;
use core::time::Duration;

/// Number of consecutive failures of the walk, or of a background replay, after which tasks that
/// wait for its end give up. Fewer may be transient.
const TRIES: u32 = 3;
/// How long to pause when no bucket can be invalidated.
const PAUSE: Duration = Duration::from_millis(5);

/// Runs the allocator until the set ends. Any error it meets has already failed the set.
pub async fn run(set: CacheSet) {
    let _of_set = keep_free(&set).await;
}

async fn keep_free(set: &CacheSet) -> Result<(), Error> {
    loop {
        set.check_alive()?;
        if set.with(|s| s.settled) {
            // What has been invalidated in memory is also invalidated on the device.
            return store_pending(set).await.map(drop);
        }
        if !set.with(|s| s.frontier.is_complete() && s.buckets.free_count() < s.free_low()) {
            set.signals().allocator_work.wait().await;
            continue;
        }
        set.with(State::close_left);
        if set.with(|s| s.open.has_closed()) {
            set.signals().summary_work.notify_all();
        }
        let passed_used = invalidate(set, |s| s.free_batch().max(s.replay_batch())).await.passed_used;
        let _phase = passed_used.then(|| set.begin(Phase::EvictionBesideRead));
        if store_pending(set).await? {
            continue;
        }
        // The last dirty pointers into some buckets may be gone, but not durably yet.
        writer::commit(set).await?;
        set.with(|s| s.starvation.search_begins());
        let searched = invalidate(set, |_| 1).await;
        set.with(|s| {
            s.starvation.search_ends(searched.kept_by_age);
            s.parked_is_in_the_way = searched.count == 0 && searched.passed_used;
        });
        if searched.count == 0 {
            set.signals().parked_work.notify_all();
            // Wake the waiters: what they can do without space (bypass) may be possible now. If it
            // is not, they signal back at once, so this pause must not be cut short by that signal.
            set.signals().space.notify_all();
            set.signals().writeback_work.notify_all();
            set.signals().gc_work.notify_all();
            set.env().sleep(PAUSE).await;
        }
    }
}

/// Stores the generations of the invalidated buckets and releases them to the free list. Returns
/// false if none were pending.
async fn store_pending(set: &CacheSet) -> Result<bool, Error> {
    if set.with(|s| s.buckets.pending().is_empty()) {
        return Ok(false);
    }
    set.with(|s| {
        s.starvation.search_ends(false);
        s.parked_is_in_the_way = false;
    });
    prios::store(set).await?;
    Ok(true)
}

/// Searches for buckets to invalidate, up to the number that `wanted` returns. Returns when some
/// are found or all buckets have been looked at.
async fn invalidate(set: &CacheSet, wanted: impl Fn(&State) -> usize) -> Invalidation {
    loop {
        set.env().breathe().await;
        let searched = set.with(|s| {
            let durable = s.journal.durable();
            let searched = s.buckets.invalidate(wanted(s), durable);
            s.work.buckets(searched.looked_at);
            searched
        });
        if set.with(|s| s.buckets.take_gc_untold()) {
            set.signals().gc_work.notify_all();
        }
        if searched.count > 0 || searched.is_complete {
            return searched;
        }
    }
}

/// Takes `count` free buckets for metadata, all or none; waits for the allocator.
pub async fn take_metadata(set: &CacheSet, count: usize) -> Result<Vec<BucketId>, Error> {
    loop {
        set.check_alive()?;
        if let Some(buckets) = try_take_metadata(set, count) {
            return Ok(buckets);
        }
        metadata_comes(set, count).await?;
    }
}

/// Takes `count` free buckets for metadata, or returns `None` if fewer are free.
pub fn try_take_metadata(set: &CacheSet, count: usize) -> Option<Vec<BucketId>> {
    let taken = set.with(|s| {
        (s.buckets.free_count() >= count)
            .then(|| (0..count).filter_map(|_| s.buckets.take(BucketUsage::Meta, 0)).collect())
    });
    set.signals().allocator_work.notify_all();
    taken
}

/// Waits until `count` buckets are free. If they will never be, the set fails, because its tree
/// cannot grow any more. GC may have to rewrite nodes first, so the caller must not hold anything
/// that GC needs (invariant L7).
pub async fn metadata_comes(set: &CacheSet, count: usize) -> Result<(), Error> {
    let in_vain = |s: &State, asked| {
        // No pass of GC runs while a set is being opened or stopped, or while the replay cannot
        // finish.
        let comes = !s.note_held && !s.stopping && s.replay_is_in_vain().is_none();
        let is_last = !comes && s.starvation.needs_pass(asked);
        let last = || s.starvation.failure().unwrap_or(Error::NoSpace);
        s.starvation.verdict(asked).or_else(|| is_last.then(last)).or_else(|| s.walk_is_in_vain())
    };
    let asked = set.with(|s| s.starvation.ask());
    buckets_come(set, count, asked, in_vain).await.map_err(|error| set.fail(error))
}

/// Like [`metadata_comes`], for GC itself. Returns false if only the end of the calling pass can
/// free buckets, or if the set is being stopped.
pub async fn metadata_comes_to_gc(set: &CacheSet, count: usize) -> Result<bool, Error> {
    let in_vain = |s: &State, asked| (s.stopping || s.starvation.needs_pass(asked)).then_some(Error::NoSpace);
    let asked = set.with(|s| s.starvation.now());
    match buckets_come(set, count, asked, in_vain).await {
        Err(Error::NoSpace) => Ok(false),
        other => other.map(|()| true),
    }
}

/// Like [`metadata_comes`], for the background replay of the journal. Returns false if neither the
/// allocator nor the walk will free any, or if the set is being stopped.
pub async fn metadata_comes_to_replay(set: &CacheSet, count: usize) -> Result<bool, Error> {
    let in_vain = |s: &State, asked| {
        (s.stopping || s.starvation.needs_pass(asked) || s.walk_is_in_vain().is_some())
            .then_some(Error::NoSpace)
    };
    let asked = set.with(|s| s.starvation.now());
    match buckets_come(set, count, asked, in_vain).await {
        Err(Error::NoSpace) => Ok(false),
        other => other.map(|()| true),
    }
}

impl State {
    /// Number of failed tries after which the tasks that wait for something give up.
    pub(crate) const fn tries_awaited(&self) -> u32 {
        if self.note_held || self.stopping { 1 } else { TRIES }
    }

    /// Returns why the walk, which buckets must wait for, cannot finish. `None` if it may still
    /// finish. While a set is being opened or stopped, the first error counts.
    pub(crate) fn walk_is_in_vain(&self) -> Option<Error> {
        self.frontier.trouble(self.tries_awaited())
    }
}

async fn buckets_come(
    set: &CacheSet,
    count: usize,
    asked: WaitStart,
    in_vain: impl Fn(&State, WaitStart) -> Option<Error>,
) -> Result<(), Error> {
    loop {
        set.check_alive()?;
        if set.with(|s| s.buckets.free_count() >= count) {
            return Ok(());
        }
        if set.with(|s| s.settled) {
            // No task frees buckets any more.
            return Err(Error::Stopping);
        }
        if set.with(|s| s.journal_is_exhausted()) {
            return Err(set.fail(Error::JournalFull));
        }
        // A bucket under discard will be returned.
        let in_vain = |s: &State| if s.buckets.free.under_discard() > 0 { None } else { in_vain(s, asked) };
        if let Some(error) = set.with(|s| in_vain(s)) {
            return Err(error);
        }
        set.signals().allocator_work.notify_all();
        set.signals().space.wait().await;
    }
}
