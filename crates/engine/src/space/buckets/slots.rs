//! The table's slots: what is stored for each bucket, in as few bytes as possible, because a device
//! has millions of buckets.
//!
//! Flushes, journal entries and the clock of ages only count up. What matters of a bucket's number
//! is how far it lies behind the newest one, so a slot stores only the low 16 bits. Each event
//! visits some slots and pulls forward those that would fall too far behind ([`ROUND`]). Numbers
//! further behind than [`FAR`] are not told apart.

use super::{Bucket, BucketUsage, Buckets};
use crate::policy::lists::SlotLists;
use bcached_format::Gen;
use bcached_format::prio::PRIO_FRESH;

/// Numbers that lie further behind the newest than this mean "long ago". More than the steps of age
/// that a priority can express.
const FAR: u64 = PRIO_FRESH as u64 + 1;

/// Number of events within which every slot is visited.
const ROUND: u64 = 1 << 14;

/// Maximum number of events handled at once.
const STEP: u64 = 1 << 12;

const _: () = assert!(FAR + ROUND + STEP <= u16::MAX as u64, "16 bits tell how far a number lies behind");

/// The usages, in the order of their numbers. The unused number maps to the first.
const USAGES: [BucketUsage; 8] = [
    BucketUsage::Unknown,
    BucketUsage::Data,
    BucketUsage::Open,
    BucketUsage::Meta,
    BucketUsage::Pending,
    BucketUsage::Free,
    BucketUsage::Reserve,
    BucketUsage::Unknown,
];
const USAGE: u8 = 7;
const UNSUMMED: u8 = 8;
const STUCK: u8 = 16;

/// What is stored for one bucket. Its dirty sectors are stored in the lists, in place of a link.
#[derive(Clone, Copy)]
pub(super) struct BucketSlot {
    pub generation: Gen,
    /// Oldest generation that a key of the tree may still carry for it, as of the last complete
    /// pass of GC.
    pub oldest: Gen,
    /// The oldest generation that the pass of GC in progress has seen.
    pub seen: Gen,
    /// Its usage, and the marks.
    state: u8,
    /// The clock when it was last used.
    touched: u16,
    /// For data: the newest flush that had begun when it was last written. For a bucket that may be
    /// a node: its durable blocks.
    flush_or_length: u16,
    /// The journal entry that must be durable before it is reused.
    release: u16,
    /// Pins; those that do not fit are in [`Buckets::crowded`]. 0: there are none.
    pub pins: u16,
    pub live: u32,
}

/// Memory that the table takes for each bucket, in bytes.
pub const BYTES_PER_BUCKET: usize = size_of::<BucketSlot>() + SlotLists::SLOT_BYTES;

const _: () = assert!(BYTES_PER_BUCKET == 25, "each byte costs 1 MiB per TiB in buckets of 1 MiB");

impl BucketSlot {
    pub(super) const fn new(generation: Gen, usage: BucketUsage, touched: u16, length: u16) -> Self {
        Self {
            generation,
            oldest: generation,
            seen: generation,
            state: usage as u8,
            touched,
            flush_or_length: length,
            release: 0,
            pins: 0,
            live: 0,
        }
    }

    #[inline]
    pub(super) const fn usage(&self) -> BucketUsage {
        USAGES[(self.state & USAGE) as usize]
    }

    /// Sets the usage. A length is valid for one life as a node, a flush number for one life as
    /// data: data not written since counts as written long before flush `begun`.
    #[inline]
    pub(super) const fn set_usage(&mut self, usage: BucketUsage, begun: u64) {
        if usage.may_be_node() != self.usage().may_be_node() {
            self.flush_or_length = if usage.may_be_node() { 0 } else { low(begun.saturating_sub(FAR)) };
        }
        self.state = self.state & !USAGE | usage as u8;
    }

    pub(super) const fn is_unsummed(&self) -> bool {
        self.state & UNSUMMED > 0
    }

    pub(super) const fn set_unsummed(&mut self) {
        self.state |= UNSUMMED;
    }

    pub(super) const fn is_stuck(&self) -> bool {
        self.state & STUCK > 0
    }

    pub(super) const fn set_stuck(&mut self) {
        self.state |= STUCK;
    }

    /// Clears what was found out about the bucket's former contents.
    pub(super) const fn clear_marks(&mut self) {
        self.state &= USAGE;
    }

    /// Number of durable blocks of the node in it.
    #[inline]
    pub(super) const fn length(&self) -> u16 {
        if self.usage().may_be_node() { self.flush_or_length } else { 0 }
    }

    /// Sets that number, if the bucket may be a node.
    pub(super) const fn set_length(&mut self, blocks: u16) {
        if self.usage().may_be_node() {
            self.flush_or_length = blocks;
        }
    }

    /// The newest flush that had begun when data was last written to it. `begun`: the newest now.
    #[inline]
    pub(super) const fn flush(&self, begun: u64) -> u64 {
        if self.usage().may_be_node() { 0 } else { whole(self.flush_or_length, begun) }
    }

