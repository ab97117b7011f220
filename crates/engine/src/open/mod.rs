//! Start-up: a set that has been started before is recovered, any other is initialised.
//!
//! Recovery reads structures in the order in which they refer to each other: superblock, journal,
//! priorities, the tree from its root, the table of volumes. Nothing is written before all of that
//! has been read, verified and flushed. (The exception is a set with a reserve: its tree is walked
//! in the background, see `recover`.) The flush is needed because a killed process may have left
//! the newest state in the device's volatile cache only: what only the older state refers to would
//! be overwritten. Then the journal is replayed through the same transitions as writes.

mod damaged;
mod initialise;
mod recover;

use crate::btree::budget::{NodeBudget, node_budget_min};
use crate::btree::cache::NodeCache;
use crate::btree::frozen_ranges::FrozenRanges;
use crate::btree::unreadable::UnreadableNodes;
use crate::btree::walk_frontier::WalkFrontier;
use crate::btree::{NodeRef, write};
use crate::cpu_cost::CpuCost;
use crate::error::Error;
use crate::gc::{self, moving::MoveRounds};
use crate::journal::{Journal, overlay::Overlay, writer};
use crate::lost_acks::{self, LossHistory};
use crate::options::Options;
use crate::phases::Phases;
use crate::policy::{Congestion, IoErrorCount};
use crate::set::{CacheSet, Inner, Signals, TaskKind};
use crate::space::buckets::{BYTES_PER_BUCKET, table_bytes};
use crate::space::{
    BucketUsage, Buckets, DiscardStats, OpenBuckets, Starvation, allocator, discards, prios, reserve,
    summaries,
};
use crate::state::{BTREE_RESERVE, DirtyCounts, PrioChains, State};
use crate::stats::Stats;
use crate::uuids::UuidTable;
use crate::volume::{Volumes, record};
use crate::writeback::dirty_throttle::DirtyThrottle;
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::rc::Rc;
use alloc::sync::Arc;
use alloc::vec::Vec;
use bcached_env::sync::Semaphore;
use bcached_env::{BufferPool, Disk, DiskId, Env, Note};
use bcached_format::{
    BucketId, CacheSuperblock, Gen, Geometry, Key, SUPERBLOCK_BYTES, Superblock, TableSeal,
};
use core::cell::{Cell, RefCell};

/// Number of unreferenced buckets taken without a new generation at start, because the walk has
/// proven that nothing points to them. Enough for the splits of a replay, which must not need the
/// journal to find space.
const STARTING_FREE: usize = 4 * BTREE_RESERVE;

/// Memory kept for fills, in bytes: as much as is usually in flight together.
const STOCK_BYTES: usize = 1 << 20;

impl CacheSet {
    /// Opens the cache set on `cache`: recovers one that has been started before, initialises any
    /// other. Recovery reads the whole tree first, unless the set has a reserve with which requests
    /// can be served during the walk ([`Options::reserve`]).
    pub async fn open(env: Env, cache: DiskId, note: Box<dyn Note>, options: Options) -> Result<Self, Error> {
        let disk = env.disk(cache);
        let Superblock::Cache(superblock) = record::read_superblock(&disk).await? else {
            return Err(Error::NotACache);
        };
        if superblock.is_synchronous() {
            recover::recover(env, disk, superblock, note, options).await
        } else {
            initialise::initialise(env, disk, superblock, note, options).await
        }
    }
}

/// Minimum number of journal buckets: what a kernel gives to the smallest set that it can run.
/// Fewer have no room for the gap and for the entries that free space.
const JOURNAL_BUCKETS_MIN: u64 = 4;

/// Refuses sizes that the superblock's checks allow but the engine cannot run: it would wait for
/// room forever.
fn check_sizes(geometry: &Geometry) -> Result<(), Error> {
    let Geometry { bucket_sectors, block_sectors, journal_buckets, .. } = *geometry;
    if bucket_sectors < 2 * block_sectors || journal_buckets < JOURNAL_BUCKETS_MIN {
        return Err(Error::Sizes { bucket_sectors, block_sectors, journal_buckets });
    }
    Ok(())
}

