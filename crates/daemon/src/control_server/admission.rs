//! Somebody's question on its way to the handlers. Everything that may take a moment runs beside the thread, which hears signals; whoever may
//! only look has one of a few seats for that, and keeps it until the work has ended, also after having hung up. What an engine does beside its
//! own work has still fewer, which are kept until it has done it, also when nobody waits for the answer any more.

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

/// Guests are answered so many at once: the threads that do it are those of the control socket, too.
const SEATS: usize = 16;

/// So many of them may wait for an event meanwhile; fewer than may do so in all, so that the control socket's own find a place.
const WAITING: usize = 4;

/// An engine looks at all of a set, or at its index, for so many of them at once.
const WORKING: usize = 4;

/// The seats of those who may only look.
#[derive(Clone)]
pub(super) struct Seats {
    answered: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    working: Arc<Semaphore>,
}

impl Seats {
    pub(super) fn new() -> Self {
        let seats = |count| Arc::new(Semaphore::new(count));
        Self { answered: seats(SEATS), waiting: seats(WAITING), working: seats(WORKING) }
    }
}

/// The seat of work that an engine does for somebody: goes along with it, and is given up with its last clone. Whoever asks on the
/// control socket needs none.
#[derive(Clone, Default)]
pub struct Work {
    _seat: Option<Arc<OwnedSemaphorePermit>>,
}

/// Somebody who has a seat.
#[derive(Clone)]
struct Guest {
    _seat: Arc<OwnedSemaphorePermit>,
    waiting: Arc<Semaphore>,
    working: Arc<Semaphore>,
}

/// Goes on with a request if there is a seat for it.
pub(super) async fn seated(State(seats): State<Seats>, mut request: Request, next: Next) -> Response {
    let Seats { answered, waiting, working } = seats;
    let mut response = match answered.try_acquire_owned() {
        Ok(seat) => {
            request.extensions_mut().insert(Guest { _seat: Arc::new(seat), waiting, working });
            next.run(request).await
        }
        Err(_) => super::routes::refused(&busy(format!("{SEATS} others are being answered here"))),
    };
    // Whoever has been answered gives its place to the next.
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Nothing was begun: it may be asked again.
fn busy(why: String) -> Failure {
    Failure::new(Kind::Busy, "the daemon cannot be asked just now").why(why).next("ask again in a moment")
}

/// A question, with the seat of whoever asks if that is a guest.
pub(super) struct Asked {
    handlers: Arc<Handlers>,
    guest: Option<Guest>,
    waits: Option<OwnedSemaphorePermit>,
    awaited: Awaited,
}

/// Until when somebody waits for the answer, by [`boot_millis`].
#[derive(Clone, Copy, Default)]
pub(super) struct Awaited(Option<u64>);

impl Awaited {
    /// # Errors
    /// Nobody waits any more.
    pub(super) fn check(self) -> Result<(), Failure> {
        match self.0 {
            Some(until) if boot_millis() > until => {
                let failure = Failure::new(Kind::TimeLimit, "nobody waits for the answer any more");
                Err(failure.why("it was asked too long ago").next("ask again"))
            }
            _ => Ok(()),
        }
    }
}

impl FromRequestParts<Arc<Handlers>> for Asked {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, handlers: &Arc<Handlers>) -> Result<Self, Infallible> {
        // Taken out of the request: that is gone as soon as whoever asked has hung up.
        let guest = parts.extensions.remove();
        let awaited = parts.headers.get(AWAITED).and_then(|until| until.to_str().ok()?.parse().ok());
        Ok(Self { handlers: Arc::clone(handlers), guest, waits: None, awaited: Awaited(awaited) })
    }
}

impl Asked {
    /// Whoever asks may do more than look.
    pub(super) const fn is_owner(&self) -> bool {
        self.guest.is_none()
    }

    /// True if whoever asks may wait for an event, until it is answered.
    pub(super) fn may_wait(&mut self) -> bool {
        let Some(guest) = &self.guest else { return true };
        self.waits = Arc::clone(&guest.waiting).try_acquire_owned().ok();
        self.waits.is_some()
    }

    /// What an engine is to keep as long as it works for whoever asks.
    ///
    /// # Errors
    /// It does so for enough others.
    pub(super) fn working(&self) -> Result<Work, Failure> {
        let Some(guest) = &self.guest else { return Ok(Work::default()) };
        match Arc::clone(&guest.working).try_acquire_owned() {
            Ok(seat) => Ok(Work { _seat: Some(Arc::new(seat)) }),
            Err(_) => Err(busy(format!("it looks into its caches for {WORKING} others already"))),
        }
    }

    /// It is done whenever the daemon gets to it: whoever asks looks at it again.
    pub(super) const fn whenever(mut self) -> Self {
        self.awaited = Awaited(None);
        self
    }

    /// Until when that is to be done at all.
    pub(super) const fn awaited(&self) -> Awaited {
        self.awaited
    }

    /// What the handlers say, which may take a moment. `None` if they panicked.
    pub(super) async fn beside<T, F>(self, ask: F) -> Option<T>
    where
        T: Send + 'static,
        F: FnOnce(&Handlers) -> T + Send + 'static,
    {
        // The whole of it goes along, not the handlers alone: the seat is given up at the end of the work.
        let work = move || {
            let asked = self;
            ask(&asked.handlers)
        };
        tokio::task::spawn_blocking(work).await.ok()
    }
}
