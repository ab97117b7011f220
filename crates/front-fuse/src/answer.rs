//! What accompanies a request to the engine and turns its reply into an answer to the program.

use crate::ranges::RangeGuard;
use crate::shutdown::RequestGuard;
use bcached_port::{Buffer, BufferPool, ErrorKind, Payload, Permit, Reply};
use fuser::{Errno, ReplyData, ReplyEmpty, ReplyLseek, ReplyWrite};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};

/// A request on its way to the engine.
pub(crate) struct PendingRequest {
    pub(crate) answer: ReplyTarget,
    /// The memory that it holds until it is answered.
    pub(crate) permit: Option<Permit>,
    /// The sectors that it changes.
    pub(crate) held: Option<RangeGuard>,
    /// The data that it writes.
    pub(crate) payload: Option<Payload>,
}

/// The recipient of the outcome.
pub(crate) enum ReplyTarget {
    /// A program that reads: it gets `bytes` of the data, starting at `skip`.
    Read { reply: ReplyData, skip: usize, bytes: usize, ticket: RequestGuard },
    /// A program that writes.
    Write { reply: ReplyWrite, bytes: u32, ticket: RequestGuard },
    /// A program that only needs to know that the request is done.
    Done { reply: ReplyEmpty, ticket: RequestGuard },
    /// A program that looks for data or a hole.
    Seek { reply: ReplyLseek, ticket: RequestGuard },
    /// One of our threads, for which the request is one of several steps.
    Step(Sender<Reply>),
}

/// The errno that programs get.
pub(crate) fn errno(kind: ErrorKind) -> Errno {
    Errno::from_i32(kind.codes().errno)
}

impl PendingRequest {
    /// Completes the request with the engine's reply. Its buffers are kept in `stock` for later
    /// requests.
    pub(crate) fn end(self, reply: Reply, stock: &Mutex<BufferPool>) {
        let Self { answer, permit, held, payload } = self;
        // Release the sectors first: a program may change them again as soon as it is told.
        drop(held);
        let read = answer.give(reply);
        let mut stock = stock.lock().unwrap_or_else(PoisonError::into_inner);
        read.into_iter().for_each(|buffer| stock.put(buffer));
        payload.into_iter().for_each(|payload| stock.put_payload(payload));
        drop(permit);
    }
}

impl ReplyTarget {
    /// Passes on the engine's reply. Returns the buffer of a read, for reuse.
    pub(crate) fn give(self, reply: Reply) -> Option<Buffer> {
        if let Self::Step(waiting) = self {
            // The receiver is gone only if its thread has panicked.
            drop(waiting.send(reply));
            return None;
        }
        match reply.result {
            Ok(()) => self.done(reply.buffer.as_ref()),
            Err(kind) => self.refuse(errno(kind)),
        }
        reply.buffer
    }

    fn done(self, read: Option<&Buffer>) {
        match self {
            Self::Read { reply: to, skip, bytes, ticket } => {
                let content = read.and_then(|buffer| buffer.as_slice().get(skip..skip + bytes));
                match content {
                    Some(content) => to.data(content),
                    None => to.error(Errno::EIO),
                }
                drop(ticket);
            }
            Self::Write { reply, bytes, ticket } => {
                reply.written(bytes);
                drop(ticket);
            }
            Self::Done { reply, ticket } => {
                reply.ok();
                drop(ticket);
            }
            // The engine never replies with an offset.
            Self::Seek { .. } => self.refuse(Errno::EIO),
            Self::Step(_) => {}
        }
    }

    /// Refuses the request with an error.
    pub(crate) fn refuse(self, error: Errno) {
        match self {
            Self::Read { reply, ticket, .. } => told(|| reply.error(error), ticket),
            Self::Write { reply, ticket, .. } => told(|| reply.error(error), ticket),
            Self::Done { reply, ticket } => told(|| reply.error(error), ticket),
            Self::Seek { reply, ticket } => told(|| reply.error(error), ticket),
            // The waiting thread sees that its sender is dropped.
            Self::Step(_) => {}
        }
    }
}

/// Answers the program, and only then returns the ticket.
fn told(tell: impl FnOnce(), ticket: RequestGuard) {
    tell();
    drop(ticket);
}
