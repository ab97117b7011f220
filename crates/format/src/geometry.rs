//! Sizes and places that follow from a cache superblock, such as the size of a node and the number
//! of priorities per bucket.
//!
//! Some limits stem from the largest contiguous allocation and the page size of the kernels that
//! created the format (4 MiB and 4 KiB). They are part of the format now.

use crate::identity::SetMagic;
use crate::superblock::CacheSuperblock;
use crate::units::{BucketId, DeviceIndex, SECTOR_BYTES, bytes_of, sectors_of};

/// Most bytes of a bucket that one metadata structure uses.
const META_BYTES_MAX: u64 = 4 << 20;

/// A node fills a meta area of up to this size. In a larger meta area it takes a quarter, but not
/// less than this.
const NODE_BYTES_STEP: u64 = 256 << 10;

/// Largest journal entry.
const JSET_BYTES_MAX: u64 = 32 << 10;

/// Sizes of a cache set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Block size in sectors, 1..=8: metadata is written in whole blocks.
    pub block_sectors: u64,
    /// Bucket size in sectors, a power of two of at least 8.
    pub bucket_sectors: u64,
    /// Number of buckets N, counted from the start of the device.
    pub buckets: u64,
    /// First usable bucket; the journal starts here.
    pub first_bucket: u64,
    /// Number of journal buckets.
    pub journal_buckets: u64,
    /// Magic that marks the set's metadata.
    pub magic: SetMagic,
}

impl Geometry {
    /// Returns the sizes of the set of `superblock`.
    #[must_use]
    pub fn of(superblock: &CacheSuperblock) -> Self {
        Self {
            block_sectors: superblock.block_sectors(),
            bucket_sectors: superblock.bucket_sectors(),
            buckets: superblock.buckets(),
            first_bucket: superblock.first_bucket(),
            journal_buckets: superblock.journal_buckets(),
            magic: superblock.set_magic(),
        }
    }

    /// Returns the size of a block in bytes.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        to_index(bytes_of(self.block_sectors))
    }

    /// Returns the size of a bucket in bytes.
    #[must_use]
    pub const fn bucket_bytes(&self) -> u64 {
        bytes_of(self.bucket_sectors)
    }

    /// Returns the bytes that a priority set or the uuid table takes at the start of its bucket.
    #[must_use]
    pub fn meta_bytes(&self) -> usize {
        to_index(self.bucket_bytes().min(META_BYTES_MAX))
    }

    /// Returns the same in sectors.
    #[must_use]
    pub fn meta_sectors(&self) -> u64 {
        sectors_of(self.meta_bytes() as u64)
    }

    /// Returns the number of buckets that one priority set describes.
    #[must_use]
    pub fn prios_per_set(&self) -> u64 {
        crate::prio::entries_in(self.meta_bytes()) as u64
    }

    /// Returns the number of priority sets that describe all buckets.
    #[must_use]
    pub fn prio_sets(&self) -> u64 {
        self.buckets.div_ceil(self.prios_per_set())
    }

    /// Returns the number of slots of the uuid table.
    #[must_use]
    pub fn uuid_slots(&self) -> usize {
        self.meta_bytes() / crate::uuid::SLOT_BYTES
    }

    /// Returns the sectors of a new B-tree node. The size of an existing one is in the key that
    /// points to it.
    #[must_use]
    pub fn node_sectors(&self) -> u64 {
        let meta = self.meta_bytes() as u64;
        let bytes = if meta <= NODE_BYTES_STEP { meta } else { (meta / 4).max(NODE_BYTES_STEP) };
        sectors_of(bytes)
    }

    /// Returns the maximum size of a journal entry in bytes, header included.
    #[must_use]
    pub fn jset_bytes_max(&self) -> usize {
        to_index(self.bucket_bytes().min(JSET_BYTES_MAX))
    }

    /// Returns the journal bucket with this index, which is below [`Self::journal_buckets`].
    #[must_use]
    pub const fn journal_bucket(&self, index: u64) -> BucketId {
        BucketId { device: DeviceIndex(0), index: self.first_bucket + index }
    }

    /// Returns the first sector of a bucket.
    #[must_use]
    pub const fn sector_of(&self, bucket: BucketId) -> u64 {
        bucket.index * self.bucket_sectors
    }

    /// Returns the index of the bucket that holds `sector`, and the offset of the sector in it.
    /// This runs for each key that is read, so it avoids a division for the bucket sizes that the
    /// superblock's check accepts.
    #[must_use]
    #[inline]
    pub const fn bucket_at(&self, sector: u64) -> (u64, u64) {
        let size = self.bucket_sectors;
        if size.is_power_of_two() {
            return (sector >> size.trailing_zeros(), sector & (size - 1));
        }
        (sector / size, sector % size)
    }

    /// Returns whether keys may point into the bucket with this index.
    #[must_use]
    pub const fn is_usable(&self, index: u64) -> bool {
        index >= self.first_bucket && index < self.buckets
    }

    /// Returns `bytes` rounded up to whole blocks.
    #[must_use]
    pub fn whole_blocks(&self, bytes: usize) -> usize {
        bytes.next_multiple_of(self.block_bytes())
    }
}

