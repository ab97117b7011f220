//! The superblock of a cache device.

use super::layout as field;
use super::{
    DeviceGeometry, MAX_JOURNAL_BUCKETS, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_END_SECTOR, Superblock,
};
use crate::error::SuperblockError;
use crate::features::{BucketSizeEncoding, Features};
use crate::identity::{Label, SetMagic, Uuid};
use crate::units::{PAGE_BYTES, SECTOR_BYTES};
use alloc::boxed::Box;

const PAGE_SECTORS: u64 = PAGE_BYTES / SECTOR_BYTES;

/// Least number of buckets that a kernel's superblock check accepts.
const BUCKETS_MIN_CHECKED: u64 = 1 << 7;

/// Least number of buckets that a kernel can run. Its reserves are a 1024th of the buckets rounded
/// up to a power of two, and must not be zero.
pub const BUCKETS_MIN: u64 = 513;

const BUCKETS_LIMIT: u64 = 1 << 63;
const BUCKET_LOGARITHM_MAX: u32 = 31;
const DEVICES_MAX: u16 = 8;
const VERSION_FORMATTED: u64 = 0;
const VERSION_RUNNING: u64 = 3;
const VERSION_FEATURES: u64 = 5;

/// Sectors that the tools keep free before the first bucket: up to the superblock's end, and a
/// page.
const SECTORS_KEPT_FREE: u64 = 23;

/// Which clean bucket is evicted first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReplacementPolicy {
    /// The least recently used one.
    #[default]
    Lru,
    /// The one that was filled first.
    Fifo,
    /// A random one.
    Random,
}

impl ReplacementPolicy {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::Lru, Self::Fifo, Self::Random];

    /// Returns the kernel's name for the policy.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Fifo => "fifo",
            Self::Random => "random",
        }
    }

    fn from_value(value: u8) -> Result<Self, SuperblockError> {
        match value {
            0 => Ok(Self::Lru),
            1 => Ok(Self::Fifo),
            2 => Ok(Self::Random),
            found => Err(SuperblockError::UnknownReplacement { found }),
        }
    }

    const fn value(self) -> u8 {
        match self {
            Self::Lru => 0,
            Self::Fifo => 1,
            Self::Random => 2,
        }
    }
}

/// The parameters for formatting a new cache device.
#[derive(Clone, Copy, Debug)]
pub struct CacheFormat {
    /// Uuid of the device.
    pub uuid: Uuid,
    /// Uuid of the new cache set.
    pub set_uuid: Uuid,
    /// Length of the device in sectors.
    pub device_sectors: u64,
    /// Block size in sectors: a power of two, 1..=8.
    pub block_sectors: u16,
    /// Bucket size in sectors: a power of two, 8..=32768.
    pub bucket_sectors: u16,
    /// Whether to discard buckets before they are reused.
    pub discard: bool,
    /// Replacement policy.
    pub replacement: ReplacementPolicy,
}

/// The checked superblock of a cache device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CacheSuperblock {
    raw: RawSuperblock,
    // Decoded once by the checks, because the stored forms can be invalid.
    bucket_sectors: u64,
    replacement: ReplacementPolicy,
}

impl CacheSuperblock {
    /// Returns the superblock that the usual tools write on a new cache device: version 0, never
    /// started.
    ///
    /// # Errors
    /// As for [`RawSuperblock::check`], for sizes that are not supported.
    pub fn format(format: CacheFormat) -> Result<Self, SuperblockError> {
        let mut raw =
            RawSuperblock::formatted(VERSION_FORMATTED, format.uuid, format.set_uuid, format.block_sectors);
        let bucket = u64::from(format.bucket_sectors);
        if bucket == 0 {
            return Err(SuperblockError::BucketBelowPage { wanted: PAGE_SECTORS, found: 0 });
        }
        let first = u16::try_from(SECTORS_KEPT_FREE / bucket + 1).expect("at most 24");
        let bytes = &mut raw.0[..];
        field::BUCKETS.set_u64(bytes, format.device_sectors / bucket);
        field::BUCKET_SIZE.set_u16(bytes, format.bucket_sectors);
        field::DEVICES.set_u16(bytes, 1);
        field::FIRST_BUCKET.set_u16(bytes, first);
        raw.set_flag(field::DISCARD, u8::from(format.discard));
        raw.set_flag(field::REPLACEMENT, format.replacement.value());
        raw.0 = raw.sealed();
        let device = DeviceGeometry { sectors: format.device_sectors, logical_block_sectors: 1 };
        match raw.check(device)? {
            Superblock::Cache(superblock) => Ok(superblock),
            Superblock::Backing(_) => unreachable!("version 0 is a cache device"),
        }
    }

