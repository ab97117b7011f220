//! Tests every refusal of a superblock, in a kernel's order. Each case damages one field of a good
//! superblock, fixes the checksum, and must get exactly its own error.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails where it cannot go on"
)]

use bcached_format::checksum::checksum;
use bcached_format::superblock::MAGIC;
use bcached_format::{
    BackingFormat, BackingSuperblock, CacheFormat, CacheMode, CacheSuperblock, DeviceGeometry, RawSuperblock,
    ReplacementPolicy, Superblock, SuperblockError as E, Uuid,
};

const SECTORS: u64 = 1 << 20;
const DEVICE: DeviceGeometry = DeviceGeometry { sectors: SECTORS, logical_block_sectors: 1 };

fn cache() -> Vec<u8> {
    let format = CacheFormat {
        uuid: Uuid([1; 16]),
        set_uuid: Uuid([2; 16]),
        device_sectors: SECTORS,
        block_sectors: 8,
        bucket_sectors: 1024,
        discard: false,
        replacement: ReplacementPolicy::Lru,
    };
    let mut superblock = CacheSuperblock::format(format).unwrap();
    superblock.set_journal_buckets(8);
    superblock.set_synchronous(true);
    superblock.advance();
    superblock.seal().to_vec()
}

fn backing() -> Vec<u8> {
    let format = BackingFormat {
        uuid: Uuid([3; 16]),
        set_uuid: Uuid([2; 16]),
        block_sectors: 8,
        bucket_sectors: 1024,
        data_offset: Some(64),
        cache_mode: CacheMode::Writeback,
        device_sectors: SECTORS,
    };
    BackingSuperblock::format(format).unwrap().seal().to_vec()
}

/// A field: offset, size in bytes, value.
type FieldValue = (usize, usize, u64);

/// Writes `value` (its lowest `size` bytes) at each place and fixes the checksum.
fn spoiled(mut bytes: Vec<u8>, places: &[FieldValue]) -> Vec<u8> {
    for (offset, size, value) in places {
        bytes[*offset..offset + size].copy_from_slice(&value.to_le_bytes()[..*size]);
    }
    let count = usize::from(u16::from_le_bytes([bytes[206], bytes[207]]));
    if let Some(summed) = bytes.get(8..208 + 8 * count) {
        let sum = checksum(summed);
        bytes[..8].copy_from_slice(&sum.to_le_bytes());
    }
    bytes
}

fn check(bytes: &[u8], device: DeviceGeometry) -> Result<Superblock, E> {
    RawSuperblock::from_bytes(bytes).unwrap().check(device)
}

#[track_caller]
fn refused(bytes: Vec<u8>, places: &[FieldValue], wanted: E) {
    assert_eq!(check(&spoiled(bytes, places), DEVICE).unwrap_err(), wanted);
}

#[test]
fn what_is_no_superblock_is_refused() {
    assert!(check(&cache(), DEVICE).is_ok() && check(&backing(), DEVICE).is_ok());
    let short = RawSuperblock::from_bytes(&[0; 4095]).unwrap_err();
    assert_eq!(short, E::Truncated { wanted: 4096, found: 4095 });
    refused(cache(), &[(8, 8, 9)], E::BadOffset { wanted: 8, found: 9 });
    refused(cache(), &[(206, 2, 257)], E::TooManyJournalBuckets { limit: 256, found: 257 });
    let mut bytes = cache();
    bytes[72] ^= 1;
    assert!(
        matches!(check(&bytes, DEVICE).unwrap_err(), E::BadChecksum { wanted, found } if wanted != found)
    );
    refused(cache(), &[(40, 8, 0), (48, 8, 0)], E::NilUuid);
}