/// Returns the number of buckets if there is memory for the set: for the table, for what else an
/// opening needs, and for the minimum of nodes. The memory is allocated and released again: if
/// later small allocations failed, they would end the process, and other sets with it
/// (invariant L4).
fn check_memory(geometry: &Geometry, options: &Options) -> Result<usize, Error> {
    NodeBudget::new(options.node_budget_bytes, geometry.node_sectors(), 0)?;
    let buckets = geometry.buckets;
    let no_memory = Error::BucketMemory { buckets, needed: table_bytes(buckets) };
    let count = usize::try_from(buckets).ok().filter(|count| *count < TABLE_MAX);
    let Some(count) = count else { return Err(no_memory) };
    let all = count.saturating_mul(BYTES_PER_BUCKET + BYTES_WHILE_OPENED + BYTES_LEFT_OVER);
    let mut memory: Vec<u8> = Vec::new();
    let nodes = node_budget_min(geometry.node_sectors(), 0);
    let is_there = memory.try_reserve_exact(all.saturating_add(nodes)).is_ok();
    // Keeps the compiler from removing the unused allocation.
    core::hint::black_box(&memory);
    if is_there { Ok(count) } else { Err(no_memory) }
}

/// Maximum number of buckets of a set that a table can address.
const TABLE_MAX: usize = u32::MAX as usize;

/// Memory per bucket that an opening takes in addition to the table: the stored entries, and a sort
/// order.
const BYTES_WHILE_OPENED: usize = size_of::<(Gen, u16)>() + size_of::<u32>();

/// Memory per bucket that must be left after the table is allocated: a large set must not take the
/// last of it from others.
const BYTES_LEFT_OVER: usize = 8;

/// The parts of a state that differ between starts.
struct StateParts {
    geometry: Geometry,
    buckets: Buckets,
    root: NodeRef,
    journal: Journal,
    prios: PrioChains,
    uuids: UuidTable,
    uuid_key: Key,
    uuid_seal: Option<TableSeal>,
    opened_at: u64,
    dirty: DirtyCounts,
    frontier: WalkFrontier,
    reserve_wanted: u64,
    shares: NodeBudget,
}

fn assemble(
    env: Env,
    cache: Disk,
    superblock: CacheSuperblock,
    note: Box<dyn Note>,
    options: Options,
    mut parts: StateParts,
) -> CacheSet {
    let signals = Signals::of_a_set();
    let replacement = options.replacement.unwrap_or(superblock.replacement());
    parts.buckets.set_replacement(replacement, env.random());
    let phases = Arc::clone(&options.phases);
    let open = OpenBuckets::new(&parts.geometry, options.summary_share);
    let state = State {
        geometry: parts.geometry,
        options,
        now: env.now(),
        nodes: node_cache(&parts, &signals),
        root: parts.root,
        unreadable: UnreadableNodes::default(),
        frozen: FrozenRanges::default(),
        root_pin: None,
        journal: parts.journal,
        overlay: Overlay::default(),
        note,
        buckets: parts.buckets,
        open,
        discards: DiscardStats::default(),
        prios: parts.prios,
        uuids: parts.uuids,
        uuid_key: parts.uuid_key,
        uuid_seal: parts.uuid_seal,
        opened_at: parts.opened_at,
        replayed_dirty: BTreeSet::new(),
        coming: Vec::new(),
        forgetting: BTreeSet::new(),
        dirty: parts.dirty,
        dirty_behind_ends: BTreeMap::new(),
        frontier: parts.frontier,
        reserve_wanted: parts.reserve_wanted,
        volumes: Volumes::default(),
        superblock,
        reclaim_to: 0,
        node_pressure: false,
        untold: false,
        crowded: Vec::new(),
        failed: None,
        starvation: Starvation::default(),
        moving: MoveRounds::default(),
        losses: LossHistory::default(),
        note_held: true,
        background: 0,
        fill_bytes: 0,
        fills: 0,
        last_request: env.now(),
        parked_is_in_the_way: false,
        dirty_throttle: DirtyThrottle::default(),
        stopping: false,
        settled: false,
        stopped: false,
        congestion: Congestion::default(),
        io_errors: IoErrorCount::default(),
        work: CpuCost::default(),
        stats: Stats::default(),
    };
    around(env, cache, state, (signals, phases), parts.shares)
}

/// Builds the set around a state.
fn around(
    env: Env,
    cache: Disk,
    state: State,
    (signals, phases): (Signals, Arc<Phases>),
    shares: NodeBudget,
) -> CacheSet {
    let inner = Inner {
        env,
        cache,
        state: RefCell::new(state),
        signals,
        tickets: Semaphore::new(shares.tickets),
        shares: Cell::new(shares),
        resizing: Semaphore::new(1),
        structure: Semaphore::new(1),
        metadata: Semaphore::new(1),
        orphans: Semaphore::new(1),
        phases,
        stock: RefCell::new(BufferPool::new(STOCK_BYTES)),
        under_way: RefCell::default(),
        running: Default::default(),
    };
    CacheSet { inner: Rc::new(inner) }
}

