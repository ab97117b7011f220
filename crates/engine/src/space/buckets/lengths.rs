//! The durable length of each node. It is stored with the generations ([`prio_of_node`]). With it,
//! the next start can tell a node that lost the last write to it from one that never had that
//! write. The node itself cannot say so: without the write, it is a valid older node. After an
//! orderly stop all lengths have been stored. After a crash the stored ones may be outdated, and a
//! node may well be longer.
//!
//! A length is valid for one life of the bucket: a change of generation or usage voids it in
//! memory. The stored value changes later. So a bucket must begin its next life with a generation
//! that differs from the stored one. The search for victims and the use of the reserve ensure that,
//! because they store the generation first. A start ensures it for the buckets that it takes as
//! they are ([`Buckets::end_node`]).
//!
//! [`prio_of_node`]: bcached_format::prio::prio_of_node

use super::{Buckets, slot};
use bcached_format::{BucketId, Pointer};

impl Buckets {
    /// Records that so many blocks of the node in bucket `id` are durable.
    pub fn node_reaches(&mut self, id: BucketId, blocks: u32) {
        let bucket = &mut self.table[slot(id) as usize];
        let blocks = u16::try_from(blocks).unwrap_or(u16::MAX);
        if bucket.usage().may_be_node() && blocks > bucket.length() {
            bucket.set_length(blocks);
            self.has_longer_nodes = true;
        }
    }

    /// Records that so many blocks of the node that `pointer` leads to were found on the device.
    pub fn node_found(&mut self, pointer: Pointer, blocks: u32) {
        let id = self.of(pointer).filter(|id| self.generation(*id) == pointer.generation());
        if let Some(id) = id {
            self.node_reaches(id, blocks);
        }
    }

    /// Returns how many blocks of the node that `pointer` leads to are durable, at least.
    #[must_use]
    pub fn durable_blocks(&self, pointer: Pointer) -> u32 {
        let bucket = self.place_of(pointer).map(|place| &self.table[place]);
        let bucket = bucket.filter(|bucket| bucket.generation == pointer.generation());
        bucket.map_or(0, |bucket| u32::from(bucket.length()))
    }

    /// Ends the life of a bucket that nothing leads to, if it held a node when the priorities were
    /// last stored: a root that has since been replaced, or a node whose parent was rewritten.
    /// Otherwise a start could use the bucket before it stores them again, and the next start would
    /// miss the blocks of the former node in the new one. The generation becomes the one that a
    /// freeing key would have given it.
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

    /// Returns whether nodes are longer than the stored lengths say.
    #[must_use]
    pub const fn has_longer_nodes(&self) -> bool {
        self.has_longer_nodes
    }

    /// Begins storing the lengths: those known so far will be stored, those recorded from now on
    /// are not.
    pub const fn begin_storing_lengths(&mut self) {
        self.has_longer_nodes = false;
    }
}

#[cfg(test)]
mod tests {
    use super::super::BucketUsage;
    use super::*;
    use bcached_format::prio::prio_of_node;
    use bcached_format::{DeviceIndex, Gen};

    /// The stored priorities claim long nodes in all four buckets. Nothing leads to the first any
    /// more, the second now holds data, a key to be replayed points to the third, and the last is
    /// still a node.
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
        assert_eq!(buckets.get(buckets.id(0)).usage, BucketUsage::Data);
    }
}
