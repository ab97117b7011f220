//! Compare-and-replace: what is still as expected, piece by piece, and nothing else.

use bcached_format::{Inode, Key, Position};
use bcached_node::Node;

use crate::sample::{GEOMETRY, Image, SEQ, extent, root};

const EXPECTED: u64 = 49_152;

/// A leaf that was written with one dirty extent, and has since been overwritten in three places.
///
/// ```text
///   expected   0[--------------------------------------100)
///   since          20[data)30   50[hole)60  70[same place, another gen)80
/// ```
fn leaf() -> (Node, Key) {
    let own = root(512);
    let expected = extent(0, 0, 100, EXPECTED, true);
    let image = Image::of_sets(&own, &[vec![expected]]);
    let mut node = Node::read(own, 0, &GEOMETRY, &image.bytes).expect("legal");
    let regenerated = crate::sample::pointer(EXPECTED + 70, 2);
    let regenerated = bcached_format::Pointers::one(regenerated);
    node.insert(&extent(0, 20, 30, 60_000, true), &mut |_| ());
    node.insert(&Key::hole(Inode(0), 50, 60), &mut |_| ());
    node.insert(&Key { pointers: regenerated, ..extent(0, 70, 80, 0, true) }, &mut |_| ());
    (node, expected)
}

#[test]
fn every_matching_piece_is_replaced() {
    let (mut node, expected) = leaf();
    let clean = Key { dirty: false, ..expected };
    assert_eq!(node.words_to_replace(&expected, &clean.pointers), 4 * 3);
    let (mut removed, mut inserted) = (Vec::new(), Vec::new());
    node.replace(&expected, &clean, &mut |part| removed.push(part), &mut |part| inserted.push(part));
    let pieces = [(0, 20), (30, 50), (60, 70), (80, 100)];
    let parts = |key: &Key| pieces.map(|(start, end)| key.cut(start, end).expect("inside"));
    assert_eq!(removed, parts(&expected));
    assert_eq!(inserted, parts(&clean));
    assert_eq!(
        node.keys().filter(|key| key.dirty).map(Key::sectors).sum::<u64>(),
        20,
        "the newer keys stay dirty"
    );
    assert!(node.is_hole(Inode(0), 50, 60), "what was discarded stays discarded");
}

#[test]
fn where_nothing_matches_nothing_changes() {
    let (mut node, expected) = leaf();
    let before: Vec<Key> = node.keys().copied().collect();
    let elsewhere = extent(0, 0, 100, EXPECTED + 1, true);
    for expected in [Key { dirty: false, ..expected }, elsewhere, Key { inode: Inode(1), ..expected }] {
        let new = Key { dirty: false, ..expected };
        assert_eq!(node.words_to_replace(&expected, &new.pointers), 0);
        node.replace(&expected, &new, &mut |_| panic!("removed"), &mut |_| panic!("inserted"));
    }
    assert_eq!(node.keys().copied().collect::<Vec<_>>(), before);
}

/// A part of an extent is cleaned, in the middle of a key that says more.
#[test]
fn a_piece_inside_a_longer_key_is_replaced() {
    let (mut node, expected) = leaf();
    let part = expected.cut(85, 90).expect("inside");
    let words = node.words_to_replace(&part, &part.pointers);
    assert_eq!(words, 3);
    node.replace(&part, &Key { dirty: false, ..part }, &mut |_| (), &mut |_| ());
    let behind: Vec<Key> = node.overlapping(Inode(0), 80, 100).copied().collect();
    let clean = Key { dirty: false, ..part };
    assert_eq!(behind, [expected.cut(80, 85).expect("in"), clean, expected.cut(90, 100).expect("in")]);
}

#[test]
fn extents_that_merged_since_still_match_in_part() {
    let own = root(512);
    let mut node = Node::create(own, 0, SEQ, &GEOMETRY);
    let (first, second) = (extent(0, 0, 8, EXPECTED, true), extent(0, 8, 16, EXPECTED + 8, true));
    node.insert(&first, &mut |_| ());
    node.insert(&second, &mut |_| ());
    assert_eq!(node.len(), 1, "two adjacent writes are one key");
    assert_eq!(node.pending_bytes(), 32 + 3 * 8);
    let mut inserted = Vec::new();
    node.replace(&first, &Key { dirty: false, ..first }, &mut |_| (), &mut |part| inserted.push(part));
    assert_eq!(inserted, [Key { dirty: false, ..first }]);
    assert_eq!(node.first_after(Position::new(Inode(0), 8)), Some(second));
}
