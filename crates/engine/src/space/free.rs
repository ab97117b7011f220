//! Free buckets: which have been discarded on the device, and which are being discarded.
//!
//! A bucket is on this list once its generation is durable, so no key refers to its contents. A
//! bucket under discard is not handed out: the discard could destroy data written to it.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use bcached_format::BucketId;

/// The free buckets, in the order in which they became free.
#[derive(Default, Debug)]
pub struct FreeList {
    /// Not discarded: as far as the device knows, these still hold data.
    filled: VecDeque<BucketId>,
    /// Discarded since they became free.
    discarded: VecDeque<BucketId>,
    /// Number of buckets under discard.
    under_discard: usize,
}

impl FreeList {
    /// Number of buckets that can be handed out now.
    #[must_use]
    pub fn len(&self) -> usize {
        self.filled.len() + self.discarded.len()
    }

    /// Number of buckets under discard, which can be handed out later.
    #[must_use]
    pub const fn under_discard(&self) -> usize {
        self.under_discard
    }

    /// Adds a bucket that has become free.
    pub fn push(&mut self, id: BucketId) {
        self.filled.push_back(id);
    }

    /// Returns a bucket to which nothing was written. Whether it was discarded is not remembered.
    pub fn put_back(&mut self, id: BucketId) {
        self.filled.push_front(id);
    }

    /// Takes the next bucket to hand out.
    pub fn pop(&mut self) -> Option<BucketId> {
        self.discarded.pop_front().or_else(|| self.filled.pop_front())
    }

    /// Takes the first bucket that `fits`, preferring those not discarded yet.
    pub fn take(&mut self, fits: impl Fn(BucketId) -> bool) -> Option<BucketId> {
        let mut lists = [&mut self.filled, &mut self.discarded].into_iter();
        lists.find_map(|list| {
            let place = list.iter().position(|id| fits(*id))?;
            list.remove(place)
        })
    }

    /// Takes buckets to discard, in device order: at most `max`, those that would be handed out
    /// last. Takes only as many as leave `keep` buckets to hand out.
    pub fn take_to_discard(&mut self, keep: usize, max: usize) -> Vec<BucketId> {
        let count = self.len().saturating_sub(keep).min(self.filled.len()).min(max);
        let mut taken: Vec<BucketId> = self.filled.drain(self.filled.len() - count..).collect();
        taken.sort_unstable();
        self.under_discard += count;
        taken
    }

    /// Records the end of a discard. `was_done`: it succeeded.
    pub fn discard_ends(&mut self, ids: &[BucketId], was_done: bool) {
        self.under_discard =
            self.under_discard.checked_sub(ids.len()).expect("a discard that ends has begun");
        let list = if was_done { &mut self.discarded } else { &mut self.filled };
        list.extend(ids);
    }
}

/// Splits the sorted `ids` into runs of adjacent buckets, of at most `max` buckets each (at least
/// one).
pub fn runs(ids: &[BucketId], max: usize) -> impl Iterator<Item = &[BucketId]> {
    let whole = ids.chunk_by(|one, other| one.device == other.device && one.index + 1 == other.index);
    whole.flat_map(move |run| run.chunks(max.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_format::DeviceIndex;

    fn ids(indices: &[u64]) -> Vec<BucketId> {
        indices.iter().map(|index| BucketId { device: DeviceIndex(0), index: *index }).collect()
    }

    fn list_of(indices: &[u64]) -> FreeList {
        let mut list = FreeList::default();
        ids(indices).into_iter().for_each(|id| list.push(id));
        list
    }

    #[test]
    fn what_is_under_discard_is_not_handed_out_and_what_was_discarded_first() {
        let mut list = list_of(&[7, 3, 5, 4, 9]);
        assert_eq!(list.take_to_discard(2, 8), ids(&[4, 5, 9]), "those that came last, in order");
        assert_eq!((list.len(), list.under_discard()), (2, 3));
        list.discard_ends(&ids(&[4, 5]), true);
        list.discard_ends(&ids(&[9]), false);
        let order: Vec<_> = core::iter::from_fn(|| list.pop()).collect();
        assert_eq!(order, ids(&[4, 5, 7, 3, 9]));
        assert_eq!(list.under_discard(), 0);
    }

    #[test]
    fn as_many_stay_as_are_to_stay_and_nothing_is_discarded_twice() {
        let mut list = list_of(&[1, 2, 3, 4]);
        assert_eq!(list.take_to_discard(4, 8), []);
        assert_eq!(list.take_to_discard(1, 2), ids(&[3, 4]));
        list.discard_ends(&ids(&[3, 4]), true);
        assert_eq!(list.take_to_discard(0, 8), ids(&[1, 2]));
        list.discard_ends(&ids(&[1, 2]), true);
        assert_eq!(list.take_to_discard(0, 8), []);
        list.put_back(ids(&[1])[0]);
        assert_eq!(list.take_to_discard(0, 8), ids(&[1]), "nobody knows what became of it");
    }

    #[test]
    fn neighbours_are_discarded_together() {
        let found: Vec<Vec<BucketId>> =
            runs(&ids(&[2, 3, 5, 6, 7, 8, 11]), 3).map(<[BucketId]>::to_vec).collect();
        assert_eq!(found, [ids(&[2, 3]), ids(&[5, 6, 7]), ids(&[8]), ids(&[11])]);
    }
}
