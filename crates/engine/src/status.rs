//! The status of a running set: a snapshot that is cheap, consistent and needs no I/O.

use crate::btree::unreadable::UnreadableNode;
use crate::error::Error;
use crate::latency::Latencies;
use crate::lost_acks::LostAcks;
use crate::set::CacheSet;
use crate::settings::Settings;
use crate::space::{Bucket, BucketUsage, DiscardState, DiscardStats};
use crate::state::State;
use crate::stats::Stats;
use crate::volume::{VolumeId, VolumeInfo};
use alloc::sync::Arc;
use alloc::vec::Vec;
use bcached_env::{DiskHealth, Time};
use bcached_format::{Inode, Label, ReplacementPolicy, Uuid, UuidSlot};

/// Status of a set.
#[derive(Clone, Debug)]
pub struct Status {
    /// UUID of the set.
    pub set_uuid: Uuid,
    /// Label of the cache device.
    pub label: Label,
    /// Block size in sectors.
    pub block_sectors: u64,
    /// Bucket size in sectors.
    pub bucket_sectors: u64,
    /// Size of a B-tree node in sectors.
    pub node_sectors: u64,
    /// Which clean bucket is evicted first.
    pub replacement: ReplacementPolicy,
    /// What the superblock says of eviction and of discards.
    pub kept: Settings,
    /// Whether free buckets are discarded.
    pub discard: DiscardState,
    /// Counters of discards.
    pub discards: DiscardStats,
    /// Buckets on the cache device.
    pub buckets: u64,
    /// Buckets that can be used or reused without writing anything back.
    pub buckets_available: u64,
    /// Buckets ready to be handed out.
    pub buckets_free: u64,
    /// Buckets being filled.
    pub buckets_open: u64,
    /// Buckets that hold metadata.
    pub buckets_metadata: u64,
    /// Buckets kept free for the next start.
    pub buckets_reserved: u64,
    /// Buckets that hold nothing and are not being filled.
    pub buckets_unused: u64,
    /// Buckets that hold clean data only.
    pub buckets_clean: u64,
    /// Buckets that hold dirty data and are not being filled.
    pub buckets_dirty: u64,
    /// The volumes of the table that are not being served.
    pub unserved: Vec<UnservedInfo>,
    /// The table of volumes is not the one that was written: volumes may be missing from it.
    pub table_is_damaged: bool,
    /// Slots of the table whose contents may not be what was written, as they were read. Their
    /// volumes are not served.
    pub doubted: Vec<DoubtedSlot>,
    /// Dirty data under numbers that belong to no known volume, in sectors. It is kept, and not
    /// written back anywhere.
    pub ownerless_dirty_sectors: u64,
    /// The largest flash-only volume that can be created now, in sectors.
    pub flash_room_sectors: u64,
    /// Dirty data of all volumes, in sectors.
    pub dirty_sectors: u64,
    /// Whether that is all. If not, the tree has not been fully walked, or damaged nodes hide some.
    pub is_counted: bool,
    /// Levels of the tree above its leaves.
    pub tree_depth: u8,
    /// Percentage of the root that live keys fill (`root_usage_percent`).
    pub root_usage_percent: u64,
    /// Nodes in memory.
    pub nodes: u64,
    /// Memory that the nodes take, including memory reserved for nodes being loaded, in bytes.
    pub node_bytes: u64,
    /// The maximum of that so far, in bytes.
    pub node_bytes_max: u64,
    /// The hard limit of that, in bytes.
    pub node_budget_bytes: u64,
    /// Memory that the table of buckets takes, in bytes.
    pub bucket_table_bytes: u64,
    /// Percentage of the tree walked since the set was opened, as far as its shape is known. Below
    /// 100 also while there are [`Status::replay_keys`]. Until it is 100, buckets and dirty data
    /// are only what has been counted so far.
    pub walked_percent: u64,
    /// Keys of the journal that are not in the tree yet.
    pub replay_keys: u64,
    /// The newest durable journal entry.
    pub journal_sequence: u64,
    /// Journal entries that a crash would replay, including the open one
    /// (`active_journal_entries`).
    pub journal_active: u64,
    /// The time of this snapshot, by the engine's clock.
    pub now: Time,
    /// Streams of so many sectors or more bypass the cache device because it is slow, minus a
    /// random number; 0: it is not congested (`congested`).
    pub congested_sectors: u64,
    /// Failed operations on the cache device, less those that have decayed (`io_errors`).
    pub io_errors: u64,
    /// They have reached [`crate::Options::io_error_limit`]: nothing is added to the cache, and its
    /// dirty data is written back.
    pub is_failing: bool,
    /// Health of the cache device.
    pub cache_health: DiskHealth,
    /// Why nothing is written any more; `None` if the set has not failed.
    pub failed: Option<Error>,
    /// Acknowledged, unflushed writes that this failure has made void because the device may have
    /// lost them. The next opening does not restore them.
    pub given_up: Arc<[LostAcks]>,
    /// Such writes that were void before the set was opened and were not restored. Each opening has
    /// its own list.
    pub given_up_before: Arc<[LostAcks]>,
    /// B-tree nodes that could not be read when last tried: the first few.
    pub unreadable: Vec<UnreadableNode>,
    /// Volumes whose requests have waited for a device for the maximum time and now fail. The
    /// program that holds them back fills this in: the set itself holds none back.
    pub waited_out: Vec<TimedOutVolume>,
    /// Volumes of which a request has met a missing backing device, until another one replaces it.
    pub without_backing: Vec<VolumeId>,
    /// Counters.
    pub stats: Stats,
    /// The volumes.
    pub volumes: Vec<VolumeInfo>,
    /// Latencies of each volume's requests.
    pub latencies: Vec<Latencies>,
}

