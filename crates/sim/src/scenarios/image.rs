//! Direct access to devices while no process uses them: they are examined with the offline checker,
//! and damaged by hand.

use crate::scenario::ScenarioRig;
use crate::stamp::{self, SectorValue};
use crate::system::engine::DeviceImage;
use bcached_check::{NodeRecord, Record, dump};
use bcached_format::jset::{self, Jset, JsetHeader};
use bcached_format::prio::{self, BucketPrio, PrioSet};
use bcached_format::uuid::{self, UuidSlot};
use bcached_format::{
    BackingSuperblock, DeviceGeometry, Gen, Geometry, Key, RawSuperblock, SUPERBLOCK_BYTES,
    SUPERBLOCK_SECTOR, Superblock,
};
use std::ops::Range;

/// Returns all metadata of the cache.
pub fn records(stage: &mut ScenarioRig) -> Vec<Record> {
    let mut records = Vec::new();
    dump(&DeviceImage(&stage.device(0)), &mut |record| records.push(record));
    records
}

/// Returns the nodes of the tree, parents first.
pub fn nodes(stage: &mut ScenarioRig) -> Vec<NodeRecord> {
    let node = |record| if let Record::Node(node) = record { Some(node) } else { None };
    records(stage).into_iter().filter_map(node).collect()
}

/// Returns the only node at `level` that covers `sector` of the first volume's backing device.
pub fn node_for(stage: &mut ScenarioRig, level: u16, sector: u64) -> NodeRecord {
    let at = bcached_format::Position { inode: bcached_format::Inode(0), offset: sector };
    let found = nodes(stage).into_iter().find(|node| node.level == level && node.low <= at && at < node.high);
    found.expect("the tree covers everything")
}

fn superblock(stage: &mut ScenarioRig, device: usize) -> Superblock {
    let bytes = bytes(stage, device, SUPERBLOCK_SECTOR, SUPERBLOCK_BYTES);
    let facts = DeviceGeometry { sectors: u64::MAX, logical_block_sectors: 1 };
    RawSuperblock::from_bytes(&bytes).and_then(|raw| raw.check(facts)).expect("a superblock")
}

/// Returns the geometry of the set.
pub fn sizes(stage: &mut ScenarioRig) -> Geometry {
    match superblock(stage, 0) {
        Superblock::Cache(superblock) => Geometry::of(&superblock),
        other => panic!("no cache: {other:?}"),
    }
}

/// Returns the superblock of a backing device.
pub fn backing(stage: &mut ScenarioRig, device: usize) -> BackingSuperblock {
    match superblock(stage, device) {
        Superblock::Backing(superblock) => superblock,
        other => panic!("no backing device: {other:?}"),
    }
}

/// Changes the superblock of a backing device, as another program would.
pub fn change_backing(stage: &mut ScenarioRig, device: usize, change: impl FnOnce(&mut BackingSuperblock)) {
    let mut superblock = backing(stage, device);
    change(&mut superblock);
    stage.device(device).place(SUPERBLOCK_SECTOR, &superblock.seal()[..]);
}

/// Returns the sectors of the journal on the cache device.
pub fn journal(stage: &mut ScenarioRig) -> Range<u64> {
    let sizes = sizes(stage);
    let first = sizes.first_bucket * sizes.bucket_sectors;
    first..first + sizes.journal_buckets * sizes.bucket_sectors
}

/// Returns the contents of a device.
pub fn bytes(stage: &mut ScenarioRig, device: usize, sector: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    stage.device(device).view().read(sector, &mut bytes);
    bytes
}

/// Returns what the medium of the first volume's backing device holds at `sectors` of the volume:
/// what would be left if the cache were lost and the power cut.
pub fn on_disk(stage: &mut ScenarioRig, sectors: Range<u64>) -> Vec<SectorValue> {
    let device = stage.device(1);
    let mut values = Vec::new();
    for sector in sectors {
        let mut bytes = [0; 512];
        device.medium().read(super::stage::DATA_START + sector, &mut bytes);
        values.push(stamp::parse(&bytes, 0, sector).expect("a value of its place"));
    }
    values
}

