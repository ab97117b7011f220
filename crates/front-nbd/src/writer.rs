//! The sending half of a connection: takes replies as the engine gives them and writes them, many at a time, with
//! content straight from the buffers it was read into.
//!
//! It ends when the reader is gone and every request has been answered. If the peer is gone or reads nothing for too
//! long, it says so by ending the socket, and from then on throws replies away as they come: requests in flight are
//! carried out, their memory comes back.

use crate::channel::Sending;
use crate::peer_timeouts::Pace;
use crate::proto::reply::Awaited;
use crate::ring_path::{Lane, Now};
use crate::server::{SMALL_BYTES_MAX, Shared};
use crate::socket::Socket;
use bcached_port::{Buffer, Payload, Permit, Replies, Reply};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;

/// What travels with a request and makes an answer of its reply.
pub(crate) struct Pending {
    pub(crate) awaited: Awaited,
    /// The memory that the request holds until its answer is sent.
    #[expect(dead_code, reason = "dropping it is its use")]
    pub(crate) permit: Option<Permit>,
    /// What is written: its memory serves again.
    pub(crate) payload: Option<Payload>,
}

/// The sending half.
pub(crate) struct Writer {
    pub(crate) shared: Arc<Shared>,
    /// The connection's.
    pub(crate) number: u64,
    /// Ends it where replies cannot go out.
    pub(crate) socket: Arc<Socket>,
    pub(crate) sending: Sending,
    pub(crate) replies: Replies<Pending>,
    pub(crate) structured: bool,
    pub(crate) pace: Pace,
    /// Replies that have come and are not sent whole.
    pub(crate) batch: VecDeque<(Pending, Reply)>,
    pub(crate) outgoing: Outgoing,
}

/// Replies in one system call, at most: what they need of slices fits on the stack.
const REPLIES_MAX: usize = 64;

/// Calls that the ring makes before others have their turn.
const CALLS_MAX: usize = 2;
/// Bytes of content in each of them, unless the first reply alone has more.
const BYTES_MAX: usize = 128 << 10;

/// The first replies of a batch, as they go out.
pub(crate) struct Outgoing {
    heads: Vec<u8>,
    /// Where each head ends, and whether content follows it.
    ends: [(usize, bool); REPLIES_MAX],
    count: usize,
    /// Bytes of them all.
    bytes: usize,
    sent: usize,
}

impl Default for Outgoing {
    fn default() -> Self {
        Self { heads: Vec::new(), ends: [(0, false); REPLIES_MAX], count: 0, bytes: 0, sent: 0 }
    }
}

impl Outgoing {
    /// Takes the first replies of `batch`, but no large one behind small ones.
    fn encode(&mut self, batch: &VecDeque<(Pending, Reply)>, structured: bool) {
        self.heads.clear();
        (self.count, self.bytes, self.sent) = (0, 0, 0);
        for ((pending, reply), end) in batch.iter().zip(&mut self.ends) {
            if self.count > 0 && (is_large(reply) || self.bytes + content_of(reply).len() > BYTES_MAX) {
                break;
            }
            let content = pending.awaited.encode(structured, reply, &mut self.heads);
            *end = (self.heads.len(), content);
            self.bytes += if content { content_of(reply).len() } else { 0 };
            self.count += 1;
        }
        self.bytes += self.heads.len();
    }

    /// What of them is not sent, in two slices each.
    fn slices<'a>(
        &'a self,
        batch: &'a VecDeque<(Pending, Reply)>,
        slices: &mut [IoSlice<'a>; 2 * REPLIES_MAX],
    ) {
        let mut start = 0;
        for (((_, reply), (end, content)), pair) in
            batch.iter().zip(&self.ends[..self.count]).zip(slices.chunks_exact_mut(2))
        {
            pair[0] = IoSlice::new(&self.heads[start..*end]);
            if *content {
                pair[1] = IoSlice::new(content_of(reply));
            }
            start = *end;
        }
    }
}

fn content_of(reply: &Reply) -> &[u8] {
    reply.buffer.as_ref().map_or(&[], Buffer::as_slice)
}

/// Whether a reply takes long to copy.
fn is_large(reply: &Reply) -> bool {
    content_of(reply).len() > SMALL_BYTES_MAX
}

impl Writer {
    /// Runs until everything is answered; `lane` does what needs no waiting. True if all of it has gone out.
    pub(crate) fn run(mut self: Box<Self>, lane: Option<&Lane>) -> bool {
        let mut is_broken = false;
        loop {
            while !is_broken && !self.batch.is_empty() {
                if let Err(error) = self.send_some() {
                    self.shared.lost(self.number, "takes no replies", &error);
                    self.socket.end();
                    is_broken = true;
                }
            }
            self.batch.clear();
            if let Some(lane) = lane.filter(|lane| !is_broken && lane.is_open()) {
                self = lane.lend_writer(self);
            } else if !self.replies.next_batch(&mut self.batch) {
                break;
            }
        }
        if !is_broken {
            self.sending.say_goodbye();
        }
        !is_broken
    }

    /// Sends the first replies of the batch and drops them, which gives their memory back.
    fn send_some(&mut self) -> io::Result<()> {
        let Self { outgoing, batch, .. } = self;
        if outgoing.count == 0 {
            outgoing.encode(batch, self.structured);
        }
        let mut slices = [IoSlice::new(&[]); 2 * REPLIES_MAX];
        outgoing.slices(batch, &mut slices);
        let mut rest = &mut slices[..2 * outgoing.count];
        IoSlice::advance_slices(&mut rest, outgoing.sent);
        self.sending.send(rest, self.shared.limits.stall, Some(&mut self.pace))?;
        self.forget_sent();
        Ok(())
    }

    /// Sends small replies that have come, as far as the socket takes them.
    pub(crate) fn send_now(&mut self) -> Now {
        for _ in 0..CALLS_MAX {
            while self.batch.len() < REPLIES_MAX {
                let Some(reply) = self.replies.try_next() else { break };
                self.batch.push_back(reply);
            }
            match self.batch.front() {
                None => return Now::Waits,
                Some((_, reply)) if is_large(reply) => return Now::Thread,
                Some(_) => {}
            }
            let Self { outgoing, batch, .. } = self;
            outgoing.encode(batch, self.structured);
            let mut slices = [IoSlice::new(&[]); 2 * REPLIES_MAX];
            outgoing.slices(batch, &mut slices);
            // Its thread finds out what is wrong with the socket.
            let Ok(sent) = self.socket.send_now(&slices[..2 * outgoing.count]) else { return Now::Thread };
            outgoing.sent = sent;
            // What went is to the peer's credit, whoever sent it.
            self.pace.moved(sent);
            if sent < outgoing.bytes {
                return Now::Thread;
            }
            self.forget_sent();
        }
        Now::More
    }

    fn forget_sent(&mut self) {
        let mut stock = self.shared.stock();
        for (pending, reply) in self.batch.drain(..self.outgoing.count) {
            reply.buffer.into_iter().for_each(|buffer| stock.put(buffer));
            pending.payload.into_iter().for_each(|payload| stock.put_payload(payload));
        }
        self.outgoing.count = 0;
    }
}
