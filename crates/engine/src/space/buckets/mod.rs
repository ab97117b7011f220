//! The table of buckets: generation, age, exact live and dirty sectors, pins (counts, not mark-and-sweep).
//!
//! Invariants, kept where they change:
//! 1. `dirty <= live <= bucket_sectors`, both counting only pointers that are not stale. Keys that would break it come
//!    from bytes only, and are refused while a set is being opened.
//!    What lies behind the frontier of a walk is not counted yet (`btree::frontier`).
//! 2. A bucket is on the victim lists exactly when its usage is `Data` and nothing in it is dirty.
//! 3. `available` counts the buckets that are free, pending, or `Data` without dirty sectors; `by_usage` all, by usage.

mod lengths;
mod pointers;
mod reserved;
mod search;

pub use search::Invalidated;

use crate::policy::{Place, Rank, Victims};
use crate::set::CacheSet;
use crate::space::flushes::Running;
use crate::space::{Flushes, FreeList};
use crate::state::State;
use crate::work::BUCKETS_MAX;
use alloc::vec::Vec;
use bcached_format::prio::{self, PRIO_FRESH};
use bcached_format::{BucketId, DeviceIndex, Gen, Pointer, Replacement};

/// A bucket is not invalidated when its generation is this far ahead of the oldest pointer seen to it; kernels refuse
/// live keys staler than this.
pub const STALE_MAX: u8 = 96;

/// A pass of GC is due when one sector of the device in so many has died,
const DEAD_SHARE: u64 = 8;
/// and where buckets are scarce in so many: what dead keys take in the tree is wanted for data then.
const DEAD_SHARE_SCARCE: u64 = 16;
/// They are where fewer than one in so many can be had without writing anything back.
const SCARCE_SHARE: u64 = 4;

/// Why such a pointer has a bucket.
const CHECKED: &str = "only pointers that were checked are pinned";

/// What a bucket is used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Usage {
    /// The walk has not come to its end: it may hold anything.
    Unknown,
    /// Closed; holds cached data or nothing.
    Data,
    /// Data is being appended.
    Open,
    /// Superblock, journal, priorities, uuid table or a B-tree node.
    Meta,
    /// Invalidated; its generation is not durable yet.
    Pending,
    /// Its generation is durable: ready to be handed out.
    Free,
    /// Kept free for the next start, which finds proof in it (`space::reserve`).
    Reserve,
}

/// How many usages there are.
const USAGES: usize = Usage::Reserve as usize + 1;

/// One bucket.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    /// Generation; pointers made for an older one are stale.
    pub generation: Gen,
    /// Oldest generation that a key of the tree may still carry for it, as of the last complete GC pass.
    pub oldest: Gen,
    /// What it is used for.
    pub usage: Usage,
    /// A summary of what it holds was looked for in vain.
    pub is_unsummed: bool,
    /// Of a node: how many of its blocks are durable, as far as known (`lengths`). Else 0.
    durable_blocks: u16,
    /// It was to be emptied, and something in it, or a leaf that names it, could not be read.
    pub is_stuck: bool,
    /// Clock of the last hit or write, in units of [`Buckets::age`]; 0 = long ago.
    pub touched: u32,
    /// Operations in flight that read from it or write to it, and keys not yet in the tree.
    pub pins: u32,
    /// Live sectors.
    pub live: u32,
    /// Of these, dirty.
    pub dirty: u32,
    /// The flush of the cache device that had begun last when data was last written to the bucket.
    pub flush: u64,
    /// Journal entry that must be durable before the bucket is reused: it took away the last dirty pointer.
    pub release: u64,
}

/// All buckets of all cache devices of the set (of one device today).
pub struct Buckets {
    table: Vec<Bucket>,
    device: DeviceIndex,
    bucket_sectors: u64,
    first_bucket: u64,
    victims: Victims,
    /// Those that are free.
    pub free: FreeList,
    pending: Vec<BucketId>,
    /// Buckets that have lost their last dirty data.
    freed: u64,
    available: u64,
    /// Buckets by their [`Usage`].
    by_usage: [u64; USAGES],
    clock: u32,
    traffic: u64,
    gc_wanted: bool,
    /// That a pass of GC is due has not been told.
    gc_untold: bool,
    /// Sectors that have died since a pass of GC was begun.
    died: u64,
    /// Where a search for buckets to invalidate goes on.
    next_victim: Option<Place>,
    flushes: Flushes,
    /// The search that is going on has passed some only for the age of the pointers to them.
    passes_old: bool,
    /// Nodes are longer than has been stored.
    has_longer_nodes: bool,
}

