//! A hard disk: one head over turning tracks, a queue from which it takes what it comes to first, and a cache of writes.
//!
//! The angle of the platter is the time modulo a turn, so positioning costs what it would: seek, then the wait for the sector.
//! All tracks are of one length (the rate is that of the middle), and going on to the next one costs nothing, as if it were
//! skewed by just that.
//!
//! *Order.* Of the oldest [`Model::queue`] commands, and of the cached writes near the head, the one is next that the head
//! comes to first, unless a command is older than [`Model::age_limit_ns`]. Cached writes count when nobody else wants the
//! head, when a flush waits for them, or when the cache is half full.
//!
//! *Cache.* A write without FUA ends when it is in the cache, a flush when all is on the platter that was there when it came.
//! A read that goes on where the last one ended finds the data read ahead.
//!
//! Not modelled: zones of different rates, defects, vibration, reads of what is still in the cache of writes (they go to the
//! platter).

mod cached;

use super::mechanism::{Command, Kind, Mechanism, SECTOR_BYTES};
use cached::Cached;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// What a drive is.
#[derive(Clone, Debug)]
pub struct Model {
    /// Capacity in sectors.
    pub sectors: u64,
    /// A turn, in nanoseconds.
    pub turn_ns: u64,
    /// Sectors of a track.
    pub track_sectors: u64,
    /// The shortest seek, in nanoseconds.
    pub seek_min_ns: u64,
    /// The mean of seeks between random places, in nanoseconds.
    pub seek_mean_ns: u64,
    /// What a command takes besides that meets an idle drive, in nanoseconds; others are prepared while the head is busy.
    pub command_ns: u64,
    /// What each access to the platter takes besides, in nanoseconds.
    pub think_ns: u64,
    /// Commands that can be put in order.
    pub queue: usize,
    /// A command that has waited for longer is next.
    pub age_limit_ns: u64,
    /// The cache of writes, in bytes; 0: there is none.
    pub cache_bytes: u64,
    /// Time of a cached write on the way to the drive, in nanoseconds, beside its bytes.
    pub cached_ns: u64,
}

/// Bytes a microsecond on the way to the drive.
const LINK_BYTES_US: u64 = 550;
/// Cached writes, on each side of the head, among which the next one is looked for.
const NEAR: usize = 16;

impl Model {
    /// A drive of 7200 turns a minute: 205 MB/s, seeks of 8.0 ms, 32 commands in order, a cache of 64 MB.
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

    /// A drive of 5400 turns a minute that thinks long about each command.
    #[must_use]
    pub const fn barracuda() -> Self {
        Self {
            turn_ns: 11_111_111,
            track_sectors: 3_900,
            seek_min_ns: 1_000_000,
            seek_mean_ns: 6_000_000,
            think_ns: 5_700_000,
            // As slow as it is, half a second would leave nothing to put in order.
            age_limit_ns: 2_000_000_000,
            ..Self::d7k8()
        }
    }

    /// The same drive with its cache of writes switched off.
    #[must_use]
    pub const fn write_through(self) -> Self {
        Self { cache_bytes: 0, ..self }
    }

    const fn track(&self, sector: u64) -> u64 {
        sector / self.track_sectors
    }

    /// What it takes to go from one track to another, in nanoseconds: the square root of the way.
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn seek_ns(&self, from: u64, to: u64) -> u64 {
        let way = from.abs_diff(to);
        if way == 0 {
            return 0;
        }
        let share = way as f64 / self.track(self.sectors).max(1) as f64;
        // The mean of the square root of the way between random places is 8/15 of that over the whole.
        let full = (self.seek_mean_ns - self.seek_min_ns) as f64 * 15.0 / 8.0;
        self.seek_min_ns + (full * share.sqrt()) as u64
    }

    const fn transfer_ns(&self, sectors: u64) -> u64 {
        sectors * self.turn_ns / self.track_sectors
    }

    /// From `now` until the head, on track `from`, is at the beginning of `sector`, in nanoseconds.
    fn position_ns(&self, now: u64, from: u64, sector: u64) -> u64 {
        let ready = self.think_ns + self.seek_ns(from, self.track(sector));
        let angle = (now + ready) % self.turn_ns;
        let wanted = self.transfer_ns(sector % self.track_sectors);
        ready + (wanted + self.turn_ns - angle) % self.turn_ns
    }
}

/// What the head is on.
enum Job {
    /// A command of the queue.
    Command(Command),
    /// What the cache has given up.
    Destage { epoch: u64 },
}

/// Where the head was when it had last done something.
#[derive(Clone, Copy)]
struct Last {
    /// Behind this sector.
    end: u64,
    /// At this time.
    at: u64,
    /// It was reading.
    is_read: bool,
}

/// A drive at work.
pub struct Hdd {
    model: Model,
    last: Last,
    job: Option<(u64, Job)>,
    /// Commands for the head, the oldest first, and since when.
    queue: VecDeque<(u64, Command)>,
    cached: Cached,
    /// Writes that wait for room in the cache.
    blocked: VecDeque<Command>,
    /// Flushes, and up to which epoch of the cache they go.
    flushes: Vec<(u64, u64)>,
    /// What ends without the head: time, number.
    ending: BinaryHeap<Reverse<(u64, u64)>>,
    link_free_at: u64,
}

