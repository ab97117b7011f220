//! The table of volumes: which volume owns which number. Every change is written to a
//! new bucket and takes effect with the next journal entry. Only then is the former bucket freed.

use crate::cache_writes::WriteCause;
use crate::cpu_cost::sum_ns;
use crate::error::{Error, ErrorContext};
use crate::journal::writer;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::{Buckets, allocator};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use bcached_env::{Buffer, Disk, Env};
use bcached_format::checksum::Checksum;
use bcached_format::{
    BucketId, Geometry, Inode, JsetHeader, Key, Pointer, Pointers, TableSeal, Uuid, UuidSlot, uuid,
};

/// Bytes of the table checksummed before other tasks run.
const SUM_PIECE_BYTES: usize = 32 << 10;

/// The table in memory: the slot number is the volume's inode.
///
/// A slot whose contents may not be what was written is *doubted*: it is no reason to serve a
/// volume, to assign a number or to delete anything. It stays as it was read, and doubted, until
/// its number is assigned to a volume that can prove its ownership ([`UuidTable::assign`]).
pub struct UuidTable {
    /// UUID of the set.
    set: Uuid,
    slots: Vec<UuidSlot>,
    doubted: BTreeSet<Inode>,
    /// Free slots that were doubted: a device that is not present yet may claim the number.
    once_doubted: BTreeSet<Inode>,
    /// Numbers that were looked up in the tree, and whether there are no keys under them.
    looked_at: BTreeMap<Inode, bool>,
    /// Slots that were given up and whose volume has not been served since the table was read:
    /// nothing is in flight under these numbers.
    long_gone: BTreeSet<Inode>,
    /// Numbers of volumes that have been served since.
    lived: BTreeSet<Inode>,
    /// bcached wrote the newest journal entry: a slot that is not doubted is as it was last
    /// written.
    is_ours: bool,
    /// The table is not the one that was written.
    is_damaged: bool,
}

impl UuidTable {
    /// Creates a table of `count` free slots for set `set`.
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

    /// Builds the table from the slots as read, and the seal in the journal entry that names it.
    /// `sum`: checksum of what was read.
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

    /// The slot of a volume. `None`: there is no such number, or its slot is doubted, so that
    /// nothing is served or invalidated because of it (invariant D19).
    #[must_use]
    pub fn slot(&self, inode: Inode) -> Option<&UuidSlot> {
        self.slots.get(inode.0 as usize).filter(|_| !self.doubted.contains(&inode))
    }

    /// Like [`UuidTable::slot`], mutable.
    pub fn slot_mut(&mut self, inode: Inode) -> Option<&mut UuidSlot> {
        self.slots.get_mut(inode.0 as usize).filter(|_| !self.doubted.contains(&inode))
    }

    /// Assigns the number to a volume. No data of another volume may exist under it, or it provably
    /// belongs to this volume.
    pub fn assign(&mut self, inode: Inode, slot: UuidSlot) {
        self.doubted.remove(&inode);
        self.once_doubted.remove(&inode);
        self.looked_at.remove(&inode);
        self.slots[inode.0 as usize] = slot;
    }

    /// Frees a doubted slot: its number has no keys, and the volume that it names is elsewhere.
    pub fn forget_doubted(&mut self, inode: Inode) {
        if self.doubted.remove(&inode) {
            self.slots[inode.0 as usize] = UuidSlot::FREE;
            self.once_doubted.insert(inode);
        }
    }

    /// Returns true if the number belongs to no volume as far as the table tells: its slot is free
    /// or doubted.
    #[must_use]
    pub fn is_unowned(&self, inode: Inode) -> bool {
        let slot = self.slots.get(inode.0 as usize);
        slot.is_some_and(|slot| slot.is_free() || self.doubted.contains(&inode))
    }

    /// Finds the volume with this UUID.
    #[must_use]
    pub fn find(&self, uuid: Uuid) -> Option<Inode> {
        self.used().find(|(_, slot)| slot.uuid == uuid).map(|(inode, _)| inode)
    }

    /// Iterates over the existing volumes.
    pub fn used(&self) -> impl Iterator<Item = (Inode, &UuidSlot)> {
        self.known().filter(|(_, slot)| slot.is_used())
    }

