//! Maps the kernel's error numbers to the engine's error kinds; this is the only such table.

use bcached_env::IoErrorKind;
use rustix::io::Errno;

/// Returns what `errno` means to the engine.
///
/// *Unreachable* is what a device (or its transport) reports that went away, and may heal when it
/// returns. It is kept apart from *Io*, after which the content is in doubt. `EBADF` is a write
/// through a file opened for reading.
pub(crate) const fn kind_of(errno: Errno) -> IoErrorKind {
    match errno {
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => IoErrorKind::NoSpace,
        Errno::NODEV
        | Errno::NXIO
        | Errno::SHUTDOWN
        | Errno::TIMEDOUT
        | Errno::NOLINK
        | Errno::NOTCONN
        | Errno::HOSTUNREACH
        | Errno::NETUNREACH
        | Errno::NETDOWN
        | Errno::CONNRESET
        | Errno::STALE => IoErrorKind::Unreachable,
        Errno::INVAL => IoErrorKind::Invalid,
        Errno::OPNOTSUPP | Errno::NOTTY | Errno::NOSYS | Errno::BADF => IoErrorKind::Unsupported,
        _ => IoErrorKind::Io,
    }
}

/// Returns true if the same call may succeed when repeated.
pub(crate) const fn is_transient(errno: Errno) -> bool {
    matches!(errno, Errno::INTR | Errno::AGAIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kinds_the_engine_decides_on_are_kept_apart() {
        assert_eq!(kind_of(Errno::IO), IoErrorKind::Io);
        assert_eq!(kind_of(Errno::NOSPC), IoErrorKind::NoSpace);
        for gone in [Errno::NODEV, Errno::NXIO, Errno::SHUTDOWN, Errno::TIMEDOUT] {
            assert_eq!(kind_of(gone), IoErrorKind::Unreachable, "{gone:?}");
        }
        assert_eq!(kind_of(Errno::INVAL), IoErrorKind::Invalid);
        assert_eq!(kind_of(Errno::OPNOTSUPP), IoErrorKind::Unsupported);
        // A medium error concerns the data, not the device's presence.
        assert_eq!(kind_of(Errno::NODATA), IoErrorKind::Io);
    }
}
