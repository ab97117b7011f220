//! Caches nodes in memory within a hard byte budget, which `budget` shares out; tracks which nodes
//! are pinned, and evicts.
//!
//! The budget covers what nodes really take after every change ([`Node::memory_bytes`] and the
//! cache's overhead for each), and what has been reserved for nodes in flight. A node is changed
//! only through [`NodeCache::change`], after room has been made for it. A node is evicted only if
//! it is not pinned, has nothing unwritten, and has not been used for a while.

use crate::btree::dirty_leaves::DirtyLeaves;
use crate::btree::pointer_index::PointerIndex;
use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::rc::Rc;
use alloc::vec::Vec;
use bcached_env::Time;
use bcached_env::sync::Notify;
use bcached_format::{Key, Pointer};
use bcached_node::{KeyCursor, Node};
use core::cell::Cell;
use slab::Slab;

/// Keeps a node in memory. Dropping a pin needs no access to the state.
pub struct NodePin {
    slot: usize,
    count: Rc<Cell<u32>>,
    freed: Rc<Notify>,
}

impl NodePin {
    /// Returns the node's slot in the cache, valid while the pin is held.
    #[must_use]
    pub const fn slot(&self) -> usize {
        self.slot
    }
}

impl Drop for NodePin {
    fn drop(&mut self) {
        self.count.set(self.count.get() - 1);
        if self.count.get() == 0 {
            self.freed.notify_all();
        }
    }
}

/// Memory reserved for a node in flight. Dropping it gives the memory back.
#[must_use = "dropping it gives the memory back"]
pub struct MemoryReservation {
    bytes: usize,
    all: Rc<Cell<usize>>,
    freed: Rc<Notify>,
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        self.all.set(self.all.get() - self.bytes);
        self.freed.notify_all();
    }
}

/// Whether a node is written, and how changes to it are handled. Readers are never blocked.
pub enum NodeState {
    /// The node takes keys, and is written when that is due.
    Open,
    /// Fresh nodes are about to replace it, and it is not written any more. The keys that it takes
    /// are kept for them.
    Closing(Box<LateKeys>),
    /// The node has replaced others, which a crash would bring back. It takes keys, which only the
    /// journal holds, and is not written.
    Unlinked,
}

impl NodeState {
    /// Returns true if the node is neither being replaced nor replacing another.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        matches!(self, Self::Open)
    }
}

/// Keys for the nodes that replace a leaf.
pub struct LateKeys {
    /// The keys, in order of arrival.
    pub keys: Vec<Key>,
    /// How many of them the new nodes already have.
    pub handed_over: usize,
    /// The most keys that this may hold.
    pub most: usize,
    /// The journal entry of the oldest journalled key.
    pub since: Option<u64>,
}

/// A node in memory.
pub struct CachedNode {
    node: Node,
    /// Whether the node is written, and how changes to it are handled.
    pub state: NodeState,
    /// A bset of the node is in flight to the device.
    pub writing: bool,
    /// The journal entry of its oldest key that is not yet in flight to the device.
    pending_since: Option<u64>,
    /// The journal entry of the oldest key in the bset that is being written.
    pub writing_since: Option<u64>,
    /// When its oldest unwritten key arrived.
    dirty_since: Option<Time>,
    /// A rewrite has been requested before the node is full.
    pub is_asked_for: bool,
    pins: Rc<Cell<u32>>,
    /// Used since the clock hand last passed it.
    used: bool,
    /// The bytes accounted for it.
    charge: usize,
}

impl CachedNode {
    /// Returns the node.
    #[must_use]
    pub const fn node(&self) -> &Node {
        &self.node
    }

    /// Returns the journal entry of its oldest key that is not yet in flight to the device.
    #[must_use]
    pub const fn pending_since(&self) -> Option<u64> {
        self.pending_since
    }

    /// Returns true for a leaf with pending keys that is neither being written nor being replaced.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.node.is_leaf() && self.node.has_pending() && !self.writing && self.state.is_open()
    }

    fn is_evictable(&self) -> bool {
        self.pins.get() == 0 && !self.node.has_pending() && !self.writing && self.state.is_open()
    }

    fn memory_bytes(&self) -> usize {
        self.node.memory_bytes() + NODE_OVERHEAD_BYTES
    }
}

/// The outcome of a request for a node.
pub enum NodeLookup {
    /// The node is in memory.
    Here(NodePin),
    /// Another task is loading it: wait for the cache's notification.
    Loading,
    /// The caller loads it; the memory is reserved.
    Load(MemoryReservation),
    /// No memory until a node is unpinned or written.
    Full,
}

