//! The state of a cache set: everything that a transition may change. It lives in one place, is
//! reached only inside `CacheSet::with`, and no future holds a part of it across a wait.

use crate::btree::NodeRef;
use crate::btree::cache::{NodeCache, NodePin};
use crate::btree::frozen_ranges::FrozenRanges;
use crate::btree::unreadable::UnreadableNodes;
use crate::btree::walk_frontier::WalkFrontier;
use crate::cpu_cost::CpuCost;
use crate::error::Error;
use crate::gc::moving::MoveRounds;
use crate::journal::Journal;
use crate::journal::overlay::Overlay;
use crate::lost_acks::{self, LossHistory};
use crate::options::Options;
use crate::policy::{Congestion, IoErrorCount};
use crate::space::{Allocation, BucketUsage, Buckets, DataClass, DiscardStats, OpenBuckets, Starvation};
use crate::stats::{Stats, VolumeStats};
use crate::uuids::UuidTable;
use crate::volume::{Volume, VolumeId, Volumes};
use crate::writeback::dirty_throttle::DirtyThrottle;
use crate::writeback::stripes::Stripes;
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use bcached_env::{IoError, Note, Time};
use bcached_format::{
    BackingState, BucketId, CacheSuperblock, Geometry, Inode, Key, Position, TableSeal, Uuid,
};
use core::time::Duration;

/// Free buckets kept for B-tree nodes and the uuid table: enough for a split on every level at
/// once, and one table.
pub const BTREE_RESERVE: usize = 12;
/// Free buckets kept for moving live data, by which more are freed.
pub const MOVING_RESERVE: usize = 2;

/// Dirty sectors per volume.
#[derive(Default)]
pub struct DirtyCounts {
    by_inode: BTreeMap<Inode, u64>,
    /// Dirty sectors by stripe, for the volumes whose stripes matter.
    stripes: BTreeMap<Inode, Stripes>,
}

impl DirtyCounts {
    /// Dirty sectors of volume `inode`.
    #[must_use]
    pub fn of(&self, inode: Inode) -> u64 {
        self.by_inode.get(&inode).copied().unwrap_or(0)
    }

    /// The volumes that have dirty sectors.
    pub fn inodes(&self) -> impl Iterator<Item = Inode> {
        self.by_inode.iter().filter(|(_, sectors)| **sectors > 0).map(|(inode, _)| *inode)
    }

    /// Dirty sectors of all volumes.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.by_inode.values().sum()
    }

    /// Adds dirty sectors that the walk has found. Stripes are not counted here: a caller that
    /// needs them reads the tree.
    pub fn add(&mut self, inode: Inode, sectors: u64) {
        *self.by_inode.entry(inode).or_insert(0) += sectors;
    }

    /// Records that a dirty key has entered the tree; `counted` sectors of it lie where the tree
    /// has been walked.
    pub fn add_key(&mut self, key: &Key, counted: u32) {
        self.add(key.inode, u64::from(counted));
        if let Some(stripes) = self.stripes.get_mut(&key.inode) {
            stripes.add(key.start(), key.end);
        }
    }

    /// Records that a dirty key has left the tree.
    pub fn remove_key(&mut self, key: &Key, counted: u32) {
        if counted > 0 {
            let count = self.by_inode.get_mut(&key.inode).expect("dirty sectors were added before");
            let left = count.checked_sub(u64::from(counted));
            *count = left.expect("no more dirty sectors are removed than were added");
        }
        if let Some(stripes) = self.stripes.get_mut(&key.inode) {
            stripes.remove(key.start(), key.end);
        }
    }

    /// Dirty sectors of a volume by stripe, if they are counted.
    #[must_use]
    pub fn stripes(&self, inode: Inode) -> Option<&Stripes> {
        self.stripes.get(&inode)
    }

    /// Like [`DirtyCounts::stripes`], for the code that counts them.
    pub fn stripes_mut(&mut self, inode: Inode) -> Option<&mut Stripes> {
        self.stripes.get_mut(&inode)
    }

    /// Begins to count the stripes of a volume, or stops counting them.
    pub fn set_stripes(&mut self, inode: Inode, stripes: Option<Stripes>) {
        match stripes {
            Some(stripes) => drop(self.stripes.insert(inode, stripes)),
            None => drop(self.stripes.remove(&inode)),
        }
    }

    /// Stops counting the stripes of the volumes for which `is_gone` holds.
    pub fn forget_stripes(&mut self, is_gone: impl Fn(Inode) -> bool) {
        self.stripes.retain(|inode, _| !is_gone(*inode));
    }
}

