//! Walks the B-tree as a start does: parents before children. Every pointer that is ahead of its
//! bucket raises the bucket's generation. That is how a freeing key makes the child it frees stale.

use crate::buckets::{Buckets, STALE_MAX};
use crate::damage::{BucketUse, DamageKind, Location, NodeLocation};
use crate::extents::ExtentMap;
use crate::findings::Findings;
use crate::image::ReadAt;
use bcached_format::key_check::{check_child_key, check_child_order, check_leaf_key, check_leaf_order};
use bcached_format::node_log::NodeSet;
use bcached_format::{Bset, Geometry, Key, KeyError, NodeIdentity, NodeLog, Pointer, Position};

/// A node that a parent, or the journal, points to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NodeRef {
    pub pointer: Pointer,
    pub sectors: u16,
    pub level: u16,
    /// End of the left neighbour.
    pub low: Position,
    /// Position of the node: the end of its range.
    pub high: Position,
}

/// The result of a walk.
#[derive(Debug, Default)]
pub(crate) struct TreeWalk {
    /// Leaves in order of position.
    pub leaves: Vec<NodeRef>,
    /// Number of interior nodes.
    pub interior: u64,
    /// Number of sets in all nodes.
    pub sets: u64,
    /// Largest number of sets in one node.
    pub sets_max: usize,
    /// Nodes that could not be read: nothing is known about their range of the key space.
    pub lost: Vec<NodeRef>,
}

impl NodeRef {
    /// Returns the node that `key` names. The key must have been checked to name one.
    pub fn new(key: &Key, level: u16, low: Position) -> Option<Self> {
        let pointer = *key.pointers.as_slice().first()?;
        Some(Self { pointer, sectors: key.size, level, low, high: key.position() })
    }

    pub fn place(&self) -> Location {
        Location::node(NodeLocation {
            level: self.level,
            sector: self.pointer.sector(),
            low: self.low,
            high: self.high,
        })
    }

    /// Reads the node, as many bytes as its key says.
    fn read(&self, image: &dyn ReadAt, findings: &mut Findings) -> Option<Vec<u8>> {
        let bytes = usize::from(self.sectors) * 512;
        crate::read_or_report(image, self.place(), self.pointer.sector(), bytes, findings)
    }

    /// Returns whether a leaf key's extent belongs to this node.
    fn covers(&self, key: &Key) -> bool {
        key.start_position() >= self.low && key.position() <= self.high
    }

    /// Returns whether a child's position belongs to this node.
    fn covers_child(&self, position: Position) -> bool {
        position > self.low && position <= self.high
    }
}

