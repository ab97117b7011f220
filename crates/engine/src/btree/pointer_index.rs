//! Maps the word of a node's pointer to its slot in the cache. It is looked up at each node on the
//! way to a leaf.
//!
//! The table uses open addressing and is at most half full. Words are scattered by a multiplication
//! that is the same in each run. They name buckets, so no outside party chooses them, and an
//! unlucky set of words costs only time.

use alloc::vec;
use alloc::vec::Vec;

/// Marks an empty entry of the table.
const NOBODY: u32 = u32::MAX;
/// Entries of the smallest table.
const PLACES_MIN: usize = 16;

#[derive(Clone, Copy)]
struct IndexEntry {
    word: u64,
    slot: u32,
}

/// The index; see the head of this file.
pub struct PointerIndex {
    /// Its length is a power of two.
    table: Vec<IndexEntry>,
    len: usize,
}

impl Default for PointerIndex {
    fn default() -> Self {
        Self { table: vec![IndexEntry { word: 0, slot: NOBODY }; PLACES_MIN], len: 0 }
    }
}

impl PointerIndex {
    /// Returns the number of nodes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns where the search for a word begins.
    #[inline]
    fn home(&self, word: u64) -> usize {
        // The upper bits of the product depend on the whole word.
        let scattered = word.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        usize::try_from(scattered).expect("32 bits fit into usize") & (self.table.len() - 1)
    }

    /// Returns where a word is, or would be.
    #[inline]
    fn place(&self, word: u64) -> usize {
        let mut at = self.home(word);
        while self.table[at].slot != NOBODY && self.table[at].word != word {
            at = (at + 1) & (self.table.len() - 1);
        }
        at
    }

    /// Returns the slot of a node.
    #[inline]
    #[must_use]
    pub fn get(&self, word: u64) -> Option<usize> {
        let slot = self.table[self.place(word)].slot;
        (slot != NOBODY).then_some(slot as usize)
    }

    /// Adds a node.
    ///
    /// # Panics
    /// If the node is already there, or there are 2^32 nodes.
    pub fn insert(&mut self, word: u64, slot: usize) {
        if 2 * (self.len + 1) > self.table.len() {
            self.grow();
        }
        let place = self.place(word);
        assert!(self.table[place].slot == NOBODY, "a node is in memory once");
        let slot = u32::try_from(slot).ok().filter(|slot| *slot != NOBODY);
        self.table[place] = IndexEntry { word, slot: slot.expect("nodes fit in memory") };
        self.len += 1;
    }

    /// Removes a node, if it is there.
    pub fn remove(&mut self, word: u64) {
        let last = self.table.len() - 1;
        let mut hole = self.place(word);
        if self.table[hole].slot == NOBODY {
            return;
        }
        self.len -= 1;
        // Later entries move up, unless an entry would land in front of its home.
        let mut at = hole;
        loop {
            at = (at + 1) & last;
            let entry = self.table[at];
            if entry.slot == NOBODY {
                break;
            }
            let home = self.home(entry.word);
            if at.wrapping_sub(home) & last >= at.wrapping_sub(hole) & last {
                self.table[hole] = entry;
                hole = at;
            }
        }
        self.table[hole].slot = NOBODY;
    }

    fn grow(&mut self) {
        let larger = vec![IndexEntry { word: 0, slot: NOBODY }; 2 * self.table.len()];
        for entry in core::mem::replace(&mut self.table, larger) {
            if entry.slot != NOBODY {
                let place = self.place(entry.word);
                self.table[place] = entry;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;
    use bcached_env::rng::Rng;

    /// After any sequence of inserts and removals, also of words with the same home, the index
    /// agrees with a map.
    #[test]
    fn it_is_a_map() {
        let mut rng = Rng::new(1);
        let (mut table, mut map) = (PointerIndex::default(), BTreeMap::new());
        for step in 0..20_000 {
            // Few words, with few different homes.
            let word = rng.below(64) << (32 * rng.below(2));
            if rng.below(2) == 0 {
                table.remove(word);
                map.remove(&word);
            } else if let alloc::collections::btree_map::Entry::Vacant(vacant) = map.entry(word) {
                table.insert(word, step);
                vacant.insert(step);
            }
            assert_eq!(table.len(), map.len());
            for word in (0..64).flat_map(|low| [low, low << 32]) {
                assert_eq!(table.get(word), map.get(&word).copied(), "{word:x} at step {step}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "in memory once")]
    fn a_node_is_entered_once() {
        let mut table = PointerIndex::default();
        table.insert(0, 1);
        table.insert(0, 2);
    }
}