/// The current chain of priority buckets, and the one that is written next. They alternate, so
/// storing generations never needs a free bucket.
#[derive(Default)]
pub struct PrioChains {
    /// The current chain marks the reserve: this process has stored it, or has found it so and
    /// started from it.
    pub marks_reserve: bool,
    /// The chain that the newest journal entry names.
    pub current: Vec<BucketId>,
    /// The chain that is written next; nothing points to it.
    pub spare: Vec<BucketId>,
    /// Sequence number of the current chain.
    pub sequence: u64,
}

/// The state of a cache set.
pub struct State {
    /// Sizes; they never change.
    pub geometry: Geometry,
    /// The options.
    pub options: Options,
    /// The time at the start of this transition.
    pub now: Time,
    /// Nodes in memory.
    pub nodes: NodeCache,
    /// The root, as the next journal entry will name it.
    pub root: NodeRef,
    /// Nodes that could not be read.
    pub unreadable: UnreadableNodes,
    /// Key ranges of damaged nodes, which are not accessed any more.
    pub frozen: FrozenRanges,
    /// Keeps the root in memory.
    pub root_pin: Option<NodePin>,
    /// The journal.
    pub journal: Journal,
    /// Keys of the journal that are not in the tree yet.
    pub overlay: Overlay,
    /// The note: records of acknowledged writes that outlive the process.
    pub note: Box<dyn Note>,
    /// Buckets.
    pub buckets: Buckets,
    /// The open buckets, where new data is written.
    pub open: OpenBuckets,
    /// Counters of discards on the cache device.
    pub discards: DiscardStats,
    /// Where generations are stored.
    pub prios: PrioChains,
    /// The table of volumes.
    pub uuids: UuidTable,
    /// The newest journal entry when the set was opened; 0: the set had never been started.
    pub opened_at: u64,
    /// The volumes for which the journal held dirty keys when the set was opened.
    pub replayed_dirty: BTreeSet<Inode>,
    /// Where the table is stored, as the next journal entry will name it.
    pub uuid_key: Key,
    /// What that entry says of the stored table. `None` until this version of bcached has stored
    /// it.
    pub uuid_seal: Option<TableSeal>,
    /// Backing devices that are being attached or registered.
    pub coming: Vec<Uuid>,
    /// Volumes of the table that cannot be served now: they are being forgotten or created.
    pub forgetting: BTreeSet<Inode>,
    /// Dirty sectors, as far as the tree has been walked.
    pub dirty: DirtyCounts,
    /// Dirty sectors beyond the ends of flash-only volumes, as last counted.
    pub dirty_behind_ends: BTreeMap<Inode, u64>,
    /// How far the tree has been walked.
    pub frontier: WalkFrontier,
    /// Number of buckets to keep in reserve for the next start.
    pub reserve_wanted: u64,
    /// The volumes being served.
    pub volumes: Volumes,
    /// The cache device's superblock, as last written.
    pub superblock: CacheSuperblock,
    /// Leaves that hold keys of journal entries up to this one must be written: the journal needs
    /// their space.
    pub reclaim_to: u64,
    /// A task waits for node memory: leaves with unwritten keys must be written.
    pub node_pressure: bool,
    /// The open journal entry has its first key, or a leaf its first unwritten one, and their
    /// writers have not been notified yet. The key ages from now on.
    pub untold: bool,
    /// Positions in leaves that are nearly full and for which no rewrite has begun yet.
    pub crowded: Vec<Position>,
    /// Whether buckets will become free.
    pub starvation: Starvation,
    /// Rounds of moving live data.
    pub moving: MoveRounds,
    /// The first failed write of metadata, or a later one that is not transient. Nothing is written
    /// after it.
    pub failed: Option<Error>,
    /// Acknowledged writes that failures of the cache device have made void.
    pub losses: LossHistory,
    /// The note still holds what an earlier process left. Nothing is added to it or forgotten until
    /// that is durable.
    pub note_held: bool,
    /// Operations such as fills that are in flight for requests already answered.
    pub background: u64,
    /// The fills among them.
    pub fills: usize,
    /// Bytes of these fills.
    pub fill_bytes: u64,
    /// The set is being stopped: no new work is admitted, but the journal, the leaf writer and the
    /// allocator continue.
    pub stopping: bool,
    /// All admitted work has ended: no more buckets are needed, and the allocator ends.
    pub settled: bool,
    /// Everything has been written: the journal writer and the leaf writer end.
    pub stopped: bool,
    /// When the last request arrived or ended.
    pub last_request: Time,
    /// The allocator has found only pinned buckets: parked data pins some of them.
    pub parked_is_in_the_way: bool,
    /// How fast clients may make data dirty when the cache is nearly full of dirty data.
    pub dirty_throttle: DirtyThrottle,
    /// How slow the cache device is.
    pub congestion: Congestion,
    /// How often the cache device has failed recently.
    pub io_errors: IoErrorCount,
    /// The cost of this transition so far.
    pub work: CpuCost,
    /// Counters.
    pub stats: Stats,
}

