//! The table of volumes: who owns which number (format 11). Every change is written to a new bucket and takes effect
//! with the next journal entry; the former bucket is let go only then.

use crate::error::{Doing, Error};
use crate::journal::writer;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::{Buckets, allocator};
use crate::written::Cause;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use bcached_env::{Buffer, Disk};
use bcached_format::{BucketId, Geometry, Inode, Key, Pointer, Pointers, Uuid, UuidSlot, uuid};

/// Largest flash-only volume: in bytes its size fits a signed number of 64 bits, which is what clients are told. The table
/// has no sum, so any number may stand there.
const FLASH_SECTORS_MAX: u64 = (1 << 54) - 1;

/// The table in memory: slot number is the volume's inode.
pub struct UuidTable {
    slots: Vec<UuidSlot>,
    /// Given up, and of no volume that has been served since the table was read: nothing is under way under such a number.
    long_gone: BTreeSet<Inode>,
    /// Of volumes that have been.
    lived: BTreeSet<Inode>,
}

impl UuidTable {
    /// A table of `count` free slots.
    #[must_use]
    pub fn empty(count: usize) -> Self {
        Self { slots: alloc::vec![UuidSlot::FREE; count], long_gone: BTreeSet::new(), lived: BTreeSet::new() }
    }

    /// The slot of a volume.
    #[must_use]
    pub fn slot(&self, inode: Inode) -> Option<&UuidSlot> {
        self.slots.get(inode.0 as usize)
    }

    /// The slot of a volume, to change.
    pub fn slot_mut(&mut self, inode: Inode) -> Option<&mut UuidSlot> {
        self.slots.get_mut(inode.0 as usize)
    }

    /// The volume with this UUID.
    #[must_use]
    pub fn find(&self, uuid: Uuid) -> Option<Inode> {
        self.used().find(|(_, slot)| slot.uuid == uuid).map(|(inode, _)| inode)
    }

    /// The volumes that exist.
    pub fn used(&self) -> impl Iterator<Item = (Inode, &UuidSlot)> {
        self.numbered().filter(|(_, slot)| slot.is_used())
    }

    /// The volume is no more, and its number is nobody's.
    #[must_use]
    pub fn is_invalidated(&self, inode: Inode) -> bool {
        self.slots.get(inode.0 as usize).is_some_and(UuidSlot::is_invalidated)
    }

    /// The first slot that was never used, or that nothing is left of ([`super::volume::slots`]).
    #[must_use]
    pub fn free_slot(&self) -> Option<Inode> {
        self.numbered().find(|(_, slot)| slot.is_free()).map(|(inode, _)| inode)
    }

    /// A volume is served under the number.
    pub fn comes_to_life(&mut self, inode: Inode) {
        self.lived.insert(inode);
    }

    /// The slot of a volume that gets another.
    pub fn give_up(&mut self, inode: Inode, seconds: u32) {
        let Some(slot) = self.slot_mut(inode) else { return };
        slot.invalidate(seconds);
        if !self.lived.contains(&inode) {
            self.long_gone.insert(inode);
        }
    }

    /// The slot that was given up first, of those that can be used again.
    #[must_use]
    pub fn longest_gone(&self) -> Option<Inode> {
        let gone = self.long_gone.iter().filter_map(|inode| Some((self.slot(*inode)?.invalidated, *inode)));
        gone.min().map(|(_, inode)| inode)
    }

    /// A slot is as one that was never used. There must be no key of that number that a crash could bring back.
    pub fn free(&mut self, inode: Inode) {
        assert!(self.long_gone.remove(&inode) && self.is_invalidated(inode), "its volume is long gone");
        self.slots[inode.0 as usize] = UuidSlot::FREE;
    }

    /// Number of slots.
    #[must_use]
    pub fn count(&self) -> usize {
        self.slots.len()
    }

    fn numbered(&self) -> impl Iterator<Item = (Inode, &UuidSlot)> {
        let number =
            |index: usize| Inode(u32::try_from(index).expect("a bucket holds fewer than 2^32 slots"));
        self.slots.iter().enumerate().map(move |(index, slot)| (number(index), slot))
    }

