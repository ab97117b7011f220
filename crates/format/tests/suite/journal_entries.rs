//! Tests where a bucket's log ends, and which entries must not be mistaken for its end: their
//! checksum is good, so they were written on purpose, and yet they make no sense.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails where it cannot go on")]

use bcached_format::checksum::checksum;
use bcached_format::error::{JsetError, KeyError, KeyListError};
use bcached_format::jset::seal;
use bcached_format::{Inode, Jset, JsetHeader, Key, SetMagic, Uuid};

const MAGIC: SetMagic = SetMagic::of(Uuid([7; 16]));

fn header(seq: u64, last_seq: u64) -> JsetHeader {
    JsetHeader {
        seq,
        last_seq,
        uuids: Key::default(),
        root: Key::default(),
        root_level: 0,
        prio_bucket: 9,
        marks_reserve: false,
        table: None,
    }
}

/// Builds an entry with two holes, damages one field, and fixes the checksum.
fn spoiled(offset: usize, value: &[u8]) -> Vec<u8> {
    let keys = [Key::hole(Inode(0), 0, 8), Key::hole(Inode(0), 8, 16)];
    let mut bytes = seal(MAGIC, &header(5, 3), &keys);
    bytes[offset..offset + value.len()].copy_from_slice(value);
    let sum = checksum(&bytes[8..]);
    bytes[..8].copy_from_slice(&sum.to_le_bytes());
    bytes
}

fn refusal(bytes: &[u8]) -> JsetError {
    Jset::parse(bytes, MAGIC).unwrap_err()
}

#[test]
fn the_log_ends_at_what_is_no_whole_entry() {
    let good = spoiled(16, &[5]);
    assert_eq!(Jset::parse(&good, MAGIC).unwrap().keys.iter().count(), 2);
    let mut torn = good.clone();
    torn[250] ^= 1;
    let cases = [
        (refusal(&good[..239]), JsetError::Truncated { wanted: 240, found: 239 }),
        (refusal(&good[..264]), JsetError::TooLarge { wanted: 272, limit: 264 }),
        (
            Jset::parse(&good, SetMagic::of(Uuid::NIL)).unwrap_err(),
            JsetError::BadMagic { wanted: SetMagic::of(Uuid::NIL).jset(), found: MAGIC.jset() },
        ),
    ];
    for (found, wanted) in cases {
        assert_eq!(found, wanted);
        assert!(found.is_end_of_log());
    }
    assert!(matches!(refusal(&torn), error @ JsetError::BadChecksum { .. } if error.is_end_of_log()));
}

#[test]
fn an_entry_larger_than_32_kib_is_none_however_large_the_bucket() {
    let mut bytes = spoiled(28, &4067_u32.to_le_bytes());
    bytes.resize(1 << 20, 0);
    assert_eq!(refusal(&bytes), JsetError::TooLarge { wanted: 240 + 8 * 4067, limit: 32 << 10 });
    let largest = (0..1016).map(|index| Key::hole(Inode(0), index * 8, index * 8 + 8));
    let mut keys: Vec<Key> = largest.collect();
    keys.extend((0..1016).map(|index| Key::hole(Inode(1), index * 8, index * 8 + 8)));
    let mut bytes = seal(MAGIC, &header(1, 1), &keys);
    assert_eq!(bytes.len(), (32 << 10) - 16);
    bytes.resize(1 << 20, 0);
    assert!(Jset::parse(&bytes, MAGIC).is_ok());
}

#[test]
fn a_whole_entry_that_makes_no_sense_is_not_the_end() {
    let zero_size = KeyListError { index: 1, word: 2, error: KeyError::ZeroSize };
    let before_zero = KeyListError { index: 1, word: 2, error: KeyError::SizeExceedsEnd { size: 8, end: 7 } };
    let cut = KeyError::Truncated { wanted: 4, found: 2 };
    let cases = [
        (spoiled(24, &[2]), JsetError::UnsupportedVersion { found: 2 }),
        (spoiled(16, &[2]), JsetError::BadSeq { seq: 2, last_seq: 3 }),
        (spoiled(32, &[0]), JsetError::BadSeq { seq: 5, last_seq: 0 }),
        (spoiled(40 + 7, &[0xF0]), JsetError::Uuids(KeyError::TooManyPointers { limit: 2, found: 7 })),
        (spoiled(104 + 7, &[0xB0]), JsetError::Root(KeyError::TooManyPointers { limit: 2, found: 3 })),
        (spoiled(256 + 2, &[0]), JsetError::Key(zero_size)),
        (spoiled(264, &[7]), JsetError::Key(before_zero)),
        (spoiled(256 + 7, &[0xA0]), JsetError::Key(KeyListError { index: 1, word: 2, error: cut })),
    ];
    for (bytes, wanted) in cases {
        let found = refusal(&bytes);
        assert_eq!(found, wanted);
        assert!(!found.is_end_of_log(), "{found}");
    }
}

#[test]
fn a_mark_counts_for_the_entry_that_it_was_made_for() {
    let marked = JsetHeader { marks_reserve: true, ..header(5, 3) };
    let mut bytes = seal(MAGIC, &marked, &[]);
    assert_eq!(Jset::parse(&bytes, MAGIC).unwrap().header, marked);
    // A kernel that has read our entry makes its own in the same memory.
    bytes[16..24].copy_from_slice(&6_u64.to_le_bytes());
    let sum = checksum(&bytes[8..]);
    bytes[..8].copy_from_slice(&sum.to_le_bytes());
    assert_eq!(Jset::parse(&bytes, MAGIC).unwrap().header, header(6, 3));
}
