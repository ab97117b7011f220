//! The engine's side: take requests without ever blocking, answer each once.

use crate::Bell;
use crate::client::Connector;
use crate::error::ErrorKind;
use crate::inbox::Inbox;
use crate::operation::{ClientId, Operation, Reply, VolumeId};
use crate::outbox::Outlet;
use crate::route::Pass;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// Opens a port whose inbox holds up to `queue_max` requests (at least 1) that the engine has not taken; the engine
/// holds at most as many again that it has taken in one go and not looked at. `bell` wakes the engine's thread.
#[must_use]
pub fn open(queue_max: usize, bell: Bell) -> (Connector, Server) {
    let inbox = Arc::new(Inbox::new(queue_max, bell));
    let server = Server { inbox: Arc::clone(&inbox), batch: VecDeque::with_capacity(queue_max) };
    (Connector::new(inbox), server)
}

/// A request as the engine sees it. All parts are the engine's.
#[derive(Debug)]
pub struct Request {
    /// Who asks.
    pub client: ClientId,
    /// Which volume.
    pub volume: VolumeId,
    /// What to do.
    pub operation: Operation,
    /// When it was submitted, of a flush: that is about what was answered before, however long it waits.
    pub submitted: Option<Instant>,
    /// Where the answer goes.
    pub reply_to: ReplyTo,
}

/// The right and the duty to answer one request. May be sent to another thread. Dropped unsent, it answers
/// [`ErrorKind::Gone`].
#[must_use = "dropped, it tells the client that the volume is gone"]
pub struct ReplyTo {
    outlet: Option<Arc<dyn Outlet>>,
    slot: usize,
    /// Given back after the answer.
    pass: Option<Pass>,
}

/// The engine's end of a port. Dropped, it answers what it still holds with [`ErrorKind::Gone`], and so is every
/// later request.
pub struct Server {
    inbox: Arc<Inbox>,
    /// Taken from the inbox, not yet given to the engine.
    batch: VecDeque<Request>,
}

impl Server {
    /// The next request, in order of arrival over all clients; `None` when there is none now. Never blocks. See the
    /// crate's page for when to call it.
    pub fn take(&mut self) -> Option<Request> {
        if self.batch.is_empty() {
            self.inbox.swap(&mut self.batch);
        }
        self.batch.pop_front()
    }

    /// Takes no more requests: they are answered [`ErrorKind::Gone`] at once. Those already in are still given by
    /// [`Server::take`], so that an engine which stops can finish what was asked of it.
    pub fn close(&self) {
        self.inbox.close();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.inbox.close();
        // Dropping a request answers it. What was put in before the close is in the inbox or the batch.
        while self.take().is_some() {}
    }
}

impl ReplyTo {
    pub(crate) fn new(outlet: Arc<dyn Outlet>, slot: usize) -> Self {
        Self { outlet: Some(outlet), slot, pass: None }
    }

    /// Of a request that came by a route.
    pub(crate) fn with(mut self, pass: Pass) -> Self {
        self.pass = Some(pass);
        self
    }

    /// Who asked, to be rung.
    pub(crate) const fn client(&self) -> Option<&Arc<dyn Outlet>> {
        self.outlet.as_ref()
    }

    /// Answers. Never blocks: the client's window is the room for it.
    pub fn send(mut self, reply: Reply) {
        if let Some(outlet) = self.outlet.take() {
            outlet.deliver(self.slot, reply);
        }
    }

    /// Undoes the right to answer, for a request that was never handed over.
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
