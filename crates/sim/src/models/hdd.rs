//! A model of a hard disk: one head over rotating tracks, a command queue that is reordered by
//! positioning time, and a volatile write cache.
//!
//! The angle of the platter is the time modulo one revolution, so that an access costs what it
//! would on a real disk: the seek, then the wait for the sector. All tracks have the same length
//! (the rate is that of the middle). Moving to the next track during a transfer costs nothing, as
//! if the tracks were skewed by exactly that amount.
//!
//! *Order.* The candidates are the oldest [`HddModel::queue`] commands, and cached writes near the
//! head. The one that the head reaches first is next, unless a command is older than
//! [`HddModel::age_limit_ns`]. Cached writes are candidates only if no command waits for the head,
//! if a flush waits for them, or if the cache is half full.
//!
//! *Cache.* A write without FUA completes when it is in the cache. A flush completes when
//! everything that was cached at its submission is on the platter. A read that continues where the
//! last one ended finds its data read ahead.
//!
//! Not modelled: zones of different rates, defects, vibration, and reads that hit the write cache
//! (they go to the platter).

mod cached;

use super::mechanism::{CommandKind, DeviceCommand, SECTOR_BYTES, TimingModel};
use cached::DriveCache;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// The parameters of a drive.
#[derive(Clone, Debug)]
pub struct HddModel {
    /// Capacity in sectors.
    pub sectors: u64,
    /// Time of one revolution, in nanoseconds.
    pub turn_ns: u64,
    /// Sectors on a track.
    pub track_sectors: u64,
    /// The shortest seek, in nanoseconds.
    pub seek_min_ns: u64,
    /// The mean seek between random places, in nanoseconds.
    pub seek_mean_ns: u64,
    /// Overhead of a command that finds the drive idle, in nanoseconds; other commands are prepared
    /// while the head is busy.
    pub command_ns: u64,
    /// Overhead of each access to the platter, in nanoseconds.
    pub think_ns: u64,
    /// Number of commands that the drive can reorder.
    pub queue: usize,
    /// A command that has waited longer than this is served next, in nanoseconds.
    pub age_limit_ns: u64,
    /// Size of the write cache in bytes; 0 if the drive has none.
    pub cache_bytes: u64,
    /// Time to transfer a cached write to the drive in nanoseconds, besides the time for its bytes.
    pub cached_ns: u64,
}

/// Link speed, in bytes per microsecond.
const LINK_BYTES_US: u64 = 550;
/// Number of cached writes on each side of the head that are candidates for the next one.
const NEAR: usize = 16;

impl HddModel {
    /// A drive of 7200 rpm: 205 MB/s, seeks of 8.0 ms, a queue of 32 commands, a write cache of 64
    /// MB.
    #[must_use]
    pub const fn d7k8() -> Self {
        Self {
            sectors: 15_625_000_000,
            turn_ns: 8_333_333,
            track_sectors: 3_336,
            seek_min_ns: 600_000,
            seek_mean_ns: 8_000_000,
            command_ns: 150_000,
            think_ns: 0,
            queue: 32,
            age_limit_ns: 500_000_000,
            cache_bytes: 64 << 20,
            cached_ns: 50_000,
        }
    }

    /// A drive of 5400 rpm with a long overhead for each command.
    #[must_use]
    pub const fn barracuda() -> Self {
        Self {
            turn_ns: 11_111_111,
            track_sectors: 3_900,
            seek_min_ns: 1_000_000,
            seek_mean_ns: 6_000_000,
            think_ns: 5_700_000,
            // The drive is so slow that half a second would leave nothing to reorder.
            age_limit_ns: 2_000_000_000,
            ..Self::d7k8()
        }
    }

    /// The same drive with its write cache switched off.
    #[must_use]
    pub const fn write_through(self) -> Self {
        Self { cache_bytes: 0, ..self }
    }

    const fn track(&self, sector: u64) -> u64 {
        sector / self.track_sectors
    }

    /// Returns the seek time between two tracks in nanoseconds, which grows with the square root of
    /// the distance.
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn seek_ns(&self, from: u64, to: u64) -> u64 {
        let way = from.abs_diff(to);
        if way == 0 {
            return 0;
        }
        let share = way as f64 / self.track(self.sectors).max(1) as f64;
        // The mean of the square root of the distance between two random places is 8/15 of that of
        // the full stroke.
        let full = (self.seek_mean_ns - self.seek_min_ns) as f64 * 15.0 / 8.0;
        self.seek_min_ns + (full * share.sqrt()) as u64
    }

