//! A dummy cache device in memory, which serves volumes that have no cache. No data of a volume
//! ever enters it. It is made anew at each start, and takes memory only for the little that an
//! empty set writes.

use super::CacheDevice;
use bcached_control::failure::{Failure, Kind};
use bcached_format::{CacheSuperblock, SUPERBLOCK_BYTES, SUPERBLOCK_SECTOR};
use bcached_host::without_cache;
use bcached_uring::{Access, Device};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

/// Makes such a device for volumes whose devices have blocks of this many sectors (1 or 8).
pub fn make(block_sectors: u16) -> Result<CacheDevice, Failure> {
    let superblock = without_cache::superblock(block_sectors);
    Ok(CacheDevice { device: with(&superblock)?, superblock })
}

/// A device in memory with this superblock, of the size of a bypass.
pub fn with(superblock: &CacheSuperblock) -> Result<Device, Failure> {
    let cannot = |error: &io::Error| {
        Failure::new(Kind::Io, "cannot serve volumes without a cache").why(error.to_string())
    };
    let bytes = superblock.seal();
    debug_assert_eq!(bytes.len(), SUPERBLOCK_BYTES, "the superblock is written as a whole");
    let file = rustix::fs::memfd_create("bcached-none", rustix::fs::MemfdFlags::CLOEXEC)
        .map_err(|error| cannot(&error.into()))?;
    let file = File::from(file);
    let written = file
        .set_len(without_cache::SECTORS * 512)
        .and_then(|()| file.write_all_at(&bytes[..], SUPERBLOCK_SECTOR * 512));
    written.map_err(|error| cannot(&error))?;
    // The device is opened again by its name, like any other; this handle may be closed then.
    Ok(Device::open(format!("/proc/self/fd/{}", file.as_raw_fd()), Access::Own)?)
}
