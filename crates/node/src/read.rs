//! Reading a node from bytes: every set is checked, then all are merged.
//!
//! All keys of size above zero take part in the merge, holes and stale ones included: filtering
//! them before would bring back what they hide. Finding, checking and merging keys takes three
//! passes over the bytes, because faults are reported in a fixed order: those of an older set
//! before those of a newer set, and an undecodable key before an invalid one.
//!
//! A node of a MiB takes milliseconds, which no client may be kept waiting for, so [`NodeReader`]
//! works in steps.

use alloc::boxed::Box;
use alloc::vec::Vec;

use bcached_format::bset::NodeIdentity;
use bcached_format::key_check::{check_child_key, check_leaf_key};
use bcached_format::key_list::KeyIter;
use bcached_format::node_log::NodeLogReader;
use bcached_format::units::bytes_of;
use bcached_format::{Geometry, Key, KeyError, KeyListError, NodeLog, Pointer, Position};

use crate::error::{NodeError, NodeFault};
use crate::extents::{Overlay, is_hole, merged};
use crate::merge::{ChildMerge, ExtentMerge, KeySource, SetKeys};
use crate::node::{Node, blocks_of, pointer_of};
use crate::sorted_keys::SortedKeys;

impl Node {
    /// Reads the node that `own` points to from its bytes. None of its keys is known to be alive
    /// yet: see [`Node::freed`] and [`Node::drop_dead`] for an interior node; in a leaf the caller
    /// checks the pointers' generations.
    ///
    /// # Errors
    /// [`NodeFault::Log`] for damaged sets, [`NodeFault::Key`], [`NodeFault::BeyondRange`] or
    /// [`NodeFault::TooManyPieces`] for keys that are invalid here.
    ///
    /// # Panics
    /// If `own` is not a checked key of a node, or the length of `bytes` does not match it.
    pub fn read(own: Key, level: u8, geometry: &Geometry, bytes: &[u8]) -> Result<Self, NodeError> {
        let mut reader = NodeReader::new(own, level, geometry, bytes)?;
        loop {
            if let Some(node) = reader.step(usize::MAX)? {
                return Ok(node);
            }
        }
    }

    /// Checks that no extent of a leaf begins before `lo`, where its range begins. (The kernel does
    /// not check this.)
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

