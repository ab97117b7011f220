//! The bodies of the fuzz targets.
//!
//! A fuzzer does not guess checksums. So the first byte of an input says how the rest is parsed: if
//! it is odd, checksum and magic are corrected first; if it is even, the bytes are parsed
//! unchanged. Whatever a parser accepts is sealed again, and must parse to the same content.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a target fails where it cannot go on")]

use crate::common;
use bcached_check::{Options, ReadAt, check, dump};
use bcached_format::checksum::{checksum, checksum_seeded};
use bcached_format::key_check::{check_child_key, check_child_order, check_leaf_key, check_leaf_order};
use bcached_format::{
    BackingState, DeviceGeometry, Geometry, Inode, Jset, Key, KeyList, NodeIdentity, NodeLog, Pointer,
    PrioSet, RawSuperblock, SetMagic, Superblock, Uuid, bset, jset as jset_format, prio as prio_format,
    uuid as uuid_format,
};
use std::cell::RefCell;

const MAGIC: SetMagic = SetMagic::of(Uuid([7; 16]));
const BLOCK_BYTES: usize = 512;
const BUCKET_BYTES: usize = common::BUCKET_SECTORS as usize * 512;

/// Returns the fuzzed bytes, corrected by `mend` if the first byte says so.
fn input(data: &[u8], mend: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let Some((mode, rest)) = data.split_first() else { return Vec::new() };
    let mut bytes = rest.to_vec();
    if mode % 2 == 1 {
        mend(&mut bytes);
    }
    bytes
}

/// Writes the checksum of bytes 8 to `end` to the first 8 bytes. Does nothing if there are fewer
/// bytes.
fn mend_sum(bytes: &mut [u8], end: usize, sum: impl Fn(&[u8]) -> u64) {
    if let Some(summed) = bytes.get(8..end) {
        let sum = sum(summed);
        bytes[..8].copy_from_slice(&sum.to_le_bytes());
    }
}

fn set_magic(bytes: &mut [u8], magic: u64) {
    if let Some(field) = bytes.get_mut(8..16) {
        field.copy_from_slice(&magic.to_le_bytes());
    }
}

fn words_at(bytes: &[u8], at: usize) -> usize {
    bytes.get(at..at + 4).map_or(0, |field| u32::from_le_bytes(field.try_into().unwrap()) as usize)
}

fn walk_keys(keys: &KeyList<'_>) {
    let geometry = Geometry {
        block_sectors: 1,
        bucket_sectors: 16,
        buckets: 1000,
        first_bucket: 2,
        journal_buckets: 8,
        magic: MAGIC,
    };
    for key in keys {
        let leaf = check_leaf_key(&geometry, &key);
        if leaf.is_ok() && key.size > 1 {
            let middle = key.start() + key.sectors() / 2;
            let (front, back) = (key.cut(0, middle).unwrap(), key.cut(middle, u64::MAX).unwrap());
            assert_eq!(front.sectors() + back.sectors(), key.sectors());
        }
        let _ = check_child_key(&geometry, &key);
    }
    let _ = (check_leaf_order(keys.iter()), check_child_order(keys.iter()));
}

