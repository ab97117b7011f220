//! Brings a node in: once for all who wait, within the budget, verified.

use crate::btree::cache::{Found, Pin};
use crate::btree::{Child, write};
use crate::error::{Doing, Error};
use crate::set::CacheSet;
use alloc::boxed::Box;
use bcached_env::{Buffer, Disk};
use bcached_format::{Geometry, Position};
use bcached_node::Node;

/// The node of `child`, in memory and pinned. Works in a set that has failed too, as long as memory need not be made.
pub async fn load(set: &CacheSet, child: Child) -> Result<Pin, Error> {
    let pointer = child.pointer();
    loop {
        match set.with(|s| s.nodes.request(&child.key, pointer)) {
            Found::Here(pin) => return Ok(pin),
            Found::Load => break,
            Found::Loading => set.signals().node_memory.wait().await,
            Found::Full => {
                set.check_alive()?;
                set.with(|s| s.node_pressure = true);
                set.signals().leaf_work.notify_all();
                set.signals().node_memory.wait().await;
            }
        }
    }
    match read(set, child).await {
        Ok(node) => Ok(set.with(|s| s.nodes.loaded(node, pointer))),
        Err(error) => {
            set.with(|s| s.nodes.abandon(&child.key, pointer));
            Err(error)
        }
    }
}

/// Reads and verifies a node; it is not entered in the cache.
pub async fn read(set: &CacheSet, child: Child) -> Result<Node, Error> {
    let geometry = set.with(|s| s.geometry);
    let mut node = read_from(set.cache(), child, &geometry).await?;
    if !node.is_leaf() {
        set.with(|s| node.drop_dead(&mut |pointer| s.buckets.is_stale(pointer)));
        node.check_children(Position::ZERO).map_err(|source| damaged(child, source))?;
    }
    Ok(node)
}

/// Reads a node and checks its sets; dead children are still in it.
pub async fn read_from(disk: &Disk, child: Child, geometry: &Geometry) -> Result<Node, Error> {
    let bytes = usize::try_from(child.key.sectors() * 512).expect("a node is small");
    let (result, buffer) = disk.read(child.pointer().sector(), Buffer::zeroed(bytes)).await;
    result.map_err(Error::io(Doing::Node))?;
    Node::read(child.key, child.level, geometry, buffer.as_slice()).map_err(|source| damaged(child, source))
}

fn damaged(child: Child, source: bcached_node::NodeError) -> Error {
    Error::Node { sector: child.pointer().sector(), source: Box::new(source) }
}

/// Waits until there is memory for `count` new nodes of `sectors`, and sets it aside.
pub async fn set_aside(set: &CacheSet, sectors: u64, count: usize) -> Result<(), Error> {
    let mut taken = 0;
    while taken < count {
        set.check_alive()?;
        if set.with(|s| s.nodes.set_aside(sectors)) {
            taken += 1;
            continue;
        }
        write::relieve(set);
        set.signals().node_memory.wait().await;
    }
    Ok(())
}
