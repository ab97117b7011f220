//! Implements the tree as synchronous attempts: each completes, or names what is missing and has
//! changed nothing.
//!
//! An attempt touches one leaf; longer ranges are handled leaf by leaf. Only this module changes
//! the keys of a leaf. The live and dirty counts of their buckets, the volume's dirty count, the
//! journal entry and the note change in the same transition.

pub mod background_rewrite;
pub mod background_walk;
pub mod budget;
pub mod cache;
pub mod coalesce;
pub mod dirty_leaves;
pub mod frozen_ranges;
pub mod load;
mod pending_keys;
mod pointer_index;
pub mod replace;
mod resize;
mod single_extent;
pub mod split;
pub mod unreadable;
pub mod walk;
pub mod walk_frontier;
pub mod write;

use crate::btree::cache::{LeafHint, NodeState};
use crate::cpu_cost::{REMOVE_MAX, VISIT_MAX};
use crate::error::Error;
use crate::space::Buckets;
use crate::state::State;
use bcached_env::NoteRecord;
use bcached_format::{Inode, Key, Pointer, Pointers, Position};
use bcached_node::KeyCursor;

/// The outcome of an attempt.
#[derive(Debug)]
pub enum Attempt<T> {
    /// It completed.
    Done(T),
    /// It changed nothing; provide what is missing and try again.
    Needs(Need),
}

impl<T> Attempt<T> {
    /// Maps the result with `make`.
    pub fn map<R>(self, make: impl FnOnce(T) -> R) -> Attempt<R> {
        match self {
            Self::Done(result) => Attempt::Done(make(result)),
            Self::Needs(need) => Attempt::Needs(need),
        }
    }
}

/// What an attempt is missing.
#[derive(Clone, Copy, Debug)]
pub enum Need {
    /// A node must be in memory.
    Node(NodeRef),
    /// The leaf for the start `at` has no room for `words` more words: it must be compacted or
    /// split.
    Split {
        /// Start of an extent in the leaf.
        at: Position,
        /// Words of keys to be added.
        words: usize,
    },
    /// The leaf is being split.
    BeingSplit,
    /// The leaf may grow, and there is no memory for it now.
    Memory,
    /// The journal or the note has no room.
    Journal,
    /// The journal has newer keys for the range than the leaf. The key that ends at this position
    /// must be put into the leaf first (`journal::overlay`).
    Replay(Position),
}

/// A node as its parent names it.
#[derive(Clone, Copy, Debug)]
pub struct NodeRef {
    /// The parent's key for it.
    pub key: Key,
    /// Its level; 0 is a leaf.
    pub level: u8,
}

impl NodeRef {
    /// Returns where the node is. This is the only place that chooses among a node's copies.
    #[must_use]
    pub fn pointer(&self) -> Pointer {
        pointer_to_read(&self.key.pointers).expect("child keys are checked to have a pointer")
    }
}

/// Returns which copy of an extent to read. This is the only place that chooses one.
#[must_use]
pub fn pointer_to_read(pointers: &Pointers) -> Option<Pointer> {
    pointers.as_slice().first().copied()
}

/// Returns the copies that are still valid; `None` if there are none.
#[inline]
pub(crate) fn live_pointers(buckets: &Buckets, pointers: &Pointers) -> Option<Pointers> {
    let stale = |pointer: &Pointer| buckets.is_stale(*pointer);
    match pointers.as_slice() {
        [one] => (!stale(one)).then_some(*pointers),
        all if all.iter().all(stale) => None,
        [one, other] if stale(one) => Some(Pointers::one(*other)),
        [one, other] if stale(other) => Some(Pointers::one(*one)),
        _ => Some(*pointers),
    }
}

/// The content of a part of a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Nothing cached.
    Hole,
    /// Cached.
    Cached {
        /// Where the part starts on the cache device.
        pointers: Pointers,
        /// The newest data is only here.
        dirty: bool,
    },
}

