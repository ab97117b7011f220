//! A test bed: the unmodified engine on modelled devices. It makes a cache set with one volume,
//! opens it, puts it under load, crashes it and opens it again.

use super::hdd;
use super::load::{Load, LoadResult, RunningLoad};
use super::ssd;
use super::world::{IoCounts, ModelDevice, ModelDriver, ModelWorld};
use crate::note::{MemoryNote, NoteState};
use bcached_engine::{CacheSet, Options, Status, VolumeId};
use bcached_env::{DiskId, Env, Executor, RunOrder, RunOutcome};
use bcached_format::jset::{JSET_BYTES_MAX, seal_in_place};
use bcached_format::{
    BackingFormat, BackingSuperblock, CacheFormat, CacheMode, CacheSuperblock, DeviceGeometry, Jset,
    JsetHeader, RawSuperblock, ReplacementPolicy, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, Superblock, Uuid,
};
use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

/// The cache device.
pub const CACHE: usize = 0;
/// The backing device.
pub const BACKING: usize = 1;
/// Start of a volume's data on its backing device, in sectors.
pub const DATA_START: u64 = 16;
/// Number of records of the note: the number of writes that may be acknowledged before the journal
/// has them.
const NOTE_RECORDS: usize = 1 << 16;
/// Block size of the set and of requests, in sectors.
const BLOCK_SECTORS: u16 = 8;
/// Minimum number of buckets of a small cache.
const BUCKETS_MIN: u64 = 2048;
/// Smallest and largest bucket, in sectors.
const BUCKET_MIN: u64 = 32;
const BUCKET_MAX: u64 = 1024;
/// Seed of the engine's random numbers.
const SEED: u64 = 1;

/// The devices that a set is made on and the options that it is opened with. Sizes are in sectors.
#[derive(Clone)]
pub struct BedConfig {
    /// The cache device.
    pub cache: ssd::SsdModel,
    /// Its size.
    pub cache_sectors: u64,
    /// Size of a bucket.
    pub bucket_sectors: u16,
    /// The backing disk.
    pub backing: hdd::HddModel,
    /// Size of the volume, from the start of the disk.
    pub volume_sectors: u64,
    /// The engine's options.
    pub options: Options,
}

impl BedConfig {
    /// A write-back cache on `cache` in front of a 7k8. Buckets have 512 KiB, or less if there
    /// would be few of them. Nothing is bypassed: the load decides what is cached.
    #[must_use]
    pub fn new(cache: ssd::SsdModel, cache_sectors: u64, volume_sectors: u64) -> Self {
        let mut options = Options::default();
        options.volume.sequential_cutoff = 0;
        options.congested_read_threshold = Duration::ZERO;
        options.congested_write_threshold = Duration::ZERO;
        let backing = hdd::HddModel::d7k8();
        let fitting = (cache_sectors / BUCKETS_MIN).clamp(BUCKET_MIN, BUCKET_MAX);
        // The largest power of two that is not above it.
        let bucket_sectors = u16::try_from(1 << fitting.ilog2()).expect("at most the maximum");
        Self { cache, cache_sectors, bucket_sectors, backing, volume_sectors, options }
    }

    fn devices(&self) -> Vec<ModelDevice> {
        let set_uuid = Uuid([7; 16]);
        let mut cache = ModelDevice::ssd(self.cache.clone(), self.cache_sectors);
        let superblock = CacheSuperblock::format(CacheFormat {
            uuid: Uuid([8; 16]),
            set_uuid,
            device_sectors: self.cache_sectors,
            block_sectors: BLOCK_SECTORS,
            bucket_sectors: self.bucket_sectors,
            discard: false,
            replacement: ReplacementPolicy::Lru,
        });
        cache.content.write(SUPERBLOCK_SECTOR, &superblock.expect("sizes that can be run").seal()[..]);
        let device_sectors = DATA_START + self.volume_sectors;
        let mut backing = ModelDevice::hdd(self.backing.clone(), device_sectors);
        let superblock = BackingSuperblock::format(BackingFormat {
            uuid: Uuid([9; 16]),
            set_uuid,
            block_sectors: BLOCK_SECTORS,
            bucket_sectors: self.bucket_sectors,
            data_offset: None,
            cache_mode: CacheMode::Writeback,
            device_sectors,
        });
        backing.content.write(SUPERBLOCK_SECTOR, &superblock.expect("sizes that can be run").seal()[..]);
        vec![cache, backing]
    }
}

