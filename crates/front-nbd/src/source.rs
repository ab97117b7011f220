//! Reads bytes from a peer through a small buffer. Many headers and small payloads arrive with one
//! system call; large payloads bypass the buffer and go directly into their own memory.

use crate::channel::ReceiveChannel;
use crate::peer_timeouts::PeerPace;
use crate::proto::wire::OPTION_BYTES_MAX;
use crate::socket::ReceiveTimeout;
use std::io;
use std::time::Duration;

/// Enough for a thousand headers, or several small writes. Every connection has one for its
/// lifetime, even if idle.
const BUFFER_BYTES: usize = 32 << 10;

const _: () = assert!(BUFFER_BYTES >= OPTION_BYTES_MAX as usize, "an option fits");

/// The outcome of a look at the socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReadOutcome {
    /// Some bytes, which did not fill the buffer: later data will be signalled.
    Drained,
    /// Some bytes, and maybe there are more.
    More,
    /// Nothing at present.
    Empty,
    /// The end, an error, or no room for more: a read with a timeout finds out which.
    Other,
}

pub(crate) struct ReadBuffer {
    receiving: ReceiveChannel,
    buffer: Box<[u8]>,
    /// Unread bytes are `buffer[start..end]`.
    start: usize,
    end: usize,
}

