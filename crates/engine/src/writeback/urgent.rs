//! Write-back that a caller waits for: as fast as the devices allow, whatever the options say. It
//! fails if the devices accept no data.
//!
//! It ends in one of two ways. A volume that leaves the cache gets no new dirty data, so batches
//! run until nothing is dirty. A volume that stays continues to be written to. One sweep over all
//! of it is enough, because whatever was dirty when the sweep began is clean behind it, or newer.
//! If the sweep had to skip something, another follows.

use crate::error::Error;
use crate::request::Target;
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::VolumeId;
use crate::writeback::{batch, task};
use alloc::rc::Rc;
use bcached_env::sync::Permit;
use core::cell::Cell;
use core::time::Duration;

/// Write-back fails after this many consecutive batches with an error and no progress, or sweeps
/// with any error.
const FRUITLESS_MAX: u32 = 5;
/// Rest after an error.
const REST_AFTER_TROUBLE: Duration = Duration::from_secs(1);
/// How often to check whether the tree has been walked, without a notification.
const WALK_LOOK: Duration = Duration::from_secs(1);
/// How often to look again at ranges that were being written.
const REST_BESIDE_WRITES: Duration = Duration::from_millis(10);

/// Cancels long work. Clones share one flag.
#[derive(Clone, Default)]
pub struct CancelToken(Rc<Cell<bool>>);

impl CancelToken {
    /// Returns true if the work is to be cancelled.
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.0.get()
    }
}

/// Writes back batch after batch until `is_done`, which is called before each, returns true. Holds
/// the volume's write-back lock meanwhile.
///
/// # Errors
/// The error that keeps the data from being written back; [`Error::Stopping`],
/// [`Error::Cancelled`], or the failure of the set.
pub async fn write_back(
    set: &CacheSet,
    target: &Target,
    cancel: &CancelToken,
    mut is_done: impl AsyncFnMut() -> Result<bool, Error>,
) -> Result<(), Error> {
    let _alone = alone(set, target.id).await?;
    walked(set, cancel).await?;
    set.with(|s| s.retry_places(target));
    let mut fruitless = 0;
    loop {
        check(set, cancel)?;
        if is_done().await? {
            return Ok(());
        }
        tell_hidden(set, target)?;
        let batch = batch::clean_batch(set, target, true).await;
        match batch.trouble {
            _ if batch.sectors > 0 => {
                fruitless = 0;
                goes_on(set).await;
            }
            None => {
                let until = set.env().now() + REST_BESIDE_WRITES;
                set.env().wait_until(&set.signals().ranges, until).await;
            }
            Some(error) => {
                fruitless += 1;
                if fruitless == FRUITLESS_MAX {
                    return Err(error);
                }
                rest(set, cancel, REST_AFTER_TROUBLE).await;
            }
        }
    }
}

/// Runs sweeps until one has skipped nothing. Data that cannot be written back is skipped a few
/// times and then reported as an error; all other data is clean by then.
async fn sweep(set: &CacheSet, target: &Target, cancel: &CancelToken) -> Result<(), Error> {
    let _alone = alone(set, target.id).await?;
    walked(set, cancel).await?;
    set.with(|s| s.retry_places(target));
    let mut fruitless = 0;
    loop {
        match sweep_once(set, target, cancel).await? {
            SweepResult { is_clean: true, .. } => return tell_hidden(set, target),
            SweepResult { has_gaps: false, trouble: None, .. } => {
                // Data left to writes in progress is covered only once these have ended.
                if changes_have_ended(set, target, cancel).await? {
                    return Ok(());
                }
            }
            SweepResult { trouble: None, .. } => rest(set, cancel, REST_BESIDE_WRITES).await,
            SweepResult { trouble: Some(error), .. } => {
                fruitless += 1;
                if fruitless == FRUITLESS_MAX {
                    return Err(error);
                }
                rest(set, cancel, REST_AFTER_TROUBLE).await;
            }
        }
    }
}

/// Returns an error if there may be more dirty data behind a damaged node, which cannot be written
/// back. Called when all known dirty data has been written back.
fn tell_hidden(set: &CacheSet, target: &Target) -> Result<(), Error> {
    target.inode.and_then(|inode| set.with(|s| s.hidden(inode))).map_or(Ok(()), Err)
}

/// Waits for the changes in flight. Returns false if one failed to which the last sweep had left
/// something.
async fn changes_have_ended(set: &CacheSet, target: &Target, cancel: &CancelToken) -> Result<bool, Error> {
    set.with(|s| {
        let Some(volume) = s.volumes.get_mut(target.id) else { return };
        volume.round += 1;
        volume.earlier_changes = volume.changes;
    });
    loop {
        check(set, cancel)?;
        let volume = set.with(|s| {
            let volume = s.volumes.get(target.id)?;
            Some((volume.earlier_changes, volume.pace.age.ended().1))
        });
        match volume {
            None | Some((0, false)) => return Ok(true),
            Some((0, true)) => return Ok(false),
            Some(_) => rest(set, cancel, REST_BESIDE_WRITES).await,
        }
    }
}

