//! The seam between the engine and the world: owned operations down, owned completions up.
//!
//! Rules of every driver: an operation owns its memory until its completion, whatever happens to whoever asked; a
//! short transfer is finished or failed inside the driver, nobody above sees one; completions may come in any order,
//! late or never; operations submitted together may be carried out in any order.

use crate::buffer::{Buffer, Payload};
use crate::time::Time;
use alloc::vec::Vec;
use thiserror::Error;

/// A device that the driver knows by number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DiskId(pub u32);

/// Names one operation in flight; chosen by the executor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Token(pub u64);

/// What a device is and can do. Sizes in sectors of 512 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskInfo {
    /// Capacity.
    pub sectors: u64,
    /// Smallest unit of I/O the device accepts (1 or 8 commonly); unaligned requests fail.
    pub logical_block_sectors: u32,
    /// Completed writes may be lost at a power cut until a flush: flush and FUA mean something.
    pub volatile_cache: bool,
    /// A write with FUA is one operation of the device itself. If not, it is a write and a flush, and its failure may be
    /// that of the flush.
    pub fua: bool,
    /// Writes of so many sectors, at multiples of that, are the best for it: a stripe of an array. 0: any are.
    pub optimal_io_sectors: u64,
    /// Smaller writes cost it reads: an array with parity.
    pub partial_stripes_expensive: bool,
    /// Discards are carried out rather than refused.
    pub discard: bool,
    /// [`Op::Zero`] that keeps its space is carried out rather than refused.
    pub write_zeroes: bool,
    /// [`Op::Zero`] that may give its space up is carried out rather than refused.
    pub unmap: bool,
}

/// One operation, owning its memory. Sectors are absolute on the device.
#[derive(Debug)]
pub enum Op {
    /// Fill `buffer` from the device.
    Read {
        /// First sector.
        sector: u64,
        /// Whole sectors of memory.
        buffer: Buffer,
    },
    /// Write `payload`; with `fua` it is durable when the completion arrives.
    Write {
        /// First sector.
        sector: u64,
        /// Whole sectors of memory.
        payload: Payload,
        /// Force unit access: durable on completion, whatever the volatile cache.
        fua: bool,
    },
    /// Make every write that has completed before this submission durable.
    Flush,
    /// The range's content is no longer needed; reads may return anything old or zero.
    Discard {
        /// First sector.
        sector: u64,
        /// Length in sectors.
        sectors: u64,
    },
    /// The range reads as zeroes from here on, and nothing is transferred for that. A device that could only write them
    /// refuses it ([`IoErrorKind::Unsupported`]), having done nothing.
    Zero {
        /// First sector.
        sector: u64,
        /// Length in sectors.
        sectors: u64,
        /// The space below may be given up, and none is taken; otherwise the device keeps it, or takes it now.
        unmap: bool,
    },
}

/// Why an operation failed, as far as the engine must tell apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum IoErrorKind {
    /// The device reported an error. The data may have landed in whole, in part or not at all.
    Io,
    /// The device is not reachable (gone, deadline passed); it may come back.
    Unreachable,
    /// The file under the device has no space left.
    NoSpace,
    /// The request was not acceptable to the device (range, alignment).
    Invalid,
    /// The operation is not supported by the device.
    Unsupported,
    /// The device has become shorter while it was in use. Every operation on it fails from then on: what its missing
    /// part held is gone, and a file that a write makes long again would show zeroes there.
    Shrunk {
        /// Its sectors before.
        expected: u64,
        /// Its sectors when it was noticed.
        found: u64,
    },
    /// The system has the device no more (pulled, its bus reset). Every operation on it fails from then on: what comes back is
    /// another device of the system.
    Gone,
}

impl IoErrorKind {
    /// Nothing is read from the device or written to it any more, until it is opened anew.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Shrunk { .. } | Self::Gone)
    }
}

impl core::fmt::Display for IoErrorKind {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str(match self {
            Self::Shrunk { expected, found } => {
                return write!(
                    formatter,
                    "the device has become shorter: {found} instead of {expected} sectors"
                );
            }
            Self::Io => "I/O error",
            Self::Unreachable => "unreachable",
            Self::NoSpace => "no space left",
            Self::Invalid => "refused as invalid",
            Self::Unsupported => "not supported",
            Self::Gone => "the device is gone",
        })
    }
}

/// An operation's failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("{kind} at sector {sector}")]
pub struct IoError {
    /// What went wrong.
    pub kind: IoErrorKind,
    /// On which device.
    pub disk: DiskId,
    /// At which sector (0 for a flush).
    pub sector: u64,
}

/// The end of one operation.
#[derive(Debug)]
pub struct Completion {
    /// The operation.
    pub token: Token,
    /// How it ended.
    pub result: Result<(), IoErrorKind>,
    /// A read's memory, returned also on failure (its content is then undefined).
    pub buffer: Option<Buffer>,
}

/// What a wait brings.
#[derive(Debug)]
pub enum Event {
    /// An operation ended.
    Done(Completion),
    /// Somebody outside rang: look at the port.
    Bell,
    /// The world ends here: the simulated power was cut or the simulated process killed. Nothing more will run.
    Halt,
}

/// The world, as one thread of the engine sees it.
pub trait Driver {
    /// Starts an operation. Never blocks and never fails: failures come as completions.
    fn submit(&mut self, disk: DiskId, token: Token, op: Op);

    /// Collects events. Returns at once if there are any; otherwise waits until one comes or the clock passes
    /// `until` (`None`: no limit).
    fn wait(&mut self, until: Option<Time>, events: &mut Vec<Event>);

    /// The clock.
    fn now(&self) -> Time;

    /// Wall-clock seconds since 1970, for the time stamps of the format.
    fn wall_seconds(&self) -> u32;

    /// What `disk` is. May change over its life (capacity).
    fn info(&self, disk: DiskId) -> DiskInfo;

    /// Charges CPU time for what a task did in one piece, between two waits, or who was told of an end; virtual time passes in simulation. Nothing in
    /// production.
    fn charge(&mut self, _nanoseconds: u64) {}
}
