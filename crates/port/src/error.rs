//! Why a request failed, as far as clients can distinguish, and the only table of what each
//! protocol calls it.

use thiserror::Error;

/// The kinds of failure that reach a client of a volume.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A device failed, or required data is damaged or frozen.
    #[error("input/output error")]
    Io,
    /// Malformed: not whole sectors, outside the volume, or empty.
    #[error("invalid request")]
    Invalid,
    /// A write beyond the end of the volume, or the file under a device is out of space.
    #[error("no space left")]
    NoSpace,
    /// Writing is not allowed: read-only volume, or another client is writing.
    #[error("writing is not permitted")]
    NotPermitted,
    /// The volume cannot do this.
    #[error("operation not supported")]
    Unsupported,
    /// No memory for it now.
    #[error("out of memory")]
    NoMemory,
    /// The engine is stopping or gone, or the volume is no longer served. The request may or may
    /// not have been carried out.
    #[error("the volume is no longer served")]
    Gone,
    /// A device did not answer in the time allowed.
    #[error("a device did not answer in time")]
    TimedOut,
}

/// What protocols call an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ErrorCodes {
    /// Linux errno, positive (ublk, FUSE).
    pub errno: i32,
    /// Error number of the NBD protocol: a subset of Linux's; all others must be sent as `EIO` or
    /// `EINVAL`.
    pub nbd: u32,
    /// Status of virtio-blk, which has two for failures: `VIRTIO_BLK_S_IOERR` (1) and
    /// `VIRTIO_BLK_S_UNSUPP` (2).
    pub virtio: u8,
}

impl ErrorKind {
    /// Every kind, for tests and tables.
    pub const ALL: [Self; 8] = [
        Self::Io,
        Self::Invalid,
        Self::NoSpace,
        Self::NotPermitted,
        Self::Unsupported,
        Self::NoMemory,
        Self::Gone,
        Self::TimedOut,
    ];

    /// Returns the numbers of other protocols for this kind; this is the only such table.
    #[must_use]
    pub const fn codes(self) -> ErrorCodes {
        let (errno, nbd) = match self {
            Self::Io => (5, 5),            // EIO
            Self::Invalid => (22, 22),     // EINVAL
            Self::NoSpace => (28, 28),     // ENOSPC
            Self::NotPermitted => (1, 1),  // EPERM
            Self::Unsupported => (95, 95), // EOPNOTSUPP, NBD_ENOTSUP
            Self::NoMemory => (12, 12),    // ENOMEM
            Self::Gone => (108, 108),      // ESHUTDOWN
            Self::TimedOut => (110, 5),    // ETIMEDOUT, which NBD does not know
        };
        let virtio = if matches!(self, Self::Unsupported) { 2 } else { 1 };
        ErrorCodes { errno, nbd, virtio }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nbd_codes_are_those_of_the_protocol() {
        // EPERM, EIO, ENOMEM, EINVAL, ENOSPC, EOVERFLOW, ENOTSUP, ESHUTDOWN: the protocol has no
        // others.
        let protocol = [1, 5, 12, 22, 28, 75, 95, 108];
        for kind in ErrorKind::ALL {
            let codes = kind.codes();
            assert!(protocol.contains(&codes.nbd), "{kind:?}");
            assert!(codes.errno > 0, "{kind:?}");
        }
    }
}