impl Buckets {
    /// A table with generations and priorities as `stored` (one per bucket). Nothing is known of what they hold yet: but for
    /// the superblock's they are `Unknown`.
    #[must_use]
    pub fn new(
        device: DeviceIndex,
        bucket_sectors: u64,
        first_bucket: u64,
        stored: impl Iterator<Item = (Gen, u16)>,
    ) -> Self {
        let table: Vec<Bucket> = (0..)
            .zip(stored)
            .map(|(index, (generation, prio))| Bucket {
                generation,
                oldest: generation,
                usage: if index < first_bucket { Usage::Meta } else { Usage::Unknown },
                is_unsummed: false,
                durable_blocks: prio::durable_blocks(prio),
                is_stuck: false,
                touched: u32::from(prio.min(PRIO_FRESH)),
                pins: 0,
                live: 0,
                dirty: 0,
                flush: 0,
                release: 0,
            })
            .collect();
        let victims = Victims::new(table.len());
        let mut by_usage = [0; USAGES];
        table.iter().for_each(|bucket| by_usage[bucket.usage as usize] += 1);
        Self {
            table,
            device,
            bucket_sectors,
            first_bucket,
            victims,
            free: FreeList::default(),
            pending: Vec::new(),
            freed: 0,
            available: 0,
            by_usage,
            clock: u32::from(PRIO_FRESH),
            traffic: 0,
            gc_wanted: false,
            gc_untold: false,
            died: 0,
            next_victim: None,
            flushes: Flushes::default(),
            passes_old: false,
            has_longer_nodes: false,
        }
    }

