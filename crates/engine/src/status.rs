//! A snapshot of a running set, for those who look: cheap, consistent, no I/O.

use crate::btree::unreadable::UnreadableNode;
use crate::error::Error;
use crate::latency::Latencies;
use crate::lost_acks::GivenUp;
use crate::set::CacheSet;
use crate::settings::Settings;
use crate::space::{Bucket, DiscardState, Discards, Usage};
use crate::state::State;
use crate::stats::Stats;
use crate::volume::{VolumeId, VolumeInfo};
use alloc::sync::Arc;
use alloc::vec::Vec;
use bcached_env::{DiskHealth, Time};
use bcached_format::{Inode, Label, Replacement, Uuid, UuidSlot};

/// What a set is doing.
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
    /// Which clean bucket is given up first.
    pub replacement: Replacement,
    /// What the superblock says of that, and of discards.
    pub kept: Settings,
    /// Whether freed buckets are discarded.
    pub discard: DiscardState,
    /// What has become of discards.
    pub discards: Discards,
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
    /// Buckets that hold clean data, and nothing else.
    pub buckets_clean: u64,
    /// Buckets that hold dirty data and are not being filled.
    pub buckets_dirty: u64,
    /// The volumes of the table that are not served.
    pub unserved: Vec<Unserved>,
    /// The table of volumes is not the one that was written: volumes may be missing from it.
    pub table_is_damaged: bool,
    /// Slots of the table that may not be what was written, as they were read. Their volumes are not served.
    pub doubted: Vec<Doubted>,
    /// Dirty data under numbers that are no volume's as far as is known, in sectors. It is kept, and written nowhere.
    pub ownerless_dirty_sectors: u64,
    /// The largest volume in the cache alone that can be made now, in sectors.
    pub flash_room_sectors: u64,
    /// Dirty data of all volumes, in sectors.
    pub dirty_sectors: u64,
    /// That is all; if not, the tree has not been walked to its end, or has damaged nodes that hide some.
    pub is_counted: bool,
    /// Levels of the tree above its leaves.
    pub tree_depth: u8,
    /// How full the root is with live keys, in percent (`root_usage_percent`).
    pub root_usage_percent: u64,
    /// Nodes in memory.
    pub nodes: u64,
    /// Memory that they take, and what is set aside for those on their way, in bytes.
    pub node_bytes: u64,
    /// The most that was ever so, in bytes.
    pub node_bytes_max: u64,
    /// The hard limit of that, in bytes.
    pub node_budget_bytes: u64,
    /// Memory that the table of buckets takes, in bytes.
    pub bucket_table_bytes: u64,
    /// How much of the tree has been walked since the set was opened, in percent, as far as its shape tells; less than 100, too, while
    /// there are [`Status::replay_keys`]. Before it is 100 what is said of buckets and dirty data is only what has been counted so far.
    pub walked_percent: u64,
    /// Keys of the journal that are not in the tree yet.
    pub replay_keys: u64,
    /// The newest durable journal entry.
    pub journal_sequence: u64,
    /// Journal entries that a crash would replay, and the open one (`active_journal_entries`).
    pub journal_active: u64,
    /// When this was so, by the engine's clock.
    pub now: Time,
    /// Streams of so many sectors and more go past the cache device because it is slow, give or take a random number; 0: it is not
    /// congested (`congested`).
    pub congested_sectors: u64,
    /// Failed operations on the cache device that count, and have not faded (`io_errors`).
    pub io_errors: u64,
    /// They have reached [`crate::Options::io_error_limit`]: nothing is added to the cache, and what is dirty leaves it.
    pub is_failing: bool,
    /// How the cache device has fared.
    pub cache_health: DiskHealth,
    /// Why nothing is written any more, if so.
    pub failed: Option<Error>,
    /// What that has made void because the device may have lost it: acknowledged writes that were not flushed, which the next opening does
    /// not bring back.
    pub given_up: Arc<[GivenUp]>,
    /// What had been made void so before the set was opened, and is not there. Each opening has one of its own.
    pub given_up_before: Arc<[GivenUp]>,
    /// B-tree nodes that could not be read when they were last tried: the first few.
    pub unreadable: Vec<UnreadableNode>,
    /// Volumes whose requests have waited for a device as long as they may, and fail now. Whoever holds them back fills this in:
    /// the set itself holds none back.
    pub waited_out: Vec<WaitedOut>,
    /// Volumes of which a request has met a backing device that is gone, until another one takes its place.
    pub without_backing: Vec<VolumeId>,
    /// Counters.
    pub stats: Stats,
    /// The volumes.
    pub volumes: Vec<VolumeInfo>,
    /// How long the requests of each of them took.
    pub latencies: Vec<Latencies>,
}

