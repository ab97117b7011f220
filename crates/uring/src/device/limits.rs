//! Measures what a device is and can do, without changing anything on it.
//!
//! Block devices report it through `BLKSSZGET` and `/sys/dev/block/MAJOR:MINOR/queue`; a
//! partition's queue is its disk's. What sysfs does not report is assumed in the safe direction: a
//! volatile cache, no FUA, no discard, no write-zeroes. Files are probed: direct reads show the
//! smallest block their file system transfers directly, since `statx` reports it only on some file
//! systems and since Linux 6.1.

use super::{DeviceErrorKind, DeviceIdentity, DeviceKind};
use crate::prepared_op::SECTOR;
use bcached_env::Buffer;
use rustix::fs::{AtFlags, OFlags, StatxFlags};
use rustix::io::Errno;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Blocks that are tried on a file, in bytes: the smallest that works is taken.
const BLOCKS: [u32; 4] = [512, 1024, 2048, 4096];

/// The largest alignment that is supported, in bytes. Devices that report a larger one are not used
/// directly.
const ALIGNMENT_MAX: u32 = 4096;

/// The measurements.
pub(super) struct DeviceLimits {
    pub(super) sectors: u64,
    pub(super) logical_block_sectors: u32,
    pub(super) memory_alignment: usize,
    pub(super) direct: bool,
    pub(super) volatile_cache: bool,
    pub(super) fua: bool,
    pub(super) discard: bool,
    pub(super) write_zeroes: bool,
    pub(super) unmap: bool,
    pub(super) optimal_io_sectors: u64,
    pub(super) partial_stripes_expensive: bool,
}

impl DeviceLimits {
    /// Measures `file`, which was opened with `O_DIRECT` if `direct`; turns that off where it does
    /// not work.
    pub(super) fn of(file: &File, identity: DeviceIdentity, direct: bool) -> Result<Self, DeviceErrorKind> {
        let limits = match identity {
            DeviceIdentity::Block { major, minor } => Self::of_block(file, &sysfs(major, minor), direct)?,
            DeviceIdentity::File { .. } => Self::of_file(file, direct)?,
        };
        match (limits.sectors, identity) {
            (0, DeviceIdentity::Block { .. }) => Err(DeviceErrorKind::NoMedium),
            (0, DeviceIdentity::File { .. }) => Err(DeviceErrorKind::Empty),
            _ => Ok(limits),
        }
    }

    fn of_block(file: &File, sysfs: &Path, direct: bool) -> Result<Self, DeviceErrorKind> {
        let failed = |errno| DeviceErrorKind::from_errno("get the block size of", errno);
        let block = rustix::fs::ioctl_blksszget(file).map_err(failed)?.max(512);
        let number = |name| queue(sysfs, name).and_then(|text| text.parse::<u64>().ok());
        let write_zeroes = number("write_zeroes_max_bytes").is_some_and(|bytes| bytes > 0);
        // The fallback without statx: before Linux 6.0, a direct transfer needed memory aligned to
        // the block.
        let memory = statx_memory_alignment(file).unwrap_or(block).clamp(1, ALIGNMENT_MAX);
        Ok(Self {
            sectors: whole_blocks(size(file, DeviceKind::Block)?, block),
            logical_block_sectors: block / 512,
            memory_alignment: if direct { alignment(memory) } else { 1 },
            direct,
            volatile_cache: queue(sysfs, "write_cache").is_none_or(|text| text != "write through"),
            // The page cache in between has no FUA.
            fua: direct && number("fua") == Some(1),
            discard: number("discard_max_bytes").is_some_and(|bytes| bytes > 0),
            write_zeroes,
            // The kernel turns both into the same request, with a flag for whether the device may
            // unmap.
            unmap: write_zeroes,
            optimal_io_sectors: number("optimal_io_size").unwrap_or(0) / SECTOR,
            // The kernel uses a queue limit for this that it does not export. For nested arrays, or
            // arrays below other layers, it is unknown here.
            partial_stripes_expensive: attribute(sysfs, "md", "level")
                .is_some_and(|level| has_parity(&level)),
        })
    }

    fn of_file(file: &File, direct: bool) -> Result<Self, DeviceErrorKind> {
        let bytes = size(file, DeviceKind::File)?;
        let block = if direct { smallest_direct_block(file, bytes)? } else { None };
        if direct && block.is_none() {
            let failed = |errno| DeviceErrorKind::from_errno("turn off O_DIRECT for", errno);
            let flags = rustix::fs::fcntl_getfl(file).map_err(failed)?;
            rustix::fs::fcntl_setfl(file, flags - OFlags::DIRECT).map_err(failed)?;
        }
        // Without O_DIRECT there is no block size: a sector is the engine's smallest unit.
        let sector = BLOCKS[0];
        let memory = statx_memory_alignment(file).unwrap_or(0).max(block.unwrap_or(0)).min(ALIGNMENT_MAX);
        Ok(Self {
            sectors: whole_blocks(bytes, block.unwrap_or(sector)),
            logical_block_sectors: block.unwrap_or(sector) / sector,
            memory_alignment: if block.is_some() { alignment(memory) } else { 1 },
            direct: block.is_some(),
            // The page cache or the disk below: either loses data that was not synced.
            volatile_cache: true,
            fua: false,
            // Unknown until it is tried; the first refusal is remembered.
            discard: true,
            write_zeroes: true,
            unmap: true,
            // The storage under the file is not examined.
            optimal_io_sectors: 0,
            partial_stripes_expensive: false,
        })
    }
}

