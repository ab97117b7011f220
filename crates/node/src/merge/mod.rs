//! Merges many sets into one sequence of keys, in a single pass over their bytes.
//!
//! A leaf of random writes has a large first set and a dozen small ones over it. So a [`Queue`]
//! merges the small ones among themselves, and the result overlays the first set
//! ([`Overlay`](crate::extents::Overlay)), whose keys then cost one comparison each. There are no
//! intermediate lists of keys: with several nodes read in turns, the lists would evict each other
//! from the processor's cache.
//!
//! A key that is cut, or covered by newer ones, also counts against the limit of keys per turn: see
//! [`KeySource`].

use alloc::vec::Vec;

use bcached_format::key_list::KeyIter;
use bcached_format::{Key, Position};

/// An ordered source of keys that is consumed in turns of limited length.
pub(crate) trait KeySource {
    /// Returns the next key. `left` decreases by one for each key taken out of a set, and for each
    /// cut. When it is zero, `None` does not mean the end, and the state is kept for the next turn.
    /// `None` with some `left` is the end.
    fn next(&mut self, left: &mut usize) -> Option<Key>;
}

/// The keys of one set, without those of size zero, which mean nothing.
pub(crate) struct SetKeys<'a> {
    iter: KeyIter<'a>,
}

impl<'a> SetKeys<'a> {
    /// Creates a source of the remaining keys of a checked set.
    pub(crate) const fn new(iter: KeyIter<'a>) -> Self {
        Self { iter }
    }
}

impl KeySource for SetKeys<'_> {
    #[inline]
    fn next(&mut self, left: &mut usize) -> Option<Key> {
        while *left > 0 {
            let key = self.iter.next()?;
            *left -= 1;
            if key.size > 0 {
                return Some(key);
            }
        }
        None
    }
}

/// Several sets, and the current key of each.
///
/// The keys of each set are in order: extents by their starts, children by their positions.
struct MergeInputs<S, const EXTENTS: bool> {
    /// The newest first.
    sets: Vec<MergeInput<S>>,
    queue: Queue,
}

struct MergeInput<S> {
    keys: S,
    /// What is left of the set's current key. Valid if the queue has a position for the set.
    key: Key,
    /// The key after it, if it was taken already.
    behind: Option<Key>,
}

impl<S: KeySource, const EXTENTS: bool> MergeInputs<S, EXTENTS> {
    /// `sets` are ordered oldest first.
    fn new(sets: impl DoubleEndedIterator<Item = S>) -> Self {
        let sets: Vec<MergeInput<S>> =
            sets.rev().map(|keys| MergeInput { keys, key: Key::default(), behind: None }).collect();
        Self { queue: Queue::new(sets.len()), sets }
    }

    /// Returns the set whose current key comes first, and that key. Of several sets at one position
    /// it is the newest. Takes the keys that are due before. `None` has the meaning given in
    /// [`KeySource::next`].
    #[inline]
    fn first(&mut self, left: &mut usize) -> Option<(usize, Key)> {
        loop {
            match self.queue.first() {
                QueueFront::None => return None,
                QueueFront::Due(_) if *left == 0 => return None,
                QueueFront::Due(index) => self.advance(index, left),
                QueueFront::Known(index) => return Some((index, self.sets[index].key)),
            }
        }
    }

    /// Advances the set with this index to its next key.
    #[inline]
    fn advance(&mut self, index: usize, left: &mut usize) {
        let set = &mut self.sets[index];
        match set.behind.take().or_else(|| set.keys.next(left)) {
            Some(key) => self.stand_at(index, key),
            None if *left == 0 => self.queue.make_due(index),
            None => {
                // Counted, so that a turn in which many sets end is no longer than others.
                *left -= 1;
                self.queue.end(index);
            }
        }
    }

    /// Makes `key` the current key of the set.
    #[inline]
    fn stand_at(&mut self, index: usize, key: Key) {
        self.sets[index].key = key;
        self.queue.put(index, if EXTENTS { key.start_position() } else { key.position() });
    }

    /// Moves a set that has already advanced back to `key`, a part of the key before.
    fn go_back(&mut self, index: usize, key: Key) {
        if self.queue.is_known(index) {
            let set = &mut self.sets[index];
            debug_assert!(set.behind.is_none(), "the set has advanced by one key only");
            set.behind = Some(set.key);
        }
        self.stand_at(index, key);
    }
}

/// The merged content of the sets of a leaf: each sector has what the newest set with a key there
/// says. Each key is cut into as few parts as the newer ones allow.
pub(crate) struct ExtentMerge<S> {
    sets: MergeInputs<S, true>,
    /// The next key to return, unless something newer begins inside it, and its set, which has
    /// already advanced.
    held: Option<(usize, Key)>,
}

