//! The operations on a volume and their replies. Addresses and lengths are in sectors of 512 bytes,
//! the smallest unit that any client may use. The engine extends requests smaller than the volume's
//! block.
//!
//! Memory belongs to the operation until the reply returns it. Ranges arrive unchecked: the engine
//! answers [`ErrorKind::Invalid`] for one outside the volume, whatever front ends have checked (a
//! volume may have shrunk).

use crate::error::ErrorKind;
use bcached_env::{Buffer, Payload};

/// Bytes in a sector.
pub const SECTOR_BYTES: u64 = 512;

/// A volume, by its number within one engine.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct VolumeId(pub u32);

/// A client, numbered across all engines: no two connected clients have the same number. An engine
/// that treats clients according to their earlier requests distinguishes them by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ClientId(pub u64);

/// One request on a volume.
#[derive(Debug)]
pub enum Operation {
    /// Fill `buffer` (whole sectors) from `sector` on. The buffer is returned in the reply, also on
    /// failure.
    Read {
        /// First sector.
        sector: u64,
        /// Receives the content; its length determines how much is read.
        buffer: Buffer,
    },
    /// Write `payload` (whole sectors) at `sector`.
    Write {
        /// First sector.
        sector: u64,
        /// What to write.
        payload: Payload,
        /// Durable when the reply arrives.
        fua: bool,
    },
    /// Make durable every write, discard and write of zeroes, of *any* client, whose reply was sent
    /// before this request was submitted. Because it is global, several connections can share one
    /// volume.
    Flush,
    /// The content of a range is no longer needed; later reads return anything that was there, or
    /// zeroes.
    Discard {
        /// First sector.
        sector: u64,
        /// Length; may exceed what fits in memory.
        sectors: u64,
        /// Durable when the reply arrives.
        fua: bool,
    },
    /// Make a range read as zeroes.
    WriteZeroes {
        /// First sector.
        sector: u64,
        /// Length; may exceed what fits in memory.
        sectors: u64,
        /// Durable when the reply arrives.
        fua: bool,
        /// The space under the range may be given up, if reads then return zeroes.
        may_discard: bool,
    },
    /// Report what is known about allocation, from `sector` on. The reply has at least one extent;
    /// it may describe fewer sectors than requested.
    BlockStatus {
        /// First sector.
        sector: u64,
        /// Length.
        sectors: u64,
        /// Maximum number of extents, at least 1.
        extents_max: u32,
    },
}

/// A piece of a volume in the answer to [`Operation::BlockStatus`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatusExtent {
    /// Length in sectors, not 0.
    pub sectors: u64,
    /// No space is allocated for it.
    pub hole: bool,
    /// It reads as zeroes.
    pub zero: bool,
}

/// The answer to a request.
#[derive(Debug)]
pub struct Reply {
    /// The result. A failed write may have been carried out in whole, in part or not at all.
    pub result: Result<(), ErrorKind>,
    /// A read's memory; its content is valid only on success.
    pub buffer: Option<Buffer>,
    /// A block status' extents in order, beginning at the requested sector.
    pub extents: Vec<StatusExtent>,
}

impl Operation {
    /// Returns whether it changes the content of the volume.
    #[must_use]
    pub const fn changes_content(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Discard { .. } | Self::WriteZeroes { .. })
    }

    /// Returns its range: first sector and length. `None` for a flush.
    #[must_use]
    pub fn range(&self) -> Option<(u64, u64)> {
        match self {
            Self::Read { sector, buffer } => Some((*sector, buffer.len() as u64 / SECTOR_BYTES)),
            Self::Write { sector, payload, .. } => Some((*sector, payload.len() as u64 / SECTOR_BYTES)),
            Self::Discard { sector, sectors, .. }
            | Self::WriteZeroes { sector, sectors, .. }
            | Self::BlockStatus { sector, sectors, .. } => Some((*sector, *sectors)),
            Self::Flush => None,
        }
    }
}

impl Reply {
    /// Success, with nothing to return.
    #[must_use]
    pub const fn done() -> Self {
        Self { result: Ok(()), buffer: None, extents: Vec::new() }
    }

    /// The content of a read.
    #[must_use]
    pub const fn content(buffer: Buffer) -> Self {
        Self { result: Ok(()), buffer: Some(buffer), extents: Vec::new() }
    }

    /// A block status.
    #[must_use]
    pub const fn extents(extents: Vec<StatusExtent>) -> Self {
        Self { result: Ok(()), buffer: None, extents }
    }

    /// Failure. `buffer` is a read's memory, to be reused.
    #[must_use]
    pub const fn failed(kind: ErrorKind, buffer: Option<Buffer>) -> Self {
        Self { result: Err(kind), buffer, extents: Vec::new() }
    }
}
