//! Start-up (format 15): a set that has been started is recovered, one that has not is initialised.
//!
//! Recovery reads in the order in which things point at each other: superblock, journal, priorities, the tree from
//! its root, the table of volumes. Nothing is written before all of that has been read and verified, and flushed: a process
//! that was killed may have left the newest of it in the device's volatile cache, and what only the older state refers to
//! would be written over. Then the journal is replayed through the same transitions as writes.

use crate::btree::budget::Shares;
use crate::btree::cache::NodeCache;
use crate::btree::unreadable::Unreadable;
use crate::btree::{Child, load, walk, write};
use crate::error::{Doing, Error};
use crate::gc::{self, moving::Rounds};
use crate::journal::{Journal, replay, scan, writer};
use crate::options::Options;
use crate::phases::Phase;
use crate::policy::{Congestion, Wear};
use crate::set::{CacheSet, Duty, Inner, Signals};
use crate::space::{Buckets, OpenBuckets, Starvation, Usage, allocator, prios};
use crate::state::{BTREE_RESERVE, PrioChains, State};
use crate::stats::Stats;
use crate::uuids::{self, UuidTable};
use crate::volume::{Volumes, record};
use crate::work::Work;
use crate::writeback::room::Room;
use crate::written::Cause;
use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::rc::Rc;
use alloc::sync::Arc;
use alloc::vec::Vec;
use bcached_env::sync::Semaphore;
use bcached_env::{Buffer, Disk, DiskId, Env, Note};
use bcached_format::{
    CacheSuperblock, DeviceIndex, Gen, Geometry, Key, Pointers, Position, SUPERBLOCK_BYTES, Superblock,
};
use bcached_node::Node;
use core::cell::RefCell;

/// Buckets taken as they are at start, because the walk has proven that nothing points to them: enough for the splits
/// of a replay, which must not need the journal to find space.
const STARTING_FREE: usize = 4 * BTREE_RESERVE;

impl CacheSet {
    /// Opens the cache set on `cache`: recovers one that has been started, initialises one that has not. Recovery reads
    /// the whole tree, so it takes as long as that; nothing is served before.
    pub async fn open(env: Env, cache: DiskId, note: Box<dyn Note>, options: Options) -> Result<Self, Error> {
        let disk = env.disk(cache);
        let Superblock::Cache(superblock) = record::read_superblock(&disk).await? else {
            return Err(Error::NotACache);
        };
        if superblock.is_synchronous() {
            recover(env, disk, superblock, note, options).await
        } else {
            initialise(env, disk, superblock, note, options).await
        }
    }
}

/// Fewest journal buckets: what a kernel gives to the smallest set that it can run. With fewer there is no room for the
/// gap and for the entries that free space.
const JOURNAL_BUCKETS_MIN: u64 = 4;

/// Refuses what the superblock's checks allow and the engine cannot run: it would wait for room for ever.
fn check_sizes(geometry: &Geometry) -> Result<(), Error> {
    let Geometry { bucket_sectors, block_sectors, journal_buckets, .. } = *geometry;
    if bucket_sectors < 2 * block_sectors || journal_buckets < JOURNAL_BUCKETS_MIN {
        return Err(Error::Sizes { bucket_sectors, block_sectors, journal_buckets });
    }
    Ok(())
}

/// What a state is made of; the rest is the same for every start.
struct Parts {
    geometry: Geometry,
    buckets: Buckets,
    root: Child,
    journal: Journal,
    prios: PrioChains,
    uuids: UuidTable,
    uuid_key: Key,
    dirty: crate::state::DirtyCounts,
    shares: Shares,
}

fn assemble(
    env: Env,
    cache: Disk,
    superblock: CacheSuperblock,
    note: Box<dyn Note>,
    options: Options,
    mut parts: Parts,
) -> CacheSet {
    let signals = Signals::default();
    parts.buckets.set_replacement(superblock.replacement(), env.random());
    let shares = parts.shares;
    let phases = Arc::clone(&options.phases);
    let state = State {
        geometry: parts.geometry,
        options,
        now: env.now(),
        nodes: NodeCache::new(shares.budget, shares.node_bytes, Rc::clone(&signals.node_memory)),
        root: parts.root,
        unreadable: Unreadable::default(),
        root_pin: None,
        journal: parts.journal,
        note,
        buckets: parts.buckets,
        open: OpenBuckets::default(),
        prios: parts.prios,
        uuids: parts.uuids,
        uuid_key: parts.uuid_key,
        forgetting: BTreeSet::new(),
        dirty: parts.dirty,
        volumes: Volumes::default(),
        superblock,
        reclaim_to: 0,
        node_pressure: false,
        untold: false,
        failed: None,
        starvation: Starvation::default(),
        moving: Rounds::default(),
        note_held: true,
        background: 0,
        fill_bytes: 0,
        last_request: env.now(),
        parked_is_in_the_way: false,
        room: Room::default(),
        stopping: false,
        settled: false,
        stopped: false,
        congestion: Congestion::default(),
        wear: Wear::default(),
        work: Work::default(),
        stats: Stats::default(),
    };
    let inner = Inner {
        env,
        cache,
        state: RefCell::new(state),
        signals,
        tickets: Semaphore::new(shares.tickets),
        shares,
        structure: Semaphore::new(1),
        metadata: Semaphore::new(1),
        phases,
        running: Default::default(),
    };
    CacheSet { inner: Rc::new(inner) }
}