/// Returns where the data of the first volume lies in the cache: the first sector on the cache
/// device of each key.
pub fn cached_at(stage: &mut ScenarioRig) -> Vec<u64> {
    let keys = nodes(stage).into_iter().filter(|node| node.level == 0);
    let keys = keys.flat_map(|node| node.sets).flat_map(|set| set.keys);
    let pointers = keys.filter(|key| key.inode == 0).flat_map(|key| key.pointers);
    pointers.filter_map(|pointer| sector_of(&pointer)).collect()
}

/// Changes the stored generation of each bucket (by index) with `change`, as if the cache had been
/// used for long.
pub fn change_generations(stage: &mut ScenarioRig, change: impl Fn(u64, Gen) -> Gen) {
    let chain = records(stage).into_iter().find_map(|record| match record {
        Record::PriorityChain { buckets } => Some(buckets),
        _ => None,
    });
    let sizes = sizes(stage);
    let mut first = 0;
    for bucket in chain.expect("a set that was started has one") {
        let sector = bucket * sizes.bucket_sectors;
        let mut block = bytes(stage, 0, sector, sizes.meta_bytes());
        let set = PrioSet::parse(&block, sizes.magic).expect("the set is intact");
        let (seq, next) = (set.seq, set.next_bucket);
        let entries: Vec<BucketPrio> = set
            .entries()
            .zip(first..)
            .map(|(entry, index)| BucketPrio { generation: change(index, entry.generation), ..entry })
            .collect();
        first += entries.len() as u64;
        prio::seal(&mut block, sizes.magic, seq, next, entries.into_iter());
        stage.device(0).place(sector, &block);
    }
}

/// Makes the set look as if a kernel had used it last: its newest journal entry says nothing of the
/// table of volumes.
pub fn as_a_kernel_leaves_it(stage: &mut ScenarioRig) {
    let (sizes, journal) = (sizes(stage), journal(stage));
    let mut newest: Option<(JsetHeader, Vec<Key>, u64)> = None;
    for start in journal.step_by(usize::try_from(sizes.bucket_sectors).expect("buckets are small")) {
        let length = usize::try_from(sizes.bucket_bytes()).expect("buckets are small");
        let (bytes, mut at) = (bytes(stage, 0, start, length), 0);
        while let Ok(entry) = Jset::parse(&bytes[at..], sizes.magic) {
            if newest.as_ref().is_none_or(|(header, ..)| header.seq < entry.header.seq) {
                newest = Some((entry.header, entry.keys.iter().collect(), start + at as u64 / 512));
            }
            at += sizes.whole_blocks(entry.byte_len());
        }
    }
    let (header, keys, sector) = newest.expect("there are entries");
    let mut bytes = jset::seal(sizes.magic, &JsetHeader { table: None, ..header }, &keys);
    bytes.resize(sizes.whole_blocks(bytes.len()), 0);
    stage.device(0).place(sector, &bytes);
}

/// Changes the table of volumes, as a kernel would.
pub fn change_table(stage: &mut ScenarioRig, change: impl FnOnce(&mut Vec<UuidSlot>)) {
    as_a_kernel_leaves_it(stage);
    let newest = |record| match record {
        Record::JournalEntry { seq, uuids, .. } => Some((seq, uuids.pointers)),
        _ => None,
    };
    let (_, pointers) = records(stage).into_iter().filter_map(newest).max().expect("there are entries");
    let sector = sector_of(&pointers[0]).expect("the table has a place");
    let length = sizes(stage).meta_bytes();
    let mut slots: Vec<UuidSlot> =
        uuid::parse(&bytes(stage, 0, sector, length)).expect("whole slots").collect();
    change(&mut slots);
    let table: Vec<u8> = slots.iter().flat_map(UuidSlot::to_bytes).collect();
    stage.device(0).place(sector, &table);
}

/// Returns the sector that a pointer of a dump names.
fn sector_of(pointer: &str) -> Option<u64> {
    pointer.strip_prefix("0:")?.split(' ').next()?.parse().ok()
}
