//! Detects a device that has become shorter while it was in use: a truncated file, a reduced
//! logical volume.
//!
//! The data behind the new end is lost, and a file hides that: the next write behind its end
//! extends it again, and the gap reads as zeroes. Zeroes served as data are worse than an error,
//! and written back they destroy what the other device still has. So once a device was seen
//! shorter, every operation on it is refused until it is opened anew.
//!
//! A file's size proves it, because nothing here changes it but a write that ends where the device
//! ends (zeroing and discarding keep it). Therefore:
//! - The size is checked before such a write, after each read, and after an operation that promises
//!   durability (a flush, a forced write). This costs one system call that does not block, for all
//!   completions of one turn of the ring.
//! - On a file system that may block on that call (network, FUSE), a thread checks it: before such
//!   a write, after each flush, and when a transfer fails. A read between the truncation and the
//!   next flush may return zeroes there.
//! - Block devices hide nothing: none grows by a write, a read behind the end is short, and a write
//!   there fails. A thread checks their size after a short read, and after any other operation it
//!   did that failed. For the ring's own operations the kernel's error is kept, which is as final
//!   and only says less.
//!
//! Not detected: a file that was truncated and extended again by others between two checks, or
//! truncated between a check and the write to its very end.

use super::{Device, DeviceKind, limits};
use crate::prepared_op::{Action, SECTOR};
use bcached_env::IoErrorKind;
use std::sync::OnceLock;

/// The error that every operation ends with once the device was seen shorter, or gone.
#[derive(Debug, Default)]
pub(super) struct ShrinkLatch(OnceLock<IoErrorKind>);

impl Device {
    /// Fails if the device was seen shorter, or gone, before (invariant D45). Makes no system call.
    pub(crate) fn check_whole(&self) -> Result<(), IoErrorKind> {
        self.shrunk.0.get().map_or(Ok(()), |kind| Err(*kind))
    }

    /// Checks the size, and fails from now on if it has become less. A device that does not report
    /// a size, or has none at all (it was unplugged), is left to its other errors.
    pub(crate) fn look_whole(&self) -> Result<(), IoErrorKind> {
        self.check_whole()?;
        let expected = self.info().sectors;
        match limits::size(&self.file, self.kind) {
            Ok(bytes) if bytes / SECTOR < expected && (bytes > 0 || self.kind == DeviceKind::File) => {
                Err(*self.shrunk.0.get_or_init(|| IoErrorKind::Shrunk { expected, found: bytes / SECTOR }))
            }
            _ => Ok(()),
        }
    }

    /// Returns why an operation that ended with `kind` failed: for a device that is gone, the
    /// kernel's error is that of any failing one. May be called on the driver's thread, since sysfs
    /// waits for no device.
    pub(crate) fn reason(&self, kind: IoErrorKind) -> IoErrorKind {
        if kind.is_final() {
            return kind;
        }
        if self.presence.is_gone() {
            return *self.shrunk.0.get_or_init(|| IoErrorKind::Gone);
        }
        // A block device that has lost its medium, or its connection, is empty. Every sector is
        // then behind its end, which Linux reports as "no space". It may come back.
        let is_empty = || limits::is_empty(self.identity());
        if kind == IoErrorKind::NoSpace && is_empty() { IoErrorKind::Unreachable } else { kind }
    }

    /// Returns true if a write that ends at `end`, in bytes, could restore the length of a
    /// truncated file: the size must be checked before (invariant D45).
    pub(crate) fn reaches_end(&self, end: u64) -> bool {
        self.kind == DeviceKind::File && end >= self.info().sectors * SECTOR
    }

    /// Returns true if the success of `action` counts only on a device that is whole.
    pub(crate) fn must_be_whole(&self, action: &Action) -> bool {
        let relies = matches!(action, Action::Read { .. } | Action::Flush | Action::Write { fua: true, .. });
        relies && self.kind == DeviceKind::File
    }
}