fn start_tasks(set: &CacheSet) {
    set.spawn(Duty::Writing, writer::run);
    set.spawn(Duty::Writing, write::run);
    set.spawn(Duty::Allocating, allocator::run);
}

/// What the superblock says after one more start.
fn next_superblock(set: &CacheSet) -> Box<[u8; SUPERBLOCK_BYTES]> {
    let seconds = set.env().wall_seconds();
    set.with(|s| {
        s.superblock.advance();
        s.superblock.set_last_mount(seconds);
        s.superblock.seal()
    })
}

// ---- A set that has been started ----

async fn recover(
    env: Env,
    disk: Disk,
    superblock: CacheSuperblock,
    mut note: Box<dyn Note>,
    options: Options,
) -> Result<CacheSet, Error> {
    let geometry = Geometry::of(&superblock);
    check_sizes(&geometry)?;
    let budget = options.node_budget_bytes;
    let scan = scan::scan((&env, &disk), &geometry).await?;
    let newest = scan.entries.last().expect("a scan without entries is an error");
    let (header, old_uuids) = (newest.header, newest.old_uuids);
    check_number(header.seq)?;
    let root = root_of(&geometry, &header.root, header.root_level)?;
    let stored = prios::read((&env, &disk), &geometry, header.prio_bucket).await?;
    check_number(stored.sequence)?;
    let entries = stored.entries.iter().copied();
    let mut buckets = Buckets::new(DeviceIndex(0), geometry.bucket_sectors, geometry.first_bucket, entries);
    walk::raise(&mut buckets, root.pointer())?;
    let uuids = uuids::read(&disk, &geometry, &header.uuids, old_uuids).await?;
    let known = Shares::new(budget, geometry.node_sectors().max(root.key.sectors()), root.level)?;
    let found =
        walk::walk((&env, &disk), &geometry, root, &mut buckets, known.tickets, &options.opening).await?;
    let shares = Shares::new(budget, geometry.node_sectors().max(found.node_sectors_max), root.level)?;
    let recovered = note.recovered(superblock.checksum());
    let sequence = header.seq;
    let oldest = header.last_seq;
    let journal_buckets = journal_sectors(&geometry);
    let journal = Journal::fresh(journal_buckets, geometry.bucket_sectors, geometry.block_sectors).resumed(
        scan.newest,
        scan.current,
        scan.used_sectors,
        sequence,
        oldest,
    );
    let pending = replay::prepare(&env, scan.entries, &recovered, &geometry, &mut buckets).await?;
    let metadata = metadata_buckets(&geometry, &found.nodes, &stored.chain, &header.uuids)?;
    check_metadata(&buckets, &metadata)?;
    buckets.classify(|index| metadata.contains(&index));
    let spare = reserve_unreferenced(&mut buckets, geometry.prio_sets())?;
    let prios = PrioChains { current: stored.chain, spare, sequence: stored.sequence };
    let uuid_key = header.uuids;
    let parts =
        Parts { geometry, buckets, root, journal, prios, uuids, uuid_key, dirty: found.dirty, shares };
    let set = assemble(env, disk, superblock, note, options, parts);
    set.with(|s| s.stats.found = found.alive);
    let recovered = take_over(&set, root, pending, oldest, old_uuids).await;
    or_abandoned(set, recovered).await
}

/// What the journal says comes true, and the set is ours.
async fn take_over(
    set: &CacheSet,
    root: Child,
    pending: replay::Pending,
    oldest: u64,
    old_uuids: bool,
) -> Result<(), Error> {
    write::flush_cache(set).await.map_err(first_reason)?;
    let pin = load::load(set, root).await?;
    set.with(|s| s.root_pin = Some(pin));
    start_tasks(set);
    let replaying = set.begin(Phase::Replay);
    replay::apply(set, pending, oldest).await.map_err(first_reason)?;
    if old_uuids {
        uuids::store(set).await?;
    }
    drop(replaying);
    let _start = set.begin(Phase::CacheStart);
    set.count_written(Cause::Superblock, record::placed_bytes(set.cache()));
    let placed = record::place_superblock(set.cache(), &next_superblock(set)).await;
    placed.map_err(|error| set.fail(error))?;
    // The allocator may want one too, and there is one at a time.
    write::flush_cache(set).await.map_err(first_reason)?;
    finish(set).await;
    Ok(())
}