fn node_cache(parts: &StateParts, signals: &Signals) -> NodeCache {
    let pending_bytes_max = write::pending_bytes_max(&parts.geometry);
    let freed = Rc::clone(&signals.node_memory);
    NodeCache::new(parts.shares.budget, parts.shares.node_bytes, pending_bytes_max, freed)
}

fn start_tasks(set: &CacheSet) {
    set.spawn(TaskKind::Writing, writer::run);
    set.spawn(TaskKind::Writing, write::run);
    set.spawn(TaskKind::Allocating, allocator::run);
}

/// Returns the superblock as it is after one more start.
fn next_superblock(set: &CacheSet) -> Box<[u8; SUPERBLOCK_BYTES]> {
    let seconds = set.env().wall_seconds();
    set.with(|s| {
        s.superblock.advance();
        s.superblock.set_last_mount(seconds);
        s.superblock.seal()
    })
}

/// Refuses a number so large that counting on from it could overflow: no set lives that long.
fn check_number(sequence: u64) -> Result<(), Error> {
    if sequence > u64::MAX / 2 {
        return Err(Error::Inconsistent("a sequence number of the journal or priorities is far too large"));
    }
    Ok(())
}

fn journal_sectors(geometry: &Geometry) -> Vec<u64> {
    (0..geometry.journal_buckets).map(|index| geometry.sector_of(geometry.journal_bucket(index))).collect()
}

/// Takes unreferenced buckets: a spare chain of priorities, and a stock for the splits of the
/// replay.
fn reserve_unreferenced(buckets: &mut Buckets, chain: u64) -> Result<Vec<BucketId>, Error> {
    let wanted = usize::try_from(chain).expect("a chain is short") + STARTING_FREE;
    let unreferenced: Vec<_> = buckets
        .iter()
        .filter(|(_, bucket)| bucket.usage == BucketUsage::Data && bucket.live == 0 && bucket.pins == 0)
        .map(|(id, _)| id)
        .take(wanted)
        .collect();
    for id in unreferenced {
        buckets.free_unreferenced(id);
    }
    prios::take_unreferenced(buckets, chain)
}

/// Returns the set if it could be `opened`. Otherwise, when this returns, nothing is written any
/// more and nothing refers to the set: its device can be opened again.
async fn abandon_unless(set: CacheSet, opened: Result<(), Error>) -> Result<CacheSet, Error> {
    let Err(error) = opened else { return Ok(set) };
    set.with(|s| (s.stopping, s.settled, s.stopped) = (true, true, true));
    let _told_already = set.fail(error.clone());
    for kind in [TaskKind::Changing, TaskKind::Allocating, TaskKind::Rewriting, TaskKind::Writing] {
        set.ended(kind).await;
    }
    Err(error)
}

/// Ends every start: adds the flash-only volumes and starts the background tasks.
async fn finish(set: &CacheSet) {
    set.with(|s| {
        // This start reports what was lost: invariant D32. After the note's new session begins, it
        // is not reported again.
        s.losses.before = lost_acks::by_volume(&s.note.given_up(), &s.uuids);
        // What the note held is durable now, and the superblock says that a new session has begun,
        // which the note is for from here on: invariant D7.
        s.note.begin(s.superblock.session());
        s.note_held = false;
    });
    crate::volume::flash::add_all(set);
    set.spawn(TaskKind::Allocating, discards::run);
    set.spawn(TaskKind::Allocating, summaries::run);
    set.spawn(TaskKind::Changing, gc::pass::run);
    set.spawn(TaskKind::Changing, gc::moving::run);
    set.spawn(TaskKind::Changing, gc::orphans::run);
    set.spawn(TaskKind::Changing, reserve::run);
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_format::{SetMagic, Uuid};

    /// The superblock may claim more buckets than any machine has memory for.
    #[test]
    fn a_set_of_more_buckets_than_there_can_be_memory_for_is_refused() {
        // Proves invariant L4.
        let of = |buckets| {
            let magic = SetMagic::of(Uuid([1; 16]));
            let sizes = (8, 16, 1, 4);
            let (block_sectors, bucket_sectors, first_bucket, journal_buckets) = sizes;
            Geometry { block_sectors, bucket_sectors, buckets, first_bucket, journal_buckets, magic }
        };
        assert_eq!(check_memory(&of(1024), &Options::default()), Ok(1024));
        for buckets in [u64::from(u32::MAX), 1 << 40, u64::MAX] {
            let needed = table_bytes(buckets);
            let refused = Err(Error::BucketMemory { buckets, needed });
            assert_eq!(check_memory(&of(buckets), &Options::default()), refused);
        }
    }
}
