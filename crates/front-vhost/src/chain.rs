//! Parses a chain of descriptors, which is read once, into a request. Whatever a guest writes there
//! is answered or skipped. The guest cannot make the walk longer than [`DESCRIPTORS_MAX`], or cause
//! an allocation of a size that it chooses.
//!
//! A driver may split header, data and status into descriptors as it likes (`VIRTIO_F_VERSION_1`).
//! The first 16 device-readable bytes are the header, the last device-writable byte is the status,
//! and the rest is data.

use crate::config::REQUEST_BYTES_MAX;
use crate::memory::{GuestMemory, Segments};
use bcached_port::SECTOR_BYTES;
use std::fmt;
use virtio_bindings::virtio_blk as blk;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes as _, GuestAddress};

/// The most descriptors of a chain: as many as a queue of the maximum size holds.
pub(crate) const DESCRIPTORS_MAX: u32 = 1024;
/// Bytes of a descriptor.
const DESCRIPTOR_BYTES: u64 = 16;
/// Bytes of the header, and of a discard range.
const HEADER_BYTES: usize = 16;

/// What is wrong with a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ChainError {
    /// A descriptor or its table is missing, or the table is invalid.
    Table,
    /// It has no end, or is too long.
    Endless,
    /// A readable descriptor follows a writable one.
    Order,
    /// It has no byte for the status.
    NoStatus,
    /// An address is not in the guest's memory.
    Unmapped,
    /// A descriptor or a request has zero bytes.
    Empty,
    /// It has no header.
    NoHeader,
    /// The request has data where it must have none.
    Misplaced,
    /// The data is not whole sectors.
    Ragged,
    /// The data is longer than the maximum.
    Long,
    /// There is not exactly one range.
    Ranges,
}

/// The requested operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Command {
    Read { sector: u64, into: Segments },
    Write { sector: u64, from: Segments },
    Flush,
    Identify { into: Segments },
    Discard { sector: u64, sectors: u64 },
    WriteZeroes { sector: u64, sectors: u64, may_discard: bool },
}

/// The result of parsing a chain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ParsedChain {
    /// A request, and the address of its status.
    Run { command: Command, status: GuestAddress },
    /// A request that is answered with this status.
    Refuse { answer: u8, status: GuestAddress, why: Option<ChainError> },
    /// The chain has no place for an answer.
    Unanswerable(ChainError),
}

/// A descriptor table.
#[derive(Clone, Copy)]
pub(crate) struct DescriptorTable {
    pub(crate) at: GuestAddress,
    pub(crate) descriptors: u32,
}

/// Reads the chain that starts at `head`.
pub(crate) fn parse(memory: &GuestMemory, table: DescriptorTable, head: u16) -> ParsedChain {
    let (mut readable, mut writable, fault) = match walk(memory, table, head) {
        Ok(found) => found,
        Err(why) => return ParsedChain::Unanswerable(why),
    };
    let Some(status) = writable.take_last_byte() else {
        return ParsedChain::Unanswerable(ChainError::NoStatus);
    };
    let mut cell = Segments::default();
    cell.push(status, 1);
    if !cell.are_in(memory) {
        return ParsedChain::Unanswerable(ChainError::NoStatus);
    }
    let refuse = |why| ParsedChain::Refuse { answer: IOERR, status, why: Some(why) };
    if let Some(why) = fault {
        return refuse(why);
    }
    if !readable.are_in(memory) || !writable.are_in(memory) {
        return refuse(ChainError::Unmapped);
    }
    let Some(header) = readable.take_front::<HEADER_BYTES>(memory) else {
        return refuse(ChainError::NoHeader);
    };
    let sector = le64(&header, 8);
    let command = match le32(&header, 0) {
        blk::VIRTIO_BLK_T_IN => data(readable, writable).map(|into| Command::Read { sector, into }),
        blk::VIRTIO_BLK_T_OUT => data(writable, readable).map(|from| Command::Write { sector, from }),
        blk::VIRTIO_BLK_T_FLUSH => Ok(Command::Flush),
        blk::VIRTIO_BLK_T_GET_ID if writable.bytes() > 0 => Ok(Command::Identify { into: writable }),
        blk::VIRTIO_BLK_T_GET_ID => Err(ChainError::Empty),
        kind @ (blk::VIRTIO_BLK_T_DISCARD | blk::VIRTIO_BLK_T_WRITE_ZEROES) => {
            match range(memory, readable) {
                Err(why) => Err(why),
                Ok(range) => match range.command(kind) {
                    Some(command) => Ok(command),
                    None => return ParsedChain::Refuse { answer: UNSUPP, status, why: None },
                },
            }
        }
        _ => return ParsedChain::Refuse { answer: UNSUPP, status, why: None },
    };
    command.map_or_else(refuse, |command| ParsedChain::Run { command, status })
}

/// Status of a request that failed.
pub(crate) const IOERR: u8 = blk::VIRTIO_BLK_S_IOERR.to_le_bytes()[0];
/// Status of a request of an unsupported type.
pub(crate) const UNSUPP: u8 = blk::VIRTIO_BLK_S_UNSUPP.to_le_bytes()[0];
/// Status of a request that succeeded.
pub(crate) const OK: u8 = blk::VIRTIO_BLK_S_OK.to_le_bytes()[0];

