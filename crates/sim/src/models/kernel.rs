//! A model of how the kernel's bcache writes dirty data back, as far as the devices see it. It
//! reproduces the observed behaviour of 6.1, for comparison.
//!
//! - A scan collects up to [`SCAN_KEYS`] dirty keys in address order. It starts only after all
//!   writes of the previous scan have completed.
//! - Adjacent keys are written together as a pass: at most [`PASS_KEYS`] of them, and none beyond
//!   [`PASS_SECTORS`]. Each key is a read of the cache device and a separate write to the disk.
//!   Writes are submitted in the order of the keys.
//! - At most [`IN_FLIGHT`] keys are in flight.
//! - After each pass the rate limiter is charged, and its delay is slept in ticks of 4 ms. There is
//!   no limit when the set is idle.
//! - The disk is never flushed. Keys turn clean in memory, which takes no time here.

use super::mechanism::{CommandKind, DeviceCommand, TimingModel};
use std::collections::{BTreeMap, BTreeSet};

/// Dirty keys that a scan collects.
const SCAN_KEYS: usize = 500;
/// Maximum number of keys in a pass.
const PASS_KEYS: usize = 5;
/// A pass of this many sectors takes no further key.
const PASS_SECTORS: u64 = 5000;
/// Maximum number of keys in flight.
const IN_FLIGHT: usize = 64;
/// Sleeps are rounded down to multiples of this, in nanoseconds.
const TICK_NS: u64 = 4_000_000;

/// A dirty key. All fields are in sectors.
#[derive(Clone, Copy, Debug)]
pub struct DirtyKey {
    /// Address on the disk.
    pub sector: u64,
    /// Address on the cache device.
    pub cached_at: u64,
    /// Length.
    pub sectors: u64,
}

/// The keys of one scan in flight. Command numbers are indexes into the scan.
struct WritebackScan<'a> {
    keys: &'a [DirtyKey],
    /// The first key that has not been submitted yet.
    next: usize,
    /// Keys that have been read while an earlier one has not.
    read: BTreeSet<usize>,
    /// The next key to be written.
    next_write: usize,
    landed: usize,
}

impl WritebackScan<'_> {
    /// Returns the number of keys in the next pass.
    fn pass(&self) -> usize {
        let keys = &self.keys[self.next..];
        let (mut count, mut sectors) = (0, 0);
        while let Some(key) = keys.get(count) {
            let is_next = count == 0 || keys[count - 1].sector + keys[count - 1].sectors == key.sector;
            if count == PASS_KEYS || sectors >= PASS_SECTORS || !is_next {
                break;
            }
            sectors += key.sectors;
            count += 1;
        }
        count
    }

    /// Submits to the cache device the reads that may start now.
    fn read_on(&mut self, now: u64, limiter: &mut RateLimiter, cache: &mut dyn TimingModel) {
        while self.next < self.keys.len() && limiter.allowed_at <= now {
            let pass = self.pass();
            if self.next + pass - self.landed > IN_FLIGHT {
                return;
            }
            let mut sectors = 0;
            for index in self.next..self.next + pass {
                let key = self.keys[index];
                sectors += key.sectors;
                let command = DeviceCommand {
                    number: index as u64,
                    kind: CommandKind::Read,
                    sector: key.cached_at,
                    sectors: key.sectors,
                };
                cache.submit(now, command);
            }
            self.next += pass;
            limiter.charge(now, sectors);
        }
    }

    /// Handles the completed read of a key: submits to the disk the writes of that key and of later
    /// ones that waited for it.
    fn write_on(&mut self, now: u64, number: u64, disk: &mut dyn TimingModel) {
        self.read.insert(usize::try_from(number).expect("a place in a scan"));
        while self.read.remove(&self.next_write) {
            let key = self.keys[self.next_write];
            let number = self.next_write as u64;
            disk.submit(
                now,
                DeviceCommand { number, kind: CommandKind::Write, sector: key.sector, sectors: key.sectors },
            );
            self.next_write += 1;
        }
    }
}

/// The rate limiter. All times are in nanoseconds.
struct RateLimiter {
    /// Sectors per second; `None` if the set is idle.
    rate: Option<u64>,
    next: u64,
    allowed_at: u64,
}

impl RateLimiter {
    fn charge(&mut self, now: u64, sectors: u64) {
        let Some(rate) = self.rate else { return };
        const SECOND: u64 = 1_000_000_000;
        self.next += sectors * SECOND / rate;
        self.next = self.next.clamp(now.saturating_sub(2 * SECOND), now + 5 * SECOND / 2);
        self.allowed_at = now + self.next.saturating_sub(now) / TICK_NS * TICK_NS;
    }
}