/// The result of a sweep.
struct SweepResult {
    /// Nothing is dirty.
    is_clean: bool,
    /// It has skipped something.
    has_gaps: bool,
    /// Its first error.
    trouble: Option<Error>,
}

/// Sweeps from the start of the volume to its end.
async fn sweep_once(set: &CacheSet, target: &Target, cancel: &CancelToken) -> Result<SweepResult, Error> {
    let mut trouble = None;
    let began = set.with(|s| s.sweep_begins(target));
    loop {
        check(set, cancel)?;
        match set.with(|s| s.swept_since(target, began)) {
            Some((is_clean, has_gaps)) => return Ok(SweepResult { is_clean, has_gaps, trouble }),
            None => {
                let batch = batch::clean_batch(set, target, true).await;
                trouble = trouble.or(batch.trouble);
                goes_on(set).await;
            }
        }
    }
}

impl State {
    /// Makes failed extents due now.
    fn retry_places(&mut self, target: &Target) {
        let now = self.now;
        if let Some(volume) = self.volumes.get_mut(target.id) {
            volume.failed_extents.retry(now);
        }
    }

    /// Begins a sweep at the start of the volume. Returns how many sweeps have ended.
    fn sweep_begins(&mut self, target: &Target) -> u64 {
        let now = self.now;
        let Some(volume) = self.volumes.get_mut(target.id) else { return 0 };
        volume.writeback_from = volume.data_offset;
        volume.pace.age.sweep_begins(now);
        volume.pace.age.ended().0
    }

    /// Returns `None` until nothing is dirty or a sweep has ended since `began` sweeps had ended.
    /// Then returns whether nothing is dirty, and whether the sweep has skipped something.
    fn swept_since(&self, target: &Target, began: u64) -> Option<(bool, bool)> {
        let volume = self.volumes.get(target.id).filter(|volume| volume.inode == target.inode);
        let dirty = volume.and_then(|volume| volume.inode).map_or(0, |inode| self.dirty.of(inode));
        if dirty == 0 {
            return Some((true, false));
        }
        let (ended, had_gaps) = volume?.pace.age.ended();
        (ended > began).then_some((false, had_gaps))
    }
}

/// Waits until the amount of dirty data is known, but does not wait for a node that cannot be read.
pub async fn walked(set: &CacheSet, cancel: &CancelToken) -> Result<(), Error> {
    while !set.has_walked()? {
        check(set, cancel)?;
        // Cancelling notifies this, and so does the end of the walk.
        set.env().wait_until(&set.signals().writeback_work, set.env().now() + WALK_LOOK).await;
    }
    Ok(())
}

/// Waits for the volume's write-back lock: until another task's batch has ended, or all of the
/// write-back that another caller waits for.
async fn alone(set: &CacheSet, id: VolumeId) -> Result<Permit, Error> {
    let lock = set.with(|s| s.volumes.get(id).map(|volume| volume.writeback_lock.clone()));
    Ok(lock.ok_or(Error::NoVolume)?.acquire(1).await)
}

/// Returns an error if long work must not continue.
pub fn check(set: &CacheSet, cancel: &CancelToken) -> Result<(), Error> {
    set.check_alive()?;
    if set.with(|s| s.stopping) {
        return Err(Error::Stopping);
    }
    if cancel.is_asked() { Err(Error::Cancelled) } else { Ok(()) }
}

async fn goes_on(set: &CacheSet) {
    set.signals().allocator_work.notify_all();
    set.env().yield_now().await;
}

async fn rest(set: &CacheSet, cancel: &CancelToken, time: Duration) {
    let until = set.env().now() + time;
    while set.env().now() < until && !set.is_ending() && !cancel.is_asked() {
        set.env().wait_until(&set.signals().writeback_work, until).await;
    }
}

impl CacheSet {
    /// Cancels long work. It ends with [`Error::Cancelled`] when its current batch has ended.
    pub fn cancel(&self, cancel: &CancelToken) {
        cancel.0.set(true);
        self.signals().writeback_work.notify_all();
    }

    /// Writes back the dirty data of a volume now, as fast as the devices allow and whatever the
    /// write-back options say. The volume stays cached, and what is written meanwhile may be dirty
    /// afterwards.
    ///
    /// # Errors
    /// The backing device refuses some of the data (then the rest is written back), the work is
    /// cancelled, the set is being stopped or fails, there is no such volume, or it has no backing
    /// device.
    pub async fn write_back(&self, id: VolumeId, cancel: &CancelToken) -> Result<(), Error> {
        let target = self.with(|s| s.hold(id))?;
        let written = match (&target.backing, target.inode) {
            (None, _) => Err(Error::FlashOnly),
            (_, None) => Ok(()),
            _ => sweep(self, &target, cancel).await,
        };
        if written.is_ok()
            && let Ok(_alone) = alone(self, id).await
        {
            task::mark_if_clean(self, id).await;
        }
        self.let_go(id);
        self.signals().writeback_work.notify_all();
        written
    }
}
