//! Walks the whole tree at start-up. It verifies every node, raises
//! generations, counts live and dirty sectors, and finds the metadata buckets. Parents are visited
//! before children; several nodes are read at a time. The walk leaves nothing in the node cache.

use crate::btree::frozen_ranges::FrozenRanges;
use crate::btree::unreadable::FailedNode;
use crate::btree::{NodeRef, load};
use crate::cpu_cost::{COUNT_NS, VISIT_MAX, visit_ns};
use crate::error::Error;
use crate::gc::pass::TreeStats;
use crate::open_progress::{OpenProgress, WHOLE};
use crate::space::Buckets;
use crate::state::DirtyCounts;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use bcached_env::{Disk, Env, join_all};
use bcached_format::{Geometry, Key, Pointer, Position};
use bcached_node::Node;

/// Most nodes read at once.
const DEPTH_MAX: usize = 16;

/// What the walk found.
#[derive(Default)]
pub struct WalkResult {
    /// Buckets that hold nodes.
    pub nodes: BTreeSet<u64>,
    /// Dirty sectors of each volume.
    pub dirty: DirtyCounts,
    /// Size of the largest node, in sectors.
    pub node_sectors_max: u64,
    /// Live nodes and keys.
    pub alive: TreeStats,
    /// Damaged nodes: what they name is unknown.
    pub damaged: FrozenRanges,
}

struct Walk<'a> {
    env: &'a Env,
    disk: &'a Disk,
    geometry: &'a Geometry,
    buckets: &'a mut Buckets,
    depth: usize,
    findings: WalkResult,
    opening: &'a OpenProgress,
}

/// A node to visit, with the lower bound of its range.
#[derive(Clone, Copy)]
struct Visit {
    child: NodeRef,
    low: Position,
    /// Its share of the tree; see [`OpenProgress`].
    share: u64,
}

/// Walks from `root`, and sets generations and counts in `buckets`. `nodes` is the number of nodes
/// for which there is memory. `opening` tracks what has been read.
pub async fn walk(
    (env, disk): (&Env, &Disk),
    geometry: &Geometry,
    root: NodeRef,
    buckets: &mut Buckets,
    nodes: usize,
    opening: &OpenProgress,
) -> Result<WalkResult, Error> {
    let depth = nodes.clamp(1, DEPTH_MAX);
    let mut walk = Walk { env, disk, geometry, buckets, depth, findings: WalkResult::default(), opening };
    let mut stack = alloc::vec![Visit { child: root, low: Position::ZERO, share: WHOLE }];
    while !stack.is_empty() {
        // Depth first, so that the stack holds at most the children of one path; as many as can be
        // read at once.
        let batch: Vec<Visit> = stack.split_off(stack.len().saturating_sub(walk.depth));
        for visit in &batch {
            walk.enter(visit)?;
        }
        let read = |visit: &Visit| {
            let durable = walk.buckets.durable_blocks(visit.child.pointer());
            load::read_from((walk.env, walk.disk), visit.child, walk.geometry, durable)
        };
        let reads: Vec<_> = batch.iter().map(read).collect();
        for (visit, node) in batch.iter().zip(join_all(reads).await) {
            match node {
                Err(error @ Error::Node { .. }) if visit.child.level < root.level => {
                    walk.findings.damaged.add(FailedNode {
                        child: visit.child,
                        low: Some(visit.low),
                        error,
                    })?;
                }
                node => walk.visit(visit, node?, &mut stack).await?,
            }
        }
    }
    Ok(walk.findings)
}

