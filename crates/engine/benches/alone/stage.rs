//! A newly formatted set on devices in memory, with one volume and its clients.

use super::devices::{BLOCK_BYTES, DATA, InlineDriver, OpCounts, World};
use bcached_engine::{
    CacheSet, ClientId, Options, Reply, Request, Requester, Status, Submission, VolumeId, VolumeOptions,
};
use bcached_env::rng::Rng;
use bcached_env::sync::Notify;
use bcached_env::{Buffer, DiskId, Env, Executor, Payload, RunOrder};
use bcached_format::superblock::SUPERBLOCK_SECTOR;
use bcached_format::{
    BackingFormat, BackingSuperblock, CacheFormat, CacheMode, CacheSuperblock, ReplacementPolicy, Uuid,
};
use bcached_uring::note::{MappedNote, NOTE_BYTES, NoteIdentity};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

const CACHE: DiskId = DiskId(0);
const BACKING: DiskId = DiskId(1);
/// The usual bucket size, in sectors.
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

/// What clients do with each block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Read,
    Write,
}

/// Clients of the volume. Each requests the next block as soon as its previous request is answered.
/// Each has its own buffer, which it reuses for every request.
struct Clients {
    env: Env,
    set: CacheSet,
    volume: VolumeId,
    kind: Kind,
    blocks: Vec<u32>,
    next: Cell<usize>,
    running: Cell<usize>,
    ended: Notify,
    payload: Payload,
}

impl Stage {
    /// Creates and opens a set with a cache and a backing device of these sizes, with the volume in
    /// write-back mode. As in the library with which it is compared, sequential access is cached as
    /// well, and nothing is written back.
    pub fn new(world: &Rc<RefCell<World>>, cache_bytes: u64, backing_bytes: u64) -> Self {
        let set_uuid = Uuid([1; 16]);
        let cache = CacheSuperblock::format(CacheFormat {
            uuid: Uuid([2; 16]),
            set_uuid,
            device_sectors: cache_bytes / 512,
            block_sectors: BLOCK_SECTORS,
            bucket_sectors: BUCKET_SECTORS,
            discard: false,
            replacement: ReplacementPolicy::Lru,
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
        let mut executor = Executor::new(driver, RunOrder::Fifo, 1);
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

    /// Requests all `blocks` of the volume with `depth` requests in flight, and waits for the last.
    pub fn run(&mut self, kind: Kind, blocks: Vec<u32>, depth: usize) {
        let clients = Rc::new(Clients {
            env: self.executor.env(),
            set: self.set.clone(),
            volume: self.volume,
            kind,
            blocks,
            next: Cell::new(0),
            running: Cell::new(depth),
            ended: Notify::new(),
            payload: block().freeze(),
        });
        let ran = self.executor.block_on(async move {
            for number in 0..depth {
                Rc::clone(&clients).go_on(number, block());
            }
            while clients.running.get() > 0 {
                clients.ended.wait().await;
            }
        });
        ran.expect("somebody waits for ever");
    }

    /// Returns the current status of the set.
    pub fn status(&self) -> Status {
        self.set.status()
    }

    /// Returns what the devices have been asked for so far.
    pub fn asked(&self) -> OpCounts {
        self.world.borrow().asked()
    }
}

impl Clients {
    /// Sends the next request of client `number`.
    fn go_on(self: Rc<Self>, number: usize, buffer: Buffer) {
        let Some(block) = self.blocks.get(self.next.get()) else {
            self.running.set(self.running.get() - 1);
            return self.ended.notify_all();
        };
        self.next.set(self.next.get() + 1);
        let sector = u64::from(*block) * u64::from(BLOCK_SECTORS);
        let request = match self.kind {
            Kind::Read => Request::Read { sector, buffer },
            Kind::Write => Request::Write { sector, payload: self.payload.clone(), fua: false },
        };
        let requester: Rc<dyn Requester> = Rc::<Self>::clone(&self);
        match self.set.ask(ClientId::default(), self.volume, request, &requester, number) {
            Submission::InFlight => {}
            Submission::Refused(reply) => self.answered(number, reply),
            Submission::NeedsTask(rest) => {
                let (set, env) = (self.set.clone(), self.env.clone());
                env.spawn(async move { self.answered(number, set.serve_rest(rest).await) });
            }
        }
    }
}

impl Requester for Clients {
    fn answered(self: Rc<Self>, number: usize, reply: Reply) {
        assert!(reply.result.is_ok(), "{:?}", reply.result);
        self.go_on(number, reply.buffer.unwrap_or_default());
    }
}

fn block() -> Buffer {
    let mut buffer = Buffer::zeroed(BLOCK_BYTES);
    buffer.as_mut_slice()[..DATA.len()].copy_from_slice(&DATA);
    buffer
}

/// Returns all block numbers of a device of `bytes` bytes, in random order.
pub fn shuffled(bytes: u64, rng: &mut Rng) -> Vec<u32> {
    let mut blocks: Vec<u32> = (0..u32::try_from(bytes / BLOCK_BYTES as u64).expect("few")).collect();
    for last in (1..blocks.len()).rev() {
        let pick = usize::try_from(rng.below(last as u64 + 1)).expect("an index");
        blocks.swap(last, pick);
    }
    blocks
}
