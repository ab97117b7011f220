//! How much of each node is durable. It is stored with the generations ([`prio_of_node`]), so that the next start tells a node that lost the
//! last write to it from one that never had it: nothing in the node says so, and what it says without it is old. Who stopped in good
//! order has stored all of it; after a crash it is what was stored last, and a node may well be longer.
//!
//! It is of one life of the bucket: whoever changes its generation or its usage voids it, and a bucket whose generation a start does
//! not know to be stored is not used for a node before it is (`space::prios`).
//!
//! [`prio_of_node`]: bcached_format::prio::prio_of_node

use super::{Buckets, slot};
use bcached_format::{BucketId, Pointer};

impl Buckets {
    /// So many blocks of the node in bucket `id` are durable.
    pub fn node_reaches(&mut self, id: BucketId, blocks: u32) {
        let bucket = &mut self.table[slot(id) as usize];
        let blocks = u16::try_from(blocks).unwrap_or(u16::MAX);
        if blocks > bucket.durable_blocks {
            bucket.durable_blocks = blocks;
            self.has_longer_nodes = true;
        }
    }

    /// So many blocks of the node that `pointer` leads to were found on the device.
    pub fn node_found(&mut self, pointer: Pointer, blocks: u32) {
        let id = self.of(pointer).filter(|id| self.get(*id).generation == pointer.generation());
        if let Some(id) = id {
            self.node_reaches(id, blocks);
        }
    }

    /// How many blocks of the node that `pointer` leads to are durable, at the least.
    #[must_use]
    pub fn durable_blocks(&self, pointer: Pointer) -> u32 {
        let bucket = self.of(pointer).map(|id| self.get(id));
        let bucket = bucket.filter(|bucket| bucket.generation == pointer.generation());
        bucket.map_or(0, |bucket| u32::from(bucket.durable_blocks))
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
