//! Flash-only volumes: creating them, serving them again, and how much space they can be promised.
//!
//! A kernel promises any size, and its writers wait forever when the buckets have run out. bcached
//! creates a volume only if it can be filled to its last block, whatever the order and the size of
//! the writes ([`State::flash_room`]).

use crate::error::Error;
use crate::set::CacheSet;
use crate::space::BucketUsage;
use crate::state::{BTREE_RESERVE, MOVING_RESERVE, State};
use crate::uuids;
use crate::volume::{Volume, VolumeId, VolumeInfo};
use crate::writeback::urgent::CancelToken;
use alloc::vec::Vec;
use bcached_format::{CacheMode, Inode, Label, Uuid, UuidSlot};

/// Bytes of index per block of data: a key of three words, in leaves that are half full, as splits
/// leave them.
const INDEX_BYTES: u128 = 2 * 3 * 8;

impl CacheSet {
    /// Creates a flash-only volume of `sectors` sectors with a new UUID. It is durable in the UUID
    /// table before it is served. All of it reads as zeroes.
    ///
    /// # Errors
    /// The size is not whole blocks, there is no room for the volume or its slot, or the set is
    /// being stopped or fails.
    pub async fn create_flash_only(&self, sectors: u64, label: Label) -> Result<VolumeId, Error> {
        // The room available depends on how much is dirty, and where.
        self.walked().await?;
        self.check_alive()?;
        self.with(State::begin_work)?;
        let counted = self.count_behind_ends().await;
        self.end_work();
        counted?;
        let uuid = Uuid::from_random([self.env().random(), self.env().random()]);
        let seconds = self.env().wall_seconds();
        self.with(|s| s.check_flash_size(sectors))?;
        let cancel = CancelToken::default();
        let inode = self.with_slot(
            &cancel,
            |s| s.uuids.vacant(),
            |s, inode| {
                s.check_flash_size(sectors)?;
                let mut slot = UuidSlot {
                    uuid,
                    label,
                    first_registered: seconds,
                    last_registered: seconds,
                    sectors,
                    ..UuidSlot::FREE
                };
                slot.set_flash_only(true);
                s.uuids.assign(inode, slot);
                // No other caller can serve it before the table is stored.
                s.forgetting.insert(inode);
                s.background += 1;
                Ok(inode)
            },
        );
        let inode = inode.await?;
        let stored = uuids::store(self).await;
        self.with(|s| {
            s.forgetting.remove(&inode);
            s.background -= 1;
        });
        self.signals().ranges.notify_all();
        stored?;
        self.add_flash_only(uuid)
    }

    /// Serves a flash-only volume that is in the UUID table.
    ///
    /// # Errors
    /// There is no such volume, it is already served or being forgotten, or the set is being
    /// stopped.
    pub fn add_flash_only(&self, uuid: Uuid) -> Result<VolumeId, Error> {
        self.with(|s| {
            if s.stopping {
                return Err(Error::Stopping);
            }
            let found = s.uuids.used().find(|(_, slot)| slot.uuid == uuid && is_usable(slot));
            let (inode, slot) = found.map(|(inode, slot)| (inode, *slot)).ok_or(Error::NoVolume)?;
            if s.volumes.iter().any(|(_, volume)| volume.inode == Some(inode)) {
                return Err(Error::Served);
            }
            if s.forgetting.contains(&inode) {
                return Err(Error::BeingForgotten);
            }
            Ok(s.enter_flash_only(inode, &slot))
        })
    }

    /// Restores the flash-only volumes of a reopened set that has had no requests yet: they get the
    /// numbers and options in `former`, and those not in `former` are not served. Opening assigns
    /// numbers in table order, which may be the former numbers of other volumes.
    pub fn resume_flash_only(&self, former: &[VolumeInfo]) {
        self.with(|s| {
            let opened: Vec<VolumeId> =
                s.volumes.iter().filter(|(_, volume)| volume.backing.is_none()).map(|(id, _)| id).collect();
            let opened: Vec<Volume> = opened.into_iter().filter_map(|id| s.volumes.remove(id)).collect();
            for volume in opened {
                // Two slots of a damaged table may have the same UUID.
                let is_it = |info: &&VolumeInfo| {
                    info.flash_only && info.uuid == volume.uuid && info.inode == volume.inode
                };
                if let Some(info) = former.iter().find(is_it) {
                    s.volumes.add(Some(info.id), Volume { options: info.options, ..volume });
                }
            }
        });
    }
}