    const fn transfer_ns(&self, sectors: u64) -> u64 {
        sectors * self.turn_ns / self.track_sectors
    }

    /// Returns the time from `now` until the head, on track `from`, is at the beginning of
    /// `sector`, in nanoseconds.
    fn position_ns(&self, now: u64, from: u64, sector: u64) -> u64 {
        let ready = self.think_ns + self.seek_ns(from, self.track(sector));
        let angle = (now + ready) % self.turn_ns;
        let wanted = self.transfer_ns(sector % self.track_sectors);
        ready + (wanted + self.turn_ns - angle) % self.turn_ns
    }
}

/// What the head is working on.
enum HeadJob {
    /// A command of the queue.
    Command(DeviceCommand),
    /// A write from the cache.
    Destage { epoch: u64 },
}

/// Where the head was when it last finished something.
#[derive(Clone, Copy)]
struct HeadPosition {
    /// The sector behind the last one accessed.
    end: u64,
    /// The time at which that access ended.
    at: u64,
    /// Whether it was a read.
    is_read: bool,
}

/// A drive and its state.
pub struct Hdd {
    model: HddModel,
    last: HeadPosition,
    job: Option<(u64, HeadJob)>,
    /// Commands that wait for the head, oldest first, each with its time of submission.
    queue: VecDeque<(u64, DeviceCommand)>,
    cached: DriveCache,
    /// Writes that wait for room in the cache.
    blocked: VecDeque<DeviceCommand>,
    /// Pending flushes, each with the last epoch of the cache that it covers.
    flushes: Vec<(u64, u64)>,
    /// Completions that do not need the head: time, number.
    ending: BinaryHeap<Reverse<(u64, u64)>>,
    link_free_at: u64,
}

impl Hdd {
    /// Creates an idle drive with its head at the first sector.
    #[must_use]
    pub fn new(model: HddModel) -> Self {
        Self {
            model,
            last: HeadPosition { end: 0, at: 0, is_read: false },
            job: None,
            queue: VecDeque::new(),
            cached: DriveCache::default(),
            blocked: VecDeque::new(),
            flushes: Vec::new(),
            ending: BinaryHeap::new(),
            link_free_at: 0,
        }
    }

    fn end_at(&mut self, time: u64, number: u64) {
        self.ending.push(Reverse((time, number)));
    }

    /// Puts a write into the cache if there is room.
    fn cache_write(&mut self, now: u64, command: DeviceCommand) -> bool {
        let room = self.model.cache_bytes / SECTOR_BYTES;
        if !self.blocked.is_empty() || self.cached.sectors() + command.sectors > room {
            return false;
        }
        self.admit(now, command);
        true
    }

    fn admit(&mut self, now: u64, command: DeviceCommand) {
        self.cached.put(command.sector, command.sectors);
        let bytes = command.sectors * SECTOR_BYTES;
        self.link_free_at = self.link_free_at.max(now) + bytes * 1000 / LINK_BYTES_US;
        self.end_at(self.link_free_at + self.model.cached_ns, command.number);
    }

    /// Admits blocked writes into the cache while there is room.
    fn unblock(&mut self, now: u64) {
        let room = self.model.cache_bytes / SECTOR_BYTES;
        while let Some(command) = self.blocked.front()
            && self.cached.sectors() + command.sectors <= room
        {
            let command = *command;
            self.blocked.pop_front();
            self.admit(now, command);
        }
    }

    /// Returns the time from `now` until the head is at the beginning of `sector`, in nanoseconds.
    /// It is zero if the head is already there.
    fn cost_ns(&self, now: u64, sector: u64) -> u64 {
        if sector == self.last.end && now == self.last.at {
            return 0;
        }
        let idle = if now > self.last.at { self.model.command_ns } else { 0 };
        idle + self.model.position_ns(now + idle, self.model.track(self.last.end), sector)
    }

    /// Returns when a read that begins at `now` has all of its data. Data that was read ahead is
    /// available at once.
    fn read_end(&self, now: u64, command: DeviceCommand) -> u64 {
        let transfer = self.model.transfer_ns(command.sectors);
        if self.last.is_read && command.sector == self.last.end {
            return (self.last.at + transfer).max(now);
        }
        now + self.cost_ns(now, command.sector) + transfer
    }

