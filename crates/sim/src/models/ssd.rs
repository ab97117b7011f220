//! A model of a solid-state drive: flash that serves many reads in parallel, one link to the host,
//! and a write buffer that drains to the flash, faster for sequential writes.
//!
//! A read waits for a free channel, takes [`SsdModel::read_ns`] there, and then uses the link. A
//! write uses the link, waits for room in the buffer, and completes [`SsdModel::write_ns`] later.
//! The drive's internal work to make room for random writes is included in the rate at which they
//! drain. Reads and writes delay each other only on the link. Stalls from the drive's own
//! housekeeping are not modelled, so that every measured tail is the engine's.

use super::mechanism::{CommandKind, DeviceCommand, SECTOR_BYTES, TimingModel};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

/// The parameters of a drive.
#[derive(Clone, Debug)]
pub struct SsdModel {
    /// Number of reads that the flash serves in parallel.
    pub channels: usize,
    /// Time of a read in the flash, in nanoseconds.
    pub read_ns: u64,
    /// Time of any command on the link, in nanoseconds.
    pub command_ns: u64,
    /// Link speed, in bytes per microsecond.
    pub link_bytes_us: u64,
    /// Time from a write's admission to the buffer to its completion, in nanoseconds.
    pub write_ns: u64,
    /// Size of the buffer, in bytes.
    pub buffer_bytes: u64,
    /// Time to drain 4 KiB of a random write, in nanoseconds.
    pub random_drain_ns: u64,
    /// The same for a sequential write.
    pub sequential_drain_ns: u64,
    /// Overhead of a flush, in nanoseconds.
    pub flush_ns: u64,
    /// Whether the buffer survives a loss of power: a flush need not drain it.
    pub is_power_safe: bool,
}

/// Unit of the drain times, in bytes.
const PAGE_BYTES: u64 = 4096;
/// Number of write streams that a drive can tell apart.
const STREAMS: usize = 64;
/// A write that begins up to this many sectors behind the end of a stream still continues it,
/// because commands overtake each other a little.
const STREAM_GAP: u64 = 256;

impl SsdModel {
    /// A SATA drive with power-loss protection.
    #[must_use]
    pub const fn sata_plp() -> Self {
        Self {
            channels: 32,
            read_ns: 110_600,
            command_ns: 2_950,
            link_bytes_us: 550,
            write_ns: 31_600,
            buffer_bytes: 4 << 20,
            random_drain_ns: 40_650,
            // 480 MB/s.
            sequential_drain_ns: 8_530,
            flush_ns: 24_000,
            is_power_safe: true,
        }
    }

    /// A consumer SATA drive: fast to accept writes, slow to make them durable.
    #[must_use]
    pub const fn consumer() -> Self {
        Self {
            read_ns: 68_600,
            write_ns: 20_000,
            buffer_bytes: 8 << 20,
            random_drain_ns: 84_700,
            // 450 MB/s.
            sequential_drain_ns: 9_100,
            flush_ns: 3_728_000,
            is_power_safe: false,
            ..Self::sata_plp()
        }
    }

    /// An NVMe drive with power-loss protection.
    #[must_use]
    pub const fn nvme_plp() -> Self {
        Self {
            channels: 128,
            read_ns: 80_800,
            command_ns: 0,
            link_bytes_us: 3_480,
            write_ns: 21_800,
            buffer_bytes: 16 << 20,
            random_drain_ns: 8_060,
            // 2 GB/s.
            sequential_drain_ns: 2_048,
            flush_ns: 6_100,
            is_power_safe: true,
        }
    }

    fn link_ns(&self, sectors: u64) -> u64 {
        self.command_ns + sectors * SECTOR_BYTES * 1000 / self.link_bytes_us
    }
}

/// The stage of a command.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum CommandStage {
    /// Its data has been read from the flash; it needs the link.
    Read,
    /// It needs the link to send its data, if any.
    Arrived,
    /// Its data is on the drive; it needs room in the buffer.
    Taken,
    /// A flush that has arrived: it covers everything before it.
    Flushing,
    /// It has completed.
    Ended,
}

/// A drive and its state.
pub struct Ssd {
    model: SsdModel,
    /// Pending events: time, sequence number, stage, command.
    due: BinaryHeap<Reverse<(u64, u64, CommandStage, u64)>>,
    next_due: u64,
    commands: BTreeMap<u64, DeviceCommand>,
    /// Reads that wait for a channel.
    waiting: VecDeque<u64>,
    reading: usize,
    link_free_at: u64,
    /// When everything in the buffer has drained.
    drained_at: u64,
    /// Ends of write streams, newest last.
    streams: VecDeque<u64>,
}

