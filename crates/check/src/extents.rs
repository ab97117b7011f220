//! The content of a part of the key space: extents that do not overlap, because newer ones replace
//! older ones.
//!
//! There is one rule of overlap, for the sets of a leaf and for the replay of a journal: a newer
//! key replaces the part of older keys that it covers, and leaves the rest. Holes and stale keys
//! take part, because they hide what is below them.

use bcached_format::{Inode, Key, Position};
use std::collections::BTreeMap;

/// Extents, indexed by their start.
#[derive(Debug, Default)]
pub(crate) struct ExtentMap(BTreeMap<Position, Key>);

impl ExtentMap {
    /// Lays `key` over everything that is already in the map. A key of size zero means nothing.
    pub fn insert(&mut self, key: Key) {
        if key.size == 0 {
            return;
        }
        let (start, end) = (key.start_position(), key.position());
        // Only the nearest preceding extent can reach into the key, and it may even extend beyond
        // it.
        if let Some((at, older)) = self.0.range(..start).next_back() {
            let (at, older) = (*at, *older);
            if older.inode == key.inode && older.end > start.offset {
                self.0.remove(&at);
                self.put(older.cut(older.start(), start.offset));
                self.put(older.cut(end.offset, older.end));
            }
        }
        let covered: Vec<Position> = self.0.range(start..end).map(|(at, _)| *at).collect();
        for at in covered {
            let older = self.0.remove(&at);
            self.put(older.and_then(|older| older.cut(end.offset, older.end)));
        }
        self.0.insert(start, key);
    }

    fn put(&mut self, part: Option<Key>) {
        if let Some(part) = part {
            self.0.insert(part.start_position(), part);
        }
    }

    /// Returns all extents in order.
    pub fn iter(&self) -> impl Iterator<Item = &Key> {
        self.0.values()
    }

    /// Returns the extents in `[low, high)`, cut to that range.
    pub fn within(&self, low: Position, high: Position) -> impl Iterator<Item = Key> + '_ {
        let first = self.0.range(..low).next_back().map(|(_, key)| key);
        let rest = self.0.range(low..).map(|(_, key)| key).take_while(move |key| key.start_position() < high);
        first.into_iter().chain(rest).filter_map(move |key| {
            let start = if key.inode == low.inode { low.offset } else { 0 };
            let end = if key.inode == high.inode { high.offset } else { u64::MAX };
            if key.inode < low.inode { None } else { key.cut(start, end) }
        })
    }

    /// Returns the extents in `[start, end)` of one volume, cut to that range.
    pub fn of_volume(&self, inode: Inode, start: u64, end: u64) -> impl Iterator<Item = Key> + '_ {
        self.within(Position::new(inode, start), Position::new(inode, end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bcached_format::{DeviceIndex, Gen, Pointer, Pointers};

    fn key(start: u64, end: u64, sector: u64) -> Key {
        let pointers = Pointers::one(Pointer::new(DeviceIndex(0), sector, Gen(0)));
        let size = u16::try_from(end - start).expect("small");
        Key { inode: Inode(1), size, dirty: false, end, pointers }
    }

    fn parts(map: &ExtentMap) -> Vec<(u64, u64, u64)> {
        map.iter().map(|key| (key.start(), key.end, key.pointers.as_slice()[0].sector())).collect()
    }

    #[test]
    fn a_newer_key_replaces_what_it_covers_and_leaves_the_rest() {
        let mut map = ExtentMap::default();
        map.insert(key(0, 100, 1000));
        map.insert(key(40, 60, 5000));
        assert_eq!(parts(&map), [(0, 40, 1000), (40, 60, 5000), (60, 100, 1060)]);
        map.insert(key(20, 70, 9000));
        assert_eq!(parts(&map), [(0, 20, 1000), (20, 70, 9000), (70, 100, 1070)]);
        map.insert(key(0, 200, 7000));
        assert_eq!(parts(&map), [(0, 200, 7000)]);
    }

    #[test]
    fn a_stretch_is_cut_on_both_sides_and_stays_within_its_volume() {
        let mut map = ExtentMap::default();
        map.insert(key(0, 100, 1000));
        map.insert(Key { inode: Inode(2), ..key(0, 100, 3000) });
        let seen: Vec<_> = map.of_volume(Inode(1), 10, 20).map(|key| (key.start(), key.end)).collect();
        assert_eq!(seen, [(10, 20)]);
        let low = Position::new(Inode(1), 90);
        let seen: Vec<_> = map
            .within(low, Position::new(Inode(2), 5))
            .map(|key| (key.inode.0, key.start(), key.end))
            .collect();
        assert_eq!(seen, [(1, 90, 100), (2, 0, 5)]);
    }

    /// Compares the map with a model that has one cell per sector.
    #[test]
    fn agrees_with_painting_sectors() {
        let mut map = ExtentMap::default();
        let mut cells = [None; 300];
        let mut state = 1_u64;
        for round in 0..2000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let start = (state >> 33) % 280;
            let length = 1 + (state >> 50) % 20;
            let sector = round * 1000;
            map.insert(key(start, start + length, sector));
            for at in start..start + length {
                cells[usize::try_from(at).expect("small")] = Some(sector + at - start);
            }
        }
        let mut found = [None; 300];
        for key in map.iter() {
            for at in key.start()..key.end {
                let sector = key.pointers.as_slice()[0].sector() + at - key.start();
                let cell = &mut found[usize::try_from(at).expect("small")];
                assert_eq!(cell.replace(sector), None, "extents overlap at {at}");
            }
        }
        assert_eq!(found, cells);
    }
}
