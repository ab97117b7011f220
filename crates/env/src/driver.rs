//! The interface between the engine and the world: owned operations down, owned completions up.
//!
//! Rules for every driver:
//! - An operation owns its memory until its completion, whatever happens to its caller.
//! - A short transfer is finished or failed inside the driver, and never visible above it.
//! - Completions may arrive in any order, late or never.
//! - Operations submitted together may be carried out in any order.

use crate::buffer::{Buffer, Payload};
use crate::time::Time;
use alloc::vec::Vec;
use thiserror::Error;

/// A device that the driver knows by number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DiskId(pub u32);

/// Identifies one operation in flight; chosen by the executor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Token(pub u64);

/// What a device is and can do. Sizes are in sectors of 512 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskInfo {
    /// Capacity.
    pub sectors: u64,
    /// Smallest unit of I/O that the device accepts (commonly 1 or 8); unaligned requests fail.
    pub logical_block_sectors: u32,
    /// Completed writes may be lost at a power cut until a flush, so flush and FUA have an effect.
    pub volatile_cache: bool,
    /// A write with FUA is one operation of the device itself. If not, it is a write and a flush,
    /// and its failure may be that of the flush.
    pub fua: bool,
    /// Writes of this many sectors, at multiples of it, are optimal: a stripe of an array. 0: no
    /// preference.
    pub optimal_io_sectors: u64,
    /// Smaller writes make the device read: an array with parity.
    pub partial_stripes_expensive: bool,
    /// Discards are carried out rather than refused.
    pub discard: bool,
    /// An [`Op::Zero`] that keeps its space is carried out rather than refused.
    pub write_zeroes: bool,
    /// An [`Op::Zero`] that may give up its space is carried out rather than refused.
    pub unmap: bool,
}

/// One operation, owning its memory. Sectors are absolute on the device.
#[derive(Debug)]
pub enum Op {
    /// Fills `buffer` from the device.
    Read {
        /// First sector.
        sector: u64,
        /// Whole sectors of memory.
        buffer: Buffer,
    },
    /// Writes `payload`; with `fua` it is durable when the completion arrives.
    Write {
        /// First sector.
        sector: u64,
        /// Whole sectors of memory.
        payload: Payload,
        /// Force unit access: durable on completion, whatever the volatile cache.
        fua: bool,
    },
    /// Makes every write that completed before this submission durable.
    Flush,
    /// The range's content is no longer needed; reads may return anything old, or zeroes.
    Discard {
        /// First sector.
        sector: u64,
        /// Length in sectors.
        sectors: u64,
    },
    /// The range reads as zeroes from now on, without a transfer of data. A device that could only
    /// write them refuses it ([`IoErrorKind::Unsupported`]) without having done anything.
    Zero {
        /// First sector.
        sector: u64,
        /// Length in sectors.
        sectors: u64,
        /// The space below may be given up, and none is allocated; otherwise the device keeps it,
        /// or allocates it now.
        unmap: bool,
    },
}

/// Why an operation failed, as far as the engine needs to distinguish.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum IoErrorKind {
    /// The device reported an error. The data may have been written in whole, in part or not at
    /// all.
    Io,
    /// The device is not reachable (gone, deadline passed); it may come back.
    Unreachable,
    /// The file under the device has no space left.
    NoSpace,
    /// The request was not acceptable to the device (range, alignment).
    Invalid,
    /// The operation is not supported by the device.
    Unsupported,
    /// The device has become shorter while it was in use. Every operation on it fails from then on:
    /// the data in its missing part is lost, and a file that a write extends again would show
    /// zeroes there.
    Shrunk {
        /// Its sectors before.
        expected: u64,
        /// Its sectors when it was noticed.
        found: u64,
    },
    /// The device is gone from the system (pulled, its bus reset). Every operation on it fails from
    /// then on: when it returns, it is a different device to the system.
    Gone,
}

impl IoErrorKind {
    /// Returns true if nothing is read from the device or written to it any more until it is opened
    /// anew.
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
            Self::Invalid => "rejected as invalid",
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

/// The completion of one operation.
#[derive(Debug)]
pub struct Completion {
    /// The operation.
    pub token: Token,
    /// Its result.
    pub result: Result<(), IoErrorKind>,
    /// A read's memory, returned also on failure (its content is then undefined).
    pub buffer: Option<Buffer>,
}

/// What a wait returns.
#[derive(Debug)]
pub enum Event {
    /// An operation completed.
    Done(Completion),
    /// The bell was rung from outside: look at the port.
    Bell,
    /// The world ends here: the simulated power was cut or the simulated process killed. Nothing
    /// more will run.
    Halt,
}

/// The world, as one thread of the engine sees it.
pub trait Driver {
    /// Starts an operation. Never blocks and never fails: failures are reported as completions.
    fn submit(&mut self, disk: DiskId, token: Token, op: Op);

    /// Collects events. Returns at once if there are any; otherwise waits until one arrives or the
    /// clock passes `until` (`None`: no limit).
    fn wait(&mut self, until: Option<Time>, events: &mut Vec<Event>);

    /// Returns the clock.
    fn now(&self) -> Time;

    /// Returns the wall-clock seconds since 1970, for the time stamps of the format.
    fn wall_seconds(&self) -> u32;

    /// Returns what `disk` is. May change over its life (capacity).
    fn info(&self, disk: DiskId) -> DiskInfo;

    /// Charges CPU time for what a task did in one piece between two waits, or what a listener did.
    /// In simulation, virtual time passes; in production, this does nothing.
    fn charge(&mut self, _nanoseconds: u64) {}
}
