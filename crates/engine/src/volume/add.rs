//! Adds backing devices to an open set, as a start does: with the set, adopted by it, or without a
//! cache. A volume that is served already is attached in [`super::attach`]; flash-only volumes are
//! in [`super::flash`].

use crate::error::{Error, ErrorContext};
use crate::latency::Latencies;
use crate::phases::Phase;
use crate::request::write::RangeState;
use crate::request::{Target, parked};
use crate::set::CacheSet;
use crate::state::State;
use crate::uuids;
use crate::volume::backing_flushes::BackingFlushes;
use crate::volume::resize::cacheable_end;
use crate::volume::{Backing, Volume, VolumeId, VolumeInfo, attachment_record, record};
use crate::writeback::urgent::CancelToken;
use crate::writeback::{stripes, task};
use alloc::vec::Vec;
use bcached_env::sync::Semaphore;
use bcached_env::{Disk, DiskId};
use bcached_format::{
    BackingState, BackingSuperblock, CacheMode, Inode, Position, Superblock, Uuid, UuidSlot,
};

impl CacheSet {
    /// Serves the backing device `disk`. It is attached to this set if its superblock says so or
    /// names no set. Refused if its newest data may be in another cache. `mode`, if given, becomes
    /// its cache mode.
    ///
    /// After an error the volume is not served, and can be added again.
    pub async fn add_backing(&self, disk: DiskId, mode: Option<CacheMode>) -> Result<VolumeId, Error> {
        self.add(disk, mode, false, None).await
    }

    /// Like [`CacheSet::add_backing`], but also accepts a device that left another set with all of
    /// its data on it, because that set failed or was missing. What that set holds of it is already
    /// void.
    pub async fn adopt_backing(&self, disk: DiskId, mode: Option<CacheMode>) -> Result<VolumeId, Error> {
        self.add(disk, mode, true, None).await
    }

    pub(super) async fn add(
        &self,
        disk: DiskId,
        mode: Option<CacheMode>,
        adopts: bool,
        number: Option<VolumeId>,
    ) -> Result<VolumeId, Error> {
        let disk = self.env().disk(disk);
        let Superblock::Backing(superblock) = record::read_superblock(&disk).await? else {
            return Err(Error::NotABacking);
        };
        let uuid = superblock.uuid();
        self.check_not_served(uuid)?;
        // If several copies of a device are added concurrently, only the first is written to.
        self.with(|s| s.coming.push(uuid));
        let added = self.add_first(disk, superblock, mode, adopts, number).await;
        self.with(|s| s.coming.retain(|coming| *coming != uuid));
        added
    }

    async fn add_first(
        &self,
        disk: Disk,
        mut superblock: BackingSuperblock,
        mode: Option<CacheMode>,
        adopts: bool,
        number: Option<VolumeId>,
    ) -> Result<VolumeId, Error> {
        let set_uuid = self.with(|s| s.superblock.set_uuid());
        let known = self.recognise(&superblock).await?;
        let ours = superblock.set_uuid() == set_uuid;
        match superblock.state() {
            BackingState::Dirty if !ours => return Err(Error::DirtyElsewhere(superblock.set_uuid())),
            BackingState::Stale if adopts => {}
            BackingState::Clean | BackingState::Stale if !ours => {
                return Err(Error::OtherSet(superblock.set_uuid()));
            }
            BackingState::Dirty if known.is_none() => return Err(Error::DirtyUnknown),
            _ => {}
        }
        self.check_block_size(&superblock)?;
        let fresh = !matches!(superblock.state(), BackingState::Clean | BackingState::Dirty);
        let kept = known.filter(|_| !fresh);
        let has_dirty = |s: &State, inode| s.dirty.of(inode) > 0 || s.overlay.has_dirty_of(inode);
        let may_be_dirty = kept.is_some_and(|inode| self.with(|s| has_dirty(s, inode)));
        // This searches the tree, because counting may not have finished.
        if let Some(inode) =
            kept.filter(|inode| self.with(|s| s.dirty.of(*inode) > 0 || !s.has_counted(*inode)))
        {
            self.check_end(inode, disk.info().sectors).await?;
        }
        if superblock.attachment().is_some() && disk.info().volatile_cache {
            // The slot is about to record that this stamp may still be there after a crash.
            disk.flush().await.map_err(Error::io(ErrorContext::Superblock))?;
        }
        let must_be_clean = kept.is_some_and(|inode| {
            superblock.state() == BackingState::Clean
                && self.with(|s| attachment_record::is_vouched_for(s, &superblock, inode))
        });
        let inode = self.take_slot(&superblock, known, fresh, &CancelToken::default()).await?;
        let before = superblock.clone();
        if known.is_none() || fresh {
            // The slot is durable, so now the device may say that it belongs to this set
            // (invariant D17).
            superblock.set_set_uuid(set_uuid);
            superblock.set_state(BackingState::Clean);
        }
        if let Some(mode) = mode {
            superblock.set_cache_mode(mode);
        }
        if may_be_dirty {
            // A kernel writes *dirty* only when it already has dirty data, and the power may have
            // failed in between (invariant D14). For dirty data found later, the walk has *dirty*
            // written.
            superblock.set_state(BackingState::Dirty);
        }
        superblock.set_attachment(self.with(|s| attachment_record::of(s, inode)));
        let phase = self.begin(record::phase_of(&before, &superblock));
        record::write_superblock(&disk, &superblock.seal()).await?;
        drop(phase);
        self.forget_former_stamp(inode).await?;
        // Nothing can fail any more, unless the volume is being forgotten meanwhile.
        self.with(|s| {
            match s.uuids.find(superblock.uuid()) == Some(inode) && !s.forgetting.contains(&inode) {
                true => Ok(()),
                false => Err(Error::BeingForgotten),
            }
        })?;
        let id = self.enter(disk, &superblock, Some(inode), number);
        self.with(|s| {
            if let Some(volume) = s.volumes.get_mut(id) {
                volume.must_be_clean = must_be_clean && !may_be_dirty;
            }
        });
        Ok(id)
    }

