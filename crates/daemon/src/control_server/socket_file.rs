//! A listening socket with a file, which has its final mode from the first moment.

use bcached_control::connect::connect_now;
use bcached_control::failure::{Failure, Kind};
use bcached_port::socket::{OwnedSocketFile, PassedSocket, SocketFile, SocketOwner, inherited};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 16;

/// A bound socket. On drop it removes its file, unless another process's file has taken its place.
pub struct BoundSocket {
    file: OwnedSocketFile,
    /// The listening socket.
    pub listener: UnixListener,
}

impl BoundSocket {
    /// Adopts a socket that another process has bound, with its file.
    pub fn passed(socket: PassedSocket) -> Self {
        // The process that bound the socket chose its backlog, which is not known here.
        answers_from_now_on(&socket, i32::MAX);
        let path = PathBuf::from(socket.at().to_string());
        Self { file: OwnedSocketFile::somebody_elses(path), listener: OwnedFd::from(socket).into() }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Binds `path` with `mode`, and creates its folder if that is missing.
    ///
    /// # Errors
    /// A daemon answers there already, or the system refuses.
    pub fn bind(path: &Path, mode: Mode) -> Result<Self, Failure> {
        let cannot = |error: &io::Error| Self::cannot(path, error);
        // Checked before anything is created for a path that no socket can have.
        SocketAddrUnix::new(path).map_err(|error| cannot(&error.into()))?;
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            match std::fs::create_dir(folder) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(cannot(&error)),
                _ => {}
            }
        }
        if let Some((socket, identity)) = inherited::take_unix(path) {
            answers_from_now_on(&socket, BACKLOG);
            return Ok(Self { file: OwnedSocketFile::inherited(path, identity), listener: socket.into() });
        }
        remove_stale(path)?;
        Self::listen(path, mode).map_err(|error| cannot(&error))
    }

    /// Why `path` cannot be listened on.
    pub fn cannot(path: &Path, error: &io::Error) -> Failure {
        let kind = if error.kind() == io::ErrorKind::PermissionDenied { Kind::Permission } else { Kind::Io };
        Failure::new(kind, format!("cannot listen on {}", path.display()))
            .why(error.to_string())
            .next("name another socket with --control")
    }

    /// Binds a replacement at the same path, after its file was removed.
    ///
    /// # Errors
    /// As of [`BoundSocket::bind`], and if another process had bound it.
    pub fn again(&self, mode: Mode) -> Result<Self, Failure> {
        if self.file.is_somebody_elses() {
            let failure = Failure::new(Kind::Usage, format!("cannot listen on {}", self.path().display()));
            return Err(failure
                .why("another process, such as systemd, has bound this socket")
                .next("restart the socket there"));
        }
        Self::bind(self.path(), mode)
    }

    /// Returns the socket and which process has bound it, for the next process to listen. The file
    /// stays.
    pub fn leave(mut self) -> (OwnedFd, SocketOwner) {
        let whose = self.file.leave();
        (self.listener.into(), whose)
    }

    /// The file that bind creates takes its mode from the socket, so it is never open to other
    /// users. The bits that the umask has cleared are restored before any connection is accepted.
    fn listen(path: &Path, mode: Mode) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::fs::fchmod(&socket, mode)?;
        rustix::net::bind(&socket, &address)?;
        let file = SocketFile::just_bound(path)?;
        let bound = Self { file: OwnedSocketFile::bound(path, &file), listener: socket.into() };
        file.set_mode(mode)?;
        rustix::net::listen(&bound.listener, BACKLOG)?;
        Ok(bound)
    }
}

/// Listens again with this backlog. Peers see the credentials of the process that listened last, so
/// they find the one to look at if the daemon does not answer.
fn answers_from_now_on(socket: &impl AsFd, backlog: i32) {
    let _as_it_was = rustix::net::listen(socket, backlog);
}

/// Removes a socket on which no process listens.
fn remove_stale(path: &Path) -> Result<(), Failure> {
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !metadata.file_type().is_socket() {
        return Err(Failure::new(Kind::Usage, format!("cannot listen on {}", path.display()))
            .why("it exists and is not a socket")
            .next("move it away, or name another socket with --control"));
    }
    match connect_now(path) {
        Err(Errno::CONNREFUSED) => {
            let _gone_already = std::fs::remove_file(path);
            Ok(())
        }
        Err(Errno::NOENT) => Ok(()),
        _ => Err(Failure::new(Kind::InUse, format!("cannot listen on {}", path.display()))
            .why("another daemon answers there")
            .next("stop it, or name another socket with --control")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A socket file that was replaced by another process is left alone. A daemon that ended late
    /// once removed the socket of its successor.
    #[test]
    fn a_socket_that_is_no_longer_ours_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.sock");
        let Ok(control) = BoundSocket::bind(&path, Mode::RUSR | Mode::WUSR) else {
            panic!("nothing is there")
        };
        std::fs::rename(&path, folder.path().join("moved.sock")).unwrap();
        let _next = UnixListener::bind(&path).unwrap();
        drop(control);
        assert!(path.exists(), "somebody else's");
    }

    #[test]
    fn nothing_is_left_of_a_path_that_is_too_long() {
        let folder = tempfile::tempdir().unwrap();
        let made = folder.path().join("run");
        let Err(failure) = BoundSocket::bind(&made.join("x".repeat(120)), Mode::RUSR | Mode::WUSR) else {
            panic!("no socket has such a path")
        };
        assert!(failure.to_string().contains("name another socket with --control"), "{failure}");
        assert!(!made.exists(), "it was made, and stayed");
    }
}
