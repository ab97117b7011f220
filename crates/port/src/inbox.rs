//! Requests of all clients on their way into one engine, in order of arrival.

use crate::Bell;
use crate::budget_waiters::WaitingClients;
use crate::lock::{lock, wait};
use crate::operation::ClientId;
use crate::server::Request;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};

pub(crate) struct Inbox {
    state: Mutex<InboxState>,
    /// Maximum number of waiting requests.
    capacity: usize,
    /// Submitters sleep here while the inbox is full.
    room: Condvar,
    bell: Bell,
}

struct InboxState {
    waiting: VecDeque<Request>,
    submitters_sleeping: u32,
    /// Clients that found no room and do not sleep.
    waiters: WaitingClients,
    /// The server accepts no more requests.
    closed: bool,
}

/// Number of clients that have connected to any engine: a client may follow a volume to another
/// engine.
static CLIENTS: AtomicU64 = AtomicU64::new(0);

/// Returns a number that no client has.
pub(crate) fn next_client() -> ClientId {
    ClientId(CLIENTS.fetch_add(1, Ordering::Relaxed))
}

/// Why a request was not put in; it is returned.
#[derive(Debug)]
pub(crate) enum SubmitError {
    /// No room now.
    Full(Request),
    /// Closed permanently. Dropping the request answers it.
    Closed(Request),
}

impl Inbox {
    pub(crate) fn new(capacity: usize, bell: Bell) -> Self {
        assert!(capacity > 0, "an inbox without room could never be filled");
        let state = InboxState {
            waiting: VecDeque::with_capacity(capacity),
            submitters_sleeping: 0,
            waiters: WaitingClients::default(),
            closed: false,
        };
        Self { state: Mutex::new(state), capacity, room: Condvar::new(), bell }
    }

    /// Puts a request in. With `sleep`, waits for room; without, the client's bell rings when there
    /// is some.
    pub(crate) fn put(&self, request: Request, sleep: bool) -> Result<(), SubmitError> {
        let mut state = lock(&self.state);
        while !state.closed && state.waiting.len() >= self.capacity {
            if !sleep {
                if let Some(client) = request.reply_to.client() {
                    state.waiters.enter(client);
                }
                return Err(SubmitError::Full(request));
            }
            state.submitters_sleeping += 1;
            state = wait(&self.room, state);
            state.submitters_sleeping -= 1;
        }
        if state.closed {
            return Err(SubmitError::Closed(request));
        }
        let first = state.waiting.is_empty();
        state.waiting.push_back(request);
        drop(state);
        if first {
            (self.bell)();
        }
        Ok(())
    }

    /// Exchanges everything waiting for the empty `batch`, so that the lock is held for an instant
    /// only.
    pub(crate) fn swap(&self, batch: &mut VecDeque<Request>) {
        debug_assert!(batch.is_empty(), "requests taken earlier come first");
        let mut state = lock(&self.state);
        std::mem::swap(&mut state.waiting, batch);
        if state.submitters_sleeping > 0 {
            self.room.notify_all();
        }
        let waiters = std::mem::take(&mut state.waiters);
        drop(state);
        waiters.ring();
    }

    /// Accepts no more requests. Those already in can still be taken.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        let waiters = std::mem::take(&mut state.waiters);
        drop(state);
        self.room.notify_all();
        waiters.ring();
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.state).closed
    }
}
