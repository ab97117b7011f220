//! What pointers mean: which bucket each points into, and whether that has been reused since.

use super::slots::BucketSlot;
use super::{BucketUsage, Buckets};
use bcached_format::{BucketId, Key, Pointer};

impl Buckets {
    /// The bucket that `pointer` points into; `None` for a check pointer or one outside the
    /// devices.
    #[inline]
    #[must_use]
    pub fn of(&self, pointer: Pointer) -> Option<BucketId> {
        self.place_of(pointer).map(|place| BucketId { device: self.device, index: place as u64 })
    }

    /// Like [`Buckets::of`], as an index into the table.
    #[inline]
    pub(super) fn place_of(&self, pointer: Pointer) -> Option<usize> {
        if pointer.is_check() {
            return None;
        }
        let index = pointer.sector() / self.bucket_sectors;
        let place = usize::try_from(index).ok()?;
        (index >= self.first_bucket && place < self.table.len()).then_some(place)
    }

    /// The slot of the bucket that `pointer` points into.
    #[inline]
    fn at(&self, pointer: Pointer) -> Option<&BucketSlot> {
        self.place_of(pointer).map(|place| &self.table[place])
    }

    /// Number of times that the bucket has been reused since the pointer was made; `None` for a
    /// check pointer or one outside the devices.
    #[inline]
    #[must_use]
    pub fn age_of(&self, pointer: Pointer) -> Option<u8> {
        self.at(pointer).map(|bucket| bucket.generation.after(pointer.generation()))
    }

    /// Returns true if the bucket has been reused since the pointer was made. Check pointers and
    /// pointers outside the devices are stale.
    #[inline]
    #[must_use]
    pub fn is_stale(&self, pointer: Pointer) -> bool {
        self.age_of(pointer).is_none_or(|age| age > 0)
    }

    /// Returns true if all pointers of the key are stale.
    #[inline]
    #[must_use]
    pub fn is_dead(&self, key: &Key) -> bool {
        key.pointers.as_slice().iter().all(|pointer| self.is_stale(*pointer))
    }

    /// Returns true if the pointer stays stale after a crash: its bucket's generation has been
    /// stored, or is at least two ahead.
    #[inline]
    #[must_use]
    pub fn is_durably_stale(&self, pointer: Pointer) -> bool {
        self.at(pointer).is_none_or(|bucket| {
            let distance = bucket.generation.after(pointer.generation());
            distance > u8::from(bucket.usage() == BucketUsage::Pending)
        })
    }

    /// Returns true if a crash could bring back something that the key points to, whether it is
    /// there now or not.
    #[inline]
    #[must_use]
    pub fn could_return(&self, key: &Key) -> bool {
        key.pointers.as_slice().iter().any(|pointer| !self.is_durably_stale(*pointer))
    }
}
