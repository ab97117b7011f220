//! A connection in TLS.
//!
//! Its state is shared by the receiving and the sending thread. Each holds it while it decrypts or
//! encrypts a few records, and never while it waits for the socket: a peer that does not read does
//! not keep us from receiving. Only the sending half puts bytes on the wire, so that records leave
//! in the order of their numbers.
//!
//! **Bounded.** Received and unread data is at most a record and one piece, and outgoing data at
//! most [`PIECE_BYTES`]. A handshake has 64 KiB for its longest message, which is rustls's own
//! limit.

use crate::peer_timeouts::PeerPace;
use crate::socket::{ReceiveTimeout, Socket};
use rustls::ServerConnection;
use std::io::{self, ErrorKind, IoSlice, Read as _, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How many bytes are encrypted at a time.
const PIECE_BYTES: usize = 64 << 10;
/// How many bytes are received at a time: about a record.
const RECEIVED_BYTES: usize = 16 << 10;

struct TlsSession {
    socket: Arc<Socket>,
    connection: Mutex<ServerConnection>,
}

/// The receiving direction.
pub(crate) struct TlsReceiver {
    session: Arc<TlsSession>,
    /// Received and not yet decrypted bytes are `buffer[start..end]`.
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

/// The sending direction.
pub(crate) struct TlsSender {
    session: Arc<TlsSession>,
}

/// Performs the TLS handshake.
pub(super) fn begin(
    mut connection: ServerConnection,
    socket: &Arc<Socket>,
    deadline: Instant,
) -> io::Result<(TlsReceiver, TlsSender)> {
    let timeout = ReceiveTimeout::Deadline(deadline);
    connection.set_buffer_limit(Some(PIECE_BYTES));
    let mut buffer = vec![0; RECEIVED_BYTES].into_boxed_slice();
    let (mut start, mut end) = (0, 0);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        send_records(&mut connection, socket, left)?;
        if !connection.is_handshaking() {
            break;
        }
        // The deadline also applies to a peer that keeps sending pieces.
        timeout.check()?;
        if start == end {
            (start, end) = (0, socket.receive(&mut buffer, timeout, None)?);
            if end == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        match decrypt(&mut connection, &buffer[start..end]) {
            Ok(taken) => start += taken,
            Err(error) => {
                let _takes_none = send_records(&mut connection, socket, Duration::ZERO);
                return Err(error);
            }
        }
    }
    let session = Arc::new(TlsSession { socket: Arc::clone(socket), connection: Mutex::new(connection) });
    let sending = TlsSender { session: Arc::clone(&session) };
    Ok((TlsReceiver { session, buffer, start, end }, sending))
}

/// Sends the records of the TLS layer itself, unless the peer takes nothing for `stall`.
fn send_records(connection: &mut ServerConnection, socket: &Socket, stall: Duration) -> io::Result<()> {
    let mut records = Vec::new();
    encrypted(connection, &mut records)?;
    socket.send(&mut [IoSlice::new(&records)], stall, None)
}

/// Decrypts some of the received bytes. Returns how many were taken.
fn decrypt(connection: &mut ServerConnection, mut bytes: &[u8]) -> io::Result<usize> {
    let taken = connection.read_tls(&mut bytes)?;
    if taken == 0 {
        // The peer has announced the end of its data.
        return Err(ErrorKind::UnexpectedEof.into());
    }
    connection.process_new_packets().map_err(super::errors::of_peer)?;
    Ok(taken)
}

/// Takes the outgoing data, as records.
fn encrypted(connection: &mut ServerConnection, records: &mut Vec<u8>) -> io::Result<()> {
    while connection.wants_write() {
        connection.write_tls(records)?;
    }
    Ok(())
}

impl TlsSession {
    fn lock(&self) -> MutexGuard<'_, ServerConnection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TlsReceiver {
    /// Like [`Socket::receive`].
    pub(crate) fn receive(
        &mut self,
        into: &mut [u8],
        timeout: ReceiveTimeout,
        mut pace: Option<&mut PeerPace>,
    ) -> io::Result<usize> {
        // Partial records do not count as data, so the limit runs until a whole one has arrived.
        let timeout = timeout.begun();
        loop {
            if let Some(read) = self.decrypted(into)? {
                return Ok(read);
            }
            timeout.check()?;
            let received = self.session.socket.receive(&mut self.buffer, timeout, pace.as_deref_mut())?;
            if received == 0 {
                // A truncated message is detected by the reader that misses the rest.
                return Ok(0);
            }
            (self.start, self.end) = (0, received);
        }
    }

    /// Returns decrypted data, if there is any; 0 if the peer has announced that it will send no
    /// more.
    fn decrypted(&mut self, into: &mut [u8]) -> io::Result<Option<usize>> {
        let mut connection = self.session.lock();
        loop {
            match connection.reader().read(into) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                read => return read.map(Some),
            }
            if self.start == self.end {
                return Ok(None);
            }
            self.start += decrypt(&mut connection, &self.buffer[self.start..self.end])?;
        }
    }
}

impl TlsSender {
    /// Like [`Socket::send`].
    pub(crate) fn send(
        &mut self,
        mut slices: &mut [IoSlice<'_>],
        stall: Duration,
        mut pace: Option<&mut PeerPace>,
    ) -> io::Result<()> {
        // Freed at the end, because most connections are idle.
        let mut records = Vec::new();
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            let taken = {
                let mut connection = self.session.lock();
                let taken = connection.writer().write_vectored(slices)?;
                encrypted(&mut connection, &mut records)?;
                taken
            };
            if taken == 0 && records.is_empty() {
                return Err(ErrorKind::WriteZero.into());
            }
            IoSlice::advance_slices(&mut slices, taken);
            self.session.socket.send(&mut [IoSlice::new(&records)], stall, pace.as_deref_mut())?;
            records.clear();
        }
        Ok(())
    }

    /// Announces the end of our data, or the error in the received data.
    pub(crate) fn say_goodbye(&mut self) {
        let mut connection = self.session.lock();
        connection.send_close_notify();
        let _takes_none = send_records(&mut connection, &self.session.socket, Duration::ZERO);
    }
}
