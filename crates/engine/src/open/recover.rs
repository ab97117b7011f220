//! Recovery of a set that has been started before.
//!
//! If bcached wrote to the set last, and left enough buckets with a proof in them that they are
//! free, requests are served as soon as the journal has been replayed. The tree is walked in the
//! background (`btree::background_walk`). Otherwise the tree is walked first. If that finds damaged
//! nodes, the set may be served unwalked nevertheless (`open::damaged`).

use super::{
    StateParts, abandon_unless, assemble, check_memory, check_number, check_sizes, damaged, finish,
    journal_sectors, next_superblock, reserve_unreferenced, start_tasks,
};
use crate::btree::budget::NodeBudget;
use crate::btree::walk_frontier::WalkFrontier;
use crate::btree::{NodeRef, background_walk, load, walk, write};
use crate::cache_writes::WriteCause;
use crate::error::{Error, ErrorContext};
use crate::gc::pass::TreeStats;
use crate::journal::scan::JournalEntry;
use crate::journal::{Journal, replay, scan};
use crate::options::Options;
use crate::phases::Phase;
use crate::set::{CacheSet, TaskKind};
use crate::space::prios::{self, StoredPriorities};
use crate::space::reserve::{self, ProvenFree};
use crate::space::{BucketUsage, Buckets};
use crate::state::{DirtyCounts, PrioChains};
use crate::uuids;
use crate::volume::record;
use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use bcached_env::{Disk, Env, Note, NoteRecord};
use bcached_format::{BucketId, CacheSuperblock, DeviceIndex, Geometry, JsetHeader, Key, Position};

/// What is known of the tree.
enum TreeKnowledge {
    /// All of it: it has been walked.
    Walked(walk::WalkResult),
    /// Only which buckets are certainly free.
    Unwalked(ProvenFree),
}

pub(super) async fn recover(
    env: Env,
    disk: Disk,
    superblock: CacheSuperblock,
    mut note: Box<dyn Note>,
    options: Options,
) -> Result<CacheSet, Error> {
    let geometry = Geometry::of(&superblock);
    check_sizes(&geometry)?;
    // Requested before anything else: invariant L4.
    check_memory(&geometry, &options)?;
    let scan = scan::scan((&env, &disk), &geometry).await?;
    let newest = scan.entries.last().expect("a scan without entries is an error");
    let (header, old_uuids) = (newest.header, newest.old_uuids);
    check_number(header.seq)?;
    let root = root_of(&geometry, &header.root, header.root_level)?;
    let stored = prios::read((&env, &disk), &geometry, header.prio_bucket, header.marks_reserve).await?;
    check_number(stored.sequence)?;
    let set_uuid = superblock.set_uuid();
    let uuids = uuids::read((&env, &disk), &geometry, set_uuid, &header, old_uuids).await?;
    let metadata = metadata_buckets(&geometry, &stored.chain, &header.uuids)?;
    let noted = note.recovered(superblock.session());
    let journal = to_be_replayed(&geometry, (scan.newest, scan.current, scan.used_sectors), &header);
    // Using the proof takes a journal entry, which a start that walks first does not need.
    let vouches = header.marks_reserve && journal.can_spare_one();
    let node_sectors = geometry.node_sectors().max(root.key.sectors());
    let mut shares = NodeBudget::new(options.node_budget_bytes, node_sectors, root.level)?;
    let mut buckets = table(&geometry, &stored, root)?;
    let before = RecoveredMetadata {
        on: (&env, &disk),
        geometry: &geometry,
        stored: &stored,
        metadata: &metadata,
        replayed: (&scan.entries, &noted),
        root,
    };
    let proven = if vouches { before.find_reserve().await } else { None };
    let marks_reserve = proven.is_some();
    let known = match proven {
        Some(proven) => TreeKnowledge::Unwalked(proven),
        None => before.walk(&mut buckets, shares.tickets, &options).await?,
    };
    let pending = replay::prepare(&env, scan.entries, &noted, &geometry, &mut buckets).await?;
    let mut reserve_wanted = reserve::wanted(&geometry, options.reserve);
    if let TreeKnowledge::Walked(found) = &known {
        let node_sectors = node_sectors.max(found.node_sectors_max);
        shares = NodeBudget::new(options.node_budget_bytes, node_sectors, root.level)?;
        if node_sectors > geometry.node_sectors() {
            // The node size must be known before nodes are read.
            reserve_wanted = 0;
        }
    }
    // Freed before the buckets are sorted, which takes as much memory.
    let (chain, sequence) = (stored.chain, stored.sequence);
    drop(stored.entries);
    let settled = settle(&geometry, &mut buckets, metadata, known)?;
    let prios = PrioChains { marks_reserve, current: chain, spare: settled.spare, sequence };
    let parts = StateParts {
        geometry,
        buckets,
        root,
        journal,
        prios,
        uuids,
        uuid_key: header.uuids,
        opened_at: header.seq,
        uuid_seal: header.table.filter(|_| !old_uuids),
        dirty: settled.dirty,
        frontier: settled.frontier,
        reserve_wanted,
        shares,
    };
    let set = assemble(env, disk, superblock, note, options, parts);
    set.with(|s| s.stats.found = settled.alive);
    let recovered = take_over(&set, root, pending, old_uuids).await;
    abandon_unless(set, recovered).await
}