    /// Serves the backing device `disk` without the cache. Whatever a cache may hold of it becomes
    /// void, durably. Refused if a cache may hold newer data than the device.
    ///
    /// After an error the volume is not served, and can be added again.
    pub async fn add_uncached(&self, disk: DiskId) -> Result<VolumeId, Error> {
        self.add_past(disk, None).await
    }

    pub(super) async fn add_past(&self, disk: DiskId, number: Option<VolumeId>) -> Result<VolumeId, Error> {
        let disk = self.env().disk(disk);
        let Superblock::Backing(mut superblock) = record::read_superblock(&disk).await? else {
            return Err(Error::NotABacking);
        };
        let uuid = superblock.uuid();
        self.check_not_served(uuid)?;
        self.check_block_size(&superblock)?;
        match superblock.state() {
            BackingState::Dirty => return Err(Error::DirtyElsewhere(superblock.set_uuid())),
            BackingState::Clean => {
                self.with(|s| s.coming.push(uuid));
                superblock.set_state(BackingState::Stale);
                let written = {
                    let _phase = self.begin(Phase::BackingStale);
                    record::write_superblock(&disk, &superblock.seal()).await
                };
                self.with(|s| s.coming.retain(|coming| *coming != uuid));
                written?;
            }
            BackingState::None | BackingState::Stale => {}
        }
        Ok(self.enter(disk, &superblock, None, number))
    }

    fn check_not_served(&self, uuid: Uuid) -> Result<(), Error> {
        // No volume is served from two devices: invariant D20.
        let is_it = |volume: &Volume| volume.backing.is_some() && volume.uuid == uuid;
        self.with(|s| {
            if s.coming.contains(&uuid) || s.volumes.iter().any(|(_, volume)| is_it(volume)) {
                return Err(Error::Duplicate);
            }
            let is_going = s.uuids.find(uuid).is_some_and(|inode| s.forgetting.contains(&inode));
            if is_going { Err(Error::BeingForgotten) } else { Ok(()) }
        })
    }

    fn check_block_size(&self, superblock: &BackingSuperblock) -> Result<(), Error> {
        let set = self.with(|s| s.geometry.block_sectors);
        let backing = superblock.block_sectors();
        if backing < set { Err(Error::BlockSize { backing, set }) } else { Ok(()) }
    }

    /// Refuses a device that ends before its dirty data does: it was cut, or is a copy of another
    /// device.
    async fn check_end(&self, inode: Inode, sectors: u64) -> Result<(), Error> {
        // Dirty data in a damaged node is not written back, whatever the size of the device.
        if self.has_dirty_from(inode, sectors).await? { Err(Error::TooSmall { sectors }) } else { Ok(()) }
    }

    /// Returns true if undamaged nodes hold dirty keys under this inode from sector `at` on.
    pub(super) async fn has_dirty_from(&self, inode: Inode, at: u64) -> Result<bool, Error> {
        let passes_by = |error: &Error| matches!(error, Error::Node { .. });
        Ok(self.survey_past(inode, at, |found| found.dirty, passes_by).await?.dirty)
    }

    /// Returns true if the cache holds data of the volume behind the end of its backing device,
    /// which must have been longer once.
    ///
    /// # Errors
    /// The index of that part cannot be read.
    pub async fn is_cut_short(&self, id: VolumeId) -> Result<bool, Error> {
        let end = self.with(|s| {
            let volume = s.volumes.get(id)?;
            Some((volume.inode?, volume.backing.as_ref()?.disk.info().sectors))
        });
        let Some((inode, sectors)) = end else { return Ok(false) };
        Ok(self.survey_beyond(inode, sectors, |beyond| beyond.present).await?.present)
    }

