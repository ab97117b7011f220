//! Sets as the kernel writes them: overlapping each other, with keys trimmed to nothing and
//! placeholders of cache misses.

use bcached_format::bset::{self, NodeIdentity};
use bcached_format::{BsetError, Inode, Key, KeyError, Pointer, Pointers, Position};
use bcached_node::{Node, NodeFault};

use crate::sample::{GEOMETRY, Image, SEQ, extent, own, place, root, zeroed};

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Format document, 20.3: the node in bucket 36 of a real kernel's cache, including its checksums.
#[test]
fn the_node_of_the_format_document() {
    let own = root(512);
    let mut bytes = vec![0; 512 * 512];
    let first = [0x6D3C_2031_3D17_81B1, 0x6753_B347_F789_BF3F, SEQ, 1];
    bytes[..32].copy_from_slice(&words(&first));
    let second = [
        [0x7E1B_05A5_1C2F_0DC1, 0x6753_B347_F789_BF3F, SEQ],
        [21 << 32 | 1, 0x9000_0000_0000_0000, 0x10],
        [0xfffd_968c_d43f_f38e, 0x9000_0010_0000_0000, 0x10],
        [0xbc_0001, 0x9000_0000_0080_0000, 0x18],
        [0xbc_0001, 0x9000_0000_0000_0000, 0x18],
        [0x7ffd_7f28_6292_bddd, 0x9000_0010_0100_0000, 0x28],
        [0xbc_0801, 0x9000_0000_0000_0000, 0x28],
        [0x7ff9_ec5b_5fec_f3e3, 0x9000_0010_3080_0000, 0x330],
    ];
    let mut second = words(second.as_flattened());
    second.extend(0xbc_1801_u64.to_le_bytes());
    bytes[512..512 + second.len()].copy_from_slice(&second);
    let node = Node::read(own, 0, &GEOMETRY, &bytes).expect("a kernel wrote it");
    // The kernel left [24,40) and [40,816) separate; they are one extent all the same. Keys of size
    // zero mean nothing.
    let wanted = [extent(0, 16, 24, 48128, false), extent(0, 24, 816, 48136, true)];
    assert_eq!(node.keys().copied().collect::<Vec<_>>(), wanted);
    assert_eq!((node.written_blocks(), node.total_blocks(), node.seq()), (2, 512, SEQ));
    assert_eq!((node.words_on_disk(), node.words_in_view()), (21, 6));
    assert!(!node.has_pending());
    assert_eq!(node.check_extents(Position::ZERO), Ok(()));
}

/// For a new root we write the same empty first set as that node has, byte for byte.
#[test]
fn a_new_root_is_an_empty_set() {
    let mut node = Node::create(root(512), 0, SEQ, &GEOMETRY);
    assert!(node.has_pending());
    let set = node.seal_pending(zeroed).expect("the first set is written even if it is empty");
    assert_eq!((set.block, set.bytes.len()), (0, 512));
    assert_eq!(set.bytes[..32], words(&[0x6D3C_2031_3D17_81B1, 0x6753_B347_F789_BF3F, SEQ, 1]));
    assert!(!node.has_pending());
    assert_eq!(node.seal_pending(zeroed), None, "only the first set may be empty");
}

#[test]
fn holes_placeholders_and_stale_keys_hide_older_keys() {
    // set 1    0:[0------------------------------300)
    // set 2       [50-60) hole  [100-120) check   [200-220) another pointer
    // set 3         [55-58) data                    size 0 at 210
    let own = root(512);
    let check = Pointers::one(Pointer::from_word(0xfffd_968c_d43f_f38e));
    let old = extent(0, 0, 300, 49_152, true);
    let sets = [
        vec![old],
        vec![
            Key::hole(Inode(0), 50, 60),
            Key { pointers: check, ..extent(0, 100, 120, 50_000, false) },
            extent(0, 200, 220, 60_000, false),
        ],
        vec![extent(0, 55, 58, 70_000, false), extent(0, 210, 210, 70_003, true)],
    ];
    let image = Image::of_sets(&own, &sets);
    let node = Node::read(own, 0, &GEOMETRY, &image.bytes).expect("legal");
    let wanted = [
        old.cut(0, 50).expect("front"),
        extent(0, 55, 58, 70_000, false),
        old.cut(60, 100).expect("between"),
        old.cut(120, 200).expect("between"),
        extent(0, 200, 220, 60_000, false),
        old.cut(220, 300).expect("tail"),
    ];
    assert_eq!(node.keys().copied().collect::<Vec<_>>(), wanted);
}

