//! Implements [`RunningSystem`] for an open set with its host. This file only translates.

use super::machine::SimMachine;
use super::policy::PolicyOption;
use super::requester::{self, ReplySender};
use super::slot::{VolumeSlot, gone};
use super::{
    BoxFuture, DataLocation, DeviceLoss, Geometry, Mode, ProcessContext, Refusal, ReplyCallback,
    ReturnOutcome, RunningSystem, VolumeShape, engine, hosting, lodger, lost, returned, tables, work,
};
use crate::disk::Device;
use bcached_engine::{BucketCount, CacheSet, CancelToken, Error, Options, Settings, VolumeId};
use bcached_env::DiskId;
use bcached_env::sync::Semaphore;
use bcached_format::{CacheMode, ReplacementPolicy, Superblock};
use bcached_host::dispatch::Dispatcher;
use bcached_host::workers::Workers;
use bcached_host::{Host, OpenParams, SetNote, reopen, watch};
use bcached_port::{Operation, Reply};
use std::rc::Rc;

/// A set with its host.
pub struct HostedSet {
    host: Host,
    workers: Rc<Workers<ReplySender>>,
    slots: Vec<Rc<VolumeSlot>>,
    shapes: Vec<VolumeShape>,
}

impl HostedSet {
    /// Opens the set on the devices of a process, with all of their volumes.
    ///
    /// # Errors
    /// The engine's error.
    pub async fn open(
        process: &ProcessContext,
        geometry: &Geometry,
        options: Options,
    ) -> Result<Self, Error> {
        let (env, note) = (process.env.clone(), SetNote::new(Box::new(process.note.clone())));
        let set = CacheSet::open(env.clone(), DiskId(0), note.lend(), options.clone()).await?;
        let superblock = tables::superblock(&process.world.borrow().devices[0]);
        let Some(Superblock::Cache(superblock)) = superblock else { unreachable!("it has been opened") };
        let opening = OpenParams {
            cache: DiskId(0).into(),
            set_uuid: superblock.set_uuid(),
            note,
            options: options.into(),
            limits: hosting::limits(geometry),
        };
        let host = Host::new(env.clone(), Box::new(SimMachine::of(process)), opening, set.clone());
        let room = Semaphore::new(hosting::room(geometry));
        let workers = Workers::new(env.clone(), Dispatcher::new(host.clone(), room));
        let open = Self { host, workers, slots: Vec::new(), shapes: Vec::new() };
        open.with_volumes(&set, geometry).await.inspect(|open| {
            let world = Rc::clone(&process.world);
            let count = move |change| world.borrow_mut().hosting.count(change);
            env.spawn(watch::run(open.host.clone(), count));
            env.spawn(reopen::run(open.host.clone()));
        })
    }

    async fn with_volumes(mut self, set: &CacheSet, geometry: &Geometry) -> Result<Self, Error> {
        let count = u32::try_from(geometry.volumes.len()).expect("few volumes");
        for volume in 0..count {
            self.slots.push(VolumeSlot::of(set.add_backing(DiskId(1 + volume), None).await?));
        }
        let unit_sectors = geometry.block_sectors;
        let infos = set.volumes();
        let shape = |slot: &Rc<VolumeSlot>| {
            let info = infos.iter().find(|info| Some(info.id) == slot.served_as())?;
            Some(VolumeShape { sectors: info.sectors, unit_sectors })
        };
        self.shapes = self.slots.iter().filter_map(shape).collect();
        let of_lodger = |volume| VolumeSlot::of_lodger(lodger::find(set, volume).map(|info| info.id));
        self.slots.extend((count..geometry.count()).map(of_lodger));
        Ok(self)
    }

    fn slot(&self, volume: u32) -> Rc<VolumeSlot> {
        Rc::clone(&self.slots[volume as usize])
    }

    /// Calls `ask` with a volume as soon as it is served.
    fn with<T: 'static>(
        &self,
        volume: u32,
        ask: impl FnOnce(&CacheSet, VolumeId) -> BoxFuture<Result<T, Refusal>> + 'static,
    ) -> BoxFuture<Result<T, Refusal>> {
        let (host, slot) = (self.host.clone(), self.slot(volume));
        Box::pin(async move {
            let id = slot.id().await.ok_or_else(gone)?;
            let set = host.settled(id).map_err(Refusal::from_error)?;
            // Closing a set waits until all handles on it are dropped.
            let asked = ask(&set, id);
            drop(set);
            asked.await
        })
    }

    /// Like [`HostedSet::with`], for long work that [`RunningSystem::cancel`] can cancel.
    fn long<T: 'static>(
        &self,
        volume: u32,
        ask: impl FnOnce(&CacheSet, VolumeId, CancelToken) -> BoxFuture<Result<T, Refusal>> + 'static,
    ) -> BoxFuture<Result<T, Refusal>> {
        let cancel = self.slots[volume as usize].cancel();
        self.with(volume, |set, id| ask(set, id, cancel))
    }
}

