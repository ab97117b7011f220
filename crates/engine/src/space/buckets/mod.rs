//! The table of buckets: generation, age, exact live and dirty sectors, pins (counts, not
//! mark-and-sweep).
//!
//! Invariants, kept at every change:
//! 1. `dirty <= live <= bucket_sectors`, both counting only pointers that are not stale. Keys that
//!    would break it can only come from the device, and are refused while a set is being opened.
//!    What lies behind the frontier of a walk is not counted yet (`btree::walk_frontier`).
//! 2. A bucket is on the victim lists exactly when its usage is `Data` and it holds no dirty data.
//! 3. `available` counts the buckets that are free, pending, or `Data` without dirty sectors.
//!    `by_usage` counts all buckets, by usage.

mod extents;
mod lengths;
mod oldest_generations;
mod pointers;
mod reserved;
mod search;
mod slots;

pub use search::Invalidation;
pub use slots::BYTES_PER_BUCKET;

use crate::cpu_cost::BUCKETS_MAX;
use crate::error::Error;
use crate::policy::{EvictionOrder, Rank, VictimCursor};
use crate::set::CacheSet;
use crate::space::flushes::{CacheFlushAction, RunningFlush};
use crate::space::{CacheFlushes, FreeList};
use crate::state::State;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use bcached_format::prio::{self, PRIO_FRESH};
use bcached_format::{BucketId, DeviceIndex, Gen, Pointer, ReplacementPolicy};
use slots::{BucketSlot, SlotVisits, place_slot};

/// A bucket is not invalidated when its generation is this far ahead of the oldest known pointer to
/// it. Kernels refuse live keys that are more stale than this.
pub const STALE_MAX: u8 = 96;

/// A pass of GC is due when the sectors that have died amount to one in so many of the device.
const DEAD_SHARE: u64 = 8;
/// The same where buckets are scarce: the space that dead keys take in the tree is needed for data
/// then.
const DEAD_SHARE_SCARCE: u64 = 16;
/// Buckets are scarce where fewer than one in so many is available without writing anything back.
const SCARCE_SHARE: u64 = 4;

/// Why such a pointer always has a bucket.
const CHECKED: &str = "only pointers that were checked are pinned";

/// What a bucket is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BucketUsage {
    /// May hold anything: the walk has not finished.
    Unknown,
    /// Closed; holds cached data or nothing.
    Data,
    /// Data is being appended.
    Open,
    /// Superblock, journal, priorities, uuid table or a B-tree node.
    Meta,
    /// Invalidated; its new generation is not durable yet.
    Pending,
    /// Its generation is durable: ready to be handed out.
    Free,
    /// Kept free for the next start, with a proof in it that it is free (`space::reserve`).
    Reserve,
}

/// Number of usages.
const USAGES: usize = BucketUsage::Reserve as usize + 1;

/// The current state of one bucket.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    /// Generation; pointers with an older one are stale.
    pub generation: Gen,
    /// What it is used for.
    pub usage: BucketUsage,
    /// A lookup of its summary has failed.
    pub is_unsummed: bool,
    /// Emptying it has failed: something in it, or a leaf that refers to it, could not be read.
    pub is_stuck: bool,
    /// Operations in flight that read from it or write to it, and keys not yet in the tree. If
    /// there are very many, it may be lower than their number, but it is 0 only if there are none.
    pub pins: u16,
    /// Live sectors.
    pub live: u32,
    /// Of these, dirty.
    pub dirty: u32,
}

/// Memory that the table of so many buckets takes, in bytes.
#[must_use]
pub const fn table_bytes(buckets: u64) -> u64 {
    buckets.saturating_mul(BYTES_PER_BUCKET as u64)
}

