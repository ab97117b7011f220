//! A solid state drive: flash that many commands read at once, one link to the host, and a buffer that takes writes and is
//! drained to the flash, faster where they continue each other.
//!
//! A read waits for a free channel, takes [`Model::read_ns`] there, then the link. A write takes the link, waits for room in the
//! buffer, and ends [`Model::write_ns`] later. What a drive does inside to make room for random writes is in the rate at
//! which they are drained. Reads and writes hold each other up on the link alone: stalls of a drive's own housekeeping are not
//! modelled, so that every tail that is measured is the engine's.

use super::mechanism::{Command, Kind, Mechanism, SECTOR_BYTES};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

/// What a drive is.
#[derive(Clone, Debug)]
pub struct Model {
    /// Reads that are under way in the flash at once.
    pub channels: usize,
    /// Time of a read in the flash, in nanoseconds.
    pub read_ns: u64,
    /// Time of any command on the link, in nanoseconds.
    pub command_ns: u64,
    /// Bytes that the link moves in a microsecond.
    pub link_bytes_us: u64,
    /// Time from a write's place in the buffer to its answer, in nanoseconds.
    pub write_ns: u64,
    /// The buffer, in bytes.
    pub buffer_bytes: u64,
    /// Time that 4 KiB of a random write take to be drained, in nanoseconds.
    pub random_drain_ns: u64,
    /// The same of a write that continues another.
    pub sequential_drain_ns: u64,
    /// What a flush takes besides, in nanoseconds.
    pub flush_ns: u64,
    /// The buffer outlives a loss of power: a flush need not drain it.
    pub is_power_safe: bool,
}

/// Bytes of which the drain rates speak.
const PAGE_BYTES: u64 = 4096;
/// Streams of writes that a drive tells apart.
const STREAMS: usize = 64;
/// A write that begins so many sectors behind the end of a stream still continues it: commands overtake each other a little.
const STREAM_GAP: u64 = 256;

impl Model {
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

    /// A SATA drive for consumers: quick to take writes, slow to make them durable.
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

/// Where a command is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// Its data is read from the flash, and wants the link.
    Read,
    /// It wants the link, with data to write.
    Arrived,
    /// Its data is on the drive, and wants room in the buffer.
    Taken,
    /// A flush: from here on everything before it counts.
    Flushing,
    /// It has ended.
    Ended,
}

/// A drive at work.
pub struct Ssd {
    model: Model,
    /// What happens when: time, order, command.
    due: BinaryHeap<Reverse<(u64, u64, Stage, u64)>>,
    next_due: u64,
    commands: BTreeMap<u64, Command>,
    /// Reads that wait for a channel.
    waiting: VecDeque<u64>,
    reading: usize,
    link_free_at: u64,
    /// When all that is in the buffer has been drained.
    drained_at: u64,
    /// Ends of streams of writes, the newest last.
    streams: VecDeque<u64>,
}

impl Ssd {
    /// A drive with nothing to do.
    #[must_use]
    pub fn new(model: Model) -> Self {
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

    fn schedule(&mut self, time: u64, stage: Stage, number: u64) {
        self.due.push(Reverse((time, self.next_due, stage, number)));
        self.next_due += 1;
    }

    fn begin_reads(&mut self, now: u64) {
        while self.reading < self.model.channels
            && let Some(number) = self.waiting.pop_front()
        {
            self.reading += 1;
            self.schedule(now + self.model.read_ns, Stage::Read, number);
        }
    }

    /// When the link has moved the data of `command`, which wants it at `now`.
    fn move_over_link(&mut self, now: u64, command: Command) -> u64 {
        self.link_free_at = self.link_free_at.max(now) + self.model.link_ns(command.sectors);
        self.link_free_at
    }

    /// Whether the write continues a stream; it is one from here on.
    fn continues(&mut self, command: Command) -> bool {
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

    /// When the buffer has room for the data of `command`, which is there at `now`.
    fn take(&mut self, now: u64, command: Command) -> u64 {
        let is_sequential = self.continues(command);
        let Model { random_drain_ns, sequential_drain_ns, buffer_bytes, .. } = self.model;
        let page_ns = if is_sequential { sequential_drain_ns } else { random_drain_ns };
        self.drained_at = self.drained_at.max(now) + page_ns * command.sectors * SECTOR_BYTES / PAGE_BYTES;
        now.max(self.drained_at.saturating_sub(buffer_bytes / PAGE_BYTES * page_ns))
    }

    /// What a flush that begins now ends by.
    fn flushed_at(&self, now: u64) -> u64 {
        let drained = if self.model.is_power_safe { now } else { now.max(self.drained_at) };
        drained + self.model.flush_ns
    }

    fn happen(&mut self, now: u64, stage: Stage, number: u64, ended: &mut Vec<u64>) {
        let command = self.commands[&number];
        match stage {
            Stage::Read => {
                self.reading -= 1;
                self.begin_reads(now);
                let moved = self.move_over_link(now, command);
                self.schedule(moved, Stage::Ended, number);
            }
            Stage::Arrived => {
                let moved = self.move_over_link(now, command);
                let next = if command.kind == Kind::Flush { Stage::Flushing } else { Stage::Taken };
                let next = if command.kind == Kind::Discard { Stage::Ended } else { next };
                self.schedule(moved, next, number);
            }
            Stage::Taken => {
                let mut end = self.take(now, command) + self.model.write_ns;
                if command.kind == Kind::WriteFua && !self.model.is_power_safe {
                    end = self.flushed_at(end);
                }
                self.schedule(end, Stage::Ended, number);
            }
            Stage::Flushing => {
                let end = self.flushed_at(now);
                self.schedule(end, Stage::Ended, number);
            }
            Stage::Ended => {
                self.commands.remove(&number);
                ended.push(number);
            }
        }
    }
}

impl Mechanism for Ssd {
    fn submit(&mut self, now: u64, command: Command) {
        // A discard moves no data.
        let sectors = if command.kind == Kind::Discard { 0 } else { command.sectors };
        self.commands.insert(command.number, Command { sectors, ..command });
        if command.kind == Kind::Read {
            self.waiting.push_back(command.number);
            self.begin_reads(now);
        } else {
            self.schedule(now, Stage::Arrived, command.number);
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
