//! The limits on what clients use, and the memory for it.

use crate::proto::wire::PAYLOAD_BYTES_MAX;
use crate::server::StartError;
use bcached_port::BudgetPool;
use std::time::Duration;

/// The most that clients may use.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Connections at a time. One more takes the place of the oldest that has not chosen its
    /// export. If all have, the new connection is closed.
    pub connections: usize,
    /// Unanswered requests of one connection.
    pub requests: usize,
    /// Bytes of payload that one connection holds in memory, at least 32 MiB: the largest request.
    pub connection_bytes: u64,
    /// Bytes of payload that all connections hold in memory, at least 32 MiB. An eighth is added
    /// for small requests. For how it is granted, see [`bcached_port::budget`].
    pub total_bytes: u64,
    /// The time within which a connection must have chosen its export.
    pub handshake: Duration,
    /// The time after which a peer is given up that stalls in the middle of a request, or does not
    /// read replies while some are pending. A payload has one second more for each MiB of it.
    pub stall: Duration,
    /// While another connection waits for memory and holds none, the connections that hold some are
    /// ended once this much time was lost with each: they do not read replies, or do not send
    /// payload, or are slower than 256 KiB a second. The waiting connection has then waited as
    /// long.
    pub give_way: Duration,
}

/// A connection that holds memory has to leave four times as much free. So it gets at most a fifth,
/// which is enough for any queue depth. Many connections that keep theirs still leave enough for
/// large requests of others.
const LEAVES: u64 = 4;
/// The divisor that gives the share of the total memory kept as buffers for reuse.
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
            return Err(StartError::Limits("at least one connection with one request is needed"));
        }
        if self.connection_bytes < largest || self.total_bytes < largest {
            return Err(StartError::Limits("the largest request, 32 MiB, must fit in memory"));
        }
        Ok(())
    }
}

/// Creates a pool of so many bytes for payloads. Its memory is granted such that a connection that
/// keeps what it has blocks no other.
#[must_use]
pub fn memory(bytes: u64) -> BudgetPool {
    BudgetPool::new(bytes).leaving(LEAVES)
}

/// The bytes of buffers of past requests that are kept.
pub(crate) fn stock_of(total_bytes: u64) -> usize {
    usize::try_from(total_bytes / STOCK_PART).unwrap_or(usize::MAX)
}
