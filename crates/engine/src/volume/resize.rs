//! A volume becomes larger or smaller while it is served; of one that lives in the cache alone `flash_size.rs` tells.
//!
//! How large a volume is with a backing device stands nowhere in the format: it is what the backing device has behind the start of the data, at each start
//! anew. So growing is taking up what the device has now, and a volume that has shrunk is as large as its device again at the next
//! start, unless whoever starts it asks for less.
//!
//! The cache holds whole blocks only, so what a device has behind its last whole block is never cached, and is written past the table
//! of ranges. That tail becomes a part of a block when the device grows. So the order of growing is: what the cache may hold behind the
//! old end, of a time when the device was longer, becomes void, durably; then requests know the new size; and nothing new enters the
//! cache before every request has ended that does not know it.
//!
//! The order of shrinking: no request begins behind the new end, and those in flight end; what is dirty there is written back, batch
//! after batch; then all that the cache holds there becomes void, durably, unless it is dirty after all. Only then may somebody cut the
//! device. Until then, and after an error, the volume has its old size, and nothing of it is lost. A new end is on the block grid, so
//! that no block lies on both sides of it.

use crate::error::Error;
use crate::journal::writer;
use crate::request::uncached::in_turn;
use crate::request::write::{self, Survey};
use crate::request::{Range, Target, holes};
use crate::set::CacheSet;
use crate::state::State;
use crate::volume::{Course, Volume, VolumeId};
use crate::writeback::urgent::{self, Cancel};
use alloc::vec::Vec;
use bcached_env::Disk;
use bcached_format::{Inode, Position};
use core::time::Duration;

/// Sectors that are claimed at once where fills and parked data may lie: a gigabyte.
const PIECE_SECTORS: u64 = 1 << 21;
/// What lies this near to each other becomes void in one: as many sectors as a hole can have.
const GAP_SECTORS: u64 = 32_768;
/// How often to see whether somebody has given up waiting for requests.
const LOOK: Duration = Duration::from_millis(100);

impl CacheSet {
    /// Where a volume's data begins on its backing device, in sectors.
    #[must_use]
    pub fn data_offset(&self, id: VolumeId) -> Option<u64> {
        self.with(|s| s.volumes.get(id).map(|volume| volume.data_offset))
    }

    /// Gives up what the cache holds of a volume behind its end, durably: its backing device was longer once, and when it is again, what
    /// it has there then is what counts. True if there was anything.
    ///
    /// # Errors
    /// The index of that part cannot be read or written, or the set is being stopped.
    pub async fn give_up_behind_end(&self, id: VolumeId) -> Result<bool, Error> {
        let target = self.with(|s| s.hold(id))?;
        let given_up = match self.is_cut_short(id).await {
            Ok(true) => {
                let end = target.cacheable_end;
                self.make_void_from(&target, end, &Cancel::default()).await.map(|()| true)
            }
            other => other,
        };
        self.let_go(id);
        given_up
    }

    /// Serves so many sectors of a volume, and no fewer than until now: its backing device has become larger, or it lives in the cache
    /// alone, which has room for that. To be waited for to its end.
    ///
    /// # Errors
    /// If the device ends before that, or the volume has more already; if the cache has no room for it; if the volume is on its way; if the
    /// set fails or is being stopped; if it is cancelled. Then it is as large as before.
    pub async fn grow(&self, id: VolumeId, sectors: u64, cancel: &Cancel) -> Result<(), Error> {
        let target = self.with(|s| s.begin_course(id, Course::Growing))?;
        let grown = match target.backing {
            Some(_) => self.take_up_more(&target, sectors, cancel).await,
            None => self.grow_flash_only(&target, sectors, cancel).await,
        };
        self.with(|s| s.end_course(id));
        self.signals().ranges.notify_all();
        grown
    }

    async fn take_up_more(&self, target: &Target, sectors: u64, cancel: &Cancel) -> Result<(), Error> {
        let found = target.backing.as_ref().map(Disk::info).ok_or(Error::FlashOnly)?.sectors;
        let sectors_max = found.saturating_sub(target.data_offset);
        if sectors < target.sectors || sectors > sectors_max {
            return Err(Error::Size { sectors, sectors_min: target.sectors, sectors_max });
        }
        if sectors == target.sectors {
            return Ok(());
        }
        self.make_void_from(target, target.cacheable_end, cancel).await?;
        let use_sectors = |sectors| {
            self.use_size(target.id, |volume, block| {
                volume.sectors = sectors;
                volume.cacheable_end = cacheable_end(volume.data_offset, sectors, block);
            });
        };
        use_sectors(sectors);
        // Nothing has entered the cache before they have, and nothing does before those that know the new size have, if that is given up.
        self.earlier_have_ended(target.id, cancel).await.inspect_err(|_| use_sectors(target.sectors))
    }

