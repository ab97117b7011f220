//! Serves the metrics for Prometheus: on the control socket and, if configured, on a TCP port of
//! loopback that answers nothing else.

use super::admission::{ApiRequest, RequestPermits, admit};
use super::connection_limit::{self, LimitedListener};
use super::server::Handlers;
use crate::metrics;
use axum::Router;
use axum::http::{StatusCode, Uri, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use bcached_control::failure::{Failure, Kind};
use bcached_port::socket::inherited::{self, Purpose};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Which names the metrics have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MetricNames {
    /// Those of bcached.
    Bcached,
    /// Those of node_exporter for the kernel's bcache.
    Node,
}

/// Answers on the control socket.
pub(super) async fn control(asked: ApiRequest, uri: Uri) -> Response {
    let is_node = uri.query() == Some("names=node");
    told(asked, if is_node { MetricNames::Node } else { MetricNames::Bcached }).await
}

/// Answers on the port.
async fn port(asked: ApiRequest) -> Response {
    told(asked, MetricNames::Bcached).await
}

async fn told(asked: ApiRequest, names: MetricNames) -> Response {
    let text = asked.beside(move |handlers| {
        let status = (handlers.status)(None);
        match names {
            MetricNames::Bcached => metrics::text(&status),
            MetricNames::Node => metrics::node_text(&status),
        }
    });
    match text.await {
        Some(text) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Connections at once: every process of the machine may open some, and descriptors are for volumes
/// first.
const CONNECTIONS_MAX: usize = 16;

/// A port on which the metrics are served.
pub struct MetricsListener(TcpListener);

impl MetricsListener {
    /// Binds `address`, which is on loopback.
    ///
    /// # Errors
    /// The system refuses.
    pub fn bind(address: SocketAddr) -> Result<Self, Failure> {
        let inherited = inherited::take_tcp(address, Purpose::Metrics);
        let bound = inherited.map_or_else(|| TcpListener::bind(address), |socket| Ok(socket.into()));
        let bound = bound.and_then(|listener| {
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

    /// Duplicates the descriptor of the same port.
    ///
    /// # Errors
    /// No descriptor is available.
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Returns the socket, for the process that serves it next.
    pub(super) fn into_socket(self) -> OwnedFd {
        self.0.into()
    }

    /// Answers until `end`.
    pub(super) async fn serve(self, handlers: Arc<Handlers>, end: impl Future<Output = ()> + Send + 'static) {
        let permits = from_fn_with_state(RequestPermits::new(), admit);
        let routes = Router::new().route("/metrics", get(port)).layer(permits).with_state(handlers);
        let served = async {
            let listener = tokio::net::TcpListener::from_std(self.0)?;
            let served = axum::serve(
                LimitedListener::new(listener, CONNECTIONS_MAX, connection_limit::TIMEOUTS),
                routes,
            );
            served.with_graceful_shutdown(end).await
        };
        if let Err(error) = served.await {
            tracing::error!(event = "metrics-failed", "the metrics port failed: {error}");
        }
    }
}
