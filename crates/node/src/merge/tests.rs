//! Tests the merge of many sets against its definition, set by set and key by key, and against a
//! table of sectors.

use super::*;
use crate::extents::Overlay;
use bcached_format::{DeviceIndex, Gen, Inode, Pointer, Pointers};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::vec;

impl KeySource for vec::IntoIter<Key> {
    fn next(&mut self, left: &mut usize) -> Option<Key> {
        *left = left.checked_sub(1)?;
        let key = Iterator::next(self);
        *left += usize::from(key.is_none());
        key
    }
}

/// Takes all of `keys`, in turns of `turn`.
fn in_turns(mut keys: impl KeySource, turn: usize) -> Vec<Key> {
    let mut list = Vec::new();
    loop {
        let mut left = turn;
        let before = list.len();
        while let Some(key) = keys.next(&mut left) {
            list.push(key);
        }
        if left > 0 {
            return list;
        }
        assert!(
            list.len() - before <= 2 * turn + 2,
            "a turn gives no more than it takes, and a part of each"
        );
    }
}

/// Takes all of `keys`.
pub(crate) fn all(keys: impl KeySource) -> Vec<Key> {
    in_turns(keys, usize::MAX)
}

/// Overlays one set over another by the definition: each older key without what the newer ones
/// cover.
fn pairwise(older: &[Key], newer: &[Key]) -> Vec<Key> {
    let mut list = newer.to_vec();
    for old in older {
        let mut rest = Some(*old);
        for new in newer.iter().filter(|new| new.inode == old.inode) {
            let Some(key) = rest else { break };
            list.extend(key.cut(0, new.start()));
            rest = key.cut(new.end.max(key.start()), u64::MAX);
        }
        list.extend(rest);
    }
    list.sort_by_key(Key::position);
    list
}

/// The keys of one set: gaps, lengths, and whether a key is a hole.
fn set() -> impl Strategy<Value = Vec<(u64, u16, bool)>> {
    let gap = prop_oneof![4 => 0..4_u64, 2 => 0..40_u64, 1 => 100..400_u64];
    let size = prop_oneof![4 => 1..9_u16, 1 => 1..200_u16];
    prop::collection::vec((gap, size, prop::bool::weighted(0.2)), 0..30)
}

/// The keys of some sets in two volumes, oldest first. Each set's data sectors are distinct from
/// those of the others.
fn keys_of(sets: &[Vec<(u64, u16, bool)>]) -> Vec<Vec<Key>> {
    let keys_of_set = |(number, set): (usize, &Vec<(u64, u16, bool)>)| {
        let mut end = 0;
        let mut keys = Vec::new();
        for (index, (gap, size, is_hole)) in set.iter().enumerate() {
            let inode = Inode(u32::from(index > set.len() * 2 / 3));
            if keys.last().is_some_and(|key: &Key| key.inode != inode) {
                end = 0;
            }
            end += gap + u64::from(*size);
            let pointer =
                Pointer::new(DeviceIndex(0), (number as u64) << 20 | (end - u64::from(*size)), Gen(1));
            let pointers = if *is_hole { Pointers::NONE } else { Pointers::one(pointer) };
            keys.push(Key { inode, size: *size, dirty: number % 2 == 0, end, pointers });
        }
        keys
    };
    sets.iter().enumerate().map(keys_of_set).collect()
}

proptest! {
    #[test]
    fn many_sets_are_what_each_over_the_one_before_is(
        sets in prop::collection::vec(set(), 1..20),
        turn in prop_oneof![1..5_usize, 1..100_usize, Just(usize::MAX)],
    ) {
        let sets = keys_of(&sets);
        let wanted = sets.iter().fold(Vec::new(), |older, newer| pairwise(&older, newer));
        let sources = || sets.iter().map(|set| set.clone().into_iter());
        prop_assert_eq!(&in_turns(ExtentMerge::new(sources()), turn), &wanted);
        let mut rest = sources();
        let first = rest.next().expect("one at least");
        prop_assert_eq!(&in_turns(Overlay::new(first, ExtentMerge::new(rest)), turn), &wanted);

        let mut sectors = BTreeMap::new();
        for key in sets.iter().flatten() {
            (key.start()..key.end).for_each(|sector| {
                sectors.insert((key.inode, sector), key.cut(sector, sector + 1));
            });
        }
        let said: Vec<_> = wanted
            .iter()
            .flat_map(|key| (key.start()..key.end).map(|sector| ((key.inode, sector), key.cut(sector, sector + 1))))
            .collect();
        prop_assert_eq!(said, sectors.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn children_come_in_order_and_the_newest_of_one_place_first(
        sets in prop::collection::vec(prop::collection::vec(0..20_u64, 0..20), 1..20),
        turn in 1..100_usize,
    ) {
        let key = |end, set: usize, index: usize| {
            let pointers = Pointers::one(Pointer::new(DeviceIndex(0), (set << 20 | index) as u64, Gen(1)));
            Key { inode: Inode(0), size: 8, dirty: false, end, pointers }
        };
        let mut keys: Vec<Vec<Key>> = Vec::new();
        for (number, mut set) in sets.into_iter().enumerate() {
            set.sort_unstable();
            keys.push(set.iter().enumerate().map(|(index, end)| key(*end, number, index)).collect());
        }
        // The expected order is a stable sort of all keys, the newest set's first.
        let mut wanted: Vec<Key> = keys.iter().rev().flatten().copied().collect();
        wanted.sort_by_key(Key::position);
        prop_assert_eq!(in_turns(ChildMerge::new(keys.into_iter().map(Vec::into_iter)), turn), wanted);
    }
}