/// What has been read before anything of the tree.
pub(super) struct RecoveredMetadata<'a> {
    pub on: (&'a Env, &'a Disk),
    pub geometry: &'a Geometry,
    pub stored: &'a StoredPriorities,
    /// Buckets that hold metadata other than nodes.
    pub metadata: &'a BTreeSet<u64>,
    /// The contents of the journal and the note.
    pub replayed: (&'a [JournalEntry], &'a [NoteRecord]),
    pub root: NodeRef,
}

/// The journal as it was found: the newest entry of each bucket, the bucket that was written last,
/// and how much of it was used.
fn to_be_replayed(
    geometry: &Geometry,
    (newest, current, used_sectors): (Vec<u64>, usize, u64),
    header: &JsetHeader,
) -> Journal {
    let oldest = header.last_seq;
    let fresh = Journal::fresh(journal_sectors(geometry), geometry.bucket_sectors, geometry.block_sectors);
    let mut journal = fresh.resumed(newest, current, used_sectors, header.seq, oldest);
    journal.replay(Some(oldest));
    journal
}

impl RecoveredMetadata<'_> {
    async fn find_reserve(&self) -> Option<ProvenFree> {
        reserve::prove(self.on, self.geometry, self.stored, self.metadata, self.replayed).await
    }

    async fn walk(
        &self,
        buckets: &mut Buckets,
        nodes: usize,
        options: &Options,
    ) -> Result<TreeKnowledge, Error> {
        let found = walk::walk(self.on, self.geometry, self.root, buckets, nodes, &options.opening).await?;
        let Some(first) = found.damaged.first() else { return Ok(TreeKnowledge::Walked(found)) };
        let proven = damaged::prove(self, (buckets, &found), options.summary_share).await.ok_or(first)?;
        *buckets = table(self.geometry, self.stored, self.root)?;
        proven.now.iter().for_each(|index| buckets.may_be_named(buckets.id(*index)));
        Ok(TreeKnowledge::Unwalked(proven))
    }
}

/// Builds the bucket table as stored.
fn table(geometry: &Geometry, stored: &StoredPriorities, root: NodeRef) -> Result<Buckets, Error> {
    let entries = stored.entries.iter().copied();
    let mut buckets = Buckets::new(DeviceIndex(0), geometry.bucket_sectors, geometry.first_bucket, entries)?;
    walk::raise(&mut buckets, root.pointer())?;
    Ok(buckets)
}

/// The state that a start begins with.
struct StartState {
    dirty: DirtyCounts,
    alive: TreeStats,
    frontier: WalkFrontier,
    /// The chain of priority buckets that is written next.
    spare: Vec<BucketId>,
}

/// Classifies the buckets by what is known of them. `metadata`: the buckets that hold metadata
/// other than nodes.
fn settle(
    geometry: &Geometry,
    buckets: &mut Buckets,
    mut metadata: BTreeSet<u64>,
    known: TreeKnowledge,
) -> Result<StartState, Error> {
    let chain = geometry.prio_sets();
    match known {
        TreeKnowledge::Walked(found) => {
            let before = metadata.len() + found.nodes.len();
            metadata.extend(found.nodes);
            if metadata.len() != before {
                return Err(Error::Inconsistent("two kinds of metadata share a bucket"));
            }
            check_metadata(buckets, &metadata)?;
            buckets.classify(|index| metadata.contains(&index))?;
            let spare = reserve_unreferenced(buckets, chain)?;
            Ok(StartState { dirty: found.dirty, alive: found.alive, frontier: WalkFrontier::at_end(), spare })
        }
        TreeKnowledge::Unwalked(ProvenFree { now, later }) => {
            check_metadata(buckets, &metadata)?;
            metadata.into_iter().for_each(|index| buckets.set_usage(buckets.id(index), BucketUsage::Meta));
            // Until the walk has ended, only these are used, which have a proof in them. None whose
            // usage is unknown is reclaimed: invariant D43.
            for index in now.iter().chain(&later) {
                buckets.set_usage(buckets.id(*index), BucketUsage::Reserve);
            }
            let mut now = now.into_iter().map(|index| BucketId { device: DeviceIndex(0), index });
            let chain = usize::try_from(chain).expect("a chain is short");
            let spare: Vec<BucketId> = now.by_ref().take(chain).collect();
            spare.iter().for_each(|id| buckets.set_usage(*id, BucketUsage::Meta));
            now.for_each(|id| buckets.use_reserve(id));
            let dirty = DirtyCounts::default();
            Ok(StartState { dirty, alive: TreeStats::default(), frontier: WalkFrontier::at_start(), spare })
        }
    }
}