/// The data of a read or write, which must have none in the other direction.
fn data(other: Segments, data: Segments) -> Result<Segments, ChainError> {
    match data.bytes() {
        _ if other.bytes() > 0 => Err(ChainError::Misplaced),
        0 => Err(ChainError::Empty),
        bytes if bytes > REQUEST_BYTES_MAX => Err(ChainError::Long),
        bytes if bytes % SECTOR_BYTES != 0 => Err(ChainError::Ragged),
        _ => Ok(data),
    }
}

/// A range to be discarded or zeroed.
struct DiscardRange {
    sector: u64,
    sectors: u64,
    flags: u32,
}

fn range(memory: &GuestMemory, mut from: Segments) -> Result<DiscardRange, ChainError> {
    let bytes = from.take_front::<HEADER_BYTES>(memory).ok_or(ChainError::Ranges)?;
    if from.bytes() > 0 {
        return Err(ChainError::Ranges);
    }
    let range = DiscardRange {
        sector: le64(&bytes, 0),
        sectors: u64::from(le32(&bytes, 8)),
        flags: le32(&bytes, 12),
    };
    if range.sectors == 0 { Err(ChainError::Empty) } else { Ok(range) }
}

impl DiscardRange {
    /// Returns `None` if the range has flags that are invalid for the operation.
    const fn command(&self, kind: u32) -> Option<Command> {
        let Self { sector, sectors, flags } = *self;
        match (kind, flags) {
            (blk::VIRTIO_BLK_T_DISCARD, 0) => Some(Command::Discard { sector, sectors }),
            (blk::VIRTIO_BLK_T_WRITE_ZEROES, 0 | blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP) => {
                Some(Command::WriteZeroes { sector, sectors, may_discard: flags != 0 })
            }
            _ => None,
        }
    }
}

/// The readable and the writable segments of a chain, and what is wrong with it if its end was
/// reached nevertheless.
type ChainSegments = (Segments, Segments, Option<ChainError>);

fn walk(memory: &GuestMemory, mut table: DescriptorTable, head: u16) -> Result<ChainSegments, ChainError> {
    let (mut readable, mut writable) = (Segments::default(), Segments::default());
    let mut fault = None;
    let mut is_indirect = false;
    let mut index = u32::from(head);
    let mut left = DESCRIPTORS_MAX.min(table.descriptors);
    loop {
        left = left.checked_sub(1).ok_or(ChainError::Endless)?;
        let descriptor = table.read(memory, index)?;
        if descriptor.refers_to_indirect_table() {
            // An indirect table may follow plain descriptors, but nothing may follow it.
            if is_indirect || descriptor.has_next() {
                return Err(ChainError::Table);
            }
            is_indirect = true;
            table = DescriptorTable::indirect(&descriptor)?;
            (index, left) = (0, DESCRIPTORS_MAX.min(table.descriptors));
            continue;
        }
        if descriptor.len() == 0 {
            fault = Some(ChainError::Empty);
        } else if descriptor.is_write_only() {
            writable.push(descriptor.addr(), descriptor.len());
        } else {
            if writable.bytes() > 0 {
                fault = Some(ChainError::Order);
            }
            readable.push(descriptor.addr(), descriptor.len());
        }
        if !descriptor.has_next() {
            return Ok((readable, writable, fault));
        }
        index = u32::from(descriptor.next());
    }
}

impl DescriptorTable {
    /// The table that an indirect descriptor refers to.
    fn indirect(descriptor: &Descriptor) -> Result<Self, ChainError> {
        let bytes = u64::from(descriptor.len());
        let descriptors = u32::try_from(bytes / DESCRIPTOR_BYTES).map_err(|_| ChainError::Table)?;
        let whole = bytes % DESCRIPTOR_BYTES == 0;
        if whole { Ok(Self { at: descriptor.addr(), descriptors }) } else { Err(ChainError::Table) }
    }

    fn read(&self, memory: &GuestMemory, index: u32) -> Result<Descriptor, ChainError> {
        if index >= self.descriptors {
            return Err(ChainError::Table);
        }
        let at = self.at.0.checked_add(u64::from(index) * DESCRIPTOR_BYTES).ok_or(ChainError::Table)?;
        memory.read_obj(GuestAddress(at)).map_err(|_| ChainError::Table)
    }
}

fn le32(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |field| u32::from_le_bytes(*field))
}

fn le64(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |field| u64::from_le_bytes(*field))
}

impl fmt::Display for ChainError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Table => "a descriptor is missing, or its table is invalid",
            Self::Endless => "it has no end, or is too long",
            Self::Order => "a readable descriptor follows a writable one",
            Self::NoStatus => "it has no room for a status",
            Self::Unmapped => "it refers to an address outside the guest's memory",
            Self::Empty => "a part of it has no bytes",
            Self::NoHeader => "it has no header",
            Self::Misplaced => "it has data in the wrong direction",
            Self::Ragged => "its data is not whole sectors",
            Self::Long => "it has more data than a request may have",
            Self::Ranges => "it does not have exactly one range",
        })
    }
}