pub fn superblock(data: &[u8]) {
    let bytes = input(data, |bytes| {
        let count = bytes.get(206..208).map_or(0, |field| u16::from_le_bytes(field.try_into().unwrap()));
        mend_sum(bytes, 208 + 8 * usize::from(count), checksum);
    });
    let facts = DeviceGeometry { sectors: 1 << 24, logical_block_sectors: 1 };
    let Ok(raw) = RawSuperblock::from_bytes(&bytes) else { return };
    match raw.check(facts) {
        Ok(Superblock::Cache(mut superblock)) => {
            assert_eq!(superblock.seal()[..], bytes[..4096]);
            let geometry = Geometry::of(&superblock);
            assert!(geometry.node_sectors() > 0 && geometry.uuid_slots() > 0 && geometry.prio_sets() > 0);
            superblock.advance();
            let again = RawSuperblock::from_bytes(&superblock.seal()[..]).unwrap().check(facts);
            assert!(again.is_ok());
        }
        Ok(Superblock::Backing(mut superblock)) => {
            assert_eq!(superblock.seal()[..], bytes[..4096]);
            superblock.set_state(BackingState::Dirty);
            assert_eq!(superblock.state(), BackingState::Dirty);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

pub fn node(data: &[u8]) {
    let place = NodeIdentity { magic: MAGIC, node: Pointer::from_word(0x90_0001) };
    let bytes = input(data, |bytes| {
        let mut at = 0;
        while at + bset::BSET_HEADER_BYTES <= bytes.len() {
            let end = bset::BSET_HEADER_BYTES + 8 * words_at(bytes, at + 28);
            set_magic(&mut bytes[at..], MAGIC.bset());
            mend_sum(&mut bytes[at..], end, |summed| checksum_seeded(place.node.word(), summed));
            at = end.div_ceil(BLOCK_BYTES).saturating_mul(BLOCK_BYTES).saturating_add(at);
        }
    });
    match NodeLog::parse(&bytes, BLOCK_BYTES, place) {
        Ok(log) => {
            assert!(log.end_block as usize * BLOCK_BYTES <= bytes.len());
            for set in &log.sets {
                walk_keys(&set.bset.keys);
                let keys: Vec<Key> = set.bset.keys.iter().collect();
                let sealed = bset::seal(place, set.bset.seq, &keys);
                let again = bcached_format::Bset::parse(&sealed, place).unwrap();
                assert!(again.keys.iter().eq(keys));
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

pub fn jset(data: &[u8]) {
    let bytes = input(data, |bytes| {
        set_magic(bytes, MAGIC.jset());
        let end = jset_format::byte_len_of(words_at(bytes, 28));
        mend_sum(bytes, end, checksum);
    });
    match Jset::parse(&bytes, MAGIC) {
        Ok(entry) => {
            walk_keys(&entry.keys);
            let keys: Vec<Key> = entry.keys.iter().collect();
            let sealed = jset_format::seal(MAGIC, &entry.header, &keys);
            let again = Jset::parse(&sealed, MAGIC).unwrap();
            assert_eq!(again.header, entry.header);
            assert!(again.keys.iter().eq(keys));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

pub fn prio(data: &[u8]) {
    let bytes = input(data, |bytes| {
        set_magic(bytes, MAGIC.prio());
        let end = bytes.len();
        mend_sum(bytes, end, checksum);
    });
    if let Ok(set) = PrioSet::parse(&bytes, MAGIC) {
        let mut sealed = vec![0; bytes.len()];
        prio_format::seal(&mut sealed, MAGIC, set.seq, set.next_bucket, set.entries());
        let again = PrioSet::parse(&sealed, MAGIC).unwrap();
        assert!(again.entries().eq(set.entries()));
    }
}

pub fn uuid(data: &[u8]) {
    if let Ok(slots) = uuid_format::parse(data) {
        let sealed: Vec<u8> =
            slots.inspect(|slot| drop(slot.label.to_string())).flat_map(|slot| slot.to_bytes()).collect();
        assert_eq!(sealed, data);
    }
    if let Ok(slots) = uuid_format::parse_old(data) {
        assert_eq!(slots.count(), data.len() / uuid_format::SLOT_BYTES_OLD);
    }
}

/// Returns a valid image with a tree of two levels, several sets, holes, and keys to replay.
fn base_image() -> Vec<u8> {
    use crate::common::{clean, dirty};
    let mut image = common::ImageBuilder::with_tree(
        &[&[dirty(16, 24, 100), clean(100, 116, 101)], &[Key::hole(Inode(0), 20, 22)]],
        &[&[dirty(2000, 2008, 102)], &[Key { inode: Inode(1), ..dirty(8, 16, 103) }]],
    );
    let old = image.entries(1, &[(9, 9, &[dirty(30, 36, 104)]), (10, 9, &[clean(40, 44, 105)])]);
    image.journal = vec![old, image.entries(2, &[(11, 9, &[])])];
    image.finish()
}

/// The structures of the image: the first sector of each, and the kind of its checksum.
const STRUCTURES: [(u64, Sum); 8] = [
    (8, Sum::Superblock),
    (3 * common::BUCKET_SECTORS, Sum::Journal),
    (3 * common::BUCKET_SECTORS + 1, Sum::Journal),
    (4 * common::BUCKET_SECTORS, Sum::Journal),
    (common::PRIO_BUCKET * common::BUCKET_SECTORS, Sum::Priorities),
    (common::UUID_BUCKET * common::BUCKET_SECTORS, Sum::None),
    (common::ROOT_BUCKET * common::BUCKET_SECTORS, Sum::Node),
    (41 * common::BUCKET_SECTORS, Sum::Node),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sum {
    Superblock,
    Journal,
    Priorities,
    Node,
    None,
}

fn mend_structure(image: &mut [u8], sector: u64, sum: Sum) {
    let start = sector as usize * 512;
    let bytes = &mut image[start..start + BUCKET_BYTES];
    match sum {
        Sum::Superblock => {
            let count = usize::from(u16::from_le_bytes([bytes[206], bytes[207]]));
            mend_sum(&mut bytes[..4096], 208 + 8 * count, checksum);
        }
        Sum::Journal => {
            let end = jset_format::byte_len_of(words_at(bytes, 28));
            mend_sum(bytes, end, checksum);
        }
        Sum::Priorities => mend_sum(bytes, BUCKET_BYTES, checksum),
        Sum::Node => {
            let node = common::pointer(sector / common::BUCKET_SECTORS, 0, 0).word();
            for at in (0..BUCKET_BYTES).step_by(512) {
                let end = bset::BSET_HEADER_BYTES + 8 * words_at(bytes, at + 28);
                mend_sum(&mut bytes[at..], end, |summed| checksum_seeded(node, summed));
            }
        }
        Sum::None => {}
    }
}

/// A valid image, and a copy that is changed and restored for each input. Copying megabytes for
/// each input would take longer than the check.
struct Images {
    base: Vec<u8>,
    changed: Vec<u8>,
    backing: Vec<u8>,
}

thread_local!(static IMAGES: RefCell<Images> = RefCell::new(Images {
    base: base_image(),
    changed: base_image(),
    backing: common::backing(BackingState::Dirty, 9),
}));

/// Changes bytes in the structures of a valid image, then checks, dumps and reads it. Each change
/// takes four bytes of input: structure, offset (two bytes) and value.
pub fn image(data: &[u8]) {
    IMAGES.with_borrow_mut(|Images { base, changed, backing }| {
        let mut touched = Vec::new();
        for change in data.chunks_exact(4).take(64) {
            let (sector, sum) = STRUCTURES[usize::from(change[0] & 7)];
            let offset = usize::from(u16::from_le_bytes([change[1], change[2]])) % BUCKET_BYTES;
            changed[sector as usize * 512 + offset] = change[3];
            // If the three high bits are set, the checksum stays wrong, unless another change
            // corrects it.
            touched.push((sector, if change[0] & 0xE0 == 0xE0 { Sum::None } else { sum }));
        }
        for (sector, sum) in &touched {
            mend_structure(changed, *sector, *sum);
        }
        judge(changed, backing, data.is_empty());
        for (sector, _) in touched {
            let bytes = sector as usize * 512..sector as usize * 512 + BUCKET_BYTES;
            changed[bytes.clone()].copy_from_slice(&base[bytes]);
        }
    });
}

fn judge(image: &Vec<u8>, backing: &Vec<u8>, unchanged: bool) {
    let backings: [&dyn ReadAt; 1] = [backing];
    let checked = check(image, &backings, Options { compare_clean: true, ..Options::default() });
    for damage in &checked.report.findings {
        assert!(!damage.to_string().is_empty());
    }
    if unchanged {
        // The filler bytes of the two images differ. This is a finding only because clean copies
        // are compared.
        assert!(checked.report.findings.iter().all(|damage| damage.kind.name() == "clean-differs"));
    }
    if let Some(view) = &checked.view {
        for inode in 0..3 {
            let pieces = view.content(Inode(inode), 0, 4096);
            assert_eq!(pieces.iter().map(|piece| piece.sectors).sum::<u64>(), 4096, "no gaps");
            let _ = view.read(Inode(inode), 16, &mut [0; 8192]);
        }
    }
    let mut records = 0;
    dump(image, &mut |record| records += record.to_string().len());
    assert!(records > 0);
}
