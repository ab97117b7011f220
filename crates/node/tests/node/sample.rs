//! A small cache set, keys in it, and the bytes of nodes.

use bcached_format::bset::{self, NodeIdentity};
use bcached_format::{DeviceIndex, Gen, Geometry, Inode, Key, Pointer, Pointers, Position, SetMagic, Uuid};
use bcached_node::{LiveKeys, Node, NodeBuilder, SetWrite, SplitPlan};

/// 1 GiB, buckets of 512 KiB, blocks of a sector: the set of the format document's worked example.
pub const GEOMETRY: Geometry = Geometry {
    block_sectors: 1,
    bucket_sectors: 1024,
    buckets: 2048,
    first_bucket: 1,
    journal_buckets: 16,
    magic: SetMagic::of(Uuid([
        0xca, 0xb8, 0x17, 0x4e, 0x3f, 0xef, 0x40, 0xf7, 0xbf, 0x59, 0x19, 0xa8, 0xf8, 0xac, 0xad, 0xb3,
    ])),
};

pub const SEQ: u64 = 0x9E75_52E3_0D4A_7F1B;

pub fn pointer(sector: u64, generation: u8) -> Pointer {
    Pointer::new(DeviceIndex(0), sector, Gen(generation))
}

pub fn extent(inode: u32, start: u64, end: u64, sector: u64, dirty: bool) -> Key {
    let size = u16::try_from(end - start).expect("short");
    Key { inode: Inode(inode), size, dirty, end, pointers: Pointers::one(pointer(sector, 1)) }
}

/// The key of the node in `bucket`, of `sectors`, whose range ends at `position`.
pub fn own(bucket: u64, sectors: u16, position: Position) -> Key {
    let pointers = Pointers::one(pointer(bucket * GEOMETRY.bucket_sectors, 1));
    Key { inode: position.inode, size: sectors, dirty: false, end: position.offset, pointers }
}

/// The key of a root of `sectors` in bucket 36.
pub fn root(sectors: u16) -> Key {
    own(36, sectors, Position::MAX)
}

/// Gathers all keys of the node for which `is_live` returns true, as for a fresh node.
pub fn live_keys(node: &Node, is_live: &mut dyn FnMut(&Key) -> bool) -> LiveKeys {
    let (mut living, mut after) = (LiveKeys::default(), Some(Position::ZERO));
    while let Some(from) = after {
        after = node.gather(from, 3, &mut living, is_live);
    }
    assert_eq!(living, living.keys().iter().copied().collect(), "words are counted right");
    living
}

/// The keys of each node to which `living` is distributed.
pub fn deal(living: &LiveKeys, blocks: u32, geometry: &Geometry) -> Vec<Vec<Key>> {
    match living.divide(blocks, geometry) {
        SplitPlan::One => vec![living.keys().to_vec()],
        SplitPlan::Two { left, left_words } => {
            let (left, right) = living.keys().split_at(left);
            assert_eq!(left.iter().map(Key::words).sum::<usize>(), left_words, "words are counted right");
            vec![left.to_vec(), right.to_vec()]
        }
    }
}

/// Allocates memory for a set.
pub fn zeroed(bytes: usize) -> Vec<u8> {
    vec![0; bytes]
}

/// Builds a node with these keys; returns it with its first set.
pub fn build(own: Key, seq: u64, keys: &[Key]) -> (Node, SetWrite<Vec<u8>>) {
    let mut node = NodeBuilder::new(own, 0, seq, &GEOMETRY, keys.iter().map(Key::words).sum(), zeroed);
    keys.chunks(7).for_each(|keys| node.push(keys));
    node.seal()
}

pub fn place(own: &Key) -> NodeIdentity {
    NodeIdentity { magic: GEOMETRY.magic, node: own.pointers.as_slice()[0] }
}

/// The contents of a node's bucket: junk at first, then sets.
pub struct Image {
    pub bytes: Vec<u8>,
    end_block: usize,
}

impl Image {
    pub fn new(own: &Key) -> Self {
        let length = usize::from(own.size) * 512;
        Self { bytes: (0..251_u8).rev().cycle().take(length).collect(), end_block: 0 }
    }

    /// The bytes of a node with these sets, sealed without any check of their keys.
    pub fn of_sets(own: &Key, sets: &[Vec<Key>]) -> Self {
        let mut image = Self::new(own);
        for keys in sets {
            let block = image.end_block;
            image.put(block, &bset::seal(place(own), SEQ, keys));
        }
        image
    }

    /// Writes the pending keys of `node`.
    pub fn write(&mut self, node: &mut Node) {
        if let Some(set) = node.seal_pending(zeroed) {
            self.append(&set);
        }
    }

    pub fn append(&mut self, set: &SetWrite<Vec<u8>>) {
        assert!(set.bytes.len().is_multiple_of(GEOMETRY.block_bytes()), "a set is written in whole blocks");
        assert_eq!(set.block as usize, self.end_block, "a set goes behind the one before");
        self.put(self.end_block, &set.bytes);
    }

    fn put(&mut self, block: usize, set: &[u8]) {
        let start = block * GEOMETRY.block_bytes();
        self.bytes[start..start + set.len()].copy_from_slice(set);
        self.end_block = block + set.len().div_ceil(GEOMETRY.block_bytes());
    }
}
