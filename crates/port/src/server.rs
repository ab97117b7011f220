//! The engine's side of the port: it takes requests without ever blocking, and answers each once.

use crate::Bell;
use crate::client::Connector;
use crate::error::ErrorKind;
use crate::inbox::Inbox;
use crate::operation::{ClientId, Operation, Reply, VolumeId};
use crate::outbox::ReplySink;
use crate::route::InFlightGuard;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// Opens a port whose inbox holds up to `queue_max` requests (at least 1) that the engine has not
/// taken. The engine holds at most as many again that it has taken in one batch and not looked at.
/// `bell` wakes the engine's thread.
#[must_use]
pub fn open(queue_max: usize, bell: Bell) -> (Connector, Server) {
    let inbox = Arc::new(Inbox::new(queue_max, bell));
    let server = Server { inbox: Arc::clone(&inbox), batch: VecDeque::with_capacity(queue_max) };
    (Connector::new(inbox), server)
}

/// A request as the engine sees it. The engine owns all parts.
#[derive(Debug)]
pub struct Request {
    /// The client that sent it.
    pub client: ClientId,
    /// Which volume.
    pub volume: VolumeId,
    /// What to do.
    pub operation: Operation,
    /// When it was submitted, for a flush: it covers what was answered before that, however long it
    /// waits.
    pub submitted: Option<Instant>,
    /// Where the answer is sent.
    pub reply_to: ReplyTo,
}

/// The right and the duty to answer one request. May be sent to another thread. If dropped unsent,
/// it answers with [`ErrorKind::Gone`].
#[must_use = "dropped, it tells the client that the volume is gone"]
pub struct ReplyTo {
    outlet: Option<Arc<dyn ReplySink>>,
    slot: usize,
    /// Returned after the answer.
    pass: Option<InFlightGuard>,
}

/// The engine's end of a port. When it is dropped, the requests it still holds and all later ones
/// are answered with [`ErrorKind::Gone`].
pub struct Server {
    inbox: Arc<Inbox>,
    /// Taken from the inbox, not yet given to the engine.
    batch: VecDeque<Request>,
}

impl Server {
    /// Returns the next request, in order of arrival over all clients; `None` if there is none now.
    /// Never blocks. The crate's documentation says when to call it.
    pub fn take(&mut self) -> Option<Request> {
        if self.batch.is_empty() {
            self.inbox.swap(&mut self.batch);
        }
        self.batch.pop_front()
    }

    /// Accepts no more requests: they are answered with [`ErrorKind::Gone`] at once.
    /// [`Server::take`] still returns those already in the inbox, so a stopping engine can finish
    /// them.
    pub fn close(&self) {
        self.inbox.close();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.inbox.close();
        // Dropping a request answers it. Requests put in before the close are in the inbox or the
        // batch.
        while self.take().is_some() {}
    }
}

impl ReplyTo {
    pub(crate) fn new(outlet: Arc<dyn ReplySink>, slot: usize) -> Self {
        Self { outlet: Some(outlet), slot, pass: None }
    }

    /// Attaches the pass of a request that arrived by a route.
    pub(crate) fn with(mut self, pass: InFlightGuard) -> Self {
        self.pass = Some(pass);
        self
    }

    /// Returns the client that sent the request, to ring its bell.
    pub(crate) const fn client(&self) -> Option<&Arc<dyn ReplySink>> {
        self.outlet.as_ref()
    }

    /// Answers. Never blocks: the client's window provides the room.
    pub fn send(mut self, reply: Reply) {
        if let Some(outlet) = self.outlet.take() {
            outlet.deliver(self.slot, reply);
        }
    }

    /// Cancels the duty to answer, for a request that was never handed over.
    pub(crate) fn disarm(mut self) {
        self.outlet = None;
    }
}

impl Drop for ReplyTo {
    fn drop(&mut self) {
        if let Some(outlet) = self.outlet.take() {
            outlet.deliver(self.slot, Reply::failed(ErrorKind::Gone, None));
        }
    }
}

impl fmt::Debug for ReplyTo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplyTo").field("slot", &self.slot).finish_non_exhaustive()
    }
}
