//! The sending half of a connection: takes replies as the engine gives them and writes them, many at a time, with
//! content straight from the buffers it was read into.
//!
//! It ends when the reader is gone and every request has been answered. If the peer is gone or reads nothing for too
//! long, it says so by ending the socket, and from then on throws replies away as they come: requests in flight are
//! carried out, their memory comes back.

use crate::channel::Sending;
use crate::pace::Pace;
use crate::proto::reply::Awaited;
use crate::server::Shared;
use crate::socket::Socket;
use bcached_port::{Buffer, Permit, Replies, Reply};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;

/// What travels with a request and makes an answer of its reply.
pub(crate) struct Pending {
    pub(crate) awaited: Awaited,
    /// The memory that the request holds until its answer is sent.
    #[expect(dead_code, reason = "dropping it is its use")]
    pub(crate) permit: Option<Permit>,
}

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
}

/// Replies in one system call, at most: what they need of slices fits on the stack.
const REPLIES_MAX: usize = 64;

impl Writer {
    /// Runs until everything is answered.
    pub(crate) fn run(mut self) {
        let mut batch = VecDeque::new();
        let mut heads = Vec::new();
        let mut broken = false;
        while self.replies.next_batch(&mut batch) {
            while !broken && !batch.is_empty() {
                if let Err(error) = self.send_some(&mut batch, &mut heads) {
                    self.shared.lost(self.number, "takes no replies", &error);
                    self.socket.end();
                    broken = true;
                }
            }
            batch.clear();
        }
        if !broken {
            self.sending.say_goodbye();
        }
    }

    /// Sends the first replies of the batch and drops them, which gives their memory back.
    fn send_some(&mut self, batch: &mut VecDeque<(Pending, Reply)>, heads: &mut Vec<u8>) -> io::Result<()> {
        let count = batch.len().min(REPLIES_MAX);
        // Where each head ends, and whether content follows it.
        let mut ends = [(0, false); REPLIES_MAX];
        heads.clear();
        for ((pending, reply), end) in batch.iter().zip(&mut ends) {
            let content = pending.awaited.encode(self.structured, reply, heads);
            *end = (heads.len(), content);
        }
        let mut slices = [IoSlice::new(&[]); 2 * REPLIES_MAX];
        let mut start = 0;
        for (((_, reply), (end, content)), pair) in batch.iter().zip(ends).zip(slices.chunks_exact_mut(2)) {
            pair[0] = IoSlice::new(&heads[start..end]);
            if content {
                pair[1] = IoSlice::new(reply.buffer.as_ref().map_or(&[], Buffer::as_slice));
            }
            start = end;
        }
        let stall = self.shared.limits.stall;
        self.sending.send(&mut slices[..2 * count], stall, Some(&mut self.pace))?;
        batch.drain(..count);
        Ok(())
    }
}