impl State {
    /// Returns true if volume `inode` has no dirty data: it has been counted, or its superblock
    /// says so. The superblock is durably changed before any data becomes dirty. (A kernel that
    /// dies at that moment does not ensure this. If such data was never counted since, it counts as
    /// lost then.)
    #[must_use]
    pub fn is_clean(&self, inode: Inode) -> bool {
        let says_so = |(_, volume): (VolumeId, &Volume)| {
            volume.inode == Some(inode) && volume.state() == Some(BackingState::Clean)
        };
        // Keys still to be put into the tree that are clean, or holes, make nothing dirty.
        self.dirty.of(inode) == 0
            && !self.overlay.has_dirty_of(inode)
            && (self.has_passed(inode) || self.volumes.iter().any(says_so))
    }

    /// Returns why it can never be known whether volume `inode` has dirty data, if so: damaged
    /// nodes hide it. All other nodes have been counted, and hold no dirty data of it.
    #[must_use]
    pub fn hidden(&self, inode: Inode) -> Option<Error> {
        let is_all = self.is_counted() && self.dirty.of(inode) == 0 && !self.is_clean(inode);
        self.frozen.hides(inode).filter(|_| is_all)
    }

    /// Takes space for data. `of`: where the data begins in its volume, if it may have to be moved
    /// later. The space is pinned until its key is in the tree or until [`State::unpin`].
    pub fn take_space(&mut self, class: DataClass, of: Option<Position>, wanted: u64) -> Option<Allocation> {
        let keep = match class {
            // Until the tree has been walked there is little space, and no more can be freed.
            DataClass::Clean if !self.frontier.is_complete() => return None,
            // New keys take journal entries, which the replay needs.
            _ if self.is_replay_pressed() => return None,
            DataClass::Moved => BTREE_RESERVE,
            DataClass::Dirty(_) | DataClass::Clean => BTREE_RESERVE + MOVING_RESERVE,
        };
        self.open.take(&mut self.buckets, class, of, wanted, keep)
    }

    /// Closes the open buckets of volumes that have left the cache or are no longer served. Nothing
    /// more is written to them, and until they are closed their space cannot be used for anything
    /// else.
    pub fn close_left(&mut self) {
        let Self { open, buckets, volumes, .. } = self;
        // Normally there is one per volume, plus those of clean and of moved data.
        if open.count() > volumes.iter().count() {
            let is_there = |inode| volumes.iter().any(|(_, volume)| volume.inode == Some(inode));
            open.close_those(|class| matches!(class, DataClass::Dirty(inode) if !is_there(inode)), buckets);
        }
    }

    /// Unpins space whose key is in the tree, or will never be: its bucket may be reused when its
    /// turn comes.
    pub fn unpin(&mut self, pointers: &bcached_format::Pointers) {
        for pointer in pointers.as_slice() {
            self.buckets.unpin(*pointer);
        }
    }

    /// Pins an extent that is being read or is not in the tree yet: its bucket must not be reused.
    pub fn pin(&mut self, pointers: &bcached_format::Pointers) {
        for pointer in pointers.as_slice() {
            self.buckets.pin(*pointer);
        }
    }

    /// Returns why no bucket will become free: GC would have to complete first, and cannot. For
    /// callers that can do without a bucket.
    #[must_use]
    pub fn starved(&self) -> Option<Error> {
        self.starvation.refusal()
    }

    /// Records the end of the flush of the cache device that was in flight. If it failed, the
    /// writes it covered may be lost.
    pub fn cache_flush_ends(&mut self, result: Result<(), IoError>) {
        // The note of the earlier process is older than the first flush of this start.
        let is_proven = self.note_held && self.buckets.flushes().have_succeeded();
        self.buckets.flushes().ends(result);
        // Only what the first flush has proven outlives a failed one in the note: invariant D32.
        if result.is_err() && !is_proven {
            self.give_up();
        }
    }

    /// Makes void the keys that only the note holds, because their data may be lost. The next start
    /// must not bring them back, and is told of them.
    pub fn give_up(&mut self) {
        let records = self.note.give_up();
        if !records.is_empty() {
            self.losses.here = lost_acks::by_volume(&records, &self.uuids);
        }
    }

    /// Number of free buckets below which the allocator works: the reserves, and what is used while
    /// a batch becomes free. Keeping empty buckets ready costs nothing.
    #[must_use]
    pub fn free_low(&self) -> usize {
        BTREE_RESERVE + MOVING_RESERVE + self.free_batch()
    }

    /// Number of buckets invalidated per write of the priorities.
    #[must_use]
    pub fn free_batch(&self) -> usize {
        self.kept_ready().max(self.empty_batch())
    }

