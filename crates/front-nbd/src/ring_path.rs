//! The fast path of a connection: requests and replies that need no waiting are handled on the ring
//! of the engine that serves its volume.
//!
//! The threads of a connection can wait: for a payload, for memory, for a peer that does not read
//! its replies. Between two requests, however, there is nothing to wait for except the next
//! request, and waking a thread takes longer than a small request. So each thread lends its half of
//! the connection to the ring, and sleeps until the half is returned because something has to be
//! waited for.
//!
//! ```text
//!   reader thread ── lends its half ──► ring: small requests that are here whole ──► port
//!                 ◄── given back ────── a large payload, no memory, a bad request, the end
//!   writer thread ── lends its half ──► ring: small replies that the socket takes ──► socket
//!                 ◄── given back ────── a large reply, a socket that is full
//! ```
//!
//! Each half is in one place at a time, with everything that belongs to it. What the ring cannot
//! finish, it has not begun, except for partly sent replies. If a peer sends part of a small
//! request and then stalls, the ring waits for the rest, and holds no memory for it. The reader
//! thread asks for its half at intervals of the stall limit. If the half then holds part of a
//! request, the thread gets it back and enforces the limit.

use crate::connection::Reader;
use crate::socket::Socket;
use crate::writer::Writer;
use bcached_uring::{Bell, Command, RingClient, RingHandle};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The state shared by the threads of a connection and the ring.
pub(crate) struct RingPath {
    reader: HandoverSlot<Box<Reader>>,
    writer: HandoverSlot<Box<Writer>>,
    /// Whether the ring has been asked to look at this connection.
    rung: AtomicBool,
    bell: Bell,
    /// Whether the reader's half is recalled, whatever it holds.
    is_recalled: AtomicBool,
    /// Whether no more requests follow.
    is_ending: AtomicBool,
}

impl RingPath {
    /// Creates a ring path on a ring.
    pub(crate) fn new(ring: &RingHandle) -> Arc<Self> {
        Arc::new(Self {
            reader: HandoverSlot::default(),
            writer: HandoverSlot::default(),
            rung: AtomicBool::new(false),
            bell: ring.bell(),
            is_recalled: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
        })
    }

    /// Starts the ring path. If the ring is gone, the threads keep their halves.
    pub(crate) fn host(self: &Arc<Self>, ring: &RingHandle, socket: &Arc<Socket>) {
        let client = RingConnection {
            ring_path: Arc::clone(self),
            socket: Arc::clone(socket),
            reader: None,
            writer: None,
            has_more: false,
        };
        if let Err(error) = ring.host(Box::new(client)) {
            tracing::debug!(event = "nbd-no-ring", %error, "an NBD connection is served by its own threads");
        }
    }

    /// Makes the ring give this connection a turn.
    pub(crate) fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.bell.ring();
        }
    }

    /// Lends the receiving half until something has to be waited for. `stall` is how long part of a
    /// request may stay there.
    pub(crate) fn lend_reader(&self, reader: Box<Reader>, stall: Duration) -> Box<Reader> {
        self.reader.lend(reader, Some(stall), || self.ring())
    }

    /// Lends the sending half until something has to be waited for.
    pub(crate) fn lend_writer(&self, writer: Box<Writer>) -> Box<Writer> {
        self.writer.lend(writer, None, || self.ring())
    }

    /// Returns the receiving half to the reader, which then keeps it.
    pub(crate) fn recall(&self) {
        self.is_recalled.store(true, Ordering::Release);
        self.ring();
    }

    /// Returns the sending half to the writer, which keeps it to the end.
    pub(crate) fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.ring();
    }

    /// Whether the ring still accepts anything.
    pub(crate) fn is_open(&self) -> bool {
        !self.is_ending.load(Ordering::Acquire) && !locked(&self.writer.state).is_closed
    }
}

/// The place where one half is handed over.
struct HandoverSlot<T> {
    state: Mutex<SlotState<T>>,
    given_back: Condvar,
}

struct SlotState<T> {
    /// From its thread to the ring.
    lent: Option<T>,
    /// From the ring to its thread.
    back: Option<T>,
    /// Its thread asks for it.
    is_recalled: bool,
    /// The ring accepts nothing any more.
    is_closed: bool,
}

impl<T> Default for HandoverSlot<T> {
    fn default() -> Self {
        let state = SlotState { lent: None, back: None, is_recalled: false, is_closed: false };
        Self { state: Mutex::new(state), given_back: Condvar::new() }
    }
}

