//! Makes one node of two neighbours that have become sparse, so that a tree whose keys have died costs no more buckets
//! and reads than what is left of it (format 12.3).
//!
//! Nobody needs it: it never waits for buckets, leaves the reserve to those who do, and is left out where anything is in
//! its way. Only GC does it, and not in a replay, which may need every bucket there is. When it is worth doing, and why it
//! does not alternate with splits, is said at [`belong_together`].
//!
//! - *Parent*: both have the same, so that one set names the new node and frees the old ones. It may be left with one
//!   child: the tree keeps its height, as in a kernel.
//! - *Range*: the new node's begins where the left one's did and ends where the right one's does, as its key says. Where the
//!   left one ended no living child ends any more.
//! - *Keys*: none of the right node begins before the left one ends. That was checked when the set was opened; it is once
//!   more, because the node may have been read since, and the new one would hold keys out of order.
//! - *Readers* go on in the old nodes, which nobody changes, until the parent in memory names the new one, which says the
//!   same. An attempt does not wait between the parent and the leaf.
//! - *Crashes*: the order of writes is that of a split (`replace`). Until the parent set is whole both old nodes are in
//!   force, with their journal entries; from then on neither is, and its freeing keys tell so.

use crate::btree::cache::{Pin, Reserved};
use crate::btree::replace::{self, Fresh, FreshNode};
use crate::btree::{Child, load, split};
use crate::cpu_cost::PIECE_KEYS;
use crate::error::Error;
use crate::phases::Phase;
use crate::set::CacheSet;
use crate::space::Usage;
use crate::state::{BTREE_RESERVE, State};
use bcached_format::{BucketId, Position};
use bcached_node::{Living, belong_together};

/// Makes one of the node at `level` for `at` and its right neighbour, if they are sparse enough. True: the tree has changed,
/// and there may be more to do at the same place.
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
    // Most nodes are full: their neighbours are not read for this.
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

/// The right neighbour of the last node of `path`, which is not the root, in memory; `None` if they have not the same
/// parent. One that cannot be read is left alone; that it cannot is known from then on.
async fn load_neighbour(set: &CacheSet, path: &[Pin]) -> Result<Option<Pin>, Error> {
    let neighbour = set.with(|s| {
        let left = s.nodes.get(path[path.len() - 1].slot()).node();
        let parent = s.nodes.get(path[path.len() - 2].slot()).node();
        // A node's range ends with its position; what starts there is the neighbour's.
        parent.child_for(left.position()).map(|key| Child { key: *key, level: left.level() })
    });
    let Some(child) = neighbour else { return Ok(None) };
    match load::load(set, child).await {
        Ok(pin) => Ok(Some(pin)),
        Err(_) => set.check_alive().map(|()| None),
    }
}

/// Words of what is alive in the node in `slot`, which is pinned. Others run between the pieces, and may write to a leaf: it is
/// asked once more when it is closed.
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
    /// Whether keys of so many words, of two neighbours, become one node.
    pub(crate) fn is_one_node(&self, words: usize) -> bool {
        belong_together(words, replace::node_blocks(&self.geometry), &self.geometry)
    }
}

/// The right one begins where the left one ends.
fn has_border(s: &mut State, left: usize, right: usize) -> bool {
    let border = s.nodes.get(left).node().position();
    let node = s.nodes.get(right).node();
    let checked = if node.is_leaf() { node.check_extents(border) } else { node.check_children(border) };
    s.work.pass(if node.is_leaf() { 1 } else { node.len() });
    let child = Child { key: *node.own(), level: node.level() };
    checked.map_err(|error| s.meets_unreadable(child, &load::damaged(child, error))).is_ok()
}

/// Puts one node in the place of the two in the slots `old`, from left to right, if they are as sparse as they were.
async fn merge(set: &CacheSet, parent: usize, old: [usize; 2]) -> Result<bool, Error> {
    let memory = load::set_aside(set, set.inner.shares.get().node_bytes).await?;
    let growth = set.with(|s| s.nodes.get(parent).node().replace_growth_bytes_max(2, 1));
    let parent_memory = load::set_aside(set, growth).await?;
    let Some(bucket) = set.with(|s| s.buckets.take(Usage::Meta, BTREE_RESERVE)) else { return Ok(false) };
    replace::gate(set, &old, |_| 0).await?;
    let mut living = Living::default();
    for slot in old {
        replace::gather(set, slot, &mut living).await;
    }
    if !set.with(|s| s.is_one_node(living.words())) {
        // Others have written to them meanwhile.
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

/// The node in `bucket` that will hold `living`, in a range that ends where that of the node in `right` does.
async fn build(
    set: &CacheSet,
    right: usize,
    bucket: BucketId,
    (living, memory): (&Living, Reserved),
) -> Fresh {
    let (own, level) = set.with(|s| {
        let node = s.nodes.get(right).node();
        (replace::node_key(s, bucket, node.position()), node.level())
    });
    let (node, first) = replace::make(set, own, level, (living.keys(), living.words())).await;
    Fresh { nodes: alloc::vec![FreshNode { node, first, memory }], children: 1 }
}
