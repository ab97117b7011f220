//! Which nodes are in memory, who pins them, who is evicted: a hard byte budget (decision 14).
//!
//! A node's charge is fixed when it comes in (its size on disk and a fixed overhead), so the budget can be checked
//! before anything is read. A node is evicted only when nobody pins it and it has nothing unwritten.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::rc::Rc;
use bcached_env::Time;
use bcached_env::sync::Notify;
use bcached_format::{Key, Pointer};
use bcached_node::Node;
use core::cell::Cell;
use slab::Slab;

/// Keeps a node in memory. Dropping it needs no access to the state.
pub struct Pin {
    slot: usize,
    count: Rc<Cell<u32>>,
    freed: Rc<Notify>,
}

impl Pin {
    /// The node's place in the cache, valid while the pin is held.
    #[must_use]
    pub const fn slot(&self) -> usize {
        self.slot
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.count.set(self.count.get() - 1);
        if self.count.get() == 0 {
            self.freed.notify_all();
        }
    }
}

/// A node in memory.
pub struct CachedNode {
    /// The node.
    pub node: Node,
    /// Being replaced by a split: readers go on, writers wait.
    pub gated: bool,
    /// A set of it is on its way to the device.
    pub writing: bool,
    /// The journal entry of its oldest key that is not on its way to the device.
    pub pending_since: Option<u64>,
    /// The journal entry of the oldest key in the set that is being written.
    pub writing_since: Option<u64>,
    /// When its oldest unwritten key came.
    pub dirty_since: Option<Time>,
    pins: Rc<Cell<u32>>,
    used: u64,
    charge: usize,
}

/// What a request for a node finds.
pub enum Found {
    /// It is here.
    Here(Pin),
    /// Somebody is loading it: wait for [`NodeCache::changed`].
    Loading,
    /// Load it; the memory is set aside.
    Load,
    /// No memory until a node is unpinned or written.
    Full,
}

/// The nodes in memory.
pub struct NodeCache {
    nodes: Slab<CachedNode>,
    by_pointer: BTreeMap<u64, usize>,
    loading: BTreeSet<u64>,
    recency: BTreeMap<u64, usize>,
    clock: u64,
    budget: usize,
    bytes: usize,
    /// The most that was ever used; tests compare it with the budget.
    pub bytes_max: usize,
    freed: Rc<Notify>,
}

/// What a node's bookkeeping costs beside its keys.
const NODE_OVERHEAD_BYTES: usize = 1024;

/// Memory charged for a node of `sectors`. In memory a key takes 32 bytes, on disk at least 24 (16 for a hole, which
/// is not kept): a third more than the node's size holds every key it can store, and chunks are at least half full.
#[must_use]
pub const fn charge(sectors: u64) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "a node has at most 65535 sectors")]
    let bytes = (sectors * 512) as usize;
    bytes + bytes / 3 + NODE_OVERHEAD_BYTES
}

impl NodeCache {
    /// An empty cache of at most `budget` bytes. `freed` is told when a pin is dropped.
    #[must_use]
    pub const fn new(budget: usize, freed: Rc<Notify>) -> Self {
        Self {
            nodes: Slab::new(),
            by_pointer: BTreeMap::new(),
            loading: BTreeSet::new(),
            recency: BTreeMap::new(),
            clock: 0,
            budget,
            bytes: 0,
            bytes_max: 0,
            freed,
        }
    }

    /// Bytes in use.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The hard limit of [`NodeCache::bytes`].
    #[must_use]
    pub const fn budget(&self) -> usize {
        self.budget
    }

    /// Nodes in memory.
    #[must_use]
    pub fn count(&self) -> usize {
        self.nodes.len()
    }

    /// The node that `pointer` names, if it is in memory. Counts as use.
    pub fn find(&mut self, pointer: Pointer) -> Option<usize> {
        let slot = *self.by_pointer.get(&pointer.word())?;
        self.touch(slot);
        Some(slot)
    }

    /// The node in `slot`.
    #[must_use]
    pub fn get(&self, slot: usize) -> &CachedNode {
        &self.nodes[slot]
    }

    /// The node in `slot`, to change.
    pub fn get_mut(&mut self, slot: usize) -> &mut CachedNode {
        &mut self.nodes[slot]
    }