    /// Makes the checks from the version on, in a kernel's order.
    pub(super) fn check(raw: RawSuperblock, device: DeviceGeometry) -> Result<Self, SuperblockError> {
        check_features(features(&raw))?;
        let bucket_sectors = check_sizes(&raw)?;
        check_extent(&raw, bucket_sectors, device)?;
        check_membership(&raw)?;
        check_journal(&raw)?;
        let found = u64::from(field::FIRST_BUCKET.u16(&raw.0[..])) * bucket_sectors;
        if found < SUPERBLOCK_END_SECTOR {
            return Err(SuperblockError::FirstBucketInSuperblock { wanted: SUPERBLOCK_END_SECTOR, found });
        }
        let found = field::BUCKETS.u64(&raw.0[..]);
        if found < BUCKETS_MIN {
            return Err(SuperblockError::NotEnoughBuckets { wanted: BUCKETS_MIN, found });
        }
        let found = field::DEVICES.u16(&raw.0[..]);
        if found != 1 {
            return Err(SuperblockError::SeveralDevices { found });
        }
        let replacement = ReplacementPolicy::from_value(raw.flag(field::REPLACEMENT))?;
        Ok(Self { raw, bucket_sectors, replacement })
    }

    /// Returns the bytes to write at [`super::SUPERBLOCK_SECTOR`].
    #[must_use]
    pub fn seal(&self) -> Box<[u8; SUPERBLOCK_BYTES]> {
        self.raw.sealed()
    }

    /// Prepares for a write by a running set: increments the sequence number, and raises the
    /// version to one that says "was run".
    pub fn advance(&mut self) {
        let version = self.version().max(VERSION_RUNNING);
        let seq = self.seq().wrapping_add(1);
        field::VERSION.set_u64(&mut self.raw.0[..], version);
        field::SEQ.set_u64(&mut self.raw.0[..], seq);
    }