/// Writes `keys` (in address order) back from `cache` to `disk`, from virtual time `start` on, at
/// `rate` sectors per second, or without a limit when idle. Returns the virtual nanoseconds until
/// everything is on the platter. The kernel leaves out the flush at the end; it is counted here so
/// that both sides of the comparison are durable.
///
/// # Panics
/// If a device never answers.
pub fn write_back(
    (cache, disk): (&mut dyn TimingModel, &mut dyn TimingModel),
    start: u64,
    keys: &[DirtyKey],
    rate: Option<u64>,
) -> u64 {
    let mut now = start;
    let mut limiter = RateLimiter { rate, next: start, allowed_at: start };
    for keys in keys.chunks(SCAN_KEYS) {
        let mut scan = WritebackScan { keys, next: 0, read: BTreeSet::new(), next_write: 0, landed: 0 };
        while scan.landed < keys.len() {
            scan.read_on(now, &mut limiter, cache);
            let waits = scan.next < keys.len() && limiter.allowed_at > now;
            let timer = waits.then_some(limiter.allowed_at);
            let next = [cache.next(), disk.next(), timer].into_iter().flatten().min();
            now = now.max(next.expect("something is in flight"));
            for number in advance(cache, now) {
                scan.write_on(now, number, disk);
            }
            scan.landed += advance(disk, now).len();
        }
    }
    disk.submit(now, DeviceCommand { number: u64::MAX, kind: CommandKind::Flush, sector: 0, sectors: 0 });
    while advance(disk, now).is_empty() {
        now = disk.next().expect("a flush ends");
    }
    now - start
}

fn advance(device: &mut dyn TimingModel, now: u64) -> Vec<u64> {
    let mut ended = Vec::new();
    device.advance(now, &mut ended);
    ended
}

/// A disk that records what it sees of the order: for each command its first sector, and the number
/// of keys in flight.
#[derive(Default)]
pub struct OrderRecorder {
    /// In order of submission.
    pub writes: Vec<(u64, usize)>,
    under_way: BTreeMap<u64, u64>,
}

impl TimingModel for OrderRecorder {
    fn submit(&mut self, now: u64, command: DeviceCommand) {
        if command.kind != CommandKind::Flush {
            self.writes.push((command.sector, self.under_way.len() + 1));
        }
        // One millisecond each: slower than any cache device reads.
        self.under_way.insert(now + 1_000_000 + command.number % 1000, command.number);
    }

    fn next(&self) -> Option<u64> {
        self.under_way.first_key_value().map(|(time, _)| *time)
    }

    fn advance(&mut self, time: u64, ended: &mut Vec<u64>) {
        while let Some(first) = self.under_way.first_entry().filter(|first| *first.key() <= time) {
            ended.push(first.remove());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::ssd::{Ssd, SsdModel};

    fn keys(count: u64, gap: u64) -> Vec<DirtyKey> {
        (0..count)
            .map(|n| DirtyKey { sector: n * gap, cached_at: (n * 7919) % 100_000 * 8, sectors: 8 })
            .collect()
    }

    #[test]
    fn writes_set_out_in_order_and_never_more_than_64() {
        let mut seen = OrderRecorder::default();
        let keys = keys(1200, 16);
        write_back((&mut Ssd::new(SsdModel::sata_plp()), &mut seen), 0, &keys, None);
        let places: Vec<u64> = seen.writes.iter().map(|(sector, _)| *sector).collect();
        assert_eq!(places, keys.iter().map(|key| key.sector).collect::<Vec<_>>());
        let most = seen.writes.iter().map(|(_, depth)| *depth).max();
        assert!(most.is_some_and(|most| (33..=64).contains(&most)), "{most:?}");
        assert_eq!(seen.writes[500].1, 1, "a scan waits for the one before");
    }

    #[test]
    fn the_rate_holds_and_neighbours_go_five_at_a_time() {
        let run = |gap| {
            let mut seen = OrderRecorder::default();
            // 1000 keys of 8 sectors at 4000 sectors a second: two seconds.
            write_back((&mut Ssd::new(SsdModel::sata_plp()), &mut seen), 0, &keys(1000, gap), Some(4000))
        };
        for gap in [8, 16] {
            let taken = run(gap);
            assert!((1_900_000_000..2_300_000_000).contains(&taken), "{gap}: {taken}");
        }
        let limiter =
            WritebackScan { keys: &keys(12, 8), next: 0, read: BTreeSet::new(), next_write: 0, landed: 0 };
        assert_eq!(limiter.pass(), 5);
    }
}
