//! Puts fresh nodes in the place of old ones: what a rewrite, a split and a coalesce have in common, which is the order of
//! their writes.
//!
//! Order (format 6.5, 14): buckets and memory first; then the old nodes are closed, of which nothing more is written while readers go
//! on, and writers for a while (`late`); the new nodes are durable before the parent set that names them, which holds a freeing key
//! for each of the old ones, and the parent set before the old buckets are let go. Until then the old nodes' journal
//! entries stay needed: a crash in between finds the old nodes and replays them. Nothing more is written of the new nodes
//! until after that, so a key never depends on a node that a crash would make unreachable: what they take meanwhile the journal has. The
//! parent set is one write whose first block comes last: a crash finds all of the old ones or none.
//!
//! A new root waits for nothing: every journal entry names the root of its time, and nothing that a crash before the
//! next entry needs goes before it. Old journal entries are let go by an entry, and the old root's bucket, like every
//! bucket, is handed out again only when an entry names priorities with its new generation. So a replay that makes many
//! roots, at a time when the journal has little room, takes no entry for them.

use crate::btree::cache::{Gate, Reserved};
use crate::btree::write::{self, Sealed};
use crate::btree::{Child, pending_keys};
use crate::cpu_cost::PIECE_KEYS;
use crate::error::Error;
use crate::set::CacheSet;
use crate::state::State;
use alloc::vec::Vec;
use bcached_env::{Buffer, join_all};
use bcached_format::{BucketId, Geometry, Key, Pointer, Pointers, Position};
use bcached_node::{Living, Node, NodeBuilder};

/// Words of the key of a child, or of the freeing key of one.
const CHILD_WORDS: usize = 3;

/// What takes the place of old nodes, before it is written.
pub struct Fresh {
    /// The nodes that replace the old ones, and last a new root above them if there is one.
    pub nodes: Vec<FreshNode>,
    /// How many of them replace the old ones.
    pub children: usize,
}

/// One of them.
pub struct FreshNode {
    /// In memory it counts as written.
    pub node: Node,
    /// Its first set, which is not written yet.
    pub first: Sealed,
    /// The memory that it takes.
    pub memory: Reserved,
}

/// Whether so many `new` children can take the place of so many `old` ones in the node in `parent` as it is.
pub fn has_room(s: &State, parent: usize, old: usize, new: usize) -> bool {
    let node = s.nodes.get(parent).node();
    node.fits(CHILD_WORDS * (old + new)) && s.nodes.may_grow(parent, node.replace_growth_bytes_max(old, new))
}

/// Closes nodes, and waits for what is being written of them. Each takes so many keys more, at most, as `late` says.
pub async fn gate(set: &CacheSet, slots: &[usize], late: impl Fn(&Node) -> usize) -> Result<(), Error> {
    set.with(|s| {
        for slot in slots {
            let most = late(s.nodes.get(*slot).node());
            pending_keys::close(s, *slot, most);
        }
    });
    // Some wait for it to be full no more.
    set.signals().node_progress.notify_all();
    while set.with(|s| slots.iter().any(|slot| s.nodes.get(*slot).writing)) {
        set.check_alive()?;
        set.signals().node_progress.wait().await;
    }
    Ok(())
}

/// Opens them again: they stay. None has taken a key meanwhile.
pub fn ungate(set: &CacheSet, slots: &[usize]) {
    set.with(|s| slots.iter().for_each(|slot| s.nodes.get_mut(*slot).gate = Gate::Open));
    set.signals().node_progress.notify_all();
    set.signals().leaf_work.notify_all();
}

/// Puts `fresh`, whose nodes hold what is live in those in the slots `old`, in their place; these are neighbours, and closed.
/// `parent`: where it is, and the memory by which it may grow; `None` of the root.
pub async fn replace(
    set: &CacheSet,
    old: &[usize],
    parent: Option<(usize, Reserved)>,
    mut fresh: Fresh,
) -> Result<(), Error> {
    set.with(|s| old.iter().for_each(|slot| s.claim_bucket(*slot)));
    write::flush_cache(set).await?;
    let first_sets = fresh.nodes.iter().map(|fresh| (write::first_sector(&fresh.node), &fresh.first));
    let written = join_all(first_sets.map(|(sector, first)| write::write_set(set, sector, first))).await;
    written.into_iter().collect::<Result<(), Error>>()?;
    let children = fresh.children;
    pending_keys::hand_over(set, old, &mut fresh.nodes[..children]).await;
    let new = link(set, old, parent, fresh).await?;
    set.with(|s| {
        old.iter().for_each(|slot| retire(s, *slot));
        new.iter().for_each(|slot| s.nodes.get_mut(*slot).gate = Gate::Open);
    });
    set.signals().node_progress.notify_all();
    set.signals().leaf_work.notify_all();
    set.signals().journal_progress.notify_all();
    set.signals().allocator_work.notify_all();
    Ok(())
}

