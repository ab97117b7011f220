//! The oldest generation of each bucket that a key of the tree carries, as far as it is known.

use super::{Buckets, STALE_MAX, slot};
use crate::cpu_cost::BUCKETS_MAX;
use bcached_format::{BucketId, Gen, Pointer};

impl Buckets {
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
        let Gen(now) = self.generation(id);
        self.note_oldest(id, Gen(now.wrapping_sub(STALE_MAX / 3)));
    }

    /// A pass of GC begins for the buckets from index `from` on, as many as are looked at in one piece; returns how
    /// many they are. From here on it is noted which generations it sees.
    pub fn begin_seeing(&mut self, from: usize) -> usize {
        let part = self.table.iter_mut().skip(from).take(BUCKETS_MAX);
        part.map(|bucket| bucket.seen = bucket.generation).count()
    }

    /// The pass has seen a key with such a pointer.
    pub fn see(&mut self, pointer: Pointer) {
        let Some(place) = self.place_of(pointer) else { return };
        let bucket = &mut self.table[place];
        if bucket.generation.after(pointer.generation()) > bucket.generation.after(bucket.seen) {
            bucket.seen = pointer.generation();
        }
    }

    /// The pass is complete: what it has seen replaces what was known of the oldest pointers. In pieces, as
    /// [`Self::begin_seeing`].
    pub fn end_seeing(&mut self, from: usize) -> usize {
        let part = self.table.iter_mut().skip(from).take(BUCKETS_MAX);
        part.map(|bucket| bucket.oldest = bucket.seen).count()
    }
}
