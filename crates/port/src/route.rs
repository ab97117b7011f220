//! The way to a volume, wherever it is served: a volume may go from one engine to another while clients use it.
//!
//! Whoever moves it holds the route first. From then on nobody's request goes in; those that are in are carried out and
//! answered by the engine that has them, and when the last one is, `idle` is called: the volume is nobody's business any
//! more and can be given up there. Then the route leads to the other engine, or is let go of as it was, and who waited
//! goes on. So a request is never seen by an engine that does not have its volume, and a client notices nothing but a
//! pause.
//!
//! **Liveness.** Who waits for a held route is woken by [`Route::lead`] and [`Route::release`], by its bell if it does not
//! sleep; one of them is the duty of whoever holds it. `idle` is called once, by the thread that brings the last reply or by the holder
//! itself, without a lock; not at all if the route has been let go of before.

use crate::Bell;
use crate::budget_waiters::Waiters;
use crate::client::{Connector, Replies, Requests};
use crate::inbox::Inbox;
use crate::lock::{lock, wait};
use crate::operation::VolumeId;
use crate::outbox::Outlet;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex};

/// The way to a volume. Clones are the same way.
#[derive(Clone)]
pub struct Route(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// Submitters sleep here while the route is held.
    open: Condvar,
}

struct State {
    volume: VolumeId,
    inbox: Arc<Inbox>,
    held: bool,
    /// Those that found it held and do not sleep.
    waiters: Waiters,
    /// Requests that are in and not answered.
    under_way: usize,
    idle: Option<Box<dyn FnOnce() + Send>>,
}

/// A request's right to be under way. Dropped when it has been answered.
pub(crate) struct Pass(Arc<Shared>);

impl Route {
    /// To that volume of the engine.
    #[must_use]
    pub fn new(volume: VolumeId, engine: &Connector) -> Self {
        let inbox = engine.inbox();
        let state =
            State { volume, inbox, held: false, waiters: Waiters::default(), under_way: 0, idle: None };
        Self(Arc::new(Shared { state: Mutex::new(state), open: Condvar::new() }))
    }

    /// A new client, as [`Connector::connect`] makes one; it submits with [`Requests::submit_by`].
    #[must_use]
    pub fn connect<T: Send + 'static>(&self, window: usize) -> (Requests<T>, Replies<T>) {
        let inbox = Arc::clone(&lock(&self.0.state).inbox);
        Connector::new(inbox).connect(window)
    }

    /// As [`Route::connect`], for a receiver that waits elsewhere: see [`Connector::connect_with_bell`].
    #[must_use]
    pub fn connect_with_bell<T: Send + 'static>(
        &self,
        window: usize,
        bell: Bell,
    ) -> (Requests<T>, Replies<T>) {
        let inbox = Arc::clone(&lock(&self.0.state).inbox);
        Connector::new(inbox).connect_with_bell(window, bell)
    }

    /// The volume's number where it is now.
    #[must_use]
    pub fn volume(&self) -> VolumeId {
        lock(&self.0.state).volume
    }

    /// Whether requests wait.
    #[must_use]
    pub fn is_held(&self) -> bool {
        lock(&self.0.state).held
    }

    /// Whether it leads there now.
    #[must_use]
    pub fn leads_to(&self, volume: VolumeId, engine: &Connector) -> bool {
        let state = lock(&self.0.state);
        state.volume == volume && Arc::ptr_eq(&state.inbox, &engine.inbox())
    }

    /// Lets no more requests in; `idle` is called when none is under way. It must not wait.
    pub fn hold(&self, idle: impl FnOnce() + Send + 'static) {
        let mut state = lock(&self.0.state);
        state.held = true;
        if state.under_way > 0 {
            state.idle = Some(Box::new(idle));
            return;
        }
        drop(state);
        idle();
    }

    /// From now on it leads there, and who waited goes there.
    pub fn lead(&self, volume: VolumeId, engine: &Connector) {
        let mut state = lock(&self.0.state);
        (state.volume, state.inbox) = (volume, engine.inbox());
        self.open(state);
    }

    /// The same, unless nothing is under way any more: then whoever was told so has it in hand. True if it was let go of.
    #[must_use = "the route may still be held"]
    pub fn release_unless_idle(&self) -> bool {
        let state = lock(&self.0.state);
        let waits = state.idle.is_some();
        if waits {
            self.open(state);
        }
        waits
    }

    /// It leads where it did, and who waited goes there.
    pub fn release(&self) {
        self.open(lock(&self.0.state));
    }

    fn open(&self, mut state: std::sync::MutexGuard<'_, State>) {
        state.held = false;
        let idle = state.idle.take();
        let waiters = std::mem::take(&mut state.waiters);
        drop(state);
        self.0.open.notify_all();
        waiters.ring();
        drop(idle);
    }

    /// A place for a request, and where that goes. Waits while the route is held.
    pub(crate) fn enter(&self) -> (VolumeId, Arc<Inbox>, Pass) {
        let mut state = lock(&self.0.state);
        while state.held {
            state = wait(&self.0.open, state);
        }
        self.admit(&mut state)
    }

    /// The same, but while the route is held `client` is remembered, to be rung when it is not.
    pub(crate) fn try_enter(&self, client: &Arc<dyn Outlet>) -> Option<(VolumeId, Arc<Inbox>, Pass)> {
        let mut state = lock(&self.0.state);
        if state.held {
            state.waiters.enter(client);
            return None;
        }
        Some(self.admit(&mut state))
    }

    fn admit(&self, state: &mut State) -> (VolumeId, Arc<Inbox>, Pass) {
        state.under_way += 1;
        (state.volume, Arc::clone(&state.inbox), Pass(Arc::clone(&self.0)))
    }
}

impl Drop for Pass {
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