/// Walks the tree below `root`, and passes every readable node to `visit`.
pub(crate) fn walk(
    image: &dyn ReadAt,
    geometry: &Geometry,
    root: NodeRef,
    buckets: &mut Buckets,
    findings: &mut Findings,
    visit: &mut dyn FnMut(&NodeRef, &NodeLog<'_>),
) -> TreeWalk {
    let mut tree = TreeWalk::default();
    let mut open = vec![root];
    while let Some(node) = open.pop() {
        // A bucket that is already in use would be walked forever, or twice.
        if !buckets.claim(node.pointer.sector(), BucketUse::Node, node.place(), findings) {
            tree.lost.push(node);
            continue;
        }
        let Some(bytes) = node.read(image, findings) else {
            tree.lost.push(node);
            continue;
        };
        let place = NodeIdentity { magic: geometry.magic, node: node.pointer };
        let log = match NodeLog::parse(&bytes, geometry.block_bytes(), place) {
            Ok(log) => log,
            Err(error) => {
                findings.error(node.place(), DamageKind::Node(error));
                tree.lost.push(node);
                continue;
            }
        };
        let (wanted, found) = (buckets.durable_blocks(node.pointer), log.end_block);
        if found < wanted {
            findings.error(node.place(), DamageKind::NodeShorter { wanted, found });
            tree.lost.push(node);
            continue;
        }
        visit(&node, &log);
        if last_set_is_cut_off(&bytes, geometry, place, &log) {
            findings.error(node.place(), DamageKind::NodeSetLost { block: log.end_block });
        }
        tree.sets += log.sets.len() as u64;
        tree.sets_max = tree.sets_max.max(log.sets.len());
        if node.level == 0 {
            check_leaf(geometry, &node, &log, buckets, findings);
            tree.leaves.push(node);
        } else {
            tree.interior += 1;
            let children = check_interior(geometry, &node, &log, buckets, findings);
            open.extend(children.into_iter().rev());
        }
    }
    tree
}

/// Returns whether the header after the log's end is a set of this node in which only the sequence
/// number is damaged. Its checksum is right with the node's number and the node's pointer, which is
/// impossible for remains of another use of the bucket.
fn last_set_is_cut_off(bytes: &[u8], geometry: &Geometry, place: NodeIdentity, log: &NodeLog<'_>) -> bool {
    let Some(rest) = bytes.get(log.end_block as usize * geometry.block_bytes()..) else { return false };
    let mut mended = rest.to_vec();
    let Some(seq) = mended.get_mut(16..24) else { return false };
    seq.copy_from_slice(&log.seq().to_le_bytes());
    Bset::parse(&mended, place).is_ok_and(|set| set.version > 0)
}

/// Returns the combined content of the sets of a leaf. Reads the leaf again, so that a walk need
/// not keep its content.
pub(crate) fn leaf_content(
    image: &dyn ReadAt,
    geometry: &Geometry,
    leaf: &NodeRef,
    findings: &mut Findings,
) -> ExtentMap {
    let Some(bytes) = leaf.read(image, findings) else { return ExtentMap::default() };
    let place = NodeIdentity { magic: geometry.magic, node: leaf.pointer };
    NodeLog::parse(&bytes, geometry.block_bytes(), place)
        .map_or_else(|_| ExtentMap::default(), |log| merged(geometry, leaf, &log))
}

/// Lays newer sets over older ones. Keys that make no sense are left out; they have been reported.
fn merged(geometry: &Geometry, leaf: &NodeRef, log: &NodeLog<'_>) -> ExtentMap {
    let mut content = ExtentMap::default();
    for key in log.sets.iter().flat_map(|set| set.bset.keys.iter()) {
        if key.size > 0 && check_leaf_key(geometry, &key).is_ok() && leaf.covers(&key) {
            content.insert(key);
        }
    }
    content
}

fn check_leaf(
    geometry: &Geometry,
    leaf: &NodeRef,
    log: &NodeLog<'_>,
    buckets: &mut Buckets,
    findings: &mut Findings,
) {
    for NodeSet { block, bset } in &log.sets {
        let block = *block;
        if let Err(error) = check_leaf_order(bset.keys.iter()) {
            findings.error(leaf.place(), DamageKind::KeyOrder { block, error });
        }
        for key in bset.keys.iter().filter(|key| key.size > 0) {
            if let Err(error) = check_leaf_key(geometry, &key) {
                findings.error(leaf.place(), DamageKind::Key { block, key, error });
            } else if !leaf.covers(&key) {
                findings.error(leaf.place(), DamageKind::KeyOutsideNode { block, key });
            }
        }
    }
    for key in merged(geometry, leaf, log).iter() {
        buckets.raise(key);
    }
}

/// Checks an interior node, and returns its living children in order.
fn check_interior(
    geometry: &Geometry,
    node: &NodeRef,
    log: &NodeLog<'_>,
    buckets: &mut Buckets,
    findings: &mut Findings,
) -> Vec<NodeRef> {
    let mut keys = Vec::new();
    for NodeSet { block, bset } in &log.sets {
        let block = *block;
        if let Err(error) = check_child_order(bset.keys.iter()) {
            findings.error(node.place(), DamageKind::KeyOrder { block, error });
        }
        for key in &bset.keys {
            if let Err(error) = check_child_key(geometry, &key) {
                findings.error(node.place(), DamageKind::Key { block, key, error });
            } else if key.position() != Position::ZERO && !node.covers_child(key.position()) {
                findings.error(node.place(), DamageKind::KeyOutsideNode { block, key });
            } else {
                keys.push(key);
            }
        }
    }
    // Raise all generations first: a freeing key may be in a newer set than the child that it
    // frees.
    for key in &keys {
        buckets.raise(key);
    }
    for key in &keys {
        let by = key.pointers.as_slice().iter().map(|pointer| buckets.stale_by(*pointer)).max().unwrap_or(0);
        if by > STALE_MAX {
            findings.error(node.place(), DamageKind::TooStale { key: *key, by });
        }
    }
    let mut living: Vec<Key> =
        keys.into_iter().filter(|key| key.position() != Position::ZERO && buckets.is_live(key)).collect();
    living.sort_by_key(Key::position);
    for pair in living.windows(2).filter(|pair| pair[0].position() == pair[1].position()) {
        findings.error(node.place(), DamageKind::TwoChildren { position: pair[0].position() });
    }
    let last = living.last().map(Key::position);
    if last != Some(node.high) {
        findings.error(node.place(), DamageKind::ChildrenEnd { found: last });
    }
    let mut low = node.low;
    let mut children = Vec::new();
    for key in &living {
        children.extend(NodeRef::new(key, node.level - 1, low));
        low = key.position();
    }
    children
}

/// Returns the root that the newest journal entry names; `None` if it names none.
pub(crate) fn root(
    geometry: &Geometry,
    key: &Key,
    level: u16,
    buckets: &mut Buckets,
    place: Location,
    findings: &mut Findings,
) -> Option<NodeRef> {
    if let Err(error) = check_child_key(geometry, key) {
        findings.error(place, DamageKind::BadRoot { key: *key, error });
        return None;
    }
    if key.position() != Position::MAX {
        findings.error(place, DamageKind::RootPosition { found: key.position() });
    }
    if !buckets.is_live(key) {
        findings.error(place, DamageKind::StaleMetadata { key: *key });
    }
    buckets.raise(key);
    let root = NodeRef::new(key, level, Position::ZERO);
    if root.is_none() {
        findings.error(place, DamageKind::BadRoot { key: *key, error: KeyError::NoPointer });
    }
    root
}
