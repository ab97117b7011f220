//! A listener that bounds the number of its connections and how long each may last.
//!
//! Descriptors are for volumes first, and a client that sends nothing, or sends slowly, must not
//! keep its slot: a slot is for sending one request at once and reading the answer. When all slots
//! are taken, the connection that has held its slot longest without a complete request is closed
//! for the next client.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, Sleep};

/// Time limits of connections.
#[derive(Clone, Copy)]
pub(super) struct ConnectionTimeouts {
    /// How long a client may take to send its whole request, and how long it may read nothing of an
    /// answer.
    pub(super) idle: Duration,
    /// How long a connection may last after its request. A client that needs longer connects again.
    pub(super) whole: Duration,
}

/// Clients send their request at once. The longest answers wait some seconds for an event, and an
/// answer that is read slowly may take as long as `whole`.
pub(super) const TIMEOUTS: ConnectionTimeouts =
    ConnectionTimeouts { idle: Duration::from_secs(4), whole: Duration::from_secs(120) };

/// How long a connection without a request keeps its slot although others wait: a client that sends
/// its request on connecting is always heard.
const GRACE: Duration = Duration::from_millis(250);

/// A listener that has only a few connections open at a time; further clients wait.
pub(super) struct LimitedListener<L> {
    listener: L,
    slots: Arc<ConnectionSlots>,
    timeouts: ConnectionTimeouts,
}

/// The slots and the connections that hold them.
struct ConnectionSlots {
    max: usize,
    /// In the order of their arrival.
    taken: Mutex<VecDeque<SlotHolder>>,
    /// Notified when a slot is released.
    left: Notify,
}

struct SlotHolder {
    connection: u64,
    since: Instant,
    /// Its request is complete: it keeps its slot until it has been answered.
    has_asked: bool,
    /// Tells the connection, once, to close.
    go: Option<oneshot::Sender<()>>,
}

impl<L> LimitedListener<L> {
    pub(super) fn new(listener: L, slots: usize, timeouts: ConnectionTimeouts) -> Self {
        let slots = ConnectionSlots { max: slots, taken: Mutex::default(), left: Notify::new() };
        Self { listener, slots: Arc::new(slots), timeouts }
    }
}

impl ConnectionSlots {
    fn taken(&self) -> MutexGuard<'_, VecDeque<SlotHolder>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a slot, for which another connection may have to close.
    async fn take(self: Arc<Self>) -> (SlotGuard, oneshot::Receiver<()>) {
        loop {
            match self.try_take() {
                Ok((connection, go)) => return (SlotGuard { slots: self, connection }, go),
                Err(until) => drop(tokio::time::timeout_at(until, self.left.notified()).await),
            }
        }
    }

    /// Takes a slot, or returns the time until which to wait for one. If all are taken, the
    /// connection that has been idle longest is told to close once its grace period is over.
    fn try_take(&self) -> Result<(u64, oneshot::Receiver<()>), Instant> {
        let (mut taken, now) = (self.taken(), Instant::now());
        if taken.len() < self.max {
            let connection = taken.back().map_or(0, |last| last.connection + 1);
            let (go, gone) = oneshot::channel();
            taken.push_back(SlotHolder { connection, since: now, has_asked: false, go: Some(go) });
            return Ok((connection, gone));
        }
        if let Some(oldest) = taken.iter_mut().find(|one| !one.has_asked && one.go.is_some()) {
            let due = oldest.since + GRACE;
            if due > now {
                return Err(due);
            }
            let _gone_already = oldest.go.take().map(|go| go.send(()));
        }
        Err(now + GRACE)
    }
}

/// The slot of one connection; released on drop.
struct SlotGuard {
    slots: Arc<ConnectionSlots>,
    connection: u64,
}

impl SlotGuard {
    fn has_asked(&self) {
        if let Some(one) = self.slots.taken().iter_mut().find(|one| one.connection == self.connection) {
            one.has_asked = true;
        }
    }
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        self.slots.taken().retain(|one| one.connection != self.connection);
        self.slots.left.notify_one();
    }
}