/// Proves that a damaged magic is told from a missing one. A program that took it for missing would
/// format the device.
#[test]
fn a_damaged_magic_is_told_from_none() {
    let with = |bytes: Vec<u8>, magic: [u8; 16], is_there: bool| {
        let mut bytes = bytes;
        bytes[24..40].copy_from_slice(&magic);
        let raw = RawSuperblock::from_bytes(&bytes).unwrap();
        assert_eq!(raw.is_there(), is_there, "{magic:x?}");
        let found = Uuid(magic);
        let wanted = if is_there { E::DamagedMagic { found } } else { E::BadMagic { found } };
        assert_eq!(raw.check(DEVICE).unwrap_err(), wanted);
    };
    for bytes in [cache(), backing()] {
        let mut flipped = MAGIC.0;
        flipped[3] ^= 1;
        with(bytes.clone(), flipped, true);
        with(bytes.clone(), [0xff; 16], true);
        let mut more = bytes.clone();
        more[72] ^= 1;
        with(more.clone(), flipped, true);
        // `wipefs` leaves zeroes, and the magic of bcachefs begins like bcache's.
        let mut other = [1; 16];
        other[..4].copy_from_slice(&MAGIC.0[..4]);
        with(more.clone(), other, false);
        with(bytes.clone(), [0; 16], false);
        let erased = |mut bytes: Vec<u8>| {
            bytes[24..40].fill(0);
            RawSuperblock::from_bytes(&bytes).unwrap().is_erased()
        };
        assert!(erased(bytes) && !erased(more) && !erased(vec![0; 4096]));
    }
}

#[test]
fn blocks_and_versions_that_do_not_fit_are_refused() {
    let large = DeviceGeometry { logical_block_sectors: 16, ..DEVICE };
    assert_eq!(check(&cache(), large).unwrap_err(), E::BlockBelowDevice { wanted: 16, found: 8 });
    refused(cache(), &[(192, 2, 0)], E::BlockBelowDevice { wanted: 1, found: 0 });
    for found in [2, 7, u64::MAX] {
        refused(cache(), &[(16, 8, found)], E::UnsupportedVersion { found });
    }
    refused(cache(), &[(16, 8, 5), (120, 8, 1)], E::UnsupportedCompat { found: 1 });
    refused(cache(), &[(16, 8, 5), (136, 8, 2)], E::UnsupportedRoCompat { found: 2 });
    refused(cache(), &[(16, 8, 5), (128, 8, 6)], E::UnsupportedIncompat { found: 4 });
    let stray = spoiled(cache(), &[(120, 8, 9), (128, 8, 9), (136, 8, 9)]);
    assert!(check(&stray, DEVICE).is_ok(), "below version 5 the words mean nothing");
}

#[test]
fn sizes_of_a_cache_that_make_no_sense_are_refused() {
    refused(cache(), &[(184, 8, 1 << 63)], E::TooManyBuckets { found: 1 << 63 });
    refused(cache(), &[(184, 8, 127)], E::NotEnoughBuckets { wanted: 128, found: 127 });
    refused(cache(), &[(184, 8, 512)], E::NotEnoughBuckets { wanted: 513, found: 512 });
    assert!(check(&spoiled(cache(), &[(184, 8, 513)]), DEVICE).is_ok());
    refused(cache(), &[(192, 2, 6)], E::BlockNotPowerOfTwo { found: 6 });
    refused(cache(), &[(192, 2, 16)], E::BlockAbovePage { limit: 8, found: 16 });
    refused(cache(), &[(194, 2, 1000)], E::BucketNotPowerOfTwo { found: 1000 });
    refused(cache(), &[(194, 2, 4)], E::BucketBelowPage { wanted: 8, found: 4 });
    refused(cache(), &[(184, 8, 1025)], E::DeviceTooSmall { wanted: 1025 << 10, found: SECTORS });
    refused(cache(), &[(184, 8, 1 << 62)], E::DeviceTooSmall { wanted: u64::MAX, found: SECTORS });
    let logarithm = [(16, 8, 5), (128, 8, 2), (194, 2, 32)];
    refused(cache(), &logarithm, E::BucketLogarithmTooLarge { limit: 31, found: 32 });
}