/// A device that requests of a volume have waited for as long as they may (`freeze_timeout`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitedOut {
    /// The volume.
    pub volume: VolumeId,
    /// It is the cache.
    pub cache: bool,
    /// It is the backing device.
    pub backing: bool,
}

/// A volume that the set knows and nobody serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unserved {
    /// UUID of the volume.
    pub uuid: Uuid,
    /// Its label when it was first attached.
    pub label: Label,
    /// It lives in the cache alone, and this is its size in sectors.
    pub flash_sectors: Option<u64>,
    /// Dirty data, in sectors.
    pub dirty_sectors: u64,
    /// That is all of it.
    pub is_counted: bool,
}

/// A slot of the table of volumes that may not be what was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doubted {
    /// Its number.
    pub inode: Inode,
    /// The UUID that stands there.
    pub uuid: Uuid,
    /// The label that stands there.
    pub label: Label,
    /// Dirty data under that number, in sectors.
    pub dirty_sectors: u64,
}

/// What a set has counted of one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketCount {
    /// Sectors that keys of the tree point to.
    pub live: u32,
    /// Of these, dirty.
    pub dirty: u32,
    /// It holds nothing, and may be handed out now or as soon as its generation is durable.
    pub free: bool,
}

fn unused(s: &State) -> u64 {
    let free = s.buckets.free_count() + s.buckets.free.under_discard();
    (free + s.buckets.pending().len() + s.buckets.empty_count()) as u64
}

/// How full the root is, in percent.
fn root_usage_percent(s: &State) -> u64 {
    let words = s.root_pin.as_ref().map_or(0, |pin| s.nodes.get(pin.slot()).node().words_in_view());
    words as u64 * 8 * 100 / (s.root.key.sectors() * 512).max(1)
}

fn unserved(s: &State) -> Vec<Unserved> {
    let is_served = |inode| s.volumes.iter().any(|(_, volume)| volume.inode == Some(inode));
    let left = s.uuids.used().filter(|(inode, _)| !is_served(*inode));
    left.map(|(inode, slot)| Unserved {
        uuid: slot.uuid,
        label: slot.label,
        flash_sectors: slot.is_flash_only().then_some(slot.sectors),
        dirty_sectors: s.dirty.of(inode),
        is_counted: s.has_counted(inode),
    })
    .collect()
}

fn doubted(s: &State) -> Vec<Doubted> {
    let of = |(inode, slot): (Inode, &UuidSlot)| Doubted {
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
    /// A snapshot.
    #[must_use]
    pub fn status(&self) -> Status {
        let volumes = self.volumes();
        let device_can_discard = self.cache().info().discard;
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
            buckets_metadata: s.buckets.count_of(Usage::Meta),
            buckets_reserved: s.buckets.count_of(Usage::Reserve),
            walked_percent: s.counted_percent(),
            replay_keys: s.overlay.len() as u64,
            buckets_unused: unused(s),
            buckets_clean: s.buckets.clean_count() as u64,
            buckets_dirty: s.buckets.count()
                - s.buckets.available()
                - s.buckets.count_of(Usage::Meta)
                - s.buckets.count_of(Usage::Reserve)
                - s.buckets.count_of(Usage::Unknown)
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
            io_errors: s.wear.errors(),
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

    /// What has been counted of each bucket, in their order, as keys came and went; for whoever counts the tree again. `None`
    /// while the walk that counts them is under way, or a replay.
    #[must_use]
    pub fn counted(&self) -> Option<Vec<BucketCount>> {
        let count = |bucket: &Bucket| BucketCount {
            live: bucket.live,
            dirty: bucket.dirty,
            free: matches!(bucket.usage, Usage::Free | Usage::Pending | Usage::Reserve),
        };
        self.with(|s| s.is_counted().then(|| s.buckets.iter().map(|(_, bucket)| count(&bucket)).collect()))
    }

    /// Asserts what must always hold, in memory; the simulator calls it where a process begins and ends.
    ///
    /// # Panics
    /// If something does not hold.
    pub fn assert_invariants(&self) {
        self.with(|s| {
            s.check_invariants();
            s.nodes.check_invariants();
            let shares = self.inner.shares.get();
            assert_eq!(s.nodes.budget(), shares.budget, "there is as much memory as was shared out");
            let tickets = self.inner.tickets.available();
            assert!(tickets <= shares.tickets, "{tickets} tickets for memory for {}", shares.tickets);
            let open = s.buckets.iter().filter(|(_, bucket)| bucket.usage == Usage::Open).count();
            assert_eq!(open, s.open.count(), "open buckets are known");
        });
    }
}
