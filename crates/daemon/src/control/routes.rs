//! What can be asked of the control socket, and how answers and refusals become HTTP. Everything that may take a moment
//! runs beside the thread, which hears signals.

use super::differences::Differences;
use super::events::Events;
use super::explain::Explained;
use super::jobs::{Begin, Job, Jobs};
use super::metrics;
use super::options::{Change, Changed, Options};
use super::server::Handlers;
use super::status::Status;
use super::stop::{Stop, Stopping};
use crate::failure::{Failure, Kind};
use crate::options::Scope;
use axum::body::Bytes;
use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use axum::serve::IncomingStream;
use axum::{Json, Router};
use serde::Serialize;
use std::sync::Arc;
use tokio::net::UnixListener;

/// Far more than a change of every option.
const REQUEST_BYTES_MAX: usize = 64 << 10;

/// Who asks.
#[derive(Clone, Copy)]
pub struct Peer {
    /// Its user, if the system says so.
    pub uid: Option<u32>,
}

impl Connected<IncomingStream<'_, UnixListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        Self { uid: stream.io().peer_cred().ok().map(|peer| peer.uid()) }
    }
}

#[derive(Serialize)]
struct Body<T> {
    schema: &'static str,
    schema_version: u32,
    bcached: &'static str,
    #[serde(flatten)]
    value: T,
}

/// A value with a schema.
trait Answer: Serialize + Send + 'static {
    const SCHEMA: &'static str;
}

impl Answer for Status {
    const SCHEMA: &'static str = "bcached.status";
}

impl Answer for Options {
    const SCHEMA: &'static str = "bcached.options";
}

impl Answer for Job {
    const SCHEMA: &'static str = "bcached.job";
}

impl Answer for Jobs {
    const SCHEMA: &'static str = "bcached.jobs";
}

impl Answer for Changed {
    const SCHEMA: &'static str = "bcached.change";
}

impl Answer for Differences {
    const SCHEMA: &'static str = "bcached.config-diff";
}

impl Answer for Explained {
    const SCHEMA: &'static str = "bcached.explain";
}

impl Answer for Events {
    const SCHEMA: &'static str = "bcached.events";
}

impl Answer for Stopping {
    const SCHEMA: &'static str = "bcached.stop";
}

/// All of them.
pub fn router(handlers: Arc<Handlers>) -> Router {
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/metrics", get(metrics::control))
        .route("/v1/volumes/{name}/options", options(Scope::Volume))
        .route("/v1/caches/{name}/options", options(Scope::Cache))
        .route("/v1/volumes/{name}/explain", get(explain))
        .route("/v1/jobs", get(jobs).post(begin))
        .route("/v1/jobs/{number}", get(job).delete(cancel))
        .route("/v1/config/differences", get(differences))
        .route("/v1/events", get(events))
        .route("/v1/stop", get(stopped).post(stop))
        .layer(DefaultBodyLimit::max(REQUEST_BYTES_MAX))
        .with_state(handlers)
}

async fn status(State(handlers): State<Arc<Handlers>>, uri: Uri) -> Response {
    let full = uri.query() == Some("full=true");
    beside(move || Ok((handlers.status)(full))).await
}

/// To look at options of such things, and to change them.
fn options(scope: Scope) -> MethodRouter<Arc<Handlers>> {
    get(move |State(handlers): State<Arc<Handlers>>, Path(name): Path<String>| {
        beside(move || (handlers.options)(scope, &name))
    })
    .patch(
        move |State(handlers): State<Arc<Handlers>>,
              Path(name): Path<String>,
              ConnectInfo(peer): ConnectInfo<Peer>,
              body: Bytes| async move { change(handlers, (scope, name), peer, &body).await },
    )
}

async fn change(
    handlers: Arc<Handlers>,
    (scope, name): (Scope, String),
    peer: Peer,
    body: &[u8],
) -> Response {
    match serde_json::from_slice::<Change>(body) {
        Ok(change) => beside(move || (handlers.change)(scope, &name, change, peer.uid)).await,
        Err(error) => refused(
            &Failure::new(Kind::Usage, "the request is not understood")
                .why(error.to_string())
                .next("send {\"set\": {OPTION: VALUE}, \"unset\": [OPTION], \"runtime\": false, \"dry_run\": false}"),
        ),
    }
}

async fn jobs(State(handlers): State<Arc<Handlers>>) -> Response {
    beside(move || (handlers.jobs)()).await
}

async fn job(State(handlers): State<Arc<Handlers>>, Path(number): Path<String>) -> Response {
    beside(move || (handlers.job)(number_of(&number)?)).await
}

