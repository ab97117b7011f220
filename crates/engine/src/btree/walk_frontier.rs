//! Tracks how far the walk that counts the tree has progressed, in a cache set that is served
//! before it has been walked.
//!
//! Invariant: the live and dirty sectors of buckets and volumes count exactly what lies before the
//! frontier, whatever keys are inserted or removed. A key across the frontier counts as far as it
//! lies before it. So a change of a leaf changes the counts by what [`WalkFrontier::counted`]
//! returns, and moving the frontier adds the keys that it passes. Each happens in one transition,
//! so nothing is counted twice or missed.
//!
//! The usage of a bucket is unknown until the frontier has reached the end. Until then no bucket
//! that holds data is reclaimed (`BucketUsage::Unknown`). A caller that asks how much is dirty
//! waits ([`CacheSet::walked`]) or relies on what is certain ([`State::is_clean`]). The same holds
//! for journalled keys that are not in the tree yet (`journal::overlay`).
//!
//! [`CacheSet::walked`]: crate::set::CacheSet::walked

use crate::backoff::Backoff;
use crate::btree::{Attempt, Need, NodeRef, load, walk};
use crate::cpu_cost::PIECE_KEYS;
use crate::error::Error;
use crate::gc::pass::TreeStats;
use crate::open_progress::WHOLE;
use crate::space::{BucketUsage, Buckets};
use crate::state::State;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use bcached_format::{Inode, Key, Pointer, Position};

/// How far a set has been walked.
pub struct WalkFrontier {
    /// Sectors before it are counted.
    at: Position,
    /// The frontier is where a leaf ends.
    at_border: bool,
    /// The leaf that the frontier is in, and the buckets of the nodes on the path to it.
    leaf: Option<Pointer>,
    path: Vec<u64>,
    /// Buckets of the nodes that the walk has reached.
    seen: BTreeSet<u64>,
    /// What was found alive before the frontier.
    found: TreeStats,
    /// Progress in percent.
    walked: u64,
    /// The usage of every bucket is known.
    is_complete: bool,
    /// The set was served before that.
    was_behind: bool,
    /// The walk is stuck for now.
    trouble: Backoff,
}

impl WalkFrontier {
    /// Creates the frontier of a set that has been walked, or had nothing to walk.
    #[must_use]
    pub fn at_end() -> Self {
        Self { is_complete: true, was_behind: false, walked: 100, at: Position::MAX, ..Self::at_start() }
    }

    /// Creates the frontier of a set that has not been walked.
    #[must_use]
    pub const fn at_start() -> Self {
        Self {
            at: Position::ZERO,
            at_border: true,
            leaf: None,
            path: Vec::new(),
            seen: BTreeSet::new(),
            found: TreeStats { nodes: 0, leaves: 0, key_bytes: 0, keys: 0, key_sectors: 0 },
            walked: 0,
            is_complete: false,
            was_behind: true,
            trouble: Backoff::NONE,
        }
    }

    /// Returns true if the usage of every bucket is known, and the whole tree has been counted.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Returns where the counted part ends.
    #[must_use]
    pub const fn at(&self) -> Position {
        self.at
    }

    /// Returns whether the walk has passed the whole tree of volume `inode`.
    #[must_use]
    pub fn has_passed(&self, inode: Inode) -> bool {
        self.is_complete || self.at.inode > inode
    }

    /// Returns how much of the tree has been walked, in percent; 100 means that the walk is
    /// complete.
    #[must_use]
    pub const fn percent(&self) -> u64 {
        self.walked
    }

    /// Returns where the next keys to be counted are; the start of the tree when all have been.
    #[must_use]
    pub fn next(&self) -> Position {
        if self.is_complete { Position::ZERO } else { self.at }
    }

    /// Returns how many sectors of `key` are counted.
    #[must_use]
    pub fn counted(&self, key: &Key) -> u32 {
        if self.is_complete || key.inode < self.at.inode {
            return u32::from(key.size);
        }
        if key.inode > self.at.inode {
            return 0;
        }
        let before = self.at.offset.clamp(key.start(), key.end) - key.start();
        u32::try_from(before).expect("no more than the key")
    }

    /// Completes the walk: it has reached the end and the usage of the buckets is known.
    pub fn complete(&mut self) -> TreeStats {
        let found = self.found;
        *self = Self { was_behind: true, ..Self::at_end() };
        found
    }

