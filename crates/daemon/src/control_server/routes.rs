//! The HTTP routes of the control socket and of the read-only socket, and how answers and refusals
//! become HTTP.

use super::admission::{ApiRequest, RequestPermits, admit};
use super::listener::ReplaceableListener;
use super::metrics;
use super::server::Handlers;
use crate::log;
use axum::body::Bytes;
use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Path, Request};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use axum::serve::IncomingStream;
use axum::{Json, Router};
use bcached_config::options::Scope;
use bcached_control::config_diff::ConfigDifferences;
use bcached_control::events::Events;
use bcached_control::explain::ExplainReport;
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{JobList, JobReport, JobSpec};
use bcached_control::names::TypedName;
use bcached_control::options::{OptionChange, OptionChangeReport, Options};
use bcached_control::status::Status;
use bcached_control::stop::{StopReport, StopRequest};
use bcached_control::take_over::{TakeOverReport, TakeOverRequest};
use bcached_control::{REQUEST_BYTES_MAX, too_long};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;

/// The body that was sent, or why it could not be received.
type ReceivedBody = Result<Bytes, BytesRejection>;

/// The client.
#[derive(Clone, Copy)]
pub struct Peer {
    /// Its user, if the system reports it.
    pub uid: Option<u32>,
}

impl Connected<IncomingStream<'_, ReplaceableListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, ReplaceableListener>) -> Self {
        Self { uid: stream.io().peer_cred().ok().map(|peer| peer.uid()) }
    }
}

#[derive(Serialize)]
struct ResponseBody<T> {
    schema: &'static str,
    schema_version: u32,
    bcached: &'static str,
    #[serde(flatten)]
    value: T,
}

/// A value with a schema.
trait ResponseSchema: Serialize + Send + 'static {
    const SCHEMA: &'static str;
}

impl ResponseSchema for Status {
    const SCHEMA: &'static str = "bcached.status";
}

impl ResponseSchema for Options {
    const SCHEMA: &'static str = "bcached.options";
}

impl ResponseSchema for JobReport {
    const SCHEMA: &'static str = "bcached.job";
}

impl ResponseSchema for JobList {
    const SCHEMA: &'static str = "bcached.jobs";
}

impl ResponseSchema for OptionChangeReport {
    const SCHEMA: &'static str = "bcached.change";
}

impl ResponseSchema for ConfigDifferences {
    const SCHEMA: &'static str = "bcached.config-diff";
}

impl ResponseSchema for ExplainReport {
    const SCHEMA: &'static str = "bcached.explain";
}

impl ResponseSchema for Events {
    const SCHEMA: &'static str = "bcached.events";
}

impl ResponseSchema for StopReport {
    const SCHEMA: &'static str = "bcached.stop";
}

impl ResponseSchema for TakeOverReport {
    const SCHEMA: &'static str = "bcached.take-over";
}

/// The routes that are the same on both sockets.
fn alike() -> Router<Arc<Handlers>> {
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/metrics", get(metrics::control))
        .route("/v1/volumes/{name}/explain", get(explain))
        .route("/v1/events", get(events))
}

/// The routes of the read-only socket. They change nothing, and include neither the contents of
/// configuration files nor the wait for the end of the daemon.
pub fn to_look(handlers: Arc<Handlers>) -> Router {
    alike()
        .route("/v1/volumes/{name}/options", options_to_look(Scope::Volume))
        .route("/v1/caches/{name}/options", options_to_look(Scope::Cache))
        .route("/v1/jobs", get(jobs))
        .route("/v1/jobs/{number}", get(job))
        .fallback(only_to_look)
        .method_not_allowed_fallback(only_to_look)
        .layer(from_fn_with_state(RequestPermits::new(), admit))
        .layer(from_fn(after_its_lines))
        .layer(DefaultBodyLimit::max(REQUEST_BYTES_MAX))
        .with_state(handlers)
}

async fn only_to_look(method: Method, uri: Uri) -> Response {
    let next = "use the control socket, as the user that runs the daemon";
    let failure = if method == Method::GET || method == Method::HEAD {
        Failure::new(Kind::NotFound, format!("the read-only socket does not have {}", uri.path())).next(next)
    } else {
        Failure::new(Kind::Permission, "nothing can be changed here")
            .why("this socket is read-only")
            .next(next)
    };
    refused(&failure)
}

async fn nothing_there(method: Method, uri: Uri) -> Response {
    let what = format!("unknown request: {method} {}", uri.path());
    refused(&Failure::new(Kind::NotFound, what).next("use the commands: `bcached help` lists them"))
}

