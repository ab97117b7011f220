//! Images built by hand with the format's seal functions: a small set with one leaf, or with a root
//! and two leaves.
//!
//! ```text
//! bucket   0-1 superblock   2-9 journal   20 priorities   30 uuids   40 root   41, 42 leaves
//!          100.. data
//! ```
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails where it cannot go on")]

use bcached_format::checksum::checksum;
use bcached_format::{
    Attachment, BackingFormat, BackingState, BackingSuperblock, BucketPrio, CacheFormat, CacheMode,
    CacheSuperblock, DeviceIndex, Gen, Geometry, Inode, JsetHeader, Key, NodeIdentity, Pointer, Pointers,
    Position, ReplacementPolicy, TableSeal, Uuid, UuidSlot, bset, jset, prio, uuid,
};

pub const BUCKET_SECTORS: u64 = 16;
pub const BUCKETS: u64 = 600;
pub const PRIO_BUCKET: u64 = 20;
pub const UUID_BUCKET: u64 = 30;
pub const ROOT_BUCKET: u64 = 40;
pub const SET_UUID: Uuid = Uuid([2; 16]);
pub const BACKING_UUID: Uuid = Uuid([3; 16]);
pub const DATA_OFFSET: u64 = 16;

/// An entry of the journal.
pub type BuiltEntry = (JsetHeader, Vec<Key>);

/// An image under construction; `finish` writes what is in the fields.
pub struct ImageBuilder {
    pub superblock: CacheSuperblock,
    pub generations: Vec<u8>,
    pub prios: Vec<u16>,
    pub slots: Vec<UuidSlot>,
    pub header: JsetHeader,
    /// Journal buckets: the index of the bucket, and the entries in it.
    pub journal: Vec<(u64, Vec<BuiltEntry>)>,
    pub prio_next: u64,
    bytes: Vec<u8>,
}

pub fn pointer(bucket: u64, within: u64, generation: u8) -> Pointer {
    Pointer::new(DeviceIndex(0), bucket * BUCKET_SECTORS + within, Gen(generation))
}

/// Returns a dirty extent of volume 0 whose data is at the start of a bucket.
pub fn dirty(start: u64, end: u64, bucket: u64) -> Key {
    let size = u16::try_from(end - start).unwrap();
    Key { inode: Inode(0), size, dirty: true, end, pointers: Pointers::one(pointer(bucket, 0, 0)) }
}

pub fn clean(start: u64, end: u64, bucket: u64) -> Key {
    Key { dirty: false, ..dirty(start, end, bucket) }
}

/// Returns a key that names a node of one bucket.
pub fn node_key(bucket: u64, position: Position) -> Key {
    Key {
        inode: position.inode,
        size: u16::try_from(BUCKET_SECTORS).unwrap(),
        dirty: false,
        end: position.offset,
        pointers: Pointers::one(pointer(bucket, 0, 0)),
    }
}

impl ImageBuilder {
    /// Creates a set with one backing device in slot 0, a flash-only volume of 4096 sectors in slot
    /// 1, and no content.
    pub fn new() -> Self {
        let mut superblock = CacheSuperblock::format(CacheFormat {
            uuid: Uuid([1; 16]),
            set_uuid: SET_UUID,
            device_sectors: BUCKETS * BUCKET_SECTORS,
            block_sectors: 1,
            bucket_sectors: u16::try_from(BUCKET_SECTORS).unwrap(),
            discard: false,
            replacement: ReplacementPolicy::Lru,
        })
        .unwrap();
        superblock.set_journal_buckets(8);
        superblock.set_synchronous(true);
        superblock.advance();
        let mut flash = UuidSlot { uuid: Uuid([4; 16]), sectors: 4096, ..UuidSlot::FREE };
        flash.set_flash_only(true);
        let header = JsetHeader {
            seq: 10,
            last_seq: 10,
            uuids: node_key(UUID_BUCKET, Position::ZERO),
            root: node_key(ROOT_BUCKET, Position::MAX),
            root_level: 0,
            prio_bucket: PRIO_BUCKET,
            marks_reserve: false,
            table: None,
        };
        Self {
            superblock,
            generations: vec![0; usize::try_from(BUCKETS).unwrap()],
            prios: vec![1; usize::try_from(BUCKETS).unwrap()],
            slots: vec![UuidSlot { uuid: BACKING_UUID, ..UuidSlot::FREE }, flash],
            header,
            journal: vec![(1, vec![(header, Vec::new())])],
            prio_next: 0,
            bytes: vec![0; usize::try_from(BUCKETS * BUCKET_SECTORS * 512).unwrap()],
        }
    }

    /// Creates a set whose root is one leaf with these sets.
    pub fn with_leaf(sets: &[&[Key]]) -> Self {
        let mut image = Self::new();
        image.node(ROOT_BUCKET, sets);
        image
    }

