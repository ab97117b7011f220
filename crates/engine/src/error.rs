//! Errors: the kinds that callers act on, and the context that people need to understand them.

use alloc::boxed::Box;
use bcached_env::{BufferUnavailable, IoError};
use bcached_format::Inode;
use bcached_node::NodeError;
use thiserror::Error;

/// What the engine was doing when something failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ErrorContext {
    /// Reading or writing cached data.
    Data,
    /// Writing a journal entry.
    Journal,
    /// Replaying what an earlier process noted.
    Note,
    /// Reading or writing a B-tree node.
    Node,
    /// Reading or writing generations and priorities.
    Priorities,
    /// Reading or writing the table of volumes.
    Uuids,
    /// Reading or writing a superblock.
    Superblock,
    /// Flushing the cache device.
    CacheFlush,
    /// Flushing the backing device.
    BackingFlush,
    /// Reading or writing the backing device.
    Backing,
}

impl core::fmt::Display for ErrorContext {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Data => "cached data",
            Self::Journal => "journal entry",
            Self::Note => "note of an earlier process",
            Self::Node => "btree node",
            Self::Priorities => "priorities",
            Self::Uuids => "uuid table",
            Self::Superblock => "superblock",
            Self::CacheFlush => "flush of the cache device",
            Self::BackingFlush => "flush of the backing device",
            Self::Backing => "backing device",
        })
    }
}

