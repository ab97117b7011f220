//! Replaces old nodes by fresh ones. This is common to rewrites, splits and coalesces, and defines
//! the order of their writes.
//!
//! Order:
//!
//! 1. Buckets and memory are taken.
//! 2. The old nodes are closed. No more of them is written; readers continue in them, and for a
//!    while writers do too (`pending_keys`).
//! 3. The new nodes become durable, before the parent's bset that names them. That bset also holds
//!    a freeing key for each of the old nodes.
//! 4. The parent's bset becomes durable, before the old buckets are released.
//!
//! Until then the journal entries of the old nodes stay needed: after a crash in between, the old
//! nodes are found and the entries replayed. No more of the new nodes is written before that
//! either, so a key never depends on a node that a crash would make unreachable: the journal holds
//! the keys that the new nodes take meanwhile. The first block of the parent's bset is written
//! last, so a crash finds all of the old nodes or none.
//!
//! A new root needs no such wait. Every journal entry names the root of its time, and nothing that
//! a crash before the next entry needs is released before that entry. Old journal entries are
//! released by an entry. The old root's bucket, like every bucket, is allocated again only after an
//! entry names priorities with its new generation. So a replay that makes many roots while the
//! journal has little room takes no entry for them.

use crate::btree::cache::{MemoryReservation, NodeState};
use crate::btree::write::{self, SealedSet};
use crate::btree::{NodeRef, pending_keys};
use crate::cpu_cost::PIECE_KEYS;
use crate::error::Error;
use crate::set::CacheSet;
use crate::state::State;
use alloc::vec::Vec;
use bcached_env::{Buffer, join_all};
use bcached_format::{BucketId, Geometry, Key, Pointer, Pointers, Position};
use bcached_node::{LiveKeys, Node, NodeBuilder};

/// Words of a child's key, or of its freeing key.
const CHILD_WORDS: usize = 3;

/// The nodes that are to replace old ones, before they are written.
pub struct FreshNodes {
    /// The nodes that replace the old ones, followed by the new root above them, if there is one.
    pub nodes: Vec<FreshNode>,
    /// How many of them replace the old ones.
    pub children: usize,
}

/// One of the fresh nodes.
pub struct FreshNode {
    /// In memory it counts as written.
    pub node: Node,
    /// Its first bset, which is not written yet.
    pub first: SealedSet,
    /// The memory that it takes.
    pub memory: MemoryReservation,
}

/// Returns whether `new` children can replace `old` children in the node in `parent` as it is.
pub fn has_room(s: &State, parent: usize, old: usize, new: usize) -> bool {
    let node = s.nodes.get(parent).node();
    node.fits(CHILD_WORDS * (old + new)) && s.nodes.may_grow(parent, node.replace_growth_bytes_max(old, new))
}

/// Closes nodes, and waits for writes of them in flight. Each takes at most as many more keys as
/// `late` says.
pub async fn gate(set: &CacheSet, slots: &[usize], late: impl Fn(&Node) -> usize) -> Result<(), Error> {
    set.with(|s| {
        for slot in slots {
            let most = late(s.nodes.get(*slot).node());
            pending_keys::close(s, *slot, most);
        }
    });
    // Some tasks wait for the leaf to have room again.
    set.signals().node_progress.notify_all();
    while set.with(|s| slots.iter().any(|slot| s.nodes.get(*slot).writing)) {
        set.check_alive()?;
        set.signals().node_progress.wait().await;
    }
    Ok(())
}

/// Reopens the nodes: they stay. None has taken a key meanwhile.
pub fn ungate(set: &CacheSet, slots: &[usize]) {
    set.with(|s| slots.iter().for_each(|slot| s.nodes.get_mut(*slot).state = NodeState::Open));
    set.signals().node_progress.notify_all();
    set.signals().leaf_work.notify_all();
}