/// A leaf that was found for a position. It is the leaf for that position as long as the tree keeps
/// its shape and all its nodes stay in memory.
#[derive(Clone, Copy, Debug)]
pub struct LeafHint {
    slot: usize,
    shape: u64,
    /// The place in the leaf when it was found.
    place: KeyCursor,
}

impl LeafHint {
    /// Returns where the position was in the leaf; it may have moved since.
    #[must_use]
    pub const fn place(self) -> KeyCursor {
        self.place
    }
}

/// The nodes in memory.
pub struct NodeCache {
    nodes: Slab<CachedNode>,
    /// Counts nodes that are added or removed, and changes of a node's children.
    shape: u64,
    by_pointer: PointerIndex,
    loading: BTreeSet<u64>,
    unwritten: DirtyLeaves,
    /// A leaf with more pending bytes than this is due to be written.
    pending_bytes_max: usize,
    /// The clock hand of eviction. It goes round and spares each node once that was used since it
    /// last passed, so a use costs only a mark.
    hand: usize,
    budget: usize,
    /// The most that one node may take, in bytes.
    node_bytes: usize,
    bytes: usize,
    reserved: Rc<Cell<usize>>,
    bytes_max: usize,
    freed: Rc<Notify>,
}

/// The cache's overhead for a node, in bytes: its entry, twice (the table doubles), its places in
/// two trees and in a table of pointers, and its pin count.
pub const NODE_OVERHEAD_BYTES: usize = 1024;

const _: () =
    assert!(2 * size_of::<CachedNode>() + 256 <= NODE_OVERHEAD_BYTES, "the overhead covers an entry");

impl NodeCache {
    /// Creates an empty cache of at most `budget` bytes, for nodes of at most `node_bytes` each. A
    /// leaf is due to be written when it has more than `pending_bytes_max` pending bytes. `freed`
    /// is notified when memory may be available.
    #[must_use]
    pub fn new(budget: usize, node_bytes: usize, pending_bytes_max: usize, freed: Rc<Notify>) -> Self {
        Self {
            nodes: Slab::new(),
            shape: 0,
            by_pointer: PointerIndex::default(),
            loading: BTreeSet::new(),
            unwritten: DirtyLeaves::default(),
            pending_bytes_max,
            hand: 0,
            budget,
            node_bytes,
            bytes: 0,
            reserved: Rc::default(),
            bytes_max: 0,
            freed,
        }
    }

