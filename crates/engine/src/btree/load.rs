//! Loads a node into memory within the budget and verifies it. All tasks that wait for the same
//! node share one read.

use crate::btree::cache::{MemoryReservation, NodeLookup, NodePin};
use crate::btree::{NodeRef, write};
use crate::cpu_cost::{READ_STEP_KEYS, READ_STEP_NS, VISIT_MAX, find_ns};
use crate::error::{Error, ErrorContext};
use crate::set::CacheSet;
use crate::state::State;
use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use bcached_env::{Buffer, Disk, Env, join_all};
use bcached_format::{Geometry, Pointer, Position};
use bcached_node::{Node, NodeReader};

/// Most leaves that are read together.
const TOGETHER_MAX: usize = 16;
/// Read-ahead may use one ticket in this many.
const TICKET_SHARE: usize = 4;

/// Reads leaves together that a caller is about to visit. `choose` selects them, at most as many as
/// it is told, and also returns a result for the caller. An error is ignored here; the caller sees
/// it again when it visits the leaf.
pub async fn together<T>(set: &CacheSet, choose: impl FnOnce(&mut State, usize) -> (Vec<NodeRef>, T)) -> T {
    let most = (set.inner.shares.get().tickets / TICKET_SHARE).clamp(1, TOGETHER_MAX);
    let (leaves, other) = set.with(|s| choose(s, most));
    if !leaves.is_empty() {
        let _tickets = set.inner.tickets.acquire(leaves.len()).await;
        drop(join_all(leaves.into_iter().map(|leaf| load(set, leaf))).await);
    }
    other
}

/// Loads the node of `child` and pins it. This also works in a set that has failed, as long as no
/// memory need be freed.
pub async fn load(set: &CacheSet, child: NodeRef) -> Result<NodePin, Error> {
    let pointer = child.pointer();
    let reserved = loop {
        let found = set.with(|s| match s.frozen.error_of(pointer) {
            Some(error) => Err(error),
            None => Ok(s.nodes.request(pointer)),
        });
        match found? {
            NodeLookup::Here(pin) => return Ok(pin),
            NodeLookup::Load(reserved) => break reserved,
            NodeLookup::Loading => set.signals().node_memory.wait().await,
            NodeLookup::Full => {
                set.check_alive()?;
                write::relieve(set);
                set.signals().node_memory.wait().await;
            }
        }
    };
    match read(set, child).await {
        Ok(node) => Ok(set.with(|s| {
            s.unreadable.forget(pointer);
            s.nodes.loaded(node, pointer, reserved)
        })),
        Err(error) => {
            set.with(|s| {
                s.nodes.abandon(pointer);
                // A node that was replaced before its read completed is no loss.
                if !s.buckets.is_stale(pointer) {
                    s.meets_unreadable(child, &error);
                }
            });
            Err(error)
        }
    }
}

/// Reads and verifies a node, without entering it in the cache.
pub async fn read(set: &CacheSet, child: NodeRef) -> Result<Node, Error> {
    let geometry = set.with(|s| s.geometry);
    if child.key.sectors() > set.inner.shares.get().node_sectors {
        return Err(Error::Inconsistent("a btree node is larger than the node size of its set"));
    }
    let begun = set.env().now();
    let mut node = read_from((set.env(), set.cache()), child, &geometry, durable_blocks(set, child)).await?;
    set.with(|s| {
        s.stats.node_reads.add(begun, s.now);
        s.buckets.node_found(child.pointer(), node.written_blocks());
    });
    if !node.is_leaf() {
        learn(set, &node).await?;
        // A dead pointer stays dead, and the node does not change while it is being read.
        let named: Vec<Pointer> = node.children().flat_map(|key| key.pointers.as_slice()).copied().collect();
        let mut dead = BTreeSet::new();
        for named in named.chunks(VISIT_MAX) {
            set.env().breathe().await;
            set.with(|s| {
                s.work.visit(named.len());
                let stale = named.iter().filter(|pointer| s.buckets.is_stale(**pointer));
                dead.extend(stale.map(|pointer| pointer.word()));
            });
        }
        set.env().breathe().await;
        set.with(|s| s.work.copy(node.len()));
        node.drop_dead(&mut |pointer| dead.contains(&pointer.word()));
        node.check_children(Position::ZERO).map_err(|source| damaged(child, source))?;
    }
    Ok(node)
}

/// Learns generations from an interior node in a set that has not been walked. A walk at the start
/// would have learned them before any other task read the node.
async fn learn(set: &CacheSet, node: &Node) -> Result<(), Error> {
    if set.with(|s| s.frontier.is_complete()) {
        return Ok(());
    }
    let named: Vec<Pointer> = node.freed().chain(node.named()).collect();
    for named in named.chunks(VISIT_MAX) {
        set.env().breathe().await;
        set.with(|s| {
            s.work.visit(named.len());
            named.iter().try_for_each(|pointer| s.learn_generation(*pointer))
        })?;
    }
    for named in named.chunks(VISIT_MAX) {
        set.env().breathe().await;
        set.with(|s| {
            s.work.visit(named.len());
            for pointer in named {
                if let Some(id) = s.buckets.of(*pointer) {
                    s.buckets.note_oldest(id, pointer.generation());
                }
            }
        });
    }
    Ok(())
}

/// Returns a lower bound of how many blocks of a node are durable.
pub fn durable_blocks(set: &CacheSet, child: NodeRef) -> u32 {
    set.with(|s| s.buckets.durable_blocks(child.pointer()))
}

/// Reads a node and checks its bsets, of which `durable` blocks are known to be durable. Dead
/// children are still in it. Other tasks run between the steps.
pub async fn read_from(
    (env, disk): (&Env, &Disk),
    child: NodeRef,
    geometry: &Geometry,
    durable: u32,
) -> Result<Node, Error> {
    let bytes = usize::try_from(child.key.sectors() * 512).expect("a node is small");
    let (result, buffer) = disk.read(child.pointer().sector(), Buffer::zeroed(bytes)).await;
    result.map_err(Error::io(ErrorContext::Node))?;
    let reader = NodeReader::new(child.key, child.level, geometry, buffer.as_slice());
    let mut reader = reader.map_err(|source| damaged(child, source))?;
    loop {
        env.breathe().await;
        let (handled, found) = (reader.handled(), reader.found());
        let node = reader.step(READ_STEP_KEYS).map_err(|source| damaged(child, source))?;
        env.charge(READ_STEP_NS * (reader.handled() - handled) as u64 + find_ns(reader.found() - found));
        if let Some(node) = node {
            // A shorter node has lost a bset that was durable: invariant D5.
            node.check_length(durable).map_err(|source| damaged(child, source))?;
            return Ok(node);
        }
    }
}

/// Returns the error for a node whose bytes make no sense.
pub fn damaged(child: NodeRef, source: bcached_node::NodeError) -> Error {
    Error::Node { sector: child.pointer().sector(), source: Box::new(source) }
}

/// Waits until `bytes` bytes are available, and reserves them. The caller holds a ticket for them.
pub async fn set_aside(set: &CacheSet, bytes: usize) -> Result<MemoryReservation, Error> {
    loop {
        set.check_alive()?;
        if let Some(reserved) = set.with(|s| s.nodes.reserve(bytes)) {
            return Ok(reserved);
        }
        write::relieve(set);
        set.signals().node_memory.wait().await;
    }
}