async fn cancel(State(handlers): State<Arc<Handlers>>, Path(number): Path<String>) -> Response {
    beside(move || (handlers.cancel)(number_of(&number)?)).await
}

fn number_of(typed: &str) -> Result<u64, Failure> {
    typed.parse().map_err(|_| {
        Failure::new(Kind::Usage, format!("`{typed}` is not the number of a job"))
            .next("`bcached status` shows those that go on")
    })
}

async fn begin(
    State(handlers): State<Arc<Handlers>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    body: Bytes,
) -> Response {
    match serde_json::from_slice::<Begin>(&body) {
        Ok(asked) => beside(move || (handlers.begin)(asked, peer.uid)).await,
        Err(error) => refused(
            &Failure::new(Kind::Usage, "the request is not understood").why(error.to_string()).next(
                "send {\"verb\": \"flush\", \"detach\", \"attach\", \"add\", \"remove\", \"stop\", \"forget\", \"grow\", \"shrink\", \"replace\", \"release\" or \"import\", \"volume\": NAME, \"with\": DEV, \"backing\": DEV, \"cache\": NAME, \"size_bytes\": N, \"accept_loss_bytes\": N, \"lost_ranges\": FILE, \"dry_run\": false}",
            ),
        ),
    }
}

async fn explain(State(handlers): State<Arc<Handlers>>, Path(volume): Path<String>, uri: Uri) -> Response {
    let offset = uri.query().and_then(|query| query.strip_prefix("offset=")?.parse().ok());
    match offset {
        Some(offset) => beside(move || (handlers.explain)(&volume, offset)).await,
        None => refused(&Failure::new(Kind::Usage, "no offset is named").next("send `?offset=BYTES`")),
    }
}

async fn differences(State(handlers): State<Arc<Handlers>>) -> Response {
    beside(move || (handlers.differences)()).await
}

async fn events(State(handlers): State<Arc<Handlers>>, uri: Uri) -> Response {
    let query = uri.query().unwrap_or_default();
    let parts = || query.split('&').filter_map(|part| part.split_once('='));
    let after = parts().find(|(name, _)| *name == "after").map_or(Ok(0), |(_, typed)| typed.parse());
    let waits = parts().any(|part| part == ("wait", "true"));
    match after {
        Ok(after) => beside(move || (handlers.events)(after, waits)).await,
        Err(_) => refused(
            &Failure::new(Kind::Usage, "`after` is not a number").next("send the `sequence` of an event"),
        ),
    }
}

async fn stop(
    State(handlers): State<Arc<Handlers>>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    body: Bytes,
) -> Response {
    match serde_json::from_slice::<Stop>(&body) {
        Ok(asked) => beside(move || (handlers.stop)(asked, peer.uid)).await,
        Err(error) => refused(
            &Failure::new(Kind::Usage, "the request is not understood")
                .why(error.to_string())
                .next("send {\"dry_run\": false}"),
        ),
    }
}

async fn stopped(State(handlers): State<Arc<Handlers>>) -> Response {
    beside(move || (handlers.stopped)()).await
}

/// Asking the engines may block for a moment; signals must not wait for that.
async fn beside<T: Answer>(ask: impl FnOnce() -> Result<T, Failure> + Send + 'static) -> Response {
    match tokio::task::spawn_blocking(ask).await {
        Ok(Ok(value)) => {
            Json(Body { schema: T::SCHEMA, schema_version: 1, bcached: env!("CARGO_PKG_VERSION"), value })
                .into_response()
        }
        Ok(Err(failure)) => refused(&failure),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

fn refused(failure: &Failure) -> Response {
    (status_of(failure.kind), Json(failure.to_json())).into_response()
}

/// The HTTP status that says most nearly the same. The body says it exactly.
fn status_of(kind: Kind) -> StatusCode {
    match kind {
        Kind::UnknownName | Kind::NotFound => StatusCode::NOT_FOUND,
        Kind::AmbiguousName => StatusCode::CONFLICT,
        Kind::NotInThisVersion => StatusCode::NOT_IMPLEMENTED,
        Kind::Permission => StatusCode::FORBIDDEN,
        Kind::TimeLimit => StatusCode::GATEWAY_TIMEOUT,
        Kind::NoDaemon => StatusCode::SERVICE_UNAVAILABLE,
        _ => match kind.exit() {
            2 => StatusCode::BAD_REQUEST,
            3 => StatusCode::CONFLICT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        },
    }
}
