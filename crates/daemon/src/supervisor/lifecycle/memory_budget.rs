//! Divides the memory for btree nodes and tables of buckets among the caches. It is half of all. A
//! quarter is for the payloads of requests, and the rest for everything else, including engines
//! without a cache, which take two megabytes.
//!
//! The table of a set's buckets is taken from its part, because its size follows from the device.
//! If no memory limit is configured, tables are not counted: nodes have as much as without them,
//! and a table that takes notable memory is logged.
//!
//! The memory is divided evenly among the caches that are served or to be served, including missing
//! ones. A cache that joins others gets its part when they have given theirs up, so the sum never
//! exceeds the total. The part of a cache that leaves is divided among the rest. A cache that is
//! opening or ending is not asked until that is over. A cache that could not be opened with less
//! than its part is tried again, since it may get more then.

use crate::engine_thread::Engine;
use crate::supervisor::caches::CacheEvent;
use crate::supervisor::table::{CacheEntry, CacheState, Table};
use crate::supervisor::{Event, Supervisor};
use bcached_control::failure::Failure;
use bcached_format::CacheSuperblock;
use bcached_offline::bucket_memory;
use std::time::{Duration, Instant};

/// Longest time that a new cache waits for what others are to give up. After that it takes what
/// there is, or is refused by its engine.
const LIMIT: Duration = Duration::from_secs(10);

/// The memory of a cache's engine for nodes and the table of buckets.
#[derive(Default, Clone, Copy, Debug)]
pub struct NodeMemory {
    /// All of it in bytes, if the engine has begun.
    pub bytes: usize,
    /// The part for the table, in bytes.
    pub table: usize,
    /// The amount that the engine was asked to have, and when.
    asked: Option<(usize, Instant)>,
    /// The amount before, while the engine has not answered.
    before: Option<usize>,
}

impl NodeMemory {
    /// Returns the memory of an engine that begins with so many bytes, `table` of them for its
    /// buckets.
    pub fn of(bytes: usize, table: usize) -> Self {
        Self { bytes, table, ..Self::default() }
    }
}

impl CacheEntry {
    const fn has_engine(&self) -> bool {
        matches!(self.state, CacheState::Opening { .. } | CacheState::Open { .. } | CacheState::Ending { .. })
    }
}

impl Table {
    /// Returns the part of each cache, and what is free.
    fn parts(&self, all: usize) -> (usize, usize) {
        (all / self.sharers(), all.saturating_sub(self.given()))
    }

    /// Returns the number of caches that share the memory.
    fn sharers(&self) -> usize {
        let wants = |cache: &CacheEntry| cache.has_engine() || matches!(cache.state, CacheState::Waiting(_));
        self.real_caches().filter(|(_, cache)| wants(cache)).count().max(1)
    }

    /// Returns what all caches have together.
    fn given(&self) -> usize {
        let engines = self.real_caches().filter(|(_, cache)| cache.has_engine());
        engines.map(|(_, cache)| cache.nodes.bytes).sum()
    }

    /// Checks whether another cache has more than its part, and cannot be asked for it at this
    /// moment.
    fn will_give(&self, index: usize, part: usize) -> bool {
        let mut others = self.real_caches().filter(|(other, _)| *other != index);
        let unasked =
            |cache: &CacheEntry| cache.has_engine() && !matches!(cache.state, CacheState::Open { .. });
        others.any(|(_, cache)| unasked(cache) && cache.nodes.bytes > part)
    }
}

impl Supervisor {
    /// Returns the memory for the nodes of a cache that is about to be opened. `None`: others give
    /// it up first (invariant L3).
    pub fn nodes_for(&self, index: usize) -> Option<usize> {
        let all = self.memory_of_nodes();
        let (part, free) = self.shared().table.parts(all);
        if free >= part {
            return Some(part);
        }
        if self.shared().table.will_give(index, part) {
            return None;
        }
        let others = self.shared().table.open_engines();
        let asked: Vec<bool> = others
            .into_iter()
            .filter(|(other, _)| *other != index)
            .map(|(other, engine)| self.ask(other, &engine, part))
            .collect();
        let is_waiting = asked.contains(&true);
        (!is_waiting).then_some(free)
    }

    /// Checks whether the cache was opened with less than its part, because others had the rest.
    pub fn is_short_of_memory(&self, index: usize) -> bool {
        let all = self.memory_of_nodes();
        let (part, _) = self.shared().table.parts(all);
        self.shared().table.caches[index].nodes.bytes < part
    }

    /// Gives free memory to caches that have less than their part. If all together have too much,
    /// as when block devices or disks of virtual machines were added, those that have more give it
    /// up.
    pub fn divide_memory(&self) {
        let all = self.memory_of_nodes();
        let engines = self.shared().table.open_engines();
        for (index, engine) in engines {
            let (has, given, (part, free)) = {
                let shared = self.shared();
                let table = &shared.table;
                (table.caches[index].nodes.bytes, table.given(), table.parts(all))
            };
            let wanted = if given > all { has.min(part) } else { has.max(part.min(has + free)) };
            if wanted != has {
                self.ask(index, &engine, wanted);
            }
        }
    }

    /// Returns how much of its part the table of the set's buckets takes.
    pub fn counted_table(&self, superblock: &CacheSuperblock) -> usize {
        let bytes = bucket_memory::of(superblock.buckets());
        if self.config.memory_is_said { usize::try_from(bytes).unwrap_or(usize::MAX) } else { 0 }
    }

