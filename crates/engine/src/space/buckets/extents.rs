//! Contents of buckets: extents that are added and removed, and pins for operations in flight.

use super::slots::place_slot;
use super::{Buckets, CHECKED};
use bcached_format::Pointer;

impl Buckets {
    /// Counts a live extent of `sectors` that now points into the bucket of `pointer`. Stale
    /// pointers are not counted. Returns false if the bucket has too few sectors, so that another
    /// key points to the same ones; nothing has changed then.
    #[must_use]
    pub fn add(&mut self, pointer: Pointer, sectors: u32, dirty: bool) -> bool {
        if self.is_stale(pointer) {
            return true;
        }
        let place = self.place_of(pointer).expect("not stale, so inside");
        let was_available = self.is_available(place);
        let bucket = &mut self.table[place];
        if u64::from(bucket.live) + u64::from(sectors) > self.bucket_sectors {
            return false;
        }
        bucket.live += sectors;
        if dirty {
            self.set_dirty_at(place, self.dirty_at(place) + sectors);
        }
        self.settle(place, was_available);
        true
    }

    /// Removes a live extent from the bucket; `sectors` of it had been counted. `sequence`: the
    /// journal entry that records the removal. If the extent was dirty, the bucket is not reused
    /// before that entry is durable.
    pub fn remove(&mut self, pointer: Pointer, sectors: u32, dirty: bool, sequence: u64) {
        if self.is_stale(pointer) {
            return;
        }
        let place = self.place_of(pointer).expect("not stale, so inside");
        let was_available = self.is_available(place);
        let bucket = &mut self.table[place];
        assert!(bucket.live >= sectors, "bucket {place}: {} live sectors, {sectors} removed", bucket.live);
        bucket.live -= sectors;
        if dirty {
            let had = self.dirty_at(place);
            assert!(had >= sectors, "bucket {place}: {had} dirty, {sectors} removed");
            self.set_dirty_at(place, had - sectors);
            // The bucket is not invalidated before that entry is durable: invariant D10.
            let entry = self.entry(sequence);
            self.table[place].wait_for(entry, self.entries);
            self.freed += u64::from(!was_available && self.is_available(place));
        }
        self.settle(place, was_available);
    }

    /// Pins the bucket against reuse: I/O to it begins, or a key for it is about to enter the tree.
    pub fn pin(&mut self, pointer: Pointer) {
        let place = self.place_of(pointer).expect(CHECKED);
        self.pin_at(place);
    }

    #[inline]
    fn pin_at(&mut self, place: usize) {
        let bucket = &mut self.table[place];
        match bucket.pins.checked_add(1) {
            Some(pins) => bucket.pins = pins,
            None => self.pin_crowded(place),
        }
    }

    /// Pins the bucket because its data is about to be read or written, and marks it as used now.
    #[inline]
    pub fn begin(&mut self, pointer: Pointer) {
        let place = self.place_of(pointer).expect(CHECKED);
        self.pin_at(place);
        self.table[place].touch(self.clock);
        self.victims.touch(place_slot(place));
    }

    /// Ends what [`Buckets::pin`] began.
    pub fn unpin(&mut self, pointer: Pointer) {
        let place = self.place_of(pointer).expect(CHECKED);
        let bucket = &mut self.table[place];
        bucket.pins = bucket.pins.checked_sub(1).expect("pins and unpins are in pairs");
        if bucket.pins == 0 && !self.crowded.is_empty() {
            self.unpin_crowded(place);
        }
    }
}
