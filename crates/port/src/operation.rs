//! What can be asked of a volume and what comes back. Addresses and lengths are in sectors of 512 bytes: the smallest
//! unit any client may use; requests smaller than the volume's block are the engine's to make whole.
//!
//! Memory belongs to the operation until the reply returns it. Ranges arrive unchecked: the engine answers
//! [`ErrorKind::Invalid`] for one outside the volume, whatever front ends have checked (a volume may have shrunk).

use crate::error::ErrorKind;
use bcached_env::{Buffer, Payload};

/// Bytes in a sector.
pub const SECTOR_BYTES: u64 = 512;

/// A volume, as one engine numbers its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct VolumeId(pub u32);

/// A client, as the port numbers those of all engines: no two that connect have the same number. An engine that treats
/// clients by what they have asked for before tells them apart by it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ClientId(pub u64);

/// One request on a volume.
#[derive(Debug)]
pub enum Operation {
    /// Fill `buffer` (whole sectors) from `sector` on. The buffer comes back in the reply, also on failure.
    Read {
        /// First sector.
        sector: u64,
        /// Where the content goes; its length says how much.
        buffer: Buffer,
    },
    /// Write `payload` (whole sectors) at `sector`.
    Write {
        /// First sector.
        sector: u64,
        /// What to write.
        payload: Payload,
        /// Durable when the reply comes.
        fua: bool,
    },
    /// Make durable every write, discard and write of zeroes, of *any* client, whose reply was sent before this
    /// request was submitted. Being global is what lets several connections share one volume.
    Flush,
    /// The content of a range is no longer needed; later reads return anything that was there, or zeroes.
    Discard {
        /// First sector.
        sector: u64,
        /// Length; may exceed what fits in memory.
        sectors: u64,
        /// Durable when the reply comes.
        fua: bool,
    },
    /// Make a range read as zeroes.
    WriteZeroes {
        /// First sector.
        sector: u64,
        /// Length; may exceed what fits in memory.
        sectors: u64,
        /// Durable when the reply comes.
        fua: bool,
        /// The space under the range may be given up, if reads then return zeroes.
        may_discard: bool,
    },
    /// What is known about allocation, from `sector` on. At least one extent is due; fewer sectors than asked for may
    /// be described.
    BlockStatus {
        /// First sector.
        sector: u64,
        /// Length.
        sectors: u64,
        /// At most so many extents, at least 1.
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
    /// How it ended. A failed write may have been carried out in whole, in part or not at all.
    pub result: Result<(), ErrorKind>,
    /// A read's memory; its content counts only on success.
    pub buffer: Option<Buffer>,
    /// A block status' extents in order, beginning at the sector asked for.
    pub extents: Vec<StatusExtent>,
}

impl Operation {
    /// Whether it changes what the volume holds.
    #[must_use]
    pub const fn changes_content(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Discard { .. } | Self::WriteZeroes { .. })
    }

    /// The range it concerns: first sector and length. `None` for a flush.
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
    /// Done, and nothing to bring back.
    #[must_use]
    pub const fn done() -> Self {
        Self { result: Ok(()), buffer: None, extents: Vec::new() }
    }

    /// A read's content.
    #[must_use]
    pub const fn content(buffer: Buffer) -> Self {
        Self { result: Ok(()), buffer: Some(buffer), extents: Vec::new() }
    }

    /// A block status.
    #[must_use]
    pub const fn extents(extents: Vec<StatusExtent>) -> Self {
        Self { result: Ok(()), buffer: None, extents }
    }

    /// Not done. `buffer` is a read's memory, to be used again.
    #[must_use]
    pub const fn failed(kind: ErrorKind, buffer: Option<Buffer>) -> Self {
        Self { result: Err(kind), buffer, extents: Vec::new() }
    }
}
