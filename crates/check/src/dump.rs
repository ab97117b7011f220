//! Dumps all metadata of a set, record by record, as values that print as text or serialise.
//!
//! A dump shows what is on disk, also where a check would complain: after damage it continues as
//! far as it can.

use crate::damage::{Location, Structure, as_text};
use crate::findings::Findings;
use crate::image::ReadAt;
use crate::{buckets, journal, tree, volumes};
use bcached_format::{CacheSuperblock, Geometry, Jset, Key, Label, NodeLog, Position, Uuid};
use serde::Serialize;
use std::fmt;

/// A key as a record.
#[derive(Clone, Debug, Serialize)]
pub struct KeyRecord {
    /// Inode of the volume.
    pub inode: u32,
    /// First sector covered; meaningless for a child or freeing key.
    pub start: u64,
    /// End of the extent, or position of a child.
    pub end: u64,
    /// Whether the data is dirty.
    pub dirty: bool,
    /// Pointers as `device:sector gen n`, or `check`.
    pub pointers: Vec<String>,
}

/// A set of a node.
#[derive(Clone, Debug, Serialize)]
pub struct SetRecord {
    /// Block of the node at which it starts.
    pub block: u32,
    /// Its keys.
    pub keys: Vec<KeyRecord>,
}

/// A node.
#[derive(Clone, Debug, Serialize)]
pub struct NodeRecord {
    /// Level of the node; 0 is a leaf.
    pub level: u16,
    /// First sector.
    pub sector: u64,
    /// Length in sectors.
    pub sectors: u16,
    /// Generation of the pointer to it.
    pub generation: u8,
    /// The node covers the key space after this ..
    #[serde(serialize_with = "as_text")]
    pub low: Position,
    /// .. up to and including this.
    #[serde(serialize_with = "as_text")]
    pub high: Position,
    /// Random number that marks the node's sets.
    pub seq: u64,
    /// Sets of the node, oldest first.
    pub sets: Vec<SetRecord>,
}

/// One record of the metadata.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "record", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Record {
    /// The cache superblock.
    Superblock {
        /// Version.
        version: u64,
        /// Uuid of the device.
        #[serde(serialize_with = "as_text")]
        uuid: Uuid,
        /// Uuid of the set.
        #[serde(serialize_with = "as_text")]
        set_uuid: Uuid,
        /// Label.
        #[serde(serialize_with = "as_text")]
        label: Label,
        /// How many times it has been written.
        seq: u64,
        /// The SYNC flag.
        synchronous: bool,
        /// The DISCARD flag.
        discard: bool,
        /// Number of buckets.
        buckets: u64,
        /// Sectors of a block.
        block_sectors: u64,
        /// Sectors of a bucket.
        bucket_sectors: u64,
        /// First usable bucket.
        first_bucket: u64,
        /// Number of journal buckets.
        journal_buckets: u64,
        /// Time of the last start, in seconds since 1970.
        last_mount: u32,
        /// The same in RFC 3339; absent if the set was never started.
        #[serde(skip_serializing_if = "Option::is_none")]
        last_mount_time: Option<String>,
    },
    /// A journal entry.
    JournalEntry {
        /// Index of the journal bucket that holds it, from 0.
        index: usize,
        /// Index of that bucket on the device.
        bucket: u64,
        /// Sector.
        sector: u64,
        /// Sequence number.
        seq: u64,
        /// Oldest entry needed.
        last_seq: u64,
        /// Root node.
        root: KeyRecord,
        /// Level of the root.
        root_level: u16,
        /// Uuid table.
        uuids: KeyRecord,
        /// First bucket of the priority chain.
        prio_bucket: u64,
        /// Its keys.
        keys: Vec<KeyRecord>,
    },
    /// The chain of priority sets of the newest entry.
    PriorityChain {
        /// Buckets in order.
        buckets: Vec<u64>,
    },
    /// A bucket whose generation or priority is not zero.
    Bucket {
        /// Index.
        index: u64,
        /// Priority.
        prio: u16,
        /// Generation as stored.
        generation: u8,
    },
    /// A slot of the uuid table that is not free.
    UuidSlot {
        /// Number of the slot.
        inode: u32,
        /// Uuid of the volume.
        #[serde(serialize_with = "as_text")]
        uuid: Uuid,
        /// Label.
        #[serde(serialize_with = "as_text")]
        label: Label,
        /// First registered, in seconds since 1970.
        first_registered: u32,
        /// The same in RFC 3339; absent if unknown.
        #[serde(skip_serializing_if = "Option::is_none")]
        first_registered_time: Option<String>,
        /// Last registered, in seconds since 1970.
        last_registered: u32,
        /// The same in RFC 3339; absent if unknown.
        #[serde(skip_serializing_if = "Option::is_none")]
        last_registered_time: Option<String>,
        /// When it was given up, in seconds since 1970; 0 if it was not.
        invalidated: u32,
        /// The same in RFC 3339; absent if it was not.
        #[serde(skip_serializing_if = "Option::is_none")]
        invalidated_time: Option<String>,
        /// Flags.
        flags: u32,
        /// Size of a flash-only volume in sectors.
        sectors: u64,
    },
    /// A node of the tree.
    Node(NodeRecord),
    /// Something could not be read.
    Damaged {
        /// Where, and what is wrong.
        message: String,
    },
}