#[test]
fn a_hole_hides_older_keys_after_it_was_written() {
    let own = root(512);
    let mut image = Image::of_sets(&own, &[vec![extent(0, 0, 100, 50_000, true)]]);
    let mut node = Node::read(own, 0, &GEOMETRY, &image.bytes).expect("legal");
    node.insert(&Key::hole(Inode(0), 0, 100), &mut |_| ());
    assert!(node.is_empty());
    let mut rest = image_with(&mut image, &mut node, &own);
    assert!(rest.is_empty(), "the hole stands in the second set");
    rest.insert(&extent(0, 10, 20, 60_000, false), &mut |_| panic!("nothing is there"));
    assert_eq!(rest.len(), 1);
}

fn image_with(image: &mut Image, node: &mut Node, own: &Key) -> Node {
    let set = node.seal_pending(zeroed).expect("something is pending");
    let start = set.block as usize * 512;
    image.bytes[start..start + set.bytes.len()].copy_from_slice(&set.bytes);
    Node::read(*own, 0, &GEOMETRY, &image.bytes).expect("we wrote it")
}

#[test]
fn keys_trimmed_to_nothing_may_stand_anywhere() {
    let own = own(36, 512, Position::new(Inode(0), 1000));
    let beyond = Key { size: 0, ..extent(5, 0, 8, 7, true) };
    let sets = [vec![beyond, extent(0, 0, 8, 50_000, true), Key { end: 2, ..beyond }]];
    let node = Node::read(own, 0, &GEOMETRY, &Image::of_sets(&own, &sets).bytes).expect("ignored");
    assert_eq!(node.keys().collect::<Vec<_>>(), [&sets[0][1]]);
}

#[test]
fn old_sets_without_a_seed_are_read() {
    // Version 0: the checksum starts from all ones, wherever the node is.
    let own = root(512);
    let mut bytes = Image::of_sets(&own, &[vec![extent(0, 0, 8, 50_000, true)]]).bytes;
    bytes[24] = 0;
    let sum = bcached_format::checksum::checksum(&bytes[8..56]);
    bytes[..8].copy_from_slice(&sum.to_le_bytes());
    assert_eq!(Node::read(own, 0, &GEOMETRY, &bytes).expect("old").len(), 1);
}

fn fault_of(own: Key, level: u8, sets: &[Vec<Key>]) -> NodeFault {
    let error =
        Node::read(own, level, &GEOMETRY, &Image::of_sets(&own, sets).bytes).expect_err("must be refused");
    assert_eq!((error.pointer, error.level), (own.pointers.as_slice()[0], level));
    error.fault
}

#[test]
fn overlapping_keys_of_one_set_are_refused() {
    // The kernel does not check this, and what it then serves depends on its search.
    let first = vec![extent(0, 100, 108, 50_000, true)];
    let sets = [first, vec![extent(0, 0, 9, 50_000, true), extent(0, 8, 16, 60_000, true)]];
    let NodeFault::Key { block: 1, error } = fault_of(root(512), 0, &sets) else { panic!("another fault") };
    let (previous, start) = (Position::new(Inode(0), 9), Position::new(Inode(0), 8));
    assert_eq!((error.index, error.word), (1, 3));
    assert_eq!(error.error, KeyError::OutOfOrder { previous, start });
}