    #[inline]
    pub(super) const fn set_flush(&mut self, begun: u64) {
        if !self.usage().may_be_node() {
            self.flush_or_length = low(begun);
        }
    }

    #[inline]
    pub(super) const fn touched(&self, clock: u64) -> u64 {
        whole(self.touched, clock)
    }

    #[inline]
    pub(super) const fn touch(&mut self, clock: u64) {
        self.touched = low(clock);
    }

    #[inline]
    pub(super) const fn release(&self, entries: u64) -> u64 {
        whole(self.release, entries)
    }

    /// Makes the bucket wait for that journal entry, in addition to those that it already waits
    /// for.
    #[inline]
    pub(super) fn wait_for(&mut self, entry: u64, entries: u64) {
        self.release = low(self.release(entries).max(entry));
    }

    /// Pulls forward those of its numbers that would fall too far behind.
    fn pull(&mut self, newest: NewestNumbers) {
        self.touched = pulled(self.touched, newest.clock);
        self.release = pulled(self.release, newest.entries);
        if !self.usage().may_be_node() {
            self.flush_or_length = pulled(self.flush_or_length, newest.flushes);
        }
    }
}

impl BucketUsage {
    /// Returns whether the bucket may hold a node, or has not been looked at since the start.
    #[inline]
    pub(super) const fn may_be_node(self) -> bool {
        matches!(self, Self::Meta | Self::Unknown)
    }
}

/// The newest of each number.
#[derive(Clone, Copy)]
struct NewestNumbers {
    clock: u64,
    entries: u64,
    flushes: u64,
}

/// The low bits of a number.
#[expect(clippy::cast_possible_truncation, reason = "that is the point")]
#[inline]
const fn low(number: u64) -> u16 {
    number as u16
}

/// The full number of which a slot stores the bits `kept`; it is not newer than `newest`.
#[inline]
const fn whole(kept: u16, newest: u64) -> u64 {
    newest.saturating_sub(low(newest).wrapping_sub(kept) as u64)
}

const fn pulled(kept: u16, newest: u64) -> u16 {
    if low(newest).wrapping_sub(kept) as u64 > FAR { low(newest - FAR) } else { kept }
}

/// Progress of the visits to the slots.
#[derive(Default)]
pub(super) struct SlotVisits {
    /// The next slot to visit.
    at: usize,
    /// Slots still to be visited, in units of 1/[`ROUND`].
    due: u64,
}

impl Buckets {
    /// Advances the clock of ages. Anything older than [`FAR`] is as old as can be expressed.
    pub(super) fn clock_goes_on(&mut self, steps: u64) {
        let mut left = steps.min(2 * FAR);
        while left > 0 {
            let step = left.min(STEP);
            self.clock += step;
            self.pull(step);
            left -= step;
        }
    }

    /// Records that a flush of the cache device has begun.
    pub(super) fn flush_begins(&mut self) {
        self.pull(1);
    }

    /// Records that the journal closes entry `sequence`.
    pub fn entry_closes(&mut self, sequence: u64) {
        self.entry(sequence);
    }

    /// The number of journal entry `sequence`, counted from the first that the table was told of.
    /// Older ones count as the first.
    pub(super) fn entry(&mut self, sequence: u64) -> u64 {
        let first = *self.first_entry.get_or_insert(sequence);
        let entry = sequence.saturating_sub(first) + 1;
        while self.entries < entry {
            let step = (entry - self.entries).min(STEP);
            self.entries += step;
            self.pull(step);
        }
        entry
    }

    /// The number of the newest durable entry, if that is `sequence`.
    pub(super) fn durable_entry(&self, sequence: u64) -> u64 {
        self.first_entry.map_or(0, |first| sequence.saturating_add(1).saturating_sub(first))
    }

    /// Visits slots after so many events: as many as it takes to finish each round in time.
    fn pull(&mut self, events: u64) {
        let count = self.table.len() as u64;
        self.pulling.due += events * count;
        let newest =
            NewestNumbers { clock: self.clock, entries: self.entries, flushes: self.flushes.begun() };
        for _ in 0..(self.pulling.due / ROUND).min(count) {
            self.table[self.pulling.at].pull(newest);
            self.pulling.at = (self.pulling.at + 1) % self.table.len();
        }
        self.pulling.due %= ROUND;
    }

    /// Adds a pin for which the slot has no room.
    #[cold]
    pub(super) fn pin_crowded(&mut self, place: usize) {
        const MOVED: u16 = 1 << 15;
        *self.crowded.entry(place).or_default() += 1;
        self.table[place].pins = u16::MAX - MOVED + 1;
    }

    /// Removes the last pin in the slot: there may be more in [`Buckets::crowded`].
    #[cold]
    pub(super) fn unpin_crowded(&mut self, place: usize) {
        const MOVED: u16 = 1 << 15;
        if let Some(times) = self.crowded.get_mut(&place) {
            self.table[place].pins = MOVED;
            *times -= 1;
            if *times == 0 {
                self.crowded.remove(&place);
            }
        }
    }