    /// The table as stored. Of its slots, thousands, few were ever used: the others are zeroes, and cost next to nothing.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = alloc::vec![0; self.slots.len() * uuid::SLOT_BYTES];
        let slots = self.slots.iter().zip(bytes.chunks_exact_mut(uuid::SLOT_BYTES));
        for (slot, place) in slots.filter(|(slot, _)| **slot != UuidSlot::FREE) {
            place.copy_from_slice(&slot.to_bytes());
        }
        bytes
    }
}

/// Reads the table that `key` names. `old`: it has the slots of 64 bytes of very old sets.
pub async fn read(disk: &Disk, geometry: &Geometry, key: &Key, old: bool) -> Result<UuidTable, Error> {
    let malformed = |source| Error::Format { doing: Doing::Uuids, source };
    bcached_format::key_check::check_uuid_key(geometry, key).map_err(|source| malformed(source.into()))?;
    let pointer = crate::btree::pointer_to_read(&key.pointers).expect("the check wants a pointer");
    let length = geometry.meta_bytes().min(usize::from(key.size) * 512);
    let (result, buffer) = disk.read(pointer.sector(), Buffer::zeroed(length)).await;
    result.map_err(Error::io(Doing::Uuids))?;
    let mut slots: Vec<UuidSlot> = if old {
        uuid::parse_old(buffer.as_slice()).map_err(|source| malformed(source.into()))?.collect()
    } else {
        uuid::parse(buffer.as_slice()).map_err(|source| malformed(source.into()))?.collect()
    };
    let is_too_large =
        |slot: &UuidSlot| slot.is_used() && slot.is_flash_only() && slot.sectors > FLASH_SECTORS_MAX;
    if slots.iter().any(is_too_large) {
        return Err(Error::Inconsistent("a flash-only volume is said to be larger than any volume can be"));
    }
    slots.resize(geometry.uuid_slots(), UuidSlot::FREE);
    let mut table = UuidTable { slots, long_gone: BTreeSet::new(), lived: BTreeSet::new() };
    table.long_gone =
        table.numbered().filter(|(_, slot)| slot.is_invalidated()).map(|(inode, _)| inode).collect();
    Ok(table)
}

/// The key of a table in `bucket`.
#[must_use]
pub fn table_key(geometry: &Geometry, buckets: &Buckets, bucket: BucketId) -> Key {
    let pointer = Pointer::new(bucket.device, buckets.sector(bucket), buckets.get(bucket).generation);
    let size = u16::try_from(geometry.meta_sectors()).expect("at most 4 MiB");
    Key { size, pointers: Pointers::one(pointer), ..Key::default() }
}

/// Writes the table as it stands; durable when this returns.
pub async fn store(set: &CacheSet) -> Result<(), Error> {
    // The bucket comes first: the allocator, who may have to free one, stores generations under the same lock.
    let bucket = allocator::take_metadata(set, 1).await?.pop().expect("one was asked for");
    let _alone = set.inner.metadata.acquire(1).await;
    let entry = writer::claim_entry(set).await?;
    let (key, bytes) = set.with(|s| (table_key(&s.geometry, &s.buckets, bucket), s.uuids.to_bytes()));
    let sector = set.with(|s| s.buckets.sector(bucket));
    let _phase = set.begin(Phase::UuidTable);
    let written = set.write_cache(Cause::Uuids, sector, Buffer::copied_from(&bytes).freeze()).await;
    written.map_err(|source| set.fail(Error::Io { doing: Doing::Uuids, source }))?;
    let former = set.with(|s| core::mem::replace(&mut s.uuid_key, key));
    entry.commit().await?;
    set.with(|s| {
        let pointer = crate::btree::pointer_to_read(&former.pointers).expect("a table lies somewhere");
        let bucket = s.buckets.of(pointer).expect("a table lies in a bucket");
        s.buckets.free_metadata(bucket, None);
    });
    set.signals().allocator_work.notify_all();
    Ok(())
}
