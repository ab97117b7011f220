//! Full nodes, and nodes that are too empty: keys are distributed to fresh nodes, and none is lost.

use bcached_format::{Geometry, Inode, Key, Position};
use bcached_node::{LiveKeys, Node, belong_together};
use proptest::prelude::*;

use crate::sample::{GEOMETRY, Image, SEQ, build, deal, extent, live_keys, own, root, zeroed};

/// Keys of three words each that do not merge.
fn keys(count: u64) -> Vec<Key> {
    (0..count).map(|index| extent(0, index * 16, index * 16 + 8, 20_480 + index % 1000, true)).collect()
}

fn living(count: u64) -> LiveKeys {
    keys(count).into_iter().collect()
}

#[test]
fn four_fifths_of_the_blocks_are_one_node() {
    // Of 10 blocks of 512 bytes, 8 hold 4096 - 32 bytes of keys, which are 169 keys of three words.
    assert_eq!(deal(&living(169), 10, &GEOMETRY), [keys(169)]);
    let parts = deal(&living(170), 10, &GEOMETRY);
    // Three fifths of 510 words are 306: the left node gets 102 keys, and the one after.
    assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [103, 67], "nine blocks are too many");
    assert_eq!(parts.concat(), keys(170));
}

#[test]
fn a_node_of_one_block_is_not_divided_for_ever() {
    let geometry = Geometry { block_sectors: 8, ..GEOMETRY };
    assert_eq!(deal(&living(2), 1, &geometry), [keys(2)]);
    assert_eq!(deal(&living(160), 1, &geometry).len(), 2);
}

/// The words of each side of a division, if there is one, for each number of keys that a node of
/// `blocks` blocks can hold.
fn divisions(blocks: u32) -> impl Iterator<Item = (u64, Option<[usize; 2]>)> {
    let most = (u64::from(blocks) * 512 - 32) / 24;
    (2..=most).map(move |count| match deal(&living(count), blocks, &GEOMETRY).as_slice() {
        [left, right] => (count, Some([left.len() * 3, right.len() * 3])),
        _ => (count, None),
    })
}

#[test]
fn two_thirds_of_what_is_not_divided_belong_together() {
    // Of 10 blocks, 8 are not divided: two thirds of 4096 bytes, less a header, are 337 words.
    assert!(belong_together(337, 10, &GEOMETRY) && !belong_together(338, 10, &GEOMETRY));
    // One block: two thirds of four fifths of 512 bytes.
    assert!(belong_together(30, 1, &GEOMETRY) && !belong_together(31, 1, &GEOMETRY));
    assert!(belong_together(0, 1, &GEOMETRY), "two empty nodes are one");
}

/// Dividing and merging do not undo each other: a quarter of what an undivided node takes must be
/// added or removed in between.
#[test]
fn what_was_divided_does_not_belong_together_nor_the_other_way_round() {
    for blocks in [1, 2, 3, 5, 8, 64] {
        let undivided = divisions(blocks).filter(|(_, parts)| parts.is_none()).map(|(count, _)| count).max();
        let undivided = usize::try_from(undivided.expect("two keys are not divided")).expect("small") * 3;
        let together = (0..).take_while(|words| belong_together(*words, blocks, &GEOMETRY)).last();
        let together = together.expect("two empty nodes are one");
        assert!(together + undivided / 4 <= undivided, "{blocks}: {together} of {undivided} words");
        for (count, parts) in divisions(blocks) {
            let Some([left, right]) = parts else { continue };
            assert!(!belong_together(left + right - undivided / 4, blocks, &GEOMETRY), "{blocks}: {count}");
        }
    }
}

#[test]
fn a_fresh_node_takes_inserts_behind_its_first_set() {
    let node_key = own(37, 8, Position::MAX);
    let (mut node, first) = build(node_key, SEQ, &keys(100));
    assert!(!node.has_pending());
    node.insert(&Key::hole(Inode(0), 0, 16), &mut |_| ());
    assert_eq!(node.len(), 99);
    let mut image = Image::new(&node_key);
    image.append(&first);
    assert_eq!(Node::read(node_key, 0, &GEOMETRY, &image.bytes).expect("sound").len(), 100);
    image.write(&mut node);
    assert_eq!(Node::read(node_key, 0, &GEOMETRY, &image.bytes).expect("sound").len(), 99);
}