    /// Returns why a set cannot be opened with so many bytes, if it cannot.
    pub fn too_large(&self, index: usize, superblock: &CacheSuperblock, bytes: usize) -> Option<Failure> {
        let (bytes, least) = (bytes as u64, bucket_memory::least(superblock));
        if !self.config.memory_is_said || bytes >= least {
            return None;
        }
        let mut shared = self.shared();
        let count = shared.table.sharers() as u64;
        let ways = shared.table.volumes.iter().filter(|entry| !entry.is_removed()).map(|entry| entry.ways);
        let advised = self.config.memory_for(count.saturating_mul(least), ways);
        let entry = &mut shared.table.caches[index];
        entry.nodes = NodeMemory::of(usize::try_from(bytes).unwrap_or(usize::MAX), entry.nodes.table);
        Some(bucket_memory::too_large(&entry.device, (bytes, least), superblock.buckets(), advised))
    }

    /// Logs once if a cache's table of buckets takes notable memory, within the configured `memory`
    /// or beside its default.
    pub fn tell_bucket_memory(&self, index: usize, buckets: u64) {
        let mut shared = self.shared();
        let entry = &mut shared.table.caches[index];
        let told = bucket_memory::told(&entry.device, buckets, &self.config);
        if let Some(told) = told.filter(|_| !std::mem::replace(&mut entry.bucket_memory_logged, true)) {
            tracing::info!(event = "bucket-memory", "{told}");
        }
    }

    fn memory_of_nodes(&self) -> usize {
        let shared = self.shared();
        let there = shared.table.volumes.iter().filter(|entry| !entry.is_removed());
        let ways = there.map(|entry| entry.ways);
        usize::try_from(self.config.memory_of_nodes(ways)).unwrap_or(usize::MAX)
    }

    /// Asks an engine to change its memory. Returns true if its answer must be waited for.
    fn ask(&self, index: usize, engine: &Engine, wanted: usize) -> bool {
        {
            let mut shared = self.shared();
            let entry = &mut shared.table.caches[index];
            let nodes = &mut entry.nodes;
            let is_late = nodes.asked.is_some_and(|(_, since)| since.elapsed() >= LIMIT);
            let is_same = nodes.asked.is_some_and(|(asked, _)| asked == wanted);
            if entry.is_none_of.is_some()
                || nodes.bytes == wanted
                || nodes.before.is_some()
                || is_same && !is_late
            {
                return nodes.before.is_some() && !is_late;
            }
            (nodes.asked, nodes.before) = (Some((wanted, Instant::now())), Some(nodes.bytes));
            // What it is to get is reserved for it from now on.
            nodes.bytes = nodes.bytes.max(wanted);
        }
        let table = self.shared().table.caches[index].nodes.table;
        let sender = self.sender.clone();
        let done = move |has: Option<usize>| {
            drop(sender.send(Event::Cache(index, CacheEvent::NodesChanged(has.map(|has| has + table)))));
        };
        // The table of buckets comes off the cache's share: invariant L4.
        engine.set_node_budget(wanted.saturating_sub(table), Box::new(done));
        true
    }

    /// Handles the answer of an engine, which knows how much memory it has now.
    pub fn nodes_changed(&self, index: usize, has: Option<usize>) {
        let nodes = &mut self.shared().table.caches[index].nodes;
        let before = nodes.before.take();
        nodes.bytes = has.or(before).unwrap_or(nodes.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine_error;
    use crate::engine_thread::Engine;
    use bcached_config::CommandLine;
    use bcached_engine::Error;
    use bcached_format::Uuid;
    use std::path::Path;
    use std::sync::Arc;

    const ALL: usize = 128 << 20;

    /// Returns a supervisor with a cache that opens with all of the memory, and one that joins it.
    fn two_caches() -> Supervisor {
        let config = crate::supervisor::tests::config(&[]);
        let second = CacheEntry::of(&config.caches[0]);
        let supervisor =
            Supervisor::new(CommandLine::default(), crate::supervisor::SupervisorParameters::of(config));
        let mut shared = supervisor.shared();
        shared.table.caches.push(second);
        shared.table.caches[0].state = opening();
        shared.table.caches[0].nodes = NodeMemory::of(ALL, 0);
        drop(shared);
        supervisor
    }

    fn opening() -> CacheState {
        let thread = std::thread::spawn(|| {});
        CacheState::Opening { set: Uuid([7; 16]), progress: Arc::default(), thread }
    }

    /// Of two caches that join one after the other, the second must not be opened without memory,
    /// and fail for that.
    #[test]
    fn a_cache_that_comes_waits_for_what_one_that_opens_is_to_give_up() {
        // Proves invariant L3.
        let supervisor = two_caches();
        assert_eq!(supervisor.nodes_for(1), None, "it opens, and is asked when it has");
        let (engine, _ears) = Engine::deaf();
        let thread = std::thread::spawn(|| {});
        let open = CacheState::Open { set: Uuid([7; 16]), engine, io: String::new(), thread };
        supervisor.shared().table.caches[0].state = open;
        assert_eq!(supervisor.nodes_for(1), None, "it is asked");
        supervisor.nodes_changed(0, Some(ALL / 2));
        assert_eq!(supervisor.nodes_for(1), Some(ALL / 2));
    }

    /// Too little memory is a final failure only for a cache that had its full part, not if others
    /// had the rest.
    #[test]
    fn too_little_memory_is_final_only_for_who_had_its_part() {
        let mut supervisor = two_caches();
        let mut refused = |bytes| {
            supervisor.shared().table.caches[1].state = opening();
            supervisor.shared().table.caches[1].nodes = NodeMemory::of(bytes, 0);
            let error = Error::NodeBudget { budget: bytes, needed: ALL };
            supervisor.set_refused(1, engine_error::of_open(Path::new("/dev/ssd"), 0, &error));
            matches!(supervisor.shared().table.caches[1].state, CacheState::Waiting(_))
        };
        assert!(refused(ALL / 2 - 1));
        assert!(!refused(ALL / 2), "there is no more for it");
    }
}
