//! Compare-and-replace matches exactly the pieces that are still as expected.

use bcached_format::{Inode, Key};
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

/// The ranges, up to the end of `expected`, in which the leaf still agrees with it.
fn matching(node: &Node, expected: &Key) -> Vec<(u64, u64)> {
    node.matching(expected, expected.end).collect()
}

#[test]
fn every_piece_that_is_still_the_same_matches() {
    let (mut node, expected) = leaf();
    let pieces = matching(&node, &expected);
    assert_eq!(pieces, [(0, 20), (30, 50), (60, 70), (80, 100)]);
    for (start, end) in pieces {
        let part = expected.cut(start, end).expect("inside");
        let mut removed = Vec::new();
        node.insert(&Key { dirty: false, ..part }, &mut |gone| removed.push(gone));
        assert_eq!(removed, [part]);
    }
    let dirty: u64 = node.keys().filter(|key| key.dirty).map(Key::sectors).sum();
    assert_eq!(dirty, 20, "the newer keys stay dirty");
    assert_eq!(node.overlapping(Inode(0), 50, 60).next(), None, "what was discarded stays discarded");
}

#[test]
fn what_differs_in_anything_does_not_match() {
    let (node, expected) = leaf();
    let elsewhere = extent(0, 0, 100, EXPECTED + 1, true);
    for expected in [Key { dirty: false, ..expected }, elsewhere, Key { inode: Inode(1), ..expected }] {
        assert_eq!(matching(&node, &expected), []);
    }
}

/// The expected extent may lie in the middle of a longer key; the result is limited to what the
/// caller asks for.
#[test]
fn a_piece_inside_a_longer_key_matches() {
    let (node, expected) = leaf();
    let part = expected.cut(85, 90).expect("inside");
    assert_eq!(matching(&node, &part), [(85, 90)]);
    assert_eq!(node.matching(&expected, 35).collect::<Vec<_>>(), [(0, 20), (30, 35)]);
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
    assert_eq!(matching(&node, &first), [(0, 8)]);
    assert_eq!(matching(&node, &second), [(8, 16)]);
}
