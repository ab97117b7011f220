//! Buckets that join the reserve, and those of it that a start uses
//! ([`reserve`](crate::space::reserve)).

use super::{BucketUsage, Buckets, slot};
use bcached_format::BucketId;

impl Buckets {
    /// Uses a bucket of the reserve that has been proven free. It is handed out once its next
    /// generation is durable; from then on its stamp is void.
    pub fn use_reserve(&mut self, id: BucketId) {
        assert_eq!(self.get(id).usage, BucketUsage::Reserve, "bucket {id} is of the reserve");
        self.set_usage(id, BucketUsage::Pending);
        let bucket = &mut self.table[slot(id) as usize];
        bucket.generation = bucket.generation.next();
        self.pending.push(id);
    }

    /// Takes a free bucket for the reserve. Returns `None` if no more than `keep` are free. Skips
    /// buckets that the tree or the journal may point to with an old generation: the next use of a
    /// reserved bucket adds one to the distance, and no search for victims checks it.
    pub fn take_for_reserve(&mut self, keep: usize) -> Option<BucketId> {
        if self.free.len() <= keep {
            return None;
        }
        let table = &self.table;
        let id = self.free.take(|id| !table[slot(id) as usize].needs_gc())?;
        self.set_usage(id, BucketUsage::Reserve);
        Some(id)
    }

    /// Returns a bucket taken for the reserve that could not be stamped. It is free as before, but
    /// the last to be handed out.
    pub fn put_back_from_reserve(&mut self, id: BucketId) {
        assert_eq!(self.get(id).usage, BucketUsage::Reserve, "bucket {id} was taken for the reserve");
        self.set_usage(id, BucketUsage::Free);
        self.free.push(id);
    }
}
