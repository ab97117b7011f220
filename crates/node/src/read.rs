//! Bytes to node: check every set, then merge them (format 6.3, 7.1 and 8).
//!
//! n keys in s sets take n log s steps. All keys of size above zero take part in the merge, holes and stale ones
//! included: filtering them before would bring back what they hide.

use alloc::vec::Vec;

use bcached_format::bset::BsetPlace;
use bcached_format::key_check::{check_child_key, check_leaf_key};
use bcached_format::node_log::NodeSet;
use bcached_format::units::bytes_of;
use bcached_format::{Geometry, Key, KeyError, KeyListError, NodeLog, Position};

use crate::error::{NodeError, NodeFault};
use crate::extents::{is_hole, overlay, push_merged};
use crate::node::{Node, blocks_of, pointer_of};
use crate::sorted_keys::SortedKeys;

impl Node {
    /// The node that `own` points to, from its bytes. Nothing in it is known to be alive yet: see [`Node::freed`]
    /// and [`Node::drop_dead`] for an interior node; in a leaf the caller looks at the pointers' generations.
    ///
    /// # Errors
    /// [`NodeFault::Log`] for damaged sets, [`NodeFault::Key`], [`NodeFault::BeyondRange`] or
    /// [`NodeFault::TooManyPieces`] for keys that make no sense here.
    ///
    /// # Panics
    /// If `own` is not a checked key of a node, or `bytes` are not as long as it says.
    pub fn read(own: Key, level: u8, geometry: &Geometry, bytes: &[u8]) -> Result<Self, NodeError> {
        assert_eq!(bytes.len() as u64, bytes_of(own.sectors()), "a node is read whole");
        let pointer = pointer_of(&own);
        let reader = Reader { own: &own, level, geometry };
        reader.read(bytes).map_err(|fault| NodeError { pointer, level, fault })
    }

    /// Checks that no extent of a leaf begins before `lo`, where its range does. (A kernel does not look.)
    ///
    /// # Errors
    /// [`NodeFault::BeforeRange`].
    pub fn check_extents(&self, lo: Position) -> Result<(), NodeError> {
        assert!(self.is_leaf(), "extents live in leaves");
        let first = self.keys().next().map(Key::start_position);
        match first.filter(|start| *start < lo) {
            Some(found) => Err(self.error(NodeFault::BeforeRange { limit: lo, found })),
            None => Ok(()),
        }
    }
}

/// What the keys of a node are checked against.
struct Reader<'a> {
    own: &'a Key,
    level: u8,
    geometry: &'a Geometry,
}

impl Reader<'_> {
    fn read(&self, bytes: &[u8]) -> Result<Node, NodeFault> {
        let place = BsetPlace { magic: self.geometry.magic, node: pointer_of(self.own) };
        let log = NodeLog::parse(bytes, self.geometry.block_bytes(), place)?;
        let sets = log.sets.iter().map(|set| self.keys(set)).collect::<Result<Vec<_>, _>>()?;
        let mut node = Node::create(*self.own, self.level, log.seq(), self.geometry);
        assert!(log.end_block <= blocks_of(self.geometry, self.own.size), "the log ends inside the node");
        node.written_blocks = log.end_block;
        node.words_on_disk = log.sets.iter().map(|set| set.bset.keys.words()).sum();
        if node.is_leaf() {
            node.view = self.extents(sets);
        } else {
            let merged = merge(sets, interleave);
            let is_freeing = |key: &&Key| key.position() == Position::ZERO;
            let freeing = merged.iter().filter(is_freeing);
            node.freed = freeing.flat_map(|key| key.pointers.as_slice()).copied().collect();
            node.view = SortedKeys::from_sorted(merged.iter().filter(|key| !is_freeing(key)).copied());
        }
        let (limit, found) = (2 * node.words_on_disk, node.view.words());
        if found > limit {
            return Err(NodeFault::TooManyPieces { limit, found });
        }
        Ok(node)
    }

    /// The keys of one set that mean something, each checked for itself and against the one before.
    fn keys(&self, set: &NodeSet<'_>) -> Result<Vec<Key>, NodeFault> {
        let (block, mut word) = (set.block, 0);
        let mut keys: Vec<Key> = Vec::new();
        for (index, key) in set.bset.keys.iter().enumerate() {
            let fault = |error| NodeFault::Key { block, error: KeyListError { index, word, error } };
            let start = self.check(&key).map_err(fault)?;
            if key.size > 0 {
                let previous = keys.last().map_or(Position::ZERO, Key::position);
                if start < previous {
                    return Err(fault(KeyError::OutOfOrder { previous, start }));
                }
                let (limit, found) = (self.own.position(), key.position());
                if found > limit {
                    return Err(NodeFault::BeyondRange { block, limit, found });
                }
                keys.push(key);
            }
            word += key.words();
        }
        Ok(keys)
    }

    /// Checks one key and says where it begins, which the key before it must not reach beyond.
    fn check(&self, key: &Key) -> Result<Position, KeyError> {
        if self.level > 0 {
            check_child_key(self.geometry, key)?;
            return Ok(key.position());
        }
        check_leaf_key(self.geometry, key)?;
        Ok(key.start_position())
    }

    /// What the sets of a leaf together say.
    fn extents(&self, sets: Vec<Vec<Key>>) -> SortedKeys {
        let merged = merge(sets, overlay);
        let mut living = Vec::with_capacity(merged.len());
        for key in merged {
            if !is_hole(&key) {
                push_merged(&mut living, key, self.geometry.bucket_sectors);
            }
        }
        SortedKeys::from_sorted(living)
    }
}

/// All sets as one, by `pair` (older, newer).
///
/// Of a run of finished merges, oldest first, each is more than twice as long as the next: so a key goes through a
/// number of merges that is logarithmic in the number of sets, and the large first set of a node only through one.
fn merge(sets: Vec<Vec<Key>>, pair: fn(Vec<Key>, Vec<Key>) -> Vec<Key>) -> Vec<Key> {
    let mut merged: Vec<Vec<Key>> = Vec::new();
    for mut newest in sets {
        while let Some(older) = merged.pop_if(|older| older.len() <= 2 * newest.len()) {
            newest = pair(older, newest);
        }
        merged.push(newest);
    }
    let newest = merged.pop().unwrap_or_default();
    merged.into_iter().rev().fold(newest, |newer, older| pair(older, newer))
}

/// The keys of two interior sets in position order, newer before older where they stand at one position.
fn interleave(older: Vec<Key>, newer: Vec<Key>) -> Vec<Key> {
    let mut out = Vec::with_capacity(older.len() + newer.len());
    let mut older = older.into_iter().peekable();
    for new in newer {
        while let Some(old) = older.next_if(|old| old.position() < new.position()) {
            out.push(old);
        }
        out.push(new);
    }
    out.extend(older);
    out
}
