//! Reconnects a served volume to its backing device after that was pulled, or its bus was reset,
//! and it has come back as another device of the system. The open handle refers to the old device,
//! and never works again.
//!
//! As far as a device can tell, nothing has used it meanwhile: its superblock is the one that was
//! last written there. A kernel or bcached that serves it without this cache first changes the
//! superblock durably (*inconsistent*, or another set). So the cached data is still valid, and the
//! dirty data is still the newest.
//!
//! The device may have lost its volatile write cache. Nothing in the tree depends on its content:
//! keys turn clean, and clean keys enter the tree, only after the device was flushed. Parked data
//! that waited for a flush is dropped here. A write that bypassed the cache and was acknowledged
//! may be lost; the client's next flush has to report that. The old device is not flushed: its
//! answer would prove nothing.

use crate::error::Error;
use crate::request::parked;
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::backing_flushes::BackingFlushes;
use crate::volume::remove::RemovedVolume;
use crate::volume::{Backing, Lifecycle, Volume, VolumeId, record};
use bcached_env::{Disk, DiskId};
use bcached_format::{BackingState, BackingSuperblock, Superblock};

impl CacheSet {
    /// Serves the volume from `disk` from now on. It must be the volume's backing device,
    /// unchanged. New requests are refused during the exchange; those in flight end as they would
    /// have ended.
    ///
    /// # Errors
    /// The device is another one or was changed, or cannot be read; the volume is being attached,
    /// detached, resized or removed; or the set is being stopped. Then nothing has changed.
    pub async fn take_back(&self, id: VolumeId, disk: DiskId) -> Result<RemovedVolume, Error> {
        let disk = self.env().disk(disk);
        let Superblock::Backing(found) = record::read_superblock(&disk).await? else {
            return Err(Error::NotABacking);
        };
        // Refuse a wrong device before anything has to wait.
        self.with(|s| check_same(s, id, &disk, &found))?;
        // Its tasks end as if the volume left: they would otherwise continue with the old device.
        self.with(|s| s.begin_lifecycle_change(id, Lifecycle::Leaving))?;
        self.quiet(id).await;
        let taken = self.with(|s| {
            // A write of the superblock may have been pending during the first comparison.
            check_same(s, id, &disk, &found)?;
            exchange(s, id, disk, &found)
        });
        self.with(|s| {
            if let Some(volume) = s.volumes.get_mut(id) {
                volume.lifecycle = Lifecycle::Steady;
            }
        });
        self.begin_workers(id);
        self.with(|s| s.background -= 1);
        self.signals().ranges.notify_all();
        taken
    }
}

/// Replaces the old device by the new one.
fn exchange(
    s: &mut State,
    id: VolumeId,
    disk: Disk,
    found: &BackingSuperblock,
) -> Result<RemovedVolume, Error> {
    parked::drop_all(s, id);
    let now = s.now;
    let volume = s.volumes.get_mut(id).ok_or(Error::NoVolume)?;
    let backing = volume.backing.as_mut().ok_or(Error::FlashOnly)?;
    // What no flush had proven is lost with the old device, which is not asked: invariant D30.
    let lost = backing.flushes.may_have_lost().then_some(Error::LostWrites);
    let former = backing.disk.id();
    let is_volatile = disk.info().volatile_cache;
    // A superblock whose write failed may be the one found, or be in the device's volatile write
    // cache.
    let in_doubt = backing.in_doubt || found.seal() != backing.superblock.seal();
    volume.dirty_marked = backing.superblock.state() == BackingState::Dirty && !in_doubt;
    (volume.writeback_trouble, volume.marking_trouble, volume.stands_still) = (None, None, false);
    // Extents that could not be written to the old device are retried at once.
    volume.failed_extents.retry(now);
    volume.pace.retry_at(now);
    *backing = Backing {
        disk,
        superblock: backing.superblock.clone(),
        in_doubt,
        attempted: core::mem::take(&mut backing.attempted),
        flushes: BackingFlushes::new(is_volatile),
        record_lock: backing.record_lock.clone(),
    };
    Ok(RemovedVolume { disk: Some(former), lost })
}

/// Refuses a device that is not the volume's backing device, or that was used elsewhere since.
fn check_same(s: &mut State, id: VolumeId, disk: &Disk, found: &BackingSuperblock) -> Result<(), Error> {
    let volume = s.volumes.get(id).ok_or(Error::NoVolume)?;
    let backing = volume.backing.as_ref().ok_or(Error::FlashOnly)?;
    if found.uuid() != volume.uuid {
        return Err(Error::DeviceMismatch("it is a different device"));
    }
    if disk.info().sectors < backing.disk.info().sectors {
        return Err(Error::DeviceMismatch("it is shorter than before"));
    }
    if found.seal() == backing.superblock.seal() || may_be_ours(s, volume, found) {
        Ok(())
    } else {
        Err(Error::DeviceMismatch("another program has used it since"))
    }
}

/// Returns true if a failed write of the superblock may have left what was found. A superblock
/// other than *dirty* is accepted only if nothing is dirty: then nothing was dirty when it was
/// written, and nothing has become dirty since. A superblock that was durable earlier is not
/// accepted: the device would be an older copy.
fn may_be_ours(s: &State, volume: &Volume, found: &BackingSuperblock) -> bool {
    let Some(backing) = &volume.backing else { return false };
    let is_all_clean = volume.inode.is_none_or(|inode| s.has_counted(inode) && s.dirty.of(inode) == 0);
    (found.state() == BackingState::Dirty || is_all_clean)
        && backing.attempted.iter().any(|attempted| record::says_the_same(attempted, found))
}