/// Replaces the nodes in the slots `old`, which are neighbours and closed, by `fresh`, whose nodes
/// hold their live keys. `parent` is the slot of the parent and the memory by which it may grow;
/// `None` for the root.
pub async fn replace(
    set: &CacheSet,
    old: &[usize],
    parent: Option<(usize, MemoryReservation)>,
    mut fresh: FreshNodes,
) -> Result<(), Error> {
    set.with(|s| old.iter().for_each(|slot| s.claim_bucket(*slot)));
    write::flush_cache(set).await?;
    let first_sets = fresh.nodes.iter().map(|fresh| (write::first_sector(&fresh.node), &fresh.first));
    let written = join_all(first_sets.map(|(sector, first)| write::write_set(set, sector, first))).await;
    // The new nodes are durable before the parent names them: invariant D3.
    written.into_iter().collect::<Result<(), Error>>()?;
    let children = fresh.children;
    // The new nodes have all late keys before they can be found: invariant D4.
    pending_keys::hand_over(set, old, &mut fresh.nodes[..children]).await;
    let new = link(set, old, parent, fresh).await?;
    // The parent's bset, if there is a parent, is durable. Only now are the old buckets and journal
    // entries released: invariant D3.
    set.with(|s| {
        old.iter().for_each(|slot| retire(s, *slot));
        new.iter().for_each(|slot| s.nodes.get_mut(*slot).state = NodeState::Open);
    });
    set.signals().node_progress.notify_all();
    set.signals().leaf_work.notify_all();
    set.signals().journal_progress.notify_all();
    set.signals().allocator_work.notify_all();
    Ok(())
}

/// Makes the durable new nodes reachable: durably in the parent, or as the root. Returns their
/// slots, not yet linked.
async fn link(
    set: &CacheSet,
    old: &[usize],
    parent: Option<(usize, MemoryReservation)>,
    fresh: FreshNodes,
) -> Result<Vec<usize>, Error> {
    let (slots, append) = set.with(|s| {
        let old_keys: Vec<Key> = old.iter().map(|slot| *s.nodes.get(*slot).node().own()).collect();
        let children = fresh.children;
        // The journal keeps the late keys for the new nodes: invariant D4.
        let since = pending_keys::since(s, old);
        let (slots, keys) = enter(s, fresh.nodes, since);
        match parent {
            Some((parent, memory)) => {
                let append = name(s, (parent, memory), &old_keys, &keys[..children]);
                (slots, Some((parent, append)))
            }
            None => {
                let root = *slots.last().expect("the last slot is the root");
                let node = s.nodes.get(root).node();
                s.root = NodeRef { key: *node.own(), level: node.level() };
                s.root_pin = Some(s.nodes.pin(root));
                (slots, None)
            }
        }
    });
    let Some((parent, (sector, append))) = append else { return Ok(slots) };
    // The new nodes take keys from here on.
    set.signals().node_progress.notify_all();
    write::append_set(set, sector, &append).await?;
    set.with(|s| s.nodes.get_mut(parent).writing = false);
    Ok(slots)
}

/// Enters new nodes in the cache; no more of them is written yet. The journal has held the keys
/// that some of them have to write since entry `since`. Returns their slots and their keys.
fn enter(s: &mut State, nodes: Vec<FreshNode>, since: Option<u64>) -> (Vec<usize>, Vec<Key>) {
    let entered = nodes.into_iter().map(|FreshNode { node, memory, .. }| {
        let key = *node.own();
        let child = NodeRef { key, level: node.level() };
        let slot = s.nodes.enter(node, child.pointer(), memory);
        s.nodes.get_mut(slot).state = NodeState::Unlinked;
        if s.nodes.get(slot).node().has_pending() {
            s.nodes.has_to_write(slot, s.now);
            if let Some(since) = since {
                let _none = s.nodes.waits_for(slot, since);
                s.journal.pin(since);
            }
        }
        (slot, key)
    });
    entered.unzip()
}

