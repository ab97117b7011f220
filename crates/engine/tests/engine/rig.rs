//! A newly made cache set on devices in memory, and an executor to run it.

use crate::memory::{MemoryDriver, NoNote, World};
use bcached_engine::{CacheSet, Error, Options, Reply, Request, VolumeId};
use bcached_env::rng::Rng;
use bcached_env::{Buffer, DiskId, Env, Executor, RunOrder};
use bcached_format::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};
use bcached_format::{
    BackingFormat, BackingSuperblock, CacheFormat, CacheMode, CacheSuperblock, DeviceGeometry, RawSuperblock,
    ReplacementPolicy, Superblock, Uuid,
};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

/// The cache device of every rig.
pub const CACHE: DiskId = DiskId(0);
/// The backing device of every rig.
pub const BACKING: DiskId = DiskId(1);
/// The second backing device of a rig that has two.
pub const SECOND: DiskId = DiskId(2);

/// Sizes, in sectors.
#[derive(Clone, Copy)]
pub struct Sizes {
    /// Block of the set.
    pub block: u16,
    /// Bucket; up to 256 sectors, a node has the same size.
    pub bucket: u16,
    /// Buckets of the cache device.
    pub buckets: u64,
    /// The backing device.
    pub backing: u64,
}

/// Devices with a set that was never started, and a volume in writeback mode.
pub struct Rig {
    pub world: Rc<RefCell<World>>,
    seed: u64,
    starts: u64,
}

impl Rig {
    pub fn new(sizes: Sizes, seed: u64) -> Self {
        Self::with_replacement(sizes, seed, ReplacementPolicy::Lru)
    }

    /// The same, with the given replacement policy.
    pub fn with_replacement(sizes: Sizes, seed: u64, replacement: ReplacementPolicy) -> Self {
        Self::made(sizes, seed, replacement, 1)
    }

    /// The same, with two backing devices.
    pub fn with_second(sizes: Sizes, seed: u64) -> Self {
        Self::made(sizes, seed, ReplacementPolicy::Lru, 2)
    }

    fn made(sizes: Sizes, seed: u64, replacement: ReplacementPolicy, backings: u8) -> Self {
        let cache_sectors = sizes.buckets * u64::from(sizes.bucket);
        let mut sectors = vec![cache_sectors];
        sectors.resize(1 + usize::from(backings), sizes.backing);
        let world = World::new(&sectors, seed);
        let set_uuid = Uuid([1; 16]);
        let cache = CacheSuperblock::format(CacheFormat {
            uuid: Uuid([2; 16]),
            set_uuid,
            device_sectors: cache_sectors,
            block_sectors: sizes.block,
            bucket_sectors: sizes.bucket,
            discard: false,
            replacement,
        });
        world.borrow_mut().place(0, SUPERBLOCK_SECTOR, &cache.expect("sizes that can be run").seal()[..]);
        for number in 1..=backings {
            let backing = BackingSuperblock::format(BackingFormat {
                uuid: Uuid([2 + number; 16]),
                set_uuid,
                block_sectors: sizes.block,
                bucket_sectors: sizes.bucket,
                data_offset: None,
                cache_mode: CacheMode::Writeback,
                device_sectors: sizes.backing,
            });
            let bytes = backing.expect("sizes that can be run").seal();
            world.borrow_mut().place(usize::from(number), SUPERBLOCK_SECTOR, &bytes[..]);
        }
        Self { world, seed, starts: 0 }
    }

    /// Starts a process on the devices. Operations that a former process had in flight are dropped.
    pub fn executor(&mut self) -> Executor {
        self.starts += 1;
        self.world.borrow_mut().forget();
        // Each process gets a different seed: otherwise a node could be taken for what another
        // process left in its bucket.
        let seed = self.seed + self.starts;
        Executor::new(Box::new(MemoryDriver(Rc::clone(&self.world))), RunOrder::Seeded(Rng::new(seed)), seed)
    }
}