    /// Surveys what the set holds of a volume from sector `at` on. Stops as soon as the result is
    /// `enough`.
    pub(super) async fn survey_beyond(
        &self,
        inode: Inode,
        at: u64,
        enough: impl Fn(&RangeState) -> bool,
    ) -> Result<RangeState, Error> {
        self.survey_past(inode, at, enough, |_| false).await
    }

    /// Like [`CacheSet::survey_beyond`], but skips leaves that cannot be read if `passes_by`
    /// accepts the error.
    async fn survey_past(
        &self,
        inode: Inode,
        mut at: u64,
        enough: impl Fn(&RangeState) -> bool,
        passes_by: impl Fn(&Error) -> bool,
    ) -> Result<RangeState, Error> {
        let end = Position::MAX.offset;
        let mut beyond = RangeState::default();
        while at < end && !enough(&beyond) {
            at = match self.attempt(|s| s.survey_leaf(inode, at, end, &mut beyond)).await {
                Err(error) if passes_by(&error) => self.with(|s| s.end_of_missing_leaf(inode, at, end)),
                other => other?,
            };
        }
        Ok(beyond)
    }

    /// Returns the volume's inode: the one it had, or that of a new slot. `fresh`: data cached
    /// before must never be used.
    pub(super) async fn take_slot(
        &self,
        superblock: &BackingSuperblock,
        known: Option<Inode>,
        fresh: bool,
        cancel: &CancelToken,
    ) -> Result<Inode, Error> {
        let seconds = self.env().wall_seconds();
        let keep = known.filter(|_| !fresh);
        // Another caller may have added the volume, or may be forgetting it.
        self.with(|s| {
            let Some(inode) = known else { return Ok(()) };
            if s.uuids.find(superblock.uuid()) != known {
                return Err(Error::BeingForgotten);
            }
            if s.volumes.iter().any(|(_, volume)| volume.inode == known) {
                return Err(Error::Duplicate);
            }
            // What the cache held of it before stays under the old number: invariant D38.
            if fresh {
                s.uuids.give_up(inode, seconds);
            }
            Ok(())
        })?;
        let choose = |s: &State| keep.or_else(|| s.uuids.vacant());
        let stamp = uuids::new_stamp(self);
        let inode = self.with_slot(cancel, choose, |s, inode| {
            // Another caller may have added the volume while a slot was being freed.
            if keep.is_none() && s.uuids.find(superblock.uuid()).is_some() {
                return Err(Error::Duplicate);
            }
            if keep.is_none() {
                let slot = UuidSlot { uuid: superblock.uuid(), first_registered: seconds, ..UuidSlot::FREE };
                s.uuids.assign(inode, slot);
            }
            let slot = s.uuids.slot_mut(inode).ok_or(Error::NoVolume)?;
            slot.last_registered = seconds;
            slot.label = superblock.label();
            // Keep the previous stamp until a superblock with the new one has been written.
            slot.attachment = [superblock.attachment().map_or(0, |of| of.stamp), stamp];
            Ok(inode)
        });
        let inode = inode.await?;
        self.forget_empty_doubted().await;
        uuids::store(self).await?;
        Ok(inode)
    }

    /// Begins to serve the volume.
    fn enter(
        &self,
        disk: Disk,
        superblock: &BackingSuperblock,
        inode: Option<Inode>,
        number: Option<VolumeId>,
    ) -> VolumeId {
        let info = disk.info();
        let id = self.with(|s| {
            let block = s.geometry.block_sectors;
            let data_offset = superblock.data_offset();
            let sectors = info.sectors.saturating_sub(data_offset);
            // A superblock with an inode was written durably just now. One that was only read may
            // not be durable: a former process may have died between its write and its flush.
            let in_doubt = inode.is_none() && info.volatile_cache;
            let is_dirty = superblock.state() == BackingState::Dirty;
            let mut volume = Volume {
                sectors,
                data_offset,
                cacheable_end: cacheable_end(data_offset, sectors, block),
                mode: superblock.cache_mode(),
                writeback_from: data_offset,
                dirty_marked: is_dirty && !in_doubt,
                backing: Some(Backing {
                    disk,
                    superblock: superblock.clone(),
                    in_doubt,
                    attempted: Vec::new(),
                    flushes: BackingFlushes::new(info.volatile_cache),
                    record_lock: Semaphore::new(1),
                }),
                ..Volume::new(inode, superblock.uuid(), superblock.label(), s.options.volume)
            };
            volume.client_activity.wakes(s.now);
            if is_dirty {
                volume.pace.age.inherits(s.now);
            }
            if let Some(inode) = inode {
                s.uuids.comes_to_life(inode);
            }
            s.volumes.add(number, volume)
        });
        self.begin_workers(id);
        id
    }