/// Passes every record to `visit`, in the order of a start: superblock, journal, priorities, uuids,
/// tree.
pub fn dump(cache: &dyn ReadAt, visit: &mut dyn FnMut(Record)) {
    let mut findings = Findings::new(usize::MAX);
    let _ = dump_set(cache, visit, &mut findings);
    for damage in findings.into_parts().0 {
        visit(Record::Damaged { message: damage.to_string() });
    }
}

/// Dumps the set; returns `None` where a start would have to stop.
fn dump_set(cache: &dyn ReadAt, visit: &mut dyn FnMut(Record), findings: &mut Findings) -> Option<()> {
    let superblock = volumes::read_cache(cache, findings)?;
    visit(superblock_record(&superblock));
    if !superblock.is_synchronous() {
        return None;
    }
    let geometry = Geometry::of(&superblock);
    let journal = journal::scan(cache, &geometry, findings)?;
    for (index, entries) in journal.buckets.iter().enumerate() {
        for entry in entries {
            dump_entry(cache, &geometry, index, *entry, visit, findings);
        }
    }
    let (mut buckets, chain) = buckets::read_chain(cache, &geometry, &journal.header, findings)?;
    visit(Record::PriorityChain { buckets: chain });
    for (index, bucket) in (0..).zip(buckets.to_list()) {
        if bucket.prio != 0 || bucket.generation != 0 {
            visit(Record::Bucket { index, prio: bucket.prio, generation: bucket.generation });
        }
    }
    let place = Location::cache(Structure::Journal, journal.newest.sector);
    let header = journal.header;
    let table = volumes::read_table(
        cache,
        &geometry,
        (superblock.set_uuid(), &header),
        journal.old_uuids,
        place,
        findings,
    );
    for (inode, slot) in (0..).zip(table.unwrap_or_default().slots).filter(|(_, slot)| !slot.is_free()) {
        visit(Record::UuidSlot {
            inode,
            uuid: slot.uuid,
            label: slot.label,
            first_registered: slot.first_registered,
            first_registered_time: moment(slot.first_registered),
            last_registered: slot.last_registered,
            last_registered_time: moment(slot.last_registered),
            invalidated: slot.invalidated,
            invalidated_time: moment(slot.invalidated),
            flags: slot.flags,
            sectors: slot.sectors,
        });
    }
    let root = tree::root(&geometry, &header.root, header.root_level, &mut buckets, place, findings)?;
    tree::walk(cache, &geometry, root, &mut buckets, findings, &mut |node, log| {
        visit(Record::Node(node_record(node, log)));
    });
    Some(())
}