impl<T> HandoverSlot<T> {
    /// Lends `thing` and waits until it is returned. Asks for it every `look`.
    fn lend(&self, thing: T, look: Option<Duration>, ring: impl Fn()) -> T {
        let mut state = locked(&self.state);
        if state.is_closed {
            return thing;
        }
        state.lent = Some(thing);
        drop(state);
        ring();
        let mut state = locked(&self.state);
        loop {
            if let Some(thing) = state.back.take() {
                state.is_recalled = false;
                return thing;
            }
            let Some(limit) = look else {
                state = self.given_back.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let (again, waited) =
                self.given_back.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner);
            state = again;
            if waited.timed_out() && state.back.is_none() {
                state.is_recalled = true;
                drop(state);
                ring();
                state = locked(&self.state);
            }
        }
    }

    fn take(&self) -> Option<T> {
        locked(&self.state).lent.take()
    }

    fn give_back(&self, thing: T) {
        locked(&self.state).back = Some(thing);
        self.given_back.notify_one();
    }

    /// Whether its thread has asked for it since the last call.
    fn was_recalled(&self) -> bool {
        std::mem::take(&mut locked(&self.state).is_recalled)
    }

    fn close(&self, thing: Option<T>) {
        let mut state = locked(&self.state);
        state.is_closed = true;
        let lent = state.lent.take();
        if let Some(thing) = thing.or(lent) {
            state.back = Some(thing);
        }
        drop(state);
        self.given_back.notify_one();
    }
}

/// The outcome of handling what is available.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TurnOutcome {
    /// Everything is handled; the next input or reply has to arrive.
    Idle,
    /// There is more to do.
    More,
    /// Something has to be waited for, which needs the thread.
    NeedsThread,
}

/// The connection as a client of the ring.
struct RingConnection {
    ring_path: Arc<RingPath>,
    socket: Arc<Socket>,
    reader: Option<Box<Reader>>,
    writer: Option<Box<Writer>>,
    /// Received data may not have been handled yet.
    has_more: bool,
}

impl RingConnection {
    fn receive(&mut self) {
        let Some(reader) = &mut self.reader else { return };
        match reader.work_now() {
            TurnOutcome::Idle => {}
            TurnOutcome::More => {
                self.has_more = true;
                self.ring_path.ring();
            }
            TurnOutcome::NeedsThread => {
                self.reader.take().into_iter().for_each(|reader| self.ring_path.reader.give_back(reader));
            }
        }
    }

    fn send(&mut self) {
        if let Some(writer) = &mut self.writer {
            match writer.send_now() {
                TurnOutcome::Idle => {}
                TurnOutcome::More => self.ring_path.ring(),
                TurnOutcome::NeedsThread => {
                    self.writer.take().into_iter().for_each(|writer| self.ring_path.writer.give_back(writer));
                }
            }
        }
    }

    /// Handles a ring of the bell: a half is lent or asked for, replies have arrived, or there is
    /// more to do.
    fn look(&mut self) {
        if self.writer.is_none() {
            self.writer = self.ring_path.writer.take();
        }
        self.send();
        if self.ring_path.is_ending.load(Ordering::Acquire)
            && let Some(writer) = self.writer.take()
        {
            self.ring_path.writer.give_back(writer);
        }
        let lent = self.ring_path.reader.take();
        if self.ring_path.is_recalled.load(Ordering::Acquire) {
            let wanted = lent.into_iter().chain(self.reader.take());
            return wanted.for_each(|reader| self.ring_path.reader.give_back(reader));
        }
        if lent.is_some() {
            self.reader = lent;
            self.has_more = true;
        } else if self.ring_path.reader.was_recalled()
            && let Some(reader) = self.reader.take_if(|reader| reader.has_part())
        {
            return self.ring_path.reader.give_back(reader);
        }
        if std::mem::take(&mut self.has_more) {
            self.receive();
        }
    }
}

impl RingClient for RingConnection {
    fn device(&self) -> Arc<dyn AsFd + Send + Sync> {
        self.socket.clone()
    }

    fn turn(&mut self, _: &mut dyn FnMut(Command) -> bool) {
        // Cleared before the look, so that a ring of the bell during it is not missed.
        if self.ring_path.rung.load(Ordering::Relaxed) && self.ring_path.rung.swap(false, Ordering::AcqRel) {
            self.look();
        }
    }

    fn completed(&mut self, _: u16, _: i32) {}

    fn awaits_input(&self) -> bool {
        self.reader.is_some()
    }

    fn input(&mut self) {
        self.receive();
    }

    fn input_refused(&mut self) {
        self.ring_path.reader.close(self.reader.take());
    }

    fn is_over(&self) -> bool {
        let has_nothing = self.reader.is_none() && self.writer.is_none();
        has_nothing && self.ring_path.is_ending.load(Ordering::Acquire)
    }

    fn leaves_first(&self) -> bool {
        true
    }
}

impl Drop for RingConnection {
    fn drop(&mut self) {
        self.ring_path.reader.close(self.reader.take());
        self.ring_path.writer.close(self.writer.take());
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
