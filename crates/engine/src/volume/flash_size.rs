//! Grows and shrinks flash-only volumes while they are served.
//!
//! Their size is recorded in the UUID table. To grow, the remains of a former, larger size behind
//! the end are dropped first, so that all new space reads as zeroes. Then the table records the new
//! size, durably, and then requests use it.
//!
//! To shrink, no request begins behind the new end, and those in flight end. The dirty data there
//! is what will be lost; the caller may save it, or cancel. After that the table records the new
//! size, durably, and only then is the data there dropped.
//!
//! So a crash leaves the old size with all of its data, or the new size. What a crash leaves behind
//! the end (a kernel leaves it too) takes up space until the volume is resized again. Until then,
//! that space is not promised to any volume.

use crate::error::Error;
use crate::request::Target;
use crate::set::CacheSet;
use crate::state::State;
use crate::uuids;
use crate::volume::forget::LostRange;
use crate::volume::{Lifecycle, VolumeId};
use crate::writeback::urgent::{self, CancelToken};
use alloc::vec::Vec;
use bcached_format::{Inode, Position};

/// A flash-only volume that is about to shrink: no request begins behind its new end until that is
/// done or cancelled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingShrink {
    id: VolumeId,
    inode: Inode,
    /// Its previous size, in sectors.
    former: u64,
    /// Its new size, in sectors.
    pub sectors: u64,
    /// Dirty data behind the new end, which exists nowhere else, in sectors.
    pub dirty_sectors: u64,
}

impl CacheSet {
    pub(super) async fn grow_flash_only(
        &self,
        target: &Target,
        sectors: u64,
        cancel: &CancelToken,
    ) -> Result<(), Error> {
        let inode = target.inode.ok_or(Error::NoVolume)?;
        // The room available depends on how much is dirty, and where.
        urgent::walked(self, cancel).await?;
        self.count_behind_ends().await?;
        if sectors != target.sectors {
            self.with(|s| s.check_flash_growth(inode, target.sectors, sectors))?;
        }
        self.make_void_from(target, target.cacheable_end, cancel).await?;
        self.with(|s| s.dirty_behind_ends.remove(&inode));
        if sectors == target.sectors {
            return Ok(());
        }
        // The room may have been promised to other volumes meanwhile. The table names the new size,
        // durably, before requests use it (invariant D48).
        let before = self.with(|s| {
            s.check_flash_growth(inode, target.sectors, sectors)?;
            s.say_flash_size(inode, sectors)
        })?;
        self.store_flash_size(inode, before).await?;
        self.use_size(target.id, |volume, _| (volume.sectors, volume.cacheable_end) = (sectors, sectors));
        Ok(())
    }

    /// Begins to shrink a flash-only volume: from now on `sectors` sectors of it are served.
    /// Nothing is lost until [`CacheSet::shrink_flash_only`]. The caller must call that or
    /// [`CacheSet::keep_size`].
    ///
    /// # Errors
    /// The size is not whole blocks, or larger than the volume; the volume has a backing device;
    /// the work is cancelled; another change of the volume is under way; its index cannot be read;
    /// or the set is being stopped. Then the volume is as large as before.
    pub async fn begin_shrinking(
        &self,
        id: VolumeId,
        sectors: u64,
        cancel: &CancelToken,
    ) -> Result<PendingShrink, Error> {
        let target = self.with(|s| s.begin_lifecycle_change(id, Lifecycle::Shrinking))?;
        let begun = self.hold_back_the_end(&target, sectors, cancel).await;
        // Stopping the set does not wait for this change to end: nothing is dropped until the
        // caller continues.
        self.with(|s| {
            s.background -= 1;
            if begun.is_err() {
                s.end_shrinking(id, target.sectors);
            }
        });
        self.signals().ranges.notify_all();
        begun
    }

