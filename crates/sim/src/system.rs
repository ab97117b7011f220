//! Defines the system under test as the simulator sees it: something that makes devices, opens
//! them, and serves volumes.
//!
//! The engine is one implementation. [`passthrough`] is the smallest one, and [`mutant`] has faulty
//! variants of it that prove that the simulator would notice.

pub mod engine;
mod hosting;
mod lending;
mod lodger;
mod lost;
mod machine;
pub mod mutant;
mod older;
pub mod open;
pub mod passthrough;
pub mod policy;
pub mod requester;
mod returned;
mod slot;
mod tables;
pub mod tuning;
pub mod work;

use crate::disk::{Device, DeviceModel, InitialContent};
use crate::driver::World;
use crate::note::MemoryNote;
use bcached_engine::{BucketCount, PendingForget, Phases};
use bcached_env::{DiskId, Env};
use bcached_port::{Operation, Reply};
use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

pub use policy::PolicyOption;
pub use tuning::Tuning;

/// An answer to come.
pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T>>>;

/// Sizes of the devices and of what is made on them, in sectors of 512 bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Logical block of all devices, and the unit of requests: 1 or 8.
    pub block_sectors: u32,
    /// Block of the cache set: at least that of the devices, at most 8.
    pub set_block_sectors: u32,
    /// Bucket size.
    pub bucket_sectors: u32,
    /// Number of buckets on the cache device.
    pub buckets: u64,
    /// Size of each volume; its backing device is larger by what the system needs.
    pub volumes: Vec<u64>,
    /// Size of each volume that lives in the cache alone (a flash-only volume), while it exists.
    /// Their numbers follow those of the others.
    pub lodgers: Vec<u64>,
    /// Unit within which a device never tears a write: 1 or 8, and at least the block.
    pub torn_sectors: u64,
    /// Whether the backing devices have volatile caches.
    pub backing_volatile: bool,
    /// Whether the cache device has a volatile cache.
    pub cache_volatile: bool,
    /// Number of records that the note has room for.
    pub note_records: usize,
    /// All settings of system and devices that are not sizes.
    pub tuning: Tuning,
}

impl Geometry {
    /// Returns the numbers and sizes of the volumes that live in the cache alone.
    pub fn lodgers(&self) -> impl Iterator<Item = (u32, u64)> {
        let first = u32::try_from(self.volumes.len()).expect("few volumes");
        (first..).zip(self.lodgers.iter().copied())
    }

    /// Returns the number of volumes of both kinds, existing or not.
    #[must_use]
    pub fn count(&self) -> u32 {
        u32::try_from(self.volumes.len() + self.lodgers.len()).expect("few volumes")
    }

    /// Returns the size of a volume of either kind.
    #[must_use]
    pub fn sectors_of(&self, volume: u32) -> u64 {
        let sizes = self.volumes.iter().chain(&self.lodgers);
        *sizes.into_iter().nth(volume as usize).expect("a volume that there is")
    }

    /// Returns the size of the cache device.
    #[must_use]
    pub fn cache_sectors(&self) -> u64 {
        self.buckets * u64::from(self.bucket_sectors)
    }

    /// Returns `(sectors, nanoseconds)` if some reads of the cache device that have this size take
    /// this much longer.
    #[must_use]
    pub fn slow_nodes(&self) -> Option<(u64, u64)> {
        let more = self.tuning.devices.node_read_us * 1000;
        (more > 0).then_some((u64::from(self.bucket_sectors), more))
    }

    /// Creates the empty cache device.
    #[must_use]
    pub fn cache_device(&self) -> Device {
        let model = DeviceModel::fast(self.cache_sectors(), self.block_sectors);
        Device::new(DeviceModel {
            torn_sectors: self.torn_sectors,
            volatile_cache: self.cache_volatile,
            fua_flushes: self.tuning.devices.cache_fua_flushes,
            latency_ns: self.tuning.devices.cache_latency_us * 1000,
            ..model
        })
    }

    /// Creates the backing device of `volume`, whose data starts at `data_start`, with the volume's
    /// first content.
    #[must_use]
    pub fn backing_device(&self, volume: u32, data_start: u64) -> Device {
        let sectors = data_start + self.volumes[volume as usize];
        let model =
            DeviceModel::slow(sectors, self.block_sectors, InitialContent::Stamped { volume, data_start });
        Device::new(DeviceModel {
            torn_sectors: self.torn_sectors,
            volatile_cache: self.backing_volatile,
            fua_flushes: self.tuning.devices.backing_fua_flushes,
            latency_ns: self.tuning.devices.backing_latency_us * 1000,
            discard: self.tuning.devices.backing_discard,
            zeroing: self.tuning.devices.backing_zeroing(),
            ..model
        })
    }
}

/// Cache modes by their kernel names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the kernel's own words")]
pub enum Mode {
    Writethrough,
    Writeback,
    Writearound,
    None,
}

/// Where a volume has its data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DataLocation {
    /// On its device alone, or nowhere at present.
    Detached,
    /// On its device, behind a cache of this mode.
    Cached(Mode),
    /// In the cache alone.
    CacheAlone,
}