/// A running set and its world.
pub struct TestBed {
    /// The devices and the clock.
    pub world: Rc<RefCell<ModelWorld>>,
    /// The set.
    pub set: CacheSet,
    /// Its volume.
    pub volume: VolumeId,
    executor: Executor,
    note: Rc<RefCell<NoteState>>,
    options: Options,
}

type OpenedSet = (Executor, CacheSet, VolumeId);

fn open(world: &Rc<RefCell<ModelWorld>>, note: &Rc<RefCell<NoteState>>, options: Options) -> OpenedSet {
    let mut executor = Executor::new(Box::new(ModelDriver::new(Rc::clone(world))), RunOrder::Fifo, SEED);
    let (env, note) = (executor.env(), Box::new(MemoryNote::new(Rc::clone(note))));
    let opened = executor.block_on(async move {
        let set = CacheSet::open(env, DiskId(0), note, options).await.expect("a set that was made opens");
        let volume = set.add_backing(DiskId(1), None).await.expect("a volume that was made is attached");
        (set, volume)
    });
    let (set, volume) = opened.expect("the world does not halt");
    (executor, set, volume)
}

impl TestBed {
    /// Makes a set, opens it and attaches its volume.
    ///
    /// # Panics
    /// If the sizes cannot be run.
    #[must_use]
    pub fn new(setting: &BedConfig) -> Self {
        let world = Rc::new(RefCell::new(ModelWorld::new(setting.devices())));
        let note = Rc::new(RefCell::new(NoteState::new(NOTE_RECORDS)));
        let (executor, set, volume) = open(&world, &note, setting.options.clone());
        Self { world, set, volume, executor, note, options: setting.options.clone() }
    }

    /// Cuts the power and opens the set again. Also returns the virtual nanoseconds until the
    /// volume is served.
    #[must_use]
    pub fn crash_and_reopen(self) -> (Self, u64) {
        self.crash_and_reopen_after(|_| {})
    }

    /// Does the same as if a kernel had used the set last: no journal entry carries the mark of
    /// bcached's reserve.
    #[must_use]
    pub fn crash_and_reopen_of_a_kernel(self) -> (Self, u64) {
        self.crash_and_reopen_after(forget_the_reserve)
    }

    fn crash_and_reopen_after(self, change: impl FnOnce(&mut ModelDevice)) -> (Self, u64) {
        let Self { world, set, executor, note, options, .. } = self;
        drop((set, executor));
        note.borrow_mut().wipe();
        world.borrow_mut().next_life();
        change(&mut world.borrow_mut().devices[CACHE]);
        let began = world.borrow().now();
        let (executor, set, volume) = open(&world, &note, options.clone());
        let taken = world.borrow().now() - began;
        (Self { world, set, volume, executor, note, options }, taken)
    }

    /// Returns the executor's environment.
    #[must_use]
    pub fn env(&self) -> Env {
        self.executor.env()
    }

    /// Returns virtual nanoseconds since the beginning.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.world.borrow().now()
    }

    /// Returns the I/O counters of a device.
    #[must_use]
    pub fn traffic(&self, device: usize) -> IoCounts {
        self.world.borrow().devices[device].traffic
    }

    /// Returns the peak heap usage since the set was opened, in bytes.
    #[must_use]
    pub fn heap(&self) -> u64 {
        self.world.borrow().heap.bytes() as u64
    }

    /// Returns the status of the set.
    #[must_use]
    pub fn status(&self) -> Status {
        self.set.status()
    }

    /// Runs until `flow` has ended.
    ///
    /// # Panics
    /// If all tasks wait for each other.
    pub fn block_on<T: 'static>(&mut self, flow: impl Future<Output = T> + 'static) -> T {
        self.executor.block_on(flow).expect("not all tasks wait for each other")
    }

    /// Lets virtual time pass.
    pub fn rest(&mut self, duration: Duration) {
        let env = self.env();
        self.block_on(async move { env.sleep(duration).await });
    }

    /// Puts the volume under `load` until it ends.
    ///
    /// # Panics
    /// If a request is refused, or all tasks wait for each other.
    pub fn run(&mut self, load: &Load) -> LoadResult {
        let run = RunningLoad::begin(load, self.env(), &self.set, self.volume);
        let outcome = self.executor.run_until(|| run.has_ended());
        assert_eq!(outcome, RunOutcome::Done, "not all tasks wait for each other");
        run.done()
    }
}

