//! Proves that a parser never panics, whatever the bytes are, and that it can walk whatever it
//! accepts.
//!
//! Purely random bytes fail the first check, so most cases start from golden bytes, change a few of
//! them, and fix the checksum. The checks after the checksum then see the damage.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails where it cannot go on"
)]

use bcached_format::checksum::{checksum, checksum_seeded};
use bcached_format::error::BsetError;
use bcached_format::key_check::{check_child_key, check_leaf_key, check_leaf_order};
use bcached_format::node_log::NodeLogReader;
use bcached_format::prio::{BucketPrio, PrioWriter};
use bcached_format::{
    Bset, DeviceGeometry, Geometry, Jset, KeyList, NodeIdentity, NodeLog, Pointer, PrioSet, RawSuperblock,
    Superblock, uuid,
};
use proptest::prelude::*;
use std::path::Path;

const DEVICE: DeviceGeometry = DeviceGeometry { sectors: 8 << 11, logical_block_sectors: 1 };
const SUPERBLOCKS: [&str; 8] = [
    "superblock-cache-formatted.bin",
    "superblock-cache-formatted-fifo.bin",
    "superblock-cache-running.bin",
    "superblock-cache-running-large.bin",
    "superblock-backing-formatted.bin",
    "superblock-backing-formatted-offset.bin",
    "superblock-backing-dirty.bin",
    "superblock-backing-version-6.bin",
];

fn golden(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)).unwrap()
}

fn geometry() -> Geometry {
    let raw = RawSuperblock::from_bytes(&golden("superblock-cache-running.bin")).unwrap();
    match raw.check(DEVICE).unwrap() {
        Superblock::Cache(superblock) => Geometry::of(&superblock),
        Superblock::Backing(_) => panic!("a cache"),
    }
}

fn place() -> NodeIdentity {
    let entry = golden("jset-newest.bin");
    let geometry = geometry();
    let header = Jset::parse(&entry, geometry.magic).unwrap().header;
    NodeIdentity { magic: geometry.magic, node: header.root.pointers.as_slice()[0] }
}

/// Generates a few bytes at random places, set to random values. Most places are in the first 512
/// bytes, where the structure is.
fn changes() -> impl Strategy<Value = Vec<(usize, u8)>> {
    prop::collection::vec((prop_oneof![4 => 8_usize..512, 1 => 8_usize..4096], any::<u8>()), 0..6)
}

fn changed(mut bytes: Vec<u8>, changes: &[(usize, u8)]) -> Vec<u8> {
    for (at, value) in changes {
        if let Some(byte) = bytes.get_mut(*at) {
            *byte = *value;
        }
    }
    bytes
}

/// Fixes the checksum over bytes 8 .. `end`, if they exist.
fn mend(bytes: &mut [u8], end: usize, sum: impl Fn(&[u8]) -> u64) {
    if let Some(summed) = bytes.get(8..end) {
        let sum = sum(summed);
        bytes[..8].copy_from_slice(&sum.to_le_bytes());
    }
}