fn superblock_record(superblock: &CacheSuperblock) -> Record {
    Record::Superblock {
        version: superblock.version(),
        uuid: superblock.uuid(),
        set_uuid: superblock.set_uuid(),
        label: superblock.label(),
        seq: superblock.seq(),
        synchronous: superblock.is_synchronous(),
        discard: superblock.discard(),
        buckets: superblock.buckets(),
        block_sectors: superblock.block_sectors(),
        bucket_sectors: superblock.bucket_sectors(),
        first_bucket: superblock.first_bucket(),
        journal_buckets: superblock.journal_buckets(),
        last_mount: superblock.last_mount(),
        last_mount_time: moment(superblock.last_mount()),
    }
}

fn dump_entry(
    cache: &dyn ReadAt,
    geometry: &Geometry,
    index: usize,
    entry: journal::JournalEntry,
    visit: &mut dyn FnMut(Record),
    findings: &mut Findings,
) {
    let place = Location::cache(Structure::Journal, entry.sector);
    let Some(bytes) = crate::read_or_report(cache, place, entry.sector, entry.bytes, findings) else {
        return;
    };
    let Ok(parsed) = Jset::parse(&bytes, geometry.magic) else { return };
    visit(Record::JournalEntry {
        index,
        bucket: entry.sector / geometry.bucket_sectors,
        sector: entry.sector,
        seq: parsed.header.seq,
        last_seq: parsed.header.last_seq,
        root: KeyRecord::of(&parsed.header.root),
        root_level: parsed.header.root_level,
        uuids: KeyRecord::of(&parsed.header.uuids),
        prio_bucket: parsed.header.prio_bucket,
        keys: parsed.keys.iter().map(|key| KeyRecord::of(&key)).collect(),
    });
}

fn node_record(node: &tree::NodeRef, log: &NodeLog<'_>) -> NodeRecord {
    let set = |set: &bcached_format::node_log::NodeSet<'_>| SetRecord {
        block: set.block,
        keys: set.bset.keys.iter().map(|key| KeyRecord::of(&key)).collect(),
    };
    NodeRecord {
        level: node.level,
        sector: node.pointer.sector(),
        sectors: node.sectors,
        generation: node.pointer.generation().0,
        low: node.low,
        high: node.high,
        seq: log.seq(),
        sets: log.sets.iter().map(set).collect(),
    }
}

impl KeyRecord {
    fn of(key: &Key) -> Self {
        Self {
            inode: key.inode.0,
            start: key.end.saturating_sub(key.sectors()),
            end: key.end,
            dirty: key.dirty,
            pointers: key.pointers.as_slice().iter().map(|pointer| format!("{pointer:?}")).collect(),
        }
    }
}

/// The key of a child: its end is the child's last position, and its size means nothing.
struct ChildKey<'a>(&'a KeyRecord);

impl fmt::Display for ChildKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "up to {}:{}", self.0.inode, self.0.end)?;
        self.0.pointers.iter().try_for_each(|pointer| write!(f, " -> {pointer}"))
    }
}

/// A key of which only the pointers mean something.
struct PointerList<'a>(&'a KeyRecord);

impl fmt::Display for PointerList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.pointers.join(" -> "))
    }
}

impl fmt::Display for KeyRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:[{},{})", self.inode, self.start, self.end)?;
        if self.dirty {
            f.write_str(" dirty")?;
        }
        for pointer in &self.pointers {
            write!(f, " -> {pointer}")?;
        }
        Ok(())
    }
}

