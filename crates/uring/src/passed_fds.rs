//! Takes over descriptors that the parent, such as a service manager, has opened for this process
//! (sd_listen_fds(3), socket activation). In a file of its own because they are known by number
//! only.
#![allow(unsafe_code, reason = "a descriptor is taken over by its number, once")]

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Returns the descriptors passed to this process, with their names; those passed to another
/// process are ignored. Must be called before anything is opened. Later calls return none.
///
/// # Errors
/// The environment variables are inconsistent, or one of the descriptors is not open.
pub fn descriptors() -> io::Result<Vec<(String, OwnedFd)>> {
    static ARE_TAKEN: AtomicBool = AtomicBool::new(false);
    if ARE_TAKEN.swap(true, Ordering::SeqCst) {
        return Ok(Vec::new());
    }
    // Descriptors for another process may come with names, which do not match a count of zero.
    if sd_notify::listen_fds()?.len() == 0 {
        return Ok(Vec::new());
    }
    let named = sd_notify::listen_fds_with_names()?;
    Ok(named
        .map(|(number, name)| {
            // SAFETY: LISTEN_PID says that this descriptor was opened for this process. It is known
            // to be open: its flags were just set. Nothing else here owns its number, since nothing
            // was opened before, and it is taken over once.
            (name, unsafe { OwnedFd::from_raw_fd(number) })
        })
        .collect())
}