/// Called at the end of a request.
pub type ReplyCallback = Box<dyn FnOnce(&Reply)>;

/// Why the system did not do what it was asked, in its own words.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub String);

impl Refusal {
    /// Converts any error.
    pub fn from_error(error: impl fmt::Display) -> Self {
        Self(error.to_string())
    }
}

/// What is lost with a disk that has died.
pub struct DeviceLoss {
    /// Sectors of the volume, in order.
    pub ranges: Vec<Range<u64>>,
    /// The engine's handle on the operation in progress.
    pub forgetting: PendingForget,
    /// The disk under the volume.
    pub disk: DiskId,
}

/// The result of returning a device that was pulled.
pub enum ReturnOutcome {
    /// The system serves the volume from it. If acknowledged data that its client has not flushed
    /// may be lost, the next flush reports it.
    Accepted,
    /// The system cannot take it at this moment.
    NotNow,
    /// The system says that this is not the former device.
    Doubted(Refusal),
}

/// A volume's size and alignment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeShape {
    /// Size in sectors.
    pub sectors: u64,
    /// Requests must be multiples of this many sectors.
    pub unit_sectors: u32,
}

/// The initial state of a process, in which its system runs.
#[derive(Clone)]
pub struct ProcessContext {
    /// Clock, tasks and devices.
    pub env: Env,
    /// The world behind that, for adding devices to it.
    pub world: Rc<RefCell<World>>,
    /// The note.
    pub note: MemoryNote,
    /// Where the system reports the phases that it is in.
    pub phases: Arc<Phases>,
}

/// A system that can run on simulated devices. Device 0 is the cache; device `1 + v` backs volume
/// `v`.
pub trait System {
    /// Returns its name on the command line.
    fn name(&self) -> &str;

    /// Makes new devices, as a tool would have made them.
    fn make(&self, geometry: &Geometry, seed: u64) -> Vec<Device>;

    /// Opens what is on the devices, and from then on reports the phases that it is in.
    fn open(
        &self,
        process: ProcessContext,
        geometry: &Geometry,
    ) -> BoxFuture<Result<Rc<dyn RunningSystem>, Refusal>>;

    /// Returns whether it never flushes a device while another flush is in flight there. Of two
    /// such flushes, the kernel may report a failure to one only.
    fn flushes_alone(&self) -> bool {
        false
    }

    /// Damages the table that assigns volumes their numbers, in a way chosen by `seed`, on devices
    /// that are not in use. Returns false if there is no such table. The next process must serve
    /// every volume all the same.
    fn damage_table(&self, _devices: &mut [Device], _seed: u64) -> bool {
        false
    }

    /// Returns whether the checker finds anything wrong with devices that [`System::damage_table`]
    /// has damaged.
    fn finds_damage(&self, _devices: &[Device]) -> bool {
        true
    }

    /// Returns whether the next process must refuse to serve if `copy` is in the place of device
    /// `which` of `now`. They were left by two different orderly stops.
    fn tells_older(&self, _now: &[Device], _copy: &Device, _which: usize) -> bool {
        false
    }

    /// Checks the structures on devices that are not in use, and the counts that
    /// [`RunningSystem::counted`] returned after an orderly stop. Returns one sentence for each
    /// fault found.
    fn inspect(&self, _devices: &[Device], _counted: Option<&[BucketCount]>) -> Vec<String> {
        Vec::new()
    }
}

/// An open system.
pub trait RunningSystem {
    /// Returns the volumes with devices that are served now.
    fn volumes(&self) -> Vec<VolumeShape>;

    /// Returns the size of a volume that lives in the cache alone, if it is served.
    fn lodger(&self, _volume: u32) -> Option<u64> {
        None
    }

    /// Creates a volume that lives in the cache alone. Returns false if there is no room, or if the
    /// system never has any.
    fn create(&self, _volume: u32, _sectors: u64) -> BoxFuture<Result<bool, Refusal>> {
        Box::pin(async { Ok(false) })
    }

    /// Deletes the volume with all its data; requests are refused from here on. Returns false if
    /// that is not possible now.
    fn delete(&self, _volume: u32) -> BoxFuture<Result<bool, Refusal>> {
        Box::pin(async { Ok(false) })
    }

    /// Tells the system that the file of the note is gone. Returns true if acknowledged data
    /// outlives the process all the same.
    fn keep_note(&self) -> BoxFuture<bool> {
        Box::pin(async { false })
    }

    /// Returns where a volume has its data now.
    fn standing(&self, _volume: u32) -> DataLocation {
        DataLocation::Detached
    }

    /// Carries out a request.
    fn serve(&self, volume: u32, operation: Operation) -> BoxFuture<Reply>;

    /// Carries out a request. `callback` is called at its end, at the first moment at which a
    /// client may see that; a task that waits for the reply runs later.
    fn serve_and_tell(&self, volume: u32, operation: Operation, callback: ReplyCallback) -> BoxFuture<Reply> {
        let served = self.serve(volume, operation);
        Box::pin(async move {
            let reply = served.await;
            callback(&reply);
            reply
        })
    }

