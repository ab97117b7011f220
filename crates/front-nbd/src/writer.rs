//! The sending half of a connection: it takes replies from the engine and sends them, many at a
//! time, with the content directly from the buffers that it was read into.
//!
//! It ends when the reader has ended and every request has been answered. If the peer is gone, or
//! reads nothing for too long, the writer shuts down the socket and from then on discards replies.
//! Requests in flight are carried out, and their memory is returned.

use crate::channel::SendChannel;
use crate::peer_timeouts::PeerPace;
use crate::proto::reply::ReplyContext;
use crate::ring_path::{RingPath, TurnOutcome};
use crate::server::{SMALL_BYTES_MAX, ServerShared};
use crate::socket::Socket;
use bcached_port::{Buffer, Payload, Permit, Reply, ReplyReceiver};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;

/// What accompanies a request and turns its reply into an answer.
pub(crate) struct PendingRequest {
    pub(crate) awaited: ReplyContext,
    /// The memory that the request holds until its answer is sent.
    #[expect(dead_code, reason = "dropping it is its use")]
    pub(crate) permit: Option<Permit>,
    /// The data that it writes; its memory is reused.
    pub(crate) payload: Option<Payload>,
}

/// The sending half.
pub(crate) struct Writer {
    pub(crate) shared: Arc<ServerShared>,
    /// The connection's number.
    pub(crate) number: u64,
    /// For ending the connection if replies cannot be sent.
    pub(crate) socket: Arc<Socket>,
    pub(crate) sending: SendChannel,
    pub(crate) replies: ReplyReceiver<PendingRequest>,
    pub(crate) structured: bool,
    pub(crate) pace: PeerPace,
    /// Replies received and not completely sent.
    pub(crate) batch: VecDeque<(PendingRequest, Reply)>,
    pub(crate) outgoing: ReplyBatch,
}

/// The most replies in one system call: their slices fit on the stack.
const REPLIES_MAX: usize = 64;

/// The most calls that the ring makes before other connections get their turn.
const CALLS_MAX: usize = 2;
/// Bytes of content in each call, unless the first reply alone has more.
const BYTES_MAX: usize = 128 << 10;

/// The first replies of a batch, encoded for sending.
pub(crate) struct ReplyBatch {
    heads: Vec<u8>,
    /// Where each head ends, and whether content follows it.
    ends: [(usize, bool); REPLIES_MAX],
    count: usize,
    /// Their total size in bytes.
    bytes: usize,
    sent: usize,
}

impl Default for ReplyBatch {
    fn default() -> Self {
        Self { heads: Vec::new(), ends: [(0, false); REPLIES_MAX], count: 0, bytes: 0, sent: 0 }
    }
}

impl ReplyBatch {
    /// Encodes the first replies of `batch`, but never a large one after small ones.
    fn encode(&mut self, batch: &VecDeque<(PendingRequest, Reply)>, structured: bool) {
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

    /// Fills in two slices for each reply: its head and its content.
    fn slices<'a>(
        &'a self,
        batch: &'a VecDeque<(PendingRequest, Reply)>,
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
    /// Runs until everything is answered. `ring_path` handles replies that need no waiting. Returns
    /// whether all replies were sent.
    pub(crate) fn run(mut self: Box<Self>, ring_path: Option<&RingPath>) -> bool {
        let mut is_broken = false;
        loop {
            while !is_broken && !self.batch.is_empty() {
                if let Err(error) = self.send_some() {
                    self.shared.lost(self.number, "does not read its replies", &error);
                    self.socket.end();
                    is_broken = true;
                }
            }
            self.batch.clear();
            if let Some(ring_path) = ring_path.filter(|ring_path| !is_broken && ring_path.is_open()) {
                self = ring_path.lend_writer(self);
            } else if !self.replies.next_batch(&mut self.batch) {
                break;
            }
        }
        if !is_broken {
            self.sending.say_goodbye();
        }
        !is_broken
    }

    /// Sends the first replies of the batch and drops them, which returns their memory.
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

    /// Sends small replies that have arrived, as far as the socket takes them.
    pub(crate) fn send_now(&mut self) -> TurnOutcome {
        for _ in 0..CALLS_MAX {
            while self.batch.len() < REPLIES_MAX {
                let Some(reply) = self.replies.try_next() else { break };
                self.batch.push_back(reply);
            }
            match self.batch.front() {
                None => return TurnOutcome::Idle,
                Some((_, reply)) if is_large(reply) => return TurnOutcome::NeedsThread,
                Some(_) => {}
            }
            let Self { outgoing, batch, .. } = self;
            outgoing.encode(batch, self.structured);
            let mut slices = [IoSlice::new(&[]); 2 * REPLIES_MAX];
            outgoing.slices(batch, &mut slices);
            // On an error, the connection's own thread finds out what is wrong with the socket.
            let Ok(sent) = self.socket.send_now(&slices[..2 * outgoing.count]) else {
                return TurnOutcome::NeedsThread;
            };
            outgoing.sent = sent;
            // The bytes count towards the peer's pace, whichever thread sent them.
            self.pace.moved(sent);
            if sent < outgoing.bytes {
                return TurnOutcome::NeedsThread;
            }
            self.forget_sent();
        }
        TurnOutcome::More
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
