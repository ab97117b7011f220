//! Devices for the offline commands: `bcached-uring` opens and claims them and does the I/O; this
//! module reads bytes at any offset.

use bcached_control::failure::Failure;
use std::path::Path;

pub use bcached_uring::{Access, Device, DeviceKind};

const SECTOR: u64 = 512;

/// Opens `path`. An image file accepts blocks of any size, whatever disk it is on.
///
/// # Errors
/// It does not exist, may not be opened, is no device, or is in use (not for [`Access::Look`]).
pub fn open(path: &Path, access: Access) -> Result<Device, Failure> {
    let device = Device::open(path, access)?;
    if device.kind() == DeviceKind::File {
        device.require_blocks(1)?;
    }
    Ok(device)
}

/// Length of `device` in bytes.
#[must_use]
pub fn length(device: &Device) -> u64 {
    device.info().sectors * SECTOR
}

/// Reads up to `count` bytes from byte `offset` on; fewer at the end of the device.
///
/// # Errors
/// The device's.
pub fn read(device: &Device, offset: u64, count: usize) -> Result<Vec<u8>, Failure> {
    let end = offset.saturating_add(count as u64).min(length(device));
    if offset >= end {
        return Ok(Vec::new());
    }
    let first = offset / SECTOR;
    let sectors = end.div_ceil(SECTOR) - first;
    let mut bytes = vec![0; to_index(sectors * SECTOR)];
    device.read_at(first, &mut bytes)?;
    bytes.truncate(to_index(end - first * SECTOR));
    bytes.drain(..to_index(offset - first * SECTOR));
    Ok(bytes)
}

/// Overwrites `count` bytes at byte `offset` with zeroes, and keeps the rest of their blocks.
///
/// # Errors
/// The device's.
pub fn erase(device: &Device, offset: u64, count: usize) -> Result<(), Failure> {
    let block = u64::from(device.info().logical_block_sectors) * SECTOR;
    let first = offset / block * block;
    let end = (offset + count as u64).next_multiple_of(block);
    let mut bytes = vec![0; to_index(end - first)];
    device.read_at(first / SECTOR, &mut bytes)?;
    bytes[to_index(offset - first)..][..count].fill(0);
    device.write_at(first / SECTOR, &bytes)?;
    Ok(())
}

/// Converts a length; all ranges here fit into memory.
fn to_index(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a range that fits in memory")
}
