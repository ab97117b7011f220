//! Shared code of the host's tests: a set in memory, on the real driver.

use crate::{Host, Limits, Machine, NullNote, OpenParams, SetNote, without_cache};
use bcached_engine::{CacheSet, Options, VolumeId};
use bcached_env::{DiskId, Driver, Executor, RunOrder};
use bcached_format::{
    BackingFormat, BackingSuperblock, CacheMode, CacheSuperblock, DeviceGeometry, RawSuperblock,
    SUPERBLOCK_SECTOR, Superblock, Uuid,
};
use bcached_uring::{Access, Device, Disks, DriverOptions, open_driver};
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

/// Size of a backing device in sectors.
const SECTORS: u64 = 4096;

/// A host, its executor, and its devices.
pub struct TestHost {
    pub executor: Executor,
    pub host: Host,
    disks: Disks,
}

impl TestHost {
    /// Adds a volume to the set.
    pub fn add(&mut self, file: &File) -> VolumeId {
        let disk = self.disks.add(device(file));
        let set = self.host.main().expect("it works");
        let added = self.executor.block_on(async move { set.add_backing(disk, None).await });
        added.expect("a driver").expect("it is taken")
    }
}

/// A machine with nothing but memory.
struct MemoryMachine(Disks);

impl Machine for MemoryMachine {
    fn memory_cache(&self, superblock: &CacheSuperblock) -> Result<DiskId, String> {
        Ok(self.0.add(device(&memory(without_cache::SECTORS, &superblock.seal()[..]))))
    }

    fn remove(&self, disk: DiskId) {
        drop(self.0.remove(disk));
    }
}

fn device(file: &File) -> Device {
    Device::open(format!("/proc/self/fd/{}", file.as_raw_fd()), Access::Own).expect("memory")
}

/// Creates a file in memory of `sectors` sectors, with a superblock in its place.
fn memory(sectors: u64, superblock: &[u8]) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("device", flags).expect("memory"));
    file.set_len(sectors * 512).expect("a size");
    file.write_all_at(superblock, SUPERBLOCK_SECTOR * 512).expect("room");
    file
}

/// Creates a backing device without a cache.
pub fn backing(number: u8) -> File {
    let superblock = BackingSuperblock::format(BackingFormat {
        uuid: Uuid([number; 16]),
        set_uuid: Uuid([0; 16]),
        block_sectors: 8,
        bucket_sectors: 128,
        data_offset: None,
        cache_mode: CacheMode::Writeback,
        device_sectors: SECTORS,
    });
    memory(SECTORS, &superblock.expect("sizes that can be run").seal()[..])
}

/// Returns the cache mode in the file's superblock.
pub fn mode_in(file: &File) -> CacheMode {
    let mut bytes = [0; 4096];
    file.read_exact_at(&mut bytes, SUPERBLOCK_SECTOR * 512).expect("it is there");
    let facts = DeviceGeometry { sectors: SECTORS, logical_block_sectors: 1 };
    let found = RawSuperblock::from_bytes(&bytes).and_then(|raw| raw.check(facts));
    let Ok(Superblock::Backing(superblock)) = found else { unreachable!("it is one of a backing device") };
    superblock.cache_mode()
}

/// Creates a set with the file as its only volume.
pub fn served(file: &File) -> (TestHost, VolumeId) {
    served_through(file, |driver| driver)
}

/// Does the same, with a driver that wraps the real one.
pub fn served_through(
    file: &File,
    wrap: impl FnOnce(Box<dyn Driver>) -> Box<dyn Driver>,
) -> (TestHost, VolumeId) {
    let driver = open_driver(&DriverOptions::default()).expect("a driver");
    let disks = driver.disks;
    // A cache like the cacheless set, with the fewest buckets that the engine runs with.
    let superblock = without_cache::superblock(8);
    let nodes = bcached_engine::node_budget_min(superblock.bucket_sectors(), 1);
    let options = Options { node_budget_bytes: nodes, ..Options::default() };
    let disk = disks.add(device(&memory(without_cache::SECTORS, &superblock.seal()[..])));
    let mut executor = Executor::new(wrap(driver.driver), RunOrder::Fifo, 1);
    let note = SetNote::new(Box::new(NullNote));
    let opening = CacheSet::open(executor.env(), disk, note.lend(), options.clone());
    let set = executor.block_on(opening).expect("a driver").expect("it is whole");
    let set_uuid = superblock.set_uuid();
    let opening =
        OpenParams { cache: disk.into(), set_uuid, note, options: options.into(), limits: Limits::default() };
    let host = Host::new(executor.env(), Box::new(MemoryMachine(disks.clone())), opening, set);
    let mut rig = TestHost { executor, host, disks };
    let id = rig.add(file);
    (rig, id)
}