/// A part of a range, in sectors of the key space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// First sector.
    pub start: u64,
    /// End, exclusive.
    pub end: u64,
    /// What is there.
    pub content: Content,
}

/// How an insert is recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InsertKind {
    /// In the journal and, if the write has been or will be acknowledged, in the note.
    Journal,
    /// The key comes from this journal entry.
    Replay(u64),
    /// Not at all: a fill, whose loss loses no data.
    Fill,
}

impl State {
    /// Returns the leaf whose range holds the extent start `start`.
    fn leaf_for(&mut self, start: Position) -> Result<usize, Need> {
        self.descend(start, 0)
    }

    /// Like [`State::leaf_for`], for a caller that may have a remembered leaf.
    fn leaf_again(&mut self, leaf: Option<LeafHint>, start: Position) -> Result<usize, Need> {
        match leaf.and_then(|leaf| self.nodes.again(leaf)) {
            Some(slot) => {
                self.work.descent();
                Ok(slot)
            }
            None => self.leaf_for(start),
        }
    }

    /// Like [`State::leaf_again`], but `leaf` may be that of an earlier position.
    fn leaf_behind(&mut self, leaf: Option<LeafHint>, start: Position) -> Result<usize, Need> {
        let slot = self.leaf_again(leaf, start)?;
        if self.nodes.get(slot).node().position() > start { Ok(slot) } else { self.leaf_for(start) }
    }

    /// Returns the node at `level` on the way to `start`.
    pub(crate) fn descend(&mut self, start: Position, level: u8) -> Result<usize, Need> {
        let mut child = self.root;
        loop {
            self.work.descent();
            let Some(slot) = self.nodes.find(child.pointer()) else { return Err(Need::Node(child)) };
            if child.level == level {
                return Ok(slot);
            }
            let key = self.nodes.get(slot).node().child_for(start);
            let key = *key.expect("the children of a checked node reach its end");
            child = NodeRef { key, level: child.level - 1 };
        }
    }

    /// Looks up `[start, end)` of volume `inode`, as far as one leaf and one attempt reach. Passes
    /// the pieces in order, and returns where they end (at most `end`).
    pub(crate) fn lookup(
        &mut self,
        inode: Inode,
        start: u64,
        end: u64,
        pieces: &mut dyn FnMut(Piece),
    ) -> Attempt<u64> {
        let mut end = end;
        if let Some((_, key)) = self.overlay.first_in(inode, start, end) {
            self.work.visit(1);
            if key.start() <= start {
                let piece = self.pending_piece(&key, start, end);
                pieces(piece);
                return Attempt::Done(piece.end);
            }
            // Up to there the leaf is authoritative; from there on it is not seen (invariant D44).
            end = key.start();
        }
        let slot = match self.leaf_for(Position::new(inode, start)) {
            Ok(slot) => slot,
            Err(need) => return Attempt::Needs(need),
        };
        let node = self.nodes.get(slot).node();
        let upto = if node.position().inode > inode { end } else { end.min(node.position().offset) };
        let (mut at, mut seen, mut upto) = (start, 0, upto);
        for key in node.overlapping(inode, start, upto) {
            seen += 1;
            if seen > VISIT_MAX {
                // Stop where this key starts, not where the last piece ended. The keys just passed
                // may have been stale, and the next attempt must begin after them.
                upto = key.start();
                seen -= 1;
                break;
            }
            let Some(part) = key.cut(start, upto) else { continue };
            let Some(pointers) = live_pointers(&self.buckets, &part.pointers) else { continue };
            if at < part.start() {
                pieces(Piece { start: at, end: part.start(), content: Content::Hole });
            }
            let content = Content::Cached { pointers, dirty: part.dirty };
            pieces(Piece { start: part.start(), end: part.end, content });
            at = part.end;
        }
        if at < upto {
            pieces(Piece { start: at, end: upto, content: Content::Hole });
        }
        self.work.visit(seen);
        Attempt::Done(upto)
    }

