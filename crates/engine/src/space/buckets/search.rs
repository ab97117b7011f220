//! The search for buckets to invalidate.

use super::{BucketUsage, Buckets, STALE_MAX};
use crate::cpu_cost::BUCKETS_MAX;
use alloc::vec::Vec;
use bcached_format::BucketId;

/// The result of a search for buckets to invalidate.
#[derive(Clone, Copy, Debug)]
pub struct Invalidation {
    /// Number of buckets that it has made pending.
    pub count: usize,
    /// Number of buckets examined.
    pub looked_at: usize,
    /// There is nothing left to examine.
    pub is_complete: bool,
    /// A bucket whose turn it was is kept because it is pinned.
    pub passed_used: bool,
    /// The whole search found nothing, and passed over some buckets only because of the age of the
    /// pointers to them. No bucket can be invalidated before a pass of GC completes.
    pub kept_by_age: bool,
}

impl Buckets {
    /// Invalidates up to `count` buckets, which may be reused once their generations are durable.
    /// `durable`: newest durable journal entry. Examines at most as many as one piece of work may;
    /// the next call continues from there.
    pub fn invalidate(&mut self, count: usize, durable: u64) -> Invalidation {
        let (durable, entries) = (self.durable_entry(durable), self.entries);
        let mut passed_used = false;
        let mut passes_old = self.next_victim.is_some() && self.passes_old;
        let mut eligible = |slot: u32| {
            let bucket = &self.table[slot as usize];
            passed_used |= bucket.pins > 0;
            // The entry that removed its last dirty pointer is durable: invariant D10.
            let is_free = bucket.pins == 0 && bucket.release(entries) <= durable;
            // A pointer this old must be gone before the generation goes on: invariant D12.
            let is_old = bucket.generation.after(bucket.oldest) >= STALE_MAX;
            passes_old |= is_free && is_old;
            is_free && !is_old
        };
        let mut place = self.victims.resume(self.next_victim.take());
        let (mut chosen, mut looked_at) = (Vec::new(), 0);
        while chosen.len() < count && looked_at < BUCKETS_MAX {
            let Some(here) = place else { break };
            let (found, next) = self.victims.look(here);
            place = next;
            looked_at += 1;
            chosen.extend(found.filter(|slot| eligible(*slot)));
        }
        // Only a search that has found nothing so far is worth continuing. Otherwise the next one
        // starts over.
        self.next_victim = place.filter(|_| chosen.is_empty() && looked_at == BUCKETS_MAX);
        self.passes_old = passes_old;
        for slot in &chosen {
            let id = BucketId { device: self.device, index: u64::from(*slot) };
            self.set_usage(id, BucketUsage::Pending);
            // A bucket with dirty data is on no list of victims: invariant D10.
            assert_eq!(self.dirty_at(*slot as usize), 0, "bucket {id} holds dirty data");
            let bucket = &mut self.table[*slot as usize];
            bucket.generation = bucket.generation.next();
            self.gc_wanted |= bucket.needs_gc();
            let live = core::mem::take(&mut bucket.live);
            bucket.touch(self.clock);
            self.pending.push(id);
            self.count_dead(u64::from(live));
        }
        let is_complete = self.next_victim.is_none();
        let kept_by_age = chosen.is_empty() && passes_old && is_complete;
        Invalidation { count: chosen.len(), looked_at, is_complete, passed_used, kept_by_age }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::table_of;
    use super::*;
    use bcached_format::{DeviceIndex, Gen, Pointer};

    /// Almost all buckets are pinned by reads. The search must not go through the whole list of
    /// victims in one piece, again and again.
    #[test]
    fn a_search_for_victims_is_cut_into_pieces_and_finds_the_last() {
        let count = 2 * BUCKETS_MAX + 100;
        let mut buckets = table_of(count);
        buckets.classify(|_| false).expect("a small table");
        let last = count as u64 - 1;
        for index in 0..last {
            buckets.pin(Pointer::new(DeviceIndex(0), 8 * index, Gen(0)));
        }
        let mut found = 0;
        for piece in 0..3 {
            let searched = buckets.invalidate(5, 0);
            assert!(searched.looked_at <= BUCKETS_MAX, "{} looked at", searched.looked_at);
            assert_eq!(searched.is_complete, piece == 2);
            found += searched.count;
        }
        assert_eq!((found, buckets.pending()), (1, &[buckets.id(last)][..]));
        assert_eq!(buckets.invalidate(5, 0).looked_at, BUCKETS_MAX, "the next search begins anew");
    }

    /// Where buckets are scarce, the space that dead keys take in the tree is needed for data.
    #[test]
    fn a_pass_is_due_earlier_where_buckets_are_scarce() {
        const COUNT: u64 = 160;
        for (dirty, due) in [(0, COUNT), (120, COUNT), (121, COUNT / 2)] {
            let mut buckets = table_of(160);
            buckets.classify(|_| false).expect("a small table");
            for index in 0..dirty {
                assert!(
                    buckets.add(Pointer::new(DeviceIndex(0), 8 * index, Gen(0)), 8, true),
                    "there is room"
                );
            }
            assert_eq!(buckets.available(), COUNT - dirty);
            buckets.count_dead(due - 1);
            assert!(!buckets.take_gc_untold() && !buckets.take_gc_wanted(), "{dirty} are dirty");
            buckets.count_dead(1);
            assert!(buckets.take_gc_untold() && buckets.take_gc_wanted(), "{dirty} are dirty");
        }
    }
}
