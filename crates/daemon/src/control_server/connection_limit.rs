//! A socket that has only a few connections at a time, each with an end: descriptors are for volumes first, and whoever says nothing must not
//! keep its place. Neither must who says little: a place is for asking one thing at once and reading the answer. When all are taken, the one
//! that has been held longest without a whole question is given to who comes next.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, Sleep};

/// How long connections may last.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Until the question is there as a whole; and how long an answer may not be read on.
    pub(super) idle: Duration,
    /// From the question on. Who reads on comes again.
    pub(super) whole: Duration,
}

/// Who asks does so at once; the longest answers wait some seconds for an event, and one that is read slowly is read for this long.
pub(super) const LIMITS: Limits = Limits { idle: Duration::from_secs(4), whole: Duration::from_secs(120) };

/// So long a place is left to whoever has not asked yet, also if others come: one that has come with its question is heard.
const GRACE: Duration = Duration::from_millis(250);

/// A listener of which only a few connections are open at a time; others wait.
pub(super) struct Few<L> {
    listener: L,
    places: Arc<Places>,
    limits: Limits,
}

/// Who has a place.
struct Places {
    max: usize,
    /// In the order in which they have come.
    taken: Mutex<VecDeque<Taken>>,
    /// A place has been given up.
    left: Notify,
}

struct Taken {
    connection: u64,
    since: Instant,
    /// It has asked, and keeps its place until it has been answered.
    has_asked: bool,
    /// Tells it to go, once.
    go: Option<oneshot::Sender<()>>,
}

impl<L> Few<L> {
    pub(super) fn new(listener: L, places: usize, limits: Limits) -> Self {
        let places = Places { max: places, taken: Mutex::default(), left: Notify::new() };
        Self { listener, places: Arc::new(places), limits }
    }
}

impl Places {
    fn taken(&self) -> MutexGuard<'_, VecDeque<Taken>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a place, which somebody may have to leave.
    async fn take(self: Arc<Self>) -> (Place, oneshot::Receiver<()>) {
        loop {
            match self.try_take() {
                Ok((connection, go)) => return (Place { places: self, connection }, go),
                Err(until) => drop(tokio::time::timeout_at(until, self.left.notified()).await),
            }
        }
    }

    /// A place; or until when to wait for one to be given up. Who has been idle longest is told to go, if it is time.
    fn try_take(&self) -> Result<(u64, oneshot::Receiver<()>), Instant> {
        let (mut taken, now) = (self.taken(), Instant::now());
        if taken.len() < self.max {
            let connection = taken.back().map_or(0, |last| last.connection + 1);
            let (go, gone) = oneshot::channel();
            taken.push_back(Taken { connection, since: now, has_asked: false, go: Some(go) });
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

/// Somebody's place.
struct Place {
    places: Arc<Places>,
    connection: u64,
}

impl Place {
    fn has_asked(&self) {
        if let Some(one) = self.places.taken().iter_mut().find(|one| one.connection == self.connection) {
            one.has_asked = true;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.taken().retain(|one| one.connection != self.connection);
        self.places.left.notify_one();
    }
}

impl<L: axum::serve::Listener> axum::serve::Listener for Few<L>
where
    L::Io: Unpin,
{
    type Io = Connection<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        // Nobody is sent away for a place that nobody wants.
        let (stream, peer) = self.listener.accept().await;
        let (place, go) = Arc::clone(&self.places).take().await;
        let end = Box::pin(tokio::time::sleep(self.limits.idle));
        let phase = Phase::Asks { go, line: Line::First };
        (Connection { stream, limits: self.limits, end, phase, place }, peer)
    }

    fn local_addr(&self) -> io::Result<L::Addr> {
        self.listener.local_addr()
    }
}

/// A connection with its place. It is read from, and written to, until its end.
pub(super) struct Connection<S> {
    stream: S,
    limits: Limits,
    end: Pin<Box<Sleep>>,
    phase: Phase,
    place: Place,
}

/// How far a connection is.
enum Phase {
    /// The question is not there as a whole: it ends with an empty line.
    Asks { go: oneshot::Receiver<()>, line: Line },
    /// It is answered, until then.
    IsAnswered(Instant),
    /// It has been told to go.
    Goes,
}

/// What has come of the line that is coming.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Line {
    /// Nothing, nor of any before it: empty lines before a question are none of it.
    First,
    /// Nothing.
    Empty,
    /// Something.
    Begun,
}

impl<S> Connection<S> {
    /// An error after its end.
    fn goes_on(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let is_told = match &mut self.phase {
            Phase::Asks { go, .. } => Pin::new(go).poll(context).is_ready(),
            Phase::IsAnswered(_) => false,
            Phase::Goes => true,
        };
        if is_told {
            self.phase = Phase::Goes;
        }
        if is_told || self.end.as_mut().poll(context).is_ready() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(())
    }

    /// It has said this.
    fn hears(&mut self, bytes: &[u8]) {
        let Phase::Asks { line, .. } = &mut self.phase else { return };
        for byte in bytes {
            match byte {
                b'\n' if *line == Line::Empty => {
                    let end = Instant::now() + self.limits.whole;
                    self.phase = Phase::IsAnswered(end);
                    self.end.as_mut().reset(end);
                    return self.place.has_asked();
                }
                b'\n' if *line == Line::Begun => *line = Line::Empty,
                b'\n' | b'\r' => {}
                _ => *line = Line::Begun,
            }
        }
    }

    /// Something of the answer could be written.
    fn is_read(&mut self) {
        if let Phase::IsAnswered(end) = self.phase {
            self.end.as_mut().reset(end.min(Instant::now() + self.limits.idle));
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

    /// A socket of so many places, as long as the folder lives: nothing but 404 is answered, and nothing ever to `/never`; `/much` is more
    /// than anything holds that is not read.
    fn socket(places: usize, limits: Limits) -> (tempfile::TempDir, PathBuf) {
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
                axum::serve(Few::new(listener, places, limits), routes).await.unwrap();
            });
        });
        (folder, path)
    }

