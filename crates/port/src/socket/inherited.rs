//! Sockets that the process before has listened on, for who listens at the same place in this one: clients that come between the two wait
//! in the kernel, and are not turned away.
//!
//! Until [`settle`] has said that this process goes on, the other one may: whatever ends here meanwhile leaves it the files of its sockets, of
//! the group that they had.

use super::{At, Passed};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What is said by a TCP socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// NBD.
    Nbd,
    /// Numbers for Prometheus.
    Metrics,
}

/// A process has its sockets as the system sees it; they are found again by where they are.
static SOCKETS: Mutex<Vec<(Option<Purpose>, Passed)>> = Mutex::new(Vec::new());

/// Nothing that was kept may be wanted back.
static ARE_SETTLED: AtomicBool = AtomicBool::new(true);

/// Keeps a socket for whoever listens where it is; of TCP also what it is for.
pub fn keep(purpose: Option<Purpose>, socket: Passed) {
    ARE_SETTLED.store(false, Ordering::Relaxed);
    sockets().push((purpose, socket));
}

/// That at this path.
#[must_use]
pub fn take_unix(path: &Path) -> Option<OwnedFd> {
    take(|_, at| matches!(at, At::Unix(there) if there == path))
}

/// That at this address; with port 0 any for the same purpose.
#[must_use]
pub fn take_tcp(address: SocketAddr, purpose: Purpose) -> Option<OwnedFd> {
    let is_it = |there: &SocketAddr| match address.port() {
        0 => there.ip() == address.ip(),
        _ => *there == address,
    };
    take(|of, at| of == Some(purpose) && matches!(at, At::Tcp(there) if is_it(there)))
}

/// Whoever was to listen does: nobody listens at the other places any more.
pub fn settle() {
    ARE_SETTLED.store(true, Ordering::Relaxed);
    for (_, socket) in std::mem::take(&mut *sockets()) {
        if let At::Unix(path) = socket.at() {
            let _gone_already = std::fs::remove_file(path);
        }
    }
}

/// This process has the sockets for itself.
pub(super) fn are_settled() -> bool {
    ARE_SETTLED.load(Ordering::Relaxed)
}

fn take(is_it: impl Fn(Option<Purpose>, &At) -> bool) -> Option<OwnedFd> {
    let mut sockets = sockets();
    let at = sockets.iter().position(|(purpose, socket)| is_it(*purpose, socket.at()))?;
    Some(sockets.swap_remove(at).1.into())
}

fn sockets() -> MutexGuard<'static, Vec<(Option<Purpose>, Passed)>> {
    SOCKETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A process has its sockets: of the tests in it one at a time has to do with them.
#[cfg(test)]
pub(super) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn a_socket_is_for_who_listens_at_its_place() {
        let _turn = turn();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.sock");
        keep(None, Passed::new(UnixListener::bind(&path).unwrap().into()).unwrap());
        let client = UnixStream::connect(&path).unwrap();
        assert!(take_unix(&folder.path().join("b.sock")).is_none());
        let taken = UnixListener::from(take_unix(&path).expect("it is there"));
        taken.accept().expect("who came before is not turned away");
        assert!(take_unix(&path).is_none(), "it is taken once");
        drop(client);

        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        keep(Some(Purpose::Metrics), Passed::new(tcp.into()).unwrap());
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        assert!(take_tcp(any, Purpose::Nbd).is_none() && take_tcp(address, Purpose::Nbd).is_none());
        assert!(take_tcp(any, Purpose::Metrics).is_some(), "port 0 is any");

        let path = folder.path().join("c.sock");
        keep(None, Passed::new(UnixListener::bind(&path).unwrap().into()).unwrap());
        settle();
        assert!(!path.exists(), "nobody answers there");
    }
}
