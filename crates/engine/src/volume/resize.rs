//! Grows and shrinks volumes with a backing device while they are served. For flash-only volumes
//! see `flash_size.rs`.
//!
//! The format does not record the size of a volume with a backing device. At each start it is what
//! the backing device has behind the start of the data. So growing a volume means using what the
//! device has now. A volume that was shrunk is as large as its device again at the next start,
//! unless that start is given a smaller size.
//!
//! The cache holds whole blocks only. What a device has behind its last whole block is never
//! cached, and is written past the table of ranges. When the device grows, that tail becomes part
//! of a block. So the order of growing is:
//!
//! 1. What the cache may hold behind the old end, from a time when the device was longer, is
//!    invalidated, durably.
//! 2. New requests use the new size.
//! 3. Nothing new enters the cache before every request that does not know the new size has ended.
//!
//! The order of shrinking is:
//!
//! 1. No request begins behind the new end, and those in flight end.
//! 2. Dirty data there is written back, batch after batch.
//! 3. All that the cache holds there is invalidated, durably, unless it is dirty after all.
//!
//! Only then may the device be cut. Until then, and after an error, the volume has its old size,
//! and none of its data is lost. A new end is on the block grid, so that no block lies on both
//! sides of it.

use crate::error::Error;
use crate::journal::writer;
use crate::request::without_cache::in_turn;
use crate::request::write::{self, RangeState};
use crate::request::{SectorRange, Target, holes};
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::{Lifecycle, Volume, VolumeId};
use crate::writeback::urgent::{self, CancelToken};
use alloc::vec::Vec;
use bcached_env::Disk;
use bcached_format::{Inode, Position};
use core::time::Duration;

/// Sectors claimed at once where fills and parked data may exist: 1 GiB.
const PIECE_SECTORS: u64 = 1 << 21;
/// Extents at most this far apart are invalidated together: the maximum length of a hole, in
/// sectors.
const GAP_SECTORS: u64 = 32_768;
/// How often a wait for requests checks for cancellation.
const LOOK: Duration = Duration::from_millis(100);

impl CacheSet {
    /// The start of a volume's data on its backing device, in sectors.
    #[must_use]
    pub fn data_offset(&self, id: VolumeId) -> Option<u64> {
        self.with(|s| s.volumes.get(id).map(|volume| volume.data_offset))
    }

    /// Drops what the cache holds of a volume behind its end, durably. The backing device was
    /// longer once; when it grows again, its own content counts. Returns true if there was
    /// anything.
    ///
    /// # Errors
    /// The index of that part cannot be read or written, or the set is being stopped.
    pub async fn give_up_behind_end(&self, id: VolumeId) -> Result<bool, Error> {
        let target = self.with(|s| s.hold(id))?;
        let given_up = match self.is_cut_short(id).await {
            Ok(true) => {
                let end = target.cacheable_end;
                self.make_void_from(&target, end, &CancelToken::default()).await.map(|()| true)
            }
            other => other,
        };
        self.let_go(id);
        given_up
    }

    /// Grows a volume to `sectors` sectors: its backing device has become larger, or it is
    /// flash-only and the cache has room. The caller must await the end of this.
    ///
    /// # Errors
    /// The device is smaller than that, or the volume is already larger; the cache has no room for
    /// it; another change of the volume is under way; the set fails or is being stopped; or the
    /// work is cancelled. Then the volume is as large as before.
    pub async fn grow(&self, id: VolumeId, sectors: u64, cancel: &CancelToken) -> Result<(), Error> {
        let target = self.with(|s| s.begin_lifecycle_change(id, Lifecycle::Growing))?;
        let grown = match target.backing {
            Some(_) => self.take_up_more(&target, sectors, cancel).await,
            None => self.grow_flash_only(&target, sectors, cancel).await,
        };
        self.with(|s| s.end_lifecycle_change(id));
        self.signals().ranges.notify_all();
        grown
    }

    async fn take_up_more(&self, target: &Target, sectors: u64, cancel: &CancelToken) -> Result<(), Error> {
        let found = target.backing.as_ref().map(Disk::info).ok_or(Error::FlashOnly)?.sectors;
        let sectors_max = found.saturating_sub(target.data_offset);
        if sectors < target.sectors || sectors > sectors_max {
            return Err(Error::Size { sectors, sectors_min: target.sectors, sectors_max });
        }
        if sectors == target.sectors {
            return Ok(());
        }
        // What the cache holds there is of a former, longer life of the device: invariant D47.
        self.make_void_from(target, target.cacheable_end, cancel).await?;
        let use_sectors = |sectors| {
            self.use_size(target.id, |volume, block| {
                volume.sectors = sectors;
                volume.cacheable_end = cacheable_end(volume.data_offset, sectors, block);
            });
        };
        use_sectors(sectors);
        // Nothing enters the cache before the earlier requests have ended. If growing is cancelled
        // here, nothing enters it before the requests that know the new size have ended.
        self.earlier_have_ended(target.id, cancel).await.inspect_err(|_| use_sectors(target.sectors))
    }

