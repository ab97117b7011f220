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
pub(crate) enum Malformed {
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
pub(crate) enum Parsed {
    /// A request, and the address of its status.
    Run { command: Command, status: GuestAddress },
    /// A request that is answered with this status.
    Refuse { answer: u8, status: GuestAddress, why: Option<Malformed> },
    /// The chain has no place for an answer.
    Silence(Malformed),
}

/// A descriptor table.
#[derive(Clone, Copy)]
pub(crate) struct Table {
    pub(crate) at: GuestAddress,
    pub(crate) descriptors: u32,
}

/// Reads the chain that starts at `head`.
pub(crate) fn parse(memory: &GuestMemory, table: Table, head: u16) -> Parsed {
    let (mut readable, mut writable, fault) = match walk(memory, table, head) {
        Ok(found) => found,
        Err(why) => return Parsed::Silence(why),
    };
    let Some(status) = writable.take_last_byte() else { return Parsed::Silence(Malformed::NoStatus) };
    let mut cell = Segments::default();
    cell.push(status, 1);
    if !cell.are_in(memory) {
        return Parsed::Silence(Malformed::NoStatus);
    }
    let refuse = |why| Parsed::Refuse { answer: IOERR, status, why: Some(why) };
    if let Some(why) = fault {
        return refuse(why);
    }
    if !readable.are_in(memory) || !writable.are_in(memory) {
        return refuse(Malformed::Unmapped);
    }
    let Some(header) = readable.take_front::<HEADER_BYTES>(memory) else {
        return refuse(Malformed::NoHeader);
    };
    let sector = le64(&header, 8);
    let command = match le32(&header, 0) {
        blk::VIRTIO_BLK_T_IN => data(readable, writable).map(|into| Command::Read { sector, into }),
        blk::VIRTIO_BLK_T_OUT => data(writable, readable).map(|from| Command::Write { sector, from }),
        blk::VIRTIO_BLK_T_FLUSH => Ok(Command::Flush),
        blk::VIRTIO_BLK_T_GET_ID if writable.bytes() > 0 => Ok(Command::Identify { into: writable }),
        blk::VIRTIO_BLK_T_GET_ID => Err(Malformed::Empty),
        kind @ (blk::VIRTIO_BLK_T_DISCARD | blk::VIRTIO_BLK_T_WRITE_ZEROES) => {
            match range(memory, readable) {
                Err(why) => Err(why),
                Ok(range) => match range.command(kind) {
                    Some(command) => Ok(command),
                    None => return Parsed::Refuse { answer: UNSUPP, status, why: None },
                },
            }
        }
        _ => return Parsed::Refuse { answer: UNSUPP, status, why: None },
    };
    command.map_or_else(refuse, |command| Parsed::Run { command, status })
}

/// Status of a request that failed.
pub(crate) const IOERR: u8 = blk::VIRTIO_BLK_S_IOERR.to_le_bytes()[0];
/// Status of a request of an unsupported type.
pub(crate) const UNSUPP: u8 = blk::VIRTIO_BLK_S_UNSUPP.to_le_bytes()[0];
/// Status of a request that succeeded.
pub(crate) const OK: u8 = blk::VIRTIO_BLK_S_OK.to_le_bytes()[0];

/// The data of a read or write, which must have none in the other direction.
fn data(other: Segments, data: Segments) -> Result<Segments, Malformed> {
    match data.bytes() {
        _ if other.bytes() > 0 => Err(Malformed::Misplaced),
        0 => Err(Malformed::Empty),
        bytes if bytes > REQUEST_BYTES_MAX => Err(Malformed::Long),
        bytes if bytes % SECTOR_BYTES != 0 => Err(Malformed::Ragged),
        _ => Ok(data),
    }
}

/// A range to be discarded or zeroed.
struct Range {
    sector: u64,
    sectors: u64,
    flags: u32,
}

fn range(memory: &GuestMemory, mut from: Segments) -> Result<Range, Malformed> {
    let bytes = from.take_front::<HEADER_BYTES>(memory).ok_or(Malformed::Ranges)?;
    if from.bytes() > 0 {
        return Err(Malformed::Ranges);
    }
    let range =
        Range { sector: le64(&bytes, 0), sectors: u64::from(le32(&bytes, 8)), flags: le32(&bytes, 12) };
    if range.sectors == 0 { Err(Malformed::Empty) } else { Ok(range) }
}

impl Range {
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
type Walked = (Segments, Segments, Option<Malformed>);

fn walk(memory: &GuestMemory, mut table: Table, head: u16) -> Result<Walked, Malformed> {
    let (mut readable, mut writable) = (Segments::default(), Segments::default());
    let mut fault = None;
    let mut is_indirect = false;
    let mut index = u32::from(head);
    let mut left = DESCRIPTORS_MAX.min(table.descriptors);
    loop {
        left = left.checked_sub(1).ok_or(Malformed::Endless)?;
        let descriptor = table.read(memory, index)?;
        if descriptor.refers_to_indirect_table() {
            // An indirect table may follow plain descriptors, but nothing may follow it.
            if is_indirect || descriptor.has_next() {
                return Err(Malformed::Table);
            }
            is_indirect = true;
            table = Table::indirect(&descriptor)?;
            (index, left) = (0, DESCRIPTORS_MAX.min(table.descriptors));
            continue;
        }
        if descriptor.len() == 0 {
            fault = Some(Malformed::Empty);
        } else if descriptor.is_write_only() {
            writable.push(descriptor.addr(), descriptor.len());
        } else {
            if writable.bytes() > 0 {
                fault = Some(Malformed::Order);
            }
            readable.push(descriptor.addr(), descriptor.len());
        }
        if !descriptor.has_next() {
            return Ok((readable, writable, fault));
        }
        index = u32::from(descriptor.next());
    }
}

impl Table {
    /// The table that an indirect descriptor refers to.
    fn indirect(descriptor: &Descriptor) -> Result<Self, Malformed> {
        let bytes = u64::from(descriptor.len());
        let descriptors = u32::try_from(bytes / DESCRIPTOR_BYTES).map_err(|_| Malformed::Table)?;
        let whole = bytes % DESCRIPTOR_BYTES == 0;
        if whole { Ok(Self { at: descriptor.addr(), descriptors }) } else { Err(Malformed::Table) }
    }

    fn read(&self, memory: &GuestMemory, index: u32) -> Result<Descriptor, Malformed> {
        if index >= self.descriptors {
            return Err(Malformed::Table);
        }
        let at = self.at.0.checked_add(u64::from(index) * DESCRIPTOR_BYTES).ok_or(Malformed::Table)?;
        memory.read_obj(GuestAddress(at)).map_err(|_| Malformed::Table)
    }
}

fn le32(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |field| u32::from_le_bytes(*field))
}

fn le64(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |field| u64::from_le_bytes(*field))
}

impl fmt::Display for Malformed {
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
