//! The credentials of a unix socket's peer. This is a file of its own because it is the one place
//! that needs `unsafe`: the available safe wrappers define a process number as never 0, but the
//! kernel reports 0 for a process in a namespace that is not visible from here.
#![allow(unsafe_code, reason = "getsockopt(SO_PEERCRED) with a process number that may be 0")]

use std::os::fd::RawFd;

/// The number of the process that connected, as of that moment. `None` if it is not visible from
/// here.
pub(crate) fn peer_pid(socket: RawFd) -> Option<u32> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = libc::socklen_t::try_from(size_of::<libc::ucred>()).ok()?;
    // SAFETY: the pointers are to live locals of the types and sizes that SO_PEERCRED fills; every
    // bit pattern is a valid `ucred`. A bad descriptor is an error, not undefined behaviour.
    let result = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut bytes,
        )
    };
    let pid = u32::try_from(credentials.pid).ok()?;
    if result == 0 && pid != 0 { Some(pid) } else { None }
}
