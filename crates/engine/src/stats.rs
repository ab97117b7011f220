//! Counters, exact and 64 bits wide. Cheap to copy: `status` takes a snapshot.

use crate::request::bypass::Bypass;

/// Counters of a cache set since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Reads of volumes with a cache.
    pub reads: Reads,
    /// Requests that added nothing to the cache, by reason.
    pub bypassed: Bypassed,
    /// Bytes read from the cache for requests.
    pub hit_bytes: u64,
    /// Bytes read from backing devices for requests.
    pub miss_bytes: u64,
    /// Bytes written by requests.
    pub write_bytes: u64,
    /// Data written to the cache device for requests and fills, in bytes.
    pub data_written_bytes: u64,
    /// Live data moved within the cache, in bytes.
    pub moved_bytes: u64,
    /// B-tree nodes written, in bytes.
    pub btree_written_bytes: u64,
    /// Journal written, in bytes.
    pub journal_written_bytes: u64,
    /// Priorities written, in bytes.
    pub prio_written_bytes: u64,
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

/// Requests that added nothing to the cache, whether they read, wrote or discarded, and also if the cache then had the
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
