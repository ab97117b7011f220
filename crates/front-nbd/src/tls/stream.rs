//! A connection in TLS.
//!
//! Its state is shared by the thread that receives and the one that sends, each of which has it while it decrypts or encrypts a few records, and
//! never while it waits for the socket: a peer that takes nothing does not keep us from hearing it. Only the sending half puts bytes on the wire,
//! so that records leave in the order in which they were numbered.
//!
//! **Bounded.** What came and was not read is at most a record and one piece, what is to go [`PIECE_BYTES`]; a handshake has 64 KiB for
//! its longest message, which is rustls's own limit.

use crate::peer_timeouts::Pace;
use crate::socket::{Patience, Socket};
use rustls::ServerConnection;
use std::io::{self, ErrorKind, IoSlice, Read as _, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// So much is encrypted at a time.
const PIECE_BYTES: usize = 64 << 10;
/// So much is received at a time: about a record.
const RECEIVED_BYTES: usize = 16 << 10;

struct Session {
    socket: Arc<Socket>,
    connection: Mutex<ServerConnection>,
}

/// What comes.
pub(crate) struct Receiving {
    session: Arc<Session>,
    /// What has come and was not decrypted is `buffer[start..end]`.
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

/// What goes.
pub(crate) struct Sending {
    session: Arc<Session>,
}

/// Until both sides know whom they speak to.
pub(super) fn begin(
    mut connection: ServerConnection,
    socket: &Arc<Socket>,
    deadline: Instant,
) -> io::Result<(Receiving, Sending)> {
    let patience = Patience::Deadline(deadline);
    connection.set_buffer_limit(Some(PIECE_BYTES));
    let mut buffer = vec![0; RECEIVED_BYTES].into_boxed_slice();
    let (mut start, mut end) = (0, 0);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        send_records(&mut connection, socket, left)?;
        if !connection.is_handshaking() {
            break;
        }
        // The deadline holds also for a peer that always has another piece ready.
        patience.check()?;
        if start == end {
            (start, end) = (0, socket.receive(&mut buffer, patience, None)?);
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
    let session = Arc::new(Session { socket: Arc::clone(socket), connection: Mutex::new(connection) });
    let sending = Sending { session: Arc::clone(&session) };
    Ok((Receiving { session, buffer, start, end }, sending))
}

/// Sends what the connection has to say by itself, unless the peer takes nothing for `stall`.
fn send_records(connection: &mut ServerConnection, socket: &Socket, stall: Duration) -> io::Result<()> {
    let mut records = Vec::new();
    encrypted(connection, &mut records)?;
    socket.send(&mut [IoSlice::new(&records)], stall, None)
}

/// Decrypts some of what has come; how much that was.
fn decrypt(connection: &mut ServerConnection, mut bytes: &[u8]) -> io::Result<usize> {
    let taken = connection.read_tls(&mut bytes)?;
    if taken == 0 {
        // It has said that nothing more comes.
        return Err(ErrorKind::UnexpectedEof.into());
    }
    connection.process_new_packets().map_err(super::errors::of_peer)?;
    Ok(taken)
}

/// Takes what is to go, as records.
fn encrypted(connection: &mut ServerConnection, records: &mut Vec<u8>) -> io::Result<()> {
    while connection.wants_write() {
        connection.write_tls(records)?;
    }
    Ok(())
}

impl Session {
    fn lock(&self) -> MutexGuard<'_, ServerConnection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Receiving {
    /// As [`Socket::receive`].
    pub(crate) fn receive(
        &mut self,
        into: &mut [u8],
        patience: Patience,
        mut pace: Option<&mut Pace>,
    ) -> io::Result<usize> {
        // Pieces of a record are nothing yet.
        let patience = patience.begun();
        loop {
            if let Some(read) = self.decrypted(into)? {
                return Ok(read);
            }
            patience.check()?;
            let received = self.session.socket.receive(&mut self.buffer, patience, pace.as_deref_mut())?;
            if received == 0 {
                // What is half there is noticed by who misses the rest.
                return Ok(0);
            }
            (self.start, self.end) = (0, received);
        }
    }

    /// What is here, if anything is; 0 when the peer has said that it will send no more.
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

impl Sending {
    /// As [`Socket::send`].
    pub(crate) fn send(
        &mut self,
        mut slices: &mut [IoSlice<'_>],
        stall: Duration,
        mut pace: Option<&mut Pace>,
    ) -> io::Result<()> {
        // Given back at the end: most connections are idle.
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

    /// Says that nothing more comes, or what was wrong with what came.
    pub(crate) fn say_goodbye(&mut self) {
        let mut connection = self.session.lock();
        connection.send_close_notify();
        let _takes_none = send_records(&mut connection, &self.session.socket, Duration::ZERO);
    }
}
