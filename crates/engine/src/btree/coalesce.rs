//! Merges two sparse neighbours into one node, so that a tree whose keys have died costs no more
//! buckets and reads than its live keys need.
//!
//! Coalescing is optional. It never waits for buckets, does not touch the reserve, and is skipped
//! if anything is in its way. Only GC does it, and not during a replay, which may need every bucket
//! there is. [`belong_together`] says when it is worth doing, and why it does not alternate with
//! splits.
//!
//! - *Parent*: both nodes have the same parent, so that one bset names the new node and frees the
//!   old ones. The parent may be left with one child: the tree keeps its height, as in the kernel.
//! - *Range*: the new node's range begins where the left one's did and ends where the right one's
//!   does, as its key says. No live child ends any more where the left one ended.
//! - *Keys*: no key of the right node begins before the left one ends. That was checked when the
//!   cache set was opened. It is checked again, because the node may have been read since, and the
//!   new node would hold keys out of order.
//! - *Readers* continue in the old nodes, which do not change, until the parent in memory names the
//!   new one, which has the same content. An attempt does not wait between the parent and the leaf.
//! - *Crashes*: the order of writes is that of a split (`replace`). Until the parent's bset is
//!   complete, both old nodes are valid, together with their journal entries. From then on neither
//!   is, as its freeing keys record.

use crate::btree::cache::{MemoryReservation, NodePin};
use crate::btree::replace::{self, FreshNode, FreshNodes};
use crate::btree::{NodeRef, load, split};
use crate::cpu_cost::PIECE_KEYS;
use crate::error::Error;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::BucketUsage;
use crate::state::{BTREE_RESERVE, State};
use bcached_format::{BucketId, Position};
use bcached_node::{LiveKeys, belong_together};

/// Coalesces the node at `level` for `at` with its right neighbour, if both are sparse enough.
/// Returns true if the tree has changed; there may then be more to do at the same place.
pub async fn coalesce(set: &CacheSet, (at, level): (Position, u8)) -> Result<bool, Error> {
    let _structure = set.inner.structure.acquire(1).await;
    // The root has no neighbour.
    if set.with(|s| s.root.level <= level || s.journal.is_replaying() || !split::spares_buckets(s)) {
        return Ok(false);
    }
    let _ticket = split::take_ticket(set).await;
    let path = split::load_path(set, at, level).await?;
    let (left, parent) = (path[path.len() - 1].slot(), path[path.len() - 2].slot());
    let left_words = live_words(set, left).await;
    // Most nodes are full, so their neighbours need not be read.
    if !set.with(|s| s.is_one_node(left_words)) {
        return Ok(false);
    }
    let Some(right) = load_neighbour(set, &path).await? else { return Ok(false) };
    let words = left_words + live_words(set, right.slot()).await;
    if !set.with(|s| s.is_one_node(words) && has_border(s, left, right.slot())) {
        return Ok(false);
    }
    if !set.with(|s| replace::has_room(s, parent, 2, 1)) {
        let depth = set.with(|s| split::topmost_full(s, &path, path.len() - 2));
        return split::rewrite(set, &path, depth).await;
    }
    merge(set, parent, [left, right.slot()]).await
}

/// Loads the right neighbour of the last node of `path`, which is not the root. Returns `None` if
/// they have different parents. A neighbour that cannot be read is left alone, and is recorded as
/// unreadable.
async fn load_neighbour(set: &CacheSet, path: &[NodePin]) -> Result<Option<NodePin>, Error> {
    let neighbour = set.with(|s| {
        let left = s.nodes.get(path[path.len() - 1].slot()).node();
        let parent = s.nodes.get(path[path.len() - 2].slot()).node();
        // A node's range ends at its position; what starts there belongs to the neighbour.
        parent.child_for(left.position()).map(|key| NodeRef { key: *key, level: left.level() })
    });
    let Some(child) = neighbour else { return Ok(None) };
    match load::load(set, child).await {
        Ok(pin) => Ok(Some(pin)),
        Err(_) => set.check_alive().map(|()| None),
    }
}

/// Counts the words of the live keys in the node in `slot`, which is pinned. Other tasks run
/// between the pieces and may write to a leaf, so the count is repeated once the leaf is closed.
async fn live_words(set: &CacheSet, slot: usize) -> usize {
    let mut words = 0;
    replace::in_pieces(set, slot, |node, from, is_live| {
        let (keys, next) = node.piece(from, PIECE_KEYS);
        words += keys.filter(|key| is_live(key)).map(bcached_format::Key::words).sum::<usize>();
        next
    })
    .await;
    words
}

impl State {
    /// Returns whether two neighbours with this many words of keys become one node.
    pub(crate) fn is_one_node(&self, words: usize) -> bool {
        belong_together(words, replace::node_blocks(&self.geometry), &self.geometry)
    }
}

/// Checks that the right node begins where the left one ends.
fn has_border(s: &mut State, left: usize, right: usize) -> bool {
    let border = s.nodes.get(left).node().position();
    let node = s.nodes.get(right).node();
    let checked = if node.is_leaf() { node.check_extents(border) } else { node.check_children(border) };
    s.work.pass(if node.is_leaf() { 1 } else { node.len() });
    let child = NodeRef { key: *node.own(), level: node.level() };
    checked.map_err(|error| s.meets_unreadable(child, &load::damaged(child, error))).is_ok()
}

/// Replaces the two nodes in the slots `old`, from left to right, by one, if they are still as
/// sparse.
async fn merge(set: &CacheSet, parent: usize, old: [usize; 2]) -> Result<bool, Error> {
    let memory = load::set_aside(set, set.inner.shares.get().node_bytes).await?;
    let growth = set.with(|s| s.nodes.get(parent).node().replace_growth_bytes_max(2, 1));
    let parent_memory = load::set_aside(set, growth).await?;
    let Some(bucket) = set.with(|s| s.buckets.take(BucketUsage::Meta, BTREE_RESERVE)) else {
        return Ok(false);
    };
    replace::gate(set, &old, |_| 0).await?;
    let mut living = LiveKeys::default();
    for slot in old {
        replace::gather(set, slot, &mut living).await;
    }
    if !set.with(|s| s.is_one_node(living.words())) {
        // Other tasks have written to them meanwhile.
        set.with(|s| s.buckets.put_back(bucket));
        replace::ungate(set, &old);
        return Ok(false);
    }
    let fresh = build(set, old[1], bucket, (&living, memory)).await;
    let _phase = set.begin(Phase::Coalesce);
    replace::replace(set, &old, Some((parent, parent_memory)), fresh).await?;
    set.with(|s| s.stats.btree_coalesces += 1);
    Ok(true)
}

/// Makes the node in `bucket` that will hold `living`. Its range ends where that of the node in
/// `right` does.
async fn build(
    set: &CacheSet,
    right: usize,
    bucket: BucketId,
    (living, memory): (&LiveKeys, MemoryReservation),
) -> FreshNodes {
    let (own, level) = set.with(|s| {
        let node = s.nodes.get(right).node();
        (replace::node_key(s, bucket, node.position()), node.level())
    });
    let (node, first) = replace::make(set, own, level, (living.keys(), living.words())).await;
    FreshNodes { nodes: alloc::vec![FreshNode { node, first, memory }], children: 1 }
}
