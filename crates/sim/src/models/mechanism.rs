//! The interface of a device model. It has no content, only timing.

/// What a command does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CommandKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Writes, and is durable on completion.
    WriteFua,
    /// Makes all writes that completed before durable.
    Flush,
    /// Discards content.
    Discard,
}

/// One command to a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceCommand {
    /// Chosen by the caller, and returned on completion.
    pub number: u64,
    /// The kind of command.
    pub kind: CommandKind,
    /// First sector of 512 bytes; 0 for a flush.
    pub sector: u64,
    /// Length in sectors; 0 for a flush.
    pub sectors: u64,
}

impl DeviceCommand {
    /// Returns the sector at which it ends.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.sector + self.sectors
    }
}

/// The internal timing of a device, in virtual nanoseconds. The caller never goes back in time.
pub trait TimingModel {
    /// Submits a command at `now`.
    fn submit(&mut self, now: u64, command: DeviceCommand);

    /// Returns the time of the next internal event, if nothing more is submitted.
    fn next(&self) -> Option<u64>;

    /// Processes all events up to `time`, and appends the numbers of the commands that have
    /// completed by then to `ended`, in order.
    fn advance(&mut self, time: u64, ended: &mut Vec<u64>);
}

/// Bytes in a sector.
pub const SECTOR_BYTES: u64 = 512;
