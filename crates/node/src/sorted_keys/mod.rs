//! Keys in position order, stored so that a lookup is two binary searches and a change moves little
//! memory.
//!
//! A node holds up to some ten thousand keys. One flat vector would move hundreds of KiB for an
//! insert at its front; a tree of small nodes would spend more on its own structure than on keys.
//! So the keys are in chunks of up to [`CHUNK_KEYS`], and the last position of each chunk is in a
//! separate vector, which the first search scans without touching a chunk.
//!
//! The structure knows nothing of extents and only keeps the order. Keys at equal positions keep
//! the order in which they were placed (an interior node has the newer one first until the older
//! one is known to be dead).
//!
//! Invariants:
//! * `bounds[i]` is the position of the last key of `chunks[i]`; no chunk is empty.
//! * A chunk holds at most [`CHUNK_KEYS`] keys, and two neighbours together hold more than
//!   [`JOIN_KEYS`], which bounds the memory per key.

mod splice;

use alloc::vec::Vec;
use core::mem::size_of;

use bcached_format::{Key, Position};

/// Most keys in a chunk: 2.5 KiB of keys, of which an insert moves half on average.
const CHUNK_KEYS: usize = 64;
/// Neighbouring chunks with at most this many keys are joined.
const JOIN_KEYS: usize = 56;
/// Keys put into each chunk when all are known from the start; the rest is room for the first
/// inserts.
const FILL_KEYS: usize = 60;
/// Most keys that one splice can add: the rest of an old key on either side, and the new key
/// between.
pub(crate) const SPLICE_KEYS: usize = 3;
/// Allocation of a chunk: a splice may overfill it until it is split.
const CHUNK_CAPACITY: usize = CHUNK_KEYS + SPLICE_KEYS;

/// Memory of a chunk, in bytes.
pub(crate) const CHUNK_BYTES: usize = CHUNK_CAPACITY * size_of::<Key>();
/// Memory per chunk outside of the chunk, in bytes.
const OUTER_BYTES: usize = size_of::<Vec<Key>>() + size_of::<Position>();
/// Room added to the outer vectors beside half of what they have.
const OUTER_STEP: usize = 4;

const _: () =
    assert!(JOIN_KEYS < FILL_KEYS && FILL_KEYS <= CHUNK_KEYS, "freshly filled chunks must not join");

/// Returns the most memory that `count` keys can take in a [`SortedKeys`], in bytes.
pub(crate) const fn memory_bytes_max(count: usize) -> usize {
    // Two neighbours hold more than `JOIN_KEYS` keys, so there are at most two chunks per
    // `JOIN_KEYS` keys, plus one.
    chunks_bytes(2 * count.div_ceil(JOIN_KEYS) + 1)
}

/// Returns the most memory that `count` keys take right after [`SortedKeys::from_sorted`], in
/// bytes.
pub(crate) const fn memory_bytes_filled(count: usize) -> usize {
    chunks_bytes(count.div_ceil(FILL_KEYS))
}

/// Returns the most memory that `chunks` chunks take, in bytes.
const fn chunks_bytes(chunks: usize) -> usize {
    chunks * CHUNK_BYTES + outer_room(chunks) * OUTER_BYTES
}

/// Room in the two outer vectors for `chunks` chunks, when they have grown one by one: by half at
/// each step.
const fn outer_room(chunks: usize) -> usize {
    let mut room = 0;
    while room < chunks {
        room += room / 2 + OUTER_STEP;
    }
    room
}

/// Keys in position order.
#[derive(Debug, Default)]
pub(crate) struct SortedKeys {
    bounds: Vec<Position>,
    chunks: Vec<Vec<Key>>,
    len: usize,
    words: usize,
}

/// A place among the keys of one node: in front of a key, or behind the last. After any change it
/// is only a guess.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyCursor {
    chunk: usize,
    index: usize,
}

impl Clone for SortedKeys {
    /// Copies the keys into chunks with spare room. The clone of a vector has none, and would
    /// outgrow a chunk's allocation.
    fn clone(&self) -> Self {
        Self::from_sorted(self.iter().copied())
    }
}

impl SortedKeys {
    /// Builds the structure from `sorted`, which must be in position order.
    pub(crate) fn from_sorted(sorted: impl IntoIterator<Item = Key>) -> Self {
        let mut keys = Self::default();
        for key in sorted {
            keys.push(key);
        }
        keys
    }

