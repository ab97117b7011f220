//! The sizes with which a cache set is made.

use bcached_format::CacheMode;

/// The options for `make-bcache`, and the sizes of the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size of a bucket, in bytes.
    pub bucket_bytes: u64,
    /// Size of a block, in bytes: 512 or 4096.
    pub block_bytes: u64,
    /// Size of the cache device, in bytes.
    pub cache_bytes: u64,
    /// Size of each volume, in sectors of 512 bytes.
    pub volume_sectors: u64,
    /// Where a backing device's data starts, in sectors; 16 is the usual value.
    pub data_offset_sectors: u64,
    /// The cache mode in the backing devices' superblocks.
    pub mode: CacheMode,
}

/// Number of buckets. A kernel refuses a cache of fewer than 513; a few more leave room for
/// metadata.
const BUCKETS: u64 = 600;

impl Geometry {
    /// The smallest cache that a kernel accepts with this bucket size, a 64 MiB volume, write-back
    /// mode.
    #[must_use]
    pub const fn small(bucket_bytes: u64, block_bytes: u64) -> Self {
        Self {
            bucket_bytes,
            block_bytes,
            cache_bytes: BUCKETS * bucket_bytes,
            volume_sectors: (64 << 20) / 512,
            data_offset_sectors: 16,
            mode: CacheMode::Writeback,
        }
    }

    /// Returns the size of a backing device in bytes: its data and what lies before it.
    #[must_use]
    pub const fn backing_bytes(&self) -> u64 {
        (self.data_offset_sectors + self.volume_sectors) * 512
    }

    /// Returns the size of a block, in sectors.
    #[must_use]
    pub const fn block_sectors(&self) -> u64 {
        self.block_bytes / 512
    }

    /// Returns the options for `make-bcache`.
    #[must_use]
    pub fn make_arguments(&self) -> Vec<String> {
        let mut arguments = vec![
            "--bucket".to_owned(),
            self.bucket_bytes.to_string(),
            "--block".to_owned(),
            self.block_bytes.to_string(),
        ];
        if self.data_offset_sectors != 16 {
            arguments.extend(["--data-offset".to_owned(), self.data_offset_sectors.to_string()]);
        }
        if self.mode == CacheMode::Writeback {
            arguments.push("--writeback".to_owned());
        }
        arguments
    }
}
