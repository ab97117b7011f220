//! Rewrites a full node: compacts it, or splits it in two, up to and including a new root.
//! `replace` defines the order of the writes.
//!
//! One rewrite runs at a time. A full parent is rewritten first, then the path is looked up again;
//! there is no recursion. No task waits for buckets while it holds anything, because GC may have to
//! run first.

use crate::btree::budget::{REWRITE_NODES, rewrite_tickets};
use crate::btree::cache::{MemoryReservation, NodePin};
use crate::btree::replace::{self, FreshNode, FreshNodes};
use crate::btree::{NodeRef, load};
use crate::cpu_cost::VISIT_MAX;
use crate::error::Error;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::{Buckets, allocator};
use crate::state::{BTREE_RESERVE, State};
use alloc::vec::Vec;
use bcached_env::sync::Permit;
use bcached_format::{BucketId, Key, Pointer, Position};
use bcached_node::{LiveKeys, SplitPlan};

/// Makes room for `words` more words in the leaf for the extent start `at`.
pub async fn split(set: &CacheSet, at: Position, words: usize) -> Result<(), Error> {
    loop {
        match step(set, at, |s, path| leaf_full(s, path, words)).await? {
            RewriteOutcome::Done => return Ok(()),
            RewriteOutcome::Parent => {}
            RewriteOutcome::NoBuckets => allocator::metadata_comes(set, REWRITE_NODES).await?,
        }
    }
}

/// Rewrites the leaf for `at` although it has room: GC drops its dead keys. Returns false if GC
/// must finish first, or there are no buckets for it.
pub async fn compact(set: &CacheSet, at: Position) -> Result<bool, Error> {
    loop {
        match step(set, at, |s, path| Some(topmost_full(s, path, path.len() - 1))).await? {
            RewriteOutcome::Done => return Ok(true),
            RewriteOutcome::Parent => {}
            RewriteOutcome::NoBuckets if allocator::metadata_comes_to_gc(set, REWRITE_NODES).await? => {}
            RewriteOutcome::NoBuckets => return Ok(false),
        }
    }
}

/// The outcome of a step towards the rewrite of a leaf.
pub enum RewriteOutcome {
    /// The leaf has been rewritten, or need not be.
    Done,
    /// A node above it has been rewritten.
    Parent,
    /// There are no buckets for it now. Nothing has changed.
    NoBuckets,
}

/// Rewrites the node that `choose` selects on the path to the leaf for `at`. Everything held for it
/// is released before any wait for buckets: GC, which may have to run first, needs it too.
pub(super) async fn step(
    set: &CacheSet,
    at: Position,
    choose: impl FnOnce(&State, &[NodePin]) -> Option<usize>,
) -> Result<RewriteOutcome, Error> {
    let _structure = set.inner.structure.acquire(1).await;
    let _ticket = take_ticket(set).await;
    let path = load_path(set, at, 0).await?;
    let Some(depth) = set.with(|s| choose(s, &path)) else { return Ok(RewriteOutcome::Done) };
    Ok(match rewrite(set, &path, depth).await? {
        false => RewriteOutcome::NoBuckets,
        true if depth + 1 == path.len() => RewriteOutcome::Done,
        true => RewriteOutcome::Parent,
    })
}

/// An interior node, as GC sees it.
pub struct InteriorNode {
    /// Where the next one of its level begins.
    pub end: Position,
    /// The buckets that it names, with their generations.
    pub named: Vec<Pointer>,
    /// It should have been rewritten, but GC must finish first, or there are no buckets for it.
    pub lacks_buckets: bool,
}

/// Rewrites the node at `level` for `at` if a pointer that it holds on the device, dead or alive,
/// is `too_stale`. Returns the node's content after that; `None` if the tree has no interior nodes
/// at that level.
pub async fn tidy(
    set: &CacheSet,
    (at, level): (Position, u8),
    too_stale: impl Fn(&Buckets, Pointer) -> bool,
) -> Result<Option<InteriorNode>, Error> {
    let mut lacks_buckets = false;
    loop {
        let rewritten = {
            let _structure = set.inner.structure.acquire(1).await;
            if set.with(|s| s.root.level < level) {
                return Ok(None);
            }
            let _ticket = take_ticket(set).await;
            let path = load_path(set, at, level).await?;
            let lowest = path.len() - 1;
            let (own, named) = read_named(set, &path[lowest]).await?;
            if lacks_buckets || !names_one(set, &named, &too_stale).await {
                return Ok(Some(InteriorNode { end: own.position(), named, lacks_buckets }));
            }
            let depth = set.with(|s| topmost_full(s, &path, lowest));
            rewrite(set, &path, depth).await?
        };
        lacks_buckets = !rewritten && !allocator::metadata_comes_to_gc(set, REWRITE_NODES).await?;
    }
}