    /// Pins the node in `slot`.
    #[must_use]
    pub fn pin(&self, slot: usize) -> Pin {
        let count = Rc::clone(&self.nodes[slot].pins);
        count.set(count.get() + 1);
        Pin { slot, count, freed: Rc::clone(&self.freed) }
    }

    /// Every node in memory.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &CachedNode)> {
        self.nodes.iter()
    }

    /// Looks for the node of `key`; sets memory aside and marks it as being loaded if it is not here.
    pub fn request(&mut self, key: &Key, pointer: Pointer) -> Found {
        if let Some(slot) = self.find(pointer) {
            return Found::Here(self.pin(slot));
        }
        if self.loading.contains(&pointer.word()) {
            return Found::Loading;
        }
        if !self.make_room(charge(key.sectors())) {
            return Found::Full;
        }
        self.account(charge(key.sectors()));
        self.loading.insert(pointer.word());
        Found::Load
    }

    /// The end of a load that failed.
    pub fn abandon(&mut self, key: &Key, pointer: Pointer) {
        self.loading.remove(&pointer.word());
        self.bytes -= charge(key.sectors());
        self.freed.notify_all();
    }

    /// The end of a load: the node is here, pinned.
    pub fn loaded(&mut self, node: Node, pointer: Pointer) -> Pin {
        let was_loading = self.loading.remove(&pointer.word());
        assert!(was_loading, "a load was announced");
        let slot = self.enter(node, pointer);
        self.freed.notify_all();
        self.pin(slot)
    }

    /// Sets memory aside for a node that is about to be made; false if there is none.
    #[must_use]
    pub fn set_aside(&mut self, sectors: u64) -> bool {
        let room = self.make_room(charge(sectors));
        if room {
            self.account(charge(sectors));
        }
        room
    }

    /// Gives back what [`NodeCache::set_aside`] took and was not used.
    pub fn give_back(&mut self, sectors: u64) {
        self.bytes -= charge(sectors);
        self.freed.notify_all();
    }

    /// Enters a new node, for which memory was set aside.
    pub fn enter(&mut self, node: Node, pointer: Pointer) -> usize {
        self.clock += 1;
        let charge = charge(node.own().sectors());
        let cached = CachedNode {
            node,
            gated: false,
            writing: false,
            pending_since: None,
            writing_since: None,
            dirty_since: None,
            pins: Rc::new(Cell::new(0)),
            used: self.clock,
            charge,
        };
        let slot = self.nodes.insert(cached);
        self.recency.insert(self.clock, slot);
        let before = self.by_pointer.insert(pointer.word(), slot);
        assert!(before.is_none(), "a node is in memory once");
        slot
    }

    /// Removes a node that has been replaced.
    pub fn remove(&mut self, slot: usize) {
        let cached = self.nodes.remove(slot);
        self.recency.remove(&cached.used);
        for pointer in cached.node.own().pointers.as_slice() {
            self.by_pointer.remove(&pointer.word());
        }
        self.bytes -= cached.charge;
        self.freed.notify_all();
    }

    /// Nodes that could be evicted if only their pending keys were written, least recently used first.
    pub fn unwritten_unpinned(&self) -> impl Iterator<Item = usize> + '_ {
        let wanted = |slot: &usize| {
            let cached = &self.nodes[*slot];
            cached.pins.get() == 0 && cached.node.has_pending() && !cached.writing && !cached.gated
        };
        self.recency.values().copied().filter(wanted)
    }

    fn account(&mut self, bytes: usize) {
        self.bytes += bytes;
        self.bytes_max = self.bytes_max.max(self.bytes);
        assert!(self.bytes <= self.budget, "the node budget is hard: {} of {}", self.bytes, self.budget);
    }

    /// Evicts until `bytes` more fit; false if that is not possible now.
    fn make_room(&mut self, bytes: usize) -> bool {
        while self.bytes + bytes > self.budget {
            let evictable = |slot: &usize| {
                let cached = &self.nodes[*slot];
                cached.pins.get() == 0 && !cached.node.has_pending() && !cached.writing && !cached.gated
            };
            let Some(slot) = self.recency.values().copied().find(evictable) else { return false };
            self.remove(slot);
        }
        true
    }

    fn touch(&mut self, slot: usize) {
        self.clock += 1;
        let cached = &mut self.nodes[slot];
        self.recency.remove(&cached.used);
        cached.used = self.clock;
        self.recency.insert(self.clock, slot);
    }
}