/// Converts a size for use as an index. The sizes here are at most a few MiB, except those of
/// buckets, which are never indexed as a whole.
fn to_index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("metadata fits in memory")
}

const _: () = assert!(NODE_BYTES_STEP < META_BYTES_MAX && JSET_BYTES_MAX.is_multiple_of(SECTOR_BYTES));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Uuid;

    fn geometry(bucket_bytes: u64, buckets: u64) -> Geometry {
        Geometry {
            block_sectors: 1,
            bucket_sectors: sectors_of(bucket_bytes),
            buckets,
            first_bucket: 1,
            journal_buckets: 16,
            magic: SetMagic::of(Uuid::NIL),
        }
    }

    #[test]
    fn node_sizes_of_the_format_document() {
        let kib = 1024;
        for (bucket, node) in
            [(64, 64), (256, 256), (512, 256), (1024, 256), (2048, 512), (4096, 1024), (16384, 1024)]
        {
            assert_eq!(geometry(bucket * kib, 2048).node_sectors(), sectors_of(node * kib), "{bucket} KiB");
        }
    }

    #[test]
    fn a_sector_lies_in_one_bucket_whatever_their_size() {
        for sectors in [8, 1000, 1024, 3 << 20, 1 << 23] {
            let geometry = Geometry { bucket_sectors: sectors, ..geometry(4096, 1000) };
            for sector in [0, 7, 8, 999, 1000, 1023, 1024, 48_157, (1 << 43) - 1] {
                let (bucket, within) = geometry.bucket_at(sector);
                assert_eq!((bucket, within), (sector / sectors, sector % sectors), "{sector} of {sectors}");
            }
        }
    }

    #[test]
    fn sizes_of_the_worked_example() {
        // 1 GiB, buckets of 512 KiB (on-disk format, 20.4).
        let geometry = geometry(512 << 10, 2048);
        assert_eq!(geometry.prios_per_set(), 174_749);
        assert_eq!(geometry.prio_sets(), 1);
        assert_eq!(geometry.uuid_slots(), 4096);
        assert_eq!(geometry.jset_bytes_max(), 32 << 10);
        assert_eq!(geometry.sector_of(BucketId { device: DeviceIndex(0), index: 34 }), 34816);
    }

    #[test]
    fn small_buckets_bound_entries_and_need_several_priority_sets() {
        let geometry = geometry(4096, 10_000);
        assert_eq!(geometry.jset_bytes_max(), 4096);
        assert_eq!(geometry.prios_per_set(), 1352);
        assert_eq!(geometry.prio_sets(), 8);
        assert_eq!(geometry.node_sectors(), 8);
    }
}
