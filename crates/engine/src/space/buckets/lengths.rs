//! How much of each node is durable. It is stored with the generations ([`prio_of_node`]), so that the next start tells a node that lost the
//! last write to it from one that never had it: nothing in the node says so, and what it says without it is old. Who stopped in good
//! order has stored all of it; after a crash it is what was stored last, and a node may well be longer.
//!
//! It is of one life of the bucket: whoever changes its generation or its usage voids it. What is stored changes later, so a bucket
//! comes to its next life with another generation than what is stored has: the search for victims sees to that, and the reserve's
//! use, which store it first, and a start for what it takes as it is ([`Buckets::end_node`]).
//!
//! [`prio_of_node`]: bcached_format::prio::prio_of_node

use super::{Buckets, slot};
use bcached_format::{BucketId, Pointer};

impl Buckets {
    /// So many blocks of the node in bucket `id` are durable.
    pub fn node_reaches(&mut self, id: BucketId, blocks: u32) {
        let bucket = &mut self.table[slot(id) as usize];
        let blocks = u16::try_from(blocks).unwrap_or(u16::MAX);
        if bucket.usage().may_be_node() && blocks > bucket.length() {
            bucket.set_length(blocks);
            self.has_longer_nodes = true;
        }
    }

    /// So many blocks of the node that `pointer` leads to were found on the device.
    pub fn node_found(&mut self, pointer: Pointer, blocks: u32) {
        let id = self.of(pointer).filter(|id| self.generation(*id) == pointer.generation());
        if let Some(id) = id {
            self.node_reaches(id, blocks);
        }
    }

    /// How many blocks of the node that `pointer` leads to are durable, at the least.
    #[must_use]
    pub fn durable_blocks(&self, pointer: Pointer) -> u32 {
        let bucket = self.place_of(pointer).map(|place| &self.table[place]);
        let bucket = bucket.filter(|bucket| bucket.generation == pointer.generation());
        bucket.map_or(0, |bucket| u32::from(bucket.length()))
    }

    /// Ends the life of a bucket that nothing leads to, if it held a node when the priorities were stored last: a root that had been
    /// replaced since, or a node whose parent was written anew. A start may use the bucket before it stores them again, and the next
    /// one would miss in its node the blocks of the former. The generation is as if it had been freed by a key.
    pub(super) fn end_node(&mut self, id: BucketId) {
        let bucket = &mut self.table[slot(id) as usize];
        if bucket.length() == 0 || bucket.live > 0 || bucket.pins > 0 {
            return;
        }
        let former = bucket.generation;
        bucket.generation = former.next();
        bucket.set_length(0);
        self.note_oldest(id, former);
    }

    /// Nodes are longer than has been stored.
    #[must_use]
    pub const fn has_longer_nodes(&self) -> bool {
        self.has_longer_nodes
    }

    /// What is known from here on has not been stored, what was known before will have been.
    pub const fn begin_storing_lengths(&mut self) {
        self.has_longer_nodes = false;
    }
}

#[cfg(test)]
mod tests {
    use super::super::Usage;
    use super::*;
    use bcached_format::prio::prio_of_node;
    use bcached_format::{DeviceIndex, Gen};

    /// What was stored says that there were long nodes in all of them. Nothing leads to the first any more, data lies in the second since, a key
    /// that is to be replayed points to the third, and the last is a node still.
    #[test]
    fn what_was_a_node_when_it_was_stored_comes_back_with_another_generation() {
        let mut buckets = Buckets::new(DeviceIndex(0), 8, 0, (0..4).map(|_| (Gen(7), prio_of_node(2))))
            .expect("four buckets");
        let pointer = |index: u64| Pointer::new(DeviceIndex(0), 8 * index, Gen(7));
        assert!(buckets.add(pointer(1), 8, false));
        buckets.pin(pointer(2));
        buckets.classify(|index| index == 3).expect("four buckets");
        let generations = [0, 1, 2, 3].map(|index| buckets.get(buckets.id(index)).generation);
        assert_eq!(generations, [Gen(8), Gen(7), Gen(7), Gen(7)]);
        assert_eq!(buckets.table[0].oldest, Gen(7), "a key may be left that names it");
        let lengths = [0, 1, 2, 3].map(|index| buckets.durable_blocks(pointer(index)));
        assert_eq!(lengths, [0, 0, 0, 2]);
        assert_eq!(buckets.get(buckets.id(0)).usage, Usage::Data);
    }
}