/// Clears the mark of the reserve in each journal entry of a cache device.
fn forget_the_reserve(device: &mut ModelDevice) {
    let sectors = device.sectors();
    let cache = &mut device.content;
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    cache.read(SUPERBLOCK_SECTOR, &mut bytes);
    let raw = RawSuperblock::from_bytes(&bytes).expect("all of it");
    let facts = DeviceGeometry { sectors, logical_block_sectors: 1 };
    let Superblock::Cache(superblock) = raw.check(facts).expect("sealed") else {
        unreachable!("a cache device")
    };
    let (magic, bucket) = (superblock.set_magic(), superblock.bucket_sectors());
    let begin = superblock.first_bucket() * bucket;
    let mut bytes = vec![0; JSET_BYTES_MAX];
    for sector in (begin..begin + superblock.journal_buckets() * bucket).step_by(BLOCK_SECTORS.into()) {
        cache.read(sector, &mut bytes);
        let Ok(entry) = Jset::parse(&bytes, magic) else { continue };
        let (header, length) = (JsetHeader { marks_reserve: false, ..entry.header }, entry.byte_len());
        seal_in_place(&mut bytes[..length], magic, &header);
        let blocks = length.next_multiple_of(usize::from(BLOCK_SECTORS) * 512);
        cache.write(sector, &bytes[..blocks]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::load::StopAfter;
    use super::*;
    use bcached_engine::Request;
    use bcached_env::Buffer;

    fn small() -> BedConfig {
        BedConfig::new(ssd::SsdModel::sata_plp(), 1 << 17, 1 << 19)
    }

    /// Data that clients flushed, and metadata, survive a crash byte by byte.
    #[test]
    fn what_was_flushed_is_there_after_a_crash() {
        let mut bed = TestBed::new(&small());
        let bytes: Vec<u8> = (0..64 * 512_u32).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let (set, volume, payload) = (bed.set.clone(), bed.volume, Buffer::copied_from(&bytes).freeze());
        bed.block_on(async move {
            set.serve(volume, Request::Write { sector: 1000, payload, fua: false }).await.result.unwrap();
            set.serve(volume, Request::Flush).await.result.unwrap();
        });
        bed.run(&Load::random_writes(1 << 19, 8, StopAfter::Requests(500)));
        let (mut bed, nanoseconds) = bed.crash_and_reopen();
        assert!(nanoseconds > 0);
        bed.set.assert_invariants();
        assert!(bed.status().dirty_sectors >= 64);
        let (set, volume) = (bed.set.clone(), bed.volume);
        let read = bed.block_on(async move {
            let buffer = Buffer::zeroed(64 * 512);
            set.serve(volume, Request::Read { sector: 1000, buffer }).await.buffer.unwrap()
        });
        // The load may have overwritten some of it with zeroes.
        let blocks = read.as_slice().chunks(4096).zip(bytes.chunks(4096));
        let kept = blocks.filter(|(read, written)| read == written).count();
        assert!(kept >= 7, "{kept} of 8 blocks");
    }

    /// A write at queue depth 1 takes the drive's time plus the processor's.
    #[test]
    fn latencies_are_the_drives_and_the_processors() {
        let mut bed = TestBed::new(&small());
        // The first write marks the backing device dirty.
        bed.run(&Load::random_writes(1 << 19, 1, StopAfter::Requests(1)));
        let cpu_before = bed.world.borrow().cpu_ns();
        let mut done = bed.run(&Load::random_writes(1 << 19, 1, StopAfter::Requests(1000)));
        let cpu = (bed.world.borrow().cpu_ns() - cpu_before) / 1000;
        let median = done.writes.quantile(500);
        println!("{median} ns, {cpu} of them the processor's");
        assert!((2_000..20_000).contains(&cpu), "{cpu}");
        assert!((44_000..62_000).contains(&median), "{median}");
    }

    #[test]
    fn a_run_is_the_same_each_time() {
        let run = || {
            let mut bed = TestBed::new(&small());
            let load = Load {
                read_percent: 50,
                flush_each: 7,
                ..Load::random_writes(1 << 19, 8, StopAfter::Requests(3000))
            };
            let mut done = bed.run(&load);
            let traffic = [CACHE, BACKING].map(|device| bed.traffic(device));
            (bed.now(), traffic, done.reads.quantile(990), done.writes.quantile(990), done.by_second)
        };
        assert_eq!(run(), run());
    }
}