/// The set, if it could be `opened`. If not, nothing is written any more when this returns, and nobody holds on to the set: its
/// device may be given to who tries again.
async fn or_abandoned(set: CacheSet, opened: Result<(), Error>) -> Result<CacheSet, Error> {
    let Err(error) = opened else { return Ok(set) };
    set.with(|s| (s.stopping, s.settled, s.stopped) = (true, true, true));
    let _told_already = set.fail(error.clone());
    for duty in [Duty::Changing, Duty::Allocating, Duty::Writing] {
        set.ended(duty).await;
    }
    Err(error)
}

/// What latches the set while nobody else uses it is the reason itself.
fn first_reason(error: Error) -> Error {
    match error {
        Error::Failed(first) => *first,
        error => error,
    }
}

/// Refuses a number from which it could not be counted on: no set lives that long.
fn check_number(sequence: u64) -> Result<(), Error> {
    if sequence > u64::MAX / 2 {
        return Err(Error::Inconsistent("a number of the journal or the priorities is impossibly large"));
    }
    Ok(())
}

/// Checks the key of a root: a node of a sensible size in a usable bucket that covers the whole key space.
fn root_of(geometry: &Geometry, key: &Key, level: u16) -> Result<Child, Error> {
    bcached_format::key_check::check_child_key(geometry, key)
        .map_err(|source| Error::Format { doing: Doing::Node, source: source.into() })?;
    if key.position() != Position::MAX {
        return Err(Error::Inconsistent("the root does not cover the whole key space"));
    }
    let level = u8::try_from(level).ok().filter(|level| *level < LEVELS_MAX);
    let level = level.ok_or(Error::Inconsistent("the root's level is impossible"))?;
    Ok(Child { key: *key, level })
}

/// More levels than any tree that fits a device has.
const LEVELS_MAX: u8 = 16;

fn journal_sectors(geometry: &Geometry) -> Vec<u64> {
    (0..geometry.journal_buckets).map(|index| geometry.sector_of(geometry.journal_bucket(index))).collect()
}

/// Every bucket that holds metadata. They must be distinct.
fn metadata_buckets(
    geometry: &Geometry,
    nodes: &BTreeSet<u64>,
    chain: &[bcached_format::BucketId],
    uuids: &Key,
) -> Result<BTreeSet<u64>, Error> {
    let mut metadata: BTreeSet<u64> = nodes.clone();
    let mut distinct = true;
    for index in geometry.first_bucket..geometry.first_bucket + geometry.journal_buckets {
        distinct &= metadata.insert(index);
    }
    for bucket in chain {
        distinct &= metadata.insert(bucket.index);
    }
    for pointer in uuids.pointers.as_slice() {
        distinct &= metadata.insert(pointer.sector() / geometry.bucket_sectors);
    }
    if distinct { Ok(metadata) } else { Err(Error::Inconsistent("two kinds of metadata share a bucket")) }
}

/// No key of the tree (counted) or of what will be replayed (pinned) may take metadata for its data.
fn check_metadata(buckets: &Buckets, metadata: &BTreeSet<u64>) -> Result<(), Error> {
    let mut shared = metadata.iter().map(|index| buckets.get(buckets.id(*index)));
    if shared.any(|bucket| bucket.live > 0 || bucket.pins > 0) {
        return Err(Error::Inconsistent("a bucket is used both for metadata and for data"));
    }
    Ok(())
}

/// Takes unreferenced buckets: a spare chain of priorities, and a stock for the splits of the replay.
fn reserve_unreferenced(buckets: &mut Buckets, chain: u64) -> Result<Vec<bcached_format::BucketId>, Error> {
    let wanted = usize::try_from(chain).expect("a chain is short") + STARTING_FREE;
    let unreferenced: Vec<_> = buckets
        .iter()
        .filter(|(_, bucket)| bucket.usage == Usage::Data && bucket.live == 0 && bucket.pins == 0)
        .map(|(id, _)| id)
        .take(wanted)
        .collect();
    for id in unreferenced {
        buckets.free_unreferenced(id);
    }
    prios::take_unreferenced(buckets, chain)
}

// ---- A set that has never been started ----