/// First sector of a volume's data on its backing device.
pub const DATA_OFFSET: u64 = 16;

/// Reads the backing device's superblock.
pub fn backing_superblock(rig: &Rig) -> BackingSuperblock {
    superblock_on(&rig.world.borrow(), BACKING)
}

/// Reads the superblock of the given backing device.
pub fn superblock_on(world: &World, disk: DiskId) -> BackingSuperblock {
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    world.look(disk.0 as usize, SUPERBLOCK_SECTOR, &mut bytes);
    let facts = DeviceGeometry { sectors: u64::MAX, logical_block_sectors: 1 };
    match RawSuperblock::from_bytes(&bytes).and_then(|raw| raw.check(facts)) {
        Ok(Superblock::Backing(superblock)) => superblock,
        other => unreachable!("no backing superblock: {other:?}"),
    }
}

/// Opens the set and its volume. Sequential streams are cached like anything else, and the device
/// is never congested: those rules have tests of their own.
pub async fn open(env: Env, mut options: Options) -> Result<(CacheSet, VolumeId), Error> {
    options.volume.sequential_cutoff = 0;
    options.congested_read_threshold = Duration::ZERO;
    options.congested_write_threshold = Duration::ZERO;
    open_as_told(env, options).await
}

/// Opens the set and its volume with exactly these options.
pub async fn open_as_told(env: Env, options: Options) -> Result<(CacheSet, VolumeId), Error> {
    let set = CacheSet::open(env, CACHE, Box::new(NoNote), options).await?;
    let volume = set.add_backing(BACKING, None).await?;
    Ok((set, volume))
}

/// Runs `work` for 0, 1, .. `count` with `depth` of them in flight, and waits for the last.
pub async fn in_flight<F>(env: &Env, count: u64, depth: u64, work: impl Fn(u64) -> F + 'static)
where
    F: Future<Output = ()> + 'static,
{
    let (next, running, work) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(depth)), Rc::new(work));
    let ended = Rc::new(bcached_env::sync::Notify::new());
    for _ in 0..depth {
        let (next, running) = (Rc::clone(&next), Rc::clone(&running));
        let (work, ended) = (Rc::clone(&work), Rc::clone(&ended));
        env.spawn(async move {
            loop {
                let number = next.get();
                if number >= count {
                    break;
                }
                next.set(number + 1);
                work(number).await;
            }
            running.set(running.get() - 1);
            ended.notify_all();
        });
    }
    while running.get() > 0 {
        ended.wait().await;
    }
}

/// Issues a request that must succeed.
pub async fn ask(set: &CacheSet, volume: VolumeId, request: Request) -> Reply {
    let reply = set.serve(volume, request).await;
    assert_eq!(reply.result, Ok(()));
    reply
}

/// Runs `script` in a process of its own until it completes, which it must.
pub fn run<T: 'static, F: Future<Output = T> + 'static>(rig: &mut Rig, script: impl FnOnce(Env) -> F) -> T {
    let mut executor = rig.executor();
    let env = executor.env();
    let result = executor.block_on(script(env)).expect("somebody waits for ever");
    rig.world.borrow().assert_short();
    result
}

/// A write of `sectors` sectors of `byte`.
pub fn write(sector: u64, sectors: usize, byte: u8) -> Request {
    Request::Write { sector, payload: Buffer::copied_from(&vec![byte; sectors * 512]).freeze(), fua: false }
}

/// Reads `sectors` sectors; returns the first byte of each.
pub async fn bytes(set: &CacheSet, volume: VolumeId, sector: u64, sectors: usize) -> Vec<u8> {
    let reply = ask(set, volume, Request::Read { sector, buffer: Buffer::zeroed(sectors * 512) }).await;
    let buffer = reply.buffer.expect("a read gives its memory back");
    buffer.as_slice().chunks_exact(512).map(|sector| sector[0]).collect()
}
