//! A front end's side of the port: two halves, so that one thread can submit while another waits
//! for replies.
//!
//! `T` is whatever the front end needs to turn the reply into an answer (a cookie, a permit, a
//! descriptor); it travels with the request and is returned with the reply.

use crate::Bell;
use crate::inbox::{Inbox, SubmitError, next_client};
use crate::operation::{ClientId, Operation, Reply, VolumeId};
use crate::outbox::{Outbox, ReceiveStatus, ReplySink};
use crate::route::Route;
use crate::server::{ReplyTo, Request};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// Where clients connect to one engine. Clones lead to the same engine.
#[derive(Clone)]
pub struct Connector {
    inbox: Arc<Inbox>,
}

/// The submitting half. Dropping it means that no more requests follow: pending replies still
/// arrive, then [`ReplyReceiver::next`] ends.
pub struct RequestSender<T: Send + 'static> {
    client: ClientId,
    inbox: Arc<Inbox>,
    outbox: Arc<Outbox<T>>,
}

/// The receiving half. When it is dropped, pending replies are discarded on arrival; the requests
/// are still carried out.
pub struct ReplyReceiver<T: Send + 'static> {
    outbox: Arc<Outbox<T>>,
    /// Taken from the outbox, not yet given to the caller.
    batch: VecDeque<(T, Reply)>,
}

/// A request that found no room; nothing has happened. Try again after taking replies or when the
/// client's bell rings, or use [`RequestSender::submit`].
pub struct QueueFull<T> {
    /// As passed in.
    pub context: T,
    /// As passed in.
    pub operation: Operation,
}

impl Connector {
    pub(crate) const fn new(inbox: Arc<Inbox>) -> Self {
        Self { inbox }
    }

    /// Creates a client with up to `window` (at least 1) requests whose replies it has not taken.
    /// Works also when the engine is gone: the replies will say so.
    #[must_use]
    pub fn connect<T: Send + 'static>(&self, window: usize) -> (RequestSender<T>, ReplyReceiver<T>) {
        self.connect_halves(window, None)
    }

    /// Like [`Connector::connect`], for a receiver that waits elsewhere (epoll). `bell` rings in
    /// three cases: when a reply arrives after the last were taken, when a retry after
    /// [`RequestSender::try_submit`] found no room may succeed, and when the submitting half is
    /// dropped. The receiver then calls [`ReplyReceiver::try_next`] until `None`.
    #[must_use]
    pub fn connect_with_bell<T: Send + 'static>(
        &self,
        window: usize,
        bell: Bell,
    ) -> (RequestSender<T>, ReplyReceiver<T>) {
        self.connect_halves(window, Some(bell))
    }

    fn connect_halves<T: Send + 'static>(
        &self,
        window: usize,
        bell: Option<Bell>,
    ) -> (RequestSender<T>, ReplyReceiver<T>) {
        let outbox = Arc::new(Outbox::new(window, bell));
        let client = next_client();
        let requests = RequestSender { client, inbox: Arc::clone(&self.inbox), outbox: Arc::clone(&outbox) };
        (requests, ReplyReceiver { outbox, batch: VecDeque::with_capacity(window) })
    }

    pub(crate) fn inbox(&self) -> Arc<Inbox> {
        Arc::clone(&self.inbox)
    }

    /// Returns whether the engine accepts no more requests.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.inbox.is_closed()
    }
}

