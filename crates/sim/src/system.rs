//! What is under test, as the simulator sees it: something that makes devices, opens them, and
//! serves volumes.
//!
//! The engine is one implementation; [`passthrough`] is the smallest, and [`mutant`] are faulty
//! forms of it that prove that the simulator would notice.

pub mod asking;
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
mod returned;
mod seat;
mod tables;
pub mod tuning;
pub mod work;

use crate::disk::{Background, Device, Model};
use crate::driver::World;
use crate::note::MemoryNote;
use bcached_engine::{BucketCount, Forgetting, Phases};
use bcached_env::{DiskId, Env};
use bcached_port::{Operation, Reply};
use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

pub use policy::Knob;
pub use tuning::Tuning;

/// An answer to come.
pub type Soon<T> = Pin<Box<dyn Future<Output = T>>>;

/// Sizes of the devices and of what is made on them. In sectors of 512 bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Logical block of all devices, and the unit of requests: 1 or 8.
    pub block_sectors: u32,
    /// Block of the cache set: at least that of the devices, at most 8.
    pub set_block_sectors: u32,
    /// Bucket.
    pub bucket_sectors: u32,
    /// Buckets on the cache device.
    pub buckets: u64,
    /// Size of each volume; its backing device is as much larger as the system needs.
    pub volumes: Vec<u64>,
    /// Size of each volume that lives in the cache alone while it is there. Their numbers follow
    /// those of the others.
    pub lodgers: Vec<u64>,
    /// Unit within which a device never tears a write: 1 or 8, at least the block.
    pub torn_sectors: u64,
    /// The backing devices have volatile caches.
    pub backing_volatile: bool,
    /// The cache device has a volatile cache.
    pub cache_volatile: bool,
    /// Records the note has room for.
    pub note_records: usize,
    /// Everything that system and devices can be told and that is not a size.
    pub tuning: Tuning,
}

impl Geometry {
    /// Number and size of the volumes that live in the cache alone.
    pub fn lodgers(&self) -> impl Iterator<Item = (u32, u64)> {
        let first = u32::try_from(self.volumes.len()).expect("few volumes");
        (first..).zip(self.lodgers.iter().copied())
    }

    /// Volumes of both kinds, there or not.
    #[must_use]
    pub fn count(&self) -> u32 {
        u32::try_from(self.volumes.len() + self.lodgers.len()).expect("few volumes")
    }

    /// Size of a volume of either kind.
    #[must_use]
    pub fn sectors_of(&self, volume: u32) -> u64 {
        let sizes = self.volumes.iter().chain(&self.lodgers);
        *sizes.into_iter().nth(volume as usize).expect("a volume that there is")
    }

    /// Size of the cache device.
    #[must_use]
    pub fn cache_sectors(&self) -> u64 {
        self.buckets * u64::from(self.bucket_sectors)
    }

    /// Some reads of the cache device of so many sectors take so many nanoseconds more, if any do.
    #[must_use]
    pub fn slow_nodes(&self) -> Option<(u64, u64)> {
        let more = self.tuning.devices.node_read_us * 1000;
        (more > 0).then_some((u64::from(self.bucket_sectors), more))
    }

    /// The cache device, empty.
    #[must_use]
    pub fn cache_device(&self) -> Device {
        let model = Model::fast(self.cache_sectors(), self.block_sectors);
        Device::new(Model {
            torn_sectors: self.torn_sectors,
            volatile_cache: self.cache_volatile,
            fua_flushes: self.tuning.devices.cache_fua_flushes,
            latency_ns: self.tuning.devices.cache_latency_us * 1000,
            ..model
        })
    }