    /// Returns the version: 0 never started, 3 normal, 5 with feature words.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.raw.version()
    }

    /// Returns the uuid of this device.
    #[must_use]
    pub fn uuid(&self) -> Uuid {
        self.raw.uuid()
    }

    /// Returns the uuid of the cache set.
    #[must_use]
    pub fn set_uuid(&self) -> Uuid {
        self.raw.set_uuid()
    }

    /// Returns the magic of the set's metadata.
    #[must_use]
    pub fn set_magic(&self) -> SetMagic {
        SetMagic::of(self.set_uuid())
    }

    /// Returns the label.
    #[must_use]
    pub fn label(&self) -> Label {
        self.raw.label()
    }

    /// Sets the label.
    pub fn set_label(&mut self, label: Label) {
        self.raw.set_label(label);
    }

    /// Returns the checksum over the current content. It identifies the state of the superblock,
    /// and also tells apart copies that have diverged: their write counts may be equal.
    ///
    /// # Panics
    /// Never: a checked superblock lists few enough journal buckets.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.raw.computed_checksum().expect("a checked superblock lists few enough journal buckets")
    }

    /// Returns the checksum over everything except what a running set changes in its superblock:
    /// `discard` and the replacement policy. It stays the same until the set is started again,
    /// whatever settings change before that.
    ///
    /// # Panics
    /// Never, as for [`Self::checksum`].
    #[must_use]
    pub fn session(&self) -> u64 {
        let mut fixed = self.clone();
        fixed.set_discard(false);
        fixed.set_replacement(ReplacementPolicy::Lru);
        fixed.checksum()
    }

    /// Returns how many times this superblock has been written.
    #[must_use]
    pub fn seq(&self) -> u64 {
        field::SEQ.u64(&self.raw.0[..])
    }

    /// Returns the feature words; empty below version 5, whatever the bytes are.
    #[must_use]
    pub fn features(&self) -> Features {
        features(&self.raw)
    }

    /// Returns the SYNC flag: journal and tree are valid. While it is clear, the set has never been
    /// started and holds nothing.
    #[must_use]
    pub fn is_synchronous(&self) -> bool {
        self.raw.flag(field::SYNCHRONOUS) != 0
    }

    /// Sets SYNC. The superblock may be written with it only once the first journal entry is
    /// durable.
    pub fn set_synchronous(&mut self, synchronous: bool) {
        self.raw.set_flag(field::SYNCHRONOUS, u8::from(synchronous));
    }

    /// Returns whether buckets are discarded before they are reused.
    #[must_use]
    pub fn discard(&self) -> bool {
        self.raw.flag(field::DISCARD) != 0
    }

    /// Sets whether buckets are discarded.
    pub fn set_discard(&mut self, discard: bool) {
        self.raw.set_flag(field::DISCARD, u8::from(discard));
    }

    /// Sets the replacement policy.
    pub fn set_replacement(&mut self, replacement: ReplacementPolicy) {
        self.raw.set_flag(field::REPLACEMENT, replacement.value());
        self.replacement = replacement;
    }

    /// Returns the replacement policy.
    #[must_use]
    pub fn replacement(&self) -> ReplacementPolicy {
        self.replacement
    }

    /// Returns the number of buckets N, including those before the first usable one.
    #[must_use]
    pub fn buckets(&self) -> u64 {
        field::BUCKETS.u64(&self.raw.0[..])
    }

    /// Returns the block size in sectors: a power of two, 1..=8.
    #[must_use]
    pub fn block_sectors(&self) -> u64 {
        self.raw.block_sectors()
    }

    /// Returns the bucket size in sectors: a power of two, at least 8.
    #[must_use]
    pub fn bucket_sectors(&self) -> u64 {
        self.bucket_sectors
    }

    /// Returns the first usable bucket; the journal starts here.
    #[must_use]
    pub fn first_bucket(&self) -> u64 {
        u64::from(field::FIRST_BUCKET.u16(&self.raw.0[..]))
    }

    /// Returns the number of journal buckets, which begin at [`Self::first_bucket`].
    #[must_use]
    pub fn journal_buckets(&self) -> u64 {
        u64::from(field::JOURNAL_COUNT.u16(&self.raw.0[..]))
    }

    /// Lists `count` journal buckets from the first bucket on.
    ///
    /// # Panics
    /// If `count` exceeds [`MAX_JOURNAL_BUCKETS`] or the number of buckets.
    pub fn set_journal_buckets(&mut self, count: u64) {
        assert!(count <= MAX_JOURNAL_BUCKETS, "a superblock lists at most 256 journal buckets");
        let first = self.first_bucket();
        assert!(first + count <= self.buckets(), "the journal lies inside the device");
        let bytes = &mut self.raw.0[..];
        for (slot, bucket) in field::JOURNAL.slice_mut(bytes).chunks_exact_mut(8).zip(first..first + count) {
            slot.copy_from_slice(&bucket.to_le_bytes());
        }
        field::JOURNAL_COUNT.set_u16(bytes, u16::try_from(count).expect("checked above"));
    }

    /// Returns when the set was last started, in seconds since 1970.
    #[must_use]
    pub fn last_mount(&self) -> u32 {
        self.raw.last_mount()
    }

    /// Records when the set was started, in seconds since 1970.
    pub fn set_last_mount(&mut self, seconds: u32) {
        self.raw.set_last_mount(seconds);
    }
}

fn features(raw: &RawSuperblock) -> Features {
    if raw.version() < VERSION_FEATURES {
        return Features::default();
    }
    let bytes = &raw.0[..];
    Features {
        compat: field::COMPAT.u64(bytes),
        incompat: field::INCOMPAT.u64(bytes),
        ro_compat: field::RO_COMPAT.u64(bytes),
    }
}