    /// Starts the volume's own tasks.
    pub(super) fn begin_workers(&self, id: VolumeId) {
        self.spawn_worker(id, task::run);
        self.spawn_worker(id, parked::run);
        self.signals().writeback_work.notify_all();
    }

    /// The volumes that are being served.
    #[must_use]
    pub fn volumes(&self) -> Vec<VolumeInfo> {
        self.with(|s| s.volumes.iter().map(|(id, volume)| info(s, id, volume)).collect())
    }

    /// The mode of a volume that is served through the cache; `None`: it is not, or there is no
    /// such volume.
    #[must_use]
    pub fn cache_mode(&self, id: VolumeId) -> Option<CacheMode> {
        self.with(|s| s.volumes.get(id).filter(|volume| volume.inode.is_some()).map(|volume| volume.mode))
    }

    /// Changes a volume's cache mode. Durable when this returns. Requests in flight end under the
    /// old mode. If the mode is changed again meanwhile, the later change wins.
    pub async fn set_cache_mode(&self, id: VolumeId, mode: CacheMode) -> Result<(), Error> {
        self.with(|s| s.hold(id))?;
        let changed = self.change_mode(id, mode).await;
        self.let_go(id);
        changed
    }

    async fn change_mode(&self, id: VolumeId, mode: CacheMode) -> Result<(), Error> {
        let change = self.with(|s| s.volumes.get_mut(id).map(Volume::begin_mode_change));
        let change = change.ok_or(Error::NoVolume)?;
        record::update(self, id, |_, superblock| superblock.set_cache_mode(mode)).await?;
        self.with(|s| {
            let volume = s.volumes.get_mut(id).ok_or(Error::NoVolume)?;
            if volume.mode_changes == change {
                volume.mode = mode;
            }
            Ok(())
        })
    }

    /// Writes a cache mode to the superblock of a volume's device, durably. The mode in force does
    /// not change.
    ///
    /// # Errors
    /// There is no such volume, or its device fails.
    pub async fn keep_cache_mode(&self, id: VolumeId, mode: CacheMode) -> Result<(), Error> {
        self.with(|s| s.hold(id))?;
        let kept = record::update(self, id, |_, superblock| superblock.set_cache_mode(mode)).await;
        self.let_go(id);
        kept
    }

    /// Latencies of the requests of a volume; `None`: there is no such volume.
    #[must_use]
    pub fn latencies(&self, id: VolumeId) -> Option<Latencies> {
        self.with(|s| s.volumes.get(id).map(|volume| volume.latencies.clone()))
    }

    /// What background tasks need to know about a volume.
    pub(crate) fn target(&self, id: VolumeId) -> Option<Target> {
        self.with(|s| {
            let volume = s.volumes.get(id)?;
            Some(Target::of(id, volume, s.geometry.block_sectors))
        })
    }
}

fn info(s: &State, id: VolumeId, volume: &Volume) -> VolumeInfo {
    let of_device = |backing: &Backing| stripes::of_volume(&volume.options, &backing.disk.info());
    let (stripe_sectors, partial_stripes_expensive) =
        volume.backing.as_ref().map(of_device).unwrap_or_default();
    VolumeInfo {
        id,
        inode: volume.inode,
        uuid: volume.uuid,
        label: volume.label,
        sectors: volume.sectors,
        block_sectors: s.geometry.block_sectors,
        backing_block_sectors: volume.backing.as_ref().map(|backing| backing.superblock.block_sectors()),
        flash_only: volume.backing.is_none(),
        attached: volume.inode.is_some(),
        lifecycle: volume.lifecycle,
        mode: volume.mode,
        options: volume.options,
        state: volume.state(),
        dirty_sectors: volume.inode.map_or(0, |inode| s.dirty.of(inode)),
        is_counted: volume.inode.is_none_or(|inode| s.has_counted(inode)),
        dirty_target_sectors: if volume.inode.is_some() { s.dirty_target(id) } else { 0 },
        stripe_sectors,
        partial_stripes_expensive,
        full_stripes: volume.inode.and_then(|inode| Some(s.dirty.stripes(inode)?.full_count())),
        oldest_dirty: volume.oldest_dirty(s.now),
        writeback_rate: volume.pace.rate.info(s.now, &volume.options),
        stats: volume.stats.as_of(s.now),
        writeback_trouble: volume.shown_trouble(),
        unwritable: volume.failed_extents.shown(s.now),
        marking_trouble: volume.marking_trouble.clone(),
        backing_health: volume.backing.as_ref().map(|backing| backing.disk.health()),
        zeroing: volume.zeroings.oldest(s.now),
    }
}
