//! Damages the volume table (the uuid bucket) on the cache. The damage imitates a write to the
//! cache that was lost in part or whole, was misdirected, or has decayed; or an older table, or
//! that of another set, in its place. Only slots are damaged whose content a backing device also
//! records. The others stay as they are: nothing else tells whose number that was.

use super::engine::DeviceImage;
use crate::disk::Device;
use bcached_check::ReadAt;
use bcached_env::rng::Rng;
use bcached_format::jset::{Jset, JsetHeader};
use bcached_format::{
    DeviceGeometry, Geometry, Inode, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, Superblock, Uuid,
    UuidSlot, uuid,
};
use std::collections::BTreeSet;

/// Damages the table that the newest journal entry names, in a way chosen by `seed`. Returns false
/// if there is no such table, or nothing in it to damage.
pub fn damage(devices: &mut [Device], seed: u64) -> bool {
    let known: BTreeSet<Uuid> = devices[1..].iter().filter_map(attached).collect();
    let cache = &mut devices[0];
    let Some(UuidTables { sector, newest, former }) = tables(cache) else { return false };
    let backed: Vec<usize> = (0..newest.len())
        .filter(|index| newest[*index].is_used() && known.contains(&newest[*index].uuid))
        .collect();
    let mut slots = newest.clone();
    spoil(&mut slots, &backed, former.as_deref(), &mut Rng::new(seed));
    if slots == newest {
        // The former table has the same slots, or there is no other slot for the damage.
        backed.iter().for_each(|index| slots[*index] = UuidSlot::FREE);
    }
    let bytes: Vec<u8> = slots.iter().flat_map(UuidSlot::to_bytes).collect();
    cache.place(sector, &bytes);
    !backed.is_empty()
}

/// The volume tables of a cache.
struct UuidTables {
    /// Where the newest one lies.
    sector: u64,
    newest: Vec<UuidSlot>,
    /// The previous one, if it is still there.
    former: Option<Vec<UuidSlot>>,
}

/// Returns the tables of a set, if bcached wrote the newest one.
fn tables(cache: &Device) -> Option<UuidTables> {
    let Some(Superblock::Cache(superblock)) = superblock(cache) else { return None };
    let geometry = Geometry::of(&superblock);
    let headers = if superblock.is_synchronous() { headers(cache, &geometry) } else { Vec::new() };
    let (last, older) = headers.split_last().filter(|(last, _)| last.table.is_some())?;
    let older = older.iter().rev().filter(|older| older.uuids.pointers != last.uuids.pointers);
    Some(UuidTables {
        sector: last.uuids.pointers.as_slice().first()?.sector(),
        newest: table(cache, last, &geometry)?,
        former: older.filter_map(|older| table(cache, older, &geometry)).next(),
    })
}

/// Returns the table that a journal entry names, if it is valid.
fn table(cache: &Device, header: &JsetHeader, geometry: &Geometry) -> Option<Vec<UuidSlot>> {
    let pointer = header.uuids.pointers.as_slice().first()?;
    let mut bytes = vec![0; geometry.meta_bytes()];
    read(cache, pointer.sector(), &mut bytes);
    uuid::parse(&bytes).ok().map(Iterator::collect)
}

/// Returns the UUID of a backing device that records under which number the cache holds its data.
fn attached(device: &Device) -> Option<Uuid> {
    match superblock(device) {
        Some(Superblock::Backing(backing)) => backing.attachment().map(|_| backing.uuid()),
        _ => None,
    }
}

pub(super) fn superblock(device: &Device) -> Option<Superblock> {
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    read(device, SUPERBLOCK_SECTOR, &mut bytes);
    let facts = DeviceGeometry { sectors: u64::MAX, logical_block_sectors: 1 };
    RawSuperblock::from_bytes(&bytes).and_then(|raw| raw.check(facts)).ok()
}

fn spoil(slots: &mut [UuidSlot], backed: &[usize], former: Option<&[UuidSlot]>, rng: &mut Rng) {
    let Some(first) = backed.first().copied() else { return };
    let any = backed[usize::try_from(rng.below(backed.len() as u64)).expect("few volumes")];
    let free = slots.iter().position(UuidSlot::is_free);
    match rng.below(10) {
        0 => backed.iter().for_each(|index| slots[*index] = UuidSlot::FREE),
        1 => slots[any] = UuidSlot::FREE,
        2 => slots[any].uuid.0[usize::try_from(rng.below(16)).expect("a uuid")] ^= 1 << rng.below(8),
        3 => slots[any].uuid = Uuid::INVALIDATED,
        4 => slots.swap(first, backed.last().copied().unwrap_or(first)),
        5 => free.into_iter().for_each(|free| slots.swap(any, free)),
        // An older table, or a part of it.
        6 => former
            .into_iter()
            .for_each(|former| backed.iter().for_each(|index| slots[*index] = former[*index])),
        7 => former.into_iter().for_each(|former| slots[any] = former[any]),
        // The same slot, sealed for another set.
        8 => {
            let (set, number) = (Uuid([7; 16]), u32::try_from(any).expect("few slots"));
            let edition = slots[any].edition;
            slots[any].seal(set, Inode(number), edition);
        }
        _ => free.into_iter().for_each(|free| slots[free] = slots[any]),
    }
}

/// Returns the headers of all whole journal entries, in order.
fn headers(cache: &Device, geometry: &Geometry) -> Vec<JsetHeader> {
    let mut headers: Vec<JsetHeader> = Vec::new();
    for index in 0..geometry.journal_buckets {
        let mut bytes = vec![0; usize::try_from(geometry.bucket_bytes()).expect("a bucket fits in memory")];
        read(cache, geometry.sector_of(geometry.journal_bucket(index)), &mut bytes);
        let mut at = 0;
        while let Some(entry) = bytes.get(at..).and_then(|rest| Jset::parse(rest, geometry.magic).ok()) {
            at += geometry.whole_blocks(entry.byte_len());
            headers.push(entry.header);
        }
    }
    headers.sort_by_key(|header| header.seq);
    headers
}

fn read(device: &Device, sector: u64, into: &mut [u8]) {
    DeviceImage(device).read_at(sector, into).expect("it lies on the device");
}