    /// Visits the keys of one leaf that overlap `[start, end)`, uncut and including stale ones, as
    /// far as one attempt reaches. Returns where that is: at most where the leaf or the range ends.
    pub(crate) fn keys_in_leaf(
        &mut self,
        inode: Inode,
        start: u64,
        end: u64,
        visit: &mut dyn FnMut(&Buckets, &Key),
    ) -> Attempt<u64> {
        self.keys_in_leaf_from(&mut None, inode, (start, end), visit)
    }

    /// Like [`State::keys_in_leaf`], for a caller that visits positions in ascending order. `leaf`
    /// holds the leaf of the previous position, and then that of this one.
    pub(crate) fn keys_in_leaf_from(
        &mut self,
        leaf: &mut Option<LeafHint>,
        inode: Inode,
        (start, end): (u64, u64),
        visit: &mut dyn FnMut(&Buckets, &Key),
    ) -> Attempt<u64> {
        let slot = match self.leaf_behind(*leaf, Position::new(inode, start)) {
            Ok(slot) => slot,
            Err(need) => return Attempt::Needs(need),
        };
        let node = self.nodes.get(slot).node();
        let place = node.place_of(Position::new(inode, start));
        *leaf = Some(self.nodes.remember(slot, place));
        let mut upto = if node.position().inode > inode { end } else { end.min(node.position().offset) };
        if let Err(need) = self.pending(inode, start, upto) {
            return Attempt::Needs(need);
        }
        let mut keys = node.overlapping_from(place, inode, upto);
        let mut seen = 0;
        for key in keys.by_ref().take(VISIT_MAX) {
            visit(&self.buckets, key);
            seen += 1;
        }
        if let Some(next) = keys.next() {
            upto = next.start();
        }
        self.work.visit(seen);
        Attempt::Done(upto)
    }

    /// Inserts as much of `key` as its first leaf takes, over whatever is there. Returns where that
    /// ends.
    pub(crate) fn insert(&mut self, key: &Key, record: InsertKind) -> Attempt<u64> {
        self.insert_in(None, key, record)
    }

    /// Like [`State::insert`], for a caller that has remembered the `leaf` for its start.
    pub(crate) fn insert_in(
        &mut self,
        leaf: Option<LeafHint>,
        key: &Key,
        record: InsertKind,
    ) -> Attempt<u64> {
        let found = self.leaf_again(leaf, key.start_position());
        let slot = match found.and_then(|slot| self.open_to_change(slot, key.start_position(), key.words())) {
            Ok(slot) => slot,
            Err(need) => return Attempt::Needs(need),
        };
        let mut part = part_within(key, self.nodes.get(slot).node().position());
        let is_replay = matches!(record, InsertKind::Replay(_));
        if !is_replay && let Err(need) = self.pending(part.inode, part.start(), part.end) {
            return Attempt::Needs(need);
        }
        if record == InsertKind::Journal && !self.can_record(key.words()) {
            return Attempt::Needs(Need::Journal);
        }
        if !self.has_memory(slot) {
            return Attempt::Needs(Need::Memory);
        }
        // A key that replaces very many others does so piece by piece.
        let node = self.nodes.get(slot).node();
        if part.sectors() > REMOVE_MAX as u64
            && let Some(next) = node.overlapping(part.inode, part.start(), part.end).nth(REMOVE_MAX)
        {
            part = part.cut(part.start(), next.start()).expect("other keys lie before it");
        }
        let sequence = self.record(slot, &part, record);
        let died = self.put((slot, leaf.map(LeafHint::place)), &part, sequence);
        // A replay mostly overwrites keys with themselves.
        if !is_replay && !self.journal.is_replaying() {
            self.buckets.count_dead(died);
        }
        Attempt::Done(part.end)
    }

