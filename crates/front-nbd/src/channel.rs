//! The two directions of a connection, each used by one thread: plain, or in TLS once that was
//! negotiated. A plain direction is the socket itself.

use crate::peer_timeouts::PeerPace;
use crate::socket::{ReceiveTimeout, Socket};
use crate::tls;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::Duration;

/// The receiving direction.
pub(crate) enum ReceiveChannel {
    Plain(Arc<Socket>),
    Tls(tls::TlsReceiver),
}

/// The sending direction.
pub(crate) enum SendChannel {
    Plain(Arc<Socket>),
    Tls(tls::TlsSender),
}

impl ReceiveChannel {
    /// The socket, if the connection is plain.
    pub(crate) fn plain(&self) -> Option<&Socket> {
        match self {
            Self::Plain(socket) => Some(socket),
            Self::Tls(_) => None,
        }
    }

    /// Like [`Socket::receive`].
    pub(crate) fn receive(
        &mut self,
        into: &mut [u8],
        timeout: ReceiveTimeout,
        pace: Option<&mut PeerPace>,
    ) -> io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.receive(into, timeout, pace),
            Self::Tls(receiving) => receiving.receive(into, timeout, pace),
        }
    }
}

impl SendChannel {
    /// Like [`Socket::send`].
    pub(crate) fn send(
        &mut self,
        slices: &mut [IoSlice<'_>],
        stall: Duration,
        pace: Option<&mut PeerPace>,
    ) -> io::Result<()> {
        match self {
            Self::Plain(socket) => socket.send(slices, stall, pace),
            Self::Tls(sending) => sending.send(slices, stall, pace),
        }
    }

    /// Sends one slice.
    pub(crate) fn send_slice(&mut self, bytes: &[u8], stall: Duration) -> io::Result<()> {
        self.send(&mut [IoSlice::new(bytes)], stall, None)
    }

    /// Announces the end of the stream, where the protocol has such a message, if the peer can take
    /// it immediately.
    pub(crate) fn say_goodbye(&mut self) {
        if let Self::Tls(sending) = self {
            sending.say_goodbye();
        }
    }
}
