//! A set newly made on devices in memory, its volume, and clients.

use super::devices::{Asked, BLOCK_BYTES, DATA, InlineDriver, World};
use bcached_engine::{CacheSet, Options, Request, Status, VolumeId, VolumeOptions};
use bcached_env::rng::Rng;
use bcached_env::sync::Notify;
use bcached_env::{Buffer, DiskId, Executor, Order, Payload};
use bcached_format::superblock::SUPERBLOCK_SECTOR;
use bcached_format::{
    BackingFormat, BackingSuperblock, CacheFormat, CacheMode, CacheSuperblock, Replacement, Uuid,
};
use bcached_uring::note::{MappedNote, NOTE_BYTES, NoteIdentity};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

const CACHE: DiskId = DiskId(0);
const BACKING: DiskId = DiskId(1);
/// The usual bucket, in sectors.
const BUCKET_SECTORS: u16 = 1024;
const BLOCK_SECTORS: u16 = 8;

/// A running set.
pub struct Stage {
    world: Rc<RefCell<World>>,
    executor: Executor,
    set: CacheSet,
    volume: VolumeId,
    _place: tempfile::TempDir,
}

/// What clients do with a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Read,
    Write,
}

/// Requests, one after the other, and who takes the next.
struct Work {
    kind: Kind,
    blocks: Vec<u32>,
    next: Cell<usize>,
    running: Cell<usize>,
    ended: Notify,
}

impl Stage {
    /// A set on a cache of so many bytes, with a volume on a backing device of so many, in mode writeback. As the library beside which it
    /// is measured: streams are cached like anything else, and nothing is written back.
    pub fn new(world: &Rc<RefCell<World>>, cache_bytes: u64, backing_bytes: u64) -> Self {
        let set_uuid = Uuid([1; 16]);
        let cache = CacheSuperblock::format(CacheFormat {
            uuid: Uuid([2; 16]),
            set_uuid,
            device_sectors: cache_bytes / 512,
            block_sectors: BLOCK_SECTORS,
            bucket_sectors: BUCKET_SECTORS,
            discard: false,
            replacement: Replacement::Lru,
        });
        let backing = BackingSuperblock::format(BackingFormat {
            uuid: Uuid([3; 16]),
            set_uuid,
            block_sectors: BLOCK_SECTORS,
            bucket_sectors: BUCKET_SECTORS,
            data_offset: None,
            cache_mode: CacheMode::Writeback,
            device_sectors: backing_bytes / 512,
        });
        for (disk, bytes) in [
            (CACHE, cache.expect("sizes that can be run").seal()),
            (BACKING, backing.expect("sizes that can be run").seal()),
        ] {
            world.borrow_mut().place(disk, SUPERBLOCK_SECTOR, &bytes[..]);
        }
        let place = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a folder");
        let identity = NoteIdentity { boot: [4; 16], set: set_uuid.0 };
        let note = MappedNote::open(&place.path().join("note"), &identity, NOTE_BYTES).expect("a note");
        let driver = Box::new(InlineDriver(Rc::clone(world)));
        let mut executor = Executor::new(driver, Order::Fifo, 1);
        let volume =
            VolumeOptions { sequential_cutoff: 0, writeback_running: false, ..VolumeOptions::default() };
        let options = Options { volume, ..Options::default() };
        let env = executor.env();
        let opened = executor.block_on(async move {
            let set = CacheSet::open(env, CACHE, Box::new(note), options).await.expect("it opens");
            let volume = set.add_backing(BACKING, None).await.expect("it is attached");
            (set, volume)
        });
        let (set, volume) = opened.expect("somebody waits for ever");
        Self { world: Rc::clone(world), executor, set, volume, _place: place }
    }

    /// Asks for all `blocks` of the volume, with `depth` requests in flight, and waits for the last.
    pub fn run(&mut self, kind: Kind, blocks: Vec<u32>, depth: usize) {
        let (next, running, ended) = (Cell::new(0), Cell::new(depth), Notify::new());
        let work = Rc::new(Work { kind, blocks, next, running, ended });
        let (set, volume, env) = (self.set.clone(), self.volume, self.executor.env());
        let ran = self.executor.block_on(async move {
            for _ in 0..depth {
                env.spawn(client(set.clone(), volume, Rc::clone(&work)));
            }
            while work.running.get() > 0 {
                work.ended.wait().await;
            }
        });
        ran.expect("somebody waits for ever");
    }

    /// As of now.
    pub fn status(&self) -> Status {
        self.set.status()
    }

    /// What the devices were asked for until now.
    pub fn asked(&self) -> Asked {
        self.world.borrow().asked()
    }
}

/// One of several clients; it has memory of its own, which is used again and again.
async fn client(set: CacheSet, volume: VolumeId, work: Rc<Work>) {
    let mut buffer = block();
    let payload: Payload = block().freeze();
    while let Some(block) = work.blocks.get(work.next.get()) {
        work.next.set(work.next.get() + 1);
        let sector = u64::from(*block) * u64::from(BLOCK_SECTORS);
        match work.kind {
            Kind::Read => {
                let reply = set.serve(volume, Request::Read { sector, buffer }).await;
                assert!(reply.result.is_ok(), "{:?}", reply.result);
                buffer = reply.buffer.expect("a read gives its memory back");
            }
            Kind::Write => {
                let request = Request::Write { sector, payload: payload.clone(), fua: false };
                let reply = set.serve(volume, request).await;
                assert!(reply.result.is_ok(), "{:?}", reply.result);
            }
        }
    }
    work.running.set(work.running.get() - 1);
    work.ended.notify_all();
}

fn block() -> Buffer {
    let mut buffer = Buffer::zeroed(BLOCK_BYTES);
    buffer.as_mut_slice()[..DATA.len()].copy_from_slice(&DATA);
    buffer
}

/// All blocks of a device of so many bytes, without an order.
pub fn shuffled(bytes: u64, rng: &mut Rng) -> Vec<u32> {
    let mut blocks: Vec<u32> = (0..u32::try_from(bytes / BLOCK_BYTES as u64).expect("few")).collect();
    for last in (1..blocks.len()).rev() {
        let pick = usize::try_from(rng.below(last as u64 + 1)).expect("an index");
        blocks.swap(last, pick);
    }
    blocks
}