/// Why work was refused or failed. Cheap to clone: every waiter gets a latched failure.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A device failed.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: ErrorContext,
        /// The device's error.
        source: IoError,
    },
    /// A B-tree node is damaged. Its key range is not served; it is never read as a hole.
    #[error("btree node at sector {sector} is damaged: {source}")]
    Node {
        /// First sector of the node on the cache device.
        sector: u64,
        /// What is wrong with it.
        source: Box<NodeError>,
    },
    /// The set has failed earlier: nothing more is written. Holds the first reason.
    #[error("the cache set stopped writing after a failure: {0}")]
    Failed(Box<Error>),
    /// The volume continues without its cache from now on; the request that met this is carried out
    /// without it.
    #[error("the volume is now served without its cache")]
    Uncached,
    /// The volume is flash-only: it has no backing device that could be served without the cache.
    #[error("the volume is flash-only: it has no backing device, so it cannot be attached or detached")]
    FlashOnly,
    /// The volume is not flash-only.
    #[error("the volume is not flash-only: it has a backing device")]
    HasBacking,
    /// The set knows nothing of the operation that was begun: it has been reopened since.
    #[error("the cache set was reopened during the operation, and nothing was done")]
    Reopened,
    /// The volume is already served without the cache.
    #[error("the volume is not attached")]
    NotAttached,
    /// The volume is already served through the cache.
    #[error("the volume is already attached")]
    Attached,
    /// The volume is being served.
    #[error("the volume is being served")]
    Served,
    /// The volume is being forgotten, so it cannot be served.
    #[error("the volume is being forgotten")]
    BeingForgotten,
    /// A flash-only volume that could not be filled.
    #[error("not enough space in the cache: {sectors} sectors requested, at most {sectors_max} possible")]
    NoRoom {
        /// Requested size, in sectors.
        sectors: u64,
        /// The largest size that can be filled, in sectors.
        sectors_max: u64,
    },
    /// A flash-only volume must consist of whole blocks, at least one.
    #[error(
        "the size of {sectors} sectors is not a whole number of blocks of {block_sectors} sectors, at \
         least one"
    )]
    NotWholeBlocks {
        /// Requested size, in sectors.
        sectors: u64,
        /// Block size of the set, in sectors.
        block_sectors: u64,
    },
    /// The volume cannot have this size.
    #[error(
        "the size of {sectors} sectors is out of range: the volume can have {sectors_min} to \
         {sectors_max} sectors"
    )]
    Size {
        /// The requested size, in sectors.
        sectors: u64,
        /// The minimum size, in sectors.
        sectors_min: u64,
        /// The maximum size, in sectors.
        sectors_max: u64,
    },
    /// The volume is already being attached, detached or resized.
    #[error("the volume is already being attached, detached or resized")]
    VolumeBusy,
    /// The set is being stopped.
    #[error("the cache set is being stopped")]
    Stopping,
    /// The operation was cancelled.
    #[error("the operation was cancelled")]
    Cancelled,
    /// The data of a request lies in memory of another process, which has taken it back.
    #[error("{0}")]
    BufferUnavailable(BufferUnavailable),
    /// The journal was left so full that its replay has no room for the entries that it must write.
    #[error(
        "the journal is too full to be replayed: it has no room for the entries that the replay must \
         write; the set is left as it was"
    )]
    JournalFull,
    /// No bucket is available, and none can be freed without writing dirty data back.
    #[error("no space left in the cache: all of it holds dirty data or metadata")]
    NoSpace,
    /// An earlier flush of the backing device failed: the writes it should have covered may be
    /// lost.
    #[error(
        "an earlier flush of the backing device failed: writes that it should have made durable may be \
         lost"
    )]
    LostWrites,
    /// The memory for B-tree nodes is too small for this set's nodes and the height of its tree.
    #[error(
        "not enough memory for btree nodes: {budget} bytes are configured, this cache set needs \
         {needed} bytes"
    )]
    NodeBudget {
        /// The configured limit, in bytes.
        budget: usize,
        /// The minimum, in bytes.
        needed: usize,
    },
    /// There is no memory for the bucket table of the set, or the set has more buckets than a table
    /// can hold.
    #[error("no memory for the table of {buckets} buckets, which needs {needed} bytes")]
    BucketMemory {
        /// Buckets of the set.
        buckets: u64,
        /// What their table takes, in bytes.
        needed: u64,
    },
    /// No such volume.
    #[error("no such volume")]
    NoVolume,
    /// The request is outside the volume or does not consist of whole sectors.
    #[error(
        "request outside the volume: {sectors} sectors from sector {sector} on, but the volume has \
         {volume_sectors} sectors"
    )]
    Range {
        /// First sector requested.
        sector: u64,
        /// Length requested, in sectors.
        sectors: u64,
        /// The volume's size, in sectors.
        volume_sectors: u64,
    },
    /// The request depends on how much is dirty, and that has not all been counted since the start.
    #[error("the index is still being read after the start ({percent}%): try again when that is complete")]
    NotWalked {
        /// Percentage of the index read so far.
        percent: u64,
    },
    /// The tree contradicts itself or the other structures.
    #[error("inconsistent metadata: {0}")]
    Inconsistent(&'static str),
    /// Dirty data lies beyond the end of the backing device.
    #[error(
        "the backing device ends at sector {sectors}, but the cache holds dirty data beyond that \
         sector: the device was truncated"
    )]
    TooSmall {
        /// Size of the backing device, in sectors.
        sectors: u64,
    },
    /// The backing device has dirty data in a cache that is not present.
    #[error(
        "the backing device has dirty data in another cache set ({0}), and is not served without that set"
    )]
    DirtyElsewhere(bcached_format::Uuid),
    /// The backing device is dirty, but the set's table does not list it.
    #[error("the backing device is marked dirty for this set, but the set does not know it")]
    DirtyUnknown,
    /// The backing device records a journal entry that the cache has never had.
    #[error(
        "the cache is an older copy of itself: the backing device was used with journal entry {entry}, \
         but the newest in the cache is {newest}"
    )]
    OlderCache {
        /// The entry that the backing device records.
        entry: u64,
        /// The newest entry in the cache.
        newest: u64,
    },
    /// The set knows a later state of the backing device.
    #[error("the backing device is an older copy of itself: the cache holds data of a later state of it")]
    OlderBacking,
    /// The table of volumes has lost the number of a backing device that is marked *clean*, and
    /// there is dirty data under that number.
    #[error(
        "this volume is missing from the table of volumes, and there is dirty data under its number {}: \
         that data is newer than the device, or belongs to another volume", number.0
    )]
    LostNumber {
        /// The number that the device records.
        number: Inode,
    },
    /// The sizes leave no room to append to nodes or to the journal.
    #[error(
        "cannot run a cache with buckets of {bucket_sectors} sectors, blocks of {block_sectors} sectors \
         and {journal_buckets} journal buckets: a bucket must hold two blocks, and the journal needs four \
         buckets"
    )]
    Sizes {
        /// Bucket size, in sectors.
        bucket_sectors: u64,
        /// Block size, in sectors.
        block_sectors: u64,
        /// Number of journal buckets.
        journal_buckets: u64,
    },
    /// The backing device's block size does not fit the set's.
    #[error(
        "the block size of the backing device ({backing} sectors) is smaller than that of the set \
         ({set} sectors)"
    )]
    BlockSize {
        /// Block size of the backing device, in sectors.
        backing: u64,
        /// Block size of the set, in sectors.
        set: u64,
    },
    /// A device that is to replace the one under a volume does not match it.
    #[error("the device is not accepted: {0}")]
    DeviceMismatch(&'static str),
    /// The table of volumes has no free slot.
    #[error("no room for another volume: all {0} slots of the volume table are in use")]
    NoSlot(usize),
    /// A device with the same UUID is already attached.
    #[error("a backing device with this UUID is already attached")]
    Duplicate,
    /// On-disk structures are damaged or not acceptable.
    #[error("{doing}: {source}")]
    Format {
        /// Which structure.
        doing: ErrorContext,
        /// What is wrong with it.
        source: bcached_format::FormatError,
    },
    /// The device is a backing device.
    #[error("this is a backing device, not a cache device")]
    NotACache,
    /// The device is a cache device.
    #[error("this is a cache device, not a backing device")]
    NotABacking,
    /// The backing device belongs to another cache set.
    #[error(
        "the backing device is attached to another cache set ({0}): its cached data there would become stale"
    )]
    OtherSet(bcached_format::Uuid),
    /// A device marked as started has no valid journal entry.
    #[error("no journal entries found")]
    NoJournal,
    /// Journal entries that are needed are missing.
    #[error("journal entries {from}-{to} are missing")]
    JournalGap {
        /// First missing sequence.
        from: u64,
        /// Last missing sequence.
        to: u64,
    },
    /// A newer entry lies behind a damaged one, so others before and after it may be missing too.
    #[error(
        "journal entry {sequence} is newer than entry {found}, but lies behind one that is damaged: \
         what was written since entry {found} would be lost"
    )]
    JournalHidden {
        /// The newest hidden entry.
        sequence: u64,
        /// The newest entry found.
        found: u64,
    },
}

impl Error {
    /// Returns true if a device is gone, or accepts nothing until it is reopened: the same request
    /// may succeed then.
    #[must_use]
    pub const fn is_absence(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind.is_final())
    }

    /// Returns a function for `map_err` that adds what was being done to an I/O error.
    pub fn io(doing: ErrorContext) -> impl FnOnce(IoError) -> Self {
        move |source| Self::Io { doing, source }
    }
}