    /// Iterates over the slots that may not be what was written, as they were read.
    pub fn doubted(&self) -> impl Iterator<Item = (Inode, &UuidSlot)> {
        self.doubted.iter().filter_map(|inode| Some((*inode, self.slots.get(inode.0 as usize)?)))
    }

    /// Returns true if the cached data under this number is not needed: bcached gave it up, and the
    /// slot is not doubted.
    #[must_use]
    pub fn is_released(&self, inode: Inode) -> bool {
        self.slot(inode).is_some_and(|slot| slot.is_invalidated() && slot.is_released())
    }

    /// Returns true if bcached used the set last: the content of a slot that is not doubted is the
    /// newest.
    #[must_use]
    pub const fn is_ours(&self) -> bool {
        self.is_ours
    }

    /// Returns true if the table that was read is not the one that was written: slots may have been
    /// lost.
    #[must_use]
    pub const fn is_damaged(&self) -> bool {
        self.is_damaged
    }

    /// The number for a new volume: one that is unowned and has no keys. A device that appears
    /// later may claim a number that a damaged table calls free. So numbers that were doubted come
    /// last. A damaged table yields the highest number, which was hardly ever assigned; otherwise
    /// it is the lowest.
    #[must_use]
    pub fn vacant(&self) -> Option<Inode> {
        let looked_at = self.looked_at.iter().filter(|(_, is_vacant)| **is_vacant).map(|(inode, _)| *inode);
        let vacant: Vec<Inode> = looked_at.filter(|inode| self.is_unowned(*inode)).collect();
        let mut vacant = self.in_order_of_giving(vacant).into_iter();
        let is_sound = |inode: &Inode| !self.doubted.contains(inode) && !self.once_doubted.contains(inode);
        let has_others = || self.next_to_look_at().is_some_and(|inode| is_sound(&inode));
        vacant.clone().find(is_sound).or_else(|| vacant.next().filter(|_| !has_others()))
    }

    /// The next number to look up in the tree because it might be vacant: first those of free
    /// slots, then of doubted ones.
    #[must_use]
    pub fn next_to_look_at(&self) -> Option<Inode> {
        let is_new = |inode: &Inode| !self.looked_at.contains_key(inode);
        let free = self.numbered().filter(|(_, slot)| slot.is_free()).map(|(inode, _)| inode);
        let free = self.in_order_of_giving(free.collect());
        free.into_iter().chain(self.doubted.iter().copied()).find(is_new)
    }

    /// Returns the ascending `numbers` in the order in which new volumes get them.
    fn in_order_of_giving(&self, mut numbers: Vec<Inode>) -> Vec<Inode> {
        if self.is_damaged {
            numbers.reverse();
        }
        numbers
    }

    /// Returns whether the number was looked up in the tree.
    #[must_use]
    pub fn was_looked_at(&self, inode: Inode) -> bool {
        self.looked_at.contains_key(&inode)
    }

    /// Records whether the tree has keys under an unowned number.
    pub fn looked_at(&mut self, inode: Inode, is_vacant: bool) {
        self.looked_at.insert(inode, is_vacant);
    }

    /// Records that a volume is served under the number.
    pub fn comes_to_life(&mut self, inode: Inode) {
        self.lived.insert(inode);
    }

    /// Returns whether a volume has been served under the number since the table was read.
    #[must_use]
    pub fn has_lived(&self, inode: Inode) -> bool {
        self.lived.contains(&inode)
    }

    /// Gives up the slot of a volume that is deleted or gets another slot. Its keys are not needed
    /// any more.
    pub fn give_up(&mut self, inode: Inode, seconds: u32) {
        let Some(slot) = self.slot_mut(inode).filter(|slot| slot.is_used()) else { return };
        slot.release(seconds);
        // An inode under which this process has served a volume is not used again: invariant D18.
        if !self.lived.contains(&inode) {
            self.long_gone.insert(inode);
        }
    }

    /// The slot that was given up first, of those that can be reused.
    #[must_use]
    pub fn longest_gone(&self) -> Option<Inode> {
        let gone = self.long_gone.iter().filter_map(|inode| Some((self.slot(*inode)?.invalidated, *inode)));
        gone.min().map(|(_, inode)| inode)
    }

    /// Excludes the slot from reuse by this process.
    pub fn keep_gone(&mut self, inode: Inode) {
        self.long_gone.remove(&inode);
    }

