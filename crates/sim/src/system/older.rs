//! Devices that are replaced by an older copy of themselves: a restored snapshot of the SSD, or a
//! disk out of a drawer. What is detectable must be refused, and nothing may be written to what the
//! refusal concerns.

use super::tables::superblock;
use crate::disk::Device;
use bcached_format::{BackingState, BackingSuperblock, Superblock};

/// Returns whether the system must notice that `copy` is in the place of device `which` of `now`.
/// They were left by two different orderly stops of a process.
pub fn is_told(now: &[Device], copy: &Device, which: usize) -> bool {
    if which == 0 {
        // Each attached volume records what the cache must know of it.
        return now[1..].iter().any(|device| attached(device).is_some());
    }
    match (attached(copy), attached(&now[which])) {
        (Some(older), Some(newer)) => {
            older.uuid() == newer.uuid() && older.attachment() != newer.attachment()
        }
        _ => false,
    }
}

/// Returns the superblock of a backing device that is attached and whose data in the cache is not
/// void.
fn attached(device: &Device) -> Option<BackingSuperblock> {
    match superblock(device) {
        Some(Superblock::Backing(backing)) => {
            let is_attached = matches!(backing.state(), BackingState::Clean | BackingState::Dirty);
            (is_attached && backing.attachment().is_some()).then_some(backing)
        }
        _ => None,
    }
}
