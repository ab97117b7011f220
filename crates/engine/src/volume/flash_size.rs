//! A volume that lives in the cache alone becomes larger or smaller while it is served.
//!
//! Its size stands in the table of volumes. To grow, what a former, longer life has left behind its end is given up first: all that comes
//! to it reads as zeroes. Then the table says the new size, durably, and then requests know it.
//!
//! To shrink, no request begins behind the new end, and those in flight end. What is dirty there then is what is lost, and whoever asked
//! may write it down, or leave it at that. After that the table says the new size, durably, and only then is given up what lies there.
//!
//! So a crash leaves the old size with all of its data, or the new one; what it leaves behind the end, as a kernel does, takes its room until
//! somebody asks for a size again, and is promised to nobody until then.

use crate::error::Error;
use crate::request::Target;
use crate::set::CacheSet;
use crate::state::State;
use crate::uuids;
use crate::volume::forget::Lost;
use crate::volume::{Course, VolumeId};
use crate::writeback::urgent::{self, Cancel};
use alloc::vec::Vec;
use bcached_format::{Inode, Position};

/// A volume in the cache alone that is about to become smaller: behind its new end nothing is asked of it until that is done or given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shrinking {
    id: VolumeId,
    inode: Inode,
    /// Its size of before, in sectors.
    former: u64,
    /// Its new size, in sectors.
    pub sectors: u64,
    /// Dirty data behind that, which is nowhere else, in sectors.
    pub dirty_sectors: u64,
}

impl CacheSet {
    pub(super) async fn grow_flash_only(
        &self,
        target: &Target,
        sectors: u64,
        cancel: &Cancel,
    ) -> Result<(), Error> {
        let inode = target.inode.ok_or(Error::NoVolume)?;
        // How much there is room for depends on what is dirty, and where.
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
        // Others may have been promised it meanwhile.
        let before = self.with(|s| {
            s.check_flash_growth(inode, target.sectors, sectors)?;
            s.say_flash_size(inode, sectors)
        })?;
        self.store_flash_size(inode, before).await?;
        self.use_size(target.id, |volume, _| (volume.sectors, volume.cacheable_end) = (sectors, sectors));
        Ok(())
    }

    /// Sets out to make a volume in the cache alone smaller: so many sectors of it are served from now on. Nothing is lost until
    /// [`CacheSet::shrink_flash_only`]; that or [`CacheSet::keep_size`] must follow.
    ///
    /// # Errors
    /// If that is not whole blocks, or more than the volume has; if it has a backing device; if it is cancelled; if the volume is on its
    /// way; if its index cannot be read; if the set is being stopped. Then it is as large as before.
    pub async fn begin_shrinking(
        &self,
        id: VolumeId,
        sectors: u64,
        cancel: &Cancel,
    ) -> Result<Shrinking, Error> {
        let target = self.with(|s| s.begin_course(id, Course::Shrinking))?;
        let begun = self.hold_back_the_end(&target, sectors, cancel).await;
        // Nobody waits for this course to end who stops the set: nothing is done before it goes on.
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
        cancel: &Cancel,
    ) -> Result<Shrinking, Error> {
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
        // What is cacheable stays so until nothing is cached there: the index looks no further.
        self.use_size(target.id, |volume, _| volume.sectors = sectors);
        self.earlier_have_ended(target.id, cancel).await?;
        let dirty_sectors = self.count_dirty_from(target, sectors).await?;
        let inode = target.inode.ok_or(Error::NoVolume)?;
        Ok(Shrinking { id: target.id, inode, former, sectors, dirty_sectors })
    }

    /// What would be lost, in order, from sector `at` of the volume on: some of it, and where the rest begins.
    ///
    /// # Errors
    /// The index cannot be read, or the set is being stopped.
    pub async fn lost_behind(&self, of: &Shrinking, at: u64) -> Result<(Vec<Lost>, Option<u64>), Error> {
        self.with(State::begin_work)?;
        let found = self.find_lost(of.inode, at.max(of.sectors), of.former).await;
        self.end_work();
        found
    }

