//! The oldest generation of each bucket that a key of the tree carries, as far as known.

use super::{Buckets, STALE_MAX, slot};
use crate::cpu_cost::BUCKETS_MAX;
use bcached_format::{BucketId, Gen, Pointer};

impl Buckets {
    /// Records that a key of the tree carries `generation` for this bucket.
    pub fn note_oldest(&mut self, id: BucketId, generation: Gen) {
        let bucket = &mut self.table[slot(id) as usize];
        if bucket.generation.after(generation) > bucket.generation.after(bucket.oldest) {
            bucket.oldest = generation;
            self.gc_wanted |= bucket.needs_gc();
        }
    }

    /// Records that unreadable keys may point to the bucket with an old generation. It must not be
    /// reused so often that one of those keys could match what it holds by then. The value set here
    /// allows 64 reuses; where passes of GC complete, no key is older than that.
    pub fn may_be_named(&mut self, id: BucketId) {
        let Gen(now) = self.generation(id);
        self.note_oldest(id, Gen(now.wrapping_sub(STALE_MAX / 3)));
    }

    /// Begins a pass of GC for the buckets from index `from` on, as many as one piece of work looks
    /// at. Returns how many they are. From now on the generations that the pass sees are recorded.
    pub fn begin_seeing(&mut self, from: usize) -> usize {
        let part = self.table.iter_mut().skip(from).take(BUCKETS_MAX);
        part.map(|bucket| bucket.seen = bucket.generation).count()
    }

    /// Records that the pass has seen a key with such a pointer.
    pub fn see(&mut self, pointer: Pointer) {
        let Some(place) = self.place_of(pointer) else { return };
        let bucket = &mut self.table[place];
        if bucket.generation.after(pointer.generation()) > bucket.generation.after(bucket.seen) {
            bucket.seen = pointer.generation();
        }
    }

    /// Ends a complete pass: what it has seen replaces what was known of the oldest pointers. In
    /// pieces, like [`Self::begin_seeing`].
    pub fn end_seeing(&mut self, from: usize) -> usize {
        let part = self.table.iter_mut().skip(from).take(BUCKETS_MAX);
        part.map(|bucket| bucket.oldest = bucket.seen).count()
    }
}