impl Drop for HostedSet {
    /// Breaks a reference cycle at the end of the process: a request in the set keeps its host, and
    /// the host keeps the set.
    fn drop(&mut self) {
        self.host.abandon();
    }
}

/// Returns the replacement policy to change to along with a mode, so that the cache's superblock is
/// written while it is in use.
const fn replacement_with(mode: Mode) -> ReplacementPolicy {
    match mode {
        Mode::Writethrough => ReplacementPolicy::Fifo,
        Mode::Writearound => ReplacementPolicy::Random,
        Mode::Writeback | Mode::None => ReplacementPolicy::Lru,
    }
}

/// Changes the mode of a volume of a set without a host.
#[must_use]
pub fn set_mode(set: &CacheSet, id: VolumeId, wanted: Mode) -> BoxFuture<Result<(), Refusal>> {
    let set = set.clone();
    Box::pin(async move {
        let changed = set.set_cache_mode(id, engine::mode(wanted)).await;
        keep_replacement(&set, wanted).await;
        changed.map_err(Refusal::from_error)
    })
}

async fn keep_replacement(set: &CacheSet, mode: Mode) {
    let replacement = Some(replacement_with(mode));
    // No caller waits for the result.
    let _ = set.keep_settings(Settings { replacement, ..Settings::default() }).await;
}

/// Stops a set without a host.
#[must_use]
pub fn stop(set: &CacheSet) -> BoxFuture<Result<(), Refusal>> {
    let set = set.clone();
    Box::pin(async move { set.stop().await.map_err(Refusal::from_error) })
}

impl RunningSystem for HostedSet {
    fn volumes(&self) -> Vec<VolumeShape> {
        self.shapes.clone()
    }

    fn lodger(&self, volume: u32) -> Option<u64> {
        lodger::find(&self.host.main().ok()?, volume).map(|info| info.sectors)
    }

    fn standing(&self, volume: u32) -> DataLocation {
        let slot = &self.slots[volume as usize];
        if slot.is_lodger() {
            return DataLocation::CacheAlone;
        }
        let set = slot.served_as().and_then(|id| Some((id, self.host.settled(id).ok()?)));
        match set.and_then(|(id, set)| set.cache_mode(id)) {
            Some(CacheMode::Writethrough) => DataLocation::Cached(Mode::Writethrough),
            Some(CacheMode::Writeback) => DataLocation::Cached(Mode::Writeback),
            Some(CacheMode::Writearound) => DataLocation::Cached(Mode::Writearound),
            Some(CacheMode::None) => DataLocation::Cached(Mode::None),
            None => DataLocation::Detached,
        }
    }

    fn create(&self, volume: u32, sectors: u64) -> BoxFuture<Result<bool, Refusal>> {
        let (host, slot) = (self.host.clone(), self.slot(volume));
        Box::pin(async move {
            let _nobody = slot.id().await;
            lodger::create(&host, &slot, volume, sectors).await
        })
    }

    fn delete(&self, volume: u32) -> BoxFuture<Result<bool, Refusal>> {
        let (host, slot) = (self.host.clone(), self.slot(volume));
        Box::pin(async move {
            let _id = slot.id().await.ok_or_else(gone)?;
            lodger::delete(&host, &slot).await
        })
    }

    fn serve(&self, volume: u32, operation: Operation) -> BoxFuture<Reply> {
        self.serve_and_tell(volume, operation, Box::new(|_| ()))
    }

    fn serve_and_tell(&self, volume: u32, operation: Operation, callback: ReplyCallback) -> BoxFuture<Reply> {
        requester::serve(&self.workers, self.slot(volume), operation, callback)
    }

    fn keep_note(&self) -> BoxFuture<bool> {
        let host = self.host.clone();
        Box::pin(async move { host.keep_note().await.is_ok() })
    }