fn words_at(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

fn walk_keys(keys: &KeyList<'_>, geometry: &Geometry) {
    for key in keys {
        let _ = (check_leaf_key(geometry, &key), check_child_key(geometry, &key));
    }
    let _ = check_leaf_order(keys.iter());
}

proptest! {
    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..4200)) {
        let geometry = geometry();
        if let Ok(raw) = RawSuperblock::from_bytes(&bytes) {
            prop_assert!(raw.check(DEVICE).is_err());
        }
        prop_assert!(Jset::parse(&bytes, geometry.magic).is_err());
        prop_assert!(PrioSet::parse(&bytes, geometry.magic).is_err());
        prop_assert!(NodeLog::parse(&bytes, 512, place()).is_err());
        prop_assert!(Bset::parse(&bytes, place()).is_err());
        prop_assert_eq!(uuid::parse(&bytes).is_ok(), bytes.len() % 128 == 0);
        if let Ok(keys) = KeyList::parse(&bytes) {
            walk_keys(&keys, &geometry);
        }
    }

    #[test]
    fn damaged_superblocks(which in 0..SUPERBLOCKS.len(), changes in changes()) {
        let mut bytes = changed(golden(SUPERBLOCKS[which]), &changes);
        let buckets = usize::from(u16::from_le_bytes([bytes[206], bytes[207]]));
        mend(&mut bytes, 208 + 8 * buckets, checksum);
        match RawSuperblock::from_bytes(&bytes).unwrap().check(DEVICE) {
            Ok(Superblock::Cache(superblock)) => {
                let geometry = Geometry::of(&superblock);
                prop_assert!(geometry.node_sectors() > 0 && geometry.prio_sets() > 0);
                prop_assert!(superblock.buckets() * superblock.bucket_sectors() <= DEVICE.sectors);
                prop_assert_eq!(&superblock.seal()[..], &bytes[..]);
            }
            Ok(Superblock::Backing(superblock)) => {
                prop_assert!(superblock.data_offset() < DEVICE.sectors);
                prop_assert_eq!(&superblock.seal()[..], &bytes[..]);
            }
            Err(_) => {}
        }
    }

    #[test]
    fn damaged_journal_entries(changes in changes(), many in any::<bool>()) {
        let name = if many { "jset-with-many-keys.bin" } else { "jset-newest.bin" };
        let mut bytes = changed(golden(name), &changes);
        let end = 240 + 8 * words_at(&bytes, 28);
        mend(&mut bytes, end, checksum);
        if let Ok(entry) = Jset::parse(&bytes, geometry().magic) {
            prop_assert!(entry.header.last_seq <= entry.header.seq && entry.byte_len() <= bytes.len());
            prop_assert!(entry.keys.iter().all(|key| key.size > 0));
            walk_keys(&entry.keys, &geometry());
        }
    }

    #[test]
    fn damaged_nodes(changes in changes()) {
        let mut bytes = changed(golden("node-root.bin"), &changes);
        let (place, end) = (place(), 32 + 8 * words_at(&bytes, 28));
        mend(&mut bytes, end, |summed| checksum_seeded(place.node.word(), summed));
        if let Ok(log) = NodeLog::parse(&bytes, 512, place) {
            prop_assert!(log.end_block as usize * 512 <= bytes.len());
            for set in &log.sets {
                walk_keys(&set.bset.keys, &geometry());
            }
        }
    }

    /// Proves that a check in pieces gives the same result as a check in one go.
    #[test]
    fn nodes_in_pieces(changes in changes(), mended in any::<bool>(), piece in 0..600_usize) {
        let mut bytes = changed(golden("node-root.bin"), &changes);
        let (place, end) = (place(), 32 + 8 * words_at(&bytes, 28));
        if mended {
            mend(&mut bytes, end, |summed| checksum_seeded(place.node.word(), summed));
        }
        let in_pieces = NodeLogReader::new(&bytes, 512, place).and_then(|mut reader| loop {
            if let Some(log) = reader.step(piece)? {
                let twice: usize = log.sets.iter().map(|set| 2 * set.bset.byte_len()).sum();
                assert_eq!(reader.found(), twice, "each byte is summed and looked at once");
                break Ok(log);
            }
        });
        prop_assert_eq!(in_pieces, NodeLog::parse(&bytes, 512, place));
    }

    #[test]
    fn priorities_in_pieces(pieces in prop::collection::vec(0..400_usize, 0..4), kept in 0..1353_usize, passed in 0..5000_usize) {
        let bytes = golden("prio-0.bin");
        let set = PrioSet::parse(&bytes, geometry().magic).unwrap();
        let writer = || PrioWriter::new(vec![0; bytes.len()], geometry().magic, set.seq, set.next_bucket);
        let (mut whole, mut entries) = (writer(), set.entries());
        pieces.into_iter().for_each(|piece| whole.push(entries.by_ref().take(piece)));
        whole.push(entries);
        prop_assert_eq!(whole.seal(), &bytes[..]);
        // Entries that are left out are zero, just as if zeroes had been written.
        let (mut short, mut long) = (writer(), writer());
        short.push(set.entries().take(kept));
        while short.pass(1 + passed) > 0 {}
        long.push(set.entries().enumerate().map(|(at, entry)| if at < kept { entry } else { BucketPrio::default() }));
        prop_assert_eq!(short.seal(), long.seal());
    }

    #[test]
    fn damaged_priorities(changes in changes(), mended in any::<bool>()) {
        let mut bytes = changed(golden("prio-0.bin"), &changes);
        if mended {
            let end = bytes.len();
            mend(&mut bytes, end, checksum);
        }
        if let Ok(set) = PrioSet::parse(&bytes, geometry().magic) {
            prop_assert_eq!(set.entries().len(), 1352);
        }
    }
}

