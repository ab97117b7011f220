//! The endpoints at which the server listens.
//!
//! **Unix sockets**, and sockets that another process has bound: see [`bcached_port::socket`].
//!
//! **TCP** without TLS has no encryption and no authentication. So an address that is not a
//! loopback one is refused in that case, unless it is explicitly allowed.

use crate::handoff::HandoffSocket;
use bcached_port::socket::inherited::{self, Purpose};
use bcached_port::socket::{self, ListenAddress, PassedSocket, SocketError, SocketOwner};
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use thiserror::Error;

/// A place to listen at, and the rights of clients that connect there.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// The place.
    pub place: EndpointAddress,
    /// Whether every export is read-only for these clients.
    pub read_only: bool,
}

/// A place to listen at.
#[derive(Clone, Debug)]
pub enum EndpointAddress {
    /// A unix socket.
    Unix {
        /// Its path; the directory must exist.
        path: PathBuf,
        /// The group that may connect; the process's own if `None`.
        group: Option<u32>,
    },
    /// TCP, in TLS if the server has that.
    Tcp {
        /// The address; port 0 takes any free port.
        address: SocketAddr,
        /// Allows addresses other than loopback without TLS. Anyone that can reach them can read
        /// and write the volumes.
        anywhere: bool,
    },
    /// A socket on which another process has called `listen` for us. For TCP the same rules apply.
    Passed {
        /// The socket.
        socket: Arc<PassedSocket>,
        /// As for TCP.
        anywhere: bool,
    },
}

/// A place at which the server listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BoundAddress {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP address with its actual port.
    Tcp(SocketAddr),
}

/// Why the server cannot listen at a place.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ListenError {
    /// A TCP address beyond this machine was not allowed.
    #[error("{0} is not a loopback address, and NBD without TLS is open to every client that reaches it")]
    NotLoopback(SocketAddr),
    /// Another server listens at that address.
    #[error("{0} is in use by another server")]
    InUse(SocketAddr),
    /// The socket was passed by another process, which alone can bind it again.
    #[error("another process, such as systemd, has bound this socket: restart the socket there")]
    Foreign,
    /// A unix socket could not be bound.
    #[error(transparent)]
    Unix(#[from] SocketError),
    /// The system refused a TCP address.
    #[error("cannot listen on {address}: cannot {step}")]
    System {
        /// The address.
        address: SocketAddr,
        /// The step that failed.
        step: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

/// A listening socket. Dropping it removes a unix socket's file.
pub(crate) struct EndpointListener {
    pub(crate) bound: BoundAddress,
    pub(crate) read_only: bool,
    socket: ListenerSocket,
}

enum ListenerSocket {
    Unix(socket::SocketListener),
    Tcp(TcpListener),
    Passed(Arc<PassedSocket>),
}

impl Endpoint {
    /// Whether this process binds it.
    pub(crate) const fn is_ours(&self) -> bool {
        !matches!(self.place, EndpointAddress::Passed { .. })
    }

    /// Listens at the endpoint. `encrypted` says that TCP is in TLS.
    pub(crate) fn listen(&self, encrypted: bool) -> Result<EndpointListener, ListenError> {
        let (bound, socket) = match &self.place {
            EndpointAddress::Unix { path, group } => (
                BoundAddress::Unix(path.clone()),
                ListenerSocket::Unix(socket::SocketListener::on(path, *group)?),
            ),
            EndpointAddress::Tcp { address, anywhere } => listen_tcp(*address, encrypted || *anywhere)?,
            EndpointAddress::Passed { socket, anywhere } => {
                let bound = match socket.at() {
                    ListenAddress::Unix(path) => BoundAddress::Unix(path.clone()),
                    ListenAddress::Tcp(address) => {
                        BoundAddress::Tcp(reachable(*address, encrypted || *anywhere)?)
                    }
                };
                (bound, ListenerSocket::Passed(Arc::clone(socket)))
            }
        };
        Ok(EndpointListener { bound, read_only: self.read_only, socket })
    }
}

impl EndpointListener {
    /// Hands over the socket to the next server.
    pub(crate) fn leave(self) -> io::Result<HandoffSocket> {
        let (socket, whose) = match self.socket {
            ListenerSocket::Unix(socket) => socket.leave(),
            ListenerSocket::Tcp(listener) => (listener.into(), SocketOwner::Ours(None)),
            ListenerSocket::Passed(socket) => (socket.as_fd().try_clone_to_owned()?, SocketOwner::Foreign),
        };
        Ok(HandoffSocket { socket, bound: self.bound, whose })
    }
}

impl From<EndpointAddress> for Endpoint {
    fn from(place: EndpointAddress) -> Self {
        Self { place, read_only: false }
    }
}

/// Returns the address, if it is allowed.
fn reachable(address: SocketAddr, anywhere: bool) -> Result<SocketAddr, ListenError> {
    if anywhere || address.ip().to_canonical().is_loopback() {
        Ok(address)
    } else {
        Err(ListenError::NotLoopback(address))
    }
}

fn listen_tcp(address: SocketAddr, anywhere: bool) -> Result<(BoundAddress, ListenerSocket), ListenError> {
    let address = reachable(address, anywhere)?;
    let failed = |step| move |source| ListenError::System { address, step, source };
    let bound = || {
        TcpListener::bind(address).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => ListenError::InUse(address),
            _ => failed("bind")(error),
        })
    };
    let inherited = inherited::take_tcp(address, Purpose::Nbd);
    let listener = inherited.map_or_else(bound, |socket| Ok(socket.into()))?;
    // A connection may be gone again between the poll and the accept, which must then not block.
    listener.set_nonblocking(true).map_err(failed("make it non-blocking"))?;
    let bound = BoundAddress::Tcp(listener.local_addr().map_err(failed("get its address"))?);
    Ok((bound, ListenerSocket::Tcp(listener)))
}

impl AsFd for EndpointListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            ListenerSocket::Unix(socket) => socket.as_fd(),
            ListenerSocket::Tcp(listener) => listener.as_fd(),
            ListenerSocket::Passed(socket) => socket.as_fd(),
        }
    }
}

impl fmt::Display for BoundAddress {
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

    fn tcp(address: &str, anywhere: bool) -> Endpoint {
        EndpointAddress::Tcp { address: address.parse().unwrap(), anywhere }.into()
    }

    #[test]
    fn tcp_is_for_this_machine_unless_said_otherwise() {
        for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"] {
            let listening = tcp(address, false).listen(false);
            assert!(matches!(listening, Err(ListenError::NotLoopback(_))), "{address}");
        }
        for (anywhere, encrypted) in [(true, false), (false, true)] {
            assert!(tcp("0.0.0.0:0", anywhere).listen(encrypted).is_ok(), "it was said");
        }
        let listening = tcp("127.0.0.1:0", false).listen(false).unwrap();
        let BoundAddress::Tcp(bound) = listening.bound else { panic!("TCP") };
        assert_ne!(bound.port(), 0);
        let again = tcp(&bound.to_string(), false);
        assert!(matches!(again.listen(false), Err(ListenError::InUse(_))));
    }
}
