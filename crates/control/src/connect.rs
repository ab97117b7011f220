//! Connects to a control socket without blocking. A suspended daemon accepts no connections, and
//! once its backlog is full, an ordinary connect blocks in the kernel for as long as that lasts.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Connects to the process that listens on `path`. Reads and writes on the connection block.
///
/// # Errors
/// [`Errno::AGAIN`] if the listener's backlog is full; otherwise as connect(2).
pub fn connect_now(path: &Path) -> Result<UnixStream, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &address)?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(socket.into())
}

/// Returns the path of the read-only socket that belongs to a control socket: `monitor.sock` beside
/// `control.sock`.
#[must_use]
pub fn monitor_beside(control: &Path) -> PathBuf {
    let name = control.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let name = match name.strip_suffix("control.sock") {
        Some(before) => format!("{before}monitor.sock"),
        None => format!("{name}.monitor"),
    };
    control.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_monitor_is_beside_the_control_socket() {
        let beside = |control: &str| monitor_beside(Path::new(control)).to_string_lossy().into_owned();
        assert_eq!(beside("/run/bcached/control.sock"), "/run/bcached/monitor.sock");
        assert_eq!(beside("/run/two-control.sock"), "/run/two-monitor.sock");
        assert_eq!(beside("here"), "here.monitor");
    }
}