/// Makes the durable new nodes reachable: in the parent, durably, or as root. Returns their slots, unlinked as yet.
async fn link(
    set: &CacheSet,
    old: &[usize],
    parent: Option<(usize, Reserved)>,
    fresh: Fresh,
) -> Result<Vec<usize>, Error> {
    let (slots, append) = set.with(|s| {
        let old_keys: Vec<Key> = old.iter().map(|slot| *s.nodes.get(*slot).node().own()).collect();
        let children = fresh.children;
        let since = pending_keys::since(s, old);
        let (slots, keys) = enter(s, fresh.nodes, since);
        match parent {
            Some((parent, memory)) => {
                let append = name(s, (parent, memory), &old_keys, &keys[..children]);
                (slots, Some((parent, append)))
            }
            None => {
                let root = *slots.last().expect("a root");
                let node = s.nodes.get(root).node();
                s.root = Child { key: *node.own(), level: node.level() };
                s.root_pin = Some(s.nodes.pin(root));
                (slots, None)
            }
        }
    });
    let Some((parent, (sector, append))) = append else { return Ok(slots) };
    // They take keys from here on.
    set.signals().node_progress.notify_all();
    write::append_set(set, sector, &append).await?;
    set.with(|s| s.nodes.get_mut(parent).writing = false);
    Ok(slots)
}

/// Enters new nodes, of which nothing more is written as yet. The journal has had what some of them have to write since entry `since`.
/// Their slots, and their keys.
fn enter(s: &mut State, nodes: Vec<FreshNode>, since: Option<u64>) -> (Vec<usize>, Vec<Key>) {
    let entered = nodes.into_iter().map(|FreshNode { node, memory, .. }| {
        let key = *node.own();
        let child = Child { key, level: node.level() };
        let slot = s.nodes.enter(node, child.pointer(), memory);
        s.nodes.get_mut(slot).gate = Gate::Unlinked;
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

/// Puts `new` in the place of `old` in the node in `parent`, which may grow by the memory set aside for that. What is to be appended to
/// it, and where.
fn name(s: &mut State, (parent, memory): (usize, Reserved), old: &[Key], new: &[Key]) -> (u64, Sealed) {
    s.nodes.get_mut(parent).writing = true;
    drop(memory);
    s.nodes.change(parent, |node| node.replace_children(old, new));
    let append = s.nodes.change(parent, write::seal_pending).expect("children were just replaced");
    let start = write::first_sector(s.nodes.get(parent).node());
    (start + u64::from(append.block) * s.geometry.block_sectors, append)
}

/// The replacement is durable and reachable: an old node, its bucket and its claim on the journal go.
fn retire(s: &mut State, old: usize) {
    if let Some(sequence) = s.nodes.wrote(old) {
        s.journal.unpin(sequence);
    }
    let cached = s.nodes.get(old);
    let child = Child { key: *cached.node().own(), level: cached.node().level() };
    let pointer = child.pointer();
    s.nodes.remove(old);
    s.unreadable.forget(pointer);
    let bucket = s.buckets.of(pointer).expect("a node lies in a bucket");
    s.buckets.free_metadata(bucket, Some(pointer.generation().next()));
}

/// Adds to `living` what a fresh node in the place of the one in `slot`, which is closed, starts with. Others run between
/// the pieces.
pub async fn gather(set: &CacheSet, slot: usize, living: &mut Living) {
    living.reserve(set.with(|s| s.nodes.get(slot).node().len()));
    in_pieces(set, slot, |node, from, is_live| node.gather(from, PIECE_KEYS, living, is_live)).await;
}

/// Shows `look` the node in `slot`, which is pinned, and the position behind which a piece of [`PIECE_KEYS`] begins, until it says
/// that there are no more; and how to tell which keys are alive. Others run between the pieces.
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
            // What a crash could bring back stays until it cannot, as what is there could: who looks must see that it is to be made void.
            look(node, from, &mut |key| !node.is_leaf() || buckets.could_return(key))
        });
    }
}

/// A fresh node with `keys`, which have so many `words`, and its first set. Others run between the pieces.
pub async fn make(set: &CacheSet, own: Key, level: u8, (keys, words): (&[Key], usize)) -> (Node, Sealed) {
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

/// Blocks of a whole node.
pub fn node_blocks(geometry: &Geometry) -> u32 {
    u32::try_from(geometry.node_sectors() / geometry.block_sectors).expect("a node is small")
}

/// The key of a new node in `bucket` whose range ends at `end`.
pub fn node_key(s: &State, bucket: BucketId, end: Position) -> Key {
    let pointer = Pointer::new(bucket.device, s.buckets.sector(bucket), s.buckets.get(bucket).generation);
    let size = u16::try_from(s.geometry.node_sectors()).expect("node sizes fit a key");
    Key { inode: end.inode, size, dirty: false, end: end.offset, pointers: Pointers::one(pointer) }
}
