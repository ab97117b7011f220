//! Descriptors that whoever started this process has opened for it (sd_listen_fds(3)), as a service manager does with sockets. In a file of its own because
//! they are known by their numbers only.
#![allow(unsafe_code, reason = "a descriptor is taken over by its number, once")]

use std::io;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Those that were passed to this process, with their names; what was passed to another one is none of ours. To be called before anything is opened; the next
/// time there are none.
///
/// # Errors
/// What the environment says of them does not add up, or one of them is not open.
pub fn descriptors() -> io::Result<Vec<(String, OwnedFd)>> {
    static ARE_TAKEN: AtomicBool = AtomicBool::new(false);
    if ARE_TAKEN.swap(true, Ordering::SeqCst) {
        return Ok(Vec::new());
    }
    // Those of another process may have names that do not go with none.
    if sd_notify::listen_fds()?.len() == 0 {
        return Ok(Vec::new());
    }
    let named = sd_notify::listen_fds_with_names()?;
    Ok(named
        .map(|(number, name)| {
            // SAFETY: LISTEN_PID says that this descriptor was opened for this process, and that it is open is known: its flags were just set. Nobody
            // else here has its number, since nothing was opened before, and it is taken over once.
            (name, unsafe { OwnedFd::from_raw_fd(number) })
        })
        .collect())
}