    /// Returns whether the set was served before it had been walked. Contradictory metadata may
    /// then be found late.
    #[must_use]
    pub const fn was_behind(&self) -> bool {
        self.was_behind
    }

    /// Records that the walk has found a node that cannot be read.
    pub fn meets(&mut self, error: Error) {
        self.trouble.meets(error);
    }

    /// Returns why the walk is stuck, after at least `tries_min` failed tries in a row.
    #[must_use]
    pub fn trouble(&self, tries_min: u32) -> Option<Error> {
        self.trouble.error_after(tries_min)
    }
}

/// The outcome of a step of the walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WalkOutcome {
    /// There are more keys in the leaf.
    Leaf,
    /// The leaf has been counted.
    Border,
    /// All leaves have been counted.
    End,
}

impl State {
    /// Moves the frontier over the next keys, at most to the end of the leaf that it is in. An
    /// error means that the tree contradicts itself.
    pub(crate) fn count_piece(&mut self) -> Attempt<Result<WalkOutcome, Error>> {
        if self.frontier.at == Position::MAX {
            return Attempt::Done(Ok(WalkOutcome::End));
        }
        let slot = match self.descend(self.frontier.at, 0) {
            Ok(slot) => slot,
            Err(need) => return Attempt::Needs(need),
        };
        Attempt::Done(self.enter_leaf(slot).and_then(|()| self.count_keys(slot)))
    }

    /// Records a leaf, and the nodes above it, before its keys are counted. All of them are in
    /// memory.
    fn enter_leaf(&mut self, slot: usize) -> Result<(), Error> {
        let pointer = self.nodes.get(slot).node().pointer();
        if self.frontier.leaf == Some(pointer) {
            return Ok(());
        }
        let leaf = self.enter_path()?;
        if self.frontier.at_border {
            let checked = self.nodes.get(slot).node().check_extents(self.frontier.at);
            checked.map_err(|source| load::damaged(leaf, source))?;
        }
        self.frontier.leaf = Some(pointer);
        self.frontier.found.leaves += 1;
        Ok(())
    }

    /// Records the nodes on the path to the frontier, down to the leaf or to a node that cannot be
    /// read. Returns the last one.
    fn enter_path(&mut self) -> Result<NodeRef, Error> {
        let (mut child, mut path) = (self.root, Vec::new());
        let (mut share, mut walked) = (WHOLE, 0);
        loop {
            path.push(self.enter_node(child)?);
            let Some(slot) = self.nodes.find(child.pointer()).filter(|_| child.level > 0) else { break };
            let node = self.nodes.get(slot).node();
            let (count, before) = (node.len() as u64, node.children_before(self.frontier.at) as u64);
            let key =
                *node.child_for(self.frontier.at).expect("the children of a checked node reach its end");
            (share, walked) = (share / count.max(1), walked + share / count.max(1) * before);
            child = NodeRef { key, level: child.level - 1 };
        }
        self.frontier.path = path;
        self.frontier.walked = u64::try_from(u128::from(walked) * 100 / u128::from(WHOLE)).unwrap_or(100);
        Ok(child)
    }

    /// Moves the frontier past `node`, which the walk cannot read. An error means that its bucket
    /// is used for something else.
    pub(crate) fn pass_by(&mut self, node: NodeRef) -> Result<(), Error> {
        self.enter_path()?;
        self.frontier.trouble = Backoff::NONE;
        self.frontier.leaf = None;
        (self.frontier.at, self.frontier.at_border) = (node.key.position(), true);
        Ok(())
    }

    /// Records that the walk has reached a node, for the first time or on its way to another leaf.
    /// Returns its bucket.
    fn enter_node(&mut self, child: NodeRef) -> Result<u64, Error> {
        let Some(id) = self.buckets.of(child.pointer()) else {
            return Err(Error::Inconsistent("a btree node lies outside the usable buckets"));
        };
        if self.frontier.path.contains(&id.index) {
            return Ok(id.index);
        }
        if !self.frontier.seen.insert(id.index) {
            return Err(Error::Inconsistent("a btree node is reachable twice"));
        }
        let bucket = self.buckets.get(id);
        match bucket.usage {
            BucketUsage::Unknown if bucket.live == 0 && bucket.pins == 0 => {
                self.buckets.set_usage(id, BucketUsage::Meta);
            }
            // It was made since the start.
            BucketUsage::Meta => {}
            _ => return Err(Error::Inconsistent("a bucket is used both for metadata and for data")),
        }
        self.frontier.found.nodes += 1;
        Ok(id.index)
    }