#[test]
fn membership_and_journal_that_make_no_sense_are_refused() {
    refused(cache(), &[(56, 8, 0), (64, 8, 0)], E::NilSetUuid);
    for (count, index) in [(0, 0), (9, 0), (1, 1)] {
        let places = [(196, 2, u64::from(count)), (198, 2, u64::from(index))];
        refused(cache(), &places, E::BadDeviceNumber { count, index });
    }
    refused(cache(), &[(208 + 8, 8, 7)], E::JournalNotSequential { index: 1, wanted: 2, found: 7 });
    refused(cache(), &[(196, 2, 2)], E::SeveralDevices { found: 2 });
    refused(cache(), &[(104, 8, 0x0d)], E::UnknownReplacement { found: 3 });
    let first = |first: u64| -> Vec<FieldValue> {
        let journal = (0..8).map(|index| (208 + 8 * index, 8, first + index as u64));
        std::iter::once((204, 2, first)).chain(journal).collect()
    };
    refused(cache(), &first(1020), E::JournalBeyondEnd { wanted: 1028, found: 1024 });
    refused(cache(), &first(0), E::FirstBucketInSuperblock { wanted: 16, found: 0 });
}

#[test]
fn backing_devices_that_make_no_sense_are_refused() {
    refused(backing(), &[(184, 8, 15)], E::DataOffsetTooSmall { wanted: 16, found: 15 });
    refused(backing(), &[(184, 8, SECTORS)], E::DataOffsetBeyondEnd { limit: SECTORS, found: SECTORS });
    refused(backing(), &[(192, 2, 3)], E::BlockNotPowerOfTwo { found: 3 });
    refused(backing(), &[(104, 8, 4)], E::UnknownCacheMode { found: 4 });
    let old = spoiled(backing(), &[(16, 8, 1), (184, 8, u64::MAX)]);
    let Superblock::Backing(superblock) = check(&old, DEVICE).unwrap() else { panic!("version 1") };
    assert_eq!(superblock.data_offset(), 16, "version 1 has no data offset");
}

/// Proves that the obsolete form is refused. Kernels run such a set, with its volumes read-only.
#[test]
fn the_obsolete_form_of_a_large_bucket_is_refused() {
    // 2^16 sectors: the low half is zero.
    refused(cache(), &[(16, 8, 5), (128, 8, 1), (194, 2, 0), (2256, 2, 1)], E::ObsoleteLargeBucket);
    refused(cache(), &[(16, 8, 5), (128, 8, 1)], E::ObsoleteLargeBucket);
    refused(cache(), &[(16, 8, 5), (128, 8, 3), (194, 2, 10)], E::ObsoleteLargeBucket);
    let logarithm = spoiled(cache(), &[(16, 8, 5), (128, 8, 2), (194, 2, 10)]);
    let Superblock::Cache(superblock) = check(&logarithm, DEVICE).unwrap() else { panic!("a cache") };
    assert_eq!(superblock.bucket_sectors(), 1024, "the other form of large buckets");
}

#[test]
fn the_first_check_that_fails_is_the_one_reported() {
    // Each step damages one more field, from the last check to the first.
    let steps: [(&[FieldValue], E); 6] = [
        (&[(196, 2, 0)], E::BadDeviceNumber { count: 0, index: 0 }),
        (&[(56, 8, 0), (64, 8, 0)], E::NilSetUuid),
        (&[(194, 2, 1000)], E::BucketNotPowerOfTwo { found: 1000 }),
        (&[(184, 8, 1)], E::NotEnoughBuckets { wanted: 128, found: 1 }),
        (&[(192, 2, 0)], E::BlockBelowDevice { wanted: 1, found: 0 }),
        (&[(40, 8, 0), (48, 8, 0)], E::NilUuid),
    ];
    let mut bytes = cache();
    for (places, wanted) in steps {
        bytes = spoiled(bytes, places);
        assert_eq!(check(&bytes, DEVICE).unwrap_err(), wanted);
    }
}
