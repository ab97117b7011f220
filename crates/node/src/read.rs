//! Bytes to node: check every set, then merge them (format 6.3, 7.1 and 8).
//!
//! All keys of size above zero take part in the merge, holes and stale ones included: filtering them before would bring
//! back what they hide. The keys are found, checked and merged in three passes over the bytes, since a fault of an older set is told
//! before one of a newer set, and one of a key that cannot be read before one that makes no sense.
//!
//! A node of a MiB takes milliseconds, which nobody may be kept waiting for: [`NodeReader`] does it in steps.

use alloc::boxed::Box;
use alloc::vec::Vec;

use bcached_format::bset::BsetPlace;
use bcached_format::key_check::{check_child_key, check_leaf_key};
use bcached_format::key_list::KeyIter;
use bcached_format::node_log::NodeLogReader;
use bcached_format::units::bytes_of;
use bcached_format::{Geometry, Key, KeyError, KeyListError, NodeLog, Pointer, Position};

use crate::error::{NodeError, NodeFault};
use crate::extents::{Overlay, is_hole, merged};
use crate::merge::{Interleave, Keys, Newest, SetKeys};
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

    /// Checks that no set is missing of the first blocks of the node, so many of which were `durable` once. The sets behind a lost one
    /// are missed by the reader itself; that the last is lost shows nowhere else.
    ///
    /// # Errors
    /// [`NodeFault::SetLost`].
    pub fn check_length(&self, durable: u32) -> Result<(), NodeError> {
        let found = self.written_blocks();
        if found < durable {
            return Err(self.error(NodeFault::SetLost { wanted: durable, found }));
        }
        Ok(())
    }
}

/// Reads a node in steps.
pub struct NodeReader<'a> {
    own: Key,
    level: u8,
    geometry: Geometry,
    log: NodeLog<'a>,
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
    /// The keys of the sets are checked, one set after the other.
    Check(Check<'a>),
    /// What all sets together say becomes the view.
    Merge(Box<Merge<'a>>, View),
    /// There is nothing more to do.
    Over,
}

/// The keys of a set that is being checked.
struct Check<'a> {
    /// The set's number in the log.
    set: usize,
    keys: KeyIter<'a>,
    /// The key that comes next, and the word at which it begins.
    index: usize,
    word: usize,
    /// Where the last key ended that means something.
    previous: Position,
}

/// Checked sets on their way to be one.
enum Merge<'a> {
    One(SetKeys<'a>),
    Extents(Overlay<SetKeys<'a>, Newest<SetKeys<'a>>>),
    Children(Interleave<SetKeys<'a>>),
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

    /// Keys handled so far, each once when it is checked and once when it is merged, and once more whenever a newer one cuts
    /// it: what the steps have cost, beside finding them.
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
        self.stage = match core::mem::replace(&mut self.stage, Stage::Over) {
            Stage::Log(reader) => self.find(reader, count)?,
            Stage::Check(mut check) => {
                if self.check_some(&mut check, count)? {
                    self.check_set(check.set + 1)
                } else {
                    Stage::Check(check)
                }
            }
            Stage::Merge(mut merge, mut view) => {
                let mut left = count;
                match &mut *merge {
                    Merge::One(keys) => self.settle(keys, &mut view, &mut left),
                    Merge::Extents(keys) => self.settle(keys, &mut view, &mut left),
                    Merge::Children(keys) => self.settle(keys, &mut view, &mut left),
                }
                self.handled += count - left;
                if left > 0 {
                    return self.finish(view).map(Some);
                }
                Stage::Merge(merge, view)
            }
            Stage::Over => unreachable!("nothing goes on behind a node or a fault"),
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
        Ok(self.check_set(0))
    }

    /// The check of the set with this number, or else the merge of them all.
    fn check_set(&self, set: usize) -> Stage<'a> {
        if let Some(log) = self.log.sets.get(set) {
            let keys = log.bset.keys.iter();
            return Stage::Check(Check { set, keys, index: 0, word: 0, previous: Position::ZERO });
        }
        let mut sets = self.log.sets.iter().map(|set| SetKeys::new(set.bset.keys.iter()));
        let merge = if self.level > 0 {
            Merge::Children(Interleave::new(sets))
        } else {
            let first = sets.next().expect("a log has a set");
            if sets.len() == 0 {
                Merge::One(first)
            } else {
                Merge::Extents(Overlay::new(first, Newest::new(sets)))
            }
        };
        Stage::Merge(Box::new(merge), View::default())
    }

    /// Checks so many keys of a set, each for itself and against the one before; says whether it was the rest of them.
    fn check_some(&mut self, check: &mut Check<'a>, count: usize) -> Result<bool, NodeFault> {
        let (block, limit) = (self.log.sets[check.set].block, self.own.position());
        let first = check.index;
        for key in check.keys.by_ref().take(count) {
            let (index, word) = (check.index, check.word);
            let fault = |error| NodeFault::Key { block, error: KeyListError { index, word, error } };
            let start = self.check(&key).map_err(fault)?;
            check.word += key.words();
            check.index += 1;
            if key.size == 0 {
                continue;
            }
            let (previous, found) = (check.previous, key.position());
            if start < previous {
                return Err(fault(KeyError::OutOfOrder { previous, start }));
            }
            if found > limit {
                return Err(NodeFault::BeyondRange { block, limit, found });
            }
            check.previous = found;
        }
        self.handled += check.index - first;
        Ok(check.index - first < count)
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

    /// Puts what all sets together say into the view, as far as it is taken in this turn: in a leaf holes are nothing, in an
    /// interior node position zero frees.
    fn settle(&self, keys: &mut impl Keys, view: &mut View, left: &mut usize) {
        while let Some(key) = keys.next(left) {
            if self.level > 0 {
                if key.position() == Position::ZERO {
                    view.freed.extend(key.pointers.as_slice());
                } else {
                    view.keys.push(key);
                }
            } else if !is_hole(&key) {
                view.push_extent(key, self.geometry.bucket_sectors);
            }
        }
    }

    fn finish(&self, view: View) -> Result<Node, NodeFault> {
        let mut node = Node::create(self.own, self.level, self.log.seq(), &self.geometry);
        node.written_blocks = self.log.end_block;
        node.words_on_disk = self.log.sets.iter().map(|set| set.bset.keys.words()).sum();
        (node.view, node.freed) = (view.keys, view.freed);
        let (limit, found) = (2 * node.words_on_disk, node.view.words());
        if found > limit {
            return Err(NodeFault::TooManyPieces { limit, found });
        }
        Ok(node)
    }
}

/// The view of a node that is being read.
#[derive(Default)]
struct View {
    keys: SortedKeys,
    freed: Vec<Pointer>,
}

impl View {
    /// Adds an extent behind all others, as part of the last one where the two amount to one.
    #[inline]
    fn push_extent(&mut self, key: Key, bucket_sectors: u64) {
        match self.keys.last().and_then(|last| merged(last, &key, bucket_sectors)) {
            Some(both) => self.keys.replace_last(both),
            None => self.keys.push(key),
        }
    }
}
