//! Errors of the format: what can be wrong with its bytes. There is one enum per structure, so that
//! a signature says what can fail; [`FormatError`] is the sum of them.
//!
//! `Display` gives the whole sentence, inner errors included, and none of these errors has a
//! source: a chain of causes ends with them. Fields carry the wanted and the found value. Sizes are
//! in sectors unless a field's name says bytes or words.

use crate::identity::Uuid;
use crate::units::Position;
use thiserror::Error;

/// Any error of this crate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum FormatError {
    /// A superblock.
    #[error("superblock: {0}")]
    Superblock(SuperblockError),
    /// A set of a B-tree node.
    #[error("btree set: {0}")]
    Bset(BsetError),
    /// A B-tree node.
    #[error("btree node: {0}")]
    Node(NodeError),
    /// A journal entry.
    #[error("journal entry: {0}")]
    Jset(JsetError),
    /// A priority set.
    #[error("priority set: {0}")]
    Prio(PrioError),
    /// The uuid table.
    #[error("uuid table: {0}")]
    Uuid(UuidError),
    /// A key.
    #[error("key: {0}")]
    Key(KeyError),
}

macro_rules! from_parts {
    ($($variant:ident $part:ident),* $(,)?) => {
        $(impl From<$part> for FormatError {
            fn from(part: $part) -> Self {
                Self::$variant(part)
            }
        })*
    };
}

from_parts!(Superblock SuperblockError, Bset BsetError, Node NodeError, Jset JsetError, Prio PrioError, Uuid UuidError, Key KeyError);

