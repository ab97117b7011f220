//! Changes the label of a volume while it is served.
//!
//! A backing device has its label in its superblock. The set's UUID table has a copy, which tells
//! whose dirty data is in the cache while the device is absent. A flash-only volume has its label
//! in the table only. The superblock is written first: it is authoritative, and the next start
//! corrects the table.

use crate::error::Error;
use crate::set::CacheSet;
use crate::uuids;
use crate::volume::{VolumeId, record};
use bcached_format::Label;

impl CacheSet {
    /// Changes a volume's label. Durable when this returns.
    ///
    /// # Errors
    /// There is no such volume, a superblock or the UUID table cannot be written, or the set is
    /// being stopped. Then the superblock may already have the new label.
    pub async fn set_label(&self, id: VolumeId, label: Label) -> Result<(), Error> {
        let target = self.with(|s| s.hold(id))?;
        let is_known = if target.inode.is_some() { self.check_alive() } else { Ok(()) };
        let written = match is_known {
            Ok(()) => self.write_label(id, label, target.backing.is_some()).await,
            Err(error) => Err(error),
        };
        self.let_go(id);
        written
    }

    async fn write_label(&self, id: VolumeId, label: Label, has_superblock: bool) -> Result<(), Error> {
        if has_superblock {
            record::update(self, id, |_, superblock| superblock.set_label(label)).await?;
        }
        let is_changed = self.with(|s| {
            let volume = s.volumes.get_mut(id).ok_or(Error::NoVolume)?;
            volume.label = label;
            let (inode, uuid) = (volume.inode, volume.uuid);
            let slot = inode.and_then(|inode| s.uuids.slot_mut(inode)).filter(|slot| slot.uuid == uuid);
            Ok::<_, Error>(slot.is_some_and(|slot| core::mem::replace(&mut slot.label, label) != label))
        })?;
        if is_changed { uuids::store(self).await } else { Ok(()) }
    }
}