    async fn hold_back_the_end(
        &self,
        target: &Target,
        sectors: u64,
        cancel: &CancelToken,
    ) -> Result<PendingShrink, Error> {
        let (former, block_sectors) = (target.sectors, target.block_sectors);
        if target.backing.is_some() {
            return Err(Error::HasBacking);
        }
        if sectors > former {
            return Err(Error::Size { sectors, sectors_min: block_sectors, sectors_max: former });
        }
        if sectors == 0 || !sectors.is_multiple_of(block_sectors) {
            return Err(Error::NotWholeBlocks { sectors, block_sectors });
        }
        // The cacheable range shrinks only when nothing is cached there: the index looks no further
        // than its end.
        self.use_size(target.id, |volume, _| volume.sectors = sectors);
        self.earlier_have_ended(target.id, cancel).await?;
        let dirty_sectors = self.count_dirty_from(target, sectors).await?;
        let inode = target.inode.ok_or(Error::NoVolume)?;
        Ok(PendingShrink { id: target.id, inode, former, sectors, dirty_sectors })
    }

    /// Lists what would be lost, in order, from sector `at` of the volume on: some of it, and where
    /// the rest begins.
    ///
    /// # Errors
    /// The index cannot be read, or the set is being stopped.
    pub async fn lost_behind(
        &self,
        of: &PendingShrink,
        at: u64,
    ) -> Result<(Vec<LostRange>, Option<u64>), Error> {
        self.with(State::begin_work)?;
        let found = self.find_lost(of.inode, at.max(of.sectors), of.former).await;
        self.end_work();
        found
    }

    /// Shrinks the volume as begun, and drops all of its data behind the new end. Durable when this
    /// returns. The caller must await the end of this.
    ///
    /// # Errors
    /// The set is being stopped, has been opened anew, or fails. Then the volume is as large as
    /// before with all of its data, unless the table could be written: then it has its new size,
    /// and another call to shrink to that size drops the rest.
    pub async fn shrink_flash_only(&self, of: PendingShrink) -> Result<(), Error> {
        let shrunk = match self.with(|s| s.goes_on_shrinking(&of)) {
            Ok(target) => {
                let shrunk = self.say_smaller_and_empty(&target, &of).await;
                self.end_work();
                shrunk
            }
            Err(error) => {
                self.keep_size(of);
                Err(error)
            }
        };
        self.signals().ranges.notify_all();
        shrunk
    }

    /// Cancels a shrink: the volume gets back its previous size.
    #[allow(clippy::needless_pass_by_value, reason = "nothing is done with it after this")]
    pub fn keep_size(&self, of: PendingShrink) {
        self.with(|s| {
            if s.is_shrinking(&of) {
                s.end_shrinking(of.id, of.former);
            }
        });
    }

    async fn say_smaller_and_empty(&self, target: &Target, of: &PendingShrink) -> Result<(), Error> {
        let said = self.with(|s| {
            // The volume occupies that room until all of it is dropped.
            s.dirty_behind_ends.insert(of.inode, of.dirty_sectors);
            s.say_flash_size(of.inode, of.sectors)
        });
        let stored = match said {
            Ok(before) => self.store_flash_size(of.inode, before).await,
            Err(error) => Err(error),
        };
        if let Err(error) = stored {
            self.with(|s| {
                s.dirty_behind_ends.remove(&of.inode);
                s.end_shrinking(of.id, of.former);
            });
            return Err(error);
        }
        // Only now, with the new size durable in the table: invariant D48.
        let emptied = self.make_void_from(target, of.sectors, &CancelToken::default()).await;
        self.with(|s| {
            if emptied.is_ok() {
                s.dirty_behind_ends.remove(&of.inode);
            }
            if let Some(volume) = s.volumes.get_mut(of.id) {
                volume.cacheable_end = of.sectors;
            }
            s.end_shrinking(of.id, of.sectors);
        });
        emptied
    }

    /// The maximum size of a flash-only volume, in sectors.
    ///
    /// # Errors
    /// The volume is not flash-only; the amount of dirty data is not known yet; the index cannot be
    /// read; or the set is being stopped.
    pub async fn flash_sectors_max(&self, id: VolumeId) -> Result<u64, Error> {
        self.with(|s| match s.is_counted() {
            true => s.begin_work(),
            false => Err(Error::NotWalked { percent: s.counted_percent() }),
        })?;
        let counted = self.count_behind_ends().await;
        self.end_work();
        counted?;
        self.with(|s| {
            let volume = s.volumes.get(id).filter(|volume| volume.backing.is_none());
            let (inode, sectors) =
                volume.and_then(|of| Some((of.inode?, of.sectors))).ok_or(Error::NoVolume)?;
            s.flash_sectors_max(inode, sectors)
        })
    }

