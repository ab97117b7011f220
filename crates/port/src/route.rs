//! The route to a volume, wherever it is served: a volume may move from one engine to another while
//! clients use it.
//!
//! To move it, the caller first holds the route. From then on no request enters; those already in
//! are carried out and answered by the engine that has them. After the last one, `idle` is called:
//! the volume is no longer in use and can be released there. Then the route is led to the other
//! engine, or released unchanged, and the waiting clients continue. So a request is never seen by
//! an engine that does not have its volume, and a client notices only a pause.
//!
//! **Liveness.** A client that waits for a held route is woken by [`Route::lead`] and
//! [`Route::release`], through its bell if it does not sleep. The holder must call one of them.
//! `idle` is called at most once, without a lock, by the thread that delivers the last reply or by
//! the holder itself; it is not called if the route was released before.

use crate::Bell;
use crate::budget_waiters::WaitingClients;
use crate::client::{Connector, ReplyReceiver, RequestSender};
use crate::inbox::Inbox;
use crate::lock::{lock, wait};
use crate::operation::VolumeId;
use crate::outbox::ReplySink;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex};

/// The route to a volume. Clones are the same route.
#[derive(Clone)]
pub struct Route(Arc<RouteShared>);

struct RouteShared {
    state: Mutex<RouteState>,
    /// Submitters sleep here while the route is held.
    open: Condvar,
}

struct RouteState {
    volume: VolumeId,
    inbox: Arc<Inbox>,
    held: bool,
    /// Clients that found it held and do not sleep.
    waiters: WaitingClients,
    /// Requests that have entered and are not answered.
    under_way: usize,
    idle: Option<Box<dyn FnOnce() + Send>>,
}

/// A request's registration as in flight. Dropped when it has been answered.
pub(crate) struct InFlightGuard(Arc<RouteShared>);

impl Route {
    /// Creates a route to that volume of the engine.
    #[must_use]
    pub fn new(volume: VolumeId, engine: &Connector) -> Self {
        let inbox = engine.inbox();
        let state = RouteState {
            volume,
            inbox,
            held: false,
            waiters: WaitingClients::default(),
            under_way: 0,
            idle: None,
        };
        Self(Arc::new(RouteShared { state: Mutex::new(state), open: Condvar::new() }))
    }

    /// Creates a client, like [`Connector::connect`]; it submits with [`RequestSender::submit_by`].
    #[must_use]
    pub fn connect<T: Send + 'static>(&self, window: usize) -> (RequestSender<T>, ReplyReceiver<T>) {
        let inbox = Arc::clone(&lock(&self.0.state).inbox);
        Connector::new(inbox).connect(window)
    }

    /// Like [`Route::connect`], for a receiver that waits elsewhere: see
    /// [`Connector::connect_with_bell`].
    #[must_use]
    pub fn connect_with_bell<T: Send + 'static>(
        &self,
        window: usize,
        bell: Bell,
    ) -> (RequestSender<T>, ReplyReceiver<T>) {
        let inbox = Arc::clone(&lock(&self.0.state).inbox);
        Connector::new(inbox).connect_with_bell(window, bell)
    }

    /// Returns the volume's number in its current engine.
    #[must_use]
    pub fn volume(&self) -> VolumeId {
        lock(&self.0.state).volume
    }

    /// Returns whether requests wait.
    #[must_use]
    pub fn is_held(&self) -> bool {
        lock(&self.0.state).held
    }

    /// Returns whether it leads there now.
    #[must_use]
    pub fn leads_to(&self, volume: VolumeId, engine: &Connector) -> bool {
        let state = lock(&self.0.state);
        state.volume == volume && Arc::ptr_eq(&state.inbox, &engine.inbox())
    }

    /// Holds the route: no more requests enter. `idle` is called when none is in flight; it must
    /// not block.
    pub fn hold(&self, idle: impl FnOnce() + Send + 'static) {
        let mut state = lock(&self.0.state);
        state.held = true;
        // The engine gives the volume up after its last answer: invariant D21.
        if state.under_way > 0 {
            state.idle = Some(Box::new(idle));
            return;
        }
        drop(state);
        idle();
    }

    /// Leads the route to that volume of the engine and opens it; waiting clients continue there.
    pub fn lead(&self, volume: VolumeId, engine: &Connector) {
        let mut state = lock(&self.0.state);
        (state.volume, state.inbox) = (volume, engine.inbox());
        self.open(state);
    }

    /// Releases the route unless nothing is in flight any more: then the callee of `idle` is in
    /// charge. Returns true if it was released.
    #[must_use = "the route may still be held"]
    pub fn release_unless_idle(&self) -> bool {
        let state = lock(&self.0.state);
        let waits = state.idle.is_some();
        if waits {
            self.open(state);
        }
        waits
    }

    /// Opens the route where it led before; waiting clients continue there.
    pub fn release(&self) {
        self.open(lock(&self.0.state));
    }

    fn open(&self, mut state: std::sync::MutexGuard<'_, RouteState>) {
        state.held = false;
        let idle = state.idle.take();
        let waiters = std::mem::take(&mut state.waiters);
        drop(state);
        self.0.open.notify_all();
        waiters.ring();
        drop(idle);
    }

    /// Registers a request and returns where it goes. Waits while the route is held.
    pub(crate) fn enter(&self) -> (VolumeId, Arc<Inbox>, InFlightGuard) {
        let mut state = lock(&self.0.state);
        // What is asked meanwhile waits here: invariant D21.
        while state.held {
            state = wait(&self.0.open, state);
        }
        self.admit(&mut state)
    }

    /// The same without waiting: while the route is held, `client` is remembered and rung when it
    /// opens.
    pub(crate) fn try_enter(
        &self,
        client: &Arc<dyn ReplySink>,
    ) -> Option<(VolumeId, Arc<Inbox>, InFlightGuard)> {
        let mut state = lock(&self.0.state);
        if state.held {
            state.waiters.enter(client);
            return None;
        }
        Some(self.admit(&mut state))
    }

    fn admit(&self, state: &mut RouteState) -> (VolumeId, Arc<Inbox>, InFlightGuard) {
        state.under_way += 1;
        (state.volume, Arc::clone(&state.inbox), InFlightGuard(Arc::clone(&self.0)))
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.under_way -= 1;
        let idle = if state.under_way == 0 { state.idle.take() } else { None };
        drop(state);
        if let Some(idle) = idle {
            idle();
        }
    }
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.0.state);
        f.debug_struct("Route")
            .field("volume", &state.volume)
            .field("held", &state.held)
            .finish_non_exhaustive()
    }
}