impl Ssd {
    /// An idle drive.
    #[must_use]
    pub fn new(model: SsdModel) -> Self {
        Self {
            model,
            due: BinaryHeap::new(),
            next_due: 0,
            commands: BTreeMap::new(),
            waiting: VecDeque::new(),
            reading: 0,
            link_free_at: 0,
            drained_at: 0,
            streams: VecDeque::new(),
        }
    }

    fn schedule(&mut self, time: u64, stage: CommandStage, number: u64) {
        self.due.push(Reverse((time, self.next_due, stage, number)));
        self.next_due += 1;
    }

    fn begin_reads(&mut self, now: u64) {
        while self.reading < self.model.channels
            && let Some(number) = self.waiting.pop_front()
        {
            self.reading += 1;
            self.schedule(now + self.model.read_ns, CommandStage::Read, number);
        }
    }

    /// Returns when the link has moved the data of `command`, which needs it from `now` on.
    fn move_over_link(&mut self, now: u64, command: DeviceCommand) -> u64 {
        self.link_free_at = self.link_free_at.max(now) + self.model.link_ns(command.sectors);
        self.link_free_at
    }

    /// Returns whether the write continues a stream. In either case its end is recorded as the end
    /// of a stream.
    fn continues(&mut self, command: DeviceCommand) -> bool {
        let continued = |end: &u64| command.sector >= *end && command.sector - end <= STREAM_GAP;
        let found = self.streams.iter().rposition(continued);
        if let Some(index) = found {
            self.streams.remove(index);
        } else if self.streams.len() == STREAMS {
            self.streams.pop_front();
        }
        self.streams.push_back(command.end());
        found.is_some()
    }

    /// Returns when the buffer has room for the data of `command`, which arrives at `now`.
    fn take(&mut self, now: u64, command: DeviceCommand) -> u64 {
        let is_sequential = self.continues(command);
        let SsdModel { random_drain_ns, sequential_drain_ns, buffer_bytes, .. } = self.model;
        let page_ns = if is_sequential { sequential_drain_ns } else { random_drain_ns };
        self.drained_at = self.drained_at.max(now) + page_ns * command.sectors * SECTOR_BYTES / PAGE_BYTES;
        now.max(self.drained_at.saturating_sub(buffer_bytes / PAGE_BYTES * page_ns))
    }

    /// Returns when a flush that begins now completes.
    fn flushed_at(&self, now: u64) -> u64 {
        let drained = if self.model.is_power_safe { now } else { now.max(self.drained_at) };
        drained + self.model.flush_ns
    }

    fn happen(&mut self, now: u64, stage: CommandStage, number: u64, ended: &mut Vec<u64>) {
        let command = self.commands[&number];
        match stage {
            CommandStage::Read => {
                self.reading -= 1;
                self.begin_reads(now);
                let moved = self.move_over_link(now, command);
                self.schedule(moved, CommandStage::Ended, number);
            }
            CommandStage::Arrived => {
                let moved = self.move_over_link(now, command);
                let next = if command.kind == CommandKind::Flush {
                    CommandStage::Flushing
                } else {
                    CommandStage::Taken
                };
                let next = if command.kind == CommandKind::Discard { CommandStage::Ended } else { next };
                self.schedule(moved, next, number);
            }
            CommandStage::Taken => {
                let mut end = self.take(now, command) + self.model.write_ns;
                if command.kind == CommandKind::WriteFua && !self.model.is_power_safe {
                    end = self.flushed_at(end);
                }
                self.schedule(end, CommandStage::Ended, number);
            }
            CommandStage::Flushing => {
                let end = self.flushed_at(now);
                self.schedule(end, CommandStage::Ended, number);
            }
            CommandStage::Ended => {
                self.commands.remove(&number);
                ended.push(number);
            }
        }
    }
}

impl TimingModel for Ssd {
    fn submit(&mut self, now: u64, command: DeviceCommand) {
        // A discard moves no data.
        let sectors = if command.kind == CommandKind::Discard { 0 } else { command.sectors };
        self.commands.insert(command.number, DeviceCommand { sectors, ..command });
        if command.kind == CommandKind::Read {
            self.waiting.push_back(command.number);
            self.begin_reads(now);
        } else {
            self.schedule(now, CommandStage::Arrived, command.number);
        }
    }

    fn next(&self) -> Option<u64> {
        self.due.peek().map(|Reverse((time, ..))| *time)
    }

    fn advance(&mut self, time: u64, ended: &mut Vec<u64>) {
        while let Some(Reverse((at, ..))) = self.due.peek()
            && *at <= time
        {
            let Some(Reverse((at, _, stage, number))) = self.due.pop() else { return };
            self.happen(at, stage, number, ended);
        }
    }
}
