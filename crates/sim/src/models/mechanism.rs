//! What a device model takes and answers. No content here: only when.

/// What a command does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Writes, and is durable when it has ended.
    WriteFua,
    /// Makes what has been written before durable.
    Flush,
    /// Gives up content.
    Discard,
}

/// One command to a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Command {
    /// Chosen by who asks, and answered with.
    pub number: u64,
    /// What.
    pub kind: Kind,
    /// First sector of 512 bytes; 0 for a flush.
    pub sector: u64,
    /// Length in sectors; 0 for a flush.
    pub sectors: u64,
}

impl Command {
    /// Where it ends, in sectors.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.sector + self.sectors
    }
}

/// A device's inner life, in virtual nanoseconds. Who drives it never goes back in time.
pub trait Mechanism {
    /// Takes a command at `now`.
    fn submit(&mut self, now: u64, command: Command);

    /// When something happens next inside, if nothing more is submitted.
    fn next(&self) -> Option<u64>;

    /// Lets happen what happens up to `time`; numbers of the commands that have ended by it are added to `ended`, in order.
    fn advance(&mut self, time: u64, ended: &mut Vec<u64>);
}

/// Bytes in a sector.
pub const SECTOR_BYTES: u64 = 512;
