//! Types of the findings of a check: a kind with typed fields, and a place.
//!
//! An *error* breaks an invariant that every image keeps at rest, after any crash. A *warning* is
//! something that a crash may leave behind, or that only another program would have trouble with.

use bcached_format::{
    Inode, JsetError, Key, KeyError, KeyListError, NodeError, Position, PrioError, SuperblockError, Uuid,
    UuidError,
};
use serde::{Serialize, Serializer};
use std::fmt;
use thiserror::Error;

/// How bad a finding is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// A crash may leave it behind, or it affects only other programs.
    Warning,
    /// An invariant of the format is broken.
    Error,
}

/// The device that a finding is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The cache device.
    Cache,
    /// The backing device with this index in the order given.
    Backing(usize),
}

/// The structure that a finding is about.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Structure {
    /// A superblock.
    Superblock,
    /// A journal entry, or the journal as a whole.
    Journal,
    /// The chain of priority sets.
    Priorities,
    /// The uuid table.
    UuidTable,
    /// A node of the B-tree.
    Node,
    /// The combined content of the leaves and the journal.
    Content,
}

/// A node of the B-tree, identified by its place on disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct NodeLocation {
    /// Level of the node; 0 is a leaf.
    pub level: u16,
    /// First sector of the node.
    pub sector: u64,
    /// The node covers the key space after this ..
    #[serde(serialize_with = "as_text")]
    pub low: Position,
    /// .. up to and including this.
    #[serde(serialize_with = "as_text")]
    pub high: Position,
}

/// The place of a finding.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Location {
    /// The device.
    pub device: Device,
    /// The structure.
    pub structure: Structure,
    /// Sector at which the structure, or the affected part of it, starts; `None` if the finding is
    /// about the whole structure.
    pub sector: Option<u64>,
    /// The node, for findings in the tree.
    pub node: Option<NodeLocation>,
}

/// What a bucket is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BucketUse {
    /// Unused.
    Free,
    /// The bucket lies before the first usable one.
    Superblock,
    /// The journal.
    Journal,
    /// The priority chain.
    Priorities,
    /// The uuid table.
    UuidTable,
    /// A node of the B-tree.
    Node,
    /// Cached data.
    Data,
}