    fn connected(path: &PathBuf) -> UnixStream {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// Everything that is said until the end, which must come.
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
        let limits = Limits { idle: Duration::from_millis(50), whole: LIMIT * 10 };
        let (_folder, path) = socket(1, limits);
        let mut silent = connected(&path);
        let mut next = connected(&path);
        next.write_all(ASK).unwrap();
        assert!(heard(&mut next).starts_with("HTTP/1.0 404"));
        assert_eq!(heard(&mut silent), "");
    }

    /// One byte had a place for minutes.
    #[test]
    fn who_says_little_is_ended_too() {
        let limits = Limits { idle: Duration::from_millis(50), whole: LIMIT * 10 };
        let (_folder, path) = socket(1, limits);
        for said in [&ASK[..1], &ASK[..ASK.len() - 1], b"\n\n", b"\r\n\r\n\r\n"] {
            let mut slow = connected(&path);
            slow.write_all(said).unwrap();
            assert_eq!(heard(&mut slow), "");
        }
    }

    /// Neither does one that does not read what it has asked for, or asks what takes too long.
    #[test]
    fn who_has_asked_is_ended_in_the_end() {
        let limits = Limits { idle: Duration::from_millis(50), whole: LIMIT * 10 };
        let (_folder, path) = socket(1, limits);
        let mut deaf = connected(&path);
        deaf.write_all(b"GET /much HTTP/1.0\r\n\r\n").unwrap();
        let mut next = connected(&path);
        next.write_all(ASK).unwrap();
        assert!(heard(&mut next).starts_with("HTTP/1.0 404"));
        assert!(heard(&mut deaf).len() < 64 << 20);
        let (_folder, path) = socket(1, Limits { idle: LIMIT * 10, whole: Duration::from_millis(50) });
        let mut waits = connected(&path);
        waits.write_all(b"GET /never HTTP/1.0\r\n\r\n").unwrap();
        assert_eq!(heard(&mut waits), "");
    }

    /// Sixteen who had said nothing yet kept everybody else out for as long as they might.
    #[test]
    fn who_has_not_asked_gives_way() {
        let (_folder, path) = socket(2, Limits { idle: LIMIT * 10, whole: LIMIT * 10 });
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
        let (_folder, path) = socket(1, Limits { idle: LIMIT * 10, whole: LIMIT * 10 });
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