impl fmt::Display for NodeRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node level {} sector {} gen {}", self.level, self.sector, self.generation)?;
        write!(f, " sectors {} from {} to {} seq {:016x}", self.sectors, self.low, self.high, self.seq)?;
        for set in &self.sets {
            write!(f, "\n  bset at block {}", set.block)?;
            for key in &set.keys {
                match self.level {
                    0 => write!(f, "\n    {key}")?,
                    _ => write!(f, "\n    {}", ChildKey(key))?,
                }
            }
        }
        Ok(())
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Superblock { version, uuid, set_uuid, label, seq, synchronous, .. } => write!(
                f,
                "superblock version {version} uuid {uuid} set {set_uuid} label \"{label}\" seq {seq} \
                 sync {synchronous}{}",
                self.superblock_sizes()
            ),
            Self::JournalEntry {
                bucket,
                sector,
                seq,
                last_seq,
                root,
                root_level,
                uuids,
                prio_bucket,
                keys,
                ..
            } => {
                write!(f, "journal entry {seq} needs {last_seq} bucket {bucket} sector {sector}")?;
                let (root, uuids) = (PointerList(root), PointerList(uuids));
                write!(f, " root {root} level {root_level} uuids {uuids} prios in bucket {prio_bucket}")?;
                keys.iter().try_for_each(|key| write!(f, "\n    {key}"))
            }
            Self::PriorityChain { buckets } => write!(f, "priorities in buckets {buckets:?}"),
            Self::Bucket { index, prio, generation } => {
                write!(f, "bucket {index} prio {prio} gen {generation}")
            }
            Self::UuidSlot { inode, uuid, label, flags, sectors, invalidated_time, .. } => write!(
                f,
                "uuid slot {inode} {uuid} label \"{label}\" flags {flags:#x} sectors {sectors} \
                 invalidated {}",
                invalidated_time.as_deref().unwrap_or("never")
            ),
            Self::Node(node) => write!(f, "{node}"),
            Self::Damaged { message } => write!(f, "damaged: {message}"),
        }
    }
}

impl Record {
    fn superblock_sizes(&self) -> String {
        match self {
            Self::Superblock {
                discard,
                buckets,
                block_sectors,
                bucket_sectors,
                first_bucket,
                journal_buckets,
                last_mount_time,
                ..
            } => format!(
                " discard {discard} buckets {buckets} block {block_sectors} sectors bucket {bucket_sectors} sectors \
                 first {first_bucket} journal {journal_buckets} buckets last mount {}",
                last_mount_time.as_deref().unwrap_or("never")
            ),
            _ => String::new(),
        }
    }
}

/// Formats seconds since 1970 as RFC 3339, in UTC. Returns `None` for 0, which means "never" in
/// every time field of the format.
fn moment(seconds: u32) -> Option<String> {
    const LENGTHS: [u32; 12] = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    if seconds == 0 {
        return None;
    }
    // Valid until 2106 only: every fourth year except 2100 is a leap year.
    let is_leap = |year: u32| year.is_multiple_of(4) && year != 2100;
    let (mut day, second) = (seconds / 86_400, seconds % 86_400);
    let mut year = 1970;
    while day >= 365 + u32::from(is_leap(year)) {
        day -= 365 + u32::from(is_leap(year));
        year += 1;
    }
    let mut month = 1;
    for length in LENGTHS {
        let length = length + u32::from(month == 2 && is_leap(year));
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    let (hour, minute) = (second / 3600, second / 60 % 60);
    Some(format!("{year}-{month:02}-{:02}T{hour:02}:{minute:02}:{:02}Z", day + 1, second % 60))
}

#[cfg(test)]
mod tests {
    use super::moment;

    #[test]
    fn moments_are_those_of_the_calendar() {
        for (seconds, wanted) in [
            (1, "1970-01-01T00:00:01Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (1_795_258_687, "2026-11-21T10:58:07Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (u32::MAX, "2106-02-07T06:28:15Z"),
        ] {
            assert_eq!(moment(seconds).as_deref(), Some(wanted), "{seconds}");
        }
        assert_eq!(moment(0), None);
    }
}