/// The kind of a finding.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum DamageKind {
    /// The device returns a read error.
    #[error("cannot read: {0}")]
    Unreadable(String),
    /// Not a superblock, or one that is not supported.
    #[error("{0}")]
    Superblock(SuperblockError),
    /// A backing device in place of a cache device.
    #[error("this is a backing device, not a cache device")]
    NotACache,
    /// A cache device in place of a backing device.
    #[error("this is a cache device, not a backing device")]
    NotABacking,
    /// The backing device is attached to another set.
    #[error("the backing device belongs to the cache set {found}")]
    OtherSet {
        /// The set that it is attached to.
        found: Uuid,
    },
    /// The backing device cannot be attached because its blocks are too small.
    #[error("the backing device's block of {found} sectors is smaller than the set's of {wanted} sectors")]
    BackingBlockTooSmall {
        /// Block of the set, in sectors.
        wanted: u64,
        /// Block of the backing device, in sectors.
        found: u64,
    },
    /// The backing device is dirty, but the set does not know it.
    #[error("the backing device is marked dirty, but its uuid {uuid} is not in the uuid table")]
    DirtyButUnknown {
        /// Uuid of the backing device.
        uuid: Uuid,
    },
    /// The set has no journal.
    #[error("no journal entries found")]
    NoJournalEntries,
    /// A journal entry has a good checksum, but makes no sense.
    #[error("{0}")]
    JournalEntry(JsetError),
    /// An incomplete journal entry is newer than all complete ones.
    #[error("an entry newer than {newest} is incomplete: torn by a crash, or damaged ({error})")]
    JournalTorn {
        /// Newest complete entry.
        newest: u64,
        /// What is wrong with the incomplete entry.
        error: JsetError,
    },
    /// A newer entry follows a damaged one, where a start does not look for it.
    #[error(
        "entry {seq} is newer than {newest}, but follows a damaged one: a start that does not search there loses it"
    )]
    JournalHidden {
        /// The hidden entry.
        seq: u64,
        /// The newest one that is found.
        newest: u64,
    },
    /// Entries that are still needed are missing.
    #[error("entries {first} to {last} are missing, but the newest entry needs {last_seq} to {newest}")]
    JournalMissing {
        /// First of a run of missing entries.
        first: u64,
        /// Last of the run.
        last: u64,
        /// Oldest needed entry.
        last_seq: u64,
        /// The newest entry.
        newest: u64,
    },
    /// Two entries have the same sequence number.
    #[error("entry {seq} is also at sector {other}")]
    JournalDuplicate {
        /// The sequence number.
        seq: u64,
        /// Sector of the other entry.
        other: u64,
    },
    /// A newer entry needs older entries than its predecessor did.
    #[error(
        "entry {seq} needs entries from {last_seq} on, but an older one needed them only from {previous} on"
    )]
    JournalLastSeqFalls {
        /// The newer entry.
        seq: u64,
        /// Oldest entry it needs.
        last_seq: u64,
        /// The oldest entry that an older entry needs.
        previous: u64,
    },
    /// A kernel's search for entries, which does not read all buckets, gives a different result.
    #[error(
        "a kernel, which does not read all buckets, finds {} as the newest entry instead of {wanted}",
        found.map_or_else(|| "none".to_owned(), |found| found.to_string())
    )]
    JournalSearch {
        /// Newest entry of all.
        wanted: u64,
        /// Newest entry that the search finds, if it finds all needed ones.
        found: Option<u64>,
    },
    /// A journalled key is bad.
    #[error("entry {seq}, key {key:?}: {error}")]
    JournalKey {
        /// The entry.
        seq: u64,
        /// The key.
        key: Key,
        /// What is wrong with it.
        error: KeyError,
    },
    /// The journal names no usable root.
    #[error("bad btree root {key:?}: {error}")]
    BadRoot {
        /// The root's key.
        key: Key,
        /// What is wrong with it.
        error: KeyError,
    },
    /// The root does not cover the key space.
    #[error("the root ends at {found}, not at the end of the key space")]
    RootPosition {
        /// The root's position.
        found: Position,
    },
    /// A pointer to metadata is void.
    #[error("the pointer of {key:?} is stale: its bucket was reused")]
    StaleMetadata {
        /// The key.
        key: Key,
    },
    /// The journal names no usable uuid table.
    #[error("bad uuid pointer {key:?}: {error}")]
    BadUuidKey {
        /// The table's key.
        key: Key,
        /// What is wrong with it.
        error: KeyError,
    },
    /// The uuid table has a wrong size.
    #[error("the uuid table has {found} sectors, not {wanted}")]
    UuidTableSize {
        /// Sectors of a table.
        wanted: u64,
        /// Sectors found.
        found: u64,
    },
    /// The size of the uuid table is not a whole number of slots.
    #[error("{0}")]
    UuidTable(UuidError),
    /// The uuid table is not the one that bcached wrote.
    #[error(
        "the uuid table is not the one that was written: its checksum is {found:#018x}, not {wanted:#018x}; volumes may be missing from it"
    )]
    UuidTableSum {
        /// Checksum in the newest journal entry.
        wanted: u64,
        /// Checksum of the table on disk.
        found: u64,
    },
    /// A slot of the uuid table is not as bcached wrote it.
    #[error(
        "slot {number} of the uuid table ({uuid}) may differ from what was written: no volume is served from it"
    )]
    DoubtedSlot {
        /// Number of the slot.
        number: u32,
        /// Uuid in the slot.
        uuid: Uuid,
    },
    /// The backing device was used with a later state of the cache.
    #[error(
        "the cache is an older copy of itself: this backing device was used with journal entry {entry}, but the cache's newest is {newest}"
    )]
    OlderCache {
        /// The journal entry recorded on the backing device.
        entry: u64,
        /// The newest entry of the cache.
        newest: u64,
    },
    /// The cache was used with a later state of the backing device.
    #[error("the backing device is an older copy of itself: the cache holds data of a later state of it")]
    OlderBacking,
    /// Two slots belong to the same volume.
    #[error("slots {first} and {second} both belong to {uuid}")]
    DuplicateUuid {
        /// Uuid of the volume.
        uuid: Uuid,
        /// The lower slot.
        first: u32,
        /// The higher slot.
        second: u32,
    },
    /// A priority set is bad.
    #[error("{0}")]
    PrioSet(PrioError),
    /// The chain points to a bucket that cannot hold a priority set.
    #[error("priority set {index} should be in bucket {found}, which cannot hold one")]
    PrioBucket {
        /// Index in the chain.
        index: u64,
        /// The bucket.
        found: u64,
    },
    /// The chain mixes sets of two writes.
    #[error("priority set {index} is of write {found}, but the chain starts with write {wanted}")]
    PrioSeq {
        /// Index in the chain.
        index: u64,
        /// Write number of the first set.
        wanted: u64,
        /// Write number of this set.
        found: u64,
    },
    /// A node cannot be read.
    #[error("{0}")]
    Node(NodeError),
    /// The last set of a node is cut off.
    #[error("the bset at block {block} is this node's except for its number: a start would lose it")]
    NodeSetLost {
        /// Block of the set.
        block: u32,
    },
    /// The last sets of a node are missing.
    #[error("its bsets end at block {found}, but {wanted} blocks were durable: a write to the node was lost")]
    NodeShorter {
        /// Blocks that were durable, according to the priority of the node's bucket.
        wanted: u32,
        /// Blocks that the node's sets take.
        found: u32,
    },
    /// The keys of a set are out of order.
    #[error("bset at block {block}: {error}")]
    KeyOrder {
        /// Block of the set.
        block: u32,
        /// The key that is out of order.
        error: KeyListError,
    },
    /// A key makes no sense in its place.
    #[error("bset at block {block}, key {key:?}: {error}")]
    Key {
        /// Block of the set.
        block: u32,
        /// The key.
        key: Key,
        /// What is wrong with it.
        error: KeyError,
    },
    /// A key does not belong to this node.
    #[error("bset at block {block}: key {key:?} lies outside the node")]
    KeyOutsideNode {
        /// Block of the set.
        block: u32,
        /// The key.
        key: Key,
    },
    /// Two living children have the same position.
    #[error("two live children at {position}")]
    TwoChildren {
        /// Their position.
        position: Position,
    },
    /// The children do not cover the node.
    #[error(
        "{}",
        found.map_or_else(
            || "the node has no live child".to_owned(),
            |found| format!("the last live child ends at {found}, not at the end of the node"),
        )
    )]
    ChildrenEnd {
        /// Position of the last child; `None` if there is no child.
        found: Option<Position>,
    },
    /// A bucket has two uses.
    #[error("bucket {bucket} is used as {first:?} and as {second:?}")]
    BucketTwice {
        /// The bucket.
        bucket: u64,
        /// Use seen first.
        first: BucketUse,
        /// The other use.
        second: BucketUse,
    },
    /// Two live extents share data.
    #[error("sectors {sector} to {end} belong to two live extents")]
    SectorTwice {
        /// First shared sector.
        sector: u64,
        /// End of the shared sectors.
        end: u64,
    },
    /// Dirty data is lost.
    #[error("dirty extent {key:?} is stale: its bucket was reused, and the data is lost")]
    DirtyStale {
        /// The extent.
        key: Key,
    },
    /// A generation could wrap around.
    #[error("the key {key:?} is stale by {by} generations: a kernel refuses such a set")]
    TooStale {
        /// The key of an extent or of a child.
        key: Key,
        /// Number of generations that its bucket is ahead.
        by: u8,
    },
    /// An extent is not aligned to blocks.
    #[error("extent {key:?} does not consist of whole blocks")]
    Unaligned {
        /// The extent.
        key: Key,
    },
    /// Data belongs to no volume.
    #[error("extent {key:?} belongs to slot {inode}, which was never used")]
    Nobodys {
        /// The extent.
        key: Key,
        /// The slot.
        inode: Inode,
    },
    /// Dirty data belongs to a volume that was given up.
    #[error("dirty extent {key:?} belongs to an invalidated slot")]
    DirtyOfGivenUp {
        /// The extent.
        key: Key,
    },
    /// A volume without a backing device has clean data.
    #[error("extent {key:?} of a flash-only volume is clean")]
    CleanFlashOnly {
        /// The extent.
        key: Key,
    },
    /// Dirty data lies outside its volume.
    #[error("dirty extent {key:?} lies outside the volume's sectors {start} to {end}")]
    OutsideVolume {
        /// The extent.
        key: Key,
        /// First sector of the volume.
        start: u64,
        /// End of the volume.
        end: u64,
    },
    /// Data of a flash-only volume from a time when the volume was larger.
    #[error(
        "extent {key:?} reaches behind the end of its flash-only volume, sector {end}: it takes space until the volume is resized"
    )]
    BehindEnd {
        /// The extent.
        key: Key,
        /// End of the volume.
        end: u64,
    },
    /// A device is marked clean, but has dirty data that differs from it.
    #[error("extent {key:?} is dirty and differs from the backing device, which is not marked dirty")]
    DirtyDiffers {
        /// The extent.
        key: Key,
    },
    /// Clean data differs from the backing device.
    #[error("clean extent {key:?} differs from the backing device")]
    CleanDiffers {
        /// The extent.
        key: Key,
    },
    /// The cache holds dirty data of a device that was run without it.
    #[error(
        "{sectors} dirty sectors belong to a backing device that was run without its cache: they are no longer valid"
    )]
    DirtyButStale {
        /// Number of sectors.
        sectors: u64,
    },
}