    /// Replaces the first part of `[expected.start(), upto)` that still equals `expected` by the
    /// same part of `new`, within the first leaf. Returns how far it has looked and how many
    /// sectors were replaced. There is rarely more than one such part; the caller's loop handles
    /// the others alike.
    pub(crate) fn replace(&mut self, expected: &Key, new: &Key) -> Attempt<(u64, u64)> {
        let slot = match self.leaf_to_change(expected.start_position(), new.words()) {
            Ok(slot) => slot,
            Err(need) => return Attempt::Needs(need),
        };
        let node = self.nodes.get(slot).node();
        let position = node.position();
        let upto = if position.inode > new.inode { expected.end } else { expected.end.min(position.offset) };
        if let Err(need) = self.pending(expected.inode, expected.start(), upto) {
            return Attempt::Needs(need);
        }
        let mut matching = node.matching(expected, upto);
        let Some((start, end)) = matching.next() else { return Attempt::Done((upto, 0)) };
        let upto = if matching.next().is_some() { end } else { upto };
        drop(matching);
        if !self.can_record(new.words()) {
            return Attempt::Needs(Need::Journal);
        }
        if !self.has_memory(slot) {
            return Attempt::Needs(Need::Memory);
        }
        let part = new.cut(start, end).expect("expected and new cover the same range");
        let sequence = self.record(slot, &part, InsertKind::Journal);
        self.put((slot, None), &part, sequence);
        Attempt::Done((upto, end - start))
    }

    /// Returns the leaf for `start`, in memory, with room for one more key of `words` words.
    fn leaf_to_change(&mut self, start: Position, words: usize) -> Result<usize, Need> {
        let slot = self.leaf_for(start)?;
        self.open_to_change(slot, start, words)
    }

    /// Returns the leaf in `slot`, for `start`, if it has that room.
    fn open_to_change(&self, slot: usize, start: Position, words: usize) -> Result<usize, Need> {
        let is_full = match &self.nodes.get(slot).state {
            NodeState::Closing(late) => late.room() == 0 || !self.may_take(slot),
            NodeState::Open | NodeState::Unlinked => self.is_full(slot, words),
        };
        match (is_full, self.nodes.get(slot).state.is_open()) {
            (false, _) => Ok(slot),
            (true, true) => Err(Need::Split { at: start, words }),
            (true, false) => Err(Need::BeingSplit),
        }
    }

    /// Returns whether the leaf in `slot` cannot take a key of `words` words, either on the device
    /// or within a node's memory limit.
    fn is_full(&self, slot: usize, words: usize) -> bool {
        let node = self.nodes.get(slot).node();
        !node.fits(words) || !self.may_take(slot)
    }

    /// Returns whether one more key is within a node's memory limit.
    fn may_take(&self, slot: usize) -> bool {
        let bound = self.nodes.get(slot).node().insert_growth_bytes_bound(1);
        self.nodes.may_grow(slot, bound) || self.nodes.may_grow(slot, self.growth_bytes_max(slot))
    }

    /// Returns the most that a key can add to the memory of the leaf in `slot`.
    fn growth_bytes_max(&self, slot: usize) -> usize {
        let cached = self.nodes.get(slot);
        match cached.state {
            NodeState::Closing(_) => cached.node().late_growth_bytes_max(1),
            NodeState::Open | NodeState::Unlinked => cached.node().insert_growth_bytes_max(1),
        }
    }

    /// Makes sure that there is memory for an insert into the leaf in `slot`; returns false if
    /// there is none now.
    fn has_memory(&mut self, slot: usize) -> bool {
        let bound = self.nodes.get(slot).node().insert_growth_bytes_bound(1);
        self.nodes.has_room(bound) || self.nodes.room_to_grow(slot, self.growth_bytes_max(slot))
    }

    /// Returns whether the journal and the note have room for a key of this many words.
    fn can_record(&self, words: usize) -> bool {
        self.journal.has_room(words) && (self.note_held || self.note.room() > 0)
    }