impl<L: axum::serve::Listener> axum::serve::Listener for LimitedListener<L>
where
    L::Io: Unpin,
{
    type Io = Connection<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        // A connection is closed for a slot only if a client waits for it: hence accept first.
        let (stream, peer) = self.listener.accept().await;
        let (slot, go) = Arc::clone(&self.slots).take().await;
        let end = Box::pin(tokio::time::sleep(self.timeouts.idle));
        let phase = ConnectionPhase::Receiving { go, line: LineState::First };
        (Connection { stream, timeouts: self.timeouts, end, phase, slot }, peer)
    }

    fn local_addr(&self) -> io::Result<L::Addr> {
        self.listener.local_addr()
    }
}

/// A connection with its slot. It is read and written until its time is up.
pub(super) struct Connection<S> {
    stream: S,
    timeouts: ConnectionTimeouts,
    end: Pin<Box<Sleep>>,
    phase: ConnectionPhase,
    slot: SlotGuard,
}

/// The state of a connection.
enum ConnectionPhase {
    /// The request is not complete yet: it ends with an empty line.
    Receiving { go: oneshot::Receiver<()>, line: LineState },
    /// The request is being answered, until this time at the latest.
    Answering(Instant),
    /// It has been told to close.
    Closing,
}

/// What has been received of the current line.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LineState {
    /// Nothing, and nothing of any line before it: empty lines before a request do not count.
    First,
    /// Nothing.
    Empty,
    /// At least one byte.
    NonEmpty,
}

impl<S> Connection<S> {
    /// Checks whether the connection may go on; fails once its time is up or it was told to close.
    fn goes_on(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let is_told = match &mut self.phase {
            ConnectionPhase::Receiving { go, .. } => Pin::new(go).poll(context).is_ready(),
            ConnectionPhase::Answering(_) => false,
            ConnectionPhase::Closing => true,
        };
        if is_told {
            self.phase = ConnectionPhase::Closing;
        }
        if is_told || self.end.as_mut().poll(context).is_ready() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(())
    }

    /// Looks for the end of the request in `bytes`, which the client has sent.
    fn hears(&mut self, bytes: &[u8]) {
        let ConnectionPhase::Receiving { line, .. } = &mut self.phase else { return };
        for byte in bytes {
            match byte {
                b'\n' if *line == LineState::Empty => {
                    let end = Instant::now() + self.timeouts.whole;
                    self.phase = ConnectionPhase::Answering(end);
                    self.end.as_mut().reset(end);
                    return self.slot.has_asked();
                }
                b'\n' if *line == LineState::NonEmpty => *line = LineState::Empty,
                b'\n' | b'\r' => {}
                _ => *line = LineState::NonEmpty,
            }
        }
    }

