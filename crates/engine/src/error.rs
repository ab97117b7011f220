//! What can fail, for those who must decide, and the context, for those who must understand.

use alloc::boxed::Box;
use bcached_env::{IoError, OutOfReach};
use bcached_format::Inode;
use bcached_node::NodeError;
use thiserror::Error;

/// What the engine was doing when something failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Doing {
    /// Reading or writing cached data.
    Data,
    /// Writing a journal entry.
    Journal,
    /// Replaying what a former process noted.
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

impl core::fmt::Display for Doing {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Data => "cached data",
            Self::Journal => "journal entry",
            Self::Note => "note of the former process",
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

/// Why work was refused or failed. Cheap to clone: a latched failure is handed to everybody.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// A device failed.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: Doing,
        /// The device's answer.
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
    /// The set has failed before: nothing more is written. The first reason.
    #[error("the cache set stopped writing after a failure: {0}")]
    Failed(Box<Error>),
    /// The volume goes on without its cache from now on; the request that met this is carried out without it.
    #[error("the volume has left its cache")]
    Uncached,
    /// The volume has no backing device that could be served without the cache.
    #[error("the volume lives in the cache alone: it cannot be detached or attached")]
    FlashOnly,
    /// The volume does not live in the cache alone.
    #[error("the volume has a backing device")]
    HasBacking,
    /// What was set out to the set knows nothing of: it has been opened anew since.
    #[error("the cache set was opened anew meanwhile, and nothing was done")]
    OpenedAnew,
    /// The volume is served without the cache already.
    #[error("the volume is not attached")]
    NotAttached,
    /// The volume is served through the cache already.
    #[error("the volume is attached already")]
    Attached,
    /// The volume is being served.
    #[error("the volume is being served")]
    Served,
    /// Nobody can serve the volume any more.
    #[error("the volume is being forgotten")]
    BeingForgotten,
    /// A volume in the cache alone that could not be filled.
    #[error("there is room for {sectors_max} sectors, and {sectors} are asked for")]
    NoRoom {
        /// Its size, in sectors.
        sectors: u64,
        /// The largest that can be filled, in sectors.
        sectors_max: u64,
    },
    /// A volume in the cache alone must have whole blocks, and one at least.
    #[error("{sectors} sectors are not whole blocks of {block_sectors}")]
    NotWholeBlocks {
        /// Its size, in sectors.
        sectors: u64,
        /// A block of the set, in sectors.
        block_sectors: u64,
    },
    /// A volume cannot become so large or so small.
    #[error("the volume can have {sectors_min} to {sectors_max} sectors, and {sectors} are asked for")]
    Size {
        /// What is asked for, in sectors.
        sectors: u64,
        /// The least that it can have, in sectors.
        sectors_min: u64,
        /// The most that it can have, in sectors.
        sectors_max: u64,
    },
    /// The volume is on its way to or from the cache already, or to another size.
    #[error("the volume is being attached, detached or resized already")]
    OnItsWay,
    /// The set is being stopped.
    #[error("the cache set is being stopped")]
    Stopping,
    /// Whoever asked for it has given it up.
    #[error("it was cancelled")]
    Cancelled,
    /// The data of a request lies in memory of others, who have taken it back.
    #[error("{0}")]
    OutOfReach(OutOfReach),
    /// The journal was left so full that its replay has no room for the entries it must write itself.
    #[error(
        "the journal is too full to be replayed: no room for what the replay must write; the set is left as it was"
    )]
    JournalFull,
    /// No bucket can be had and none can be freed without writing dirty data back.
    #[error("no space left in the cache: everything is dirty or metadata")]
    NoSpace,
    /// A flush of the backing device failed before: what it covered may be lost.
    #[error("an earlier flush of the backing device failed: writes it should have covered may be lost")]
    LostWrites,
    /// The memory for B-tree nodes does not suffice for this set's nodes and the height of its tree.
    #[error("the memory for btree nodes is too small: {budget} bytes, this cache set needs {needed}")]
    NodeBudget {
        /// The limit that was set, in bytes.
        budget: usize,
        /// The least that would do, in bytes.
        needed: usize,
    },
    /// There is no memory for the table of the set's buckets, or there are more than a table can have.
    #[error("no memory for {buckets} buckets: their table takes {needed} bytes")]
    BucketMemory {
        /// Buckets of the set.
        buckets: u64,
        /// What their table takes, in bytes.
        needed: u64,
    },
    /// No such volume.
    #[error("no such volume")]
    NoVolume,
    /// The request is outside the volume or not in whole sectors.
    #[error("request outside the volume: sector {sector}, {sectors} sectors, volume of {volume_sectors}")]
    Range {
        /// First sector asked for.
        sector: u64,
        /// Length asked for.
        sectors: u64,
        /// The volume's size.
        volume_sectors: u64,
    },
    /// What is asked for depends on what is dirty, and not all of that has been counted since the start.
    #[error("the index is still being read after the start ({percent}%): try again when it has been")]
    NotWalked {
        /// How much of it has been.
        percent: u64,
    },
    /// The tree contradicts itself or the other structures.
    #[error("inconsistent metadata: {0}")]
    Inconsistent(&'static str),
    /// Dirty data lies beyond the end of the backing device.
    #[error(
        "the backing device ends at sector {sectors}, but the cache holds dirty data for it beyond: it was cut short"
    )]
    TooSmall {
        /// Where it ends.
        sectors: u64,
    },
    /// The backing device has dirty data in a cache that is not here.
    #[error(
        "the backing device has dirty data in cache set {0}, which is not this one: refusing to serve it without"
    )]
    DirtyElsewhere(bcached_format::Uuid),
    /// The backing device is dirty but the set's table does not know it.
    #[error("the backing device is marked dirty for this set, but the set does not know it")]
    DirtyUnknown,
    /// The backing device knows of a journal entry that the cache has never had.
    #[error(
        "the cache is an older copy of itself: the backing device was used with journal entry {entry}, and the newest that \
         the cache has is {newest}"
    )]
    OlderCache {
        /// The entry that the backing device knows of.
        entry: u64,
        /// The newest that is there.
        newest: u64,
    },
    /// The set knows a later state of the backing device.
    #[error("the backing device is an older copy of itself: the cache holds data of a later state of it")]
    OlderBacking,
    /// The table of volumes has lost the number of a backing device that says *clean*, and something is dirty under it.
    #[error(
        "the table of volumes has lost this volume, and dirty data stands under its number {}: it is newer than the device, or \
         another volume's", number.0
    )]
    LostNumber {
        /// The number that the device says.
        number: Inode,
    },
    /// Sizes that leave no room to append to nodes or to the journal.
    #[error(
        "cannot run a cache with buckets of {bucket_sectors} sectors, blocks of {block_sectors} and {journal_buckets} \
         journal buckets: a bucket must hold two blocks, and the journal four buckets"
    )]
    Sizes {
        /// A bucket, in sectors.
        bucket_sectors: u64,
        /// A block, in sectors.
        block_sectors: u64,
        /// Buckets of the journal.
        journal_buckets: u64,
    },
    /// The backing device's block size does not fit the set's.
    #[error("block size of the backing device ({backing} sectors) is smaller than the set's ({set})")]
    BlockSize {
        /// The backing device's, in sectors.
        backing: u64,
        /// The set's, in sectors.
        set: u64,
    },
    /// A device that is to take the place of the one under a volume is not what that was.
    #[error("it is not as it was: {0}")]
    NotAsItWas(&'static str),
    /// The table of volumes has no free slot.
    #[error("no room for another volume: all {0} slots of the table are used up")]
    NoSlot(usize),
    /// A device with the same UUID is attached already.
    #[error("a backing device with this UUID is attached already")]
    Duplicate,
    /// Bytes of the format are damaged or not acceptable.
    #[error("{doing}: {source}")]
    Format {
        /// Which structure.
        doing: Doing,
        /// What is wrong.
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
        "the backing device is attached to cache set {0}, which is not this one: its cached data there would become stale"
    )]
    OtherSet(bcached_format::Uuid),
    /// No valid journal entry on a device that says it has been started.
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
    /// A newer entry stands behind a damaged one, so that others before and behind it may be missing too.
    #[error(
        "journal entry {sequence} is newer than {found}, but stands behind one that is damaged: what was written since \
         {found} would be lost"
    )]
    JournalHidden {
        /// The newest hidden entry.
        sequence: u64,
        /// The newest one that is found.
        found: u64,
    },
}

impl Error {
    /// A device is not there any more, or takes nothing any more until it is opened anew: the same request may succeed then.
    #[must_use]
    pub const fn is_absence(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind.is_final())
    }

    /// An I/O error with what was being done; for `map_err`.
    pub fn io(doing: Doing) -> impl FnOnce(IoError) -> Self {
        move |source| Self::Io { doing, source }
    }
}
