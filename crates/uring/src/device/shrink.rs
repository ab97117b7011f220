//! A device that has become shorter while it was in use: a file somebody cut, a logical volume reduced.
//!
//! What was behind the new end is gone, and a file hides it: the next write behind its end makes it long again, and
//! what lies between reads as zeroes. Zeroes served as data are worse than an error, and written back they destroy
//! what the other device still has. So a device that was once seen shorter is refused everything from then on, until
//! it is opened anew.
//!
//! A file's size proves it, because nothing here changes it but a write that ends where the device ends (zeroing and
//! discarding keep it). Therefore
//! - before such a write, after each read, and after whatever promises durability (a flush, a forced write), the size
//!   is asked, which costs a system call without waiting, one for all that a turn of the ring brings;
//! - on a file system that may wait for its answer (network, FUSE) it is asked by a thread, before such a write, after
//!   each flush, and when a transfer fails: a read between the cut and the next flush may bring zeroes there;
//! - block devices hide nothing: none grows by a write, a read behind the end ends early and a write there fails. They
//!   are asked by a thread, after a read that ended early and after whatever else it did that failed; what the ring's own
//!   operations meet keeps the kernel's error, which is as final and only says less.
//!
//! Not noticed: a file that somebody else cut and made long again between two looks, or cut in the moment between a
//! look and the write to its very end.

use super::{Device, DeviceKind, limits};
use crate::prepared_op::{Action, SECTOR};
use bcached_env::IoErrorKind;
use std::sync::OnceLock;

/// The error that everything ends with once the device was seen shorter, or was seen to be gone.
#[derive(Debug, Default)]
pub(super) struct Shrunk(OnceLock<IoErrorKind>);

impl Device {
    /// Fails if the device was seen shorter, or gone, before. Asks nobody.
    pub(crate) fn check_whole(&self) -> Result<(), IoErrorKind> {
        self.shrunk.0.get().map_or(Ok(()), |kind| Err(*kind))
    }

    /// Asks for the size, and fails from now on if it has become less. A device that does not tell, or has no size at
    /// all (one that was unplugged), is left to its other errors.
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

    /// Why an operation failed that ended with `kind`: of a device that is gone the kernel's error is that of any bad one. It may
    /// be asked on the driver's thread, since sysfs waits for no device.
    pub(crate) fn reason(&self, kind: IoErrorKind) -> IoErrorKind {
        if kind.is_final() {
            return kind;
        }
        if self.presence.is_gone() {
            return *self.shrunk.0.get_or_init(|| IoErrorKind::Gone);
        }
        // A block device that has lost its medium, or its connection, is empty: then each place is behind its end, which Linux calls "no
        // space". It may come back.
        let is_empty = || limits::is_empty(self.identity());
        if kind == IoErrorKind::NoSpace && is_empty() { IoErrorKind::Unreachable } else { kind }
    }

    /// True if a write that ends at `end`, in bytes, could give a shortened file its length back: the size must be
    /// asked before.
    pub(crate) fn reaches_end(&self, end: u64) -> bool {
        self.kind == DeviceKind::File && end >= self.info().sectors * SECTOR
    }

    /// True if the success of `action` counts only on a device that is whole.
    pub(crate) fn must_be_whole(&self, action: &Action) -> bool {
        let relies = matches!(action, Action::Read { .. } | Action::Flush | Action::Write { fua: true, .. });
        relies && self.kind == DeviceKind::File
    }
}
