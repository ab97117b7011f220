//! The task that writes back the dirty data of one volume. Each volume has its own task: a stalled
//! backing device holds up only its own data.

use crate::error::Error;
use crate::journal::writer;
use crate::request::Target;
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::{VolumeId, record};
use crate::writeback::batch::{self, BatchResult};
use crate::writeback::pace::PaceDecision;
use crate::writeback::stripes;
use alloc::boxed::Box;
use bcached_env::Time;
use bcached_format::BackingState;
use core::time::Duration;

/// Rest of a volume that has nothing to write back, or that another task is writing back. A change
/// of that notifies the task.
const ASIDE: Duration = Duration::from_secs(60);
/// Minimum rest after a batch without progress.
const FRUITLESS_MIN: Duration = Duration::from_millis(10);
/// Maximum such rest if the volume has too much dirty data, or if its data was only in use.
const FRUITLESS_MAX: Duration = Duration::from_secs(1);

/// The task. Runs as long as the set runs and has the volume.
pub async fn run(set: CacheSet, id: VolumeId) {
    loop {
        let until = turn(&set, id).await;
        // A notification during the turn is missed, above all that of a stop. So check here.
        if set.is_over(id) {
            return;
        }
        if until <= set.env().now() {
            set.env().yield_now().await;
        } else {
            set.env().wait_until(&set.signals().writeback_work, until).await;
        }
    }
}

/// Takes one turn, and returns when the next is due.
async fn turn(set: &CacheSet, id: VolumeId) -> Time {
    let aside = set.env().now() + ASIDE;
    // The amount of dirty data is unknown until all has been counted. The end of counting notifies
    // this task.
    if set.is_over(id) || !set.with(|s| s.is_counted()) {
        return aside;
    }
    let Some(target) = set.target(id).filter(|target| target.inode.is_some()) else { return aside };
    // What cannot be counted now is retried at the next turn. Write-back reports the cause.
    let _counted = stripes::follow(set, &target).await;
    if set.is_over(id) {
        return aside;
    }
    // While the volume is being detached, that task does all of its write-back.
    let alone = set.with(|s| s.volumes.get(id)?.writeback_lock.try_acquire(1));
    let Some(_alone) = alone else { return aside };
    let next = match set.with(|s| s.call_write_back(&target)) {
        PaceDecision::Wait(until) => until,
        PaceDecision::Write => {
            let batch = batch::clean_batch(set, &target, false).await;
            after(set, &target, &batch);
            set.env().now()
        }
    };
    if !set.with(|s| stays_marked(s, id)) {
        mark_if_clean(set, id).await;
    }
    next
}

/// Writes *clean* to the superblock when nothing is dirty, and shows the error that prevents it.
/// The caller holds the volume's write-back lock.
pub async fn mark_if_clean(set: &CacheSet, id: VolumeId) {
    let marked = mark_clean(set, id).await;
    set.with(|s| tell_marking(s, id, marked));
}

/// Returns true if the volume stays marked *dirty* when nothing is: its disk is to sleep, and the
/// next write would have to wake the disk to mark it again. A caller that waits for the volume to
/// be clean, such as a stop, has it marked.
pub fn stays_marked(s: &mut State, id: VolumeId) -> bool {
    let is_clean = is_clean(s, id);
    let Some(volume) = s.volumes.get_mut(id) else { return false };
    if volume.options.spindown_after.is_none() {
        return false;
    }
    if is_clean {
        volume.is_rid_of_dirty();
    }
    true
}

/// Sets how long the volume rests after a batch.
fn after(set: &CacheSet, target: &Target, batch: &BatchResult) {
    let is_behind = set.with(|s| s.is_behind(target));
    if batch.sectors > 0 && is_behind {
        set.signals().allocator_work.notify_all();
    }
    if batch.sectors > 0 && !batch.is_round {
        return;
    }
    set.with(|s| {
        let now = s.now;
        let Some(volume) = s.volumes.get_mut(target.id) else { return };
        volume.client_activity.rests();
        // Two sweeps and a rest between them stay within the limit.
        let limit = volume.options.max_dirty_age.map_or(Duration::MAX, |limit| limit / 4);
        let rest = volume.options.writeback_delay.min(limit);
        if batch.sectors > 0 {
            volume.pace.rest_until(now + rest);
        } else {
            // Perhaps all of the dirty data is just being overwritten, which ends soon.
            let is_soon = is_behind || batch.trouble.is_none();
            let rest = if is_soon { rest.min(FRUITLESS_MAX) } else { rest };
            volume.pace.retry_at(now + rest.max(FRUITLESS_MIN));
        }
    });
}

/// Writes *clean* to the superblock when nothing is dirty.
pub async fn mark_clean(set: &CacheSet, id: VolumeId) -> Result<(), Error> {
    let clean = set.with(|s| is_clean(s, id));
    if !clean {
        return Ok(());
    }
    writer::commit(set).await?;
    record::update(set, id, |s, superblock| {
        // Decided under the lock of the record: invariant D15.
        if is_clean(s, id) {
            superblock.set_state(BackingState::Clean);
        }
    })
    .await?;
    set.with(|s| {
        // From here on, a request that makes something dirty marks the superblock first.
        if let Some(volume) = s.volumes.get_mut(id).filter(|volume| !volume.dirty_marked) {
            volume.is_rid_of_dirty();
        }
    });
    Ok(())
}

/// Shows the error that prevents marking. It is retried at every turn. Until then the device says
/// *dirty*, which loses nothing but the freedom to be used without the cache. A failed set reports
/// its failure itself.
fn tell_marking(s: &mut State, id: VolumeId, marked: Result<(), Error>) {
    if let Some(volume) = s.volumes.get_mut(id) {
        volume.marking_trouble =
            marked.err().filter(|error| !matches!(error, Error::Failed(_))).map(Box::new);
    }
}

fn is_clean(s: &State, id: VolumeId) -> bool {
    s.volumes.get(id).is_some_and(|volume| {
        volume.state() == Some(BackingState::Dirty)
            && volume.inode.is_some_and(|inode| s.has_counted(inode) && s.dirty.of(inode) == 0)
            && !volume.ranges.has_writes()
    })
}