    /// Returns the state of one bucket.
    #[must_use]
    #[inline]
    pub(super) fn view(&self, place: usize) -> Bucket {
        let slot = &self.table[place];
        Bucket {
            generation: slot.generation,
            usage: slot.usage(),
            is_unsummed: slot.is_unsummed(),
            is_stuck: slot.is_stuck(),
            pins: slot.pins,
            live: slot.live,
            dirty: self.dirty_at(place),
        }
    }

    /// Its dirty sectors. A bucket that could be invalidated has none.
    #[inline]
    pub(super) fn dirty_at(&self, place: usize) -> u32 {
        self.victims.spare(place_slot(place))
    }

    #[inline]
    pub(super) fn set_dirty_at(&mut self, place: usize, sectors: u32) {
        if sectors > 0 {
            self.victims.place(place_slot(place), None);
        }
        if !self.victims.is_listed(place_slot(place)) {
            self.victims.set_spare(place_slot(place), sectors);
        }
    }
}

/// The slot at an index of the table.
#[expect(clippy::cast_possible_truncation, reason = "a table is not made for more buckets than fit 32 bits")]
#[inline]
pub(super) const fn place_slot(place: usize) -> u32 {
    place as u32
}

#[cfg(test)]
mod tests {
    use super::super::tests::table_of;
    use super::*;
    use bcached_format::{DeviceIndex, Pointer};

    const fn pointer(index: u64) -> Pointer {
        Pointer::new(DeviceIndex(0), 8 * index, Gen(0))
    }

    /// The stored bits of a number that is far behind would look new again after 65536 more.
    #[test]
    fn numbers_that_go_round_never_look_new_again() {
        let mut buckets = table_of(100);
        buckets.classify(|_| false).expect("a hundred buckets");
        assert!(buckets.add(pointer(3), 8, true));
        buckets.remove(pointer(3), 8, true, 10_000_000);
        buckets.written(pointer(4));
        let safe = |buckets: &Buckets| buckets.table[4].flush(buckets.flushes.begun());
        assert_eq!(safe(&buckets), 0);
        for event in 0..200_000_u64 {
            let turn = buckets.flush_turn(event + 1);
            assert_eq!(turn, crate::space::flushes::CacheFlushAction::Run);
            if event % 3 == 0 {
                buckets.entry_closes(10_000_000 + event);
            }
            assert!(
                safe(&buckets) <= event.saturating_sub(1),
                "an old write looks new after {event} flushes"
            );
            buckets.flushes.ends(Ok(()));
            let (release, entries) = (buckets.table[3].release(buckets.entries), buckets.entries);
            assert!(release == 1 || release + FAR <= entries, "{release} of {entries}");
        }
        buckets.age(8 * 100 * 1000);
        assert_eq!(buckets.prio(buckets.id(3)), 0, "as old as can be");
        buckets.begin(pointer(3));
        buckets.unpin(pointer(3));
        assert_eq!(buckets.prio(buckets.id(3)), PRIO_FRESH);
    }

    /// Data of an earlier process may be discovered in a bucket at any time: no flush of this
    /// process can have lost it.
    #[test]
    fn what_was_there_at_the_start_is_safe_whenever_it_is_found() {
        let mut buckets = table_of(2);
        for event in 0..=65_536_u64 {
            assert_eq!(buckets.flush_turn(event + 1), crate::space::flushes::CacheFlushAction::Run);
            if event < 65_536 {
                buckets.flushes.ends(Ok(()));
            }
        }
        buckets.set_usage(buckets.id(1), BucketUsage::Data);
        assert!(buckets.being_flushed(pointer(1)).is_none(), "after flush {}", buckets.flushes.begun());
        buckets.written(pointer(1));
        assert!(buckets.being_flushed(pointer(1)).is_some());
    }

    /// Proves invariant D10.
    #[test]
    fn a_bucket_waits_for_the_entry_that_took_its_dirty_data_away() {
        for first in [1, u64::from(u16::MAX), 70_000] {
            let mut buckets = table_of(4);
            buckets.classify(|_| false).expect("four buckets");
            assert!(buckets.add(pointer(2), 8, true));
            // An entry older than the first one that the table was told of.
            buckets.entry_closes(first);
            buckets.remove(pointer(2), 8, true, first + 5);
            assert_eq!(buckets.invalidate(4, first + 4).count, 3, "{first}");
            assert_eq!(buckets.invalidate(4, first + 5).count, 1, "{first}");
        }
    }

    #[test]
    fn more_pins_than_fit_a_slot_are_all_counted() {
        let mut buckets = table_of(2);
        const MANY: usize = 200_000;
        for _ in 0..MANY {
            buckets.pin(pointer(1));
        }
        for left in (0..MANY).rev() {
            assert!(buckets.get(buckets.id(1)).pins > 0, "{left} more are left");
            buckets.unpin(pointer(1));
        }
        assert_eq!((buckets.get(buckets.id(1)).pins, buckets.crowded.len()), (0, 0));
    }
}