impl DamageKind {
    /// Returns the name of the kind, without its fields, for scripts: `dirty-stale`.
    #[must_use]
    pub fn name(&self) -> String {
        // The Debug text of an enum starts with the variant's name.
        let text = format!("{self:?}");
        let mut name = String::new();
        for letter in text.chars().take_while(|letter| letter.is_alphanumeric()) {
            if letter.is_uppercase() && !name.is_empty() {
                name.push('-');
            }
            name.extend(letter.to_lowercase());
        }
        name
    }
}

/// One finding.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Damage {
    /// How bad it is.
    pub severity: Severity,
    /// Where it is.
    pub place: Location,
    /// What it is.
    pub kind: DamageKind,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cache => f.write_str("cache device"),
            Self::Backing(index) => write!(f, "backing device {index}"),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let structure = match self.structure {
            Structure::Superblock => "superblock",
            Structure::Journal => "journal",
            Structure::Priorities => "priorities",
            Structure::UuidTable => "uuid table",
            Structure::Node => "btree node",
            Structure::Content => "content",
        };
        write!(f, "{}, {structure}", self.device)?;
        if let Some(sector) = self.sector {
            write!(f, " at sector {sector}")?;
        }
        if let Some(node) = self.node {
            write!(f, " (level {}, from {} to {})", node.level, node.low, node.high)?;
        }
        Ok(())
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.kind)
    }
}