impl Walk<'_> {
    fn enter(&mut self, visit: &Visit) -> Result<(), Error> {
        let pointer = visit.child.pointer();
        let Some(bucket) = self.buckets.of(pointer) else {
            return Err(Error::Inconsistent("a btree node lies outside the usable buckets"));
        };
        if !self.findings.nodes.insert(bucket.index) {
            return Err(Error::Inconsistent("a btree node is reachable twice"));
        }
        let sectors = visit.child.key.sectors();
        self.findings.node_sectors_max = self.findings.node_sectors_max.max(sectors);
        self.findings.alive.nodes += 1;
        Ok(())
    }

    async fn visit(&mut self, visit: &Visit, mut node: Node, stack: &mut Vec<Visit>) -> Result<(), Error> {
        let sector = visit.child.pointer().sector();
        let damaged = |source| Error::Node { sector, source: alloc::boxed::Box::new(source) };
        self.buckets.node_found(visit.child.pointer(), node.written_blocks());
        if node.is_leaf() {
            node.check_extents(visit.low).map_err(damaged)?;
            for (number, key) in node.keys().enumerate() {
                if number % VISIT_MAX == 0 {
                    self.env.breathe().await;
                    self.env.charge(COUNT_NS * VISIT_MAX.min(node.len() - number) as u64);
                }
                self.count(key)?;
            }
            self.findings.alive.leaves += 1;
            self.opening.node_read(visit.share);
            return Ok(());
        }
        for pointer in node.freed() {
            self.raise(pointer)?;
        }
        let named: Vec<Pointer> = node.named().collect();
        for pointers in named.chunks(VISIT_MAX) {
            pause(self.env, pointers.len()).await;
            for pointer in pointers {
                self.raise(*pointer)?;
            }
        }
        let mut dead = BTreeSet::new();
        for pointers in named.chunks(VISIT_MAX) {
            pause(self.env, pointers.len()).await;
            for pointer in pointers {
                if let Some(bucket) = self.buckets.of(*pointer) {
                    self.buckets.note_oldest(bucket, pointer.generation());
                }
                if self.buckets.is_stale(*pointer) {
                    dead.insert(pointer.word());
                }
            }
        }
        self.env.breathe().await;
        node.drop_dead(&mut |pointer| dead.contains(&pointer.word()));
        node.check_children(visit.low).map_err(damaged)?;
        let mut low = visit.low;
        let mut children: Vec<Visit> = Vec::new();
        for key in node.children() {
            let child = NodeRef { key: *key, level: visit.child.level - 1 };
            children.push(Visit { child, low, share: 0 });
            low = key.position();
        }
        self.opening.node_read(divide(visit.share, &mut children));
        children.reverse();
        stack.append(&mut children);
        Ok(())
    }

    fn raise(&mut self, pointer: Pointer) -> Result<(), Error> {
        raise(self.buckets, pointer)
    }

    fn count(&mut self, key: &Key) -> Result<(), Error> {
        let mut is_live = false;
        for pointer in key.pointers.as_slice() {
            let Some(bucket) = self.buckets.of(*pointer) else { continue };
            self.raise(*pointer)?;
            let distance = self.buckets.get(bucket).generation.after(pointer.generation());
            self.buckets.note_oldest(bucket, pointer.generation());
            if distance > 0 {
                continue;
            }
            // Nodes that are sound by themselves may contradict each other: invariant D40.
            if !self.buckets.add(*pointer, u32::from(key.size), key.dirty) {
                return Err(Error::Inconsistent("two extents share sectors of a cache bucket"));
            }
            is_live = true;
        }
        if is_live {
            self.findings.alive.count(key);
        }
        if key.dirty && is_live {
            self.findings.dirty.add(key.inode, key.sectors());
        }
        Ok(())
    }
}

/// Divides `share` evenly among `children`; returns the remainder.
fn divide(share: u64, children: &mut [Visit]) -> u64 {
    let Some(each) = share.checked_div(children.len() as u64) else { return share };
    for child in &mut *children {
        child.share = each;
    }
    share - each * children.len() as u64
}

/// Yields to other tasks, if that is due, before this many keys and their buckets are visited.
pub async fn pause(env: &Env, keys: usize) {
    env.breathe().await;
    env.charge(visit_ns(keys));
}

/// Raises a bucket's generation to that of a pointer.
///
/// # Errors
/// [`Error::Inconsistent`] if the bucket has dirty data of the older generation.
pub fn raise(buckets: &mut Buckets, pointer: Pointer) -> Result<(), Error> {
    if buckets.raise(pointer) {
        return Err(Error::Inconsistent("dirty data lies in a bucket that was reused"));
    }
    Ok(())
}