    /// The backing device of `volume`, whose data starts at `data_start`, holding the volume's
    /// first content.
    #[must_use]
    pub fn backing_device(&self, volume: u32, data_start: u64) -> Device {
        let sectors = data_start + self.volumes[volume as usize];
        let model = Model::slow(sectors, self.block_sectors, Background::Stamped { volume, data_start });
        Device::new(Model {
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
pub enum Standing {
    /// On its device alone, or nowhere at present.
    Detached,
    /// On its device, behind a cache of this mode.
    Cached(Mode),
    /// In the cache alone.
    CacheAlone,
}

/// Who hears of the end of a request.
pub type Told = Box<dyn FnOnce(&Reply)>;

/// Why the system did not do what it was asked, in its own words.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub String);

impl Refusal {
    /// From any error.
    pub fn from_error(error: impl fmt::Display) -> Self {
        Self(error.to_string())
    }
}

/// What a disk that has died takes with it.
pub struct Lost {
    /// Sectors of the volume, in order.
    pub ranges: Vec<Range<u64>>,
    /// The engine's word for what is under way.
    pub forgetting: Forgetting,
    /// What was under the volume.
    pub disk: DiskId,
}

/// What a system makes of a device that was pulled and is back.
pub enum Return {
    /// It serves the volume from it. If something that was acknowledged, and not flushed by who
    /// wrote it, may be lost, who flushes next hears of that.
    Taken,
    /// Not at this moment.
    NotNow,
    /// It says that this is not what was there.
    Doubted(Refusal),
}

/// A volume's form.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VolumeShape {
    /// Sectors.
    pub sectors: u64,
    /// Requests must be multiples of this many sectors.
    pub unit_sectors: u32,
}

/// What a process is born with, and its system runs in.
#[derive(Clone)]
pub struct Process {
    /// Clock, tasks and devices.
    pub env: Env,
    /// What is behind that, for who adds devices to it.
    pub world: Rc<RefCell<World>>,
    /// The note.
    pub note: MemoryNote,
    /// What the system is in the middle of, for it to tell.
    pub phases: Arc<Phases>,
}

/// Something that can be put on simulated devices. Device 0 is the cache, device `1 + v` backs
/// volume `v`.
pub trait System {
    /// Its name on the command line.
    fn name(&self) -> &str;

    /// New devices, as a tool would have made them.
    fn make(&self, geometry: &Geometry, seed: u64) -> Vec<Device>;

    /// Opens what is on the devices, and tells from then on what it is in the middle of.
    fn open(&self, process: Process, geometry: &Geometry) -> Soon<Result<Rc<dyn Running>, Refusal>>;

    /// Whether it never asks a device for a flush while another one runs there. Of two the kernel
    /// may tell a failure to one only.
    fn flushes_alone(&self) -> bool {
        false
    }

    /// Damages, in a way that `seed` tells, what says which volume has which number, on devices
    /// that nobody uses. False: there is no such thing. The next process must serve every volume
    /// all the same.
    fn damage_table(&self, _devices: &mut [Device], _seed: u64) -> bool {
        false
    }

    /// Whether who checks devices that [`System::damage_table`] has damaged finds anything wrong
    /// with them.
    fn finds_damage(&self, _devices: &[Device]) -> bool {
        true
    }

    /// Whether the next process must refuse to serve if `copy` stands in the place of device
    /// `which` of `now`. Both were left by an orderly stop, and not by the same one.
    fn tells_older(&self, _now: &[Device], _copy: &Device, _which: usize) -> bool {
        false
    }

    /// Checks the structure on devices that nobody uses, and what [`Running::counted`] said after
    /// an orderly stop; one sentence for each fault found.
    fn inspect(&self, _devices: &[Device], _counted: Option<&[BucketCount]>) -> Vec<String> {
        Vec::new()
    }
}

/// An open system.
pub trait Running {
    /// The volumes with devices that are served now.
    fn volumes(&self) -> Vec<VolumeShape>;

    /// The size of a volume that lives in the cache alone, if it is served.
    fn lodger(&self, _volume: u32) -> Option<u64> {
        None
    }

    /// Makes a volume that lives in the cache alone. False: there is no room for it, or never is
    /// any.
    fn create(&self, _volume: u32, _sectors: u64) -> Soon<Result<bool, Refusal>> {
        Box::pin(async { Ok(false) })
    }

    /// Deletes it with all that it has; requests are refused from here on. False: not now.
    fn delete(&self, _volume: u32) -> Soon<Result<bool, Refusal>> {
        Box::pin(async { Ok(false) })
    }

    /// Is told that the file of the note is gone. True: what was acknowledged outlives the process
    /// all the same.
    fn keep_note(&self) -> Soon<bool> {
        Box::pin(async { false })
    }

    /// Where a volume has its data now.
    fn standing(&self, _volume: u32) -> Standing {
        Standing::Detached
    }

    /// Carries out a request.
    fn serve(&self, volume: u32, operation: Operation) -> Soon<Reply>;

    /// The same; `told` hears of its end at the moment in which whoever asked may: a task that
    /// waits for the reply comes to it later.
    fn serve_and_tell(&self, volume: u32, operation: Operation, told: Told) -> Soon<Reply> {
        let served = self.serve(volume, operation);
        Box::pin(async move {
            let reply = served.await;
            told(&reply);
            reply
        })
    }

    /// Changes a volume's cache mode.
    fn set_mode(&self, volume: u32, mode: Mode) -> Soon<Result<(), Refusal>>;

    /// Turns a knob of a volume.
    fn turn(&self, _volume: u32, _knob: Knob, _value: u64) -> Soon<Result<(), Refusal>> {
        Box::pin(async { Ok(()) })
    }

    /// Takes a volume from the cache, if it is there; it is served on. A system that has no cache
    /// has nothing to do.
    fn detach(&self, _volume: u32) -> Soon<Result<(), Refusal>> {
        Box::pin(async { Ok(()) })
    }

    /// Puts a volume back behind the cache, if it is not there.
    fn attach(&self, _volume: u32) -> Soon<Result<(), Refusal>> {
        Box::pin(async { Ok(()) })
    }

    /// Writes back what is dirty of a volume at this moment.
    fn clean(&self, _volume: u32) -> Soon<Result<(), Refusal>> {
        Box::pin(async { Ok(()) })
    }

    /// Gives up, if it can be, what goes on of detaching, attaching, writing back, shrinking and
    /// growing a volume.
    fn cancel(&self, _volume: u32) {}

    /// Serves a volume no more, and then again; requests that come meanwhile wait for that. Whether
    /// it did, which is a flush. If its cache set has failed, that is let go of and opened again
    /// instead, for all volumes, which is no flush.
    fn readd(&self, _volume: u32) -> Soon<Result<bool, Refusal>> {
        Box::pin(async { Ok(false) })
    }

    /// Serves so many sectors of a volume and no more. False: not now, or not at all.
    fn shrink(&self, _volume: u32, _sectors: u64) -> Soon<Result<bool, Refusal>> {
        Box::pin(async { Ok(false) })
    }

    /// Serves so many sectors of a volume, whose device has them. False: not now, or not at all.
    fn grow(&self, _volume: u32, _sectors: u64) -> Soon<Result<bool, Refusal>> {
        Box::pin(async { Ok(false) })
    }

    /// Serves a volume no more, which is a flush, and says what is lost if its device is; requests
    /// wait from here on until the end of [`Running::forget`], which must follow. `None`: not now,
    /// or not at all, and the volume is served as before.
    fn begin_forget(&self, _volume: u32) -> Soon<Result<Option<Lost>, Refusal>> {
        Box::pin(async { Ok(None) })
    }

    /// Another disk for that of a volume which is not served, with the content that stands on it
    /// and an identity of its own.
    fn exchange(&self, _device: &mut Device) {}

    /// The cache gives up what it holds of the volume, and serves the disk that stands in its
    /// place.
    fn forget(&self, volume: u32, _lost: Lost) -> Soon<Result<(), Refusal>> {
        Box::pin(async move { unreachable!("volume {volume} is not being forgotten") })
    }

    /// Whether it serves the volume from its device, and would from another way to that.
    fn can_return(&self, _volume: u32) -> bool {
        false
    }

    /// The device of a volume was pulled and is back, as `disk`; requests wait meanwhile.
    fn take_back(&self, volume: u32, _disk: DiskId) -> Soon<Result<Return, Refusal>> {
        Box::pin(async move { unreachable!("nobody has pulled the device of volume {volume}") })
    }

    /// Data that is not on the backing devices yet, of volumes that have such, in sectors.
    fn dirty_sectors(&self) -> u64 {
        0
    }

    /// Whether what is read twice should come from the cache the second time.
    fn caches(&self) -> bool {
        false
    }

    /// What it says to have written to its cache device since it was opened, in bytes, if it says
    /// that.
    fn written_bytes(&self) -> Option<u64> {
        None
    }

    /// Panics if what must always hold does not, in memory.
    fn assert_invariants(&self) {}

    /// After an orderly stop: what it has counted of each bucket of its cache, if it has one.
    fn counted(&self) -> Option<Vec<BucketCount>> {
        None
    }

    /// Stops in order; everything acknowledged is durable then.
    fn stop(&self) -> Soon<Result<(), Refusal>>;
}

/// The system of this name.
#[must_use]
pub fn system_named(name: &str) -> Option<Rc<dyn System>> {
    all_systems().into_iter().find(|system| system.name() == name)
}

/// The names that [`system_named`] knows.
#[must_use]
pub fn system_names() -> Vec<String> {
    all_systems().iter().map(|system| system.name().to_owned()).collect()
}

fn all_systems() -> Vec<Rc<dyn System>> {
    let mut systems: Vec<Rc<dyn System>> = vec![Rc::new(engine::Engine), Rc::new(passthrough::Passthrough)];
    systems.extend(mutant::ALL.map(|fault| Rc::new(mutant::Mutant::new(fault)) as Rc<dyn System>));
    systems
}