impl Serialize for Damage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct DamageFields {
            severity: Severity,
            kind: String,
            #[serde(flatten)]
            place: Location,
            message: String,
        }
        let flat = DamageFields {
            severity: self.severity,
            kind: self.kind.name(),
            place: self.place,
            message: self.kind.to_string(),
        };
        flat.serialize(serializer)
    }
}

/// Serialises a value as its `Display` text.
pub(crate) fn as_text<T: fmt::Display, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

impl Location {
    /// Returns the place of a structure of the cache device that starts at `sector`.
    pub(crate) const fn cache(structure: Structure, sector: u64) -> Self {
        Self { device: Device::Cache, structure, sector: Some(sector), node: None }
    }

    /// Returns the place of a structure of the cache device as a whole.
    pub(crate) const fn whole(structure: Structure) -> Self {
        Self { device: Device::Cache, structure, sector: None, node: None }
    }

    /// Returns the place of a node.
    pub(crate) const fn node(node: NodeLocation) -> Self {
        Self {
            device: Device::Cache,
            structure: Structure::Node,
            sector: Some(node.sector),
            node: Some(node),
        }
    }

    /// Returns the place of the superblock of a backing device.
    pub(crate) const fn backing(index: usize) -> Self {
        Self {
            device: Device::Backing(index),
            structure: Structure::Superblock,
            sector: Some(bcached_format::SUPERBLOCK_SECTOR),
            node: None,
        }
    }
}
