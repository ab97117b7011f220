//! Listening sockets that another program has bound and keeps: a service manager that passes them
//! to the process that is to answer there (socket activation).

use rustix::io::Errno;
use rustix::net::sockopt::{socket_acceptconn, socket_type};
use rustix::net::{SocketAddrUnix, SocketType, getsockname};
use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use thiserror::Error;

/// A listening stream socket. Accepting from it does not block. Its file is left in place when it
/// is dropped.
#[derive(Debug)]
pub struct PassedSocket {
    fd: OwnedFd,
    at: ListenAddress,
}

/// Where a socket is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ListenAddress {
    /// A unix socket; for one without a file, its name behind an `@`.
    Unix(PathBuf),
    /// A TCP address.
    Tcp(SocketAddr),
}

/// Why no client can connect through a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum PassedSocketError {
    /// It is a file, or something else.
    #[error("it is not a socket")]
    NotSocket,
    /// A datagram socket, or one that is connected.
    #[error("it is not a listening stream socket")]
    NotStream,
    /// An unknown address family.
    #[error("it is neither a unix nor a TCP socket")]
    Family,
    /// The system refused.
    #[error("{0}")]
    System(Errno),
}

impl PassedSocket {
    /// Checks that `fd` is a listening stream socket, and makes it non-blocking.
    ///
    /// # Errors
    /// [`PassedSocketError`]; the descriptor is closed then.
    pub fn new(fd: OwnedFd) -> Result<Self, PassedSocketError> {
        let kind = socket_type(&fd).map_err(|error| match error {
            Errno::NOTSOCK => PassedSocketError::NotSocket,
            error => PassedSocketError::System(error),
        })?;
        if kind != SocketType::STREAM || !socket_acceptconn(&fd).map_err(PassedSocketError::System)? {
            return Err(PassedSocketError::NotStream);
        }
        let address = getsockname(&fd).map_err(PassedSocketError::System)?;
        let at = if let Ok(address) = SocketAddr::try_from(address.clone()) {
            ListenAddress::Tcp(address)
        } else {
            ListenAddress::Unix(path_of(
                &SocketAddrUnix::try_from(address).map_err(|_| PassedSocketError::Family)?,
            ))
        };
        rustix::io::ioctl_fionbio(&fd, true).map_err(PassedSocketError::System)?;
        Ok(Self { fd, at })
    }

    /// Returns its address.
    #[must_use]
    pub const fn at(&self) -> &ListenAddress {
        &self.at
    }
}

fn path_of(address: &SocketAddrUnix) -> PathBuf {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match (address.path_bytes(), address.abstract_name()) {
        (Some(path), _) => text(path).into(),
        (None, Some(name)) => format!("@{}", text(name)).into(),
        (None, None) => PathBuf::new(),
    }
}

impl AsFd for PassedSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<PassedSocket> for OwnedFd {
    fn from(passed: PassedSocket) -> Self {
        passed.fd
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, UdpSocket};
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn what_is_listened_on_is_taken_and_keeps_its_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let passed =
            PassedSocket::new(UnixListener::bind(&path).expect("a socket").into()).expect("it is one");
        assert_eq!(passed.at(), &ListenAddress::Unix(path.clone()));
        let nobody = rustix::net::accept(&passed).expect_err("nobody has come");
        assert_eq!(nobody, Errno::AGAIN, "and it is not waited for");
        drop(passed);
        assert!(path.exists());
        let tcp = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = tcp.local_addr().expect("it has one");
        assert_eq!(PassedSocket::new(tcp.into()).expect("it is one").at(), &ListenAddress::Tcp(address));
    }

    #[test]
    fn nothing_else_is() {
        let file = tempfile::tempfile().expect("a file");
        assert_eq!(PassedSocket::new(file.into()).expect_err("a file"), PassedSocketError::NotSocket);
        let datagrams = UdpSocket::bind("127.0.0.1:0").expect("a port");
        assert_eq!(PassedSocket::new(datagrams.into()).expect_err("no stream"), PassedSocketError::NotStream);
        let (connected, _other) = UnixStream::pair().expect("a pair");
        assert_eq!(PassedSocket::new(connected.into()).expect_err("connected"), PassedSocketError::NotStream);
    }
}
