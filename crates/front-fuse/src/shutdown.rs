//! What a server still has to do: requests without an answer, threads that run. A shutdown waits for both.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

#[derive(Default)]
pub(crate) struct Life {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct State {
    is_stopping: bool,
    /// It is unmounted by us, if somebody does that.
    is_unmounting: bool,
    /// Asked and not answered.
    pub(crate) requests: usize,
    /// Of ours, not of the session.
    pub(crate) threads: usize,
}

/// A request without an answer, until dropped.
pub(crate) struct Ticket(Arc<Life>);

/// A thread that runs, until dropped.
struct Running(Arc<Life>);

/// Stacks of threads: a batch of replies is the largest thing on them.
const STACK_BYTES: usize = 256 << 10;

impl Life {
    /// A request begins, unless the server stops.
    pub(crate) fn begin(self: &Arc<Self>) -> Option<Ticket> {
        let mut state = self.lock();
        if state.is_stopping {
            return None;
        }
        state.requests += 1;
        Some(Ticket(Arc::clone(self)))
    }

    /// No request begins from now on.
    pub(crate) fn stop(&self) {
        self.lock().is_stopping = true;
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.lock().is_stopping
    }

    /// It is about to be unmounted; what is asked until then is answered.
    pub(crate) fn unmounts(&self) {
        self.lock().is_unmounting = true;
    }

    /// Whether its end is ours.
    pub(crate) fn ends(&self) -> bool {
        let state = self.lock();
        state.is_stopping || state.is_unmounting
    }

    pub(crate) fn spawn(
        self: &Arc<Self>,
        name: String,
        body: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        self.lock().threads += 1;
        let running = Running(Arc::clone(self));
        let body = move || {
            let _running = running;
            body();
        };
        // If there is no thread, the closure is dropped, and with it what counts it.
        thread::Builder::new().name(name).stack_size(STACK_BYTES).spawn(body).map(drop)
    }

    /// Waits until `holds`, at most until the deadline; what is left then.
    pub(crate) fn wait_until(&self, deadline: Instant, holds: impl Fn(&State) -> bool) -> State {
        let mut state = self.lock();
        while !holds(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        *state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Numbers, whole between any two statements.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, count: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        count(&mut state);
        // Only a shutdown listens.
        if state.is_stopping {
            self.changed.notify_all();
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.end(|state| state.requests -= 1);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.end(|state| state.threads -= 1);
    }
}
