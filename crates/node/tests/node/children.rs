//! Interior nodes: children, freeing keys, and the order in which a reader learns which children
//! are alive.

use bcached_format::{Gen, Inode, Key, KeyError, Pointer, Pointers, Position};
use bcached_node::{Node, NodeFault};

use crate::sample::{GEOMETRY, Image, SEQ, own, root, zeroed};

const SECTORS: u16 = 512;

fn child(bucket: u64, offset: u64) -> Key {
    own(bucket, SECTORS, Position::new(Inode(0), offset))
}

fn last_child(bucket: u64) -> Key {
    own(bucket, SECTORS, Position::MAX)
}

fn write(image: &mut Image, node: &mut Node) {
    assert!(node.has_pending());
    image.write(node);
    assert!(!node.has_pending(), "keys are written once");
}

fn pointer_of(key: &Key) -> Pointer {
    key.pointers.as_slice()[0]
}

#[test]
fn a_split_child_is_replaced_by_two_and_freed_by_the_reader() {
    let own = root(SECTORS);
    let mut image = Image::new(&own);
    let mut node = Node::create(own, 1, SEQ, &GEOMETRY);
    let (a, b) = (child(40, 1000), last_child(41));
    node.replace_children(&[], &[a, b]);
    write(&mut image, &mut node);
    let (left, right) = (child(42, 600), child(43, 1000));
    node.replace_children(&[a], &[left, right]);
    assert_eq!(node.children().collect::<Vec<_>>(), [&left, &right, &b]);
    assert_eq!(node.pending_bytes(), 32 + 9 * 8);
    write(&mut image, &mut node);

    let mut read = Node::read(own, 1, &GEOMETRY, &image.bytes).expect("we wrote it");
    // Until generations are known, the old and the new child exist side by side, the new one first.
    assert_eq!(read.children().collect::<Vec<_>>(), [&left, &right, &a, &b]);
    let error = read.check_children(Position::ZERO).expect_err("two at one position");
    assert_eq!(error.fault, NodeFault::TwoChildren { position: a.position() });
    let freed: Vec<Pointer> = read.freed().collect();
    assert_eq!(freed, [pointer_of(&a).with_generation(Gen(2))]);
    read.drop_dead(&mut |pointer| freed.iter().any(|freed| freed.sector() == pointer.sector()));
    assert_eq!(read.children().collect::<Vec<_>>(), [&left, &right, &b]);
    assert_eq!(read.freed().count(), 0);
    assert_eq!(read.check_children(Position::ZERO), Ok(()));
}

#[test]
fn the_child_for_a_start_is_the_first_that_reaches_beyond_it() {
    let mut node = Node::create(root(SECTORS), 1, SEQ, &GEOMETRY);
    let (a, b, c) = (child(40, 1000), own(41, SECTORS, Position::new(Inode(3), 50)), last_child(42));
    node.replace_children(&[], &[a, b, c]);
    let for_start = |inode, offset| node.child_for(Position::new(Inode(inode), offset));
    assert_eq!(for_start(0, 999), Some(&a));
    assert_eq!(for_start(0, 1000), Some(&b), "an extent that starts at 1000 ends behind it");
    assert_eq!(for_start(2, 7_000), Some(&b));
    assert_eq!(for_start(3, 50), Some(&c));
    assert_eq!(node.child_for(Position::MAX), None);
}

#[test]
fn freeing_keys_stand_first_in_their_set() {
    let own = root(SECTORS);
    let mut image = Image::new(&own);
    let mut node = Node::create(own, 1, SEQ, &GEOMETRY);
    let (a, b, c) = (child(40, 1000), child(41, 2000), last_child(42));
    node.replace_children(&[], &[a, b, c]);
    write(&mut image, &mut node);
    // Two neighbours are merged, and then the result with the third, before anything is written.
    // The key of the first result never reaches the disk.
    let both = child(43, 2000);
    node.replace_children(&[a, b], &[both]);
    let all = last_child(44);
    node.replace_children(&[both, c], &[all]);
    write(&mut image, &mut node);
    let log = bcached_format::NodeLog::parse(&image.bytes, 512, crate::sample::place(&own)).expect("sound");
    let keys: Vec<Key> = log.sets[1].bset.keys.iter().collect();
    let positions: Vec<Position> = keys.iter().map(Key::position).collect();
    assert_eq!(positions, [vec![Position::ZERO; 4], vec![Position::MAX]].concat());
    let read = Node::read(own, 1, &GEOMETRY, &image.bytes).expect("we wrote it");
    let freed: Vec<u64> = read.freed().map(|pointer| pointer.sector() / 1024).collect();
    assert_eq!(freed, [40, 41, 43, 42]);
    // Each has the next generation, and the size that the child had.
    assert!(keys[..4].iter().all(|key| key.size == SECTORS && pointer_of(key).generation() == Gen(2)));
}

