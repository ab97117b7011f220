//! The task that keeps buckets free: invalidates victims in batches, stores their generations, hands them over.
//! Beside it only the reserve has priorities stored while the set runs.

use crate::error::Error;
use crate::journal::writer;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::buckets::Invalidated;
use crate::space::starvation::Asked;
use crate::space::{Usage, prios};
use crate::state::State;
use alloc::vec::Vec;
use bcached_format::BucketId;
use core::time::Duration;

/// So often must the walk, or a replay beside requests, have met what it cannot read before those who wait for its end give up: it may pass.
const TRIES: u32 = 3;
/// How long to rest when nothing can be invalidated.
const PAUSE: Duration = Duration::from_millis(5);

/// The task. It ends when the set does; what fails has made the set fail.
pub async fn run(set: CacheSet) {
    let _of_set = keep_free(&set).await;
}

async fn keep_free(set: &CacheSet) -> Result<(), Error> {
    loop {
        set.check_alive()?;
        if set.with(|s| s.settled) {
            // What is given up in memory is so on the device.
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
        // Perhaps the last dirty pointers of some buckets are gone, but not durably.
        writer::commit(set).await?;
        set.with(|s| s.starvation.search_begins());
        let searched = invalidate(set, |_| 1).await;
        set.with(|s| {
            s.starvation.search_ends(searched.kept_by_age);
            s.parked_is_in_the_way = searched.count == 0 && searched.passed_used;
        });
        if searched.count == 0 {
            set.signals().parked_work.notify_all();
            // Waiters look again: what they do without space (bypass) may be possible now. They ring back at once if
            // it is not, so this rest is not cut short.
            set.signals().space.notify_all();
            set.signals().writeback_work.notify_all();
            set.signals().gc_work.notify_all();
            set.env().sleep(PAUSE).await;
        }
    }
}

/// Stores the generations of what was invalidated, and hands it over; false if nothing was.
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
        if set.with(|s| s.buckets.take_gc_untold()) {
            set.signals().gc_work.notify_all();
        }
        if searched.count > 0 || searched.is_complete {
            return searched;
        }
    }
}

/// Takes `count` free buckets for metadata, all or none, waiting for the allocator.
pub async fn take_metadata(set: &CacheSet, count: usize) -> Result<Vec<BucketId>, Error> {
    loop {
        set.check_alive()?;
        if let Some(buckets) = try_take_metadata(set, count) {
            return Ok(buckets);
        }
        metadata_comes(set, count).await?;
    }
}

/// Takes `count` free buckets for metadata if there are so many.
pub fn try_take_metadata(set: &CacheSet, count: usize) -> Option<Vec<BucketId>> {
    let taken = set.with(|s| {
        (s.buckets.free_count() >= count)
            .then(|| (0..count).filter_map(|_| s.buckets.take(Usage::Meta, 0)).collect())
    });
    set.signals().allocator_work.notify_all();
    taken
}

/// Waits until `count` buckets are free. If it is in vain the set has failed: its tree can grow no more. GC may need to
/// rewrite nodes first, so nobody waits here who holds anything that it needs.
pub async fn metadata_comes(set: &CacheSet, count: usize) -> Result<(), Error> {
    let in_vain = |s: &State, asked| {
        // No pass comes while a set is opened or stopped, or while the journal cannot be put.
        let comes = !s.note_held && !s.stopping && s.replay_is_in_vain().is_none();
        let is_last = !comes && s.starvation.needs_pass(asked);
        let last = || s.starvation.failure().unwrap_or(Error::NoSpace);
        s.starvation.verdict(asked).or_else(|| is_last.then(last)).or_else(|| s.walk_is_in_vain())
    };
    let asked = set.with(|s| s.starvation.ask());
    buckets_come(set, count, asked, in_vain).await.map_err(|error| set.fail(error))
}

/// The same for GC itself. False: only the end of the pass that asks can free any, or the set is being stopped.
pub async fn metadata_comes_to_gc(set: &CacheSet, count: usize) -> Result<bool, Error> {
    let in_vain = |s: &State, asked| (s.stopping || s.starvation.needs_pass(asked)).then_some(Error::NoSpace);
    let asked = set.with(|s| s.starvation.now());
    match buckets_come(set, count, asked, in_vain).await {
        Err(Error::NoSpace) => Ok(false),
        other => other.map(|()| true),
    }
}

/// The same for who puts the journal beside requests. False: neither the allocator nor the walk makes any, or the set is being stopped.
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
    /// So often is something tried before those who wait for it give up.
    pub(crate) const fn tries_awaited(&self) -> u32 {
        if self.note_held || self.stopping { 1 } else { TRIES }
    }

    /// Why the walk, which buckets must wait for, does not come to its end, if so. While a set is opened or stopped the first error counts.
    pub(crate) fn walk_is_in_vain(&self) -> Option<Error> {
        self.frontier.trouble(self.tries_awaited())
    }
}

async fn buckets_come(
    set: &CacheSet,
    count: usize,
    asked: Asked,
    in_vain: impl Fn(&State, Asked) -> Option<Error>,
) -> Result<(), Error> {
    loop {
        set.check_alive()?;
        if set.with(|s| s.buckets.free_count() >= count) {
            return Ok(());
        }
        if set.with(|s| s.settled) {
            // Nothing makes any more.
            return Err(Error::Stopping);
        }
        if set.with(|s| s.journal_is_exhausted()) {
            return Err(set.fail(Error::JournalFull));
        }
        // One that is being discarded comes back.
        let in_vain = |s: &State| if s.buckets.free.under_discard() > 0 { None } else { in_vain(s, asked) };
        if let Some(error) = set.with(|s| in_vain(s)) {
            return Err(error);
        }
        set.signals().allocator_work.notify_all();
        set.signals().space.wait().await;
    }
}