impl Hdd {
    /// A drive with nothing to do, its head at the first sector.
    #[must_use]
    pub fn new(model: Model) -> Self {
        Self {
            model,
            last: Last { end: 0, at: 0, is_read: false },
            job: None,
            queue: VecDeque::new(),
            cached: Cached::default(),
            blocked: VecDeque::new(),
            flushes: Vec::new(),
            ending: BinaryHeap::new(),
            link_free_at: 0,
        }
    }

    fn end_at(&mut self, time: u64, number: u64) {
        self.ending.push(Reverse((time, number)));
    }

    /// Puts a write into the cache, if there is room.
    fn cache_write(&mut self, now: u64, command: Command) -> bool {
        let room = self.model.cache_bytes / SECTOR_BYTES;
        if !self.blocked.is_empty() || self.cached.sectors() + command.sectors > room {
            return false;
        }
        self.admit(now, command);
        true
    }

    fn admit(&mut self, now: u64, command: Command) {
        self.cached.put(command.sector, command.sectors);
        let bytes = command.sectors * SECTOR_BYTES;
        self.link_free_at = self.link_free_at.max(now) + bytes * 1000 / LINK_BYTES_US;
        self.end_at(self.link_free_at + self.model.cached_ns, command.number);
    }

    /// Lets writes into the cache that have waited for room.
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

    /// How long it takes from `now` to be at the beginning of `sector`; going on where the head is takes nothing.
    fn cost_ns(&self, now: u64, sector: u64) -> u64 {
        if sector == self.last.end && now == self.last.at {
            return 0;
        }
        let idle = if now > self.last.at { self.model.command_ns } else { 0 };
        idle + self.model.position_ns(now + idle, self.model.track(self.last.end), sector)
    }

    /// When the data of a read has come that begins at `now`: what was read ahead is there.
    fn read_end(&self, now: u64, command: Command) -> u64 {
        let transfer = self.model.transfer_ns(command.sectors);
        if self.last.is_read && command.sector == self.last.end {
            return (self.last.at + transfer).max(now);
        }
        now + self.cost_ns(now, command.sector) + transfer
    }

    /// The command that is next, by place in the queue, and what it costs.
    fn next_command(&self, now: u64) -> Option<(u64, usize)> {
        let (since, _) = self.queue.front()?;
        if now - since > self.model.age_limit_ns {
            return Some((0, 0));
        }
        let candidates = self.queue.iter().take(self.model.queue).enumerate();
        candidates.map(|(index, (_, command))| (self.read_end(now, *command) - now, index)).min()
    }

    /// Whether cached writes count beside commands.
    fn wants_destage(&self) -> bool {
        let room = self.model.cache_bytes / SECTOR_BYTES;
        self.queue.is_empty() || !self.flushes.is_empty() || self.cached.sectors() > room / 2
    }

    /// The cached write that is next, and what it costs.
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

    /// Gives the head something to do at `now`, if there is anything.
    fn begin(&mut self, now: u64) {
        if self.job.is_some() {
            return;
        }
        let (command, cached) = (self.next_command(now), self.next_cached(now));
        match (command, cached) {
            (None, None) => {}
            (Some((cost, index)), other) if other.is_none_or(|(cached, _)| cost <= cached) => {
                let (_, command) = self.queue.remove(index).expect("just chosen");
                let end = if command.kind == Kind::Read {
                    self.read_end(now, command)
                } else {
                    now + self.cost_ns(now, command.sector) + self.model.transfer_ns(command.sectors)
                };
                self.work(end, command.end(), command.kind == Kind::Read, Job::Command(command));
            }
            (_, Some((cost, sector))) => {
                let (sectors, epoch) = self.cached.take(sector);
                self.work(now + cost, sector + sectors, false, Job::Destage { epoch });
            }
            (Some(_), None) => unreachable!("a command alone is what is next"),
        }
    }

    /// The head is busy until `end`, and then behind `sector`.
    fn work(&mut self, end: u64, sector: u64, is_read: bool, job: Job) {
        self.last = Last { end: sector, at: end, is_read };
        self.job = Some((end, job));
    }

    /// The head has done what it was on.
    fn finish(&mut self, now: u64, job: Job) {
        match job {
            Job::Command(command) => self.end_at(now, command.number),
            Job::Destage { epoch } => {
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

impl Mechanism for Hdd {
    fn submit(&mut self, now: u64, command: Command) {
        match command.kind {
            Kind::Write if self.model.cache_bytes > 0 => {
                if !self.cache_write(now, command) {
                    self.blocked.push_back(command);
                }
            }
            Kind::Flush => {
                self.flushes.push((command.number, self.cached.begin_flush()));
                self.end_flushes(now);
            }
            Kind::Discard => self.end_at(now + self.model.cached_ns, command.number),
            Kind::Read | Kind::Write | Kind::WriteFua => self.queue.push_back((now, command)),
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
