//! What clients may use at most, and the memory for that.

use crate::proto::wire::PAYLOAD_BYTES_MAX;
use crate::server::StartError;
use bcached_port::Pool;
use std::time::Duration;

/// What clients may use at most.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at a time. One more takes the place of the oldest that has not chosen its export; if all have, it is
    /// closed as it comes.
    pub connections: usize,
    /// Requests of one connection that are not answered yet.
    pub requests: usize,
    /// Bytes of payload that one connection holds in memory, at least 32 MiB: the largest request.
    pub connection_bytes: u64,
    /// Bytes of payload that all connections hold in memory, at least 32 MiB; an eighth comes on top for small requests. How
    /// it is given out: [`bcached_port::budget`].
    pub total_bytes: u64,
    /// A connection must have chosen its export by then.
    pub handshake: Duration,
    /// A peer that stops in the middle of a request, or reads no replies while some wait, is given up after this; one whose
    /// payload is not whole by then has a second for each MiB of it on top.
    pub stall: Duration,
    /// As long as somebody waits for memory who has none, connections that hold some go when this much time is lost with
    /// them: they take no replies, or send no payload, or go slower than 256 KiB a second. Who waits has waited as long.
    pub give_way: Duration,
}

/// A connection that holds memory leaves four times as much: a fifth is enough for any depth of queue, and many that keep theirs
/// leave enough for large requests of others.
const LEAVES: u64 = 4;
/// Memory of requests that is kept for the next ones, of what all of them may hold.
const STOCK_PART: u64 = 8;

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            requests: 128,
            connection_bytes: u64::from(PAYLOAD_BYTES_MAX),
            total_bytes: 4 * u64::from(PAYLOAD_BYTES_MAX),
            handshake: Duration::from_secs(10),
            stall: Duration::from_secs(60),
            give_way: Duration::from_secs(5),
        }
    }
}

impl Limits {
    pub(crate) fn check(&self) -> Result<(), StartError> {
        let largest = u64::from(PAYLOAD_BYTES_MAX);
        if self.connections == 0 || self.requests == 0 {
            return Err(StartError::Limits("at least one connection with one request"));
        }
        if self.connection_bytes < largest || self.total_bytes < largest {
            return Err(StartError::Limits("the largest request, 32 MiB, must fit in memory"));
        }
        Ok(())
    }
}

/// Memory of so many bytes for payloads, given out so that a connection that keeps what it has stops nobody else.
#[must_use]
pub fn memory(bytes: u64) -> Pool {
    Pool::new(bytes).leaving(LEAVES)
}

/// How much memory of past requests is kept.
pub(crate) fn stock_of(total_bytes: u64) -> usize {
    usize::try_from(total_bytes / STOCK_PART).unwrap_or(usize::MAX)
}