    /// Appends a key behind all others.
    #[inline]
    pub(crate) fn push(&mut self, key: Key) {
        let position = key.position();
        assert!(self.bounds.last().is_none_or(|last| *last <= position), "keys come in position order");
        self.len += 1;
        self.words += key.words();
        if let (Some(chunk), Some(bound)) = (self.chunks.last_mut(), self.bounds.last_mut())
            && chunk.len() < FILL_KEYS
        {
            chunk.push(key);
            *bound = position;
            return;
        }
        self.grow_outer();
        let mut chunk = Vec::with_capacity(CHUNK_CAPACITY);
        chunk.push(key);
        self.chunks.push(chunk);
        self.bounds.push(position);
    }

    /// Returns the last key.
    #[inline]
    pub(crate) fn last(&self) -> Option<&Key> {
        self.chunks.last()?.last()
    }

    /// Replaces the last key by `key`, which has as many words.
    pub(crate) fn replace_last(&mut self, key: Key) {
        let last = self.chunks.last_mut().and_then(|chunk| chunk.last_mut()).expect("there is a last key");
        assert!(last.position() <= key.position() && last.words() == key.words(), "the last key grows");
        *last = key;
        *self.bounds.last_mut().expect("each chunk has a bound") = key.position();
    }

    /// Makes room for one more chunk. The outer vectors grow by an explicit rule, so that their
    /// growth is predictable.
    fn grow_outer(&mut self) {
        let room = outer_room(self.chunks.len() + 1);
        if self.chunks.len() == self.chunks.capacity() {
            self.chunks.reserve_exact(room - self.chunks.len());
        }
        if self.bounds.len() == self.bounds.capacity() {
            self.bounds.reserve_exact(room - self.bounds.len());
        }
    }

    /// Number of keys.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Words that all keys take on disk.
    pub(crate) fn words(&self) -> usize {
        self.words
    }

