//! A request that can be retried.

use bcached_env::Buffer;
use bcached_port::Operation;

/// What another attempt needs. A read's buffer is returned by the previous attempt.
pub enum Retry {
    /// A read from this sector on.
    Read(u64),
    /// Anything else. The payload of a write is shared, not copied.
    Other(Operation),
}

impl Retry {
    /// Creates the retry data of a request that is about to be tried.
    #[must_use]
    pub fn of(operation: &Operation) -> Self {
        Self::Other(match operation {
            Operation::Read { sector, .. } => return Self::Read(*sector),
            Operation::Write { sector, payload, fua } => {
                Operation::Write { sector: *sector, payload: payload.clone(), fua: *fua }
            }
            Operation::Flush => Operation::Flush,
            Operation::Discard { sector, sectors, fua } => {
                Operation::Discard { sector: *sector, sectors: *sectors, fua: *fua }
            }
            Operation::WriteZeroes { sector, sectors, fua, may_discard } => Operation::WriteZeroes {
                sector: *sector,
                sectors: *sectors,
                fua: *fua,
                may_discard: *may_discard,
            },
            Operation::BlockStatus { sector, sectors, extents_max } => {
                Operation::BlockStatus { sector: *sector, sectors: *sectors, extents_max: *extents_max }
            }
        })
    }

    /// Returns whether the request changes the volume's content.
    #[must_use]
    pub const fn changes_content(&self) -> bool {
        matches!(self, Self::Other(operation) if operation.changes_content())
    }

    /// Returns the request; a read gets this buffer.
    #[must_use]
    pub fn with(self, buffer: Option<Buffer>) -> Operation {
        match self {
            Self::Read(sector) => Operation::Read { sector, buffer: buffer.unwrap_or_default() },
            Self::Other(operation) => operation,
        }
    }
}