/// Room for cutting is kept free: the last key that fits may fall into the middle of the largest
/// one.
#[test]
fn a_full_leaf_says_so_in_time() {
    let mut node = Node::create(own(36, 8, Position::MAX), 0, SEQ, &GEOMETRY);
    for key in keys(200) {
        if node.fits(3) {
            node.insert(&key, &mut |_| ());
        }
    }
    // 4096 bytes less a header of 32 are 508 words; 8 of them are spare: 166 keys of three words.
    assert_eq!((node.len(), node.pending_bytes()), (166, 32 + 498 * 8));
    assert!(node.fits(2) && !node.fits(3));
    node.insert(&Key::hole(Inode(0), 3, 4), &mut |_| ());
    assert_eq!(node.pending_bytes(), 32 + (498 + 2 + 3) * 8, "a hole, and the part behind it");
    assert!(!node.fits(0));
    assert!(node.seal_pending(zeroed).is_some());
}

#[test]
fn dead_keys_are_left_behind_and_neighbours_merge() {
    let own = root(512);
    let mut node = Node::create(own, 0, SEQ, &GEOMETRY);
    let dead = extent(0, 8, 16, 30_000, true);
    for key in [extent(0, 0, 8, 50_000, true), dead, extent(0, 16, 24, 50_016, true)] {
        node.insert(&key, &mut |_| ());
    }
    // A key that fits between the others overwrites the dead one: three keys become one.
    node.insert(&extent(0, 8, 16, 50_008, true), &mut |_| ());
    assert_eq!(live_keys(&node, &mut |_| true).keys(), [extent(0, 0, 24, 50_000, true)]);
    node.insert(&dead, &mut |_| ());
    let is_live = &mut |key: &Key| *key != dead;
    let wanted = [extent(0, 0, 8, 50_000, true), extent(0, 16, 24, 50_016, true)];
    assert_eq!(live_keys(&node, is_live).keys(), wanted);
}

/// One long extent is cut into as many pieces as a full node of holes can cut it: more words than
/// one node can hold.
#[test]
fn a_node_in_pieces_fits_into_two() {
    let own = own(36, 24, Position::MAX);
    let long = extent(0, 0, 1024, 20_480, true);
    let other = Key { inode: Inode(1), ..extent(0, 0, 1024, 21_504, true) };
    let holes =
        |inode| (0..489_u64).map(move |index| extent(inode, index * 2 + 1, index * 2 + 2, 30_720, false));
    let sets = [vec![long, other], holes(0).collect::<Vec<_>>()];
    let image = Image::of_sets(&own, &sets);
    let node = Node::read(own, 0, &GEOMETRY, &image.bytes).expect("legal: cutting is left to the reader");
    assert!(node.words_in_view() > 512 * 24 / 8, "more than a node can hold");
    assert_eq!(node.written_blocks(), 1 + 24 - 1);
    assert!(!node.fits(3));
    let living = live_keys(&node, &mut |_| true);
    let parts = deal(&living, 24, &GEOMETRY);
    assert_eq!((parts.len(), parts.concat().as_slice()), (2, living.keys()), "it does not fit into one");
    for part in parts {
        let key = crate::sample::own(37, 24, part.last().expect("not empty").position());
        assert_eq!(build(key, SEQ, &part).0.len(), part.len());
    }
}

proptest! {
    #[test]
    fn what_is_divided_is_all_there(count in 0_u64..1000, blocks in 8_u32..40) {
        let all = keys(count);
        let words_max = (blocks as usize * 512 - 32) / 8;
        prop_assume!(all.len() * 3 <= words_max);
        let parts = deal(&living(count), blocks, &GEOMETRY);
        prop_assert_eq!(parts.concat(), all);
        for part in &parts {
            let used = (32 + part.len() * 24).div_ceil(512);
            prop_assert!(used * 5 <= blocks as usize * 4, "no fresh node is crowded: {used} of {blocks}");
            prop_assert!(parts.len() == 1 || !part.is_empty());
        }
    }
}