/// Returns the size in bytes.
pub(super) fn size(file: &File, kind: DeviceKind) -> Result<u64, DeviceErrorKind> {
    let failed = |errno| DeviceErrorKind::from_errno("get the size of", errno);
    match kind {
        DeviceKind::Block => rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)).map_err(failed),
        DeviceKind::File => {
            let stat = rustix::fs::fstat(file).map_err(failed)?;
            u64::try_from(stat.st_size).map_err(|_| DeviceErrorKind::Empty)
        }
    }
}

/// Returns true if the system reports that the block device has no size. The device itself is not
/// asked, so this does not block.
pub(super) fn is_empty(identity: DeviceIdentity) -> bool {
    let DeviceIdentity::Block { major, minor } = identity else { return false };
    std::fs::read_to_string(sysfs(major, minor).join("size")).is_ok_and(|text| text.trim() == "0")
}

/// Returns true if the block device is set to read-only.
pub(super) fn is_read_only(identity: DeviceIdentity) -> bool {
    let DeviceIdentity::Block { major, minor } = identity else { return false };
    std::fs::read_to_string(sysfs(major, minor).join("ro")).is_ok_and(|text| text.trim() == "1")
}

/// The kernel's sysfs folder of a block device.
pub(super) fn sysfs(major: u32, minor: u32) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{major}:{minor}"))
}

/// Returns the disk sequence number, unique since boot, of the disk or the partition's disk.
pub(super) fn disk_sequence(sysfs: &Path) -> Option<u64> {
    attribute(sysfs, "", "diskseq")?.parse().ok()
}

/// Sectors of the whole blocks in `bytes`.
const fn whole_blocks(bytes: u64, block: u32) -> u64 {
    let block = block as u64;
    bytes / block * block / SECTOR
}

/// Rounds up to the power of two that addresses are tested against.
fn alignment(bytes: u32) -> usize {
    usize::try_from(bytes.next_power_of_two()).expect("an alignment of at most 4096")
}

/// Returns whether arrays of this level keep parity, so that writing part of a stripe costs reads.
fn has_parity(level: &str) -> bool {
    matches!(level, "raid4" | "raid5" | "raid6")
}

/// Reads a queue setting of the disk, or of the partition's disk.
fn queue(sysfs: &Path, name: &str) -> Option<String> {
    attribute(sysfs, "queue", name)
}

/// Reads an attribute in `folder` of the disk, or of the partition's disk.
fn attribute(sysfs: &Path, folder: &str, name: &str) -> Option<String> {
    // The link must be resolved first: `..` of a partition is its disk.
    let device = std::fs::canonicalize(sysfs).ok()?;
    let mut places = [Some(device.as_path()), device.parent()].into_iter().flatten();
    let text = places.find_map(|place| std::fs::read_to_string(place.join(folder).join(name)).ok())?;
    Some(text.trim().to_owned())
}

/// Returns the memory alignment for direct I/O that `statx` reports, in bytes; `None` if it is
/// unknown.
fn statx_memory_alignment(file: &File) -> Option<u32> {
    let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let known = found.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    (known && found.stx_dio_mem_align != 0).then_some(found.stx_dio_mem_align)
}

/// Returns the smallest block that can be read directly; `None` if none can. A file too short to
/// try has none.
fn smallest_direct_block(file: &File, bytes: u64) -> Result<Option<u32>, DeviceErrorKind> {
    let mut memory = Buffer::zeroed(4096);
    for block in BLOCKS {
        let length = usize::try_from(block).expect("at most 4096");
        if bytes < u64::from(block) * 2 {
            break;
        }
        // The second block: offset and length are multiples of this block and of no larger one.
        match rustix::io::pread(file, &mut memory.as_mut_slice()[..length], u64::from(block)) {
            Ok(_) => return Ok(Some(block)),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {}
            Err(errno) => return Err(DeviceErrorKind::from_errno("read", errno)),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A partition of an array: its level is found at its disk.
    #[test]
    fn an_array_with_parity_is_known_by_its_level() {
        let folder = tempfile::tempdir().expect("a folder");
        let partition = folder.path().join("md0/md0p1");
        std::fs::create_dir_all(&partition).expect("a folder");
        assert_eq!(attribute(&partition, "md", "level"), None, "no array");
        std::fs::create_dir(folder.path().join("md0/md")).expect("a folder");
        std::fs::write(folder.path().join("md0/md/level"), "raid6\n").expect("a file");
        let level = attribute(&partition, "md", "level");
        assert!(level.as_deref().is_some_and(has_parity), "{level:?}");
        assert!(["raid0", "raid1", "raid10", "linear", ""].iter().all(|level| !has_parity(level)));
    }
}
