//! Admission of requests on their way to the handlers.
//!
//! Everything that may take a moment runs on blocking threads, beside the control thread. A
//! read-only client needs one of a few permits for that. The permit is held until the work has
//! ended, even if the client has hung up.
//!
//! Work that an engine does beside its own has still fewer permits. They are held until the engine
//! has done the work, even if no client waits for the answer any more.

use super::server::Handlers;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, header};
use axum::middleware::Next;
use axum::response::Response;
use bcached_control::deadline::{AWAITED, boot_millis};
use bcached_control::failure::{Failure, Kind};
use std::convert::Infallible;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Requests of read-only clients that are answered at once. The threads that do it also
/// serve the control socket.
const PERMITS: usize = 16;

/// How many of them may wait for an event at the same time. Fewer than may wait in all, so that
/// clients of the control socket always find room.
const WAITING: usize = 4;

/// For how many read-only clients at once an engine scans its whole set or its index.
const WORKING: usize = 4;

/// The permits for read-only clients.
#[derive(Clone)]
pub(super) struct RequestPermits {
    answered: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    working: Arc<Semaphore>,
}

impl RequestPermits {
    pub(super) fn new() -> Self {
        let permits = |count| Arc::new(Semaphore::new(count));
        Self { answered: permits(PERMITS), waiting: permits(WAITING), working: permits(WORKING) }
    }
}

/// The permit for work that an engine does for a client. It travels with the work and is released
/// with its last clone. Clients of the control socket need none.
#[derive(Clone, Default)]
pub struct WorkPermit {
    _permit: Option<Arc<OwnedSemaphorePermit>>,
}

/// A read-only client that holds a permit.
#[derive(Clone)]
struct ReadOnlyClient {
    _permit: Arc<OwnedSemaphorePermit>,
    waiting: Arc<Semaphore>,
    working: Arc<Semaphore>,
}

/// Passes a request on if there is a permit for it; otherwise answers that the daemon is busy.
pub(super) async fn admit(
    State(permits): State<RequestPermits>,
    mut request: Request,
    next: Next,
) -> Response {
    let RequestPermits { answered, waiting, working } = permits;
    let mut response = match answered.try_acquire_owned() {
        Ok(permit) => {
            request.extensions_mut().insert(ReadOnlyClient { _permit: Arc::new(permit), waiting, working });
            next.run(request).await
        }
        Err(_) => super::routes::refused(&busy(format!("{PERMITS} other requests are being answered here"))),
    };
    // The connection is closed after the answer, so that its slot goes to the next client.
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// The refusal of a request of which nothing was begun: the client may repeat it.
fn busy(why: String) -> Failure {
    Failure::new(Kind::Busy, "the daemon is busy").why(why).next("try again in a moment")
}

/// A request, with the permit that its client holds if that is read-only.
pub(super) struct ApiRequest {
    handlers: Arc<Handlers>,
    client: Option<ReadOnlyClient>,
    waits: Option<OwnedSemaphorePermit>,
    awaited: ReplyDeadline,
}

/// The time, by [`boot_millis`], until which the client waits for the answer.
#[derive(Clone, Copy, Default)]
pub(super) struct ReplyDeadline(Option<u64>);

impl ReplyDeadline {
    /// Checks that the client still waits.
    ///
    /// # Errors
    /// The time has passed.
    pub(super) fn check(self) -> Result<(), Failure> {
        match self.0 {
            Some(until) if boot_millis() > until => {
                let failure = Failure::new(Kind::TimeLimit, "no client waits for the answer any more");
                Err(failure.why("the request is too old").next("try again"))
            }
            _ => Ok(()),
        }
    }
}

impl FromRequestParts<Arc<Handlers>> for ApiRequest {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, handlers: &Arc<Handlers>) -> Result<Self, Infallible> {
        // Taken out of the request, which is dropped as soon as the client hangs up.
        let client = parts.extensions.remove();
        let awaited = parts.headers.get(AWAITED).and_then(|until| until.to_str().ok()?.parse().ok());
        Ok(Self { handlers: Arc::clone(handlers), client, waits: None, awaited: ReplyDeadline(awaited) })
    }
}

impl ApiRequest {
    /// True if the client may do more than look.
    pub(super) const fn is_owner(&self) -> bool {
        self.client.is_none()
    }

    /// Reserves a place among those that wait for an event, until the request is answered. Returns
    /// false if the client may not wait.
    pub(super) fn may_wait(&mut self) -> bool {
        let Some(client) = &self.client else { return true };
        self.waits = Arc::clone(&client.waiting).try_acquire_owned().ok();
        self.waits.is_some()
    }

    /// Returns the permit that an engine is to hold for as long as it works for the client.
    ///
    /// # Errors
    /// Engines already work for as many other read-only clients as they may.
    pub(super) fn working(&self) -> Result<WorkPermit, Failure> {
        let Some(client) = &self.client else { return Ok(WorkPermit::default()) };
        match Arc::clone(&client.working).try_acquire_owned() {
            Ok(permit) => Ok(WorkPermit { _permit: Some(Arc::new(permit)) }),
            Err(_) => Err(busy(format!("it already searches its caches for {WORKING} other requests"))),
        }
    }

    /// Drops the time limit: the work is done whenever the daemon gets to it, and the client checks
    /// its progress later.
    pub(super) const fn whenever(mut self) -> Self {
        self.awaited = ReplyDeadline(None);
        self
    }

    /// The time until which the client waits for the answer.
    pub(super) const fn awaited(&self) -> ReplyDeadline {
        self.awaited
    }

    /// Runs `ask` with the handlers on a blocking thread, as it may take a moment. Returns `None`
    /// if it panicked.
    pub(super) async fn beside<T, F>(self, ask: F) -> Option<T>
    where
        T: Send + 'static,
        F: FnOnce(&Handlers) -> T + Send + 'static,
    {
        // The whole request moves into the work, not only the handlers, so that the permit is
        // released at the end of the work.
        let work = move || {
            let asked = self;
            ask(&asked.handlers)
        };
        tokio::task::spawn_blocking(work).await.ok()
    }
}