/// All buckets of all cache devices of the set (currently one device).
pub struct Buckets {
    table: Vec<BucketSlot>,
    device: DeviceIndex,
    bucket_sectors: u64,
    first_bucket: u64,
    /// The order in which buckets are invalidated. For buckets that cannot be, their dirty sectors.
    victims: EvictionOrder,
    /// Pins that do not fit into a slot, in units of 32768.
    crowded: BTreeMap<usize, u32>,
    pulling: SlotVisits,
    /// The first journal entry that the table was told of: it counts as number 1.
    first_entry: Option<u64>,
    /// The newest journal entry, as such a number.
    entries: u64,
    /// The free buckets.
    pub free: FreeList,
    pending: Vec<BucketId>,
    /// Number of times that a bucket lost its last dirty data.
    freed: u64,
    available: u64,
    /// Number of buckets by [`BucketUsage`].
    by_usage: [u64; USAGES],
    clock: u64,
    traffic: u64,
    gc_wanted: bool,
    /// A pass of GC has become due, and the GC task has not been told.
    gc_untold: bool,
    /// Sectors that have died since the last pass of GC was begun.
    died: u64,
    /// Where a search for buckets to invalidate continues.
    next_victim: Option<VictimCursor>,
    flushes: CacheFlushes,
    /// The current search has passed over some buckets only because of the age of the pointers to
    /// them.
    passes_old: bool,
    /// Nodes are longer than the stored lengths say.
    has_longer_nodes: bool,
}

impl Buckets {
    /// Creates a table with generations and priorities as `stored` (one per bucket). Nothing is
    /// known of what the buckets hold yet: all but those of the superblock are `Unknown`.
    ///
    /// # Errors
    /// [`Error::BucketMemory`] if there is no memory for so many.
    pub fn new(
        device: DeviceIndex,
        bucket_sectors: u64,
        first_bucket: u64,
        stored: impl ExactSizeIterator<Item = (Gen, u16)>,
    ) -> Result<Self, Error> {
        let count = stored.len();
        let no_memory = Error::BucketMemory { buckets: count as u64, needed: table_bytes(count as u64) };
        let mut table: Vec<BucketSlot> = Vec::new();
        let is_reserved = u32::try_from(count).is_ok_and(|count| count < u32::MAX)
            && table.try_reserve_exact(count).is_ok();
        let Some(victims) = is_reserved.then(|| EvictionOrder::new(count).ok()).flatten() else {
            return Err(no_memory);
        };
        table.extend((0..).zip(stored).map(|(index, (generation, prio))| {
            let usage = if index < first_bucket { BucketUsage::Meta } else { BucketUsage::Unknown };
            BucketSlot::new(generation, usage, prio.min(PRIO_FRESH), prio::durable_blocks(prio))
        }));
        let mut by_usage = [0; USAGES];
        table.iter().for_each(|bucket| by_usage[bucket.usage() as usize] += 1);
        Ok(Self {
            table,
            device,
            bucket_sectors,
            first_bucket,
            victims,
            crowded: BTreeMap::new(),
            pulling: SlotVisits::default(),
            first_entry: None,
            entries: 0,
            free: FreeList::default(),
            pending: Vec::new(),
            freed: 0,
            available: 0,
            by_usage,
            clock: u64::from(PRIO_FRESH),
            traffic: 0,
            gc_wanted: false,
            gc_untold: false,
            died: 0,
            next_victim: None,
            flushes: CacheFlushes::default(),
            passes_old: false,
            has_longer_nodes: false,
        })
    }