    /// Shrinks a volume to `sectors` sectors: writes back the dirty data behind that, and drops
    /// what the cache holds there. The content of the backing device there stays as it is. The
    /// caller must await the end of this.
    ///
    /// # Errors
    /// The size is not whole blocks, or larger than the volume; the volume is flash-only (see
    /// [`CacheSet::begin_shrinking`]); the backing device refuses dirty data; the work is
    /// cancelled; another change of the volume is under way; or the set fails or is being stopped.
    /// Then the volume is as large as before.
    pub async fn shrink(&self, id: VolumeId, sectors: u64, cancel: &CancelToken) -> Result<(), Error> {
        let target = self.with(|s| s.begin_lifecycle_change(id, Lifecycle::Shrinking))?;
        let shrunk = self.give_up_the_end(&target, sectors, cancel).await;
        self.with(|s| s.end_lifecycle_change(id));
        self.signals().ranges.notify_all();
        self.signals().writeback_work.notify_all();
        shrunk
    }

    async fn give_up_the_end(
        &self,
        target: &Target,
        sectors: u64,
        cancel: &CancelToken,
    ) -> Result<(), Error> {
        let block_sectors = target.block_sectors;
        if target.backing.is_none() {
            return Err(Error::FlashOnly);
        }
        if sectors > target.sectors {
            return Err(Error::Size { sectors, sectors_min: block_sectors, sectors_max: target.sectors });
        }
        if sectors == target.sectors {
            return Ok(());
        }
        if sectors == 0 || !sectors.is_multiple_of(block_sectors) {
            return Err(Error::NotWholeBlocks { sectors, block_sectors });
        }
        // No request begins behind the new end before that is emptied: invariant D46. The cacheable
        // range shrinks only when nothing is cached there: write-back and the index look no further
        // than its end.
        self.use_size(target.id, |volume, _| volume.sectors = sectors);
        let emptied = self.empty_from(target, target.data_offset + sectors, cancel).await;
        self.with(|s| {
            let Some(volume) = s.volumes.get_mut(target.id) else { return };
            match &emptied {
                Ok(()) => {
                    volume.cacheable_end = cacheable_end(volume.data_offset, sectors, block_sectors);
                    volume.writeback_from = volume.data_offset;
                }
                Err(_) => volume.sectors = target.sectors,
            }
        });
        emptied
    }

    /// The amount of dirty data of a volume from `sector` of it on, in sectors: what a shrink to
    /// that size writes back.
    ///
    /// # Errors
    /// There is no such volume, or the index cannot be read.
    pub async fn dirty_from(&self, id: VolumeId, sector: u64) -> Result<u64, Error> {
        let target = self.with(|s| s.hold(id))?;
        let counted = self.count_dirty_from(&target, target.data_offset + sector).await;
        self.let_go(id);
        counted
    }

    pub(super) async fn count_dirty_from(&self, target: &Target, at: u64) -> Result<u64, Error> {
        let Some(inode) = target.inode else { return Ok(0) };
        self.count_dirty_of(inode, at, target.cacheable_end).await
    }

    /// The amount of dirty data in `[at, end)` of a volume's key space, in sectors.
    pub(super) async fn count_dirty_of(&self, inode: Inode, mut at: u64, end: u64) -> Result<u64, Error> {
        let mut dirty = 0;
        while at < end {
            if self.with(|s| s.stopping) {
                return Err(Error::Stopping);
            }
            let mut here = 0;
            let upto = self
                .attempt_reading(|s| {
                    here = 0;
                    s.keys_in_leaf(inode, at, end, &mut |buckets, key| {
                        if key.dirty && !buckets.is_dead(key) {
                            here += key.end.min(end) - key.start().max(at);
                        }
                    })
                })
                .await?;
            dirty += here;
            at = upto;
        }
        Ok(dirty)
    }

    /// Removes everything of the volume from `from` on from the cache. Key space.
    async fn empty_from(&self, target: &Target, from: u64, cancel: &CancelToken) -> Result<(), Error> {
        self.earlier_have_ended(target.id, cancel).await?;
        let Some(inode) = target.inode else { return Ok(()) };
        let mut clean_to = from;
        urgent::write_back(self, target, cancel, async || {
            while clean_to < target.cacheable_end {
                let upto = self.clean_leaf(inode, clean_to, target.cacheable_end).await?;
                let Some(upto) = upto else {
                    self.with(|s| s.write_back_from(target.id, from));
                    return Ok(false);
                };
                clean_to = upto;
            }
            Ok(true)
        })
        .await?;
        self.make_void_from(target, from, cancel).await
    }

