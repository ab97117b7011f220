//! Buckets that become part of the reserve, and that a start uses ([`reserve`](crate::space::reserve)).

use super::{Buckets, Usage, slot};
use bcached_format::BucketId;

impl Buckets {
    /// Uses a bucket of the reserve that has been proven free: when its next generation is durable it is handed out, and its stamp
    /// means nothing any more.
    pub fn use_reserve(&mut self, id: BucketId) {
        assert_eq!(self.get(id).usage, Usage::Reserve, "bucket {id} is of the reserve");
        self.set_usage(id, Usage::Pending);
        let bucket = &mut self.table[slot(id) as usize];
        bucket.generation = bucket.generation.next();
        self.pending.push(id);
    }

    /// A free bucket for the reserve, leaving at least `keep` behind. Not one that tree or journal may point to with an old
    /// generation: its next use adds one to the distance, and no search for victims looks at that.
    pub fn take_for_reserve(&mut self, keep: usize) -> Option<BucketId> {
        if self.free.len() <= keep {
            return None;
        }
        let table = &self.table;
        let id = self.free.take(|id| !table[slot(id) as usize].needs_gc())?;
        self.set_usage(id, Usage::Reserve);
        Some(id)
    }

    /// A bucket taken for the reserve could not be stamped: it is free as before, but the last to be handed out.
    pub fn put_back_from_reserve(&mut self, id: BucketId) {
        assert_eq!(self.get(id).usage, Usage::Reserve, "bucket {id} was taken for the reserve");
        self.set_usage(id, Usage::Free);
        self.free.push(id);
    }
}