/// Replays the journal, and takes possession of the set.
async fn take_over(
    set: &CacheSet,
    root: NodeRef,
    pending: replay::ReplayKeys,
    old_uuids: bool,
) -> Result<(), Error> {
    // Nothing has been written so far: invariant D41.
    write::flush_cache(set).await.map_err(first_reason)?;
    let pin = load::load(set, root).await?;
    set.with(|s| s.root_pin = Some(pin));
    start_tasks(set);
    if !set.with(|s| s.frontier.is_complete()) {
        // Proven free buckets are handed out from now on. Tasks that need more wait for the walk.
        prios::store(set).await.map_err(first_reason)?;
        set.spawn(TaskKind::Allocating, background_walk::run);
    }
    let replaying = set.begin(Phase::Replay);
    replay::apply(set, pending).await.map_err(first_reason)?;
    if old_uuids {
        uuids::store(set).await?;
    }
    drop(replaying);
    let _start = set.begin(Phase::CacheStart);
    set.count_written(WriteCause::Superblock, record::placed_bytes(set.cache()));
    let placed = record::place_superblock(set.cache(), &next_superblock(set)).await;
    placed.map_err(|error| set.fail(error))?;
    // The allocator may need a flush too, and only one runs at a time.
    write::flush_cache(set).await.map_err(first_reason)?;
    finish(set).await;
    Ok(())
}

/// Returns the original error. No other task uses the set yet, so the latched failure is this one.
fn first_reason(error: Error) -> Error {
    match error {
        Error::Failed(first) => *first,
        error => error,
    }
}

/// Checks the key of a root: a node of a valid size in a usable bucket that covers the whole key
/// space.
fn root_of(geometry: &Geometry, key: &Key, level: u16) -> Result<NodeRef, Error> {
    bcached_format::key_check::check_child_key(geometry, key)
        .map_err(|source| Error::Format { doing: ErrorContext::Node, source: source.into() })?;
    if key.position() != Position::MAX {
        return Err(Error::Inconsistent("the root does not cover the whole key space"));
    }
    let level = u8::try_from(level).ok().filter(|level| *level < LEVELS_MAX);
    let level = level.ok_or(Error::Inconsistent("the root has an invalid level"))?;
    Ok(NodeRef { key: *key, level })
}

/// More levels than any tree that fits on a device has.
const LEVELS_MAX: u8 = 16;

/// Returns every bucket that holds metadata other than nodes. They must be distinct.
fn metadata_buckets(geometry: &Geometry, chain: &[BucketId], uuids: &Key) -> Result<BTreeSet<u64>, Error> {
    let journal = geometry.first_bucket..geometry.first_bucket + geometry.journal_buckets;
    let mut metadata: BTreeSet<u64> = journal.collect();
    let mut distinct = true;
    for bucket in chain {
        distinct &= metadata.insert(bucket.index);
    }
    for pointer in uuids.pointers.as_slice() {
        distinct &= metadata.insert(pointer.sector() / geometry.bucket_sectors);
    }
    if distinct { Ok(metadata) } else { Err(Error::Inconsistent("two kinds of metadata share a bucket")) }
}

/// Checks that no key of the tree (counted) or of the replay (pinned) points to metadata as data
/// (invariant D40).
fn check_metadata(buckets: &Buckets, metadata: &BTreeSet<u64>) -> Result<(), Error> {
    let mut shared = metadata.iter().map(|index| buckets.get(buckets.id(*index)));
    if shared.any(|bucket| bucket.live > 0 || bucket.pins > 0) {
        return Err(Error::Inconsistent("a bucket is used both for metadata and for data"));
    }
    Ok(())
}