    /// The end of the leaf that holds `at`, or `end` if that comes first; `None` if something is
    /// dirty there.
    async fn clean_leaf(&self, inode: Inode, at: u64, end: u64) -> Result<Option<u64>, Error> {
        let mut survey = RangeState::default();
        let upto = self.attempt(|s| s.survey_leaf(inode, at, end, &mut survey)).await?;
        Ok((!survey.dirty).then_some(upto))
    }

    /// Invalidates, durably, what the cache holds of a volume from `from` on. None of it may be
    /// dirty, unless the volume is flash-only.
    pub(super) async fn make_void_from(
        &self,
        target: &Target,
        from: u64,
        cancel: &CancelToken,
    ) -> Result<(), Error> {
        let Some(inode) = target.inode else { return Ok(()) };
        let end = Position::MAX.offset;
        let mut at = from;
        while at < end {
            urgent::check(self, cancel)?;
            let (upto, found) = self.held_in_leaf(inode, at, end).await?;
            // Where requests have been, data may be about to enter the index.
            let is_used = at < target.cacheable_end;
            let upto = if is_used { upto.min(at + PIECE_SECTORS).min(target.cacheable_end) } else { upto };
            let claimed = if is_used { alloc::vec![SectorRange { start: at, end: upto }] } else { found };
            for range in claimed {
                in_turn(self, target, range, async |target| self.make_range_void(target, range).await)
                    .await?;
            }
            at = upto;
        }
        writer::commit(self).await
    }

    /// The end of the leaf that holds `at`, and the ranges that it holds from there on.
    async fn held_in_leaf(&self, inode: Inode, at: u64, end: u64) -> Result<(u64, Vec<SectorRange>), Error> {
        let mut found: Vec<SectorRange> = Vec::new();
        let upto = self
            .attempt(|s| {
                found.clear();
                s.keys_in_leaf(inode, at, end, &mut |buckets, key| {
                    if !buckets.could_return(key) {
                        return;
                    }
                    let start = key.start().max(at);
                    match found.last_mut().filter(|last| start - last.end < GAP_SECTORS) {
                        Some(last) => last.end = key.end,
                        None => found.push(SectorRange { start, end: key.end }),
                    }
                })
            })
            .await?;
        Ok((upto, found))
    }

    /// Invalidates the data in a range whose turn has been claimed.
    async fn make_range_void(&self, target: &Target, range: SectorRange) -> Result<(), Error> {
        let Some(inode) = target.inode else { return Ok(()) };
        if target.backing.is_some() && write::survey(self, target, range).await?.dirty {
            return Err(Error::Inconsistent("dirty data lies behind the end of a volume"));
        }
        let mut at = range.start;
        while at < range.end {
            let (upto, found) = self.held_in_leaf(inode, at, range.end).await?;
            for held in found {
                let held = SectorRange { start: held.start, end: held.end.min(range.end) };
                holes::punch(self, target, held).await?;
            }
            at = upto;
        }
        Ok(())
    }

    /// Changes the size for new requests.
    pub(super) fn use_size(&self, id: VolumeId, change: impl FnOnce(&mut Volume, u64)) {
        self.with(|s| {
            let block_sectors = s.geometry.block_sectors;
            let Some(volume) = s.volumes.get_mut(id) else { return };
            change(volume, block_sectors);
            volume.attachment += 1;
            volume.earlier_requests = volume.requests;
        });
    }

    /// Waits until the requests that do not know the new size have ended.
    pub(super) async fn earlier_have_ended(&self, id: VolumeId, cancel: &CancelToken) -> Result<(), Error> {
        while self.with(|s| s.volumes.get(id).is_some_and(|volume| volume.earlier_requests > 0)) {
            if cancel.is_asked() {
                return Err(Error::Cancelled);
            }
            let until = self.env().now() + LOOK;
            self.env().wait_until(&self.signals().ranges, until).await;
        }
        Ok(())
    }
}

/// End of the cacheable range of a volume of `sectors` sectors: the last whole block of the key
/// space. 0 if the data is not aligned to the block grid: nothing can be cached.
pub(super) const fn cacheable_end(data_offset: u64, sectors: u64, block_sectors: u64) -> u64 {
    let end = data_offset + sectors;
    if data_offset.is_multiple_of(block_sectors) { end - end % block_sectors } else { 0 }
}

impl State {
    /// Moves write-back on to `from`. What lies before is not written back now.
    fn write_back_from(&mut self, id: VolumeId, from: u64) {
        if let Some(volume) = self.volumes.get_mut(id).filter(|volume| volume.writeback_from < from) {
            volume.writeback_from = from;
            volume.pace.age.passes_by();
        }
    }
}
