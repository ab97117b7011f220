//! A stopped set whose devices can be forged, as in an image made by hand.

use crate::memory::World;
use crate::rig::{Rig, Sizes, ask, open};
use bcached_engine::{CacheSet, Error, Options, Request, VolumeOptions};
use bcached_env::{Buffer, DiskId, Note};
use bcached_format::jset::{Jset, JsetHeader, seal};
use bcached_format::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};
use bcached_format::{
    DeviceGeometry, DeviceIndex, Gen, Geometry, Inode, Key, Pointer, Pointers, RawSuperblock, Superblock,
    Uuid, UuidSlot, uuid,
};
use std::time::Duration;

/// Sizes of the set.
const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: 8192 };
/// Size of the cache device in sectors.
pub const CACHE_SECTORS: u64 = SIZES.buckets * SIZES.bucket as u64;

const FLASH_UUID: Uuid = Uuid([9; 16]);

/// First sector of the data on the backing device, and so in the key space.
pub const DATA_OFFSET: u64 = 16;

pub fn options() -> Options {
    Options {
        leaf_delay: Duration::from_millis(1),
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

/// A stopped set, and what an entry behind its newest one must contain.
pub struct StoppedSet {
    pub rig: Rig,
    pub geometry: Geometry,
    pub header: JsetHeader,
    /// Sector at which the next entry goes.
    pub end: u64,
    /// Key of the first bucket of data, as it is in the tree.
    pub data: Key,
}

/// Runs a set that stores dirty data from the volume's start on, and stops it.
pub fn stopped() -> StoppedSet {
    let mut rig = Rig::new(SIZES, 5);
    let mut executor = rig.executor();
    let env = executor.env();
    let done = executor.block_on(async move {
        let (set, volume) = open(env, options()).await.expect("a sound set");
        let payload = Buffer::copied_from(&[0x77; 2 * 128 * 512]).freeze();
        ask(&set, volume, Request::Write { sector: 0, payload, fua: true }).await;
        assert_eq!(set.status().dirty_sectors, 256);
        set.stop().await.expect("it stops");
    });
    done.expect("somebody waits for ever");
    let geometry = geometry(&rig.world.borrow());
    let (header, end) = newest_entry(&rig.world.borrow(), &geometry);
    let full = usize::from(SIZES.bucket) * 512;
    let first = geometry.first_bucket + geometry.journal_buckets;
    let bucket = (first..SIZES.buckets).find(|bucket| {
        let mut bytes = vec![0; full];
        rig.world.borrow().look(0, bucket * u64::from(SIZES.bucket), &mut bytes);
        bytes.iter().all(|byte| *byte == 0x77)
    });
    let bucket = bucket.expect("the data fills a bucket");
    let data = key(0, bucket * 128, 128, DATA_OFFSET);
    StoppedSet { rig, geometry, header, end, data }
}

/// The geometry of the set on the cache device.
pub fn geometry(world: &World) -> Geometry {
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    world.look(0, SUPERBLOCK_SECTOR, &mut bytes);
    let facts = DeviceGeometry { sectors: u64::MAX, logical_block_sectors: 1 };
    let Ok(Superblock::Cache(superblock)) =
        RawSuperblock::from_bytes(&bytes).and_then(|raw| raw.check(facts))
    else {
        unreachable!("the set wrote its superblock")
    };
    Geometry::of(&superblock)
}

/// Returns the newest entry's header, and the sector at which it ends.
pub fn newest_entry(world: &World, geometry: &Geometry) -> (JsetHeader, u64) {
    let mut found: Option<(JsetHeader, u64)> = None;
    for index in 0..geometry.journal_buckets {
        let start = geometry.sector_of(geometry.journal_bucket(index));
        let mut bytes = vec![0; usize::try_from(geometry.bucket_sectors).expect("small") * 512];
        world.look(0, start, &mut bytes);
        let mut at = 0;
        while let Ok(entry) = Jset::parse(&bytes[at..], geometry.magic) {
            at += geometry.whole_blocks(entry.byte_len());
            if found.is_none_or(|(newest, _)| newest.seq < entry.header.seq) {
                found = Some((entry.header, start + at as u64 / 512));
            }
        }
    }
    found.expect("a set that was started has a journal")
}

/// A dirty key of inode 0 and generation 0, `size` sectors from `start`.
pub fn key(device: u8, sector: u64, size: u16, start: u64) -> Key {
    let pointers = Pointers::one(Pointer::new(DeviceIndex(device), sector, Gen(0)));
    Key { inode: Inode(0), size, dirty: true, end: start + u64::from(size), pointers }
}

/// Rewrites the newest entry as the kernel writes it, without a statement about the UUID table.
/// Returns its header, and the sector behind it.
pub fn as_a_kernel_writes_it(world: &mut World, geometry: &Geometry) -> (JsetHeader, u64) {
    let (header, end) = newest_entry(world, geometry);
    let header = JsetHeader { table: None, ..header };
    let mut bytes = seal(geometry.magic, &header, &[]);
    bytes.resize(geometry.whole_blocks(bytes.len()), 0);
    world.place(0, end - bytes.len() as u64 / 512, &bytes);
    (header, end)
}

impl StoppedSet {
    /// Makes the newest entry one as the kernel writes it.
    pub fn as_a_kernel_leaves_it(&mut self) {
        (self.header, self.end) = as_a_kernel_writes_it(&mut self.rig.world.borrow_mut(), &self.geometry);
    }

    /// Adds a flash-only volume of `sectors` sectors to the UUID table, as the kernel does.
    pub fn add_flash_only(&mut self, sectors: u64) {
        self.as_a_kernel_leaves_it();
        let mut slot = UuidSlot { uuid: FLASH_UUID, sectors, ..UuidSlot::FREE };
        slot.set_flash_only(true);
        let mut bytes = vec![0; 512];
        let slot = slot.to_bytes();
        bytes[..slot.len()].copy_from_slice(&slot);
        // The first sector of the table has four slots; this one is the fifth.
        let sector = self.header.uuids.pointers.as_slice()[0].sector() + 1;
        self.rig.world.borrow_mut().place(0, sector, &bytes);
    }

    /// Gives the flash-only volume of [`StoppedSet::add_flash_only`] this size, wherever the table
    /// has been written since.
    pub fn resize_flash_only(&mut self, sectors: u64) {
        self.as_a_kernel_leaves_it();
        for (at, bytes) in (0..).zip(self.device().chunks(512)) {
            let slots: Vec<UuidSlot> = uuid::parse(bytes).expect("whole slots").collect();
            if slots.first().is_some_and(|slot| slot.uuid == FLASH_UUID) {
                let resized = UuidSlot { sectors, ..slots[0] }.to_bytes();
                let bytes = [&resized[..], &bytes[resized.len()..]].concat();
                self.rig.world.borrow_mut().place(0, at, &bytes);
            }
        }
    }

    /// Appends an entry with these keys, which is all that the journal needs.
    pub fn append(&mut self, keys: &[Key]) {
        let seq = self.header.seq + 1;
        let header = JsetHeader { seq, last_seq: seq, ..self.header };
        let mut bytes = seal(self.geometry.magic, &header, keys);
        bytes.resize(self.geometry.whole_blocks(bytes.len()), 0);
        assert!(self.end % 128 + bytes.len() as u64 / 512 <= 128, "the entry fits in its bucket");
        self.rig.world.borrow_mut().place(0, self.end, &bytes);
    }

    /// Makes the next entry begin another bucket of the journal, where its number need not follow
    /// any other.
    pub fn begin_bucket(&mut self) {
        let index = (self.end - 1) / self.geometry.bucket_sectors - self.geometry.first_bucket;
        let next = (index + 1) % self.geometry.journal_buckets;
        self.end = self.geometry.sector_of(self.geometry.journal_bucket(next));
    }

    fn device(&self) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(CACHE_SECTORS).expect("small") * 512];
        self.rig.world.borrow().look(0, 0, &mut bytes);
        bytes
    }

    /// Opens and stops the set; returns the number of dirty sectors.
    pub fn reopened(&mut self, note: Box<dyn Note>) -> Result<u64, Error> {
        let mut executor = self.rig.executor();
        let env = executor.env();
        let opened = executor.block_on(async move {
            let set = CacheSet::open(env, DiskId(0), note, options()).await?;
            let dirty = set.status().dirty_sectors;
            set.stop().await?;
            Ok(dirty)
        });
        opened.expect("somebody waits for ever")
    }

    /// Opens the set, which must be refused and left unchanged.
    pub fn refused(&mut self, note: Box<dyn Note>) -> Error {
        let before = self.device();
        let error = self.reopened(note).expect_err("taken");
        assert!(before == self.device(), "refused ({error}), but written to");
        error
    }
}