    /// Checks that no set is missing from the first `durable` blocks of the node, which are known
    /// to have been written durably. The reader itself detects a lost set that has a set behind it;
    /// only this check detects the loss of the last one.
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

/// Bytes of a typical key in a set.
const KEY_BYTES: usize = 24;

/// The current stage of a [`NodeReader`].
enum Stage<'a> {
    /// Verifies the checksums of the sets and finds the keys in them.
    Log(Box<NodeLogReader<'a>>),
    /// Checks the keys of the sets, one set after the other.
    Check(SetCheck<'a>),
    /// Merges all sets into the view.
    Merge(Box<Merge<'a>>, MergedView),
    /// Finished or failed.
    Over,
}

/// The keys of a set that is being checked.
struct SetCheck<'a> {
    /// The set's number in the log.
    set: usize,
    keys: KeyIter<'a>,
    /// Index of the next key, and the word at which it begins.
    index: usize,
    word: usize,
    /// End of the last key that is not of size zero.
    previous: Position,
}

/// Checked sets that are being merged.
enum Merge<'a> {
    One(SetKeys<'a>),
    Extents(Overlay<SetKeys<'a>, ExtentMerge<SetKeys<'a>>>),
    Children(ChildMerge<SetKeys<'a>>),
}

impl<'a> NodeReader<'a> {
    /// As [`Node::read`], but only checks that there is a first set.
    ///
    /// # Errors
    /// [`NodeFault::Log`] if there is no first set.
    ///
    /// # Panics
    /// If `own` is not a checked key of a node, or the length of `bytes` does not match it.
    pub fn new(own: Key, level: u8, geometry: &Geometry, bytes: &'a [u8]) -> Result<Self, NodeError> {
        assert_eq!(bytes.len() as u64, bytes_of(own.sectors()), "a node is read whole");
        let pointer = pointer_of(&own);
        let place = NodeIdentity { magic: geometry.magic, node: pointer };
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

    /// Advances by about `keys` keys, or by the checksum of as many. Returns the node when it is
    /// complete.
    ///
    /// # Errors
    /// As [`Node::read`]. The reader cannot be used afterwards.
    pub fn step(&mut self, keys: usize) -> Result<Option<Node>, NodeError> {
        let (pointer, level) = (pointer_of(&self.own), self.level);
        self.advance(keys).map_err(|fault| NodeError { pointer, level, fault })
    }

    /// Keys handled so far. Each counts once when it is checked, once when it is merged, and once
    /// more whenever a newer one cuts it. This is the cost of the steps so far, apart from finding
    /// the keys.
    #[must_use]
    pub const fn handled(&self) -> usize {
        self.handled
    }

    /// Bytes whose checksum was computed so far plus bytes that were searched for keys. In the end
    /// each byte counts twice.
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
            Stage::Over => unreachable!("no step follows a complete node or a fault"),
        };
        Ok(None)
    }

    /// Verifies the checksums of the sets, and finds the keys in them.
    fn find(&mut self, mut reader: Box<NodeLogReader<'a>>, count: usize) -> Result<Stage<'a>, NodeFault> {
        let Some(log) = reader.step(count.saturating_mul(KEY_BYTES))? else {
            self.found = reader.found();
            return Ok(Stage::Log(reader));
        };
        assert!(log.end_block <= blocks_of(&self.geometry, self.own.size), "the log ends inside the node");
        self.log = log;
        Ok(self.check_set(0))
    }

    /// Returns the stage that checks the set with this number, or that merges them all if there is
    /// no such set.
    fn check_set(&self, set: usize) -> Stage<'a> {
        if let Some(log) = self.log.sets.get(set) {
            let keys = log.bset.keys.iter();
            return Stage::Check(SetCheck { set, keys, index: 0, word: 0, previous: Position::ZERO });
        }
        let mut sets = self.log.sets.iter().map(|set| SetKeys::new(set.bset.keys.iter()));
        let merge = if self.level > 0 {
            Merge::Children(ChildMerge::new(sets))
        } else {
            let first = sets.next().expect("a log has a set");
            if sets.len() == 0 {
                Merge::One(first)
            } else {
                Merge::Extents(Overlay::new(first, ExtentMerge::new(sets)))
            }
        };
        Stage::Merge(Box::new(merge), MergedView::default())
    }

    /// Checks `count` keys of a set, each by itself and against the one before. Returns whether
    /// these were the last.
    fn check_some(&mut self, check: &mut SetCheck<'a>, count: usize) -> Result<bool, NodeFault> {
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

    /// Checks one key and returns where it begins. The key before it must not reach beyond that.
    fn check(&self, key: &Key) -> Result<Position, KeyError> {
        if self.level > 0 {
            check_child_key(&self.geometry, key)?;
            return Ok(key.position());
        }
        check_leaf_key(&self.geometry, key)?;
        Ok(key.start_position())
    }

    /// Moves this turn's merged keys into the view. Skips holes in a leaf; in an interior node,
    /// records keys at position zero as freeing keys.
    fn settle(&self, keys: &mut impl KeySource, view: &mut MergedView, left: &mut usize) {
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

    fn finish(&self, view: MergedView) -> Result<Node, NodeFault> {
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
struct MergedView {
    keys: SortedKeys,
    freed: Vec<Pointer>,
}

impl MergedView {
    /// Appends an extent, merged into the last one where possible.
    #[inline]
    fn push_extent(&mut self, key: Key, bucket_sectors: u64) {
        match self.keys.last().and_then(|last| merged(last, &key, bucket_sectors)) {
            Some(both) => self.keys.replace_last(both),
            None => self.keys.push(key),
        }
    }
}