/// Delays the answer until the log's lines about it are written, unless the log's reader is stuck.
async fn after_its_lines(request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    log::settled().await;
    response
}

/// All routes, for the control socket.
pub fn router(handlers: Arc<Handlers>) -> Router {
    alike()
        .route("/v1/volumes/{name}/options", options(Scope::Volume))
        .route("/v1/caches/{name}/options", options(Scope::Cache))
        .route("/v1/jobs", get(jobs).post(begin))
        .route("/v1/jobs/{number}", get(job).delete(cancel))
        .route("/v1/config/differences", get(differences))
        .route("/v1/stop", get(stopped).post(stop))
        .route("/v1/take-over", get(taken_over).post(take_over))
        .fallback(nothing_there)
        .method_not_allowed_fallback(nothing_there)
        .layer(from_fn(after_its_lines))
        .layer(DefaultBodyLimit::max(REQUEST_BYTES_MAX))
        .with_state(handlers)
}

async fn status(asked: ApiRequest, uri: Uri) -> Response {
    if uri.query() != Some("full=true") {
        return asked.answer(|handlers| Ok((handlers.status)(None))).await;
    }
    match asked.working() {
        Ok(work) => asked.answer(move |handlers| Ok((handlers.status)(Some(work)))).await,
        Err(busy) => refused(&busy),
    }
}

/// The route that reads the options of volumes or caches.
fn options_to_look(scope: Scope) -> MethodRouter<Arc<Handlers>> {
    get(move |asked: ApiRequest, Path(name): Path<String>| {
        let looks_at_files = asked.is_owner();
        asked.answer(move |handlers| (handlers.options)(scope, TypedName { typed: &name, looks_at_files }))
    })
}

/// The route that also changes them.
fn options(scope: Scope) -> MethodRouter<Arc<Handlers>> {
    options_to_look(scope).patch(
        move |asked: ApiRequest,
              Path(name): Path<String>,
              ConnectInfo(peer): ConnectInfo<Peer>,
              body: ReceivedBody| async move { change(asked, (scope, name), peer, body).await },
    )
}

/// Parses the body of a request. `shape` tells the client what is expected.
fn understood<T: DeserializeOwned>(body: ReceivedBody, shape: &str) -> Result<T, Failure> {
    let refused = |why: String| Failure::new(Kind::Usage, "the request is invalid").why(why).next(shape);
    let body = body.map_err(|error| match error.status() {
        StatusCode::PAYLOAD_TOO_LARGE => too_long(),
        _ => refused(error.body_text()),
    })?;
    serde_json::from_slice(&body).map_err(|error| refused(error.to_string()))
}

async fn change(
    asked: ApiRequest,
    (scope, name): (Scope, String),
    peer: Peer,
    body: ReceivedBody,
) -> Response {
    const SHAPE: &str =
        "send {\"set\": {OPTION: VALUE}, \"unset\": [OPTION], \"runtime\": false, \"dry_run\": false}";
    match understood::<OptionChange>(body, SHAPE) {
        Ok(change) => asked.answer(move |handlers| (handlers.change)(scope, &name, change, peer.uid)).await,
        Err(failure) => refused(&failure),
    }
}

async fn jobs(asked: ApiRequest) -> Response {
    asked.answer(move |handlers| (handlers.jobs)()).await
}

async fn job(asked: ApiRequest, Path(number): Path<String>) -> Response {
    asked.answer(move |handlers| (handlers.job)(number_of(&number)?)).await
}

async fn cancel(
    asked: ApiRequest,
    Path(number): Path<String>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    uri: Uri,
) -> Response {
    let is_dry_run = uri.query() == Some("dry_run=true");
    asked.answer(move |handlers| (handlers.cancel)(number_of(&number)?, is_dry_run, peer.uid)).await
}

fn number_of(typed: &str) -> Result<u64, Failure> {
    typed.parse().map_err(|_| {
        Failure::new(Kind::Usage, format!("`{typed}` is not the number of a job"))
            .next("`bcached status` shows the running jobs")
    })
}

async fn begin(asked: ApiRequest, ConnectInfo(peer): ConnectInfo<Peer>, body: ReceivedBody) -> Response {
    const SHAPE: &str = "send {\"verb\": \"flush\", \"detach\", \"attach\", \"add\", \"remove\", \"stop\", \"forget\", \"grow\", \"shrink\", \"replace\", \"release\" or \"import\", \"volume\": NAME, \"with\": DEV, \"backing\": DEV, \"cache\": NAME, \"size_bytes\": N, \"accept_loss_bytes\": N, \"lost_ranges\": FILE, \"dry_run\": false}";
    match understood::<JobSpec>(body, SHAPE) {
        Ok(begin) => asked.answer(move |handlers| (handlers.begin)(begin, peer.uid)).await,
        Err(failure) => refused(&failure),
    }
}