    /// Buckets in the table.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.table.len() as u64
    }

    /// Buckets that can be used or reused without writing anything back.
    #[must_use]
    pub const fn available(&self) -> u64 {
        self.available
    }

    /// Buckets that have lost their last dirty data, since the table was made.
    #[must_use]
    pub const fn freed(&self) -> u64 {
        self.freed
    }

    /// Closed buckets with nothing live in them.
    #[must_use]
    pub const fn empty_count(&self) -> usize {
        self.victims.length(Rank::Empty)
    }

    /// Buckets of that usage.
    #[must_use]
    pub const fn count_of(&self, usage: Usage) -> u64 {
        self.by_usage[usage as usize]
    }

    /// Closed buckets whose data is all clean.
    #[must_use]
    pub const fn clean_count(&self) -> usize {
        self.victims.length(Rank::Used)
    }

    /// Buckets ready to be handed out.
    #[must_use]
    pub fn free_count(&self) -> usize {
        self.free.len()
    }

    /// Buckets invalidated whose generations are not durable yet.
    #[must_use]
    pub fn pending(&self) -> &[BucketId] {
        &self.pending
    }

    /// First sector of a bucket on its device.
    #[must_use]
    pub const fn sector(&self, id: BucketId) -> u64 {
        id.index * self.bucket_sectors
    }

    /// The bucket with this index of the only device.
    #[must_use]
    pub const fn id(&self, index: u64) -> BucketId {
        BucketId { device: self.device, index }
    }

    /// One bucket.
    #[must_use]
    #[inline]
    pub fn get(&self, id: BucketId) -> &Bucket {
        &self.table[slot(id) as usize]
    }

    /// Every bucket with its name.
    pub fn iter(&self) -> impl Iterator<Item = (BucketId, &Bucket)> {
        let name = |index: usize| BucketId { device: self.device, index: index as u64 };
        self.table.iter().enumerate().map(move |(index, bucket)| (name(index), bucket))
    }

    /// The buckets from this index on, as many as are looked at in one piece; for those who look at all of them.
    pub fn part(&self, from: usize) -> impl Iterator<Item = (BucketId, &Bucket)> {
        let name = move |index: usize| BucketId { device: self.device, index: (from + index) as u64 };
        let part = self.table.get(from..).unwrap_or_default();
        part.iter().take(BUCKETS_MAX).enumerate().map(move |(index, bucket)| (name(index), bucket))
    }

    /// Pulls the generation forward to that of a pointer found on disk (format 15 step 5). What was counted for the
    /// older generation is void; returns whether something dirty was.
    pub fn raise(&mut self, pointer: Pointer) -> bool {
        let Some(id) = self.of(pointer) else { return false };
        let bucket = &mut self.table[slot(id) as usize];
        if pointer.generation().after(bucket.generation) == 0 {
            return false;
        }
        bucket.generation = pointer.generation();
        bucket.durable_blocks = 0;
        let lost_dirty = bucket.dirty > 0;
        bucket.live = 0;
        bucket.dirty = 0;
        lost_dirty
    }

    /// Remembers that a key of the tree carries `generation` for this bucket.
    pub fn note_oldest(&mut self, id: BucketId, generation: Gen) {
        let bucket = &mut self.table[slot(id) as usize];
        if bucket.generation.after(generation) > bucket.generation.after(bucket.oldest) {
            bucket.oldest = generation;
            self.gc_wanted |= bucket.needs_gc();
        }
    }

    /// Keys that cannot be read may point to it with an old generation. So it is not used so often again that one of those could come to mean
    /// what lies there then: with what is said of them here, 64 times, and where passes of GC come to their end no key is as old as that.
    pub fn may_be_named(&mut self, id: BucketId) {
        let Gen(now) = self.get(id).generation;
        self.note_oldest(id, Gen(now.wrapping_sub(STALE_MAX / 3)));
    }

    /// Replaces what is known of the oldest pointers: the result of a complete GC pass.
    pub fn set_oldest(&mut self, id: BucketId, generation: Gen) {
        self.table[slot(id) as usize].oldest = generation;
    }

    /// A live extent of `sectors` now points into the bucket of `pointer`. Stale pointers count for nothing. False: the
    /// bucket has not so many sectors, so another key points to the same ones; nothing has changed.
    #[must_use]
    pub fn add(&mut self, pointer: Pointer, sectors: u32, dirty: bool) -> bool {
        if self.is_stale(pointer) {
            return true;
        }
        let id = self.of(pointer).expect("not stale, so inside");
        let bucket = &mut self.table[slot(id) as usize];
        let was_available = bucket.is_available();
        if u64::from(bucket.live) + u64::from(sectors) > self.bucket_sectors {
            return false;
        }
        bucket.live += sectors;
        bucket.dirty += if dirty { sectors } else { 0 };
        self.settle(id, was_available);
        true
    }

    /// Data has been written to where `pointer` points.
    pub fn written(&mut self, pointer: Pointer) {
        let place = self.place_of(pointer).expect("data is written where there is a bucket");
        self.table[place].flush = self.flushes.begun();
    }

    /// Flushes of the cache device.
    pub const fn flushes(&mut self) -> &mut Flushes {
        &mut self.flushes
    }

    /// True when data in the bucket of `pointer` may be gone since a flush of the cache device failed: anything could stand
    /// there, even what others wrote.
    #[must_use]
    pub fn is_suspect(&self, pointer: Pointer) -> bool {
        self.flushes.are_in_doubt()
            && self.of(pointer).is_some_and(|id| self.flushes.may_have_dropped(self.get(id).flush))
    }

    /// The flush of the cache device that is running, if it may have dropped data in the bucket of `pointer`.
    #[must_use]
    pub fn being_flushed(&self, pointer: Pointer) -> Option<Running> {
        let id = if self.flushes.are_in_doubt() { self.of(pointer) } else { None };
        id.and_then(|id| self.flushes.may_be_dropping(self.get(id).flush))
    }

    /// A live extent is gone from the bucket; `sectors` of it had been counted. `sequence`: the journal entry that records it;
    /// if it was dirty, the bucket waits for that entry.
    pub fn remove(&mut self, pointer: Pointer, sectors: u32, dirty: bool, sequence: u64) {
        if self.is_stale(pointer) {
            return;
        }
        let id = self.of(pointer).expect("not stale, so inside");
        let bucket = &mut self.table[slot(id) as usize];
        let was_available = bucket.is_available();
        assert!(bucket.live >= sectors, "bucket {id}: {} live sectors, {sectors} removed", bucket.live);
        bucket.live -= sectors;
        if dirty {
            assert!(bucket.dirty >= sectors, "bucket {id}: {} dirty, {sectors} removed", bucket.dirty);
            bucket.dirty -= sectors;
            bucket.release = bucket.release.max(sequence);
            self.freed += u64::from(!was_available && bucket.is_available());
        }
        self.settle(id, was_available);
    }

    /// I/O towards the bucket begins, or a key for it is on its way into the tree: it must not be reused.
    pub fn pin(&mut self, pointer: Pointer) {
        let place = self.place_of(pointer).expect(CHECKED);
        self.table[place].pins += 1;
    }

    /// What lies there is about to be read, or written: it must not be reused, and has been used now.
    #[inline]
    pub fn begin(&mut self, pointer: Pointer) {
        let place = self.place_of(pointer).expect(CHECKED);
        let bucket = &mut self.table[place];
        bucket.pins += 1;
        bucket.touched = self.clock;
        self.victims.touch(slot(self.id(place as u64)));
    }

    /// The end of what [`Buckets::pin`] began.
    pub fn unpin(&mut self, pointer: Pointer) {
        let place = self.place_of(pointer).expect(CHECKED);
        let bucket = &mut self.table[place];
        bucket.pins = bucket.pins.checked_sub(1).expect("pins and unpins are in pairs");
    }

    /// Counts cached traffic; each 1024th of the cache makes everything one step older (the kernel's ageing).
    pub fn age(&mut self, sectors: u64) {
        self.traffic += sectors;
        let step = (self.count() * self.bucket_sectors / 1024).max(1);
        let steps = self.traffic / step;
        self.traffic %= step;
        self.clock = self.clock.saturating_add(u32::try_from(steps).unwrap_or(u32::MAX));
    }

    /// The priority to store for a bucket.
    #[must_use]
    pub fn prio(&self, id: BucketId) -> u16 {
        let bucket = self.get(id);
        if bucket.usage == Usage::Meta || bucket.durable_blocks > 0 {
            return prio::prio_of_node(bucket.durable_blocks);
        }
        let age = self.clock - bucket.touched.min(self.clock);
        u16::try_from(u32::from(PRIO_FRESH).saturating_sub(age)).unwrap_or(0)
    }

    /// Declares what a bucket is used for; keeps lists and counts in step.
    pub fn set_usage(&mut self, id: BucketId, usage: Usage) {
        let bucket = &mut self.table[slot(id) as usize];
        let was_available = bucket.is_available();
        self.by_usage[bucket.usage as usize] -= 1;
        self.by_usage[usage as usize] += 1;
        bucket.usage = usage;
        if !matches!(usage, Usage::Meta | Usage::Unknown) {
            bucket.durable_blocks = 0;
        }
        self.settle(id, was_available);
    }

    /// There is no summary of what the bucket holds.
    pub fn set_unsummed(&mut self, id: BucketId) {
        self.table[slot(id) as usize].is_unsummed = true;
    }

    /// What the bucket holds could not all be moved out of it.
    pub fn set_stuck(&mut self, id: BucketId) {
        self.table[slot(id) as usize].is_stuck = true;
    }

    /// Which bucket is given up first, from here on. `seed`: of what is drawn where any may be.
    pub const fn set_replacement(&mut self, policy: Replacement, seed: u64) {
        self.victims.set_policy(policy, seed);
    }

    /// After the walk at start: everything that is not metadata holds data or nothing. Puts the reusable ones in
    /// order of their stored priority.
    pub fn classify(&mut self, is_metadata: impl Fn(u64) -> bool) {
        let (metadata, mut order): (Vec<u64>, Vec<u64>) =
            (self.first_bucket..self.count()).partition(|index| is_metadata(*index));
        for index in metadata {
            self.set_usage(self.id(index), Usage::Meta);
        }
        order.sort_by_key(|index| self.table[usize::try_from(*index).expect("a table index")].touched);
        for index in order {
            self.end_node(self.id(index));
            self.set_usage(self.id(index), Usage::Data);
        }
    }

    /// Takes a bucket that nothing ever pointed to straight into the free list: only while a set is being started,
    /// when what is unreferenced is proven by the walk (format 12.2, exceptions).
    pub fn free_unreferenced(&mut self, id: BucketId) {
        let bucket = self.get(id);
        assert!(bucket.usage == Usage::Data && bucket.live == 0 && bucket.pins == 0, "bucket {id} is in use");
        self.set_usage(id, Usage::Free);
        self.free.push(id);
    }

    /// Extents of so many sectors have died: discarded, written anew elsewhere, or invalidated. When that is an eighth of
    /// the device, or a sixteenth, a pass of GC is due, for what they leave behind in the tree. (In the kernel when a sixteenth has been
    /// written: there a pass is also what finds room.)
    pub fn count_dead(&mut self, sectors: u64) {
        self.died += sectors;
        let are_scarce = self.available * SCARCE_SHARE < self.count();
        let share = if are_scarce { DEAD_SHARE_SCARCE } else { DEAD_SHARE };
        if self.died >= self.count() * self.bucket_sectors / share && !self.gc_wanted {
            self.gc_wanted = true;
            self.gc_untold = true;
        }
    }

    /// Whether a pass of GC has become due for that; tells it once.
    pub const fn take_gc_untold(&mut self) -> bool {
        core::mem::replace(&mut self.gc_untold, false)
    }

    /// Whether a pass of GC is due: a bucket was invalidated so often that the tree may soon hold pointers too old
    /// to be told from new ones, or much has died. Asking begins to count anew.
    pub const fn take_gc_wanted(&mut self) -> bool {
        let is_wanted = core::mem::replace(&mut self.gc_wanted, false);
        self.died = if is_wanted { 0 } else { self.died };
        is_wanted
    }

    /// A pass did not come to its end: it is as due as before.
    pub const fn want_gc(&mut self) {
        self.gc_wanted = true;
    }

    /// The generations of the `count` longest pending buckets are durable.
    pub fn release_pending(&mut self, count: usize) {
        let released: Vec<BucketId> = self.pending.drain(..count).collect();
        for id in released {
            self.set_usage(id, Usage::Free);
            self.free.push(id);
        }
    }

    /// Hands out a free bucket for `usage` (`Open` or `Meta`), leaving at least `keep` behind.
    pub fn take(&mut self, usage: Usage, keep: usize) -> Option<BucketId> {
        if self.free.len() <= keep {
            return None;
        }
        let id = self.free.pop()?;
        assert_eq!(self.get(id).usage, Usage::Free, "bucket {id} on the free list is not free");
        let bucket = &mut self.table[slot(id) as usize];
        (bucket.touched, bucket.is_unsummed, bucket.is_stuck) = (self.clock, false, false);
        self.set_usage(id, usage);
        Some(id)
    }

    /// A bucket that was taken for metadata was not needed after all: nothing was written to it.
    pub fn put_back(&mut self, id: BucketId) {
        assert_eq!(self.get(id).usage, Usage::Meta, "bucket {id} was taken for metadata");
        self.set_usage(id, Usage::Free);
        self.free.put_back(id);
    }

    /// A metadata bucket is no longer needed, durably: it can be invalidated like any empty one. For a B-tree node
    /// `generation` is the one its freeing key carries; its parent names the one before until it is rewritten itself.
    pub fn free_metadata(&mut self, id: BucketId, generation: Option<Gen>) {
        let bucket = &mut self.table[slot(id) as usize];
        assert_eq!(bucket.usage, Usage::Meta, "bucket {id} is not metadata");
        if let Some(generation) = generation {
            bucket.generation = generation;
            self.note_oldest(id, generation.previous());
        }
        self.set_usage(id, Usage::Data);
    }

    fn settle(&mut self, id: BucketId, was_available: bool) {
        let bucket = &self.table[slot(id) as usize];
        let is_available = bucket.is_available();
        let rank = match bucket.usage {
            Usage::Data if bucket.dirty > 0 => None,
            Usage::Data if bucket.live > 0 => Some(Rank::Used),
            Usage::Data => Some(Rank::Empty),
            _ => None,
        };
        self.available += u64::from(is_available);
        self.available -= u64::from(was_available);
        self.victims.place(slot(id), rank);
    }
}

impl CacheSet {
    /// Shows every bucket, in pieces; others run between them.
    pub(crate) async fn each_bucket(&self, mut look: impl FnMut(&State, BucketId, &Bucket)) {
        let mut at = 0;
        while self.with(|s| (at as u64) < s.buckets.count()) {
            self.env().breathe().await;
            self.with(|s| {
                let state: &State = s;
                let count = state.buckets.part(at).map(|(id, bucket)| look(state, id, bucket)).count();
                s.work.buckets(count);
            });
            at += BUCKETS_MAX;
        }
    }
}

impl Bucket {
    const fn needs_gc(&self) -> bool {
        self.generation.after(self.oldest) >= STALE_MAX / 2
    }

    fn is_available(&self) -> bool {
        match self.usage {
            Usage::Free | Usage::Pending => true,
            Usage::Data => self.dirty == 0,
            Usage::Unknown | Usage::Open | Usage::Meta | Usage::Reserve => false,
        }
    }
}

fn slot(id: BucketId) -> u32 {
    u32::try_from(id.index).expect("open refuses devices with more than 2^32 buckets")
}
