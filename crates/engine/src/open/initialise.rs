//! Initialises a set that has never been started.

use super::{
    StateParts, abandon_unless, assemble, check_memory, check_number, check_sizes, finish, journal_sectors,
    next_superblock, reserve_unreferenced,
};
use crate::btree::budget::NodeBudget;
use crate::btree::walk_frontier::WalkFrontier;
use crate::btree::{NodeRef, load, write};
use crate::cache_writes::WriteCause;
use crate::error::{Error, ErrorContext};
use crate::gc;
use crate::journal::{Journal, scan, writer};
use crate::options::Options;
use crate::phases::Phase;
use crate::set::{CacheSet, TaskKind};
use crate::space::{BucketUsage, Buckets, allocator, prios, reserve};
use crate::state::{DirtyCounts, PrioChains};
use crate::uuids::{self, UuidTable};
use crate::volume::record;
use alloc::boxed::Box;
use bcached_env::{Buffer, Disk, Env, Note};
use bcached_format::{
    CacheSuperblock, DeviceIndex, Gen, Geometry, Key, Pointers, Position, SUPERBLOCK_BYTES,
};
use bcached_node::Node;

pub(super) async fn initialise(
    env: Env,
    disk: Disk,
    mut superblock: CacheSuperblock,
    note: Box<dyn Note>,
    options: Options,
) -> Result<CacheSet, Error> {
    let shares = NodeBudget::new(options.node_budget_bytes, Geometry::of(&superblock).node_sectors(), 0)?;
    superblock.set_journal_buckets((superblock.buckets() / 128).clamp(2, 256));
    let geometry = Geometry::of(&superblock);
    check_sizes(&geometry)?;
    let nothing = (0..check_memory(&geometry, &options)?).map(|_| (Gen(0), 0));
    let mut buckets = Buckets::new(DeviceIndex(0), geometry.bucket_sectors, geometry.first_bucket, nothing)?;
    let first_free = geometry.first_bucket + geometry.journal_buckets;
    buckets.classify(|index| index < first_free)?;
    let sets = geometry.prio_sets();
    let current = reserve_unreferenced(&mut buckets, sets)?;
    let spare = reserve_unreferenced(&mut buckets, sets)?;
    let uuid_bucket = buckets.take(BucketUsage::Meta, 0).ok_or(Error::NoSpace)?;
    let root_bucket = buckets.take(BucketUsage::Meta, 0).ok_or(Error::NoSpace)?;
    let journal = Journal::fresh(journal_sectors(&geometry), geometry.bucket_sectors, geometry.block_sectors);
    let journal = match scan::newest_of_all((&env, &disk), &geometry).await {
        None => journal,
        Some((former, bucket)) => {
            check_number(former)?;
            journal.behind(former, bucket)
        }
    };
    let set_uuid = superblock.set_uuid();
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
    let root = NodeRef { key: root_key, level: 0 };
    let parts = StateParts {
        geometry,
        buckets,
        root,
        journal,
        // Swapped: the first chain is written to the spare buckets.
        prios: PrioChains { marks_reserve: false, current: spare, spare: current, sequence: 0 },
        uuids: UuidTable::empty(set_uuid, geometry.uuid_slots()),
        uuid_key,
        uuid_seal: None,
        opened_at: 0,
        dirty: DirtyCounts::default(),
        frontier: WalkFrontier::at_end(),
        reserve_wanted: reserve::wanted(&geometry, options.reserve),
        shares,
    };
    let set = assemble(env, disk, superblock, note, options, parts);
    set.with(|s| s.stats.found = gc::pass::TreeStats::NOTHING);
    let begun = begin(&set, root).await;
    abandon_unless(set, begun).await
}

/// Writes what makes the set one that has been started.
async fn begin(set: &CacheSet, root: NodeRef) -> Result<(), Error> {
    write_first(set, root).await?;
    set.spawn(TaskKind::Writing, writer::run);
    // The first entry names the first chain, the table and the root. None of it is valid until the
    // superblock says so.
    prios::store(set).await?;
    set.with(|s| s.superblock.set_synchronous(true));
    let _start = set.begin(Phase::CacheFirstStart);
    set.count_written(WriteCause::Superblock, SUPERBLOCK_BYTES);
    let written = record::write_new_superblock(set.cache(), &next_superblock(set)).await;
    written.map_err(|error| set.fail(error))?;
    set.spawn(TaskKind::Writing, write::run);
    set.spawn(TaskKind::Allocating, allocator::run);
    finish(set).await;
    Ok(())
}

/// Writes the empty table and the empty root.
async fn write_first(set: &CacheSet, root: NodeRef) -> Result<(), Error> {
    let mut node = Node::create(root.key, 0, set.env().random(), &set.with(|s| s.geometry));
    let first = write::seal_pending(&mut node).expect("a fresh node has a first set");
    write::write_set(set, root.pointer().sector(), &first).await?;
    let edition = uuids::new_stamp(set);
    let (sector, bytes) = set.with(|s| {
        let pointer = crate::btree::pointer_to_read(&s.uuid_key.pointers).expect("the key was just made");
        (pointer.sector(), s.uuids.seal(edition))
    });
    let seal = uuids::seal_of(set.env(), &bytes, edition).await;
    set.with(|s| s.uuid_seal = Some(seal));
    let written = set.write_cache(WriteCause::Uuids, sector, Buffer::copied_from(&bytes).freeze()).await;
    written.map_err(Error::io(ErrorContext::Uuids))?;
    let pin = load::load(set, root).await?;
    set.with(|s| s.root_pin = Some(pin));
    Ok(())
}