    /// Raises a bucket's generation to that of an interior node's pointer. Only buckets of unknown
    /// usage are raised: one that was allocated since the start has a newer generation than any
    /// node names.
    pub(crate) fn learn_generation(&mut self, pointer: Pointer) -> Result<(), Error> {
        let Some(id) = self.buckets.of(pointer) else { return Ok(()) };
        let bucket = self.buckets.get(id);
        if pointer.generation().after(bucket.generation) == 0 {
            return Ok(());
        }
        if bucket.usage != BucketUsage::Unknown {
            return Err(Error::Inconsistent("a node names a generation that its bucket has not had"));
        }
        walk::raise(&mut self.buckets, pointer)
    }

    /// Marks the bucket of the node in `slot` as metadata, wherever the frontier is. The node will
    /// soon leave the tree, but its bucket stays a node's until it is freed.
    pub(crate) fn claim_bucket(&mut self, slot: usize) {
        let pointer = self.nodes.get(slot).node().pointer();
        let id = self.buckets.of(pointer).expect("a node lies in a bucket");
        if self.buckets.get(id).usage == BucketUsage::Unknown {
            self.buckets.set_usage(id, BucketUsage::Meta);
        }
    }

    fn count_keys(&mut self, slot: usize) -> Result<WalkOutcome, Error> {
        let Self { nodes, buckets, dirty, frontier, work, .. } = self;
        let node = nodes.get(slot).node();
        let (keys, next) = node.piece(frontier.at, PIECE_KEYS);
        let mut count = 0;
        for key in keys {
            count += 1;
            let more = u32::from(key.size) - frontier.counted(key);
            if !count_key(buckets, key, more)? {
                continue;
            }
            frontier.found.count(key);
            if key.dirty {
                dirty.add(key.inode, u64::from(more));
            }
        }
        work.visit(count);
        let end = node.position();
        frontier.trouble = Backoff::NONE;
        frontier.at = next.unwrap_or(end);
        frontier.at_border = next.is_none();
        Ok(match next {
            Some(_) => WalkOutcome::Leaf,
            None if end == Position::MAX => WalkOutcome::End,
            None => WalkOutcome::Border,
        })
    }

    /// Returns the next leaves that the walk will reach, at most `count`, all below one node; none
    /// if the next one is in memory.
    pub(crate) fn leaves_ahead(&mut self, count: usize) -> Result<Vec<NodeRef>, Need> {
        if self.root.level == 0 {
            return Ok(Vec::new());
        }
        let at = self.frontier.at;
        let slot = self.descend(at, 1)?;
        let node = self.nodes.get(slot).node();
        let ahead = node.children_from(at).take(count).map(|key| NodeRef { key: *key, level: 0 });
        let ahead: Vec<NodeRef> = ahead.collect();
        let is_next_here = ahead.first().is_some_and(|next| self.nodes.find(next.pointer()).is_some());
        Ok(if is_next_here { Vec::new() } else { ahead })
    }
}

/// Counts `more` sectors of a key to its buckets. Returns false if none of its pointers is live.
fn count_key(buckets: &mut Buckets, key: &Key, more: u32) -> Result<bool, Error> {
    let mut is_live = false;
    for pointer in key.pointers.as_slice() {
        let Some(id) = buckets.of(*pointer) else { continue };
        if pointer.generation().after(buckets.get(id).generation) > 0 {
            return Err(Error::Inconsistent("a key is newer than its bucket"));
        }
        buckets.note_oldest(id, pointer.generation());
        if buckets.is_stale(*pointer) {
            continue;
        }
        if !matches!(buckets.get(id).usage, BucketUsage::Unknown | BucketUsage::Open | BucketUsage::Data) {
            return Err(Error::Inconsistent("a key points into a bucket that holds no data"));
        }
        if !buckets.add(*pointer, more, key.dirty) {
            return Err(Error::Inconsistent("two extents share sectors of a cache bucket"));
        }
        is_live = true;
    }
    Ok(is_live)
}
