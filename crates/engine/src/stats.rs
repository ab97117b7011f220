//! Counters, exact and 64 bits wide. Cheap to copy: `status` takes a snapshot.

use crate::cache_writes::Written;
use crate::gc::pass::Found;
use crate::request::bypass::Bypass;
use crate::stat_windows::{Counted, Window, Windows};
use crate::time_stats::Times;
use bcached_env::Time;

/// Counters of a cache set since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Reads of volumes with a cache and a backing device.
    pub reads: Reads,
    /// Requests that added nothing to the cache, by reason.
    pub bypassed: Bypassed,
    /// Bytes read from the cache for requests.
    pub hit_bytes: u64,
    /// Bytes read from backing devices for requests.
    pub miss_bytes: u64,
    /// Bytes written by requests.
    pub write_bytes: u64,
    /// Written to the cache device, by cause.
    pub written: Written,
    /// Live data moved within the cache, in bytes.
    pub moved_bytes: u64,
    /// Journal entries written.
    pub journal_entries: u64,
    /// Times an insert waited for journal space.
    pub journal_waits: u64,
    /// Nodes compacted or split.
    pub btree_rewrites: u64,
    /// Times that two sparse nodes became one.
    pub btree_coalesces: u64,
    /// Complete passes of GC.
    pub gc_passes: u64,
    /// Dirty data written back, in bytes.
    pub written_back_bytes: u64,
    /// Fills dropped because somebody wrote to the range meanwhile.
    pub fill_races: u64,
    /// Times that a B-tree node could not be read or was damaged.
    pub node_read_failures: u64,
    /// Reads of clean cached data that failed and were answered by the backing device.
    pub read_retries: u64,
    /// Extents of dirty data that were written back (`writeback_keys_done`).
    pub writeback_keys_done: u64,
    /// Those of which nothing turned clean, because all of it had been written anew or moved meanwhile (`writeback_keys_failed`).
    pub writeback_keys_failed: u64,
    /// Times that an extent of dirty data could not be written back. The kernel does not count them.
    pub writeback_errors: u64,
    /// Complete passes of GC (`btree_gc`).
    pub gc: Times,
    /// Rewrites of a node that make one or two of it (`btree_split`).
    pub splits: Times,
    /// Reads of nodes (`btree_read`).
    pub node_reads: Times,
    /// What the last complete pass of GC has found, or the start if there was none.
    pub found: Found,
    /// The reads, what was bypassed and the fills dropped, of late.
    pub windows: Windows,
}

impl Stats {
    /// What the kernel counts, in total.
    #[must_use]
    pub fn totals(&self) -> Counted {
        Counted { miss_collisions: self.fill_races, ..counted(&self.reads, &self.bypassed) }
    }

    /// The same of late, as of the status that this comes with.
    #[must_use]
    pub fn of_late(&self, window: Window) -> Counted {
        self.windows.of(window, self.totals())
    }

    /// It is `now`: before anything is counted that has a window.
    pub(crate) fn turn(&mut self, now: Time) {
        let Self { reads, bypassed, fill_races, .. } = self;
        let totals = || Counted { miss_collisions: *fill_races, ..counted(reads, bypassed) };
        self.windows.turn(now, totals);
    }

    /// As they are `now`.
    pub(crate) fn as_of(mut self, now: Time) -> Self {
        self.turn(now);
        self
    }
}

/// Counters of a volume for as long as it is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeStats {
    /// Its reads.
    pub reads: Reads,
    /// Its requests that added nothing to the cache, by reason.
    pub bypassed: Bypassed,
    /// Fills dropped because somebody wrote to the range meanwhile (`cache_miss_collisions`).
    pub miss_collisions: u64,
    /// All of it of late.
    pub windows: Windows,
}

impl VolumeStats {
    /// All of it in total.
    #[must_use]
    pub fn totals(&self) -> Counted {
        Counted { miss_collisions: self.miss_collisions, ..counted(&self.reads, &self.bypassed) }
    }

    /// The same of late, as of the moment that this comes from.
    #[must_use]
    pub fn of_late(&self, window: Window) -> Counted {
        self.windows.of(window, self.totals())
    }

    /// It is `now`: before anything is counted.
    pub(crate) fn turn(&mut self, now: Time) {
        let Self { reads, bypassed, miss_collisions, .. } = self;
        let totals = || Counted { miss_collisions: *miss_collisions, ..counted(reads, bypassed) };
        self.windows.turn(now, totals);
    }

    /// As they are `now`.
    pub(crate) fn as_of(mut self, now: Time) -> Self {
        self.turn(now);
        self
    }
}

fn counted(reads: &Reads, bypassed: &Bypassed) -> Counted {
    Counted {
        hits: reads.hits,
        misses: reads.misses,
        bypass_hits: reads.bypass_hits,
        bypass_misses: reads.bypass_misses,
        miss_collisions: 0,
        bypassed_bytes: bypassed.total().bytes,
    }
}

/// Read requests, each counted once when it has been answered, as one whole: a hit is one that found all in the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// Answered wholly from the cache (`cache_hits`).
    pub hits: u64,
    /// Answered at least in part from elsewhere (`cache_misses`).
    pub misses: u64,
    /// Of those that were bypassed, answered wholly from the cache (`cache_bypass_hits`).
    pub bypass_hits: u64,
    /// Of those that were bypassed, the others (`cache_bypass_misses`).
    pub bypass_misses: u64,
}

impl Reads {
    pub(crate) const fn add(&mut self, is_hit: bool, is_bypassed: bool) {
        let count = match (is_hit, is_bypassed) {
            (true, false) => &mut self.hits,
            (false, false) => &mut self.misses,
            (true, true) => &mut self.bypass_hits,
            (false, true) => &mut self.bypass_misses,
        };
        *count += 1;
    }
}

/// Requests, and the bytes that they asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// How many.
    pub requests: u64,
    /// In bytes.
    pub bytes: u64,
}

/// Reads and writes that added nothing to the cache, also if the cache then had the
/// data or had to take it over dirty data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bypassed {
    by_reason: [Traffic; Bypass::ALL.len()],
}

impl Bypassed {
    /// For one reason.
    #[must_use]
    pub const fn of(&self, reason: Bypass) -> Traffic {
        self.by_reason[reason as usize]
    }

    /// For all reasons.
    #[must_use]
    pub fn total(&self) -> Traffic {
        self.by_reason.iter().fold(Traffic::default(), |sum, one| Traffic {
            requests: sum.requests + one.requests,
            bytes: sum.bytes + one.bytes,
        })
    }

    pub(crate) const fn add(&mut self, reason: Bypass, bytes: u64) {
        let traffic = &mut self.by_reason[reason as usize];
        traffic.requests += 1;
        traffic.bytes += bytes;
    }
}
