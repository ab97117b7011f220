//! A socket that has only a few connections at a time, each with an end: descriptors are for volumes first, and whoever says nothing must not
//! keep its place.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};

/// How long connections may last.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Until the first byte of it is there.
    pub(super) silent: Duration,
    /// From then on. Who reads on comes again.
    pub(super) whole: Duration,
}

/// Who asks does so at once; the longest answers wait some seconds for an event, and one that is read slowly is read for this long.
pub(super) const LIMITS: Limits = Limits { silent: Duration::from_secs(4), whole: Duration::from_secs(120) };

/// A listener of which only a few connections are open at a time; others wait to be accepted.
pub(super) struct Few<L> {
    listener: L,
    places: Arc<Semaphore>,
    limits: Limits,
}

impl<L> Few<L> {
    pub(super) fn new(listener: L, places: usize, limits: Limits) -> Self {
        Self { listener, places: Arc::new(Semaphore::new(places)), limits }
    }
}

impl<L: axum::serve::Listener> axum::serve::Listener for Few<L>
where
    L::Io: Unpin,
{
    type Io = Connection<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let place = Arc::clone(&self.places).acquire_owned().await.ok();
        let (stream, peer) = self.listener.accept().await;
        let end = Box::pin(tokio::time::sleep(self.limits.silent));
        (Connection { stream, end, speaks_until: Some(self.limits.whole), _place: place }, peer)
    }

    fn local_addr(&self) -> io::Result<L::Addr> {
        self.listener.local_addr()
    }
}

/// A connection with its place. It is read from, and written to, until its end.
pub(super) struct Connection<S> {
    stream: S,
    end: Pin<Box<Sleep>>,
    /// How long it lasts once something has been said; `None` after that.
    speaks_until: Option<Duration>,
    _place: Option<OwnedSemaphorePermit>,
}

impl<S> Connection<S> {
    /// An error after its end.
    fn goes_on(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.end.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
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
        if buffer.filled().len() > before
            && let Some(whole) = self.speaks_until.take()
        {
            self.end.as_mut().reset(Instant::now() + whole);
        }
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
        Pin::new(&mut self.stream).poll_write(context, bytes)
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
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;

    const LIMIT: Duration = Duration::from_secs(60);

    /// A socket of so many places on which nothing but 404 is answered, as long as the folder lives.
    fn socket(places: usize, limits: Limits) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::UnixListener::from_std(listener).unwrap();
                axum::serve(Few::new(listener, places, limits), Router::new()).await.unwrap();
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
        let limits = Limits { silent: Duration::from_millis(50), whole: LIMIT * 10 };
        let (_folder, path) = socket(1, limits);
        let mut silent = connected(&path);
        let mut next = connected(&path);
        next.write_all(ASK).unwrap();
        assert!(heard(&mut next).starts_with("HTTP/1.0 404"));
        assert_eq!(heard(&mut silent), "");
    }

    #[test]
    fn who_says_little_is_ended_too() {
        let limits = Limits { silent: LIMIT * 10, whole: Duration::from_millis(50) };
        let (_folder, path) = socket(1, limits);
        let mut slow = connected(&path);
        slow.write_all(&ASK[..5]).unwrap();
        assert_eq!(heard(&mut slow), "");
    }

    #[test]
    fn others_wait_for_a_place() {
        let (_folder, path) = socket(1, Limits { silent: LIMIT * 10, whole: LIMIT * 10 });
        let first = connected(&path);
        let mut next = connected(&path);
        next.write_all(ASK).unwrap();
        next.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let waits = next.read(&mut [0; 1]).unwrap_err();
        assert_eq!(waits.kind(), io::ErrorKind::WouldBlock);
        drop(first);
        next.set_read_timeout(Some(LIMIT)).unwrap();
        assert!(heard(&mut next).starts_with("HTTP/1.0 404"));
    }
}
