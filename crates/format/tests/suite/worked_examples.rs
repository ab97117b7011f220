//! One cache set of a real kernel, byte for byte: 1 GiB, buckets of 1024 sectors, blocks of 1
//! sector, writeback, 100 consecutive writes of 4 KiB from logical sector 0, stopped. Bytes that
//! are not listed here were zero.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails where it cannot go on"
)]

use bcached_format::{
    BackingFormat, BackingState, BackingSuperblock, CacheFormat, CacheMode, CacheSuperblock, DeviceIndex,
    Gen, Inode, Jset, JsetHeader, Key, NodeIdentity, NodeLog, Pointer, Pointers, Position, ReplacementPolicy,
    SetMagic, Uuid, bset, jset,
};

const LAST_MOUNT: u32 = 0x6B00_F72D;

fn set_uuid() -> Uuid {
    Uuid::from_text("cab8174e-3fef-40f7-bf59-19a8f8acadb3").unwrap()
}

fn magic() -> SetMagic {
    SetMagic::of(set_uuid())
}

fn hex(text: &str) -> Vec<u8> {
    let digits: String = text.split_whitespace().collect();
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn cache_superblock() {
    let format = CacheFormat {
        uuid: Uuid::from_text("60bc23ff-49ac-4a4a-a9bf-4cb5a53efa77").unwrap(),
        set_uuid: set_uuid(),
        device_sectors: 2 << 20,
        block_sectors: 1,
        bucket_sectors: 1024,
        discard: false,
        replacement: ReplacementPolicy::Lru,
    };
    let mut superblock = CacheSuperblock::format(format).unwrap();
    superblock.set_journal_buckets(16);
    superblock.set_synchronous(true);
    superblock.set_last_mount(LAST_MOUNT);
    superblock.advance();
    let bytes = superblock.seal();
    assert_eq!(
        bytes[..0x48],
        hex("da34d122824cb147 0800000000000000 0300000000000000 c68573f64e1a45ca 8265f57f48ba6d81
             60bc23ff49ac4a4a a9bf4cb5a53efa77 cab8174e3fef40f7 bf5919a8f8acadb3")
    );
    assert_eq!(bytes[0x68..0x78], hex("0100000000000000 0100000000000000"), "flags, seq");
    assert_eq!(
        bytes[0xb8..0xe0],
        hex("0008000000000000 0100000401000000 2df7006b01001000 0100000000000000 0200000000000000")
    );
}

#[test]
fn backing_superblock() {
    let format = BackingFormat {
        uuid: Uuid::from_text("a99ac0acd82b4fb896292e505cb27041").unwrap(),
        set_uuid: set_uuid(),
        block_sectors: 1,
        bucket_sectors: 1024,
        data_offset: None,
        cache_mode: CacheMode::Writeback,
        device_sectors: 1 << 20,
    };
    let mut superblock = BackingSuperblock::format(format).unwrap();
    superblock.set_state(BackingState::Dirty);
    superblock.set_last_mount(LAST_MOUNT);
    assert_eq!(superblock.data_offset(), 16);
    let bytes = superblock.seal();
    assert_eq!(bytes[0x68..0x70], hex("0100000000000040"));
    assert_eq!(bytes[0xc0..0xcc], hex("01000004 00000000 2df7006b"));
}

#[test]
fn journal_entry_without_keys() {
    let mut bytes = vec![0; 240];
    bytes[..0x40].copy_from_slice(&hex("2dde9b2d03780be5 f8e875edfeda12d3 0200000000000000 0100000000000000
         0100000000000000 0000004000000090 0000000000000000 0100880000000000"));
    bytes[0x68..0x80].copy_from_slice(&hex("ffff0f2000000090 ffffffffffffff7f 0100900000000000"));
    bytes[0xb0..0xb8].copy_from_slice(&hex("2100000000000000"));
    let header = JsetHeader {
        seq: 2,
        last_seq: 1,
        uuids: Key {
            size: 1024,
            pointers: Pointers::one(Pointer::new(DeviceIndex(0), 34816, Gen(1))),
            ..Key::default()
        },
        root: Key {
            inode: Inode::MAX,
            size: 512,
            dirty: false,
            end: Position::MAX.offset,
            pointers: Pointers::one(Pointer::new(DeviceIndex(0), 36864, Gen(1))),
        },
        root_level: 0,
        prio_bucket: 33,
        marks_reserve: false,
        table: None,
    };
    let entry = Jset::parse(&bytes, magic()).unwrap();
    assert_eq!(entry.header, header);
    assert!(entry.keys.is_empty());
    assert_eq!(jset::seal(magic(), &header, &[]), bytes);
}

/// Returns the node's blocks 0 and 1. Block 2 holds something else, so the log ends there.
fn node() -> Vec<u8> {
    let mut bytes = vec![0; 512 * 512];
    let first = hex("b181173d31203c6d 3fbf89f747b35367 1b7f4a0de352759e 0100000000000000");
    bytes[..32].copy_from_slice(&first);
    bytes[512..520].copy_from_slice(&0x7E1B_05A5_1C2F_0DC1_u64.to_le_bytes());
    bytes[520..536].copy_from_slice(&first[8..24]);
    bytes[536..544].copy_from_slice(&hex("01000000 15000000"));
    let keys: [u64; 21] = [
        0x9000_0000_0000_0000,
        0x10,
        0xfffd_968c_d43f_f38e,
        0x9000_0010_0000_0000,
        0x10,
        0xbc_0001,
        0x9000_0000_0080_0000,
        0x18,
        0xbc_0001,
        0x9000_0000_0000_0000,
        0x18,
        0x7ffd_7f28_6292_bddd,
        0x9000_0010_0100_0000,
        0x28,
        0xbc_0801,
        0x9000_0000_0000_0000,
        0x28,
        0x7ff9_ec5b_5fec_f3e3,
        0x9000_0010_3080_0000,
        0x330,
        0xbc_1801,
    ];
    for (slot, word) in bytes[544..].chunks_exact_mut(8).zip(keys) {
        slot.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

#[test]
fn node_with_two_sets() {
    let bytes = node();
    let place = NodeIdentity { magic: magic(), node: Pointer::from_word(0x90_0001) };
    let log = NodeLog::parse(&bytes, 512, place).unwrap();
    assert_eq!((log.sets.len(), log.end_block, log.seq()), (2, 2, 0x9E75_52E3_0D4A_7F1B));
    assert!(log.sets[0].bset.keys.is_empty());
    let keys: Vec<Key> = log.sets[1].bset.keys.iter().collect();
    let seen: Vec<_> = keys.iter().map(|key| (key.start(), key.end, key.dirty, key.size)).collect();
    assert_eq!(
        seen,
        [
            (16, 16, false, 0),
            (16, 16, true, 0),
            (16, 24, false, 8),
            (24, 24, false, 0),
            (24, 40, true, 16),
            (40, 40, false, 0),
            (40, 816, true, 776),
        ]
    );
    assert!(keys[0].pointers.as_slice()[0].is_check());
    assert_eq!(keys[2].pointers.as_slice()[0], Pointer::new(DeviceIndex(0), 48128, Gen(1)));
    assert_eq!(bset::seal(place, log.seq(), &[]), bytes[..32]);
    assert_eq!(bset::seal(place, log.seq(), &keys), bytes[512..512 + 32 + 168]);
}
