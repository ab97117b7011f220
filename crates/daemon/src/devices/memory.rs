//! A cache device of no consequence, in memory: what serves volumes that have no cache. Nothing of a volume ever enters it, so it
//! is made anew at each start, and takes memory only for the little that an empty set writes.

use super::CacheDevice;
use crate::failure::{Failure, Kind};
use bcached_format::{CacheFormat, CacheSuperblock, Replacement, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR, Uuid};
use bcached_uring::{Access, Device};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

/// Sizes with which an engine runs; in sectors, and buckets.
const BUCKET_SECTORS: u16 = 128;
const BUCKETS: u64 = 600;

/// Such a device for volumes whose devices are written in blocks of so many sectors.
pub fn make(block_sectors: u16) -> Result<CacheDevice, Failure> {
    let cannot = |error: &io::Error| {
        Failure::new(Kind::Io, "cannot serve volumes without a cache").why(error.to_string())
    };
    let sectors = BUCKETS * u64::from(BUCKET_SECTORS);
    let superblock = CacheSuperblock::format(CacheFormat {
        uuid: Uuid([0xfe; 16]),
        // No device says that it belongs to this one.
        set_uuid: Uuid([0xff; 16]),
        device_sectors: sectors,
        block_sectors,
        bucket_sectors: BUCKET_SECTORS,
        discard: false,
        replacement: Replacement::Lru,
    });
    let superblock = superblock.expect("sizes that can be run");
    let bytes = superblock.seal();
    debug_assert_eq!(bytes.len(), SUPERBLOCK_BYTES, "it is written whole");
    let file = rustix::fs::memfd_create("bcached-none", rustix::fs::MemfdFlags::CLOEXEC)
        .map_err(|error| cannot(&error.into()))?;
    let file = File::from(file);
    let written =
        file.set_len(sectors * 512).and_then(|()| file.write_all_at(&bytes[..], SUPERBLOCK_SECTOR * 512));
    written.map_err(|error| cannot(&error))?;
    // Opened once more by its name, like any other; this handle may go then.
    let device = Device::open(format!("/proc/self/fd/{}", file.as_raw_fd()), Access::Own)?;
    Ok(CacheDevice { device, superblock })
}
