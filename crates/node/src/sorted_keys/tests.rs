//! Tests sorted keys against a plain vector.

use super::*;
use bcached_format::{Inode, Pointers};
use proptest::prelude::*;
use std::vec::Vec;

fn key(offset: u64) -> Key {
    Key { inode: Inode(0), size: 1, dirty: false, end: offset, pointers: Pointers::NONE }
}

fn check_invariants(keys: &SortedKeys) {
    assert_eq!(keys.bounds.len(), keys.chunks.len());
    for (bound, chunk) in keys.bounds.iter().zip(&keys.chunks) {
        assert_eq!(Some(*bound), chunk.last().map(Key::position), "a bound is the last position");
        assert!((1..=CHUNK_KEYS).contains(&chunk.len()), "{} keys in a chunk", chunk.len());
        assert_eq!(chunk.capacity(), CHUNK_CAPACITY, "a chunk keeps its first allocation");
    }
    for pair in keys.chunks.windows(2) {
        assert!(pair[0].len() + pair[1].len() > JOIN_KEYS, "small neighbours are joined");
    }
    assert_eq!(keys.len, keys.iter().count());
    assert_eq!(keys.words, keys.iter().map(Key::words).sum::<usize>());
    assert!(keys.memory_bytes() <= memory_bytes_max(keys.len));
}

#[derive(Clone, Debug)]
enum Change {
    /// From this index (scaled to the length), remove this many keys and put this many in their
    /// place.
    Splice(usize, usize, usize),
    Retain(u64),
}

fn step() -> impl Strategy<Value = Change> {
    let splice = |removed: core::ops::Range<usize>| (0..10_000_usize, removed, 0..=SPLICE_KEYS);
    prop_oneof![
        20 => splice(0..3).prop_map(|(at, removed, new)| Change::Splice(at, removed, new)),
        2 => splice(0..200).prop_map(|(at, removed, new)| Change::Splice(at, removed, new)),
        1 => (2..40_u64).prop_map(Change::Retain),
    ]
}

/// Returns the place in front of the key with this index.
fn place(keys: &SortedKeys, index: usize) -> KeyCursor {
    let mut left = index;
    for (chunk, list) in keys.chunks.iter().enumerate() {
        if left < list.len() {
            return KeyCursor { chunk, index: left };
        }
        left -= list.len();
    }
    assert_eq!(left, 0);
    KeyCursor { chunk: keys.chunks.len(), index: 0 }
}

/// With keys of several volumes and perhaps one at the end of all, `after` agrees with a linear
/// scan, however many keys each volume has.
#[test]
fn a_place_is_found_among_keys_of_any_volumes() {
    let of = |inode: u32, offset: u64| Key { inode: Inode(inode), ..key(offset) };
    for counts in [[0, 0, 0], [1, 0, 0], [0, 200, 0], [3, 200, 1], [100, 1, 100], [1, 1, 1], [70, 64, 61]] {
        let volumes = counts.iter().zip(0..);
        let all = volumes.flat_map(|(count, inode)| (1..=*count).map(move |number| of(inode, 10 * number)));
        for has_last in [false, true] {
            let last = Key { inode: Position::MAX.inode, ..key(Position::MAX.offset) };
            let keys: Vec<Key> = all.clone().chain(has_last.then_some(last)).collect();
            let sorted = SortedKeys::from_sorted(keys.iter().copied());
            let offsets = [0, 1, 9, 10, 11, 615, 640, 999, 1000, 1999, 2000, 2001, u64::MAX];
            for position in (0..4).flat_map(|inode| offsets.map(|offset| Position::new(Inode(inode), offset)))
            {
                let wanted = keys.iter().filter(|key| key.position() <= position).count();
                assert_eq!(sorted.keys_before(sorted.after(position)), wanted, "{counts:?}, {position:?}");
            }
        }
    }
}

#[test]
fn the_bound_of_growth_is_one() {
    for count in [0, 1, 60, 61, 300, 5000] {
        let keys = SortedKeys::from_sorted((0..count).map(key));
        for splices in [1, 2, 3, 4, 40, 300] {
            assert!(keys.growth_bytes_bound(splices) >= keys.growth_bytes_max(splices), "{count}, {splices}");
        }
    }
}

