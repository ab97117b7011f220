//! Starts a connection: it gets a number, a place in the table and a thread. Most connections
//! arrive at a listening socket; the client of the system's own kernel is handed one that needs no
//! handshake.

use crate::connection::{ClientContext, serve};
use crate::handoff::ConnectionState;
use crate::proto::handshake::{ExportOffer, transmission_flags};
use crate::server::{ClientInfo, ConnectionEndGuard, LiveConnection, NbdServer, ServerShared, ServingMode};
use crate::socket::Socket;
use crate::tls::TlsConfig;
use bcached_port::{Export, ExportError, Peer};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use thiserror::Error;

/// A new connection.
pub(crate) struct NewConnection {
    pub(crate) socket: Arc<Socket>,
    pub(crate) process: Option<Peer>,
    pub(crate) address: Option<SocketAddr>,
    /// It arrived at a read-only endpoint.
    pub(crate) read_only: bool,
    /// It must begin TLS, with this.
    pub(crate) tls: Option<TlsConfig>,
    /// It uses this export, without a handshake.
    pub(crate) export: Option<String>,
    /// The state of a connection taken over from another server.
    pub(crate) left: Option<ConnectionState>,
}

/// A connection within this process, whose client end is handed to the caller. It is ready for
/// requests; replies are simple ones.
#[derive(Debug)]
pub struct LocalConnection {
    /// The client's end.
    pub socket: OwnedFd,
    /// The volume.
    pub export: Arc<Export>,
    /// What a handshake would have reported of the server's features: NBD's transmission flags.
    pub flags: u16,
}

/// Why no connection was handed out.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LocalConnectionError {
    /// The volume is not served.
    #[error(transparent)]
    NoExport(#[from] ExportError),
    /// The system refused a thread or descriptors, or the connection limit is reached.
    #[error("cannot connect to the NBD server: {0}")]
    System(#[from] io::Error),
}

impl NbdServer {
    /// Starts a connection within this process, for the volume of the given name. It ends like any
    /// other: when its socket is closed, or the server stops.
    ///
    /// # Errors
    /// [`LocalConnectionError`]; nothing is left behind then.
    pub fn hand(&self, name: &str) -> Result<LocalConnection, LocalConnectionError> {
        let export = self.shared().exports.find(name)?;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(io::Error::from)?;
        let newcomer = NewConnection {
            socket: Arc::new(Socket::new(ours)),
            process: None,
            address: None,
            read_only: export.read_only,
            tls: None,
            export: Some(name.to_owned()),
            left: None,
        };
        if !self.shared().begin(newcomer)? {
            return Err(io::Error::other("its connection limit is reached").into());
        }
        let offer = ExportOffer { read_only: export.read_only, export, multi_conn: true };
        let flags = transmission_flags(&offer, false);
        Ok(LocalConnection { socket: theirs, export: offer.export, flags })
    }
}

impl ServerShared {
    /// Starts the connection's thread. Returns false if there is no place for the connection, which
    /// is then closed.
    pub(crate) fn begin(self: &Arc<Self>, newcomer: NewConnection) -> io::Result<bool> {
        let NewConnection { socket, process, address, read_only, tls, export, left } = newcomer;
        // Held until the connection is in the table, so that its thread finds it there.
        let mut connections = self.lock();
        if left.is_none() && !connections.make_room(self.limits.connections) {
            return Ok(false);
        }
        let number = connections.next;
        let peer = process.unwrap_or(Peer::Connection(number));
        let mut client = ClientInfo {
            number,
            peer: address.map_or_else(|| peer.to_string(), |address| address.to_string()),
            export: None,
            writing: false,
            read_only,
            tls: tls.is_some(),
        };
        let caller = ClientContext { number, peer, read_only, tls, export };
        let resumed = left.map(|left| left.resumed(&self.exports, &caller)).transpose();
        let resumed = resumed.map_err(io::Error::other)?;
        if let Some(resumed) = &resumed {
            let ExportOffer { export, read_only, .. } = &resumed.session.agreed().offer;
            (client.export, client.read_only) = (Some(export.name.clone()), *read_only);
            client.writing = resumed.claim.is_some();
        }
        let (shared, served) = (Arc::clone(self), Arc::clone(&socket));
        let thread = self.spawn(format!("nbd-{number}"), move || {
            // Also marks the end of a connection that panics.
            let mut ending = ConnectionEndGuard { shared: &shared, number, socket: &served, is_left: false };
            match serve(&shared, &served, &caller, resumed) {
                Ok(None) => {}
                Ok(Some(state)) => {
                    ending.is_left = true;
                    shared.leave(&served, state);
                }
                Err(broken) => shared.broke_off(number, &broken),
            }
        })?;
        connections.next += 1;
        connections.live.insert(
            number,
            LiveConnection {
                client,
                socket,
                served: ServingMode::Handshake,
                thread,
                done: false,
                cut: false,
            },
        );
        Ok(true)
    }
}