async fn initialise(
    env: Env,
    disk: Disk,
    mut superblock: CacheSuperblock,
    note: Box<dyn Note>,
    options: Options,
) -> Result<CacheSet, Error> {
    let shares = Shares::new(options.node_budget_bytes, Geometry::of(&superblock).node_sectors(), 0)?;
    superblock.set_journal_buckets((superblock.buckets() / 128).clamp(2, 256));
    let geometry = Geometry::of(&superblock);
    check_sizes(&geometry)?;
    let nothing = (0..geometry.buckets).map(|_| (Gen(0), 0));
    let mut buckets = Buckets::new(DeviceIndex(0), geometry.bucket_sectors, geometry.first_bucket, nothing);
    let first_free = geometry.first_bucket + geometry.journal_buckets;
    buckets.classify(|index| index < first_free);
    let sets = geometry.prio_sets();
    let current = reserve_unreferenced(&mut buckets, sets)?;
    let spare = reserve_unreferenced(&mut buckets, sets)?;
    let uuid_bucket = buckets.take(Usage::Meta, 0).ok_or(Error::NoSpace)?;
    let root_bucket = buckets.take(Usage::Meta, 0).ok_or(Error::NoSpace)?;
    let journal = Journal::fresh(journal_sectors(&geometry), geometry.bucket_sectors, geometry.block_sectors);
    let journal = match scan::newest_of_all((&env, &disk), &geometry).await {
        None => journal,
        Some((former, bucket)) => {
            check_number(former)?;
            journal.behind(former, bucket)
        }
    };
    let uuid_key = uuids::table_key(&geometry, &buckets, uuid_bucket);
    let size = u16::try_from(geometry.node_sectors()).expect("node sizes fit a key");
    let pointer = bcached_format::Pointer::new(
        root_bucket.device,
        buckets.sector(root_bucket),
        buckets.get(root_bucket).generation,
    );
    let end = Position::MAX;
    let root_key =
        Key { inode: end.inode, size, dirty: false, end: end.offset, pointers: Pointers::one(pointer) };
    let root = Child { key: root_key, level: 0 };
    let parts = Parts {
        geometry,
        buckets,
        root,
        journal,
        // The order is turned: what is stored first goes to the spare chain.
        prios: PrioChains { current: spare, spare: current, sequence: 0 },
        uuids: UuidTable::empty(geometry.uuid_slots()),
        uuid_key,
        dirty: crate::state::DirtyCounts::default(),
        shares,
    };
    let set = assemble(env, disk, superblock, note, options, parts);
    set.with(|s| s.stats.found = gc::pass::Found::NOTHING);
    let begun = begin(&set, root).await;
    or_abandoned(set, begun).await
}

/// The set becomes one that has been started.
async fn begin(set: &CacheSet, root: Child) -> Result<(), Error> {
    write_first(set, root).await?;
    set.spawn(Duty::Writing, writer::run);
    // The first entry names the first chain, the table and the root; nothing counts before the superblock says so.
    prios::store(set).await?;
    set.with(|s| s.superblock.set_synchronous(true));
    let _start = set.begin(Phase::CacheFirstStart);
    set.count_written(Cause::Superblock, SUPERBLOCK_BYTES);
    let written = record::write_new_superblock(set.cache(), &next_superblock(set)).await;
    written.map_err(|error| set.fail(error))?;
    set.spawn(Duty::Writing, write::run);
    set.spawn(Duty::Allocating, allocator::run);
    finish(set).await;
    Ok(())
}

/// The empty table and the empty root.
async fn write_first(set: &CacheSet, root: Child) -> Result<(), Error> {
    let mut node = Node::create(root.key, 0, set.env().random(), &set.with(|s| s.geometry));
    let first = node.seal_pending().expect("a fresh node has a first set");
    write::write_set(set, root.pointer().sector(), &first).await?;
    let (sector, bytes) = set.with(|s| {
        let pointer = crate::btree::pointer_to_read(&s.uuid_key.pointers).expect("just made");
        (pointer.sector(), s.uuids.to_bytes())
    });
    let written = set.write_cache(Cause::Uuids, sector, Buffer::copied_from(&bytes).freeze()).await;
    written.map_err(Error::io(Doing::Uuids))?;
    let pin = load::load(set, root).await?;
    set.with(|s| s.root_pin = Some(pin));
    Ok(())
}

/// What every start ends with: flash-only volumes, and write-back.
async fn finish(set: &CacheSet) {
    set.with(|s| {
        // What it held is durable now, and the superblock says that a new session has begun.
        s.note.begin(s.superblock.checksum());
        s.note_held = false;
    });
    crate::volume::flash::add_all(set);
    set.spawn(Duty::Changing, gc::pass::run);
    set.spawn(Duty::Changing, gc::moving::run);
    set.spawn(Duty::Changing, gc::orphans::run);
}
