//! Bytes to node: check every set, then merge them (format 6.3, 7.1 and 8).
//!
//! n keys in s sets take n log s steps. All keys of size above zero take part in the merge, holes and stale ones
//! included: filtering them before would bring back what they hide.
//!
//! A node of 256 KiB takes milliseconds, which nobody may be kept waiting for: [`NodeReader`] does it in steps.

use alloc::boxed::Box;
use alloc::vec::{self, Vec};

use bcached_format::bset::BsetPlace;
use bcached_format::key_check::{check_child_key, check_leaf_key};
use bcached_format::key_list::KeyIter;
use bcached_format::node_log::NodeLogReader;
use bcached_format::units::bytes_of;
use bcached_format::{Geometry, Key, KeyError, KeyListError, NodeLog, Position};

use crate::error::{NodeError, NodeFault};
use crate::extents::{Overlay, is_hole, push_merged};
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
        let mut reader = NodeReader::new(own, level, geometry, bytes)?;
        loop {
            if let Some(node) = reader.step(usize::MAX)? {
                return Ok(node);
            }
        }
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

/// Reads a node in steps.
///
/// Of a run of finished merges, oldest first, each is more than twice as long as the next: so a key goes through a
/// number of merges that is logarithmic in the number of sets, and the large first set of a node only through one.
pub struct NodeReader<'a> {
    own: Key,
    level: u8,
    geometry: Geometry,
    log: NodeLog<'a>,
    /// Sets whose keys are in `runs`, or on their way there.
    taken: usize,
    /// Merged sets, oldest first.
    runs: Vec<Vec<Key>>,
    stage: Stage<'a>,
    handled: usize,
    found: usize,
}

/// Bytes of a usual key in a set.
const KEY_BYTES: usize = 24;