    /// Returns the bytes in use or reserved.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes + self.reserved.get()
    }

    /// Returns the peak of [`NodeCache::bytes`] since the limit was last changed.
    #[must_use]
    pub const fn bytes_max(&self) -> usize {
        self.bytes_max
    }

    /// Returns the hard limit of [`NodeCache::bytes`].
    #[must_use]
    pub const fn budget(&self) -> usize {
        self.budget
    }

    /// Changes the hard limit. No more than the new limit may be in use.
    pub fn set_budget(&mut self, budget: usize) {
        self.bytes_max = self.bytes_max.min(budget);
        self.budget = budget;
        self.settle();
        self.freed.notify_all();
    }

    /// Returns the number of nodes in memory.
    #[must_use]
    pub fn count(&self) -> usize {
        self.nodes.len()
    }

    /// Finds the node that `pointer` names, if it is in memory. Counts as a use.
    #[inline]
    pub fn find(&mut self, pointer: Pointer) -> Option<usize> {
        let slot = self.by_pointer.get(pointer.word())?;
        self.nodes[slot].used = true;
        Some(slot)
    }

    /// Remembers the leaf in `slot`, and `place` in it, for a caller that comes back to it.
    #[must_use]
    pub const fn remember(&self, slot: usize, place: KeyCursor) -> LeafHint {
        LeafHint { slot, shape: self.shape, place }
    }

    /// Returns the slot of a remembered leaf if it is certain to be still the leaf for its
    /// position. Counts as a use.
    #[inline]
    pub fn again(&mut self, leaf: LeafHint) -> Option<usize> {
        if leaf.shape != self.shape {
            return None;
        }
        self.nodes[leaf.slot].used = true;
        Some(leaf.slot)
    }

    /// Returns the node in `slot`.
    #[inline]
    #[must_use]
    pub fn get(&self, slot: usize) -> &CachedNode {
        &self.nodes[slot]
    }

    /// Returns the node in `slot`, to change what the cache records about it.
    pub fn get_mut(&mut self, slot: usize) -> &mut CachedNode {
        &mut self.nodes[slot]
    }

    /// Like [`NodeCache::get_mut`], but returns `None` if the slot is empty.
    pub fn try_get_mut(&mut self, slot: usize) -> Option<&mut CachedNode> {
        self.nodes.get_mut(slot)
    }

    /// Changes the node in `slot`. If the node may grow, the caller has called
    /// [`NodeCache::room_to_grow`] first, or has reserved the memory.
    pub fn change<R>(&mut self, slot: usize, change: impl FnOnce(&mut Node) -> R) -> R {
        let cached = &mut self.nodes[slot];
        self.shape += u64::from(!cached.node.is_leaf());
        let result = change(&mut cached.node);
        let charge = cached.memory_bytes();
        self.bytes = self.bytes - cached.charge + charge;
        cached.charge = charge;
        self.unwritten.weighs(slot, cached.node.pending_bytes() > self.pending_bytes_max);
        assert!(charge <= self.node_bytes, "a node takes {charge} bytes of at most {}", self.node_bytes);
        self.settle();
        result
    }

    /// Returns whether a node may grow by up to `growth` bytes; otherwise it has to be rewritten.
    #[must_use]
    pub fn may_grow(&self, slot: usize, growth: usize) -> bool {
        self.nodes[slot].charge + growth <= self.node_bytes
    }

    /// Returns whether this many bytes are available without evicting a node.
    #[must_use]
    pub fn has_room(&self, bytes: usize) -> bool {
        self.bytes() + bytes <= self.budget
    }

    /// Makes room for the node in `slot` to grow by up to `growth` bytes; returns false if there is
    /// none now.
    #[must_use]
    pub fn room_to_grow(&mut self, slot: usize, growth: usize) -> bool {
        self.make_room(growth, Some(slot))
    }

    /// Pins the node in `slot`.
    #[must_use]
    pub fn pin(&self, slot: usize) -> NodePin {
        let count = Rc::clone(&self.nodes[slot].pins);
        count.set(count.get() + 1);
        NodePin { slot, count, freed: Rc::clone(&self.freed) }
    }

    /// Records that the leaf in `slot` has been given a key to write. Returns true if it had none.
    pub fn has_to_write(&mut self, slot: usize, now: Time) -> bool {
        let cached = &mut self.nodes[slot];
        let is_first = cached.dirty_since.is_none();
        if is_first {
            cached.dirty_since = Some(now);
            self.unwritten.ages(slot, None, Some(now));
        }
        is_first
    }

    /// Records that journal entry `sequence` holds the oldest pending key of the leaf in `slot`;
    /// returns the entry that did before.
    pub fn waits_for(&mut self, slot: usize, sequence: u64) -> Option<u64> {
        let before = self.nodes[slot].pending_since.replace(sequence);
        self.unwritten.waits(slot, before, Some(sequence));
        before
    }

    /// Records that the pending keys of the leaf in `slot` are in flight to the device, or in
    /// another leaf. Returns the journal entry of the oldest one.
    pub fn wrote(&mut self, slot: usize) -> Option<u64> {
        let cached = &mut self.nodes[slot];
        let (age, entry) = (cached.dirty_since.take(), cached.pending_since.take());
        self.unwritten.ages(slot, age, None);
        self.unwritten.waits(slot, entry, None);
        entry
    }

    /// Returns the leaves that have something to write.
    #[must_use]
    pub const fn unwritten(&self) -> &DirtyLeaves {
        &self.unwritten
    }

    /// Iterates over every node in memory.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &CachedNode)> {
        self.nodes.iter()
    }

    /// Looks for the node at `pointer`. If it is not in memory, reserves memory and marks it as
    /// loading.
    pub fn request(&mut self, pointer: Pointer) -> NodeLookup {
        if let Some(slot) = self.find(pointer) {
            return NodeLookup::Here(self.pin(slot));
        }
        if self.loading.contains(&pointer.word()) {
            return NodeLookup::Loading;
        }
        let Some(reserved) = self.reserve(self.node_bytes) else { return NodeLookup::Full };
        self.loading.insert(pointer.word());
        NodeLookup::Load(reserved)
    }

    /// Returns whether a task is reading the node.
    #[must_use]
    pub fn is_loading(&self, pointer: Pointer) -> bool {
        self.loading.contains(&pointer.word())
    }

    /// Ends a load that failed.
    pub fn abandon(&mut self, pointer: Pointer) {
        self.loading.remove(&pointer.word());
        self.freed.notify_all();
    }

    /// Ends a load: enters the node and pins it.
    pub fn loaded(&mut self, node: Node, pointer: Pointer, reserved: MemoryReservation) -> NodePin {
        let was_loading = self.loading.remove(&pointer.word());
        assert!(was_loading, "a load was announced");
        let slot = self.enter(node, pointer, reserved);
        self.pin(slot)
    }

    /// Reserves `bytes`; returns `None` if they are not available now.
    #[must_use]
    pub fn reserve(&mut self, bytes: usize) -> Option<MemoryReservation> {
        if !self.make_room(bytes, None) {
            return None;
        }
        self.reserved.set(self.reserved.get() + bytes);
        self.settle();
        Some(MemoryReservation { bytes, all: Rc::clone(&self.reserved), freed: Rc::clone(&self.freed) })
    }

    /// Enters a node for which memory was reserved.
    pub fn enter(&mut self, node: Node, pointer: Pointer, reserved: MemoryReservation) -> usize {
        let cached = CachedNode {
            node,
            state: NodeState::Open,
            writing: false,
            pending_since: None,
            writing_since: None,
            dirty_since: None,
            is_asked_for: false,
            pins: Rc::new(Cell::new(0)),
            used: false,
            charge: 0,
        };
        let slot = self.nodes.insert(cached);
        self.shape += 1;
        self.by_pointer.insert(pointer.word(), slot);
        // The reservation is at least what the node takes.
        drop(reserved);
        self.change(slot, |_| ());
        slot
    }

    /// Removes a node that has been replaced.
    pub fn remove(&mut self, slot: usize) {
        let _entry = self.wrote(slot);
        self.unwritten.weighs(slot, false);
        let cached = self.nodes.remove(slot);
        self.shape += 1;
        for pointer in cached.node.own().pointers.as_slice() {
            self.by_pointer.remove(pointer.word());
        }
        self.bytes -= cached.charge;
        self.freed.notify_all();
    }

    /// Returns the nodes that could be evicted if their pending keys were written, in eviction
    /// order.
    pub fn unwritten_unpinned(&self) -> impl Iterator<Item = usize> + '_ {
        let wanted = |cached: &CachedNode| {
            cached.pins.get() == 0 && cached.node.has_pending() && !cached.writing && cached.state.is_open()
        };
        let places = self.nodes.capacity();
        let round = (0..places).map(move |step| (self.hand + step) % places);
        round.filter(move |slot| self.nodes.get(*slot).is_some_and(wanted))
    }

    /// Asserts that the accounting matches the nodes in memory.
    pub fn check_invariants(&self) {
        let mut bytes = 0;
        for (slot, cached) in &self.nodes {
            assert_eq!(cached.charge, cached.memory_bytes(), "the node in slot {slot} is miscounted");
            assert!(cached.charge <= self.node_bytes, "the node in slot {slot} is too large");
            bytes += cached.charge;
            let is_large = cached.node.pending_bytes() > self.pending_bytes_max;
            self.unwritten.check(slot, (cached.dirty_since, cached.pending_since), is_large);
            assert!(
                !cached.is_writable() || cached.dirty_since.is_some(),
                "the pending keys of slot {slot} are never due"
            );
        }
        let ages = self.nodes.iter().filter(|(_, cached)| cached.dirty_since.is_some()).count();
        let entries = self.nodes.iter().filter(|(_, cached)| cached.pending_since.is_some()).count();
        assert_eq!(self.unwritten.counts(), (ages, entries), "a node with nothing to write is due");
        assert_eq!(bytes, self.bytes, "the counted bytes are those of the nodes");
        assert_eq!(self.by_pointer.len(), self.nodes.len(), "a node is found by its pointer");
        assert!(self.bytes() <= self.bytes_max && self.bytes_max <= self.budget, "the budget is exceeded");
    }

    fn settle(&mut self) {
        let bytes = self.bytes();
        self.bytes_max = self.bytes_max.max(bytes);
        // After every change: invariant L2.
        assert!(bytes <= self.budget, "the node budget is exceeded: {bytes} of {} bytes", self.budget);
    }

    /// Evicts until `bytes` more fit, but never the node in `keep`; returns false if that is not
    /// possible now.
    fn make_room(&mut self, bytes: usize, keep: Option<usize>) -> bool {
        while self.bytes() + bytes > self.budget {
            let Some(slot) = self.victim(keep) else { return false };
            self.remove(slot);
        }
        true
    }

    /// Returns the next node to evict, other than `keep`.
    fn victim(&mut self, keep: Option<usize>) -> Option<usize> {
        let places = self.nodes.capacity();
        // In the first round all nodes may turn out to have been used.
        for _ in 0..2 * places {
            let slot = self.hand;
            self.hand = (slot + 1) % places;
            let Some(cached) = self.nodes.get_mut(slot) else { continue };
            let used = core::mem::replace(&mut cached.used, false);
            if !used && Some(slot) != keep && cached.is_evictable() {
                return Some(slot);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