/// GC repeatedly merges two neighbours. The parent grows by no more than announced, and its readers
/// learn that each old child is dead, although no living child ends where the left ones did.
#[test]
fn two_neighbours_are_replaced_by_one_and_both_are_freed() {
    let own = root(SECTORS);
    let mut image = Image::new(&own);
    let mut node = Node::create(own, 1, SEQ, &GEOMETRY);
    let mut first = child(40, 100);
    let others: Vec<Key> = (1..20).map(|index| child(40 + index, 100 * (1 + index))).collect();
    node.replace_children(&[], &[&[first][..], &others, &[last_child(90)]].concat());
    write(&mut image, &mut node);
    let mut freed: Vec<Pointer> = Vec::new();
    for (index, right) in others.iter().enumerate() {
        let made = Key { end: right.end, ..child(100 + index as u64, 0) };
        let memory = node.memory_bytes() + node.replace_growth_bytes_max(2, 1);
        node.replace_children(&[first, *right], &[made]);
        assert!(node.memory_bytes() <= memory, "no more memory than was said");
        assert_eq!(node.pending_bytes(), 32 + 9 * 8);
        write(&mut image, &mut node);
        freed.extend([pointer_of(&first), pointer_of(right)]);
        first = made;
    }
    let mut read = Node::read(own, 1, &GEOMETRY, &image.bytes).expect("we wrote it");
    let sectors = |pointers: Vec<Pointer>| {
        let mut sectors: Vec<u64> = pointers.iter().map(|pointer| pointer.sector()).collect();
        sectors.sort_unstable();
        sectors
    };
    assert!(read.freed().all(|pointer| pointer.generation() == Gen(2)));
    assert_eq!(sectors(read.freed().collect()), sectors(freed.clone()), "both of each pair");
    read.drop_dead(&mut |pointer| freed.iter().any(|freed| freed.sector() == pointer.sector()));
    assert_eq!(read.children().collect::<Vec<_>>(), [&first, &last_child(90)]);
    assert_eq!(read.check_children(Position::ZERO), Ok(()));
    assert_eq!(read.child_for(Position::ZERO), Some(&first), "it has the range of all before it");
}

#[test]
fn children_must_tile_the_range() {
    let own = root(SECTORS);
    let fault = |children: &[Key], lo: u64| {
        let image = Image::of_sets(&own, &[children.to_vec()]);
        let node = Node::read(own, 1, &GEOMETRY, &image.bytes).expect("readable");
        node.check_children(Position::new(Inode(0), lo)).map_err(|error| error.fault)
    };
    assert_eq!(fault(&[child(40, 1000), last_child(41)], 999), Ok(()));
    let (limit, found) = (Position::new(Inode(0), 1000), Position::new(Inode(0), 1000));
    let before = NodeFault::BeforeRange { limit, found };
    assert_eq!(fault(&[child(40, 1000), last_child(41)], 1000), Err(before));
    let early = |found| Err(NodeFault::ChildrenEndEarly { wanted: Position::MAX, found });
    assert_eq!(fault(&[child(40, 1000)], 0), early(Position::new(Inode(0), 1000)));
    assert_eq!(fault(&[], 0), early(Position::ZERO));
}

#[test]
#[should_panic(expected = "only a child can be replaced")]
fn a_node_that_is_no_child_cannot_be_replaced() {
    let mut node = Node::create(root(SECTORS), 1, SEQ, &GEOMETRY);
    node.replace_children(&[], &[child(40, 1000), last_child(41)]);
    node.replace_children(&[child(42, 1000)], &[child(43, 1000)]);
}

#[test]
fn a_child_without_a_place_is_refused() {
    let own = root(SECTORS);
    let homeless = Key { pointers: Pointers::NONE, ..child(40, 1000) };
    let image = Image::of_sets(&own, &[vec![homeless, last_child(41)]]);
    let error = Node::read(own, 1, &GEOMETRY, &image.bytes).expect_err("nothing could be read there");
    let NodeFault::Key { block: 0, error } = error.fault else { panic!("another fault") };
    assert_eq!((error.index, error.error), (0, KeyError::NoPointer));
    assert!(Node::read(own, 0, &GEOMETRY, &image.bytes).is_ok(), "in a leaf it is a hole");
}

#[test]
fn a_node_full_of_children_says_so() {
    let own = own(36, 8, Position::MAX);
    let mut node = Node::create(own, 1, SEQ, &GEOMETRY);
    let mut count = 0;
    while node.fits(3) {
        count += 1;
        let memory = node.memory_bytes() + node.replace_growth_bytes_max(0, 1);
        node.replace_children(&[], &[child(40 + count, 1000 + count)]);
        assert!(node.memory_bytes() <= memory, "no more memory than was said");
    }
    let old: Vec<Key> = node.children().take(1).copied().collect();
    let mut replaced = node.clone();
    let memory = replaced.memory_bytes() + replaced.replace_growth_bytes_max(1, 0);
    replaced.replace_children(&old, &[]);
    assert!(replaced.memory_bytes() <= memory, "a freeing key has been counted");
    // 4096 bytes less a header of 32 are 508 words: 169 keys of three, and one word is left.
    assert_eq!(count, 169);
    let set = node.seal_pending(zeroed).expect("all of them");
    assert_eq!((set.bytes.len(), node.written_blocks()), (4096, 8));
    assert!(!node.fits(0), "not even a header fits behind it");
}