async fn explain(asked: ApiRequest, Path(volume): Path<String>, uri: Uri) -> Response {
    let offset = uri.query().and_then(|query| query.strip_prefix("offset=")?.parse().ok());
    let Some(offset) = offset else {
        return refused(&Failure::new(Kind::Usage, "the offset is missing").next("send `?offset=BYTES`"));
    };
    match asked.working() {
        Ok(work) => {
            let looks_at_files = asked.is_owner();
            let explain = move |handlers: &Handlers| {
                (handlers.explain)(TypedName { typed: &volume, looks_at_files }, offset, work)
            };
            asked.answer(explain).await
        }
        Err(busy) => refused(&busy),
    }
}

async fn differences(asked: ApiRequest) -> Response {
    asked.answer(move |handlers| (handlers.differences)()).await
}

async fn events(mut asked: ApiRequest, uri: Uri) -> Response {
    let query = uri.query().unwrap_or_default();
    let parts = || query.split('&').filter_map(|part| part.split_once('='));
    let after = parts().find(|(name, _)| *name == "after").map_or(Ok(0), |(_, typed)| typed.parse());
    let waits = parts().any(|part| part == ("wait", "true"));
    match after {
        // A client that may not wait is answered at once, and asks again.
        Ok(after) => {
            let waits = waits && asked.may_wait();
            asked.answer(move |handlers| (handlers.events)(after, waits)).await
        }
        Err(_) => refused(
            &Failure::new(Kind::Usage, "`after` is not a number").next("send the `sequence` of an event"),
        ),
    }
}

async fn stop(asked: ApiRequest, ConnectInfo(peer): ConnectInfo<Peer>, body: ReceivedBody) -> Response {
    match understood::<StopRequest>(body, "send {\"dry_run\": false}") {
        Ok(stop) => asked.answer(move |handlers| (handlers.stop)(stop, peer.uid)).await,
        Err(failure) => refused(&failure),
    }
}

async fn stopped(asked: ApiRequest) -> Response {
    asked.answer(move |handlers| (handlers.stopped)()).await
}

async fn take_over(asked: ApiRequest, ConnectInfo(peer): ConnectInfo<Peer>, body: ReceivedBody) -> Response {
    match understood::<TakeOverRequest>(body, "send {\"program\": PATH, \"dry_run\": false}") {
        Ok(take_over) => {
            asked.whenever().answer(move |handlers| (handlers.take_over)(take_over, peer.uid)).await
        }
        Err(failure) => refused(&failure),
    }
}

async fn taken_over(asked: ApiRequest) -> Response {
    asked.answer(move |handlers| (handlers.taken_over)()).await
}

impl ApiRequest {
    /// Answers with what the handlers return, with its schema, or with their refusal.
    async fn answer<T: ResponseSchema, F>(self, ask: F) -> Response
    where
        F: FnOnce(&Handlers) -> Result<T, Failure> + Send + 'static,
    {
        let awaited = self.awaited();
        match self.beside(move |handlers| awaited.check().and_then(|()| ask(handlers))).await {
            Some(Ok(value)) => Json(ResponseBody {
                schema: T::SCHEMA,
                schema_version: 1,
                bcached: env!("CARGO_PKG_VERSION"),
                value,
            })
            .into_response(),
            Some(Err(failure)) => refused(&failure),
            None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}

pub(super) fn refused(failure: &Failure) -> Response {
    let mut response = (status_of(failure.kind), Json(failure.to_json())).into_response();
    if failure.kind == Kind::Busy {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

/// The HTTP status nearest to `kind`. The body has the exact kind.
fn status_of(kind: Kind) -> StatusCode {
    match kind {
        Kind::UnknownName | Kind::NotFound => StatusCode::NOT_FOUND,
        Kind::AmbiguousName => StatusCode::CONFLICT,
        Kind::NotInThisVersion => StatusCode::NOT_IMPLEMENTED,
        Kind::Permission => StatusCode::FORBIDDEN,
        Kind::TimeLimit => StatusCode::GATEWAY_TIMEOUT,
        Kind::NoDaemon | Kind::Busy => StatusCode::SERVICE_UNAVAILABLE,
        _ => match kind.exit() {
            2 => StatusCode::BAD_REQUEST,
            3 => StatusCode::CONFLICT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        },
    }
}
