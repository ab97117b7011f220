//! Buckets that are free: which of them the device has been told of (discarded), and which it is being told of.
//!
//! A bucket is here when its generation is durable, so that whatever stands in it is nobody's. One that is under discard is not
//! handed out: what is written there meanwhile could be taken by it.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use bcached_format::BucketId;

/// The free buckets, in the order in which they came.
#[derive(Default, Debug)]
pub struct FreeList {
    /// Something may still stand in these, as far as the device knows.
    filled: VecDeque<BucketId>,
    /// These have been discarded since they were free.
    discarded: VecDeque<BucketId>,
    /// These are being discarded.
    under_discard: usize,
}

impl FreeList {
    /// Buckets that can be handed out now.
    #[must_use]
    pub fn len(&self) -> usize {
        self.filled.len() + self.discarded.len()
    }

    /// Buckets that can be handed out later: they are being discarded.
    #[must_use]
    pub const fn under_discard(&self) -> usize {
        self.under_discard
    }

    /// A bucket has become free.
    pub fn push(&mut self, id: BucketId) {
        self.filled.push_back(id);
    }

    /// A bucket comes back to which nothing was written. Whether it has been discarded nobody remembers.
    pub fn put_back(&mut self, id: BucketId) {
        self.filled.push_front(id);
    }

    /// The next one to be handed out.
    pub fn pop(&mut self) -> Option<BucketId> {
        self.discarded.pop_front().or_else(|| self.filled.pop_front())
    }

    /// The first one that `fits`, rather one that the device knows nothing of.
    pub fn take(&mut self, fits: impl Fn(BucketId) -> bool) -> Option<BucketId> {
        let mut lists = [&mut self.filled, &mut self.discarded].into_iter();
        lists.find_map(|list| {
            let place = list.iter().position(|id| fits(*id))?;
            list.remove(place)
        })
    }

    /// Takes buckets to be discarded, in the order of the device: `max` at most, those that would be handed out last, and none if fewer
    /// than `keep` would be left to be handed out.
    pub fn take_to_discard(&mut self, keep: usize, max: usize) -> Vec<BucketId> {
        let count = self.len().saturating_sub(keep).min(self.filled.len()).min(max);
        let mut taken: Vec<BucketId> = self.filled.drain(self.filled.len() - count..).collect();
        taken.sort_unstable();
        self.under_discard += count;
        taken
    }

    /// The discard of these has ended. `was_done`: not in vain.
    pub fn discard_ends(&mut self, ids: &[BucketId], was_done: bool) {
        self.under_discard =
            self.under_discard.checked_sub(ids.len()).expect("a discard that ends has begun");
        let list = if was_done { &mut self.discarded } else { &mut self.filled };
        list.extend(ids);
    }
}

/// Neighbours among `ids`, which are in order, as runs of at most `max` buckets (one at least).
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