    /// Number of buckets invalidated per write of the priorities while a replay has little room in
    /// the journal. It may be unable to do that again.
    #[must_use]
    pub fn replay_batch(&self) -> usize {
        if self.is_replay_pressed() {
            usize::try_from(self.geometry.buckets / 8).unwrap_or(usize::MAX)
        } else {
            0
        }
    }

    /// Number of empty buckets that one write of the priorities makes ready.
    fn empty_batch(&self) -> usize {
        let share = usize::try_from(self.geometry.buckets / 8).unwrap_or(usize::MAX).min(8192);
        self.buckets.empty_count().min(share)
    }

    /// Number of buckets that are not available without writing dirty data back.
    #[must_use]
    pub fn used_buckets(&self) -> u64 {
        if !self.frontier.is_complete() {
            // Unknown. Whatever space there is for data now is used as long as it lasts.
            return 0;
        }
        let had = self.buckets.available() + self.buckets.count_of(BucketUsage::Reserve);
        self.buckets.count().saturating_sub(had)
    }

    /// Percentage of buckets that are not available without writing dirty data back.
    #[must_use]
    pub fn in_use_percent(&self) -> u64 {
        let count = self.buckets.count();
        self.used_buckets() * 100 / count
    }

    /// Counts a fill of a volume that was dropped because its range was written to.
    pub fn fill_has_collided(&mut self, id: VolumeId) {
        let (stats, volume) = self.stats_of(id);
        stats.fill_races += 1;
        if let Some(volume) = volume {
            volume.miss_collisions += 1;
        }
    }

    /// Returns the counters of the set and of a volume, for counting something that has a window.
    pub fn stats_of(&mut self, id: VolumeId) -> (&mut Stats, Option<&mut VolumeStats>) {
        // Both are advanced to the present before anything is counted: invariant N2.
        self.stats.turn(self.now);
        let mut volume = self.volumes.get_mut(id).map(|volume| &mut volume.stats);
        if let Some(volume) = &mut volume {
            volume.turn(self.now);
        }
        (&mut self.stats, volume)
    }

    /// Returns the current [`Congestion::limit_max`]; 0 if the cache device is not congested, or
    /// congestion is not tracked.
    #[must_use]
    pub fn congested_sectors(&self) -> u64 {
        let limit = self.options.tracks_congestion().then(|| self.congestion.limit_max(self.now));
        limit.flatten().unwrap_or(0)
    }

    /// Records that an operation on `bytes` of the cache device, from `sector` on, has ended;
    /// `worked`: it succeeded.
    pub fn cache_has_done(&mut self, sector: u64, bytes: usize, worked: bool) {
        let range = sector..sector + bytes as u64 / 512;
        self.io_errors.take_in(&range, !worked, self.options.io_error_halflife);
    }

    /// Returns true if the cache device has failed so often that nothing is added any more, and
    /// dirty data is written back.
    #[must_use]
    pub const fn is_worn(&self) -> bool {
        self.io_errors.has_reached(self.options.io_error_limit)
    }

    /// Records how long a read of data from the cache device took.
    pub fn cache_has_read(&mut self, latency: Duration) {
        self.congestion.take_in(self.now, latency, self.options.congested_read_threshold);
    }

    /// Records how long a write of data to the cache device took.
    pub fn cache_has_written(&mut self, latency: Duration) {
        self.congestion.take_in(self.now, latency, self.options.congested_write_threshold);
    }

    /// Asserts the invariants of the state. The simulator calls it where a process begins and ends.
    pub fn check_invariants(&self) {
        let total: u64 = self.buckets.iter().map(|(_, bucket)| u64::from(bucket.dirty)).sum();
        assert_eq!(total, self.dirty.total(), "dirty sectors by bucket and by volume agree");
        for usage in [BucketUsage::Meta, BucketUsage::Reserve, BucketUsage::Unknown] {
            let found = self.buckets.iter().filter(|(_, bucket)| bucket.usage == usage).count();
            assert_eq!(found as u64, self.buckets.count_of(usage), "buckets are counted by usage: {usage:?}");
        }
        let is_complete = self.frontier.is_complete();
        let are_known = self.buckets.count_of(BucketUsage::Unknown) == 0;
        assert!(!is_complete || are_known || !self.frozen.is_empty(), "every bucket is known");
        for (inode, stripes) in &self.dirty.stripes {
            if is_complete && stripes.counted_to() == Position::MAX.offset {
                assert_eq!(
                    stripes.total(),
                    self.dirty.of(*inode),
                    "dirty sectors by stripe and by volume agree"
                );
            }
        }
        self.overlay.check_invariants();
        for (id, bucket) in self.buckets.iter() {
            assert!(bucket.dirty <= bucket.live, "bucket {id}: more dirty than live");
        }
    }
}