    /// Memory that the table takes, in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        table_bytes(self.table.len() as u64)
    }

    /// Number of buckets in the table.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.table.len() as u64
    }

    /// Number of buckets that can be used or reused without writing anything back.
    #[must_use]
    pub const fn available(&self) -> u64 {
        self.available
    }

    /// Number of times that a bucket lost its last dirty data, since the table was created.
    #[must_use]
    pub const fn freed(&self) -> u64 {
        self.freed
    }

    /// Number of closed buckets that hold no live data.
    #[must_use]
    pub const fn empty_count(&self) -> usize {
        self.victims.length(Rank::Empty)
    }

    /// Number of buckets of that usage.
    #[must_use]
    pub const fn count_of(&self, usage: BucketUsage) -> u64 {
        self.by_usage[usage as usize]
    }

    /// Number of closed buckets whose data is all clean.
    #[must_use]
    pub const fn clean_count(&self) -> usize {
        self.victims.length(Rank::Used)
    }

    /// Number of buckets ready to be handed out.
    #[must_use]
    pub fn free_count(&self) -> usize {
        self.free.len()
    }

    /// The invalidated buckets whose generations are not durable yet.
    #[must_use]
    pub fn pending(&self) -> &[BucketId] {
        &self.pending
    }

    /// First sector of a bucket on its device.
    #[must_use]
    pub const fn sector(&self, id: BucketId) -> u64 {
        id.index * self.bucket_sectors
    }

    /// The bucket with this index on the only device.
    #[must_use]
    pub const fn id(&self, index: u64) -> BucketId {
        BucketId { device: self.device, index }
    }

    /// Returns the state of one bucket.
    #[must_use]
    #[inline]
    pub fn get(&self, id: BucketId) -> Bucket {
        self.view(slot(id) as usize)
    }

    /// Generation of one bucket.
    #[must_use]
    #[inline]
    pub fn generation(&self, id: BucketId) -> Gen {
        self.table[slot(id) as usize].generation
    }

    /// The clock at the bucket's last use.
    #[must_use]
    pub fn touched(&self, id: BucketId) -> u64 {
        self.table[slot(id) as usize].touched(self.clock)
    }

    /// Iterates over all buckets with their ids.
    pub fn iter(&self) -> impl Iterator<Item = (BucketId, Bucket)> {
        (0..self.table.len()).map(|place| (self.id(place as u64), self.view(place)))
    }

    /// Iterates over the buckets from this index on, as many as one piece of work looks at. For
    /// callers that look at all of them.
    pub fn part(&self, from: usize) -> impl Iterator<Item = (BucketId, Bucket)> {
        let end = self.table.len().min(from.saturating_add(BUCKETS_MAX));
        (from..end).map(|place| (self.id(place as u64), self.view(place)))
    }

    /// Advances the generation to that of a pointer found on disk. The counts of
    /// the older generation are void; returns whether dirty sectors were among them.
    pub fn raise(&mut self, pointer: Pointer) -> bool {
        let Some(id) = self.of(pointer) else { return false };
        let place = slot(id) as usize;
        let bucket = &mut self.table[place];
        if pointer.generation().after(bucket.generation) == 0 {
            return false;
        }
        bucket.generation = pointer.generation();
        bucket.set_length(0);
        bucket.live = 0;
        let lost_dirty = self.dirty_at(place) > 0;
        self.set_dirty_at(place, 0);
        lost_dirty
    }

    /// Records that data has been written to where `pointer` points.
    pub fn written(&mut self, pointer: Pointer) {
        let place = self.place_of(pointer).expect("data is written where there is a bucket");
        self.table[place].set_flush(self.flushes.begun());
    }

    /// Says what to do for flush `wanted` of the cache device or a later one
    /// ([`CacheFlushes::turn`]).
    pub fn flush_turn(&mut self, wanted: u64) -> CacheFlushAction {
        let turn = self.flushes.turn(wanted);
        if turn == CacheFlushAction::Run {
            self.flush_begins();
        }
        turn
    }

    /// The flushes of the cache device. They begin with [`Self::flush_turn`].
    pub const fn flushes(&mut self) -> &mut CacheFlushes {
        &mut self.flushes
    }

    /// Returns true if data in the bucket of `pointer` may be lost because a flush of the cache
    /// device failed. Anything could be there then, even data of others.
    #[must_use]
    pub fn is_suspect(&self, pointer: Pointer) -> bool {
        self.flushes.are_in_doubt()
            && self.flush_of(pointer).is_some_and(|flush| self.flushes.may_have_dropped(flush))
    }

    /// Returns the flush of the cache device in flight, if it may lose data in the bucket of
    /// `pointer`.
    #[must_use]
    pub fn being_flushed(&self, pointer: Pointer) -> Option<RunningFlush> {
        let flush = if self.flushes.are_in_doubt() { self.flush_of(pointer) } else { None };
        flush.and_then(|flush| self.flushes.may_be_dropping(flush))
    }

    /// The newest flush that had begun when data was last written to the bucket.
    fn flush_of(&self, pointer: Pointer) -> Option<u64> {
        self.place_of(pointer).map(|place| self.table[place].flush(self.flushes.begun()))
    }

    /// Counts cached traffic. Each 1024th of the cache's size makes all data one step older (the
    /// kernel's ageing).
    pub fn age(&mut self, sectors: u64) {
        self.traffic += sectors;
        let step = (self.count() * self.bucket_sectors / 1024).max(1);
        if self.traffic >= step {
            let steps = self.traffic / step;
            self.traffic %= step;
            self.clock_goes_on(steps);
        }
    }

    /// Returns the priority to store for a bucket.
    #[must_use]
    pub fn prio(&self, id: BucketId) -> u16 {
        let bucket = &self.table[slot(id) as usize];
        if bucket.usage() == BucketUsage::Meta || bucket.length() > 0 {
            // The length of a node is stored with its generation: invariant D5.
            return prio::prio_of_node(bucket.length());
        }
        let age = self.clock - bucket.touched(self.clock);
        u16::try_from(u64::from(PRIO_FRESH).saturating_sub(age)).unwrap_or(0)
    }

    /// Sets what a bucket is used for; keeps lists and counts in step.
    pub fn set_usage(&mut self, id: BucketId, usage: BucketUsage) {
        let place = slot(id) as usize;
        let was_available = self.is_available(place);
        let bucket = &mut self.table[place];
        self.by_usage[bucket.usage() as usize] -= 1;
        self.by_usage[usage as usize] += 1;
        bucket.set_usage(usage, self.flushes.begun());
        self.settle(place, was_available);
    }

    /// Marks a bucket as having no summary.
    pub fn set_unsummed(&mut self, id: BucketId) {
        self.table[slot(id) as usize].set_unsummed();
    }

    /// Marks a bucket whose contents could not all be moved out of it.
    pub fn set_stuck(&mut self, id: BucketId) {
        self.table[slot(id) as usize].set_stuck();
    }

    /// Sets the policy by which buckets are chosen for invalidation from now on. `seed`: for the
    /// random choice.
    pub const fn set_replacement(&mut self, policy: ReplacementPolicy, seed: u64) {
        self.victims.set_policy(policy, seed);
    }

    /// Classifies the buckets after the walk at start: each one that is not metadata holds data or
    /// nothing. Lists the reusable ones in the order of their stored priority.
    ///
    /// # Errors
    /// [`Error::BucketMemory`] if there is no memory to sort them.
    pub fn classify(&mut self, is_metadata: impl Fn(u64) -> bool) -> Result<(), Error> {
        let mut order: Vec<u32> = Vec::new();
        let needed = self.bytes() + self.count() * size_of::<u32>() as u64;
        order
            .try_reserve_exact(self.table.len())
            .map_err(|_| Error::BucketMemory { buckets: self.count(), needed })?;
        for index in self.first_bucket..self.count() {
            if is_metadata(index) {
                self.set_usage(self.id(index), BucketUsage::Meta);
            } else {
                order.push(slot(self.id(index)));
            }
        }
        order.sort_unstable_by_key(|index| (self.table[*index as usize].touched(self.clock), *index));
        for index in order {
            let id = self.id(index.into());
            self.end_node(id);
            self.set_usage(id, BucketUsage::Data);
        }
        Ok(())
    }

    /// Puts a bucket that nothing points to directly on the free list. Only while a set is being
    /// started, when the walk has proven which buckets are unreferenced.
    pub fn free_unreferenced(&mut self, id: BucketId) {
        let bucket = self.get(id);
        assert!(
            bucket.usage == BucketUsage::Data && bucket.live == 0 && bucket.pins == 0,
            "bucket {id} is in use"
        );
        self.set_usage(id, BucketUsage::Free);
        self.free.push(id);
    }

    /// Counts sectors of extents that have died: discarded, overwritten, or invalidated. When they
    /// amount to an eighth of the device (a sixteenth where buckets are scarce), a pass of GC is
    /// due to remove their dead keys from the tree. In the kernel a pass is due when a sixteenth
    /// has been written, because there a pass also finds free space.
    pub fn count_dead(&mut self, sectors: u64) {
        self.died += sectors;
        let are_scarce = self.available * SCARCE_SHARE < self.count();
        let share = if are_scarce { DEAD_SHARE_SCARCE } else { DEAD_SHARE };
        if self.died >= self.count() * self.bucket_sectors / share && !self.gc_wanted {
            self.gc_wanted = true;
            self.gc_untold = true;
        }
    }

    /// Returns whether a pass of GC has become due for that; reports it once.
    pub const fn take_gc_untold(&mut self) -> bool {
        core::mem::replace(&mut self.gc_untold, false)
    }

    /// Returns whether a pass of GC is due: much data has died, or a bucket was invalidated so
    /// often that the tree may soon hold pointers too old to be told from new ones. The call resets
    /// the counter.
    pub const fn take_gc_wanted(&mut self) -> bool {
        let is_wanted = core::mem::replace(&mut self.gc_wanted, false);
        self.died = if is_wanted { 0 } else { self.died };
        is_wanted
    }

    /// Makes a pass due again because one did not complete.
    pub const fn want_gc(&mut self) {
        self.gc_wanted = true;
    }

    /// Frees the `count` buckets that have been pending longest: their generations are durable.
    pub fn release_pending(&mut self, count: usize) {
        let released: Vec<BucketId> = self.pending.drain(..count).collect();
        for id in released {
            self.set_usage(id, BucketUsage::Free);
            self.free.push(id);
        }
    }

    /// Hands out a free bucket for `usage` (`Open` or `Meta`). Returns `None` if no more than
    /// `keep` are free.
    pub fn take(&mut self, usage: BucketUsage, keep: usize) -> Option<BucketId> {
        if self.free.len() <= keep {
            return None;
        }
        let id = self.free.pop()?;
        assert_eq!(self.get(id).usage, BucketUsage::Free, "bucket {id} on the free list is not free");
        let bucket = &mut self.table[slot(id) as usize];
        bucket.touch(self.clock);
        bucket.clear_marks();
        self.set_usage(id, usage);
        Some(id)
    }

    /// Returns a bucket that was taken for metadata and not needed: nothing was written to it.
    pub fn put_back(&mut self, id: BucketId) {
        assert_eq!(self.get(id).usage, BucketUsage::Meta, "bucket {id} was taken for metadata");
        self.set_usage(id, BucketUsage::Free);
        self.free.put_back(id);
    }

    /// Releases a metadata bucket that is durably no longer needed: it can be invalidated like any
    /// empty one. For a B-tree node, `generation` is the one that its freeing key carries; its
    /// parent refers to the previous one until it is itself rewritten.
    pub fn free_metadata(&mut self, id: BucketId, generation: Option<Gen>) {
        let bucket = &mut self.table[slot(id) as usize];
        assert_eq!(bucket.usage(), BucketUsage::Meta, "bucket {id} is not metadata");
        if let Some(generation) = generation {
            bucket.generation = generation;
            self.note_oldest(id, generation.previous());
        }
        self.set_usage(id, BucketUsage::Data);
    }

    fn settle(&mut self, place: usize, was_available: bool) {
        let bucket = &self.table[place];
        let is_available = self.is_available(place);
        // A bucket of unknown usage is nobody's victim: invariant D43.
        let rank = match bucket.usage() {
            BucketUsage::Data if self.dirty_at(place) > 0 => None,
            BucketUsage::Data if bucket.live > 0 => Some(Rank::Used),
            BucketUsage::Data => Some(Rank::Empty),
            _ => None,
        };
        self.available += u64::from(is_available);
        self.available -= u64::from(was_available);
        self.victims.place(place_slot(place), rank);
    }

    fn is_available(&self, place: usize) -> bool {
        match self.table[place].usage() {
            BucketUsage::Free | BucketUsage::Pending => true,
            BucketUsage::Data => self.dirty_at(place) == 0,
            BucketUsage::Unknown | BucketUsage::Open | BucketUsage::Meta | BucketUsage::Reserve => false,
        }
    }
}

