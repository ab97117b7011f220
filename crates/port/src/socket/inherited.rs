//! Keeps the listening sockets of the previous process for the code that listens at the same place
//! in this one. Clients that connect in between wait in the kernel and are not refused.
//!
//! Until [`settle`] is called, which means that this process continues, the previous process may
//! continue instead. So a socket that is closed here before then leaves the previous process its
//! file, with the group that it had.

use super::{FileId, ListenAddress, OwnedSocketFile, PassedSocket};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The protocol that a TCP socket serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// NBD.
    Nbd,
    /// Metrics for Prometheus.
    Metrics,
}

/// Process-wide, because the system sees sockets per process; they are found again by address.
static SOCKETS: Mutex<Vec<InheritedSocket>> = Mutex::new(Vec::new());

struct InheritedSocket {
    /// `None`: its address implies its purpose.
    purpose: Option<Purpose>,
    socket: PassedSocket,
    /// For a unix socket: its file, if that existed.
    file: Option<FileId>,
}

/// No kept socket may be needed back by the previous process.
static ARE_SETTLED: AtomicBool = AtomicBool::new(true);

/// Keeps a TCP socket for the code that will listen at its address.
pub fn keep_tcp(purpose: Purpose, socket: PassedSocket) {
    keep(InheritedSocket { purpose: Some(purpose), socket, file: None });
}

/// Keeps a unix socket for the code that will listen at its path, with the identity of its file.
pub fn keep_unix(socket: PassedSocket, file: Option<FileId>) {
    keep(InheritedSocket { purpose: None, socket, file });
}

fn keep(kept: InheritedSocket) {
    ARE_SETTLED.store(false, Ordering::Relaxed);
    sockets().push(kept);
}

/// Returns the socket kept for this path, and its file's identity.
#[must_use]
pub fn take_unix(path: &Path) -> Option<(OwnedFd, Option<FileId>)> {
    let kept = take(|_, at| matches!(at, ListenAddress::Unix(there) if there == path))?;
    Some((kept.socket.into(), kept.file))
}

/// Returns the socket kept for this address; with port 0, any for the same purpose.
#[must_use]
pub fn take_tcp(address: SocketAddr, purpose: Purpose) -> Option<OwnedFd> {
    let is_it = |there: &SocketAddr| match address.port() {
        0 => there.ip() == address.ip(),
        _ => *there == address,
    };
    let kept = take(|of, at| of == Some(purpose) && matches!(at, ListenAddress::Tcp(there) if is_it(there)))?;
    Some(kept.socket.into())
}

/// Closes the sockets that were not taken: everything that was to listen does so, and the other
/// places are abandoned.
pub fn settle() {
    ARE_SETTLED.store(true, Ordering::Relaxed);
    for InheritedSocket { socket, file, .. } in std::mem::take(&mut *sockets()) {
        if let ListenAddress::Unix(path) = socket.at() {
            drop(OwnedSocketFile::inherited(path, file));
        }
    }
}

/// Returns true if this process alone has the sockets.
pub(super) fn are_settled() -> bool {
    ARE_SETTLED.load(Ordering::Relaxed)
}

fn take(is_it: impl Fn(Option<Purpose>, &ListenAddress) -> bool) -> Option<InheritedSocket> {
    let mut sockets = sockets();
    let at = sockets.iter().position(|kept| is_it(kept.purpose, kept.socket.at()))?;
    Some(sockets.swap_remove(at))
}

fn sockets() -> MutexGuard<'static, Vec<InheritedSocket>> {
    SOCKETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serialises the tests that use these process-wide sockets.
#[cfg(test)]
pub(super) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::SocketFile;
    use std::net::TcpListener;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn a_socket_is_for_who_listens_at_its_place() {
        let _turn = turn();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        let bound = |path: &Path| {
            let socket = PassedSocket::new(UnixListener::bind(path).unwrap().into()).unwrap();
            keep_unix(socket, SocketFile::just_bound(path).unwrap().identity().ok());
        };
        bound(&path);
        let client = UnixStream::connect(&path).unwrap();
        assert!(take_unix(&folder.path().join("b.sock")).is_none());
        let taken = UnixListener::from(take_unix(&path).expect("it is there").0);
        taken.accept().expect("who came before is not turned away");
        assert!(take_unix(&path).is_none(), "it is taken once");
        drop(client);

        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        keep_tcp(Purpose::Metrics, PassedSocket::new(tcp.into()).unwrap());
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        assert!(take_tcp(any, Purpose::Nbd).is_none() && take_tcp(address, Purpose::Nbd).is_none());
        assert!(take_tcp(any, Purpose::Metrics).is_some(), "port 0 is any");

        let path = folder.path().join("c.sock");
        bound(&path);
        settle();
        assert!(!path.exists(), "nobody answers there");
    }
}