/// A volume whose requests have waited for a device for the maximum time (`freeze_timeout`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOutVolume {
    /// The volume.
    pub volume: VolumeId,
    /// Whether they have waited for the cache.
    pub cache: bool,
    /// Whether they have waited for the backing device.
    pub backing: bool,
}

/// A volume that the set knows but that is not being served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnservedInfo {
    /// UUID of the volume.
    pub uuid: Uuid,
    /// The label it had when it was first attached.
    pub label: Label,
    /// Size in sectors of a flash-only volume; `None` for a volume with a backing device.
    pub flash_sectors: Option<u64>,
    /// Dirty data, in sectors.
    pub dirty_sectors: u64,
    /// Whether that is all of it.
    pub is_counted: bool,
}

/// A slot of the table of volumes whose contents may not be what was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoubtedSlot {
    /// Its number (inode).
    pub inode: Inode,
    /// The UUID in the slot.
    pub uuid: Uuid,
    /// The label in the slot.
    pub label: Label,
    /// Dirty data under that number, in sectors.
    pub dirty_sectors: u64,
}

/// The counts of one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketCount {
    /// Sectors that keys of the tree point to.
    pub live: u32,
    /// Of these, dirty.
    pub dirty: u32,
    /// The bucket is empty, and can be handed out now or as soon as its generation is durable.
    pub free: bool,
}

fn unused(s: &State) -> u64 {
    let free = s.buckets.free_count() + s.buckets.free.under_discard();
    (free + s.buckets.pending().len() + s.buckets.empty_count()) as u64
}

/// Percentage of the root that is filled.
fn root_usage_percent(s: &State) -> u64 {
    let words = s.root_pin.as_ref().map_or(0, |pin| s.nodes.get(pin.slot()).node().words_in_view());
    words as u64 * 8 * 100 / (s.root.key.sectors() * 512).max(1)
}

fn unserved(s: &State) -> Vec<UnservedInfo> {
    let is_served = |inode| s.volumes.iter().any(|(_, volume)| volume.inode == Some(inode));
    let left = s.uuids.used().filter(|(inode, _)| !is_served(*inode));
    left.map(|(inode, slot)| UnservedInfo {
        uuid: slot.uuid,
        label: slot.label,
        flash_sectors: slot.is_flash_only().then_some(slot.sectors),
        dirty_sectors: s.dirty.of(inode),
        is_counted: s.has_counted(inode),
    })
    .collect()
}

fn doubted(s: &State) -> Vec<DoubtedSlot> {
    let of = |(inode, slot): (Inode, &UuidSlot)| DoubtedSlot {
        inode,
        uuid: slot.uuid,
        label: slot.label,
        dirty_sectors: s.dirty.of(inode),
    };
    s.uuids.doubted().map(of).collect()
}

fn ownerless_dirty(s: &State) -> u64 {
    let is_known = |inode| s.uuids.slot(inode).is_some_and(UuidSlot::is_used) || s.uuids.is_released(inode);
    s.dirty.inodes().filter(|inode| !is_known(*inode)).map(|inode| s.dirty.of(inode)).sum()
}

