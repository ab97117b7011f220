//! What a stretch of the journal comes to: of each place the last that was said of it, in the order of the places. So a replay comes to
//! each leaf once, and not once for each of its keys.

use crate::cpu_cost::{MERGE_MAX, MERGE_NS};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use bcached_env::Env;
use bcached_format::{Key, Position};
use core::ops::Bound;

/// Of each place the last key, with the number of its entry, by where it ends.
#[derive(Default)]
pub struct Latest {
    keys: BTreeMap<Position, (u64, Key)>,
}

impl Latest {
    /// What `keys`, which are in the order in which they came, come to. Others run between the pieces of it.
    pub async fn of(env: &Env, keys: &[(u64, Key)]) -> Self {
        let mut latest = Self::default();
        for (sequence, key) in keys {
            // A long key may make many void.
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

    /// Takes away what is said of the range of a later key. True: there may be more.
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

    /// Where those end that say something of the range of a key, as many as are taken away in one piece.
    #[must_use]
    pub fn under(&self, key: &Key) -> Vec<Position> {
        let is_hit = |(_, old): &&(u64, Key)| old.inode == key.inode && old.start() < key.end;
        let hit = self.behind(key.start_position()).take_while(is_hit).take(MERGE_MAX);
        hit.map(|(_, old)| old.position()).collect()
    }

    /// Those that end behind `at`.
    pub fn behind(&self, at: Position) -> impl Iterator<Item = &(u64, Key)> {
        self.keys.range((Bound::Excluded(at), Bound::Unbounded)).map(|(_, found)| found)
    }

    /// The one that ends at `end`.
    #[must_use]
    pub fn get(&self, end: Position) -> Option<(u64, Key)> {
        self.keys.get(&end).copied()
    }

    /// Takes that one away.
    pub fn take(&mut self, end: Position) -> Option<(u64, Key)> {
        self.keys.remove(&end)
    }

    /// Adds a key, or what is left of the one that ends there.
    pub fn replace(&mut self, (sequence, key): (u64, Key)) {
        self.keys.insert(key.position(), (sequence, key));
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// There are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The next key in the order of the places, which is not there any more.
    pub fn next(&mut self) -> Option<(u64, Key)> {
        self.keys.pop_first().map(|(_, found)| found)
    }

    /// Where the first key begins that does so at `at` or behind it.
    pub fn start_from(&self, at: Position) -> Option<Position> {
        // One that begins before may end behind it.
        self.keys.range(at..).map(|(_, (_, key))| key.start_position()).find(|start| *start >= at)
    }
}

/// What an `old` key still says when there is another one.
pub fn rest_of(old: &Key, other: &Key) -> impl Iterator<Item = Key> {
    [old.cut(old.start(), other.start()), old.cut(other.end, old.end)].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_env::rng::Rng;
    use bcached_format::{DeviceIndex, Gen, Inode, Pointer, Pointers};

    /// What stands at each sector after all keys have been put in their order, and after those that are left have, in theirs.
    #[test]
    fn the_last_key_of_each_place_is_left_and_cut() {
        const SECTORS: u64 = 200;
        let mut rng = Rng::new(3);
        for _ in 0..200 {
            let (mut latest, mut wanted) = (Latest::default(), BTreeMap::new());
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
