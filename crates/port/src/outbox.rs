//! A client's replies on their way back. The outbox also keeps what the client attached to each
//! request, so that it is returned with the reply and no front end needs its own table.
//!
//! Invariant: `waiting.len() + ready.len() <= window`. Both were allocated for that many when the
//! client connected, so serving allocates nothing here.

use crate::Bell;
use crate::lock::{lock, wait};
use crate::operation::Reply;
use slab::Slab;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex};

/// The outbox as the engine's side sees it, whatever type the client attaches.
pub(crate) trait ReplySink: Send + Sync {
    /// Delivers the answer to the request in `slot`.
    fn deliver(&self, slot: usize, reply: Reply);

    /// Tells the client that a request which found no room may fit now.
    fn has_room(&self);
}

pub(crate) struct Outbox<T> {
    state: Mutex<OutboxState<T>>,
    window: usize,
    /// The receiver of replies sleeps here.
    arrived: Condvar,
    /// The submitter sleeps here while its window is full.
    room: Condvar,
    bell: Option<Bell>,
}

struct OutboxState<T> {
    /// Submitted, not answered.
    waiting: Slab<T>,
    /// Answered, not taken.
    ready: VecDeque<(T, Reply)>,
    /// Nothing more will be submitted.
    sender_gone: bool,
    /// Replies will not be taken any more.
    receiver_gone: bool,
    receiver_sleeps: bool,
    senders_sleeping: u32,
}

/// The result of a check for replies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReceiveStatus {
    /// Some were taken.
    Taken,
    /// None now; some will arrive or may be requested.
    Nothing,
    /// There will never be another one.
    Ended,
}

impl<T> Outbox<T> {
    pub(crate) fn new(window: usize, bell: Option<Bell>) -> Self {
        assert!(window > 0, "a client without a window could never submit");
        let state = OutboxState {
            waiting: Slab::with_capacity(window),
            ready: VecDeque::with_capacity(window),
            sender_gone: false,
            receiver_gone: false,
            receiver_sleeps: false,
            senders_sleeping: 0,
        };
        Self { state: Mutex::new(state), window, arrived: Condvar::new(), room: Condvar::new(), bell }
    }

    /// Keeps `context` until its reply; waits while the window is full.
    pub(crate) fn enter(&self, context: T) -> usize {
        let mut state = lock(&self.state);
        while state.outstanding() >= self.window {
            state.senders_sleeping += 1;
            state = wait(&self.room, state);
            state.senders_sleeping -= 1;
        }
        state.waiting.insert(context)
    }

    /// Like [`Outbox::enter`], but returns the context if the window is full.
    pub(crate) fn try_enter(&self, context: T) -> Result<usize, T> {
        let mut state = lock(&self.state);
        if state.outstanding() >= self.window { Err(context) } else { Ok(state.waiting.insert(context)) }
    }

    /// Takes back a context whose request was never sent.
    pub(crate) fn withdraw(&self, slot: usize) -> T {
        let mut state = lock(&self.state);
        let context = state.waiting.remove(slot);
        self.wake_senders(&state);
        context
    }

    /// Moves all replies to the end of `into`. With `sleep`, waits for one.
    pub(crate) fn take(&self, into: &mut VecDeque<(T, Reply)>, sleep: bool) -> ReceiveStatus {
        let mut state = lock(&self.state);
        loop {
            if !state.ready.is_empty() {
                // Appending and swapping both keep the capacity on each side.
                into.append(&mut state.ready);
                self.wake_senders(&state);
                return ReceiveStatus::Taken;
            }
            if state.sender_gone && state.waiting.is_empty() {
                return ReceiveStatus::Ended;
            }
            if !sleep {
                return ReceiveStatus::Nothing;
            }
            state.receiver_sleeps = true;
            state = wait(&self.arrived, state);
            state.receiver_sleeps = false;
        }
    }

    pub(crate) fn outstanding(&self) -> usize {
        lock(&self.state).outstanding()
    }

    pub(crate) fn sender_gone(&self) {
        lock(&self.state).sender_gone = true;
        self.arrived.notify_all();
        self.ring();
    }

    pub(crate) fn receiver_gone(&self) {
        let dropped = {
            let mut state = lock(&self.state);
            state.receiver_gone = true;
            self.wake_senders(&state);
            std::mem::take(&mut state.ready)
        };
        // Contexts may hold values that lock when dropped; they are dropped after our lock is
        // released.
        drop(dropped);
    }

    fn wake_senders(&self, state: &OutboxState<T>) {
        if state.senders_sleeping > 0 {
            self.room.notify_all();
        }
    }

    fn ring(&self) {
        if let Some(bell) = &self.bell {
            bell();
        }
    }
}

impl<T> OutboxState<T> {
    fn outstanding(&self) -> usize {
        self.waiting.len() + self.ready.len()
    }
}

impl<T: Send> ReplySink for Outbox<T> {
    fn deliver(&self, slot: usize, reply: Reply) {
        let mut state = lock(&self.state);
        let context = state.waiting.remove(slot);
        if state.receiver_gone {
            self.wake_senders(&state);
            drop(state);
            drop((context, reply));
            return;
        }
        let first = state.ready.is_empty();
        state.ready.push_back((context, reply));
        // A wake-up is a system call; skip it if no receiver is asleep.
        let sleeps = state.receiver_sleeps;
        drop(state);
        if sleeps {
            self.arrived.notify_one();
        }
        if first {
            self.ring();
        }
    }

    fn has_room(&self) {
        self.ring();
    }
}