    /// Counts the dirty data behind the ends of all flash-only volumes. A kernel, or a shrink that
    /// a crash ended, has left it there, and no request can add to it. Volumes being shrunk keep
    /// track of it themselves.
    pub(super) async fn count_behind_ends(&self) -> Result<(), Error> {
        let all: Vec<(Inode, u64)> = self.with(|s| {
            let flash = s.uuids.used().filter(|(_, slot)| slot.is_flash_only());
            flash.map(|(inode, slot)| (inode, slot.sectors)).collect()
        });
        for (inode, sectors) in all {
            let dirty = self.count_dirty_of(inode, sectors, Position::MAX.offset).await?;
            self.with(|s| {
                // The volume may have been resized or replaced meanwhile.
                if s.uuids.slot(inode).is_some_and(|slot| slot.is_flash_only() && slot.sectors == sectors) {
                    s.dirty_behind_ends.insert(inode, dirty);
                }
            });
        }
        Ok(())
    }

    /// Stores the UUID table. If that fails, restores the previous size of the volume in it.
    async fn store_flash_size(&self, inode: Inode, before: u64) -> Result<(), Error> {
        let stored = uuids::store(self).await;
        if stored.is_err() {
            self.with(|s| s.say_flash_size(inode, before))?;
        }
        stored
    }
}

impl State {
    fn check_flash_growth(&self, inode: Inode, now: u64, sectors: u64) -> Result<(), Error> {
        let block_sectors = self.geometry.block_sectors;
        let sectors_max = self.flash_sectors_max(inode, now)?;
        if sectors < now {
            return Err(Error::Size { sectors, sectors_min: now, sectors_max });
        }
        if !sectors.is_multiple_of(block_sectors) {
            return Err(Error::NotWholeBlocks { sectors, block_sectors });
        }
        if sectors > sectors_max {
            return Err(Error::NoRoom { sectors, sectors_max });
        }
        Ok(())
    }

    /// The maximum size of a volume whose current size is `now`.
    fn flash_sectors_max(&self, inode: Inode, now: u64) -> Result<u64, Error> {
        let slot = self.uuids.slot(inode).ok_or(Error::NoVolume)?;
        // `flash_room` has subtracted what this volume itself is promised.
        Ok(now.max(self.promised(inode, slot.sectors).saturating_add(self.flash_room())))
    }

    /// The sectors that a flash-only volume has been promised, or already occupies, including dirty
    /// data behind its end.
    pub(super) fn promised(&self, inode: Inode, sectors: u64) -> u64 {
        let behind = self.dirty_behind_ends.get(&inode).copied().unwrap_or(0);
        sectors.saturating_add(behind).max(self.dirty.of(inode))
    }

    fn is_shrinking(&self, of: &PendingShrink) -> bool {
        let volume = self.volumes.get(of.id).filter(|volume| volume.lifecycle == Lifecycle::Shrinking);
        volume.is_some_and(|volume| (volume.inode, volume.sectors) == (Some(of.inode), of.sectors))
    }

    /// Checks that the volume is still being shrunk as begun. From here on the set does not stop
    /// before the shrink has ended.
    fn goes_on_shrinking(&mut self, of: &PendingShrink) -> Result<Target, Error> {
        if !self.is_shrinking(of) {
            return Err(Error::Reopened);
        }
        self.begin_work()?;
        let volume = self.volumes.get(of.id).ok_or(Error::NoVolume)?;
        Ok(Target::of(of.id, volume, self.geometry.block_sectors))
    }

    /// Ends a shrink with `sectors` as the size of the volume.
    fn end_shrinking(&mut self, id: VolumeId, sectors: u64) {
        if let Some(volume) = self.volumes.get_mut(id) {
            (volume.sectors, volume.lifecycle) = (sectors, Lifecycle::Steady);
        }
    }

    /// Sets the size that the next write of the UUID table records. Returns the previous one.
    fn say_flash_size(&mut self, inode: Inode, sectors: u64) -> Result<u64, Error> {
        let slot = self.uuids.slot_mut(inode).ok_or(Error::NoVolume)?;
        Ok(core::mem::replace(&mut slot.sectors, sectors))
    }
}