/// Builds a node of 8 blocks with `sets` (block, seq of the header), each with one key.
fn node_of(sets: &[(usize, u64)]) -> Vec<u8> {
    let mut bytes = vec![0; 8 * 512];
    let key = bcached_format::Key::hole(bcached_format::Inode(0), 0, 8);
    for (block, seq) in sets {
        let sealed = bcached_format::bset::seal(place(), *seq, &[key]);
        bytes[block * 512..block * 512 + sealed.len()].copy_from_slice(&sealed);
    }
    bytes
}

#[test]
fn the_log_of_a_node_ends_at_another_nodes_set() {
    let log_of = |sets: &[(usize, u64)]| {
        NodeLog::parse(&node_of(sets), 512, place()).map(|log| (log.sets.len(), log.end_block))
    };
    assert_eq!(log_of(&[(0, 7), (1, 7), (2, 9), (3, 9)]), Ok((2, 2)), "remains of an earlier use");
    let stray = log_of(&[(0, 7), (1, 7), (3, 7)]).unwrap_err();
    assert_eq!((stray.block, stray.error), (3, BsetError::StraySet { end_block: 2 }));
    assert_eq!(log_of(&[(1, 7)]).unwrap_err().error, BsetError::ZeroSeq);
    let full: Vec<_> = (0..8).map(|block| (block, 7)).collect();
    assert_eq!(log_of(&full), Ok((8, 8)), "a set in each block");
}

#[test]
fn only_the_first_set_of_a_node_may_be_empty() {
    let mut bytes = node_of(&[(0, 7)]);
    let empty = bcached_format::bset::seal(place(), 7, &[]);
    bytes[512..544].copy_from_slice(&empty);
    let error = NodeLog::parse(&bytes, 512, place()).unwrap_err();
    assert_eq!((error.block, error.error), (1, BsetError::Empty));
    bytes[..32].copy_from_slice(&empty);
    bytes[512..544].fill(0);
    assert_eq!(NodeLog::parse(&bytes, 512, place()).unwrap().sets.len(), 1);
}

#[test]
fn a_set_is_checked_in_order_version_length_magic_sum() {
    let parse = |bytes: &[u8]| Bset::parse(bytes, place()).unwrap_err();
    let mut bytes = node_of(&[(0, 7)]);
    bytes[40] ^= 1;
    assert!(matches!(parse(&bytes), BsetError::BadChecksum { .. }));
    bytes[8] ^= 1;
    assert!(matches!(parse(&bytes), BsetError::BadMagic { .. }));
    bytes[28..32].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(parse(&bytes), BsetError::BeyondNode { wanted: 0x8_0000_0018, found: 4096 }));
    bytes[24] = 2;
    assert_eq!(parse(&bytes), BsetError::UnsupportedVersion { found: 2 });
}

#[test]
fn an_old_set_has_an_unseeded_sum() {
    let mut bytes = node_of(&[(0, 7)]);
    bytes[24] = 0;
    let end = 32 + 8 * words_at(&bytes, 28);
    mend(&mut bytes, end, checksum);
    assert_eq!(Bset::parse(&bytes, place()).unwrap().version, 0);
    let elsewhere = NodeIdentity { node: Pointer::from_word(1), ..place() };
    assert!(Bset::parse(&bytes, elsewhere).is_ok(), "nothing ties it to its place");
}
