//! The engine with everything configurable: options as the scenario needs them, backing devices
//! under any name or missing, flash-only volumes, and access to the status. Scenarios that need
//! none of this use the simulator's own system.

use crate::disk::Device;
use crate::system::engine::Engine;
use crate::system::open;
use crate::system::{
    BoxFuture, Geometry, Mode, ProcessContext, Refusal, ReplyCallback, RunningSystem, System, VolumeShape,
};
use crate::system::{requester, work};
use bcached_engine::{
    BucketCount, CacheSet, CancelToken, Options, Settings, Status, VolumeId, VolumeOptions,
};
use bcached_env::DiskId;
use bcached_port::{Operation, Reply};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// Where a volume is found at the next start.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum VolumeLocation {
    /// On this device of the world.
    Disk(u32),
    /// A flash-only volume: the first one.
    Flash,
    /// Nowhere: its device is missing.
    Missing,
}

/// A system whose options and devices are chosen by the scenario.
pub struct ScenarioSystem {
    options: Options,
    places: RefCell<Vec<VolumeLocation>>,
    settings: Cell<Settings>,
    open: Rc<RefCell<Option<CacheSet>>>,
}

/// Options without background work: no write-back, and no leaf is written before it must be.
pub fn quiet() -> Options {
    Options {
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

/// Options that write dirty data back as fast as the devices allow, with a pause of `delay` between
/// two sweeps.
pub fn eager(delay: Duration) -> Options {
    Options {
        volume: VolumeOptions { writeback_delay: delay, writeback_percent: 0, ..VolumeOptions::default() },
        ..Options::default()
    }
}

impl ScenarioSystem {
    /// Creates a set with `options`; volume `v` is on device `1 + v`.
    ///
    /// Bypass of sequential and congested I/O is disabled, so that the scenario alone decides what
    /// is cached.
    pub fn new(mut options: Options, volumes: usize) -> Rc<Self> {
        options.volume.sequential_cutoff = 0;
        options.congested_read_threshold = Duration::ZERO;
        options.congested_write_threshold = Duration::ZERO;
        let volumes = u32::try_from(volumes).expect("few volumes");
        let places = RefCell::new((0..volumes).map(|volume| VolumeLocation::Disk(1 + volume)).collect());
        Rc::new(Self { options, places, settings: Cell::default(), open: Rc::default() })
    }

    /// Makes the volume appear at `place` from the next start on.
    pub fn put(&self, volume: usize, place: VolumeLocation) {
        self.places.borrow_mut()[volume] = place;
    }

    /// Makes each start end with a change of these settings in the superblock of the cache.
    pub fn change(&self, settings: Settings) {
        self.settings.set(settings);
    }

    /// Returns the running set.
    pub fn set(&self) -> CacheSet {
        self.open.borrow().clone().expect("the set is open")
    }

    /// Returns the status of the running set.
    pub fn status(&self) -> Status {
        self.open.borrow().as_ref().expect("the set is open").status()
    }
}

impl System for ScenarioSystem {
    fn name(&self) -> &'static str {
        "bench"
    }

    fn flushes_alone(&self) -> bool {
        true
    }

    fn make(&self, geometry: &Geometry, seed: u64) -> Vec<Device> {
        Engine.make(geometry, seed)
    }

    fn inspect(&self, devices: &[Device], counted: Option<&[BucketCount]>) -> Vec<String> {
        Engine.inspect(devices, counted)
    }

    fn open(
        &self,
        process: ProcessContext,
        geometry: &Geometry,
    ) -> BoxFuture<Result<Rc<dyn RunningSystem>, Refusal>> {
        let ProcessContext { env, note, phases, .. } = process;
        let options = Options { phases, ..self.options.clone() };
        let (places, settings) = (self.places.borrow().clone(), self.settings.get());
        let (open, geometry) = (Rc::clone(&self.open), geometry.clone());
        Box::pin(async move {
            *open.borrow_mut() = None;
            let set =
                CacheSet::open(env, DiskId(0), Box::new(note), options).await.map_err(Refusal::from_error)?;
            let mut volumes = vec![None; places.len()];
            let mut found: Vec<(VolumeLocation, usize)> = places.into_iter().zip(0..).collect();
            // A boot finds devices in the order of their names.
            found.sort_unstable();
            for (place, volume) in found {
                volumes[volume] = match place {
                    VolumeLocation::Disk(disk) => {
                        Some(set.add_backing(DiskId(disk), None).await.map_err(Refusal::from_error)?)
                    }
                    VolumeLocation::Flash => {
                        set.volumes().iter().find(|volume| volume.flash_only).map(|volume| volume.id)
                    }
                    VolumeLocation::Missing => None,
                };
            }
            set.keep_settings(settings).await.map_err(Refusal::from_error)?;
            *open.borrow_mut() = Some(set.clone());
            Ok(Rc::new(OpenScenario { set, volumes, geometry }) as Rc<dyn RunningSystem>)
        })
    }
}

struct OpenScenario {
    set: CacheSet,
    volumes: Vec<Option<VolumeId>>,
    geometry: Geometry,
}

impl OpenScenario {
    fn id(&self, volume: u32) -> VolumeId {
        self.volumes[volume as usize].expect("the story uses only volumes that exist")
    }
}

impl RunningSystem for OpenScenario {
    fn volumes(&self) -> Vec<VolumeShape> {
        let shape =
            |sectors: &u64| VolumeShape { sectors: *sectors, unit_sectors: self.geometry.block_sectors };
        self.geometry.volumes.iter().map(shape).collect()
    }

    fn serve(&self, volume: u32, operation: Operation) -> BoxFuture<Reply> {
        self.serve_and_tell(volume, operation, Box::new(|_| ()))
    }

    fn serve_and_tell(&self, volume: u32, operation: Operation, callback: ReplyCallback) -> BoxFuture<Reply> {
        requester::serve_by_set(&self.set, self.id(volume), operation, callback)
    }

    fn set_mode(&self, volume: u32, wanted: Mode) -> BoxFuture<Result<(), Refusal>> {
        open::set_mode(&self.set, self.id(volume), wanted)
    }

    fn detach(&self, volume: u32) -> BoxFuture<Result<(), Refusal>> {
        work::detach(&self.set, self.id(volume), CancelToken::default())
    }

    fn attach(&self, volume: u32) -> BoxFuture<Result<(), Refusal>> {
        work::attach(&self.set, self.id(volume), CancelToken::default())
    }

    fn stop(&self) -> BoxFuture<Result<(), Refusal>> {
        open::stop(&self.set)
    }
}