    /// Serves so many sectors of a volume, and no more than until now: what is dirty behind that is written back, and the cache holds
    /// nothing of it any more. What lies there on the backing device stays as it is. To be waited for to its end.
    ///
    /// # Errors
    /// If that is not whole blocks, or more than the volume has; if it has no backing device, for which see [`CacheSet::begin_shrinking`]; if
    /// that refuses dirty data; if it is cancelled; if the volume is on its way; if the set fails or is being stopped. Then it is as large as
    /// before.
    pub async fn shrink(&self, id: VolumeId, sectors: u64, cancel: &Cancel) -> Result<(), Error> {
        let target = self.with(|s| s.begin_course(id, Course::Shrinking))?;
        let shrunk = self.give_up_the_end(&target, sectors, cancel).await;
        self.with(|s| s.end_course(id));
        self.signals().ranges.notify_all();
        self.signals().writeback_work.notify_all();
        shrunk
    }

    async fn give_up_the_end(&self, target: &Target, sectors: u64, cancel: &Cancel) -> Result<(), Error> {
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
        // What is cacheable stays so until nothing is cached there: write-back and the index look no further.
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

    /// How much of a volume is dirty from that sector of it on, in sectors: what a shrink to there writes back.
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

    /// How much is dirty in that part of a volume's key space, in sectors.
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

    /// Nothing of the volume is in the cache from there on, in the key space.
    async fn empty_from(&self, target: &Target, from: u64, cancel: &Cancel) -> Result<(), Error> {
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

    /// Where the leaf ends that `at` lies in, or else `end`; `None` if something is dirty there.
    async fn clean_leaf(&self, inode: Inode, at: u64, end: u64) -> Result<Option<u64>, Error> {
        let mut survey = Survey::default();
        let upto = self.attempt(|s| s.survey_leaf(inode, at, end, &mut survey)).await?;
        Ok((!survey.dirty).then_some(upto))
    }

    /// Makes void, durably, what the cache holds of a volume from there on; nothing of it may be dirty, unless the volume lives in the cache
    /// alone.
    pub(super) async fn make_void_from(
        &self,
        target: &Target,
        from: u64,
        cancel: &Cancel,
    ) -> Result<(), Error> {
        let Some(inode) = target.inode else { return Ok(()) };
        let end = Position::MAX.offset;
        let mut at = from;
        while at < end {
            urgent::check(self, cancel)?;
            let (upto, found) = self.held_in_leaf(inode, at, end).await?;
            // Where requests have been, data may be on its way into the index.
            let is_used = at < target.cacheable_end;
            let upto = if is_used { upto.min(at + PIECE_SECTORS).min(target.cacheable_end) } else { upto };
            let claimed = if is_used { alloc::vec![Range { start: at, end: upto }] } else { found };
            for range in claimed {
                in_turn(self, target, range, async |target| self.make_range_void(target, range).await)
                    .await?;
            }
            at = upto;
        }
        writer::commit(self).await
    }

    /// Where the leaf ends that `at` lies in, and what it holds from there on.
    async fn held_in_leaf(&self, inode: Inode, at: u64, end: u64) -> Result<(u64, Vec<Range>), Error> {
        let mut found: Vec<Range> = Vec::new();
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
                        None => found.push(Range { start, end: key.end }),
                    }
                })
            })
            .await?;
        Ok((upto, found))
    }

    /// Makes data void in the range of a turn.
    async fn make_range_void(&self, target: &Target, range: Range) -> Result<(), Error> {
        let Some(inode) = target.inode else { return Ok(()) };
        if target.backing.is_some() && write::survey(self, target, range).await?.dirty {
            return Err(Error::Inconsistent("dirty data behind the end of a volume"));
        }
        let mut at = range.start;
        while at < range.end {
            let (upto, found) = self.held_in_leaf(inode, at, range.end).await?;
            for held in found {
                let held = Range { start: held.start, end: held.end.min(range.end) };
                holes::punch(self, target, held).await?;
            }
            at = upto;
        }
        Ok(())
    }

    /// From now on requests know another size.
    pub(super) fn use_size(&self, id: VolumeId, change: impl FnOnce(&mut Volume, u64)) {
        self.with(|s| {
            let block_sectors = s.geometry.block_sectors;
            let Some(volume) = s.volumes.get_mut(id) else { return };
            change(volume, block_sectors);
            volume.attachment += 1;
            volume.earlier_requests = volume.requests;
        });
    }

    /// Until the requests have ended that do not know it.
    pub(super) async fn earlier_have_ended(&self, id: VolumeId, cancel: &Cancel) -> Result<(), Error> {
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

/// End of what can be cached of a volume of so many sectors: the last whole block of the key space. Nothing can, off the block grid.
pub(super) const fn cacheable_end(data_offset: u64, sectors: u64, block_sectors: u64) -> u64 {
    let end = data_offset + sectors;
    if data_offset.is_multiple_of(block_sectors) { end - end % block_sectors } else { 0 }
}

impl State {
    /// What lies before is not written back now.
    fn write_back_from(&mut self, id: VolumeId, from: u64) {
        if let Some(volume) = self.volumes.get_mut(id).filter(|volume| volume.writeback_from < from) {
            volume.writeback_from = from;
            volume.pace.age.passes_by();
        }
    }
}
