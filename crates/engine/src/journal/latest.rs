//! Merges a run of the journal: keeps only the last key for each extent, in key order. So replay
//! visits each leaf once, instead of once for each key.

use crate::cpu_cost::{MERGE_MAX, MERGE_NS};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use bcached_env::Env;
use bcached_format::{Key, Position};
use core::ops::Bound;

/// The last key for each extent with the number of its entry, indexed by where it ends.
#[derive(Default)]
pub struct LatestKeys {
    keys: BTreeMap<Position, (u64, Key)>,
}

impl LatestKeys {
    /// Merges `keys`, which are in journal order. Yields between pieces.
    pub async fn of(env: &Env, keys: &[(u64, Key)]) -> Self {
        let mut latest = Self::default();
        for (sequence, key) in keys {
            // A long key may make many older ones void.
            while latest.make_room(key) {
                env.charge(MERGE_NS * MERGE_MAX as u64);
                env.breathe().await;
            }
            latest.keys.insert(key.position(), (*sequence, *key));
            env.charge(MERGE_NS);
            env.breathe().await;
        }
        latest
    }

    /// Removes what older keys say about the range of a newer one. Returns true if there may be
    /// more to remove.
    fn make_room(&mut self, key: &Key) -> bool {
        let hit = self.under(key);
        for end in &hit {
            let Some((since, old)) = self.keys.remove(end) else { continue };
            for part in rest_of(&old, key) {
                self.keys.insert(part.position(), (since, part));
            }
        }
        hit.len() == MERGE_MAX
    }

    /// The ends of the keys that overlap the range of `key`, at most as many as are removed in one
    /// piece.
    #[must_use]
    pub fn under(&self, key: &Key) -> Vec<Position> {
        let is_hit = |(_, old): &&(u64, Key)| old.inode == key.inode && old.start() < key.end;
        let hit = self.behind(key.start_position()).take_while(is_hit).take(MERGE_MAX);
        hit.map(|(_, old)| old.position()).collect()
    }

    /// The keys that end behind `at`.
    pub fn behind(&self, at: Position) -> impl Iterator<Item = &(u64, Key)> {
        self.keys.range((Bound::Excluded(at), Bound::Unbounded)).map(|(_, found)| found)
    }

    /// The key that ends at `end`.
    #[must_use]
    pub fn get(&self, end: Position) -> Option<(u64, Key)> {
        self.keys.get(&end).copied()
    }

    /// Removes and returns the key that ends at `end`.
    pub fn take(&mut self, end: Position) -> Option<(u64, Key)> {
        self.keys.remove(&end)
    }

    /// Adds a key, or replaces the one that ends at the same position by what is left of it.
    pub fn replace(&mut self, (sequence, key): (u64, Key)) {
        self.keys.insert(key.position(), (sequence, key));
    }

    /// Number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns true if there are no keys.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Removes and returns the next key in key order.
    pub fn next(&mut self) -> Option<(u64, Key)> {
        self.keys.pop_first().map(|(_, found)| found)
    }

    /// The start of the first key that begins at or behind `at`.
    pub fn start_from(&self, at: Position) -> Option<Position> {
        // A key that begins before `at` may end behind it.
        self.keys.range(at..).map(|(_, (_, key))| key.start_position()).find(|start| *start >= at)
    }
}

/// The parts of `old` that `other` does not cover.
pub fn rest_of(old: &Key, other: &Key) -> impl Iterator<Item = Key> {
    [old.cut(old.start(), other.start()), old.cut(other.end, old.end)].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_env::rng::Rng;
    use bcached_format::{DeviceIndex, Gen, Inode, Pointer, Pointers};

    /// Every sector ends up with the same key whether all keys are applied in journal order or the
    /// merged ones in key order.
    #[test]
    fn the_last_key_of_each_place_is_left_and_cut() {
        const SECTORS: u64 = 200;
        let mut rng = Rng::new(3);
        for _ in 0..200 {
            let (mut latest, mut wanted) = (LatestKeys::default(), BTreeMap::new());
            for sequence in 1..60 {
                let (start, size) = (rng.below(SECTORS), 1 + rng.below(20));
                let inode = Inode(u32::try_from(rng.below(2)).expect("small"));
                let hole = Key::hole(inode, start, start + size);
                let place = Pointer::new(DeviceIndex(0), 10_000 + sequence * 100, Gen(0));
                let key = match rng.one_in(4) {
                    true => hole,
                    false => Key { dirty: rng.one_in(2), pointers: Pointers::one(place), ..hole },
                };
                while latest.make_room(&key) {}
                latest.keys.insert(key.position(), (sequence, key));
                for sector in start..start + size {
                    let part = key.cut(sector, sector + 1).expect("inside");
                    wanted.insert((inode, sector), (sequence, part));
                }
            }
            let mut found = BTreeMap::new();
            let mut before = Position::ZERO;
            for (end, (sequence, key)) in &latest.keys {
                assert_eq!(*end, key.position());
                assert!(key.start_position() >= before, "they do not overlap");
                before = *end;
                for sector in key.start()..key.end {
                    let part = key.cut(sector, sector + 1).expect("inside");
                    found.insert((key.inode, sector), (*sequence, part));
                }
            }
            assert_eq!(found, wanted);
        }
    }
}
