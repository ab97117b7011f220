use super::*;
use bcached_env::Buffer;
use bcached_format::{DeviceIndex, Gen, Geometry, Inode, Pointers, Position, SetMagic, Uuid};

const NODE_BYTES: usize = 64 << 10;
const GEOMETRY: Geometry = Geometry {
    block_sectors: 8,
    bucket_sectors: 16,
    buckets: 1 << 20,
    first_bucket: 1,
    journal_buckets: 16,
    magic: SetMagic::of(Uuid([7; 16])),
};

fn pointer(bucket: u64) -> Pointer {
    Pointer::new(DeviceIndex(0), bucket * 16, Gen(0))
}

/// Returns an empty leaf whose first bset is written.
fn leaf(bucket: u64) -> Node {
    let Position { inode, offset } = Position::MAX;
    let own = Key { inode, size: 16, dirty: false, end: offset, pointers: Pointers::one(pointer(bucket)) };
    let mut node = Node::create(own, 0, 1, &GEOMETRY);
    let _written = node.seal_pending(Buffer::zeroed).expect("a fresh node has a first set");
    node
}

fn cache(budget: usize) -> NodeCache {
    NodeCache::new(budget, NODE_BYTES, NODE_BYTES / 4, Rc::default())
}

fn enter(cache: &mut NodeCache, bucket: u64) -> usize {
    let NodeLookup::Load(reserved) = cache.request(pointer(bucket)) else { unreachable!("there is room") };
    let slot = cache.loaded(leaf(bucket), pointer(bucket), reserved).slot();
    cache.check_invariants();
    slot
}

/// A clean node is evicted to make room for another. A node that is pinned, replacing another,
/// being written or unwritten is not.
#[test]
fn only_what_nobody_needs_is_evicted() {
    let mut cache = cache(NODE_BYTES + 4096);
    let slot = enter(&mut cache, 100);
    let (pin, one) = (cache.pin(slot), cache.bytes());
    while cache.bytes() + NODE_BYTES <= cache.budget() {
        let bucket = 1000 + cache.count() as u64;
        enter(&mut cache, bucket);
    }
    let NodeLookup::Load(other) = cache.request(pointer(200)) else { unreachable!("others are evicted") };
    assert!(cache.find(pointer(100)).is_some(), "not the pinned one");
    cache.abandon(pointer(200));
    drop(other);
    let all = cache.reserve(cache.budget() - one).expect("all others go");
    let refused = |cache: &mut NodeCache| cache.reserve(1024).is_none();
    assert!(refused(&mut cache), "it is pinned");
    drop(pin);
    for mark in [
        |cached: &mut CachedNode, on| cached.state = if on { NodeState::Unlinked } else { NodeState::Open },
        |cached: &mut CachedNode, on| cached.writing = on,
    ] {
        mark(cache.get_mut(slot), true);
        assert!(refused(&mut cache));
        mark(cache.get_mut(slot), false);
    }
    let key = Key::hole(Inode(0), 8, 16);
    assert!(!cache.room_to_grow(slot, 4096), "nothing but itself could be evicted");
    cache.check_invariants();
    drop(all);
    assert!(cache.room_to_grow(slot, cache.get(slot).node().insert_growth_bytes_max(1)));
    let before = cache.bytes();
    cache.change(slot, |node| node.insert(&key, &mut |_| ()));
    assert!(cache.has_to_write(slot, Time(1)) && !cache.has_to_write(slot, Time(2)));
    assert!(cache.bytes() > before, "what it grew by is counted");
    cache.check_invariants();
    let grown = cache.bytes();
    let _all = cache.reserve(cache.budget() - grown).expect("what is left");
    assert!(refused(&mut cache), "its key is not written");
    let _entry = cache.wrote(slot);
    let _written = cache.change(slot, |node| node.seal_pending(Buffer::zeroed));
    assert!(cache.reserve(grown).is_some() && cache.find(pointer(100)).is_none(), "now it can go");
    cache.check_invariants();
}

fn remembered(cache: &NodeCache, slot: usize) -> LeafHint {
    cache.remember(slot, cache.get(slot).node().place_of(Position::ZERO))
}

/// A remembered leaf is found again until a node is added or removed: its slot may then hold
/// another node.
#[test]
fn a_leaf_is_found_again_while_no_node_comes_or_goes() {
    let mut cache = cache(4 * NODE_BYTES);
    let slot = enter(&mut cache, 100);
    let leaf = remembered(&cache, slot);
    let key = Key::hole(Inode(0), 8, 16);
    assert!(cache.room_to_grow(slot, cache.get(slot).node().insert_growth_bytes_max(1)));
    cache.change(slot, |node| node.insert(&key, &mut |_| ()));
    assert!(cache.has_to_write(slot, Time(1)));
    assert_eq!(cache.again(leaf), Some(slot), "a key more makes no difference");
    let other = enter(&mut cache, 200);
    assert_eq!(cache.again(leaf), None, "one has come");
    let leaf = remembered(&cache, slot);
    cache.remove(other);
    assert_eq!(cache.again(leaf), None, "one has gone");
    let leaf = remembered(&cache, slot);
    cache.remove(slot);
    assert_eq!(enter(&mut cache, 300), slot, "another has its slot");
    assert_eq!(cache.again(leaf), None);
}

/// A node that is used again and again stays in memory, whatever other nodes are loaded and
/// evicted.
#[test]
fn what_is_used_stays() {
    let mut cache = cache(2 * NODE_BYTES);
    enter(&mut cache, 100);
    for bucket in 200..400 {
        enter(&mut cache, bucket);
        assert!(cache.find(pointer(100)).is_some(), "after {bucket}");
    }
    assert!(cache.count() < 100, "others went");
}

#[test]
#[should_panic(expected = "the node budget is exceeded: ")]
fn growing_unasked_beyond_the_budget_is_a_bug_that_shows() {
    let mut cache = cache(NODE_BYTES);
    let slot = enter(&mut cache, 100);
    let _all = cache.reserve(cache.budget() - cache.bytes()).expect("what is left");
    cache.change(slot, |node| node.insert(&Key::hole(Inode(0), 8, 16), &mut |_| ()));
}
