//! The work that a server still has: unanswered requests and running threads. A shutdown waits for
//! both.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

#[derive(Default)]
pub(crate) struct Lifecycle {
    state: Mutex<LifecycleState>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct LifecycleState {
    is_stopping: bool,
    /// If it is unmounted now, this server does it.
    is_unmounting: bool,
    /// Requests received and not yet answered.
    pub(crate) requests: usize,
    /// Threads of this crate, without those of the session.
    pub(crate) threads: usize,
}

/// An unanswered request, until dropped.
pub(crate) struct RequestGuard(Arc<Lifecycle>);

/// A running thread, until dropped.
struct ThreadGuard(Arc<Lifecycle>);

/// Stack size of threads; the largest item on a stack is a batch of replies.
const STACK_BYTES: usize = 256 << 10;

impl Lifecycle {
    /// Begins a request, unless the server is stopping.
    pub(crate) fn begin(self: &Arc<Self>) -> Option<RequestGuard> {
        let mut state = self.lock();
        if state.is_stopping {
            return None;
        }
        state.requests += 1;
        Some(RequestGuard(Arc::clone(self)))
    }

    /// Lets no further request begin.
    pub(crate) fn stop(&self) {
        self.lock().is_stopping = true;
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.lock().is_stopping
    }

    /// Notes that the server is about to unmount. Requests that arrive until then are answered.
    pub(crate) fn unmounts(&self) {
        self.lock().is_unmounting = true;
    }

    /// Whether the server itself is ending the mount.
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
        let running = ThreadGuard(Arc::clone(self));
        let body = move || {
            let _running = running;
            body();
        };
        // If there is no thread, the closure is dropped, and the count with it.
        thread::Builder::new().name(name).stack_size(STACK_BYTES).spawn(body).map(drop)
    }

    /// Waits until `holds` is true, at most until the deadline. Returns the state then.
    pub(crate) fn wait_until(
        &self,
        deadline: Instant,
        holds: impl Fn(&LifecycleState) -> bool,
    ) -> LifecycleState {
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

    fn lock(&self) -> MutexGuard<'_, LifecycleState> {
        // Plain numbers, consistent between any two statements, so a poisoned lock is usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, count: impl FnOnce(&mut LifecycleState)) {
        let mut state = self.lock();
        count(&mut state);
        // Only a shutdown waits for changes.
        if state.is_stopping {
            self.changed.notify_all();
        }
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.end(|state| state.requests -= 1);
    }
}

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        self.0.end(|state| state.threads -= 1);
    }
}
