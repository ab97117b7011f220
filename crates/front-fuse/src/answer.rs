//! What travels with a request and makes an answer of its reply.

use crate::ranges::Held;
use crate::shutdown::Ticket;
use bcached_port::{Buffer, ErrorKind, Payload, Permit, Reply, Stock};
use fuser::{Errno, ReplyData, ReplyEmpty, ReplyLseek, ReplyWrite};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};

/// A request on its way to the engine.
pub(crate) struct Pending {
    pub(crate) answer: Answer,
    /// The memory that it holds until it is answered.
    pub(crate) permit: Option<Permit>,
    /// The sectors that it changes.
    pub(crate) held: Option<Held>,
    /// What it writes.
    pub(crate) payload: Option<Payload>,
}

/// Who is to be told how it ended.
pub(crate) enum Answer {
    /// A program that reads `bytes` of what is read, from `skip` on.
    Read { reply: ReplyData, skip: usize, bytes: usize, ticket: Ticket },
    /// A program that writes.
    Write { reply: ReplyWrite, bytes: u32, ticket: Ticket },
    /// A program that wants no more than that it is done.
    Done { reply: ReplyEmpty, ticket: Ticket },
    /// A program that looks for data or a hole.
    Seek { reply: ReplyLseek, ticket: Ticket },
    /// A thread of ours, of whose work it is a step.
    Step(Sender<Reply>),
}

/// The number that programs are told.
pub(crate) fn errno(kind: ErrorKind) -> Errno {
    Errno::from_i32(kind.codes().errno)
}

impl Pending {
    /// The engine's reply has come. Its memory is kept in `stock` for the next ones.
    pub(crate) fn end(self, reply: Reply, stock: &Mutex<Stock>) {
        let Self { answer, permit, held, payload } = self;
        // Whoever is told that it is done may change the same sectors at once.
        drop(held);
        let read = answer.give(reply);
        let mut stock = stock.lock().unwrap_or_else(PoisonError::into_inner);
        read.into_iter().for_each(|buffer| stock.put(buffer));
        payload.into_iter().for_each(|payload| stock.put_payload(payload));
        drop(permit);
    }
}

impl Answer {
    /// As the engine has it. What is left is the memory of a read.
    pub(crate) fn give(self, reply: Reply) -> Option<Buffer> {
        if let Self::Step(waiting) = self {
            // Only a thread that has come to a bad end does not wait any more.
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
            // An offset is no reply of the engine's.
            Self::Seek { .. } => self.refuse(Errno::EIO),
            Self::Step(_) => {}
        }
    }

    /// Not done.
    pub(crate) fn refuse(self, error: Errno) {
        match self {
            Self::Read { reply, ticket, .. } => told(|| reply.error(error), ticket),
            Self::Write { reply, ticket, .. } => told(|| reply.error(error), ticket),
            Self::Done { reply, ticket } => told(|| reply.error(error), ticket),
            Self::Seek { reply, ticket } => told(|| reply.error(error), ticket),
            // Who waits notices that nobody will tell.
            Self::Step(_) => {}
        }
    }
}

/// The ticket is given back when the program has been told.
fn told(tell: impl FnOnce(), ticket: Ticket) {
    tell();
    drop(ticket);
}
