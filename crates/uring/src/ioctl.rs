//! System calls that no crate wraps safely.
#![allow(unsafe_code, reason = "BLKDISCARD and open-file-description locks have no safe wrapper")]

use rustix::fd::{AsFd, AsRawFd};
use rustix::io::Errno;
use rustix::ioctl::{Setter, opcode};

/// `BLKDISCARD` of `linux/fs.h`: number 119 of group 0x12. Its code encodes neither size nor
/// direction.
const BLKDISCARD: rustix::ioctl::Opcode = opcode::none(0x12, 119);

/// Discards a byte range of a block device opened for writing.
pub(crate) fn discard(device: impl AsFd, offset: u64, length: u64) -> Result<(), Errno> {
    // SAFETY: `BLKDISCARD` reads two `u64`, start and length, from its argument and writes nothing.
    // On a descriptor that is not a block device, the kernel refuses the request.
    unsafe { rustix::ioctl::ioctl(device, Setter::<BLKDISCARD, [u64; 2]>::new([offset, length])) }
}

/// Whether a lock is shared or exclusive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LockMode {
    /// Shared with other readers.
    Shared,
    /// Exclusive.
    Exclusive,
}

/// Which byte range of a file a lock covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum LockRange {
    /// The whole file except [`LockRange::Writing`]: the claim of the file's owner.
    All,
    /// One byte behind the end of the largest possible file: the right to write.
    Writing,
}

/// Offset of the byte that represents the right to write.
const WRITING_AT: libc::off_t = libc::off_t::MAX - 1;

/// Locks a part of `file` for as long as this open file description lives. Never waits: fails with
/// `EAGAIN` if another description, in this or another process, holds a conflicting lock.
pub(crate) fn lock(file: impl AsFd, lock: LockMode, part: LockRange) -> Result<(), Errno> {
    let kind = match lock {
        LockMode::Shared => libc::F_RDLCK,
        LockMode::Exclusive => libc::F_WRLCK,
    };
    set_lock(file, kind, part)
}

/// Releases this description's lock on that part.
pub(crate) fn unlock(file: impl AsFd, part: LockRange) -> Result<(), Errno> {
    set_lock(file, libc::F_UNLCK, part)
}

fn set_lock(file: impl AsFd, kind: libc::c_int, part: LockRange) -> Result<(), Errno> {
    // SAFETY: `flock` is a plain C struct for which all zeroes are a valid value.
    let mut range: libc::flock = unsafe { core::mem::zeroed() };
    range.l_type = i16::try_from(kind).expect("lock types are small numbers");
    range.l_whence = i16::try_from(libc::SEEK_SET).expect("SEEK_SET is zero");
    (range.l_start, range.l_len) = match part {
        LockRange::All => (0, WRITING_AT),
        LockRange::Writing => (WRITING_AT, 1),
    };
    // SAFETY: the descriptor is open for the duration of the call (`AsFd`), and `F_OFD_SETLK` reads
    // one `flock`, which lives on this stack frame. The kernel requires a process id of 0.
    let result = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
    if result == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
}