/// What is being done.
enum Stage<'a> {
    /// The sets are summed, and the keys in them found.
    Log(Box<NodeLogReader<'a>>),
    /// What comes next is looked for.
    Between,
    /// The keys of a set are checked.
    Check { iter: KeyIter<'a>, block: u32, index: usize, word: usize, keys: Vec<Key> },
    /// Two runs become one.
    Merge { pair: Pair, out: Vec<Key> },
    /// What is alive of the last run becomes the view.
    Settle { keys: vec::IntoIter<Key>, living: Vec<Key>, freed: Vec<bcached_format::Pointer> },
    /// The view is put in order.
    Fill { keys: vec::IntoIter<Key>, view: SortedKeys, freed: Vec<bcached_format::Pointer> },
}

/// Two runs on their way to be one.
enum Pair {
    Extents(Overlay),
    Children(Interleave),
}

impl<'a> NodeReader<'a> {
    /// As [`Node::read`]; nothing is checked yet but that there is a first set.
    ///
    /// # Errors
    /// [`NodeFault::Log`] if there is none.
    ///
    /// # Panics
    /// If `own` is not a checked key of a node, or `bytes` are not as long as it says.
    pub fn new(own: Key, level: u8, geometry: &Geometry, bytes: &'a [u8]) -> Result<Self, NodeError> {
        assert_eq!(bytes.len() as u64, bytes_of(own.sectors()), "a node is read whole");
        let pointer = pointer_of(&own);
        let place = BsetPlace { magic: geometry.magic, node: pointer };
        let reader = NodeLogReader::new(bytes, geometry.block_bytes(), place).map_err(|error| NodeError {
            pointer,
            level,
            fault: error.into(),
        })?;
        Ok(Self {
            own,
            level,
            geometry: *geometry,
            log: NodeLog { sets: Vec::new(), end_block: 0 },
            taken: 0,
            runs: Vec::new(),
            stage: Stage::Log(Box::new(reader)),
            handled: 0,
            found: 0,
        })
    }

    /// Goes on by about `keys` keys, or by the sum of so many; the node, when it is complete.
    ///
    /// # Errors
    /// As [`Node::read`]. There is nothing to go on with afterwards.
    pub fn step(&mut self, keys: usize) -> Result<Option<Node>, NodeError> {
        let (pointer, level) = (pointer_of(&self.own), self.level);
        self.advance(keys).map_err(|fault| NodeError { pointer, level, fault })
    }

    /// Keys handled so far, each once at every stage: what the steps have cost, beside finding them.
    #[must_use]
    pub const fn handled(&self) -> usize {
        self.handled
    }

    /// Bytes that were summed so far, and those that were looked through for keys: each counts twice in the end.
    #[must_use]
    pub const fn found(&self) -> usize {
        self.found
    }

    fn advance(&mut self, count: usize) -> Result<Option<Node>, NodeFault> {
        self.stage = match core::mem::replace(&mut self.stage, Stage::Between) {
            Stage::Log(reader) => self.find(reader, count)?,
            Stage::Between => self.next_stage(),
            Stage::Check { mut iter, block, mut index, mut word, mut keys } => {
                let mut ended = false;
                for _ in 0..count {
                    let Some(key) = iter.next() else {
                        ended = true;
                        break;
                    };
                    let fault = |error| NodeFault::Key { block, error: KeyListError { index, word, error } };
                    self.take(&key, block, &mut keys, fault)?;
                    word += key.words();
                    index += 1;
                    self.handled += 1;
                }
                if ended {
                    self.runs.push(keys);
                    Stage::Between
                } else {
                    Stage::Check { iter, block, index, word, keys }
                }
            }
            Stage::Merge { mut pair, mut out } => {
                let before = out.len();
                match &mut pair {
                    Pair::Extents(overlay) => out.extend(overlay.take(count)),
                    Pair::Children(interleave) => out.extend(interleave.take(count)),
                }
                self.handled += out.len() - before;
                if out.len() - before < count {
                    self.runs.push(out);
                    Stage::Between
                } else {
                    Stage::Merge { pair, out }
                }
            }
            Stage::Settle { mut keys, mut living, mut freed } => {
                for key in keys.by_ref().take(count) {
                    self.settle(key, &mut living, &mut freed);
                    self.handled += 1;
                }
                if keys.len() > 0 {
                    Stage::Settle { keys, living, freed }
                } else {
                    Stage::Fill { keys: living.into_iter(), view: SortedKeys::default(), freed }
                }
            }
            Stage::Fill { mut keys, mut view, freed } => {
                for key in keys.by_ref().take(count) {
                    view.push(key);
                    self.handled += 1;
                }
                if keys.len() == 0 {
                    return self.finish(view, freed).map(Some);
                }
                Stage::Fill { keys, view, freed }
            }
        };
        Ok(None)
    }

    /// Sums the sets, and finds the keys in them.
    fn find(&mut self, mut reader: Box<NodeLogReader<'a>>, count: usize) -> Result<Stage<'a>, NodeFault> {
        let Some(log) = reader.step(count.saturating_mul(KEY_BYTES))? else {
            self.found = reader.found();
            return Ok(Stage::Log(reader));
        };
        assert!(log.end_block <= blocks_of(&self.geometry, self.own.size), "the log ends inside the node");
        self.log = log;
        Ok(Stage::Between)
    }

    /// A merge if one is due, else the next set, else what is left to be merged, else the end.
    fn next_stage(&mut self) -> Stage<'a> {
        let is_due = match self.runs.as_slice() {
            [.., older, newer] => self.taken == self.log.sets.len() || older.len() <= 2 * newer.len(),
            _ => false,
        };
        if is_due && let (Some(newer), Some(older)) = (self.runs.pop(), self.runs.pop()) {
            let out = Vec::with_capacity(older.len() + newer.len());
            let pair = if self.level == 0 {
                Pair::Extents(Overlay::new(older, newer))
            } else {
                Pair::Children(Interleave::new(older, newer))
            };
            return Stage::Merge { pair, out };
        }
        if let Some(set) = self.log.sets.get(self.taken) {
            self.taken += 1;
            return Stage::Check {
                iter: set.bset.keys.iter(),
                block: set.block,
                index: 0,
                word: 0,
                keys: Vec::new(),
            };
        }
        let keys = self.runs.pop().unwrap_or_default();
        Stage::Settle { living: Vec::with_capacity(keys.len()), keys: keys.into_iter(), freed: Vec::new() }
    }

    /// Checks one key for itself and against the one before; takes it if it means something.
    fn take(
        &self,
        key: &Key,
        block: u32,
        keys: &mut Vec<Key>,
        fault: impl Fn(KeyError) -> NodeFault,
    ) -> Result<(), NodeFault> {
        let start = self.check(key).map_err(&fault)?;
        if key.size == 0 {
            return Ok(());
        }
        let previous = keys.last().map_or(Position::ZERO, Key::position);
        if start < previous {
            return Err(fault(KeyError::OutOfOrder { previous, start }));
        }
        let (limit, found) = (self.own.position(), key.position());
        if found > limit {
            return Err(NodeFault::BeyondRange { block, limit, found });
        }
        keys.push(*key);
        Ok(())
    }

    /// Checks one key and says where it begins, which the key before it must not reach beyond.
    fn check(&self, key: &Key) -> Result<Position, KeyError> {
        if self.level > 0 {
            check_child_key(&self.geometry, key)?;
            return Ok(key.position());
        }
        check_leaf_key(&self.geometry, key)?;
        Ok(key.start_position())
    }

    /// One key of what all sets together say: in a leaf holes are nothing, in an interior node position zero frees.
    fn settle(&self, key: Key, living: &mut Vec<Key>, freed: &mut Vec<bcached_format::Pointer>) {
        if self.level > 0 {
            if key.position() == Position::ZERO {
                freed.extend(key.pointers.as_slice());
            } else {
                living.push(key);
            }
        } else if !is_hole(&key) {
            push_merged(living, key, self.geometry.bucket_sectors);
        }
    }

    fn finish(&self, view: SortedKeys, freed: Vec<bcached_format::Pointer>) -> Result<Node, NodeFault> {
        let mut node = Node::create(self.own, self.level, self.log.seq(), &self.geometry);
        node.written_blocks = self.log.end_block;
        node.words_on_disk = self.log.sets.iter().map(|set| set.bset.keys.words()).sum();
        node.view = view;
        node.freed = freed;
        let (limit, found) = (2 * node.words_on_disk, node.view.words());
        if found > limit {
            return Err(NodeFault::TooManyPieces { limit, found });
        }
        Ok(node)
    }
}

/// The keys of two interior sets in position order, newer before older where they stand at one position.
struct Interleave {
    older: core::iter::Peekable<vec::IntoIter<Key>>,
    newer: core::iter::Peekable<vec::IntoIter<Key>>,
}

impl Interleave {
    fn new(older: Vec<Key>, newer: Vec<Key>) -> Self {
        Self { older: older.into_iter().peekable(), newer: newer.into_iter().peekable() }
    }
}

impl Iterator for Interleave {
    type Item = Key;

    fn next(&mut self) -> Option<Key> {
        let Some(new) = self.newer.peek() else { return self.older.next() };
        let before = self.older.next_if(|old| old.position() < new.position());
        before.or_else(|| self.newer.next())
    }
}
