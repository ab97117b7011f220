//! A volume that lives in the cache alone becomes larger or smaller while it is served.
//!
//! Its size stands in the table of volumes. To grow, what a former, longer life has left behind its end is given up first: all that comes
//! to it reads as zeroes. Then the table says the new size, durably, and then requests know it. To shrink, no request begins behind the
//! new end, and those in flight end; then the table says it, and only then is given up what lies there. So a crash leaves the old size
//! with all of its data, or the new one; what it leaves behind the end, as a kernel does, takes its room until somebody asks for a size again.

use crate::error::Error;
use crate::request::Target;
use crate::set::CacheSet;
use crate::state::State;
use crate::uuids;
use crate::volume::VolumeId;
use crate::writeback::urgent::Cancel;
use bcached_format::Inode;

impl CacheSet {
    pub(super) async fn grow_flash_only(&self, target: &Target, sectors: u64) -> Result<(), Error> {
        let inode = target.inode.ok_or(Error::NoVolume)?;
        // How much there is room for depends on what is dirty.
        self.walked().await?;
        if sectors != target.sectors {
            self.with(|s| s.check_flash_growth(inode, target.sectors, sectors))?;
        }
        self.make_void_from(target, target.cacheable_end).await?;
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

    pub(super) async fn shrink_flash_only(
        &self,
        target: &Target,
        sectors: u64,
        cancel: &Cancel,
    ) -> Result<(), Error> {
        let inode = target.inode.ok_or(Error::NoVolume)?;
        if sectors == target.sectors {
            return self.make_void_from(target, sectors).await;
        }
        // What is cacheable stays so until nothing is cached there: the index looks no further.
        self.use_size(target.id, |volume, _| volume.sectors = sectors);
        if let Err(error) = self.say_smaller(target.id, inode, sectors, cancel).await {
            self.with(|s| s.volumes.get_mut(target.id).map(|volume| volume.sectors = target.sectors));
            return Err(error);
        }
        let emptied = self.make_void_from(target, sectors).await;
        self.with(|s| s.volumes.get_mut(target.id).map(|volume| volume.cacheable_end = sectors));
        emptied
    }

    /// Requests that know the former size have ended, and the table says the new one. Without an error there is no way back.
    async fn say_smaller(
        &self,
        id: VolumeId,
        inode: Inode,
        sectors: u64,
        cancel: &Cancel,
    ) -> Result<(), Error> {
        self.earlier_have_ended(id, cancel).await?;
        let before = self.with(|s| s.say_flash_size(inode, sectors))?;
        self.store_flash_size(inode, before).await
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
        // It holds its own promise already.
        let promised = self.uuids.slot(inode).ok_or(Error::NoVolume)?.sectors.max(self.dirty.of(inode));
        let sectors_max = now.max(promised.saturating_add(self.flash_room()));
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

    /// What the table is to say from its next write on; what it said.
    fn say_flash_size(&mut self, inode: Inode, sectors: u64) -> Result<u64, Error> {
        let slot = self.uuids.slot_mut(inode).ok_or(Error::NoVolume)?;
        Ok(core::mem::replace(&mut slot.sectors, sectors))
    }
}