/// Returns whether one of `named` is `too_stale`. Other tasks run between the pieces.
async fn names_one(
    set: &CacheSet,
    named: &[Pointer],
    too_stale: &impl Fn(&Buckets, Pointer) -> bool,
) -> bool {
    for named in named.chunks(VISIT_MAX) {
        set.env().breathe().await;
        let found = set.with(|s| {
            s.work.visit(named.len());
            named.iter().any(|pointer| too_stale(&s.buckets, *pointer))
        });
        if found {
            return true;
        }
    }
    false
}

/// Reads what an interior node names on the device; in memory it has no dead children. This is part
/// of a rewrite, and only one runs at a time, so the node does not change meanwhile. The caller
/// holds a ticket.
async fn read_named(set: &CacheSet, pin: &NodePin) -> Result<(Key, Vec<Pointer>), Error> {
    let _memory = load::set_aside(set, set.inner.shares.get().node_bytes).await?;
    let (own, level, geometry) = set.with(|s| {
        let node = s.nodes.get(pin.slot()).node();
        (*node.own(), node.level(), s.geometry)
    });
    let child = NodeRef { key: own, level };
    let durable = load::durable_blocks(set, child);
    let read = load::read_from((set.env(), set.cache()), child, &geometry, durable).await;
    set.with(|s| match &read {
        Ok(_) => s.unreadable.forget(child.pointer()),
        Err(error) => s.meets_unreadable(child, error),
    });
    Ok((own, read?.named().collect()))
}

/// Takes tickets for a path and for the nodes made of one of its nodes. The tree does not grow
/// meanwhile, because only one rewrite runs at a time.
pub(super) async fn take_ticket(set: &CacheSet) -> Permit {
    let count = set.with(|s| rewrite_tickets(s.root.level));
    set.inner.tickets.acquire(count).await
}

/// Loads and pins the path from the root towards `at`, down to `level`. The caller holds tickets
/// for it.
pub(super) async fn load_path(set: &CacheSet, at: Position, level: u8) -> Result<Vec<NodePin>, Error> {
    let mut path = Vec::new();
    let mut child = set.with(|s| s.root);
    loop {
        let pin = load::load(set, child).await?;
        let next = set.with(|s| {
            let node = s.nodes.get(pin.slot()).node();
            (child.level > level).then(|| {
                let key = node.child_for(at).expect("the children of a checked node reach its end");
                NodeRef { key: *key, level: child.level - 1 }
            })
        });
        path.push(pin);
        match next {
            Some(next) => child = next,
            None => return Ok(path),
        }
    }
}

/// Returns the node of the path to rewrite next; `None` if the leaf has room for `words` by now.
pub(super) fn leaf_full(s: &State, path: &[NodePin], words: usize) -> Option<usize> {
    let leaf = path.len() - 1;
    s.is_full(path[leaf].slot(), words).then(|| topmost_full(s, path, leaf))
}

/// Returns the node of the path to rewrite next, for a rewrite that is not urgent. `None` if the
/// leaf has room for several bsets by now, or buckets are scarce.
pub(super) fn leaf_nearly_full(s: &State, path: &[NodePin]) -> Option<usize> {
    let leaf = path.len() - 1;
    let is_due = spares_buckets(s) && s.nodes.get(path[leaf].slot()).node().is_nearly_full();
    is_due.then(|| topmost_full(s, path, leaf))
}

/// Returns whether there are enough buckets for a rewrite besides the reserve, which is kept for
/// tasks that need it.
pub(super) fn spares_buckets(s: &State) -> bool {
    s.buckets.free_count() >= BTREE_RESERVE + REWRITE_NODES
}

/// Returns the topmost full node, searching upwards from `depth`. A node can be rewritten only when
/// its parent has room for its replacements.
pub(super) fn topmost_full(s: &State, path: &[NodePin], mut depth: usize) -> usize {
    while depth > 0 && !replace::has_room(s, path[depth - 1].slot(), 1, 2) {
        depth -= 1;
    }
    depth
}