/// Why 4096 bytes are not a usable superblock. The variants are listed in the order in which they
/// are checked, which is also the order of Linux.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum SuperblockError {
    /// Fewer than 4096 bytes.
    #[error("{found} bytes are too few for a superblock, which has {wanted} bytes")]
    Truncated {
        /// Bytes of a superblock.
        wanted: usize,
        /// Bytes given.
        found: usize,
    },
    /// The field with the superblock's own sector is wrong.
    #[error("not a bcache superblock: it gives its own sector as {found}, not {wanted}")]
    BadOffset {
        /// Sector of a superblock.
        wanted: u64,
        /// What the field says.
        found: u64,
    },
    /// The magic is not that of bcache.
    #[error("not a bcache superblock: the magic number is {found}")]
    BadMagic {
        /// The sixteen bytes found.
        found: Uuid,
    },
    /// The magic is damaged: it used to be that of bcache.
    #[error("the magic number is damaged: it is {found}")]
    DamagedMagic {
        /// The sixteen bytes found.
        found: Uuid,
    },
    /// The count of journal buckets exceeds what the superblock can hold, so not even the checksum
    /// can be computed.
    #[error("it lists {found} journal buckets, but there is room for {limit} only")]
    TooManyJournalBuckets {
        /// Buckets that fit.
        limit: u64,
        /// Buckets announced.
        found: u64,
    },
    /// The checksum does not match.
    #[error("bad checksum: computed {wanted:#018x}, found {found:#018x}")]
    BadChecksum {
        /// Sum over the bytes.
        wanted: u64,
        /// Sum stored.
        found: u64,
    },
    /// The device has no uuid.
    #[error("the device's uuid is zero")]
    NilUuid,
    /// The block size is below the device's logical block.
    #[error("the block size of {found} sectors is smaller than the device's own of {wanted} sectors")]
    BlockBelowDevice {
        /// Logical block of the device.
        wanted: u64,
        /// Block size of the superblock.
        found: u64,
    },
    /// A backing device's data would overlap its superblock.
    #[error("the data offset of sector {found} is before the first allowed sector, {wanted}")]
    DataOffsetTooSmall {
        /// First allowed sector.
        wanted: u64,
        /// Data offset found.
        found: u64,
    },
    /// The version is none of those that exist.
    #[error("unsupported superblock version {found}")]
    UnsupportedVersion {
        /// Version found.
        found: u64,
    },
    /// Unknown bits in the compatible features.
    #[error("unsupported compatible features {found:#x}")]
    UnsupportedCompat {
        /// Unknown bits.
        found: u64,
    },
    /// Unknown bits in the read-only compatible features.
    #[error("unsupported read-only compatible features {found:#x}")]
    UnsupportedRoCompat {
        /// Unknown bits.
        found: u64,
    },
    /// Unknown bits in the incompatible features.
    #[error("unsupported incompatible features {found:#x}")]
    UnsupportedIncompat {
        /// Unknown bits.
        found: u64,
    },
    /// Large buckets in their first form, which no program creates any more.
    #[error(
        "large buckets in the obsolete form, which kernels open read-only: read its volumes with a \
         kernel, then format it again"
    )]
    ObsoleteLargeBucket,
    /// More buckets than can be addressed.
    #[error("{found} buckets are more than the format can address")]
    TooManyBuckets {
        /// Buckets found.
        found: u64,
    },
    /// Fewer buckets than a set needs.
    #[error("{found} buckets are too few: at least {wanted} are needed")]
    NotEnoughBuckets {
        /// Least number.
        wanted: u64,
        /// Buckets found.
        found: u64,
    },
    /// The block size is not a power of two.
    #[error("the block size of {found} sectors is not a power of two")]
    BlockNotPowerOfTwo {
        /// Block size found.
        found: u64,
    },
    /// The block size is above a page.
    #[error("the block size of {found} sectors is larger than a page of {limit} sectors")]
    BlockAbovePage {
        /// Sectors of a page.
        limit: u64,
        /// Block size found.
        found: u64,
    },
    /// The bucket size is not a power of two.
    #[error("the bucket size of {found} sectors is not a power of two")]
    BucketNotPowerOfTwo {
        /// Bucket size found.
        found: u64,
    },
    /// The logarithm of the bucket size is out of range.
    #[error("the bucket size of 2^{found} sectors is larger than 2^{limit} sectors")]
    BucketLogarithmTooLarge {
        /// Largest logarithm.
        limit: u32,
        /// Logarithm found.
        found: u32,
    },
    /// The bucket size is below a page.
    #[error("the bucket size of {found} sectors is smaller than a page of {wanted} sectors")]
    BucketBelowPage {
        /// Sectors of a page.
        wanted: u64,
        /// Bucket size found.
        found: u64,
    },
    /// The buckets reach beyond the end of the device.
    #[error("the device is too small: the superblock describes {wanted} sectors, but it has {found}")]
    DeviceTooSmall {
        /// Sectors of all buckets (saturated).
        wanted: u64,
        /// Sectors of the device.
        found: u64,
    },
    /// A cache device belongs to no set.
    #[error("the cache set's uuid is zero")]
    NilSetUuid,
    /// The device's number in the set, or the size of the set, makes no sense.
    #[error("bad number of the cache device in its set: {index}, in a set of {count}")]
    BadDeviceNumber {
        /// Devices of the set.
        count: u16,
        /// Number of this one.
        index: u16,
    },
    /// The journal buckets are not one consecutive run from the first bucket on.
    #[error("journal bucket {index} is bucket {found} instead of {wanted}: the journal is not consecutive")]
    JournalNotSequential {
        /// Index in the list.
        index: u64,
        /// Bucket that belongs there.
        wanted: u64,
        /// Bucket found there.
        found: u64,
    },
    /// The journal reaches beyond the last bucket.
    #[error("the journal ends at bucket {wanted}, but there are only {found} buckets")]
    JournalBeyondEnd {
        /// End of the journal, in buckets.
        wanted: u64,
        /// Number of buckets.
        found: u64,
    },
    /// The first bucket overlaps the superblock.
    #[error(
        "the first bucket starts at sector {found}, inside the superblock, which ends at sector \
         {wanted}"
    )]
    FirstBucketInSuperblock {
        /// End of the superblock.
        wanted: u64,
        /// Start of the first bucket.
        found: u64,
    },
    /// The set spans several devices, which no kernel since 5.10 can run. Some kernels mistake such
    /// a device for a whole set, and lose data.
    #[error("the cache set has {found} devices; sets of more than one are not supported")]
    SeveralDevices {
        /// Devices of the set.
        found: u16,
    },
    /// A replacement policy that does not exist. (A kernel accepts it silently.)
    #[error("unknown replacement policy {found}")]
    UnknownReplacement {
        /// Value found.
        found: u8,
    },
    /// A cache mode that does not exist. (A kernel accepts it silently.)
    #[error("unknown cache mode {found}")]
    UnknownCacheMode {
        /// Value found.
        found: u8,
    },
    /// A backing device's data would start beyond its end.
    #[error("the data offset of sector {found} is beyond the end of the device at sector {limit}")]
    DataOffsetBeyondEnd {
        /// Sectors of the device.
        limit: u64,
        /// Data offset found.
        found: u64,
    },
}