impl<S: KeySource> ExtentMerge<S> {
    /// `sets` are ordered oldest first; the keys of each are in order and free of overlap.
    pub(crate) fn new(sets: impl DoubleEndedIterator<Item = S>) -> Self {
        Self { sets: MergeInputs::new(sets), held: None }
    }
}

impl<S: KeySource> KeySource for ExtentMerge<S> {
    #[inline]
    fn next(&mut self, left: &mut usize) -> Option<Key> {
        loop {
            let Some((index, key)) = self.sets.first(left) else {
                // Only at the end is it certain that nothing newer begins inside the last key.
                return if *left > 0 { self.held.take().map(|(_, key)| key) } else { None };
            };
            let Some((holder, held)) = self.held else {
                self.held = Some((index, key));
                self.sets.advance(index, left);
                continue;
            };
            if key.start_position() >= held.position() {
                self.held = Some((index, key));
                self.sets.advance(index, left);
                return Some(held);
            }
            // The two overlap, and come from different sets.
            *left = left.saturating_sub(1);
            if index > holder {
                match key.cut(held.end, u64::MAX) {
                    Some(behind) => self.sets.stand_at(index, behind),
                    None => self.sets.advance(index, left),
                }
                continue;
            }
            let behind = held.cut(key.start(), u64::MAX).expect("the newer key begins inside the older one");
            self.sets.go_back(holder, behind);
            self.held = None;
            if let Some(front) = held.cut(0, key.start()) {
                return Some(front);
            }
        }
    }
}

/// The keys of interior sets in position order; at equal positions the newer key comes first.
pub(crate) struct ChildMerge<S>(MergeInputs<S, false>);

impl<S: KeySource> ChildMerge<S> {
    /// `sets` are ordered oldest first.
    pub(crate) fn new(sets: impl DoubleEndedIterator<Item = S>) -> Self {
        Self(MergeInputs::new(sets))
    }
}

impl<S: KeySource> KeySource for ChildMerge<S> {
    fn next(&mut self, left: &mut usize) -> Option<Key> {
        let (index, key) = self.0.first(left)?;
        self.0.advance(index, left);
        Some(key)
    }
}

/// A tournament tree that finds the set whose current key comes first. A set that advances is
/// compared with one other at each of a logarithmic number of levels. A comparison is between
/// single numbers, so that no branch depends on the outcome.
///
/// ```text
///   bit 127: ended        bit 126: at a key, else one is due
///   bits 16-98: position  bits 0-15: index of the set
/// ```
struct Queue {
    /// `[1]` is the overall winner, `[i]` the winner of `[2 i]` and `[2 i + 1]`; the last half are
    /// the sets.
    winners: Vec<u128>,
}

const ENDED: u128 = 1 << 127;
const KNOWN: u128 = 1 << 126;
const OFFSET_SHIFT: u32 = 16;
const INODE_SHIFT: u32 = OFFSET_SHIFT + 63;
const INDEX_MASK: u128 = (1 << OFFSET_SHIFT) - 1;

const _: () = assert!(Position::MAX.offset < 1 << 63 && Position::MAX.inode.0 < 1 << 20);

/// The front of a [`Queue`].
enum QueueFront {
    /// All sets have ended.
    None,
    /// This set's next key must be taken.
    Due(usize),
    /// This set has the first key.
    Known(usize),
}

impl Queue {
    /// Creates a queue of `sets` sets, of each of which a key is due.
    fn new(sets: usize) -> Self {
        assert!(sets as u128 <= INDEX_MASK, "a node has fewer sets than sectors");
        let mut queue = Self { winners: alloc::vec![ENDED; 2 * sets.max(1)] };
        (0..sets).for_each(|index| queue.make_due(index));
        queue
    }

    #[inline]
    fn first(&self) -> QueueFront {
        let first = self.winners[1];
        let index = (first & INDEX_MASK) as usize;
        match first {
            ENDED.. => QueueFront::None,
            KNOWN.. => QueueFront::Known(index),
            _ => QueueFront::Due(index),
        }
    }

    fn is_known(&self, index: usize) -> bool {
        (KNOWN..ENDED).contains(&self.winners[self.winners.len() / 2 + index])
    }

    fn make_due(&mut self, index: usize) {
        self.set(index, 0);
    }

    fn end(&mut self, index: usize) {
        self.set(index, ENDED);
    }

    #[inline]
    fn put(&mut self, index: usize, place: Position) {
        let place = u128::from(place.inode.0) << INODE_SHIFT | u128::from(place.offset) << OFFSET_SHIFT;
        self.set(index, KNOWN | place);
    }

    #[inline]
    fn set(&mut self, index: usize, value: u128) {
        let mut winner = value | index as u128;
        let mut at = self.winners.len() / 2 + index;
        self.winners[at] = winner;
        while at > 1 {
            winner = winner.min(self.winners[at ^ 1]);
            at /= 2;
            self.winners[at] = winner;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
