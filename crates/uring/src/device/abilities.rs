//! What a device can do, as far as it has not refused it yet: some of that is known only once it has been tried.

use super::{Device, DeviceKind};
use std::sync::atomic::Ordering;

impl Device {
    pub(crate) fn dsync(&self) -> bool {
        self.dsync.load(Ordering::Relaxed)
    }

    pub(crate) fn refuse_dsync(&self) {
        self.dsync.store(false, Ordering::Relaxed);
    }

    /// Whether a range becomes zero without a transfer, its space kept, or given up if it may `unmap`.
    pub(crate) fn zeroes(&self, unmap: bool) -> bool {
        let known = if unmap { &self.unmap } else { &self.zero_range };
        known.load(Ordering::Relaxed)
    }

    pub(crate) fn refuse_zeroes(&self, unmap: bool) {
        if unmap {
            self.unmap.store(false, Ordering::Relaxed);
        }
        // Of a block device it is one request: where that fails the kernel would write what has to keep its space.
        if !unmap || self.kind == DeviceKind::Block {
            self.zero_range.store(false, Ordering::Relaxed);
        }
    }

    pub(crate) fn refuse_discard(&self) {
        self.discard.store(false, Ordering::Relaxed);
    }
}