/// Why a key cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The key extends past the end of the key area.
    #[error("it takes {wanted} words, but only {found} are left")]
    Truncated {
        /// Words of the key.
        wanted: usize,
        /// Words left.
        found: usize,
    },
    /// More pointers than any program writes.
    #[error("it has {found} pointers, but at most {limit} are supported")]
    TooManyPointers {
        /// Most pointers.
        limit: usize,
        /// Pointers announced.
        found: usize,
    },
    /// The end offset is beyond the key space.
    #[error("its end {found:#x} is beyond the largest offset")]
    EndTooLarge {
        /// End found.
        found: u64,
    },
    /// The extent starts before zero.
    #[error("its size {size} exceeds its end {end}")]
    SizeExceedsEnd {
        /// Size in sectors.
        size: u16,
        /// End in sectors.
        end: u64,
    },
    /// A key that must point to data has no pointer.
    #[error("it has no pointer")]
    NoPointer,
    /// A key that must cover something is empty.
    #[error("its size is zero")]
    ZeroSize,
    /// A child key is marked dirty.
    #[error("it points to a child node and is marked dirty")]
    DirtyChild,
    /// A pointer to a device that the set does not have.
    #[error("it points to device {found}, but the set has only device 0")]
    NoSuchDevice {
        /// Device number found.
        found: u16,
    },
    /// A pointer into a bucket that cannot hold data.
    #[error("it points to bucket {found}, outside {first}..{limit}")]
    BucketOutOfRange {
        /// First bucket that can be pointed to.
        first: u64,
        /// Number of buckets.
        limit: u64,
        /// Bucket found.
        found: u64,
    },
    /// An extent that crosses the end of its bucket.
    #[error("its {size} sectors from sector {sector} on cross the end of the bucket")]
    CrossesBucket {
        /// First sector of the data.
        sector: u64,
        /// Sectors of the extent.
        size: u16,
    },
    /// A child or a table does not begin at the start of its bucket. (A kernel does not check.)
    #[error("it points to sector {sector}, which is not the start of a bucket")]
    NotAtBucketStart {
        /// Sector found.
        sector: u64,
    },
    /// The size of a node or table is not a whole number of blocks. (A kernel does not check.)
    #[error("its size of {size} sectors is not a whole number of blocks")]
    NotWholeBlocks {
        /// Size found.
        size: u16,
    },
    /// A key is out of order in its list. (A kernel does not check.)
    #[error("it starts at {start}, before the end of the previous key at {previous}")]
    OutOfOrder {
        /// End of the key before.
        previous: Position,
        /// Start of this one.
        start: Position,
    },
}

/// A bad key in a list, and its index.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("key {index} (at word {word}): {error}")]
pub struct KeyListError {
    /// Number of the key in the list, from 0.
    pub index: usize,
    /// Word of the list at which it starts.
    pub word: usize,
    /// What is wrong with it.
    pub error: KeyError,
}

/// Why a set of a B-tree node cannot be used. The variants are in the order of the checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum BsetError {
    /// The node's first header has sequence number zero: nothing was ever written here.
    #[error("bad btree header: the sequence number is zero")]
    ZeroSeq,
    /// The version is not supported.
    #[error("unsupported version {found}")]
    UnsupportedVersion {
        /// Version found.
        found: u32,
    },
    /// The set does not fit in what is left of the node.
    #[error("bad btree header: the set takes {wanted} bytes, but the node has only {found} left")]
    BeyondNode {
        /// Bytes of the set.
        wanted: u64,
        /// Bytes left in the node.
        found: usize,
    },
    /// The magic is not that of this cache set's nodes.
    #[error("bad magic: wanted {wanted:#018x}, found {found:#018x}")]
    BadMagic {
        /// Magic of the cache set's nodes.
        wanted: u64,
        /// Magic found.
        found: u64,
    },
    /// The checksum does not match.
    #[error("bad checksum: computed {wanted:#018x}, found {found:#018x}")]
    BadChecksum {
        /// Sum over the bytes.
        wanted: u64,
        /// Sum stored.
        found: u64,
    },
    /// A set without keys that is not the node's first.
    #[error("empty set")]
    Empty,
    /// The node's sequence number appears after the end of its log: a set in between was lost.
    #[error("corrupted btree: a set of this node is beyond the end of its log at block {end_block}")]
    StraySet {
        /// Block at which the log ends.
        end_block: u32,
    },
    /// A key of the set is malformed.
    #[error(transparent)]
    Key(#[from] KeyListError),
}