    /// Memory held, in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.chunks.len() * CHUNK_BYTES
            + self.chunks.capacity() * size_of::<Vec<Key>>()
            + self.bounds.capacity() * size_of::<Position>()
    }

    /// The most that `splices` splices can add to the memory held, in bytes: a chunk each, and
    /// longer outer vectors.
    pub(crate) fn growth_bytes_max(&self, splices: usize) -> usize {
        let chunks = self.chunks.len() + splices;
        // Outer vectors grow only when they are full.
        let longer = |capacity: usize| match chunks <= capacity {
            true => 0,
            false => outer_room(chunks).saturating_sub(capacity),
        };
        splices * CHUNK_BYTES
            + longer(self.chunks.capacity()) * size_of::<Vec<Key>>()
            + longer(self.bounds.capacity()) * size_of::<Position>()
    }

    /// An upper bound of [`SortedKeys::growth_bytes_max`] that is cheaper to compute.
    pub(crate) fn growth_bytes_bound(&self, splices: usize) -> usize {
        let chunks = self.chunks.len() + splices;
        splices * CHUNK_BYTES + (chunks + chunks / 2 + OUTER_STEP) * OUTER_BYTES
    }

    /// Returns the place in front of the first key whose position is greater than `position`.
    pub(crate) fn after(&self, position: Position) -> KeyCursor {
        let chunk = count_upto(&self.bounds, position, |bound| *bound);
        let index = self.chunks.get(chunk).map_or(0, |keys| count_upto(keys, position, Key::position));
        KeyCursor { chunk, index }
    }

    /// As [`after`](Self::after), with a guess at the result.
    #[inline]
    pub(crate) fn after_near(&self, guess: KeyCursor, position: Position) -> KeyCursor {
        if self.is_after(guess, position) { guess } else { self.after(position) }
    }

    /// Returns whether `place` is in front of the first key whose position is greater than
    /// `position`.
    #[inline]
    fn is_after(&self, place: KeyCursor, position: Position) -> bool {
        let chunk = self.chunks.get(place.chunk).map_or(&[][..], Vec::as_slice);
        let before = match (place.index.checked_sub(1), place.chunk.checked_sub(1)) {
            (Some(index), _) => chunk.get(index).map(Key::position),
            (None, Some(chunk)) => self.bounds.get(chunk).copied(),
            (None, None) => None,
        };
        before.is_none_or(|before| before <= position)
            && chunk.get(place.index).is_some_and(|behind| behind.position() > position)
    }

    /// Returns the place in front of the first key whose position is `position` or greater.
    pub(crate) fn at(&self, position: Position) -> KeyCursor {
        let chunk = self.bounds.partition_point(|bound| *bound < position);
        let index =
            self.chunks.get(chunk).map_or(0, |keys| keys.partition_point(|key| key.position() < position));
        KeyCursor { chunk, index }
    }

    /// Returns the key behind `place`.
    #[inline]
    pub(crate) fn get(&self, place: KeyCursor) -> Option<&Key> {
        self.chunks.get(place.chunk)?.get(place.index)
    }

    /// Returns how many keys are in front of `place`.
    pub(crate) fn keys_before(&self, place: KeyCursor) -> usize {
        self.chunks[..place.chunk].iter().map(Vec::len).sum::<usize>() + place.index
    }

    /// Moves one key towards the front; `None` at the front.
    #[inline]
    pub(crate) fn before(&self, place: KeyCursor) -> Option<KeyCursor> {
        if place.index > 0 {
            return Some(KeyCursor { index: place.index - 1, ..place });
        }
        let chunk = place.chunk.checked_sub(1)?;
        Some(KeyCursor { chunk, index: self.chunks[chunk].len() - 1 })
    }

    /// Moves one key towards the end. There must be a key behind `place`.
    #[inline]
    pub(crate) fn next(&self, place: KeyCursor) -> KeyCursor {
        if place.index + 1 < self.chunks[place.chunk].len() {
            return KeyCursor { index: place.index + 1, ..place };
        }
        KeyCursor { chunk: place.chunk + 1, index: 0 }
    }

    /// Returns all keys behind `place`, in order.
    #[inline]
    pub(crate) fn iter_from(&self, place: KeyCursor) -> impl Iterator<Item = &Key> + Clone {
        let (first, rest) = match self.chunks.get(place.chunk..) {
            Some([first, rest @ ..]) => (&first[place.index..], rest),
            _ => (&[][..], &[][..]),
        };
        first.iter().chain(rest.iter().flatten())
    }

    /// Returns at most the first `count` keys behind `place`, in order, in the runs in which they
    /// lie in memory.
    #[inline]
    pub(crate) fn runs_from(&self, place: KeyCursor, count: usize) -> impl Iterator<Item = &[Key]> {
        let (mut skip, mut left) = (place.index, count);
        let chunks = self.chunks.get(place.chunk..).unwrap_or_default().iter();
        let runs = chunks.map(move |chunk| {
            let run = &chunk[skip..];
            let run = &run[..run.len().min(left)];
            (skip, left) = (0, left - run.len());
            run
        });
        runs.take_while(|run| !run.is_empty())
    }

    /// Returns all keys, in order, in the runs in which they lie in memory.
    pub(crate) fn runs(&self) -> impl Iterator<Item = &[Key]> {
        self.chunks.iter().map(Vec::as_slice)
    }

    /// Returns all keys, in order.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &Key> + Clone {
        self.chunks.iter().flatten()
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Keeps the keys for which `keep` returns true.
    pub(crate) fn retain(&mut self, keep: &mut dyn FnMut(&Key) -> bool) {
        let before = self.len;
        for chunk in &mut self.chunks {
            chunk.retain(&mut *keep);
        }
        self.len = self.chunks.iter().map(Vec::len).sum();
        if self.len != before {
            *self = Self::from_sorted(core::mem::take(&mut self.chunks).into_iter().flatten());
        }
    }
}

/// Counts the elements of the ordered `list` at `position` or before it.
#[inline]
fn count_upto<T>(list: &[T], position: Position, of: impl Fn(&T) -> Position) -> usize {
    let [body @ .., last] = list else { return 0 };
    let is_here = |one: Option<&T>| one.is_some_and(|one| of(one).inode == position.inode);
    if !is_here(body.first()) || !is_here(body.last()) {
        return list.partition_point(|one| of(one) <= position);
    }
    // Fast path: nearly always all are of one volume, except for the very last child. Then
    // comparing offsets is enough.
    let count = body.partition_point(|one| of(one).offset <= position.offset);
    if count < body.len() { count } else { count + usize::from(of(last) <= position) }
}

#[cfg(test)]
mod tests;