fn check_features(features: Features) -> Result<(), SuperblockError> {
    match (features.unknown_compat(), features.unknown_ro_compat(), features.unknown_incompat()) {
        (0, 0, 0) if features.has_obsolete_large_bucket() => Err(SuperblockError::ObsoleteLargeBucket),
        (0, 0, 0) => Ok(()),
        (0, 0, found) => Err(SuperblockError::UnsupportedIncompat { found }),
        (0, found, _) => Err(SuperblockError::UnsupportedRoCompat { found }),
        (found, _, _) => Err(SuperblockError::UnsupportedCompat { found }),
    }
}

/// Returns the bucket size in sectors as stored. Only the range of a logarithm is checked.
fn stored_bucket_sectors(raw: &RawSuperblock) -> Result<u64, SuperblockError> {
    let bytes = &raw.0[..];
    let low = field::BUCKET_SIZE.u16(bytes);
    match features(raw).bucket_size_form() {
        BucketSizeEncoding::Plain => Ok(u64::from(low)),
        BucketSizeEncoding::Logarithm if u32::from(low) > BUCKET_LOGARITHM_MAX => {
            Err(SuperblockError::BucketLogarithmTooLarge { limit: BUCKET_LOGARITHM_MAX, found: low.into() })
        }
        BucketSizeEncoding::Logarithm => Ok(1 << low),
    }
}

/// Checks the number of buckets, the block size and the bucket size. Returns the bucket size.
fn check_sizes(raw: &RawSuperblock) -> Result<u64, SuperblockError> {
    let buckets = field::BUCKETS.u64(&raw.0[..]);
    if buckets >= BUCKETS_LIMIT {
        return Err(SuperblockError::TooManyBuckets { found: buckets });
    }
    if buckets < BUCKETS_MIN_CHECKED {
        return Err(SuperblockError::NotEnoughBuckets { wanted: BUCKETS_MIN_CHECKED, found: buckets });
    }
    let block = raw.block_sectors();
    if !block.is_power_of_two() {
        return Err(SuperblockError::BlockNotPowerOfTwo { found: block });
    }
    if block > PAGE_SECTORS {
        return Err(SuperblockError::BlockAbovePage { limit: PAGE_SECTORS, found: block });
    }
    let bucket = stored_bucket_sectors(raw)?;
    if !bucket.is_power_of_two() {
        return Err(SuperblockError::BucketNotPowerOfTwo { found: bucket });
    }
    if bucket < PAGE_SECTORS {
        return Err(SuperblockError::BucketBelowPage { wanted: PAGE_SECTORS, found: bucket });
    }
    Ok(bucket)
}

fn check_extent(raw: &RawSuperblock, bucket: u64, device: DeviceGeometry) -> Result<(), SuperblockError> {
    let wanted = field::BUCKETS.u64(&raw.0[..]).saturating_mul(bucket);
    if wanted > device.sectors {
        return Err(SuperblockError::DeviceTooSmall { wanted, found: device.sectors });
    }
    Ok(())
}

fn check_membership(raw: &RawSuperblock) -> Result<(), SuperblockError> {
    if raw.set_uuid().is_nil() {
        return Err(SuperblockError::NilSetUuid);
    }
    let count = field::DEVICES.u16(&raw.0[..]);
    let index = field::DEVICE_INDEX.u16(&raw.0[..]);
    if count == 0 || count > DEVICES_MAX || index >= count {
        return Err(SuperblockError::BadDeviceNumber { count, index });
    }
    Ok(())
}

fn check_journal(raw: &RawSuperblock) -> Result<(), SuperblockError> {
    let bytes = &raw.0[..];
    let first = u64::from(field::FIRST_BUCKET.u16(bytes));
    let count = u64::from(field::JOURNAL_COUNT.u16(bytes));
    for (index, slot) in (0..count).zip(field::JOURNAL.slice(bytes).chunks_exact(8)) {
        let found = u64::from_le_bytes(slot.try_into().expect("chunks of eight"));
        let wanted = first + index;
        if found != wanted {
            return Err(SuperblockError::JournalNotSequential { index, wanted, found });
        }
    }
    let buckets = field::BUCKETS.u64(bytes);
    if first + count > buckets {
        return Err(SuperblockError::JournalBeyondEnd { wanted: first + count, found: buckets });
    }
    Ok(())
}