    /// Makes the volume as small as was set out to, and gives up all that it has behind that; durable when this returns. To be waited for to
    /// its end.
    ///
    /// # Errors
    /// If the set is being stopped, has been opened anew, or fails. Then the volume is as large as before with all of its data, unless the
    /// table could be written; then it has its new size, and the same again gives up what is left.
    pub async fn shrink_flash_only(&self, of: Shrinking) -> Result<(), Error> {
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

    /// The volume is to have its size of before after all.
    #[allow(clippy::needless_pass_by_value, reason = "nothing is done with it after this")]
    pub fn keep_size(&self, of: Shrinking) {
        self.with(|s| {
            if s.is_shrinking(&of) {
                s.end_shrinking(of.id, of.former);
            }
        });
    }

    async fn say_smaller_and_empty(&self, target: &Target, of: &Shrinking) -> Result<(), Error> {
        let said = self.with(|s| {
            // It has that room until all of it is given up.
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
        let emptied = self.make_void_from(target, of.sectors, &Cancel::default()).await;
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

    /// How large a volume in the cache alone can become, in sectors.
    ///
    /// # Errors
    /// It is no such volume; how much is dirty is not known yet; the index cannot be read; the set is being stopped.
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

    /// Counts what is dirty behind the ends of all volumes in the cache alone: a kernel, or a shrink that a crash has ended, has left it there,
    /// and nobody can write more. Volumes that become smaller know it themselves.
    pub(super) async fn count_behind_ends(&self) -> Result<(), Error> {
        let all: Vec<(Inode, u64)> = self.with(|s| {
            let flash = s.uuids.used().filter(|(_, slot)| slot.is_flash_only());
            flash.map(|(inode, slot)| (inode, slot.sectors)).collect()
        });
        for (inode, sectors) in all {
            let dirty = self.count_dirty_of(inode, sectors, Position::MAX.offset).await?;
            self.with(|s| {
                // It may have become another meanwhile.
                if s.uuids.slot(inode).is_some_and(|slot| slot.is_flash_only() && slot.sectors == sectors) {
                    s.dirty_behind_ends.insert(inode, dirty);
                }
            });
        }
        Ok(())
    }

    /// Stores the table; if that fails the volume is said to have the size of before.
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

    /// How large a volume can become that is `now`.
    fn flash_sectors_max(&self, inode: Inode, now: u64) -> Result<u64, Error> {
        let slot = self.uuids.slot(inode).ok_or(Error::NoVolume)?;
        // It holds its own promise already.
        Ok(now.max(self.promised(inode, slot.sectors).saturating_add(self.flash_room())))
    }

    /// What a volume in the cache alone has been promised, or has already: what lies behind its end as well.
    pub(super) fn promised(&self, inode: Inode, sectors: u64) -> u64 {
        let behind = self.dirty_behind_ends.get(&inode).copied().unwrap_or(0);
        sectors.saturating_add(behind).max(self.dirty.of(inode))
    }

    fn is_shrinking(&self, of: &Shrinking) -> bool {
        let volume = self.volumes.get(of.id).filter(|volume| volume.course == Course::Shrinking);
        volume.is_some_and(|volume| (volume.inode, volume.sectors) == (Some(of.inode), of.sectors))
    }

    /// It is still what was set out to: from here on the set does not stop before the end of it.
    fn goes_on_shrinking(&mut self, of: &Shrinking) -> Result<Target, Error> {
        if !self.is_shrinking(of) {
            return Err(Error::OpenedAnew);
        }
        self.begin_work()?;
        let volume = self.volumes.get(of.id).ok_or(Error::NoVolume)?;
        Ok(Target::of(of.id, volume, self.geometry.block_sectors))
    }

    /// The volume has so many sectors, and stays so.
    fn end_shrinking(&mut self, id: VolumeId, sectors: u64) {
        if let Some(volume) = self.volumes.get_mut(id) {
            (volume.sectors, volume.course) = (sectors, Course::Steady);
        }
    }

    /// What the table is to say from its next write on; what it said.
    fn say_flash_size(&mut self, inode: Inode, sectors: u64) -> Result<u64, Error> {
        let slot = self.uuids.slot_mut(inode).ok_or(Error::NoVolume)?;
        Ok(core::mem::replace(&mut slot.sectors, sectors))
    }
}