#[test]
fn a_key_behind_the_end_of_the_node_is_refused() {
    let limit = Position::new(Inode(0), 1000);
    let fault = fault_of(own(36, 512, limit), 0, &[vec![extent(0, 999, 1001, 50_000, true)]]);
    assert_eq!(fault, NodeFault::BeyondRange { block: 0, limit, found: Position::new(Inode(0), 1001) });
    let fault = fault_of(own(36, 512, limit), 0, &[vec![extent(1, 0, 8, 50_000, true)]]);
    assert_eq!(fault, NodeFault::BeyondRange { block: 0, limit, found: Position::new(Inode(1), 8) });
}

#[test]
fn a_key_before_the_start_of_the_node_is_told() {
    let own = root(512);
    let image = Image::of_sets(&own, &[vec![extent(0, 8, 16, 50_000, true)]]);
    let node = Node::read(own, 0, &GEOMETRY, &image.bytes).expect("the node does not know its start");
    let (limit, found) = (Position::new(Inode(0), 9), Position::new(Inode(0), 8));
    assert_eq!(node.check_extents(found), Ok(()));
    let error = node.check_extents(limit).expect_err("it starts before");
    assert_eq!(error.fault, NodeFault::BeforeRange { limit, found });
}

#[test]
fn a_pointer_outside_the_buckets_is_refused() {
    let fault = fault_of(root(512), 0, &[vec![extent(0, 0, 8, 1023, true)]]);
    let NodeFault::Key { block: 0, error } = fault else { panic!("another fault") };
    assert_eq!(error.error, KeyError::BucketOutOfRange { first: 1, limit: 2048, found: 0 });
}

#[test]
fn a_node_of_another_place_fails_its_sum() {
    let there = root(512);
    let image = Image::of_sets(&there, &[vec![extent(0, 0, 8, 50_000, true)]]);
    let here = own(37, 512, Position::MAX);
    let error = Node::read(here, 0, &GEOMETRY, &image.bytes).expect_err("the seed differs");
    let NodeFault::Log(log) = error.fault else { panic!("another fault") };
    assert!(matches!(log.error, BsetError::BadChecksum { .. }));
}

#[test]
fn a_lost_set_is_noticed_by_the_one_behind_it() {
    let own = root(512);
    let mut image = Image::of_sets(&own, &[vec![extent(0, 0, 8, 50_000, true)]]);
    let lost = bset::seal(NodeIdentity { ..place(&own) }, SEQ, &[extent(0, 8, 16, 60_000, true)]);
    image.bytes[2 * 512..2 * 512 + lost.len()].copy_from_slice(&lost);
    let error = Node::read(own, 0, &GEOMETRY, &image.bytes).expect_err("block 1 is missing");
    let NodeFault::Log(log) = error.fault else { panic!("another fault") };
    assert_eq!((log.block, log.error), (2, BsetError::StraySet { end_block: 1 }));
}

#[test]
fn more_pieces_than_two_nodes_can_hold_are_refused() {
    // Each key of one pointer cuts off a piece with two pointers: three words on disk become seven.
    let pointers = [49_152, 53_248].map(|sector| extent(0, 0, 8, sector, true).pointers.as_slice()[0]);
    let pointers = Pointers::from_slice(&pointers).expect("two");
    let mirrored = Key { pointers, ..extent(0, 0, 1000, 49_152, true) };
    let cuts =
        |count: u64| (0..count).map(|i| extent(0, i * 8 + 4, i * 8 + 8, 60_000, true)).collect::<Vec<_>>();
    let (own, few) = (root(512), [vec![mirrored], cuts(4)]);
    let node =
        Node::read(own, 0, &GEOMETRY, &Image::of_sets(&own, &few).bytes).expect("twice as many at most");
    assert_eq!((node.words_on_disk(), node.words_in_view()), (16, 32));
    let fault = fault_of(own, 0, &[vec![mirrored], cuts(5)]);
    assert_eq!(fault, NodeFault::TooManyPieces { limit: 2 * 19, found: 39 });
}