    fn set_mode(&self, volume: u32, wanted: Mode) -> BoxFuture<Result<(), Refusal>> {
        let (host, slot) = (self.host.clone(), self.slot(volume));
        Box::pin(async move {
            let id = slot.id().await.ok_or_else(gone)?;
            let changed = host.change_mode(id, engine::mode(wanted)).await;
            if let Ok(set) = host.main() {
                keep_replacement(&set, wanted).await;
            }
            changed.map_err(Refusal::from_error)
        })
    }

    fn turn(&self, volume: u32, option: PolicyOption, value: u64) -> BoxFuture<Result<(), Refusal>> {
        let (host, slot) = (self.host.clone(), self.slot(volume));
        Box::pin(async move {
            let id = slot.id().await.ok_or_else(gone)?;
            let mut options = host.options_of(id);
            option.turn(&mut options, value);
            host.change_options(id, options).map_err(Refusal::from_error)
        })
    }

    fn detach(&self, volume: u32) -> BoxFuture<Result<(), Refusal>> {
        self.long(volume, work::detach)
    }

    fn attach(&self, volume: u32) -> BoxFuture<Result<(), Refusal>> {
        self.long(volume, work::attach)
    }

    fn clean(&self, volume: u32) -> BoxFuture<Result<(), Refusal>> {
        self.long(volume, work::clean)
    }

    fn cancel(&self, volume: u32) {
        if let Ok(set) = self.host.main() {
            set.cancel(&self.slots[volume as usize].cancelled());
        }
    }

    fn readd(&self, volume: u32) -> BoxFuture<Result<bool, Refusal>> {
        let (host, slot) = (self.host.clone(), self.slot(volume));
        Box::pin(async move { slot.readd(&host).await })
    }

    fn shrink(&self, volume: u32, sectors: u64) -> BoxFuture<Result<bool, Refusal>> {
        let is_lodger = self.slots[volume as usize].is_lodger();
        self.long(volume, move |set, id, cancel| work::shrink(set, id, cancel, (sectors, is_lodger)))
    }

    fn grow(&self, volume: u32, sectors: u64) -> BoxFuture<Result<bool, Refusal>> {
        self.long(volume, move |set, id, cancel| work::grow(set, id, cancel, sectors))
    }

    fn begin_forget(&self, volume: u32) -> BoxFuture<Result<Option<DeviceLoss>, Refusal>> {
        let (host, slot) = (self.host.clone(), self.slot(volume));
        Box::pin(async move { lost::begin(&host, &slot).await })
    }

    fn exchange(&self, device: &mut Device) {
        lost::exchange(device);
    }

    fn forget(&self, volume: u32, lost: DeviceLoss) -> BoxFuture<Result<(), Refusal>> {
        let (host, slot) = (self.host.clone(), self.slot(volume));
        Box::pin(async move { lost::end(&host, &slot, lost).await })
    }

    fn can_return(&self, volume: u32) -> bool {
        self.slots[volume as usize].served_as().is_some()
    }

    fn take_back(&self, volume: u32, disk: DiskId) -> BoxFuture<Result<ReturnOutcome, Refusal>> {
        let (host, slot) = (self.host.clone(), self.slot(volume));
        Box::pin(async move {
            match slot.id().await {
                Some(id) => returned::take_back(&host, id, disk).await,
                None => Ok(ReturnOutcome::NotNow),
            }
        })
    }

    fn assert_invariants(&self) {
        if let Ok(set) = self.host.main() {
            set.assert_invariants();
        }
    }

    fn counted(&self) -> Option<Vec<BucketCount>> {
        self.host.main().ok().and_then(|set| set.counted())
    }

    fn written_bytes(&self) -> Option<u64> {
        self.host.written_bytes()
    }

    fn dirty_sectors(&self) -> u64 {
        let volumes = self.host.status().volumes;
        volumes.iter().filter(|volume| !volume.flash_only).map(|volume| volume.dirty_sectors).sum()
    }

    fn caches(&self) -> bool {
        true
    }

    /// Stops in order; for a volume that is gone this promises nothing.
    fn stop(&self) -> BoxFuture<Result<(), Refusal>> {
        let (host, slots) = (self.host.clone(), self.slots.clone());
        Box::pin(async move {
            host.stop().await.map_err(Refusal::from_error)?;
            if slots.iter().any(|slot| slot.is_gone()) { Err(gone()) } else { Ok(()) }
        })
    }
}