/// Serves all flash-only volumes in the UUID table.
pub fn add_all(set: &CacheSet) {
    set.with(|s| {
        let found: Vec<(Inode, UuidSlot)> =
            s.uuids.used().filter(|(_, slot)| is_usable(slot)).map(|(inode, slot)| (inode, *slot)).collect();
        for (inode, slot) in found {
            s.enter_flash_only(inode, &slot);
        }
    });
}

/// Returns true for a flash-only slot with a size. A kernel leaves slots without a size behind.
fn is_usable(slot: &UuidSlot) -> bool {
    slot.is_flash_only() && slot.sectors > 0
}

impl State {
    fn enter_flash_only(&mut self, inode: Inode, slot: &UuidSlot) -> VolumeId {
        let sectors = slot.sectors - slot.sectors % self.geometry.block_sectors;
        let volume = Volume {
            sectors,
            cacheable_end: sectors,
            mode: CacheMode::Writeback,
            dirty_marked: true,
            ..Volume::new(Some(inode), slot.uuid, slot.label, self.options.volume)
        };
        self.uuids.comes_to_life(inode);
        self.volumes.add(None, volume)
    }

    fn check_flash_size(&self, sectors: u64) -> Result<(), Error> {
        let block_sectors = self.geometry.block_sectors;
        if self.stopping {
            return Err(Error::Stopping);
        }
        if sectors == 0 || !sectors.is_multiple_of(block_sectors) {
            return Err(Error::NotWholeBlocks { sectors, block_sectors });
        }
        let sectors_max = self.flash_room();
        if sectors > sectors_max {
            return Err(Error::NoRoom { sectors, sectors_max });
        }
        Ok(())
    }

    /// The largest flash-only volume that can be created now, in sectors: the storable amount, less
    /// what the other flash-only volumes are promised or hold behind their ends, and less the dirty
    /// data of volumes with backing devices, which may be gone for good.
    #[must_use]
    pub fn flash_room(&self) -> u64 {
        let flash = self.uuids.used().filter(|(_, slot)| slot.is_flash_only());
        let (mut promised, mut held) = (0_u64, 0);
        for (inode, slot) in flash {
            promised = promised.saturating_add(self.promised(inode, slot.sectors));
            held += self.dirty.of(inode);
        }
        let others = self.dirty.total() - held;
        let room = self.storable().saturating_sub(promised).saturating_sub(others);
        room - room % self.geometry.block_sectors
    }

    /// The number of sectors that can be dirty, whatever the order of writes.
    ///
    /// An overwrite leaves dead sectors in its bucket. Moving merges the live data of two buckets
    /// if they are at most half full, so at worst every bucket is a little more than half full.
    /// Only half of the buckets' sectors can be stored for certain. Not counted are the buckets for
    /// metadata, those that a damaged node may name and that are not reused, the reserves for the
    /// tree and for moving, the open buckets, and the batch released at once, because buckets are
    /// handed out only when their generations are stored. The index of the data comes out of the
    /// rest.
    fn storable(&self) -> u64 {
        let geometry = &self.geometry;
        let open = self.open.count().max(self.volumes.iter().count() + 3);
        let batch = usize::try_from(geometry.buckets / 64).unwrap_or(usize::MAX).clamp(8, 1024);
        let kept = (BTREE_RESERVE + MOVING_RESERVE + open + batch) as u64 + self.reserve_wanted;
        let taken = self.buckets.count_of(BucketUsage::Meta) + self.buckets.count_of(BucketUsage::Unknown);
        let buckets = self.buckets.count().saturating_sub(taken).saturating_sub(kept);
        let (bucket, block) = (u128::from(self.open.data_sectors()), u128::from(geometry.block_sectors));
        let node_bytes = u128::from(geometry.node_sectors()) * 512;
        // Buckets per sector: 2 / bucket + INDEX_BYTES / (block * node_bytes).
        let sectors = u128::from(buckets) * bucket * block * node_bytes
            / (2 * block * node_bytes + INDEX_BYTES * bucket);
        u64::try_from(sectors).unwrap_or(u64::MAX)
    }
}