    /// Extends the time limit: part of the answer could be written.
    fn is_read(&mut self) {
        if let ConnectionPhase::Answering(end) = self.phase {
            self.end.as_mut().reset(end.min(Instant::now() + self.timeouts.idle));
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.goes_on(context)?;
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.hears(&buffer.filled()[before..]);
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.goes_on(context)?;
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        if matches!(written, Poll::Ready(Ok(_))) {
            self.is_read();
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::routing::get;
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Opens a socket with so many slots for as long as the folder exists. It answers 404 to
    /// everything, except that `/never` gets no answer and `/much` is larger than any buffer
    /// between the daemon and a client that does not read.
    fn socket(slots: usize, timeouts: ConnectionTimeouts) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::UnixListener::from_std(listener).unwrap();
                let routes = Router::new()
                    .route("/never", get(std::future::pending::<&str>))
                    .route("/much", get(async || vec![b'x'; 64 << 20]));
                axum::serve(LimitedListener::new(listener, slots, timeouts), routes).await.unwrap();
            });
        });
        (folder, path)
    }

    fn connected(path: &PathBuf) -> UnixStream {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// Reads until the connection is closed, which must happen.
    fn heard(stream: &mut UnixStream) -> String {
        let mut text = Vec::new();
        match stream.read_to_end(&mut text) {
            Err(error) if error.kind() != io::ErrorKind::ConnectionReset => panic!("{error}"),
            _ => String::from_utf8(text).unwrap(),
        }
    }

    const ASK: &[u8] = b"GET / HTTP/1.0\r\n\r\n";

    #[test]
    fn who_says_nothing_is_ended_and_its_place_given_on() {
        let timeouts = ConnectionTimeouts { idle: Duration::from_millis(50), whole: LIMIT * 10 };
        let (_folder, path) = socket(1, timeouts);
        let mut silent = connected(&path);
        let mut next = connected(&path);
        next.write_all(ASK).unwrap();
        assert!(heard(&mut next).starts_with("HTTP/1.0 404"));
        assert_eq!(heard(&mut silent), "");
    }

    /// A client that sends only part of a request loses its slot, too. One byte once kept a slot
    /// for minutes.
    #[test]
    fn who_says_little_is_ended_too() {
        let timeouts = ConnectionTimeouts { idle: Duration::from_millis(50), whole: LIMIT * 10 };
        let (_folder, path) = socket(1, timeouts);
        for said in [&ASK[..1], &ASK[..ASK.len() - 1], b"\n\n", b"\r\n\r\n\r\n"] {
            let mut slow = connected(&path);
            slow.write_all(said).unwrap();
            assert_eq!(heard(&mut slow), "");
        }
    }

    /// A client loses its slot if it does not read its answer, or if the answer takes too long.
    #[test]
    fn who_has_asked_is_ended_in_the_end() {
        let timeouts = ConnectionTimeouts { idle: Duration::from_millis(50), whole: LIMIT * 10 };
        let (_folder, path) = socket(1, timeouts);
        let mut deaf = connected(&path);
        deaf.write_all(b"GET /much HTTP/1.0\r\n\r\n").unwrap();
        let mut next = connected(&path);
        next.write_all(ASK).unwrap();
        assert!(heard(&mut next).starts_with("HTTP/1.0 404"));
        assert!(heard(&mut deaf).len() < 64 << 20);
        let (_folder, path) =
            socket(1, ConnectionTimeouts { idle: LIMIT * 10, whole: Duration::from_millis(50) });
        let mut waits = connected(&path);
        waits.write_all(b"GET /never HTTP/1.0\r\n\r\n").unwrap();
        assert_eq!(heard(&mut waits), "");
    }

    /// A connection without a request gives way to the next client. Sixteen silent connections once
    /// kept all others out for as long as they were allowed to last.
    #[test]
    fn who_has_not_asked_gives_way() {
        let (_folder, path) = socket(2, ConnectionTimeouts { idle: LIMIT * 10, whole: LIMIT * 10 });
        let mut slow = connected(&path);
        slow.write_all(&ASK[..5]).unwrap();
        let mut silent = connected(&path);
        for _ in 0..2 {
            let mut next = connected(&path);
            next.write_all(ASK).unwrap();
            assert!(heard(&mut next).starts_with("HTTP/1.0 404"));
        }
        assert_eq!(heard(&mut slow), "");
        silent.write_all(ASK).unwrap();
        assert!(heard(&mut silent).starts_with("HTTP/1.0 404"), "one was enough");
    }

    #[test]
    fn others_wait_for_a_place_of_who_has_asked() {
        let (_folder, path) = socket(1, ConnectionTimeouts { idle: LIMIT * 10, whole: LIMIT * 10 });
        let mut first = connected(&path);
        first.write_all(b"GET /never HTTP/1.0\r\n\r\n").unwrap();
        let mut next = connected(&path);
        next.write_all(ASK).unwrap();
        next.set_read_timeout(Some(3 * GRACE)).unwrap();
        let waits = next.read(&mut [0; 1]).unwrap_err();
        assert_eq!(waits.kind(), io::ErrorKind::WouldBlock);
        drop(first);
        next.set_read_timeout(Some(LIMIT)).unwrap();
        assert!(heard(&mut next).starts_with("HTTP/1.0 404"));
    }
}
