//! The numbers for Prometheus: on the control socket, and where the configuration says so on a TCP port of loopback, on which
//! nothing else is answered.

use super::server::Handlers;
use crate::failure::{Failure, Kind};
use crate::metrics;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

/// Under which names the numbers are told.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Names {
    /// Our own.
    Bcached,
    /// Those that node_exporter has for the kernel's bcache.
    Node,
}

/// Answers on the control socket.
pub(super) async fn control(State(handlers): State<Arc<Handlers>>, uri: Uri) -> Response {
    let is_node = uri.query() == Some("names=node");
    told(handlers, if is_node { Names::Node } else { Names::Bcached }).await
}

/// Answers on the port.
async fn port(State(handlers): State<Arc<Handlers>>) -> Response {
    told(handlers, Names::Bcached).await
}

/// Asking the engines may block for a moment; signals must not wait for that.
async fn told(handlers: Arc<Handlers>, names: Names) -> Response {
    let asked = tokio::task::spawn_blocking(move || {
        let status = (handlers.status)(false);
        match names {
            Names::Bcached => metrics::text(&status),
            Names::Node => metrics::node_text(&status),
        }
    });
    match asked.await {
        Ok(text) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Connections at once: every process of the machine may open some, and descriptors are for volumes first.
const CONNECTIONS_MAX: usize = 16;

/// How long a connection may last. Whoever says nothing must not keep its place; who reads on comes again.
const CONNECTION_LIMIT: Duration = Duration::from_secs(120);

/// A port on which the numbers can be had.
pub struct Listener(TcpListener);

impl Listener {
    /// Binds `address`, which is on loopback.
    ///
    /// # Errors
    /// The system refuses.
    pub fn bind(address: SocketAddr) -> Result<Self, Failure> {
        let bound = TcpListener::bind(address).and_then(|listener| {
            listener.set_nonblocking(true)?;
            tracing::info!(event = "metrics", "metrics: http://{}/metrics", listener.local_addr()?);
            Ok(listener)
        });
        bound.map(Self).map_err(|error| {
            let kind = match error.kind() {
                io::ErrorKind::AddrInUse => Kind::InUse,
                io::ErrorKind::PermissionDenied => Kind::Permission,
                _ => Kind::Io,
            };
            Failure::new(kind, format!("cannot listen on {address} for metrics"))
                .why(error.to_string())
                .next("name another port in `metrics`, or leave it out")
        })
    }

    /// The same port once more.
    ///
    /// # Errors
    /// No descriptor to be had.
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Answers, as long as the process lives.
    pub(super) async fn serve(self, handlers: Arc<Handlers>) {
        let routes = Router::new().route("/metrics", get(port)).with_state(handlers);
        let served = async {
            let listener = tokio::net::TcpListener::from_std(self.0)?;
            let few = Few { listener, places: Arc::new(Semaphore::new(CONNECTIONS_MAX)) };
            axum::serve(few, routes).await
        };
        if let Err(error) = served.await {
            tracing::error!(event = "metrics-failed", "nobody answers for metrics any more: {error}");
        }
    }
}

/// A port that has only a few connections at a time; others wait to be accepted.
struct Few {
    listener: tokio::net::TcpListener,
    places: Arc<Semaphore>,
}

impl axum::serve::Listener for Few {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let place = Arc::clone(&self.places).acquire_owned().await.ok();
        let (stream, peer) = axum::serve::Listener::accept(&mut self.listener).await;
        let end = Box::pin(tokio::time::sleep(CONNECTION_LIMIT));
        (Connection { stream, end, _place: place }, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection with its place. It is read from until its end.
struct Connection {
    stream: TcpStream,
    end: Pin<Box<Sleep>>,
    _place: Option<OwnedSemaphorePermit>,
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.end.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Pin::new(&mut self.stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.end.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Pin::new(&mut self.stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