    /// Creates a tree of two levels, with leaves in buckets 41 (up to 0:1000) and 42.
    pub fn with_tree(left: &[&[Key]], right: &[&[Key]]) -> Self {
        let mut image = Self::new();
        let children = [node_key(41, Position::new(Inode(0), 1000)), node_key(42, Position::MAX)];
        image.node(ROOT_BUCKET, &[&children]);
        image.node(41, left);
        image.node(42, right);
        image.set_level(1);
        image
    }

    pub fn set_level(&mut self, level: u16) {
        self.header.root_level = level;
        for (header, _) in self.journal.iter_mut().flat_map(|(_, entries)| entries) {
            header.root_level = level;
        }
    }

    pub fn geometry(&self) -> Geometry {
        Geometry::of(&self.superblock)
    }

    /// Returns journal entries `seqs` with the current header, in the bucket with this index.
    pub fn entries(&self, index: u64, seqs: &[(u64, u64, &[Key])]) -> (u64, Vec<BuiltEntry>) {
        let entry = |(seq, last_seq, keys): &(u64, u64, &[Key])| {
            (JsetHeader { seq: *seq, last_seq: *last_seq, ..self.header }, keys.to_vec())
        };
        (index, seqs.iter().map(entry).collect())
    }

    pub fn place(&self, bucket: u64) -> NodeIdentity {
        NodeIdentity { magic: self.geometry().magic, node: pointer(bucket, 0, 0) }
    }

    /// Writes a node of these sets, each in blocks of its own.
    pub fn node(&mut self, bucket: u64, sets: &[&[Key]]) {
        let mut block = 0;
        for keys in sets {
            let sealed = bset::seal(self.place(bucket), 0x1234_5678 + bucket, keys);
            self.put(bucket * BUCKET_SECTORS + block, &sealed);
            block += sealed.len().div_ceil(512) as u64;
        }
    }

    pub fn put(&mut self, sector: u64, bytes: &[u8]) {
        let start = usize::try_from(sector * 512).unwrap();
        self.bytes[start..start + bytes.len()].copy_from_slice(bytes);
    }

    /// Seals the uuid table in its current state, as bcached does, and records the seal in the
    /// journal's entries.
    pub fn seal_table(&mut self) {
        let edition = 77;
        for (number, slot) in (0..).zip(&mut self.slots) {
            slot.seal(SET_UUID, Inode(number), edition);
        }
        let mut table = vec![0; self.geometry().meta_bytes()];
        for (slot, place) in self.slots.iter().zip(table.chunks_exact_mut(128)) {
            place.copy_from_slice(&slot.to_bytes());
        }
        let seal = TableSeal { sum: checksum(&table), edition };
        for (header, _) in self.journal.iter_mut().flat_map(|(_, entries)| entries) {
            header.table = Some(seal);
        }
    }

    /// Returns the image's bytes.
    pub fn finish(mut self) -> Vec<u8> {
        let geometry = self.geometry();
        let seal = self.superblock.seal();
        self.put(8, &seal[..]);
        let mut meta = vec![0; geometry.meta_bytes()];
        let stored = self.prios.iter().zip(&self.generations);
        let entry =
            |(prio, generation): (&u16, &u8)| BucketPrio { prio: *prio, generation: Gen(*generation) };
        let entries: Vec<BucketPrio> = stored.map(entry).collect();
        prio::seal(&mut meta, geometry.magic, 5, self.prio_next, entries.into_iter());
        self.put(PRIO_BUCKET * BUCKET_SECTORS, &meta);
        for (index, slot) in self.slots.clone().iter().enumerate() {
            let at = usize::try_from(UUID_BUCKET * BUCKET_SECTORS * 512).unwrap() + index * uuid::SLOT_BYTES;
            self.bytes[at..at + uuid::SLOT_BYTES].copy_from_slice(&slot.to_bytes());
        }
        for (index, entries) in self.journal.clone() {
            let mut sector = geometry.sector_of(geometry.journal_bucket(index));
            for (header, keys) in entries {
                let sealed = jset::seal(geometry.magic, &header, &keys);
                self.put(sector, &sealed);
                sector += sealed.len().div_ceil(512) as u64;
            }
        }
        self.bytes
    }
}

/// Creates a backing device of 2 MiB for slot 0 of [`ImageBuilder`], with all data bytes set to
/// `fill`.
pub fn backing(state: BackingState, fill: u8) -> Vec<u8> {
    backing_of(state, fill, None)
}

/// Creates the same device, with the attachment that bcached recorded on it.
pub fn backing_of(state: BackingState, fill: u8, attachment: Option<Attachment>) -> Vec<u8> {
    let sectors = 4096;
    let mut superblock = BackingSuperblock::format(BackingFormat {
        uuid: BACKING_UUID,
        set_uuid: SET_UUID,
        block_sectors: 1,
        bucket_sectors: 1024,
        data_offset: None,
        cache_mode: CacheMode::Writeback,
        device_sectors: sectors,
    })
    .unwrap();
    superblock.set_state(state);
    superblock.set_attachment(attachment);
    let mut bytes = vec![fill; usize::try_from(sectors * 512).unwrap()];
    bytes[4096..8192].copy_from_slice(&superblock.seal()[..]);
    bytes
}