#[test]
fn keys_can_be_appended_one_by_one() {
    let mut keys = SortedKeys::default();
    for index in 0..300 {
        keys.splice(keys.after(Position::MAX), 0, &[key(index)]);
        check_invariants(&keys);
    }
    assert_eq!(keys.iter().map(|key| key.end).collect::<Vec<_>>(), (0..300).collect::<Vec<_>>());
}

/// Three keys replace one key of a full chunk and half of the next. The full chunk is divided, and
/// the rest of the next, now two chunks further, must be joined with the small one behind it.
#[test]
fn a_splice_can_divide_a_chunk_and_shrink_the_next_but_one() {
    let sizes = |keys: &SortedKeys| keys.chunks.iter().map(Vec::len).collect::<Vec<_>>();
    let mut keys = SortedKeys::from_sorted((0..140).map(|index| key(index << 32)));
    for index in 0..4 {
        keys.splice(place(&keys, 1), 0, &[key(4 - index)]);
    }
    assert_eq!(sizes(&keys), [64, 60, 20]);
    let last = keys.chunks[0][63];
    keys.splice(place(&keys, 63), 31, &[last, last, last]);
    check_invariants(&keys);
    assert_eq!(sizes(&keys), [33, 33, 50]);
}

proptest! {
    #[test]
    fn sorted_keys_are_a_sorted_vector(start in 0..500_u64, steps in prop::collection::vec(step(), 1..300)) {
        let mut model: Vec<Key> = (0..start).map(|index| key(index << 32)).collect();
        let mut keys = SortedKeys::from_sorted(model.iter().copied());
        check_invariants(&keys);
        for step in steps {
            let (memory, growth) = (keys.memory_bytes(), keys.growth_bytes_max(1));
            match step {
                Change::Splice(at, removed, new) => {
                    let at = at % (model.len() + 1);
                    let removed = removed.min(model.len() - at);
                    // Between the neighbours, or equal to both where there is no room.
                    let low = at.checked_sub(1).map_or(0, |index| model[index].end);
                    let high = model.get(at + removed).map_or(low + (1 << 33), |key| key.end);
                    let new: Vec<Key> = (1..=new as u64).map(|i| key(low + (high - low) / 4 * i)).collect();
                    keys.splice(place(&keys, at), removed, &new);
                    model.splice(at..at + removed, new);
                }
                Change::Retain(modulus) => {
                    keys.retain(&mut |key| !key.end.is_multiple_of(modulus));
                    model.retain(|key| !key.end.is_multiple_of(modulus));
                }
            }
            check_invariants(&keys);
            check_invariants(&keys.clone());
            assert!(keys.memory_bytes() <= memory + growth, "a splice adds no more than was said");
            assert!(keys.clone().memory_bytes() <= memory_bytes_filled(keys.len));
            prop_assert_eq!(keys.iter().collect::<Vec<_>>(), model.iter().collect::<Vec<_>>());
        }
        for probe in model.iter().flat_map(|key| [key.end.saturating_sub(1), key.end, key.end + 1]) {
            let position = Position::new(Inode(0), probe);
            let rest = |from: usize| model[from..].iter().collect::<Vec<_>>();
            let from = model.partition_point(|key| key.end <= probe);
            let after = keys.after(position);
            prop_assert_eq!(keys.get(after), model.get(from));
            // Any guess works: a place beside the right one, one that no longer exists, or the
            // right one.
            let KeyCursor { chunk, index } = after;
            let beside = [(chunk, index + 1), (chunk + 1, 0), (chunk, CHUNK_KEYS), (0, 0), (keys.chunks.len(), 0)];
            let before = keys.before(after).map(|before| (before.chunk, before.index));
            for (chunk, index) in beside.into_iter().chain(before).chain([(chunk, index)]) {
                prop_assert_eq!(keys.after_near(KeyCursor { chunk, index }, position), after);
            }
            prop_assert_eq!(keys.iter_from(after).collect::<Vec<_>>(), rest(from));
            let at = model.partition_point(|key| key.end < probe);
            prop_assert_eq!(keys.get(keys.at(position)), model.get(at));
            prop_assert_eq!(keys.iter_from(keys.at(position)).collect::<Vec<_>>(), rest(at));
            let before = keys.before(keys.at(position)).and_then(|place| keys.get(place));
            prop_assert_eq!(before, at.checked_sub(1).map(|index| &model[index]));
            if at < model.len() {
                let next = keys.next(keys.at(position));
                prop_assert_eq!(keys.get(next), model.get(at + 1));
            }
        }
    }
}
