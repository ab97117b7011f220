//! The sizes a cache set is made with.

use bcached_format::CacheMode;

/// What `make-bcache` is told, and how large the devices are.
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
    /// Where a backing device's data starts, in sectors; 16 is the usual.
    pub data_offset_sectors: u64,
    /// The cache mode in the backing devices' superblocks.
    pub mode: CacheMode,
}

/// A kernel takes no cache below 513 buckets; a few more leave room for what is not data.
const BUCKETS: u64 = 600;

impl Geometry {
    /// The smallest cache that a kernel takes with such buckets, a 64 MiB volume, write-back.
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

    /// Size of a backing device: its data and what lies before it.
    #[must_use]
    pub const fn backing_bytes(&self) -> u64 {
        (self.data_offset_sectors + self.volume_sectors) * 512
    }

    /// A block in sectors.
    #[must_use]
    pub const fn block_sectors(&self) -> u64 {
        self.block_bytes / 512
    }

    /// The sizes as `make-bcache` takes them.
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