impl ReadBuffer {
    pub(crate) fn new(receiving: ReceiveChannel) -> Self {
        Self { receiving, buffer: vec![0; BUFFER_BYTES].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Creates a source that starts with bytes received elsewhere: at most a full buffer.
    pub(crate) fn behind(receiving: ReceiveChannel, received: &[u8]) -> Self {
        let mut source = Self::new(receiving);
        let here = received.len().min(BUFFER_BYTES);
        source.buffer[..here].copy_from_slice(&received[..here]);
        source.end = here;
        source
    }

    /// Continues with another channel.
    pub(crate) fn go_over_to(&mut self, receiving: ReceiveChannel) {
        self.receiving = receiving;
    }

    /// Whether there are unread bytes in the buffer.
    pub(crate) const fn has_more(&self) -> bool {
        self.start < self.end
    }

    /// Returns the next `bytes` (at most the buffer's size), once they have arrived. `first` is the
    /// timeout for the first of them if none is here yet, `rest` for the others. Returns `None` if
    /// the peer ended before the first.
    pub(crate) fn next(
        &mut self,
        bytes: usize,
        first: ReceiveTimeout,
        rest: ReceiveTimeout,
    ) -> io::Result<Option<&[u8]>> {
        assert!(bytes <= self.buffer.len(), "larger reads bypass the buffer");
        if self.start + bytes > self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        while self.end - self.start < bytes {
            let timeout = if self.start == self.end { first } else { rest };
            let received = self.receiving.receive(&mut self.buffer[self.end..], timeout, None)?;
            if received == 0 {
                let ended_between = self.start == self.end;
                return if ended_between { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
            self.end += received;
        }
        let range = self.start..self.start + bytes;
        self.start += bytes;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        Ok(Some(&self.buffer[range]))
    }

    /// Whether so many bytes fit in the buffer.
    pub(crate) fn fits(&self, bytes: usize) -> bool {
        bytes <= self.buffer.len()
    }

    /// The bytes that were received and not read.
    pub(crate) fn here(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Marks the next `bytes` of the buffer as read.
    pub(crate) fn consume(&mut self, bytes: usize) {
        assert!(bytes <= self.end - self.start, "only received bytes are consumed");
        self.start += bytes;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Adds the data that the socket has now.
    pub(crate) fn look(&mut self) -> ReadOutcome {
        if self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == self.buffer.len() {
            return ReadOutcome::Other;
        }
        // Decryption is left to the connection's own thread.
        let Some(socket) = self.receiving.plain() else { return ReadOutcome::Other };
        match socket.receive_now(&mut self.buffer[self.end..]) {
            Ok(Some(0)) | Err(_) => ReadOutcome::Other,
            Ok(Some(received)) => {
                self.end += received;
                if self.end < self.buffer.len() { ReadOutcome::Drained } else { ReadOutcome::More }
            }
            Ok(None) => ReadOutcome::Empty,
        }
    }

    /// Waits, at most for `limit`, until something is available. Returns whether that is so. The
    /// end of the connection counts as something.
    pub(crate) fn await_some(&self, limit: Duration) -> bool {
        self.has_more() || self.receiving.plain().is_some_and(|socket| socket.await_some(limit))
    }

    /// Fills `into`, which holds memory until then.
    pub(crate) fn read(
        &mut self,
        into: &mut [u8],
        timeout: ReceiveTimeout,
        pace: &mut PeerPace,
    ) -> io::Result<()> {
        let here = into.len().min(self.end - self.start);
        into[..here].copy_from_slice(&self.buffer[self.start..self.start + here]);
        self.start += here;
        let mut filled = here;
        while filled < into.len() {
            timeout.check()?;
            match self.receiving.receive(&mut into[filled..], timeout, Some(pace))? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                received => filled += received,
            }
        }
        Ok(())
    }

    /// Skips `bytes`.
    pub(crate) fn skip(&mut self, bytes: u32, timeout: ReceiveTimeout) -> io::Result<()> {
        let mut left = bytes as usize;
        while left > 0 {
            if self.start == self.end {
                (self.start, self.end) = (0, 0);
                timeout.check()?;
                match self.receiving.receive(&mut self.buffer, timeout, None)? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    received => self.end = received,
                }
            }
            let step = left.min(self.end - self.start);
            self.start += step;
            left -= step;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket::Socket;
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    const FIRST: ReceiveTimeout = ReceiveTimeout::Stall(Duration::from_secs(30));

    /// Every byte that was sent is read once and in order, however it is split: by the sender into
    /// pieces, and by the reader into parts that fit the buffer, wrap around it, bypass it or are
    /// skipped.
    #[test]
    fn nothing_is_lost_or_repeated_at_the_buffers_edges() {
        let total = 10 * BUFFER_BYTES + 13;
        let byte = |at: usize| u8::try_from(at % 251).expect("below 251");
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        let writer = std::thread::spawn(move || {
            let bytes: Vec<u8> = (0..total).map(byte).collect();
            for (index, piece) in bytes.chunks(7919).enumerate() {
                sender.write_all(&piece[..piece.len().min(index + 1)]).unwrap();
                sender.write_all(&piece[piece.len().min(index + 1)..]).unwrap();
            }
        });
        let mut source = ReadBuffer::new(ReceiveChannel::Plain(Arc::new(Socket::new(receiver.into()))));
        let mut at = 0;
        let sizes = [28, 16 << 10, 1, 40_000, 28, BUFFER_BYTES, 5000, 28, 7];
        for (turn, size) in sizes.into_iter().cycle().enumerate() {
            let size = size.min(total - at);
            if size == 0 {
                break;
            }
            let mut bytes = vec![0; size];
            if turn % 4 == 3 {
                source.skip(u32::try_from(size).unwrap(), FIRST).unwrap();
                bytes = (at..at + size).map(byte).collect();
            } else if size > BUFFER_BYTES || turn % 2 == 0 {
                source.read(&mut bytes, FIRST, &mut PeerPace::unhurried()).unwrap();
            } else {
                bytes.copy_from_slice(source.next(size, FIRST, FIRST).unwrap().expect("more is to come"));
            }
            assert!(
                bytes.iter().enumerate().all(|(index, found)| *found == byte(at + index)),
                "at {at}, turn {turn}"
            );
            at += size;
        }
        writer.join().unwrap();
        assert!(source.next(1, FIRST, FIRST).unwrap().is_none(), "an end between two things is no error");
    }

    #[test]
    fn an_end_inside_a_thing_is_an_error() {
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        sender.write_all(&[1, 2, 3]).unwrap();
        drop(sender);
        let mut source = ReadBuffer::new(ReceiveChannel::Plain(Arc::new(Socket::new(receiver.into()))));
        assert_eq!(source.next(4, FIRST, FIRST).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