/// Rewrites the node at `depth` of `path`. Returns false if there are no buckets for it now;
/// nothing has changed then.
pub(super) async fn rewrite(set: &CacheSet, path: &[NodePin], depth: usize) -> Result<bool, Error> {
    let begun = set.env().now();
    let slot = path[depth].slot();
    let parent = depth.checked_sub(1).map(|above| path[above].slot());
    let mut memory = Vec::new();
    for _ in 0..REWRITE_NODES {
        memory.push(load::set_aside(set, set.inner.shares.get().node_bytes).await?);
    }
    let parent_growth =
        set.with(|s| parent.map_or(0, |parent| s.nodes.get(parent).node().replace_growth_bytes_max(1, 2)));
    let parent_memory = load::set_aside(set, parent_growth).await?;
    let Some(mut buckets) = allocator::try_take_metadata(set, REWRITE_NODES) else { return Ok(false) };
    // Part of the memory for new nodes is for late keys, unless there is to be a new root.
    let is_root = depth == 0;
    replace::gate(set, &[slot], |node| if is_root { 0 } else { node.late_keys_max() }).await?;
    let fresh = build(set, slot, is_root, (&mut buckets, &mut memory)).await;
    set.with(|s| buckets.drain(..).for_each(|bucket| s.buckets.put_back(bucket)));
    let fresh = fresh?;
    let _phases = set.with(|s| phases(s, &fresh)).map(|phase| phase.map(|phase| set.begin(phase)));
    replace::replace(set, &[slot], parent.map(|parent| (parent, parent_memory)), fresh).await?;
    set.with(|s| s.stats.splits.add(begun, s.now));
    Ok(true)
}

/// Returns the kind of this rewrite, and whether it is part of a replay.
fn phases(s: &State, fresh: &FreshNodes) -> [Option<Phase>; 2] {
    let kind = match (fresh.nodes.len() - fresh.children, fresh.children, fresh.nodes[0].node.level()) {
        (0, 1, _) => Phase::Rewrite,
        (0, _, 0) => Phase::LeafSplit,
        (0, ..) => Phase::InteriorSplit,
        _ => Phase::RootSplit,
    };
    let is_replay = s.journal.is_replaying() || !s.overlay.is_empty();
    [Some(kind), is_replay.then_some(Phase::ReplaySplit)]
}

/// Makes the new nodes from the live keys of the old one. The old node is closed, so only late keys
/// change it meanwhile. Other tasks run between the steps.
async fn build(
    set: &CacheSet,
    slot: usize,
    is_root: bool,
    (free, memory): (&mut Vec<BucketId>, &mut Vec<MemoryReservation>),
) -> Result<FreshNodes, Error> {
    let geometry = set.with(|s| s.geometry);
    let mut living = LiveKeys::default();
    replace::gather(set, slot, &mut living).await;
    set.env().breathe().await;
    let (level, position, division) = set.with(|s| {
        s.work.pass(living.keys().len());
        let node = s.nodes.get(slot).node();
        (node.level(), node.position(), living.divide(replace::node_blocks(&geometry), &geometry))
    });
    let wanted = match division {
        SplitPlan::One => alloc::vec![(position, living.keys(), living.words())],
        SplitPlan::Two { left, left_words } => {
            let (left, right) = living.keys().split_at(left);
            alloc::vec![
                (last_position(left), left, left_words),
                (position, right, living.words() - left_words)
            ]
        }
    };
    let children = wanted.len();
    if is_root && children > 1 {
        set.inner.shares.get().check(level + 1).map_err(|error| set.fail(error))?;
    }
    let mut nodes = Vec::new();
    let mut add = async |level, end, keys: (&[Key], usize)| {
        let own = set.with(|s| replace::node_key(s, free.pop().expect("taken for each node"), end));
        let (node, first) = replace::make(set, own, level, keys).await;
        nodes.push(FreshNode { node, first, memory: memory.pop().expect("reserved for each node") });
        own
    };
    let mut owns = Vec::new();
    for (end, keys, words) in wanted {
        owns.push(add(level, end, (keys, words)).await);
    }
    if is_root && children > 1 {
        let words = owns.iter().map(Key::words).sum();
        add(level + 1, Position::MAX, (&owns, words)).await;
    }
    set.with(|s| s.stats.btree_rewrites += 1);
    Ok(FreshNodes { nodes, children })
}

fn last_position(keys: &[Key]) -> Position {
    keys.last().expect("the left half of a split has keys").position()
}