impl CacheSet {
    /// Takes a snapshot of the status.
    #[must_use]
    pub fn status(&self) -> Status {
        let volumes = self.volumes();
        let device_can_discard = self.cache().info().discard;
        // No number here is counted over all buckets or nodes: a status is made every few seconds.
        self.with(|s| Status {
            set_uuid: s.superblock.set_uuid(),
            label: s.superblock.label(),
            block_sectors: s.geometry.block_sectors,
            bucket_sectors: s.geometry.bucket_sectors,
            node_sectors: s.geometry.node_sectors(),
            replacement: s.replacement(),
            kept: Settings {
                discard: Some(s.superblock.discard()),
                replacement: Some(s.superblock.replacement()),
            },
            discard: s.discard_state(device_can_discard),
            discards: s.discards,
            buckets: s.buckets.count(),
            buckets_available: s.buckets.available(),
            buckets_free: s.buckets.free_count() as u64,
            buckets_open: s.open.count() as u64,
            buckets_metadata: s.buckets.count_of(BucketUsage::Meta),
            buckets_reserved: s.buckets.count_of(BucketUsage::Reserve),
            walked_percent: s.counted_percent(),
            replay_keys: s.overlay.len() as u64,
            buckets_unused: unused(s),
            buckets_clean: s.buckets.clean_count() as u64,
            buckets_dirty: s.buckets.count()
                - s.buckets.available()
                - s.buckets.count_of(BucketUsage::Meta)
                - s.buckets.count_of(BucketUsage::Reserve)
                - s.buckets.count_of(BucketUsage::Unknown)
                - s.open.count() as u64,
            unserved: unserved(s),
            table_is_damaged: s.uuids.is_damaged(),
            doubted: doubted(s),
            ownerless_dirty_sectors: ownerless_dirty(s),
            flash_room_sectors: s.flash_room(),
            dirty_sectors: s.dirty.total(),
            is_counted: s.is_counted() && s.frozen.is_empty(),
            tree_depth: s.root.level,
            root_usage_percent: root_usage_percent(s),
            nodes: s.nodes.count() as u64,
            node_bytes: s.nodes.bytes() as u64,
            node_bytes_max: s.nodes.bytes_max() as u64,
            node_budget_bytes: s.nodes.budget() as u64,
            bucket_table_bytes: s.buckets.bytes(),
            journal_sequence: s.journal.durable(),
            journal_active: (s.journal.open_sequence() + 1).saturating_sub(s.journal.needed_from()),
            now: s.now,
            congested_sectors: s.congested_sectors(),
            io_errors: s.io_errors.errors(),
            is_failing: s.is_worn(),
            cache_health: self.cache().health(),
            failed: s.failed.clone(),
            given_up: Arc::clone(&s.losses.here),
            given_up_before: Arc::clone(&s.losses.before),
            unreadable: s.unreadable_nodes(),
            waited_out: Vec::new(),
            without_backing: Vec::new(),
            stats: s.stats.as_of(s.now),
            latencies: s.volumes.iter().map(|(_, volume)| volume.latencies.clone()).collect(),
            volumes,
        })
    }

    /// Returns the counts of each bucket, in bucket order, as kept while keys were added and
    /// removed. For a caller that counts the tree again. `None` during the walk that counts them,
    /// or a replay.
    #[must_use]
    pub fn counted(&self) -> Option<Vec<BucketCount>> {
        let count = |bucket: &Bucket| BucketCount {
            live: bucket.live,
            dirty: bucket.dirty,
            free: matches!(bucket.usage, BucketUsage::Free | BucketUsage::Pending | BucketUsage::Reserve),
        };
        self.with(|s| s.is_counted().then(|| s.buckets.iter().map(|(_, bucket)| count(&bucket)).collect()))
    }

    /// Asserts the invariants of the state in memory. The simulator calls it where a process begins
    /// and ends.
    ///
    /// # Panics
    /// If an invariant does not hold.
    pub fn assert_invariants(&self) {
        self.with(|s| {
            s.check_invariants();
            s.nodes.check_invariants();
            let shares = self.inner.shares.get();
            assert_eq!(s.nodes.budget(), shares.budget, "the node cache has the budget that it was assigned");
            let tickets = self.inner.tickets.available();
            assert!(tickets <= shares.tickets, "{tickets} tickets, but memory for only {}", shares.tickets);
            let open = s.buckets.iter().filter(|(_, bucket)| bucket.usage == BucketUsage::Open).count();
            assert_eq!(open, s.open.count(), "every open bucket is listed");
        });
    }
}
