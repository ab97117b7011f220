//! The table of volumes: who owns which number (format 11). Every change is written to a new bucket and takes effect
//! with the next journal entry; the former bucket is let go only then.

use crate::cache_writes::Cause;
use crate::cpu_cost::sum_ns;
use crate::error::{Doing, Error};
use crate::journal::writer;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::{Buckets, allocator};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use bcached_env::{Buffer, Disk, Env};
use bcached_format::checksum::Sum;
use bcached_format::{
    BucketId, Geometry, Inode, JsetHeader, Key, Pointer, Pointers, TableSeal, Uuid, UuidSlot, uuid,
};

/// So much of a table is summed before others are let run.
const SUM_PIECE_BYTES: usize = 32 << 10;

/// The table in memory: slot number is the volume's inode.
///
/// A slot whose content may not be what was written is *doubted*: nobody is served, given or deprived of anything because of it. It
/// stays as it was read, and doubted, until its number becomes somebody's who can prove it ([`UuidTable::assign`]).
pub struct UuidTable {
    /// Of the set.
    set: Uuid,
    slots: Vec<UuidSlot>,
    doubted: BTreeSet<Inode>,
    /// Free ones that were doubted: a device that is not here yet may say that the number is its own.
    once_doubted: BTreeSet<Inode>,
    /// Numbers that were looked for in the tree, and whether no key stands under them.
    looked_at: BTreeMap<Inode, bool>,
    /// Given up, and of no volume that has been served since the table was read: nothing is under way under such a number.
    long_gone: BTreeSet<Inode>,
    /// Of volumes that have been.
    lived: BTreeSet<Inode>,
    /// The newest journal entry was bcached's: a slot that is not doubted is as it was written last.
    is_ours: bool,
    /// It is not the table that was written.
    is_damaged: bool,
}

impl UuidTable {
    /// A table of `count` free slots, of set `set`.
    #[must_use]
    pub fn empty(set: Uuid, count: usize) -> Self {
        Self {
            set,
            slots: alloc::vec![UuidSlot::FREE; count],
            doubted: BTreeSet::new(),
            once_doubted: BTreeSet::new(),
            looked_at: BTreeMap::new(),
            long_gone: BTreeSet::new(),
            lived: BTreeSet::new(),
            is_ours: true,
            is_damaged: false,
        }
    }

    /// The table with these slots, as they were read, and what the journal entry that names it says of it. `sum`: of what was read.
    fn read(set: Uuid, slots: Vec<UuidSlot>, seal: Option<TableSeal>, sum: u64) -> Self {
        let is_damaged = seal.is_some_and(|seal| seal.sum != sum);
        let doubted = uuid::doubted(set, &slots, seal).into_keys().collect();
        let mut table = Self { slots, doubted, is_ours: seal.is_some(), is_damaged, ..Self::empty(set, 0) };
        for index in 0..table.slots.len() {
            let (number, slot) = (inode_of(index), &mut table.slots[index]);
            if slot.is_invalidated() && !table.doubted.contains(&number) && !slot.is_sealed(set, number) {
                slot.forget_release();
            }
        }
        if !table.is_ours {
            let numbers = (0..table.slots.len()).map(inode_of);
            numbers
                .for_each(|number| table.slot_mut(number).into_iter().for_each(UuidSlot::was_used_by_others));
        }
        table.long_gone =
            table.known().filter(|(_, slot)| slot.is_invalidated()).map(|(inode, _)| inode).collect();
        table
    }

    /// The slot of a volume. `None`: there is no such number, or its slot is doubted.
    #[must_use]
    pub fn slot(&self, inode: Inode) -> Option<&UuidSlot> {
        self.slots.get(inode.0 as usize).filter(|_| !self.doubted.contains(&inode))
    }

    /// The same, to change.
    pub fn slot_mut(&mut self, inode: Inode) -> Option<&mut UuidSlot> {
        self.slots.get_mut(inode.0 as usize).filter(|_| !self.doubted.contains(&inode))
    }

    /// The number becomes a volume's: nothing of anybody else stands under it, or what stands there is provably this volume's.
    pub fn assign(&mut self, inode: Inode, slot: UuidSlot) {
        self.doubted.remove(&inode);
        self.once_doubted.remove(&inode);
        self.looked_at.remove(&inode);
        self.slots[inode.0 as usize] = slot;
    }

    /// A doubted slot is free: its number has no keys, and what it names is elsewhere.
    pub fn forget_doubted(&mut self, inode: Inode) {
        if self.doubted.remove(&inode) {
            self.slots[inode.0 as usize] = UuidSlot::FREE;
            self.once_doubted.insert(inode);
        }
    }

