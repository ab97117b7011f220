//! What a device can do, as far as it has not refused it yet: some abilities are known only once
//! they are tried.

use super::{Device, DeviceKind};
use std::sync::atomic::Ordering;

impl Device {
    pub(crate) fn dsync(&self) -> bool {
        self.dsync.load(Ordering::Relaxed)
    }

    pub(crate) fn refuse_dsync(&self) {
        self.dsync.store(false, Ordering::Relaxed);
    }

    /// Returns whether a range can be zeroed without a transfer: keeping its space, or possibly
    /// giving it up if `unmap`.
    pub(crate) fn zeroes(&self, unmap: bool) -> bool {
        let known = if unmap { &self.unmap } else { &self.zero_range };
        known.load(Ordering::Relaxed)
    }

    pub(crate) fn refuse_zeroes(&self, unmap: bool) {
        if unmap {
            self.unmap.store(false, Ordering::Relaxed);
        }
        // On a block device both are one request: where that fails, the kernel would write the
        // range that has to keep its space.
        if !unmap || self.kind == DeviceKind::Block {
            self.zero_range.store(false, Ordering::Relaxed);
        }
    }

    pub(crate) fn refuse_discard(&self) {
        self.discard.store(false, Ordering::Relaxed);
    }
}