    /// Makes a slot as one that was never used. There must be no key with that number that a crash
    /// could bring back.
    pub fn free(&mut self, inode: Inode) {
        assert!(
            self.long_gone.remove(&inode) && self.slot(inode).is_some_and(UuidSlot::is_invalidated),
            "only a slot that was invalidated long ago is freed"
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

    /// Iterates over the slots that are not doubted.
    fn known(&self) -> impl Iterator<Item = (Inode, &UuidSlot)> {
        self.numbered().filter(|(inode, _)| !self.doubted.contains(inode))
    }

    /// Returns the table as stored. Each slot is sealed for this edition, except doubted ones,
    /// which stay as they were read. Of the thousands of slots few were ever used: the others are
    /// zeroes and cost almost nothing.
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

/// Reads the table that a journal entry names. `old`: it has the 64-byte slots of very old sets.
pub async fn read(
    (env, disk): (&Env, &Disk),
    geometry: &Geometry,
    set: Uuid,
    header: &JsetHeader,
    old: bool,
) -> Result<UuidTable, Error> {
    let malformed = |source| Error::Format { doing: ErrorContext::Uuids, source };
    let key = &header.uuids;
    bcached_format::key_check::check_uuid_key(geometry, key).map_err(|source| malformed(source.into()))?;
    let pointer = crate::btree::pointer_to_read(&key.pointers).expect("the check requires a pointer");
    let length = geometry.meta_bytes().min(usize::from(key.size) * 512);
    let (result, buffer) = disk.read(pointer.sector(), Buffer::zeroed(length)).await;
    result.map_err(Error::io(ErrorContext::Uuids))?;
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

/// Computes the seal that journal entries carry for a table with these bytes.
pub async fn seal_of(env: &Env, bytes: &[u8], edition: u64) -> TableSeal {
    TableSeal { sum: sum_of(env, bytes).await, edition }
}

/// Computes the checksum of a table, in pieces.
async fn sum_of(env: &Env, bytes: &[u8]) -> u64 {
    let mut sum = Checksum::default();
    for piece in bytes.chunks(SUM_PIECE_BYTES) {
        sum.add(piece);
        env.charge(sum_ns(piece.len()));
        env.breathe().await;
    }
    sum.value()
}

/// The key of a table stored in `bucket`.
#[must_use]
pub fn table_key(geometry: &Geometry, buckets: &Buckets, bucket: BucketId) -> Key {
    let pointer = Pointer::new(bucket.device, buckets.sector(bucket), buckets.get(bucket).generation);
    let size = u16::try_from(geometry.meta_sectors()).expect("a table is at most 4 MiB");
    Key { size, pointers: Pointers::one(pointer), ..Key::default() }
}

/// Writes the current table; durable when this returns.
pub async fn store(set: &CacheSet) -> Result<(), Error> {
    // Take the bucket before the lock: the allocator may have to free one, and stores generations
    // under the same lock.
    let bucket = allocator::take_metadata(set, 1).await?.pop().expect("one bucket was requested");
    let _alone = set.inner.metadata.acquire(1).await;
    let entry = writer::claim_entry(set).await?;
    let edition = new_stamp(set);
    let (key, bytes) = set.with(|s| (table_key(&s.geometry, &s.buckets, bucket), s.uuids.seal(edition)));
    let seal = seal_of(set.env(), &bytes, edition).await;
    let sector = set.with(|s| s.buckets.sector(bucket));
    let _phase = set.begin(Phase::UuidTable);
    let written = set.write_cache(WriteCause::Uuids, sector, Buffer::copied_from(&bytes).freeze()).await;
    written.map_err(|source| set.fail(Error::Io { doing: ErrorContext::Uuids, source }))?;
    let former = set.with(|s| {
        s.uuid_seal = Some(seal);
        core::mem::replace(&mut s.uuid_key, key)
    });
    entry.commit().await?;
    set.with(|s| {
        let pointer = crate::btree::pointer_to_read(&former.pointers).expect("a table's key has a pointer");
        let bucket = s.buckets.of(pointer).expect("a table lies in a bucket");
        s.buckets.free_metadata(bucket, None);
    });
    set.signals().allocator_work.notify_all();
    Ok(())
}

/// Returns a random number that is not zero.
pub fn new_stamp(set: &CacheSet) -> u64 {
    set.env().random() | 1
}
