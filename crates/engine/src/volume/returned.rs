//! Another way to the backing device of a volume that is served: it was pulled, or its bus was reset, and it is back as another device of
//! the system. What was open is what is left of the old one, and never works again.
//!
//! Nobody has used it meanwhile, as far as a device can tell: what its superblock says is what was last written there. Any kernel and any
//! bcached that serves it without this cache says so there first, durably (*inconsistent*, or another set); so what the cache holds is
//! still right, and what is dirty is still the newest.
//!
//! It may have lost its volatile cache. Nothing in the tree depends on what was there: keys turn clean, and clean keys enter, when the
//! device has been flushed. What waited for that is dropped here. A write that went past the cache and was acknowledged may be gone,
//! which the next flush of a client has to say. The old device is not asked for a flush: its word would count for nothing.

use crate::error::Error;
use crate::request::parked;
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::epoch::Epoch;
use crate::volume::remove::Removed;
use crate::volume::{Backing, Course, Volume, VolumeId, record};
use bcached_env::{Disk, DiskId};
use bcached_format::{BackingState, BackingSuperblock, Superblock};

impl CacheSet {
    /// The volume is served from `disk` from now on, which must be its backing device, as it was. For the moment of that new requests are
    /// refused; those in flight end as they would have ended.
    ///
    /// # Errors
    /// It is not, or cannot be read; or the volume is on its way to or from the cache, or the set is being stopped. Then nothing has
    /// changed.
    pub async fn take_back(&self, id: VolumeId, disk: DiskId) -> Result<Removed, Error> {
        let disk = self.env().disk(disk);
        let Superblock::Backing(found) = record::read_superblock(&disk).await? else {
            return Err(Error::NotABacking);
        };
        // Who is not the same is refused before anybody has to wait.
        self.with(|s| check_same(s, id, &disk, &found))?;
        // Its tasks end as if it left: they would go on with the old device.
        self.with(|s| s.begin_course(id, Course::Leaving))?;
        self.quiet(id).await;
        let taken = self.with(|s| {
            // Somebody may have been about to write the superblock when it was compared.
            check_same(s, id, &disk, &found)?;
            exchange(s, id, disk, &found)
        });
        self.with(|s| {
            if let Some(volume) = s.volumes.get_mut(id) {
                volume.course = Course::Steady;
            }
        });
        self.begin_workers(id);
        self.with(|s| s.background -= 1);
        self.signals().ranges.notify_all();
        taken
    }
}

/// The new device takes the place of the old one.
fn exchange(s: &mut State, id: VolumeId, disk: Disk, found: &BackingSuperblock) -> Result<Removed, Error> {
    parked::drop_all(s, id);
    let now = s.now;
    let volume = s.volumes.get_mut(id).ok_or(Error::NoVolume)?;
    let backing = volume.backing.as_mut().ok_or(Error::FlashOnly)?;
    let lost = backing.epoch.may_have_lost().then_some(Error::LostWrites);
    let former = backing.disk.id();
    let is_volatile = disk.info().volatile_cache;
    // What was to be written, and failed, may be what it says, or stand in its volatile cache.
    let in_doubt = backing.in_doubt || found.seal() != backing.superblock.seal();
    volume.dirty_marked = backing.superblock.state() == BackingState::Dirty && !in_doubt;
    (volume.writeback_trouble, volume.marking_trouble, volume.stands_still) = (None, None, false);
    // What could not be written to the old one is tried at once.
    volume.places.retry(now);
    volume.pace.retry_at(now);
    *backing = Backing {
        disk,
        superblock: backing.superblock.clone(),
        in_doubt,
        attempted: core::mem::take(&mut backing.attempted),
        epoch: Epoch::new(is_volatile),
        record_lock: backing.record_lock.clone(),
    };
    Ok(Removed { disk: Some(former), lost })
}

/// Refuses what is not the volume's backing device, or what somebody else has used since it was.
fn check_same(s: &mut State, id: VolumeId, disk: &Disk, found: &BackingSuperblock) -> Result<(), Error> {
    let volume = s.volumes.get(id).ok_or(Error::NoVolume)?;
    let backing = volume.backing.as_ref().ok_or(Error::FlashOnly)?;
    if found.uuid() != volume.uuid {
        return Err(Error::NotAsItWas("it is another device"));
    }
    if disk.info().sectors < backing.disk.info().sectors {
        return Err(Error::NotAsItWas("it is shorter"));
    }
    if found.seal() == backing.superblock.seal() || may_be_ours(s, volume, found) {
        Ok(())
    } else {
        Err(Error::NotAsItWas("somebody else has used it meanwhile"))
    }
}

/// After a write of the superblock that has failed the device may say that; but it does not say *dirty* only if nothing was dirty when
/// that was written, and nothing has become so since. What was durable before is no answer: that is an older copy.
fn may_be_ours(s: &State, volume: &Volume, found: &BackingSuperblock) -> bool {
    let Some(backing) = &volume.backing else { return false };
    let is_all_clean = volume.inode.is_none_or(|inode| s.has_counted(inode) && s.dirty.of(inode) == 0);
    (found.state() == BackingState::Dirty || is_all_clean)
        && backing.attempted.iter().any(|attempted| record::says_the_same(attempted, found))
}