/// Why a B-tree node cannot be read, and which of its sets failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("bset at block {block}: {error}")]
pub struct NodeError {
    /// Block of the node at which the set starts.
    pub block: u32,
    /// What is wrong with it.
    pub error: BsetError,
}

/// Why bytes are not a usable journal entry. The variants are in the order of the checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum JsetError {
    /// Not even a header fits: this is the end of the bucket.
    #[error("{found} bytes are left, too few for an entry's {wanted}")]
    Truncated {
        /// Bytes of an entry without keys.
        wanted: usize,
        /// Bytes left.
        found: usize,
    },
    /// The magic is not that of this cache set's journal: no entry was written here.
    #[error("bad magic: wanted {wanted:#018x}, found {found:#018x}")]
    BadMagic {
        /// Magic of the cache set's journal.
        wanted: u64,
        /// Magic found.
        found: u64,
    },
    /// The entry is larger than the format allows, or larger than the rest of the bucket.
    #[error("it takes {wanted} bytes, but at most {limit} are possible here")]
    TooLarge {
        /// Bytes of the entry.
        wanted: u64,
        /// Bytes possible.
        limit: usize,
    },
    /// The checksum does not match: the entry is torn or damaged.
    #[error("bad checksum: computed {wanted:#018x}, found {found:#018x}")]
    BadChecksum {
        /// Sum over the bytes.
        wanted: u64,
        /// Sum stored.
        found: u64,
    },
    /// The version is not supported. (A kernel does not check.)
    #[error("unsupported version {found}")]
    UnsupportedVersion {
        /// Version found.
        found: u32,
    },
    /// The sequence numbers contradict each other. (A kernel does not check.)
    #[error("entry {seq} says that it needs entries from {last_seq} on")]
    BadSeq {
        /// Sequence number of the entry.
        seq: u64,
        /// Oldest entry it needs.
        last_seq: u64,
    },
    /// The key of the root node is malformed.
    #[error("bad btree root: {0}")]
    Root(KeyError),
    /// The key of the uuid table is malformed.
    #[error("bad uuid pointer: {0}")]
    Uuids(KeyError),
    /// A key is malformed. (A kernel does not check, and panics on a key of size zero.)
    #[error(transparent)]
    Key(#[from] KeyListError),
}

impl JsetError {
    /// Returns true if the bytes are not a (whole) entry, which is how the log in a bucket ends.
    /// The other errors are entries with a good checksum that nevertheless make no sense. They must
    /// not be mistaken for the end of the log.
    #[must_use]
    pub const fn is_end_of_log(&self) -> bool {
        matches!(
            self,
            Self::Truncated { .. } | Self::BadMagic { .. } | Self::TooLarge { .. } | Self::BadChecksum { .. }
        )
    }
}

/// Why bytes are not a usable priority set. The variants are in the order of the checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum PrioError {
    /// Too few bytes for the meta area of a bucket.
    #[error("{found} bytes are too few for a priority set, which takes at least {wanted}")]
    Truncated {
        /// Least bytes.
        wanted: usize,
        /// Bytes given.
        found: usize,
    },
    /// The checksum does not match.
    #[error("bad csum reading priorities: computed {wanted:#018x}, found {found:#018x}")]
    BadChecksum {
        /// Sum over the bytes.
        wanted: u64,
        /// Sum stored.
        found: u64,
    },
    /// The magic is not that of this cache set's priorities.
    #[error("bad magic reading priorities: wanted {wanted:#018x}, found {found:#018x}")]
    BadMagic {
        /// Magic of the cache set's priorities.
        wanted: u64,
        /// Magic found.
        found: u64,
    },
}

/// Why bytes are not a uuid table. The table has no checksum: nothing else can be detected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum UuidError {
    /// The length is not a whole number of slots.
    #[error("{found} bytes are not a whole number of slots of {slot} bytes")]
    NotWholeSlots {
        /// Bytes of a slot.
        slot: usize,
        /// Bytes given.
        found: usize,
    },
}