    /// Changes a volume's cache mode.
    fn set_mode(&self, volume: u32, mode: Mode) -> BoxFuture<Result<(), Refusal>>;

    /// Sets an option of a volume.
    fn turn(&self, _volume: u32, _option: PolicyOption, _value: u64) -> BoxFuture<Result<(), Refusal>> {
        Box::pin(async { Ok(()) })
    }

    /// Detaches a volume from the cache, if it is attached; it stays served. A system without a
    /// cache has nothing to do.
    fn detach(&self, _volume: u32) -> BoxFuture<Result<(), Refusal>> {
        Box::pin(async { Ok(()) })
    }

    /// Attaches a volume to the cache, if it is not attached.
    fn attach(&self, _volume: u32) -> BoxFuture<Result<(), Refusal>> {
        Box::pin(async { Ok(()) })
    }

    /// Writes back the data of a volume that is dirty at this moment.
    fn clean(&self, _volume: u32) -> BoxFuture<Result<(), Refusal>> {
        Box::pin(async { Ok(()) })
    }

    /// Cancels, where possible, a detach, attach, write-back, shrink or grow of a volume that is in
    /// progress.
    fn cancel(&self, _volume: u32) {}

    /// Stops serving a volume and then serves it again; requests that arrive meanwhile wait.
    /// Returns whether it did so, which is a flush. If the cache set has failed, the set is
    /// released and opened again instead, for all volumes, which is not a flush.
    fn readd(&self, _volume: u32) -> BoxFuture<Result<bool, Refusal>> {
        Box::pin(async { Ok(false) })
    }

    /// Shrinks a volume to this many sectors. Returns false if that is not possible now, or not at
    /// all.
    fn shrink(&self, _volume: u32, _sectors: u64) -> BoxFuture<Result<bool, Refusal>> {
        Box::pin(async { Ok(false) })
    }

    /// Grows a volume to this many sectors, which its device has. Returns false if that is not
    /// possible now, or not at all.
    fn grow(&self, _volume: u32, _sectors: u64) -> BoxFuture<Result<bool, Refusal>> {
        Box::pin(async { Ok(false) })
    }

    /// Stops serving a volume, which is a flush, and returns what is lost without its device.
    /// Requests wait from here on until the end of [`RunningSystem::forget`], which must follow.
    /// Returns `None` if that is not possible now, or not at all; the volume is then served as
    /// before.
    fn begin_forget(&self, _volume: u32) -> BoxFuture<Result<Option<DeviceLoss>, Refusal>> {
        Box::pin(async { Ok(None) })
    }

    /// Replaces the disk of a volume that is not served by another disk with the same content and a
    /// new identity.
    fn exchange(&self, _device: &mut Device) {}

    /// Makes the cache drop what it holds of the volume, and serves the disk that took its place.
    fn forget(&self, volume: u32, _lost: DeviceLoss) -> BoxFuture<Result<(), Refusal>> {
        Box::pin(async move { unreachable!("volume {volume} is not being forgotten") })
    }

    /// Returns whether it serves the volume from its device, and would accept that device under
    /// another id.
    fn can_return(&self, _volume: u32) -> bool {
        false
    }

    /// Hands over the device of a volume, which was pulled and is back as `disk`; requests wait
    /// meanwhile.
    fn take_back(&self, volume: u32, _disk: DiskId) -> BoxFuture<Result<ReturnOutcome, Refusal>> {
        Box::pin(async move { unreachable!("the device of volume {volume} was not pulled") })
    }

    /// Returns the amount of data that is not on the backing devices yet, over all volumes that
    /// have one, in sectors.
    fn dirty_sectors(&self) -> u64 {
        0
    }

    /// Returns whether the second of two equal reads should come from the cache.
    fn caches(&self) -> bool {
        false
    }

    /// Returns how many bytes the system reports to have written to its cache device since it was
    /// opened, if it reports that.
    fn written_bytes(&self) -> Option<u64> {
        None
    }

    /// Panics if an in-memory invariant does not hold.
    fn assert_invariants(&self) {}

    /// Returns, after an orderly stop, the counts of each bucket of its cache, if it has one.
    fn counted(&self) -> Option<Vec<BucketCount>> {
        None
    }

    /// Stops in order; everything acknowledged is then durable.
    fn stop(&self) -> BoxFuture<Result<(), Refusal>>;
}

/// Returns the system of this name.
#[must_use]
pub fn system_named(name: &str) -> Option<Rc<dyn System>> {
    all_systems().into_iter().find(|system| system.name() == name)
}

/// Returns the names that [`system_named`] knows.
#[must_use]
pub fn system_names() -> Vec<String> {
    all_systems().iter().map(|system| system.name().to_owned()).collect()
}

fn all_systems() -> Vec<Rc<dyn System>> {
    let mut systems: Vec<Rc<dyn System>> = vec![Rc::new(engine::Engine), Rc::new(passthrough::Passthrough)];
    systems.extend(mutant::ALL.map(|fault| Rc::new(mutant::Mutant::new(fault)) as Rc<dyn System>));
    systems
}