impl CacheSet {
    /// Calls `look` for every bucket, in pieces; other tasks run between them.
    pub(crate) async fn each_bucket(&self, mut look: impl FnMut(&State, BucketId, &Bucket)) {
        let mut at = 0;
        while self.with(|s| (at as u64) < s.buckets.count()) {
            self.env().breathe().await;
            self.with(|s| {
                let state: &State = s;
                let count = state.buckets.part(at).map(|(id, bucket)| look(state, id, &bucket)).count();
                s.work.buckets(count);
            });
            at += BUCKETS_MAX;
        }
    }
}

impl BucketSlot {
    const fn needs_gc(&self) -> bool {
        self.generation.after(self.oldest) >= STALE_MAX / 2
    }
}

fn slot(id: BucketId) -> u32 {
    u32::try_from(id.index).expect("a table is not made for more buckets than fit 32 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table of `count` buckets of eight sectors.
    pub(super) fn table_of(count: usize) -> Buckets {
        Buckets::new(DeviceIndex(0), 8, 0, (0..count).map(|_| (Gen(0), 1))).expect("a small table")
    }

    /// The size of a table comes from the device. Too large a size must not abort the whole
    /// process.
    #[test]
    fn a_table_for_which_there_is_no_memory_is_an_error() {
        for count in [usize::MAX / 32, 1 << 32] {
            let stored = (0..count).map(|_| (Gen(0), 1));
            let made = Buckets::new(DeviceIndex(0), 8, 0, stored).map(|_| ());
            let buckets = count as u64;
            assert_eq!(made, Err(Error::BucketMemory { buckets, needed: table_bytes(buckets) }));
        }
    }
}
