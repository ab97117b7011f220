//! The knobs, under the kernel's names where the kernel has them.

use crate::opening::Opening;
use crate::phases::Phases;
use alloc::sync::Arc;
use core::time::Duration;

/// Options of a cache set.
#[derive(Clone, Debug)]
pub struct Options {
    /// Memory for B-tree nodes, in bytes: a hard limit. Less than [`crate::node_budget_min`] is refused.
    pub node_budget_bytes: usize,
    /// How long keys wait in the open journal entry when nobody asks for durability (`journal_delay_ms`).
    pub journal_delay: Duration,
    /// How long keys wait in a leaf before it is written for no other reason.
    pub leaf_delay: Duration,
    /// Above this share of used buckets, in percent, nothing is added to the cache.
    pub cutoff_cache_add: u64,
    /// Above this share of used buckets, in percent, nothing is written back-cached.
    pub cutoff_writeback: u64,
    /// How long clean data may wait for the backing device's flush before we flush it ourselves.
    pub parked_delay: Duration,
    /// Parked pieces of one volume beyond which its backing device is flushed at once.
    pub parked_max: usize,
    /// How long write-back rests after a pass that found nothing.
    pub writeback_delay: Duration,
    /// Most sectors of dirty data read at once by write-back.
    pub writeback_batch_sectors: u64,
    /// Write-back runs at all (`writeback_running`).
    pub writeback_running: bool,
    /// Above this share of dirty data in the cache, in percent, write-back does not rest between two batches
    /// (`writeback_percent`). Below it dirty data is written back too, only slower.
    pub writeback_percent: u64,
    /// Where an opening counts how far it is. Clones of these options share it: one opening each.
    pub opening: Arc<Opening>,
    /// Where the set counts what it is in the middle of. Clones of these options share it.
    pub phases: Arc<Phases>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            node_budget_bytes: 128 << 20,
            journal_delay: Duration::from_millis(100),
            leaf_delay: Duration::from_secs(30),
            cutoff_cache_add: 95,
            cutoff_writeback: 90,
            parked_delay: Duration::from_secs(5),
            parked_max: 1024,
            writeback_delay: Duration::from_secs(5),
            writeback_batch_sectors: 8192,
            writeback_running: true,
            writeback_percent: 10,
            opening: Arc::default(),
            phases: Arc::default(),
        }
    }
}
