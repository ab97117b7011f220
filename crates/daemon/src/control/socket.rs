//! Connecting to a control socket without waiting: a daemon that is stopped accepts nobody, and once its backlog is
//! full an ordinary connect waits in the kernel for as long as that lasts.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// A connection to whoever listens on `path`. Reads and writes of it block.
///
/// # Errors
/// [`Errno::AGAIN`] if somebody listens there whose backlog is full; else as connect(2).
pub fn connect_now(path: &Path) -> Result<UnixStream, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &address)?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(socket.into())
}
