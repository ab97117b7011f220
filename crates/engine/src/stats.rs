//! Counters, exact and 64 bits wide. Cheap to copy: `status` takes a snapshot.

/// Counters of a cache set since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Read requests answered wholly from the cache.
    pub hits: u64,
    /// Read requests answered at least in part from elsewhere.
    pub misses: u64,
    /// Bytes read from the cache for requests.
    pub hit_bytes: u64,
    /// Bytes read from backing devices for requests.
    pub miss_bytes: u64,
    /// Bytes written by requests.
    pub write_bytes: u64,
    /// Bytes of requests that went around the cache.
    pub bypassed_bytes: u64,
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