    /// The number is nobody's as far as the table tells: its slot is free, or doubted.
    #[must_use]
    pub fn is_unowned(&self, inode: Inode) -> bool {
        let slot = self.slots.get(inode.0 as usize);
        slot.is_some_and(|slot| slot.is_free() || self.doubted.contains(&inode))
    }

    /// The volume with this UUID.
    #[must_use]
    pub fn find(&self, uuid: Uuid) -> Option<Inode> {
        self.used().find(|(_, slot)| slot.uuid == uuid).map(|(inode, _)| inode)
    }

    /// The volumes that exist.
    pub fn used(&self) -> impl Iterator<Item = (Inode, &UuidSlot)> {
        self.known().filter(|(_, slot)| slot.is_used())
    }

    /// Slots that may not be what was written, as they were read.
    pub fn doubted(&self) -> impl Iterator<Item = (Inode, &UuidSlot)> {
        self.doubted.iter().filter_map(|inode| Some((*inode, self.slots.get(inode.0 as usize)?)))
    }

    /// Nobody needs what the cache holds under this number: bcached gave it up, and nothing casts doubt on that.
    #[must_use]
    pub fn is_released(&self, inode: Inode) -> bool {
        self.slot(inode).is_some_and(|slot| slot.is_invalidated() && slot.is_released())
    }

    /// bcached used the set last: what a slot says that is not doubted is the newest that was said.
    #[must_use]
    pub const fn is_ours(&self) -> bool {
        self.is_ours
    }

    /// The table that was read is not the one that was written: slots may have been lost.
    #[must_use]
    pub const fn is_damaged(&self) -> bool {
        self.is_damaged
    }

    /// The number that a new volume gets: nobody's, and no key stands under it. A device that comes later may say that a number is its
    /// own which a damaged table calls free. So one that was doubted comes last, and of a damaged table the highest, which
    /// was hardly ever given, else the lowest.
    #[must_use]
    pub fn vacant(&self) -> Option<Inode> {
        let looked_at = self.looked_at.iter().filter(|(_, is_vacant)| **is_vacant).map(|(inode, _)| *inode);
        let vacant: Vec<Inode> = looked_at.filter(|inode| self.is_unowned(*inode)).collect();
        let mut vacant = self.in_order_of_giving(vacant).into_iter();
        let is_sound = |inode: &Inode| !self.doubted.contains(inode) && !self.once_doubted.contains(inode);
        let has_others = || self.next_to_look_at().is_some_and(|inode| is_sound(&inode));
        vacant.clone().find(is_sound).or_else(|| vacant.next().filter(|_| !has_others()))
    }

    /// A number that might be vacant, and was not looked for in the tree: of a free slot first, then of a doubted one.
    #[must_use]
    pub fn next_to_look_at(&self) -> Option<Inode> {
        let is_new = |inode: &Inode| !self.looked_at.contains_key(inode);
        let free = self.numbered().filter(|(_, slot)| slot.is_free()).map(|(inode, _)| inode);
        let free = self.in_order_of_giving(free.collect());
        free.into_iter().chain(self.doubted.iter().copied()).find(is_new)
    }

    /// Ascending numbers, in the order in which new volumes get them.
    fn in_order_of_giving(&self, mut numbers: Vec<Inode>) -> Vec<Inode> {
        if self.is_damaged {
            numbers.reverse();
        }
        numbers
    }

    /// It was looked for in the tree.
    #[must_use]
    pub fn was_looked_at(&self, inode: Inode) -> bool {
        self.looked_at.contains_key(&inode)
    }

    /// The tree has keys under a number that is nobody's, or none.
    pub fn looked_at(&mut self, inode: Inode, is_vacant: bool) {
        self.looked_at.insert(inode, is_vacant);
    }

    /// A volume is served under the number.
    pub fn comes_to_life(&mut self, inode: Inode) {
        self.lived.insert(inode);
    }

    /// A volume has been served under the number since the table was read.
    #[must_use]
    pub fn has_lived(&self, inode: Inode) -> bool {
        self.lived.contains(&inode)
    }

