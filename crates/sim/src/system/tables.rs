//! The table of volumes is not what was written: a write to the cache that was lost, went elsewhere, or has decayed. Slots of volumes
//! that live in the cache alone stay as they are: nothing else says what those have.

use super::engine::Image;
use crate::disk::Device;
use bcached_check::ReadAt;
use bcached_env::rng::Rng;
use bcached_format::jset::{Jset, JsetHeader};
use bcached_format::{
    DeviceFacts, Geometry, RawSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, Superblock, Uuid, UuidSlot,
    uuid,
};

/// Damages the table that the newest journal entry names, in a way that `seed` tells. False: there is no such table.
pub fn damage(cache: &mut Device, seed: u64) -> bool {
    let mut bytes = vec![0; SUPERBLOCK_BYTES];
    read(cache, SUPERBLOCK_SECTOR, &mut bytes);
    let facts = DeviceFacts { sectors: u64::MAX, logical_block_sectors: 1 };
    let checked = RawSuperblock::from_bytes(&bytes).and_then(|raw| raw.check(facts));
    let Ok(Superblock::Cache(superblock)) = checked else { return false };
    let geometry = Geometry::of(&superblock);
    let header = newest(cache, &geometry).filter(|_| superblock.is_synchronous());
    let Some(header) = header.filter(|header| header.table.is_some()) else { return false };
    let Some(pointer) = header.uuids.pointers.as_slice().first() else { return false };
    let mut bytes = vec![0; geometry.meta_bytes()];
    read(cache, pointer.sector(), &mut bytes);
    let Ok(slots) = uuid::parse(&bytes) else { return false };
    let mut slots: Vec<UuidSlot> = slots.collect();
    spoil(&mut slots, &mut Rng::new(seed));
    let bytes: Vec<u8> = slots.iter().flat_map(UuidSlot::to_bytes).collect();
    cache.place(pointer.sector(), &bytes);
    true
}

fn spoil(slots: &mut [UuidSlot], rng: &mut Rng) {
    let backed: Vec<usize> = (0..slots.len()).filter(|index| is_backed(&slots[*index])).collect();
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

fn is_backed(slot: &UuidSlot) -> bool {
    slot.is_used() && !slot.is_flash_only()
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
