//! The table of volumes is not what was written: a write to the cache that was lost, went elsewhere, or has decayed. Spoiled are slots of
//! which a backing device says the same. The others stay as they are: nothing else tells whose number that was.

use super::engine::Image;
use crate::disk::Device;
use bcached_check::ReadAt;
use bcached_env::rng::Rng;
use bcached_format::jset::{Jset, JsetHeader};
use bcached_format::{
    DeviceFacts, Geometry, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, Superblock, Uuid, UuidSlot,
    uuid,
};
use std::collections::BTreeSet;

/// Damages the table that the newest journal entry names, in a way that `seed` tells. False: there is no such table.
pub fn damage(devices: &mut [Device], seed: u64) -> bool {
    let known: BTreeSet<Uuid> = devices[1..].iter().filter_map(attached).collect();
    let cache = &mut devices[0];
    let Some(Superblock::Cache(superblock)) = superblock(cache) else { return false };
    let geometry = Geometry::of(&superblock);
    let header = newest(cache, &geometry).filter(|_| superblock.is_synchronous());
    let Some(header) = header.filter(|header| header.table.is_some()) else { return false };
    let Some(pointer) = header.uuids.pointers.as_slice().first() else { return false };
    let mut bytes = vec![0; geometry.meta_bytes()];
    read(cache, pointer.sector(), &mut bytes);
    let Ok(slots) = uuid::parse(&bytes) else { return false };
    let mut slots: Vec<UuidSlot> = slots.collect();
    let backed: Vec<usize> = (0..slots.len())
        .filter(|index| slots[*index].is_used() && known.contains(&slots[*index].uuid))
        .collect();
    spoil(&mut slots, &backed, &mut Rng::new(seed));
    let bytes: Vec<u8> = slots.iter().flat_map(UuidSlot::to_bytes).collect();
    cache.place(pointer.sector(), &bytes);
    true
}

/// The uuid of a backing device that says under which number the cache holds its data.
fn attached(device: &Device) -> Option<Uuid> {
    match superblock(device) {
        Some(Superblock::Backing(backing)) => backing.attachment().map(|_| backing.uuid()),
        _ => None,
    }
}

pub(super) fn superblock(device: &Device) -> Option<Superblock> {
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    read(device, SUPERBLOCK_SECTOR, &mut bytes);
    let facts = DeviceFacts { sectors: u64::MAX, logical_block_sectors: 1 };
    RawSuperblock::from_bytes(&bytes).and_then(|raw| raw.check(facts)).ok()
}

fn spoil(slots: &mut [UuidSlot], backed: &[usize], rng: &mut Rng) {
    let Some(first) = backed.first().copied() else { return };
    let any = backed[usize::try_from(rng.below(backed.len() as u64)).expect("few volumes")];
    let free = slots.iter().position(UuidSlot::is_free);
    match rng.below(7) {
        0 => backed.iter().for_each(|index| slots[*index] = UuidSlot::FREE),
        1 => slots[any] = UuidSlot::FREE,
        2 => slots[any].uuid.0[usize::try_from(rng.below(16)).expect("a uuid")] ^= 1 << rng.below(8),
        3 => slots[any].uuid = Uuid::INVALIDATED,
        4 => slots.swap(first, backed.last().copied().unwrap_or(first)),
        5 => free.into_iter().for_each(|free| slots.swap(any, free)),
        _ => free.into_iter().for_each(|free| slots[free] = slots[any]),
    }
}

fn newest(cache: &Device, geometry: &Geometry) -> Option<JsetHeader> {
    let mut newest: Option<JsetHeader> = None;
    for index in 0..geometry.journal_buckets {
        let mut bytes = vec![0; usize::try_from(geometry.bucket_bytes()).expect("a bucket fits in memory")];
        read(cache, geometry.sector_of(geometry.journal_bucket(index)), &mut bytes);
        let mut at = 0;
        while let Some(entry) = bytes.get(at..).and_then(|rest| Jset::parse(rest, geometry.magic).ok()) {
            at += geometry.whole_blocks(entry.byte_len());
            if newest.is_none_or(|newest| newest.seq < entry.header.seq) {
                newest = Some(entry.header);
            }
        }
    }
    newest
}

fn read(device: &Device, sector: u64, into: &mut [u8]) {
    Image(device).read_at(sector, into).expect("it lies on the device");
}
