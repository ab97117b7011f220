//! Write-back that somebody waits for: as fast as the devices go, whatever the options say, and given up if they take no data.
//!
//! There are two ends to it. A volume that leaves the cache gets no new dirty data, so all of it is written back, batch after
//! batch, until nothing is left. A volume that stays goes on being written to: there one sweep over all of it is enough,
//! because whatever was dirty when it began is clean behind it, or newer. Where it had to pass something by another follows.

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

/// Batches in a row that meet trouble and get nothing done, or sweeps that meet any, before it is given up.
const FRUITLESS_MAX: u32 = 5;
/// Rest before trouble is met again.
const REST_AFTER_TROUBLE: Duration = Duration::from_secs(1);
/// How often to look whether the tree has been walked, if nobody tells.
const WALK_LOOK: Duration = Duration::from_secs(1);
/// How often to look at ranges that were being written.
const REST_BESIDE_WRITES: Duration = Duration::from_millis(10);

/// Gives up long work. Clones are the same one.
#[derive(Clone, Default)]
pub struct Cancel(Rc<Cell<bool>>);

impl Cancel {
    /// Whether the work is to be given up.
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.0.get()
    }
}

/// Writes back batch after batch until `is_done` says so, which is asked before each. Holds the volume's write-back meanwhile.
///
/// # Errors
/// What keeps the data from being written back; [`Error::Stopping`], [`Error::Cancelled`], and a set's failure.
pub async fn write_back(
    set: &CacheSet,
    target: &Target,
    cancel: &Cancel,
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

/// Sweep after sweep until one has passed nothing by. What cannot be written back is passed by a few times and then told; the
/// rest is clean by then.
async fn sweep(set: &CacheSet, target: &Target, cancel: &Cancel) -> Result<(), Error> {
    let _alone = alone(set, target.id).await?;
    walked(set, cancel).await?;
    set.with(|s| s.retry_places(target));
    let mut fruitless = 0;
    loop {
        match sweep_once(set, target, cancel).await? {
            Swept { is_clean: true, .. } => return tell_hidden(set, target),
            Swept { has_gaps: false, trouble: None, .. } => {
                // What was left to writes in progress is theirs only once they have come.
                if changes_have_ended(set, target, cancel).await? {
                    return Ok(());
                }
            }
            Swept { trouble: None, .. } => rest(set, cancel, REST_BESIDE_WRITES).await,
            Swept { trouble: Some(error), .. } => {
                fruitless += 1;
                if fruitless == FRUITLESS_MAX {
                    return Err(error);
                }
                rest(set, cancel, REST_AFTER_TROUBLE).await;
            }
        }
    }
}

/// All that is known to be dirty has been written back; if there may be more, behind a damaged node, it cannot be.
fn tell_hidden(set: &CacheSet, target: &Target) -> Result<(), Error> {
    target.inode.and_then(|inode| set.with(|s| s.hidden(inode))).map_or(Ok(()), Err)
}

/// Waits for the changes in flight. False if one has failed to which the last sweep had left something.
async fn changes_have_ended(set: &CacheSet, target: &Target, cancel: &Cancel) -> Result<bool, Error> {
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

/// What a sweep has come to.
struct Swept {
    /// Nothing is dirty.
    is_clean: bool,
    /// It has passed something by.
    has_gaps: bool,
    /// The first trouble that it has met.
    trouble: Option<Error>,
}

/// From the start of the volume to its end.
async fn sweep_once(set: &CacheSet, target: &Target, cancel: &Cancel) -> Result<Swept, Error> {
    let mut trouble = None;
    let began = set.with(|s| s.sweep_begins(target));
    loop {
        check(set, cancel)?;
        match set.with(|s| s.swept_since(target, began)) {
            Some((is_clean, has_gaps)) => return Ok(Swept { is_clean, has_gaps, trouble }),
            None => {
                let batch = batch::clean_batch(set, target, true).await;
                trouble = trouble.or(batch.trouble);
                goes_on(set).await;
            }
        }
    }
}

impl State {
    /// Places that could not be written back are tried again, whenever that was to be.
    fn retry_places(&mut self, target: &Target) {
        let now = self.now;
        if let Some(volume) = self.volumes.get_mut(target.id) {
            volume.places.retry(now);
        }
    }

    /// A sweep begins at the start of the volume; how many have ended.
    fn sweep_begins(&mut self, target: &Target) -> u64 {
        let now = self.now;
        let Some(volume) = self.volumes.get_mut(target.id) else { return 0 };
        volume.writeback_from = volume.data_offset;
        volume.pace.age.sweep_begins(now);
        volume.pace.age.ended().0
    }

    /// Once nothing is dirty, or the sweep has ended that began when `began` had: whether nothing is, and whether it has passed
    /// something by.
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

/// Waits until it is known what is dirty, but not for a node that cannot be read.
pub async fn walked(set: &CacheSet, cancel: &Cancel) -> Result<(), Error> {
    while !set.has_walked()? {
        check(set, cancel)?;
        // Whoever cancels rings this, and so does the end of the walk.
        set.env().wait_until(&set.signals().writeback_work, set.env().now() + WALK_LOOK).await;
    }
    Ok(())
}

/// Waits for whoever writes the volume back: a batch, or all of what somebody else waits for.
async fn alone(set: &CacheSet, id: VolumeId) -> Result<Permit, Error> {
    let lock = set.with(|s| s.volumes.get(id).map(|volume| volume.writeback_lock.clone()));
    Ok(lock.ok_or(Error::NoVolume)?.acquire(1).await)
}

/// Whether such work is to go on.
pub fn check(set: &CacheSet, cancel: &Cancel) -> Result<(), Error> {
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

async fn rest(set: &CacheSet, cancel: &Cancel, time: Duration) {
    let until = set.env().now() + time;
    while set.env().now() < until && !set.is_ending() && !cancel.is_asked() {
        set.env().wait_until(&set.signals().writeback_work, until).await;
    }
}

impl CacheSet {
    /// Long work is to be given up; it ends with [`Error::Cancelled`] when the batch that is under way has ended.
    pub fn cancel(&self, cancel: &Cancel) {
        cancel.0.set(true);
        self.signals().writeback_work.notify_all();
    }

    /// Writes back what is dirty of a volume now, as fast as the devices go and whatever the options of write-back say. The volume
    /// stays cached, and what is written meanwhile may be dirty afterwards.
    ///
    /// # Errors
    /// If the backing device refuses some of it: then the rest is written back. If it is cancelled, if the set is being stopped or
    /// fails, or if there is no such volume or nothing under it.
    pub async fn write_back(&self, id: VolumeId, cancel: &Cancel) -> Result<(), Error> {
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