impl<T: Send + 'static> RequestSender<T> {
    /// Submits a request; it gets one reply. Waits while the window or the inbox is full.
    pub fn submit(&self, context: T, volume: VolumeId, operation: Operation) {
        let slot = self.outbox.enter(context);
        match self.inbox.put(self.request(slot, volume, operation), true) {
            Ok(()) => {}
            // The dropped request answers itself.
            Err(SubmitError::Closed(request) | SubmitError::Full(request)) => drop(request),
        }
    }

    /// Like [`RequestSender::submit`], to the engine that serves the volume of `route`. Also waits
    /// while the route is held.
    pub fn submit_by(&self, context: T, route: &Route, operation: Operation) {
        let slot = self.outbox.enter(context);
        let (volume, inbox, pass) = route.enter();
        let mut request = self.request(slot, volume, operation);
        request.reply_to = request.reply_to.with(pass);
        match inbox.put(request, true) {
            Ok(()) => {}
            // The dropped request answers itself.
            Err(SubmitError::Closed(request) | SubmitError::Full(request)) => drop(request),
        }
    }

    /// Like [`RequestSender::submit`], but returns everything instead of waiting.
    ///
    /// # Errors
    /// The window or the inbox is full.
    pub fn try_submit(&self, context: T, volume: VolumeId, operation: Operation) -> Result<(), QueueFull<T>> {
        let slot = match self.outbox.try_enter(context) {
            Ok(slot) => slot,
            Err(context) => return Err(QueueFull { context, operation }),
        };
        self.try_put(&self.inbox, slot, self.request(slot, volume, operation))
    }

    /// Like [`RequestSender::try_submit`], to the engine that serves the volume of `route`. The
    /// client's bell rings when a retry is worthwhile: when replies have arrived, the inbox has
    /// been emptied, or the route is open again.
    ///
    /// # Errors
    /// The window or the inbox is full, or the route is held.
    pub fn try_submit_by(&self, context: T, route: &Route, operation: Operation) -> Result<(), QueueFull<T>> {
        let slot = match self.outbox.try_enter(context) {
            Ok(slot) => slot,
            Err(context) => return Err(QueueFull { context, operation }),
        };
        let Some((volume, inbox, pass)) = route.try_enter(&self.outlet()) else {
            return Err(QueueFull { context: self.outbox.withdraw(slot), operation });
        };
        let mut request = self.request(slot, volume, operation);
        request.reply_to = request.reply_to.with(pass);
        self.try_put(&inbox, slot, request)
    }

    fn try_put(&self, inbox: &Inbox, slot: usize, request: Request) -> Result<(), QueueFull<T>> {
        match inbox.put(request, false) {
            Ok(()) => Ok(()),
            // The dropped request answers itself.
            Err(SubmitError::Closed(request)) => {
                drop(request);
                Ok(())
            }
            Err(SubmitError::Full(Request { operation, reply_to, .. })) => {
                reply_to.disarm();
                Err(QueueFull { context: self.outbox.withdraw(slot), operation })
            }
        }
    }

    /// Sends a reply of the front end's own (to a request it refuses) the same way as the engine's,
    /// so that only the receiver of replies writes to the peer. Waits while the window is full.
    pub fn answer(&self, context: T, reply: Reply) {
        let slot = self.outbox.enter(context);
        self.outbox.deliver(slot, reply);
    }

    /// Returns the number of submitted requests whose replies have not been taken.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.outbox.outstanding()
    }

    fn outlet(&self) -> Arc<dyn ReplySink> {
        Arc::<Outbox<T>>::clone(&self.outbox)
    }

    fn request(&self, slot: usize, volume: VolumeId, operation: Operation) -> Request {
        let submitted = matches!(operation, Operation::Flush).then(Instant::now);
        let reply_to = ReplyTo::new(self.outlet(), slot);
        Request { client: self.client, volume, operation, submitted, reply_to }
    }
}

impl<T: Send + 'static> Drop for RequestSender<T> {
    fn drop(&mut self) {
        self.outbox.sender_gone();
    }
}

impl<T: Send + 'static> ReplyReceiver<T> {
    /// Waits for the next reply and returns it. Returns `None` when the submitting half is gone and
    /// every request has been answered. Replies arrive in the order in which the engine sent them.
    #[expect(clippy::should_implement_trait, reason = "a `for` over it would hide that it blocks")]
    pub fn next(&mut self) -> Option<(T, Reply)> {
        if self.batch.is_empty() {
            let _: ReceiveStatus = self.outbox.take(&mut self.batch, true);
        }
        self.batch.pop_front()
    }

    /// Returns the next reply if one has arrived. Never blocks.
    pub fn try_next(&mut self) -> Option<(T, Reply)> {
        if self.batch.is_empty() {
            let _: ReceiveStatus = self.outbox.take(&mut self.batch, false);
        }
        self.batch.pop_front()
    }

    /// Moves all replies that have arrived to the end of `into`; waits for at least one. Returns
    /// `false` when there will never be another one.
    pub fn next_batch(&mut self, into: &mut VecDeque<(T, Reply)>) -> bool {
        if !self.batch.is_empty() {
            into.append(&mut self.batch);
            return true;
        }
        self.outbox.take(into, true) != ReceiveStatus::Ended
    }
}

impl<T: Send + 'static> Drop for ReplyReceiver<T> {
    fn drop(&mut self) {
        self.outbox.receiver_gone();
    }
}

impl<T> fmt::Debug for QueueFull<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueFull").field("operation", &self.operation).finish_non_exhaustive()
    }
}
