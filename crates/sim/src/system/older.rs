//! A device is exchanged for an older copy of itself: a snapshot of the SSD that was brought back,
//! a disk out of a drawer. What can be told of it must be refused, and nothing may be written to
//! what the refusal is about.

use super::tables::superblock;
use crate::disk::Device;
use bcached_format::{BackingState, BackingSuperblock, Superblock};

/// Whether it must be noticed that `copy` stands in the place of device `which` of `now`. Both were
/// left by an orderly stop of a process, and not by the same one.
pub fn is_told(now: &[Device], copy: &Device, which: usize) -> bool {
    if which == 0 {
        // Each volume that is attached says what the cache must know of it.
        return now[1..].iter().any(|device| attached(device).is_some());
    }
    match (attached(copy), attached(&now[which])) {
        (Some(older), Some(newer)) => {
            older.uuid() == newer.uuid() && older.attachment() != newer.attachment()
        }
        _ => false,
    }
}

/// What a backing device says that is attached, and whose data in the cache is not void.
fn attached(device: &Device) -> Option<BackingSuperblock> {
    match superblock(device) {
        Some(Superblock::Backing(backing)) => {
            let is_attached = matches!(backing.state(), BackingState::Clean | BackingState::Dirty);
            (is_attached && backing.attachment().is_some()).then_some(backing)
        }
        _ => None,
    }
}