    /// Records that `part` enters the leaf in `slot`; returns the journal entry that it belongs to.
    fn record(&mut self, slot: usize, part: &Key, record: InsertKind) -> u64 {
        let sequence = match record {
            InsertKind::Journal => {
                self.untold |= !self.journal.has_keys();
                let sequence = self.journal.append(part);
                // In the open entry and in the note before the write is answered: invariant D6.
                if !self.note_held {
                    self.note.append(note_record(sequence, part));
                }
                sequence
            }
            InsertKind::Replay(sequence) => sequence,
            InsertKind::Fill => return self.journal.open_sequence(),
        };
        if self.nodes.get(slot).pending_since().is_none_or(|since| since > sequence) {
            if let Some(since) = self.nodes.waits_for(slot, sequence) {
                self.journal.unpin(since);
            }
            self.journal.pin(sequence);
        }
        if let NodeState::Closing(late) = &mut self.nodes.get_mut(slot).state {
            late.since = Some(late.since.map_or(sequence, |since| since.min(sequence)));
        }
        sequence
    }

    /// Requests a rewrite of the leaf in `slot`, in which an extent starts at `at`, before it is
    /// full.
    fn ask_ahead(&mut self, slot: usize, at: Position) {
        let cached = self.nodes.get_mut(slot);
        if cached.state.is_open() && !cached.is_asked_for && cached.node().is_nearly_full() {
            cached.is_asked_for = true;
            self.crowded.push(at);
        }
    }

    /// Changes the leaf, near `guess`, and every count that depends on it. Returns how many live
    /// sectors were replaced.
    fn put(&mut self, (slot, guess): (usize, Option<KeyCursor>), part: &Key, sequence: u64) -> u64 {
        let now = self.now;
        let Self { nodes, buckets, dirty, frontier, untold, .. } = self;
        let cached = nodes.get_mut(slot);
        let is_late = match &mut cached.state {
            NodeState::Closing(late) => {
                late.keys.push(*part);
                true
            }
            NodeState::Open | NodeState::Unlinked => false,
        };
        if !is_late {
            *untold |= nodes.has_to_write(slot, now);
        }
        let (mut removed, mut died) = (0, 0);
        // The counts change in the transition that changes the key: invariant D9.
        let mut remove = |gone: Key| {
            removed += 1;
            let live = !buckets.is_dead(&gone);
            died += if live { gone.sectors() } else { 0 };
            let counted = frontier.counted(&gone);
            for pointer in gone.pointers.as_slice() {
                buckets.remove(*pointer, counted, gone.dirty, sequence);
            }
            if live && gone.dirty {
                dirty.remove_key(&gone, counted);
            }
        };
        nodes.change(slot, |node| match is_late {
            false => node.insert_near(guess, part, &mut remove),
            true => node.insert_late(part, &mut remove),
        });
        self.ask_ahead(slot, part.start_position());
        self.work.insert(removed);
        let Self { buckets, dirty, frontier, failed, note_held, overlay, .. } = self;
        let counted = frontier.counted(part);
        for pointer in part.pointers.as_slice() {
            if !buckets.add(*pointer, counted, part.dirty) {
                // While the set is being opened, or its journal is replayed beside requests, a key
                // may contradict the tree. And the walk may find more in a bucket of the reserve
                // than was known when that was allocated.
                let is_known = !*note_held && !frontier.was_behind() && !overlay.was_there();
                assert!(!is_known, "{part:?}: its bucket counts more live sectors than its size");
                failed.get_or_insert(Error::Inconsistent("two extents share sectors of a cache bucket"));
            }
        }
        if part.dirty {
            dirty.add_key(part, counted);
        }
        died
    }
}

/// Returns the part of `key` that lies in the leaf for its start, whose range ends at `position`.
fn part_within(key: &Key, position: Position) -> Key {
    let part = if position.inode > key.inode { Some(*key) } else { key.cut(0, position.offset) };
    part.expect("the leaf for a start reaches beyond it")
}

/// Converts a key to the form that the note keeps.
fn note_record(sequence: u64, key: &Key) -> NoteRecord {
    let mut words = [key.header_word(), key.end, 0, 0];
    for (word, pointer) in words[2..].iter_mut().zip(key.pointers.as_slice()) {
        *word = pointer.word();
    }
    let count = u8::try_from(key.words()).expect("at most four words");
    NoteRecord { sequence, words, count }
}