    /// Returns the cost of the next command and its place in the queue.
    fn next_command(&self, now: u64) -> Option<(u64, usize)> {
        let (since, _) = self.queue.front()?;
        if now - since > self.model.age_limit_ns {
            return Some((0, 0));
        }
        let candidates = self.queue.iter().take(self.model.queue).enumerate();
        candidates.map(|(index, (_, command))| (self.read_end(now, *command) - now, index)).min()
    }

    /// Returns whether cached writes compete with commands for the head.
    fn wants_destage(&self) -> bool {
        let room = self.model.cache_bytes / SECTOR_BYTES;
        self.queue.is_empty() || !self.flushes.is_empty() || self.cached.sectors() > room / 2
    }

    /// Returns the cost of the next cached write and its sector.
    fn next_cached(&self, now: u64) -> Option<(u64, u64)> {
        if !self.wants_destage() {
            return None;
        }
        let near = self.cached.near(self.last.end, NEAR);
        near.map(|(sector, sectors)| {
            let cost = self.cost_ns(now, sector) + self.model.transfer_ns(sectors);
            (cost, sector)
        })
        .min()
    }

    /// Starts the next job of the head at `now`, if there is one.
    fn begin(&mut self, now: u64) {
        if self.job.is_some() {
            return;
        }
        let (command, cached) = (self.next_command(now), self.next_cached(now));
        match (command, cached) {
            (None, None) => {}
            (Some((cost, index)), other) if other.is_none_or(|(cached, _)| cost <= cached) => {
                let (_, command) = self.queue.remove(index).expect("just chosen");
                let end = if command.kind == CommandKind::Read {
                    self.read_end(now, command)
                } else {
                    now + self.cost_ns(now, command.sector) + self.model.transfer_ns(command.sectors)
                };
                self.work(end, command.end(), command.kind == CommandKind::Read, HeadJob::Command(command));
            }
            (_, Some((cost, sector))) => {
                let (sectors, epoch) = self.cached.take(sector);
                self.work(now + cost, sector + sectors, false, HeadJob::Destage { epoch });
            }
            (Some(_), None) => unreachable!("a command alone is what is next"),
        }
    }

    /// Makes the head busy until `end`; it is then behind `sector`.
    fn work(&mut self, end: u64, sector: u64, is_read: bool, job: HeadJob) {
        self.last = HeadPosition { end: sector, at: end, is_read };
        self.job = Some((end, job));
    }

    /// Completes the job of the head.
    fn finish(&mut self, now: u64, job: HeadJob) {
        match job {
            HeadJob::Command(command) => self.end_at(now, command.number),
            HeadJob::Destage { epoch } => {
                self.cached.has_landed(epoch);
                self.end_flushes(now);
                self.unblock(now);
            }
        }
    }

    fn end_flushes(&mut self, now: u64) {
        let left = self.cached.oldest();
        let done = self.flushes.extract_if(.., |(_, epoch)| left.is_none_or(|left| left > *epoch));
        for (number, _) in done.collect::<Vec<_>>() {
            self.end_at(now + self.model.cached_ns, number);
        }
    }
}

impl TimingModel for Hdd {
    fn submit(&mut self, now: u64, command: DeviceCommand) {
        match command.kind {
            CommandKind::Write if self.model.cache_bytes > 0 => {
                if !self.cache_write(now, command) {
                    self.blocked.push_back(command);
                }
            }
            CommandKind::Flush => {
                self.flushes.push((command.number, self.cached.begin_flush()));
                self.end_flushes(now);
            }
            CommandKind::Discard => self.end_at(now + self.model.cached_ns, command.number),
            CommandKind::Read | CommandKind::Write | CommandKind::WriteFua => {
                self.queue.push_back((now, command));
            }
        }
        self.begin(now);
    }

    fn next(&self) -> Option<u64> {
        let ending = self.ending.peek().map(|Reverse((time, _))| *time);
        let job = self.job.as_ref().map(|(time, _)| *time);
        ending.into_iter().chain(job).min()
    }

    fn advance(&mut self, time: u64, ended: &mut Vec<u64>) {
        while let Some(now) = self.next().filter(|now| *now <= time) {
            if let Some((_, job)) = self.job.take_if(|(end, _)| *end <= now) {
                self.finish(now, job);
                self.begin(now);
            }
            while let Some(Reverse((_, number))) = self.ending.peek().filter(|Reverse((end, _))| *end <= now)
            {
                ended.push(*number);
                self.ending.pop();
            }
        }
    }
}
