//! Counters, exact and 64 bits wide. Cheap to copy: `status` takes a snapshot.

use crate::cache_writes::BytesWritten;
use crate::gc::pass::TreeStats;
use crate::request::admission::BypassReason;
use crate::stat_windows::{RequestCounts, StatWindows, Window};
use crate::time_stats::TimeStats;
use bcached_env::Time;

/// Counters of a cache set since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Reads of volumes with a cache and a backing device.
    pub reads: ReadStats,
    /// Requests that added nothing to the cache, by reason.
    pub bypassed: BypassStats,
    /// Bytes read from the cache for requests.
    pub hit_bytes: u64,
    /// Bytes read from backing devices for requests.
    pub miss_bytes: u64,
    /// Bytes written by requests.
    pub write_bytes: u64,
    /// Bytes written to the cache device, by cause.
    pub written: BytesWritten,
    /// Live data moved within the cache, in bytes.
    pub moved_bytes: u64,
    /// Journal entries written.
    pub journal_entries: u64,
    /// Number of times that an insert waited for journal space.
    pub journal_waits: u64,
    /// Nodes compacted or split.
    pub btree_rewrites: u64,
    /// Number of times that two sparse nodes were merged.
    pub btree_coalesces: u64,
    /// Complete passes of GC.
    pub gc_passes: u64,
    /// Dirty data written back, in bytes.
    pub written_back_bytes: u64,
    /// Fills dropped because the range was written to while they were in flight.
    pub fill_races: u64,
    /// Number of times that a B-tree node could not be read or was damaged.
    pub node_read_failures: u64,
    /// Reads of clean cached data that failed and were answered by the backing device.
    pub read_retries: u64,
    /// Extents of dirty data that were written back (`writeback_keys_done`).
    pub writeback_keys_done: u64,
    /// Extents written back of which nothing became clean, because all of it had been overwritten
    /// or moved in the meantime (`writeback_keys_failed`).
    pub writeback_keys_failed: u64,
    /// Number of times that write-back of an extent failed. The kernel does not count them.
    pub writeback_errors: u64,
    /// Complete passes of GC (`btree_gc`).
    pub gc: TimeStats,
    /// Rewrites of a node into one or two nodes (`btree_split`).
    pub splits: TimeStats,
    /// Reads of nodes (`btree_read`).
    pub node_reads: TimeStats,
    /// What the last complete pass of GC found, or the start if there was none.
    pub found: TreeStats,
    /// The reads, bypassed requests and dropped fills of recent windows.
    pub windows: StatWindows,
}

impl Stats {
    /// The kernel's counters, in total.
    #[must_use]
    pub fn totals(&self) -> RequestCounts {
        RequestCounts { miss_collisions: self.fill_races, ..counted(&self.reads, &self.bypassed) }
    }

    /// The same in a recent window, as of the time of the status that contains this.
    #[must_use]
    pub fn of_late(&self, window: Window) -> RequestCounts {
        self.windows.of(window, self.totals())
    }

    /// Advances the windows to `now`; call it before counting anything that has a window.
    pub(crate) fn turn(&mut self, now: Time) {
        let Self { reads, bypassed, fill_races, .. } = self;
        let totals = || RequestCounts { miss_collisions: *fill_races, ..counted(reads, bypassed) };
        self.windows.turn(now, totals);
    }

    /// Returns the counters as of `now`.
    pub(crate) fn as_of(mut self, now: Time) -> Self {
        self.turn(now);
        self
    }
}

/// Counters of a volume for as long as it is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeStats {
    /// Reads of the volume.
    pub reads: ReadStats,
    /// Requests that added nothing to the cache, by reason.
    pub bypassed: BypassStats,
    /// Fills dropped because the range was written to while they were in flight
    /// (`cache_miss_collisions`).
    pub miss_collisions: u64,
    /// All of these in recent windows.
    pub windows: StatWindows,
}

impl VolumeStats {
    /// All of these in total.
    #[must_use]
    pub fn totals(&self) -> RequestCounts {
        RequestCounts { miss_collisions: self.miss_collisions, ..counted(&self.reads, &self.bypassed) }
    }

    /// The same in a recent window, as of the time of the snapshot.
    #[must_use]
    pub fn of_late(&self, window: Window) -> RequestCounts {
        self.windows.of(window, self.totals())
    }

    /// Advances the windows to `now`; call it before counting anything.
    pub(crate) fn turn(&mut self, now: Time) {
        let Self { reads, bypassed, miss_collisions, .. } = self;
        let totals = || RequestCounts { miss_collisions: *miss_collisions, ..counted(reads, bypassed) };
        self.windows.turn(now, totals);
    }

    /// Returns the counters as of `now`.
    pub(crate) fn as_of(mut self, now: Time) -> Self {
        self.turn(now);
        self
    }
}

fn counted(reads: &ReadStats, bypassed: &BypassStats) -> RequestCounts {
    RequestCounts {
        hits: reads.hits,
        misses: reads.misses,
        bypass_hits: reads.bypass_hits,
        bypass_misses: reads.bypass_misses,
        miss_collisions: 0,
        bypassed_bytes: bypassed.total().bytes,
    }
}

/// Read requests, each counted as a whole, once, when it is answered. A hit is one that found
/// everything in the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadStats {
    /// Answered fully from the cache (`cache_hits`).
    pub hits: u64,
    /// Answered at least in part from elsewhere (`cache_misses`).
    pub misses: u64,
    /// Bypassed reads answered fully from the cache (`cache_bypass_hits`).
    pub bypass_hits: u64,
    /// Other bypassed reads (`cache_bypass_misses`).
    pub bypass_misses: u64,
}

impl ReadStats {
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

/// A number of requests, and the bytes that they asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Number of requests.
    pub requests: u64,
    /// Bytes requested.
    pub bytes: u64,
}

/// Reads and writes that added nothing to the cache, even if the cache had the data afterwards or
/// had to accept it over dirty data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BypassStats {
    by_reason: [Traffic; BypassReason::ALL.len()],
}

impl BypassStats {
    /// The traffic for one reason.
    #[must_use]
    pub const fn of(&self, reason: BypassReason) -> Traffic {
        self.by_reason[reason as usize]
    }

    /// The traffic for all reasons.
    #[must_use]
    pub fn total(&self) -> Traffic {
        self.by_reason.iter().fold(Traffic::default(), |sum, one| Traffic {
            requests: sum.requests + one.requests,
            bytes: sum.bytes + one.bytes,
        })
    }

    pub(crate) const fn add(&mut self, reason: BypassReason, bytes: u64) {
        let traffic = &mut self.by_reason[reason as usize];
        traffic.requests += 1;
        traffic.bytes += bytes;
    }
}