    /// The slot of a volume that is no more, or gets another. Nobody needs its keys.
    pub fn give_up(&mut self, inode: Inode, seconds: u32) {
        let Some(slot) = self.slot_mut(inode).filter(|slot| slot.is_used()) else { return };
        slot.release(seconds);
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

    /// The slot is not used again by this process.
    pub fn keep_gone(&mut self, inode: Inode) {
        self.long_gone.remove(&inode);
    }

    /// A slot is as one that was never used. There must be no key of that number that a crash could bring back.
    pub fn free(&mut self, inode: Inode) {
        assert!(
            self.long_gone.remove(&inode) && self.slot(inode).is_some_and(UuidSlot::is_invalidated),
            "its volume is long gone"
        );
        self.slots[inode.0 as usize] = UuidSlot::FREE;
        self.looked_at(inode, true);
    }

    /// Number of slots.
    #[must_use]
    pub fn count(&self) -> usize {
        self.slots.len()
    }

    fn numbered(&self) -> impl Iterator<Item = (Inode, &UuidSlot)> {
        self.slots.iter().enumerate().map(|(index, slot)| (inode_of(index), slot))
    }

    /// Those that are not doubted.
    fn known(&self) -> impl Iterator<Item = (Inode, &UuidSlot)> {
        self.numbered().filter(|(inode, _)| !self.doubted.contains(inode))
    }

    /// The table as stored, each slot sealed for this writing of it but for the doubted ones, which stay as they were read. Of its slots,
    /// thousands, few were ever used: the others are zeroes, and cost next to nothing.
    #[must_use]
    pub fn seal(&mut self, edition: u64) -> Vec<u8> {
        let mut bytes = alloc::vec![0; self.slots.len() * uuid::SLOT_BYTES];
        let slots = self.slots.iter_mut().zip(bytes.chunks_exact_mut(uuid::SLOT_BYTES)).enumerate();
        for (index, (slot, place)) in slots.filter(|(_, (slot, _))| **slot != UuidSlot::FREE) {
            let number = inode_of(index);
            if !self.doubted.contains(&number) {
                slot.seal(self.set, number, edition);
            }
            place.copy_from_slice(&slot.to_bytes());
        }
        bytes
    }
}

fn inode_of(index: usize) -> Inode {
    Inode(u32::try_from(index).expect("a bucket holds fewer than 2^32 slots"))
}

/// Reads the table that a journal entry names. `old`: it has the slots of 64 bytes of very old sets.
pub async fn read(
    (env, disk): (&Env, &Disk),
    geometry: &Geometry,
    set: Uuid,
    header: &JsetHeader,
    old: bool,
) -> Result<UuidTable, Error> {
    let malformed = |source| Error::Format { doing: Doing::Uuids, source };
    let key = &header.uuids;
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
    slots.resize(geometry.uuid_slots(), UuidSlot::FREE);
    let seal = header.table.filter(|_| !old);
    let sum = sum_of(env, buffer.as_slice()).await;
    Ok(UuidTable::read(set, slots, seal, sum))
}

/// What journal entries say of a table with these bytes.
pub async fn seal_of(env: &Env, bytes: &[u8], edition: u64) -> TableSeal {
    TableSeal { sum: sum_of(env, bytes).await, edition }
}

/// The checksum of a table, in pieces.
async fn sum_of(env: &Env, bytes: &[u8]) -> u64 {
    let mut sum = Sum::default();
    for piece in bytes.chunks(SUM_PIECE_BYTES) {
        sum.add(piece);
        env.charge(sum_ns(piece.len()));
        env.breathe().await;
    }
    sum.value()
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
    let edition = new_stamp(set);
    let (key, bytes) = set.with(|s| (table_key(&s.geometry, &s.buckets, bucket), s.uuids.seal(edition)));
    let seal = seal_of(set.env(), &bytes, edition).await;
    let sector = set.with(|s| s.buckets.sector(bucket));
    let _phase = set.begin(Phase::UuidTable);
    let written = set.write_cache(Cause::Uuids, sector, Buffer::copied_from(&bytes).freeze()).await;
    written.map_err(|source| set.fail(Error::Io { doing: Doing::Uuids, source }))?;
    let former = set.with(|s| {
        s.uuid_seal = Some(seal);
        core::mem::replace(&mut s.uuid_key, key)
    });
    entry.commit().await?;
    set.with(|s| {
        let pointer = crate::btree::pointer_to_read(&former.pointers).expect("a table lies somewhere");
        let bucket = s.buckets.of(pointer).expect("a table lies in a bucket");
        s.buckets.free_metadata(bucket, None);
    });
    set.signals().allocator_work.notify_all();
    Ok(())
}

/// A random number that is not zero.
pub fn new_stamp(set: &CacheSet) -> u64 {
    set.env().random() | 1
}