/// Replaces `old` by `new` in the node in `parent`, which may grow by the memory reserved for that.
/// Returns the bset to append, and its sector.
fn name(
    s: &mut State,
    (parent, memory): (usize, MemoryReservation),
    old: &[Key],
    new: &[Key],
) -> (u64, SealedSet) {
    s.nodes.get_mut(parent).writing = true;
    drop(memory);
    s.nodes.change(parent, |node| node.replace_children(old, new));
    let append = s.nodes.change(parent, write::seal_pending).expect("children were just replaced");
    let start = write::first_sector(s.nodes.get(parent).node());
    (start + u64::from(append.block) * s.geometry.block_sectors, append)
}

/// Removes an old node, frees its bucket and unpins its journal entry: its replacement is durable
/// and reachable.
fn retire(s: &mut State, old: usize) {
    if let Some(sequence) = s.nodes.wrote(old) {
        s.journal.unpin(sequence);
    }
    let cached = s.nodes.get(old);
    let child = NodeRef { key: *cached.node().own(), level: cached.node().level() };
    let pointer = child.pointer();
    s.nodes.remove(old);
    s.unreadable.forget(pointer);
    let bucket = s.buckets.of(pointer).expect("a node lies in a bucket");
    s.buckets.free_metadata(bucket, Some(pointer.generation().next()));
}

/// Adds to `living` the keys with which a replacement of the closed node in `slot` starts. Other
/// tasks run between the pieces.
pub async fn gather(set: &CacheSet, slot: usize, living: &mut LiveKeys) {
    living.reserve(set.with(|s| s.nodes.get(slot).node().len()));
    in_pieces(set, slot, |node, from, is_live| node.gather(from, PIECE_KEYS, living, is_live)).await;
}

/// Passes the pinned node in `slot` to `look`, once for each piece of [`PIECE_KEYS`] keys: the
/// position after which the piece begins, and a test for live keys. `look` returns where the next
/// piece begins, or `None` at the end. Other tasks run between the pieces.
pub async fn in_pieces(
    set: &CacheSet,
    slot: usize,
    mut look: impl FnMut(&Node, Position, &mut dyn FnMut(&Key) -> bool) -> Option<Position>,
) {
    let mut after = Some(Position::ZERO);
    while let Some(from) = after {
        set.env().breathe().await;
        after = set.with(|s| {
            let State { nodes, buckets, work, .. } = s;
            let node = nodes.get(slot).node();
            work.visit(PIECE_KEYS.min(node.len()));
            // A stale key that a crash could revive is kept until that is impossible, just as in
            // the old node. A write must see that the key has to be invalidated.
            look(node, from, &mut |key| !node.is_leaf() || buckets.could_return(key))
        });
    }
}

/// Makes a fresh node with `keys`, which take `words` words, and its first bset. Other tasks run
/// between the pieces.
pub async fn make(set: &CacheSet, own: Key, level: u8, (keys, words): (&[Key], usize)) -> (Node, SealedSet) {
    let seq = set.env().random();
    let mut node = set.with(|s| NodeBuilder::new(own, level, seq, &s.geometry, words, Buffer::zeroed));
    for keys in keys.chunks(PIECE_KEYS) {
        set.env().breathe().await;
        set.with(|s| s.work.make(keys.len()));
        node.push(keys);
    }
    let (node, first) = node.seal();
    (node, first.map(Buffer::freeze))
}

/// Returns the number of blocks of a whole node.
pub fn node_blocks(geometry: &Geometry) -> u32 {
    u32::try_from(geometry.node_sectors() / geometry.block_sectors).expect("a node is small")
}

/// Returns the key of a new node in `bucket` whose range ends at `end`.
pub fn node_key(s: &State, bucket: BucketId, end: Position) -> Key {
    let pointer = Pointer::new(bucket.device, s.buckets.sector(bucket), s.buckets.get(bucket).generation);
    let size = u16::try_from(s.geometry.node_sectors()).expect("node sizes fit a key");
    Key { inode: end.inode, size, dirty: false, end: end.offset, pointers: Pointers::one(pointer) }
}
