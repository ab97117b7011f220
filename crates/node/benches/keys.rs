//! Benchmarks of a full node: lookups, inserts, reading a node, iterating over keys, and checksums.
//! Run them with `cargo bench -p bcached-node`.
//!
//! They only measure times and assert nothing, so they can run on a busy machine. The figures in
//! the crate's documentation come from here. So do most of the rates in the engine's `work.rs`,
//! which says which.

use std::hint::black_box;
use std::time::Instant;

use bcached_format::bset::NodeIdentity;
use bcached_format::checksum::checksum;
use bcached_format::{
    DeviceIndex, Gen, Geometry, Inode, Key, NodeLog, Pointer, Pointers, Position, SetMagic, Uuid,
};
use bcached_node::{LiveKeys, Node, NodeBuilder, NodeReader, SetWrite};

const GEOMETRY: Geometry = Geometry {
    block_sectors: 8,
    bucket_sectors: 1024,
    buckets: 1 << 20,
    first_bucket: 1,
    journal_buckets: 16,
    magic: SetMagic::of(Uuid([7; 16])),
};

/// A node of 256 KiB.
const NODE_SECTORS: u16 = 512;

/// The number of keys of 4 KiB in a node before it is measured: close to what a node can hold.
const KEYS: u64 = 10_000;

fn own(bucket: u64) -> Key {
    let Position { inode, offset } = Position::MAX;
    Key { inode, size: NODE_SECTORS, dirty: false, end: offset, pointers: pointer(bucket * 1024) }
}

fn pointer(sector: u64) -> Pointers {
    Pointers::one(Pointer::new(DeviceIndex(0), sector, Gen(1)))
}

/// Returns a key of 4 KiB whose data is at `place` on the cache device. Consecutive indices leave
/// gaps of 4 KiB in the volume.
fn key(index: u64, place: u64) -> Key {
    Key {
        inode: Inode(0),
        size: 8,
        dirty: true,
        end: index * 16 + 8,
        pointers: pointer(1 << 20 | (place * 8)),
    }
}

/// Returns the next pseudo-random number (splitmix64).
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

fn measure(what: &str, rounds: u64, round: impl FnMut(u64)) {
    measure_each(what, rounds, 1, round);
}

/// Measures the cost of one item, where each round handles `count` of them.
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn measure_each(what: &str, rounds: u64, count: u64, mut round: impl FnMut(u64)) {
    let start = Instant::now();
    (0..rounds).for_each(&mut round);
    let nanoseconds = start.elapsed().as_nanos() as f64 / (rounds * count) as f64;
    let digits = if nanoseconds < 100.0 { 1 } else { 0 };
    println!("{what:<44} {nanoseconds:>8.digits$} ns");
}

fn full_node() -> Node {
    let keys: Vec<Key> = (0..KEYS).map(|index| key(index, index * 2)).collect();
    fresh(&keys).0
}

fn zeroed(bytes: usize) -> Vec<u8> {
    vec![0; bytes]
}

/// Builds a node from `keys`; returns it with its first set.
fn fresh(keys: &[Key]) -> (Node, SetWrite<Vec<u8>>) {
    fresh_of(own(40), keys)
}

fn fresh_of(own: Key, keys: &[Key]) -> (Node, SetWrite<Vec<u8>>) {
    let mut node = NodeBuilder::new(own, 0, 1, &GEOMETRY, keys.iter().map(Key::words).sum(), zeroed);
    node.push(keys);
    node.seal()
}

fn main() {
    let mut seed = 1;
    let node = full_node();
    println!("a node of 256 KiB with {KEYS} keys, {} KiB in memory", node.memory_bytes() >> 10);
    measure("look up 4 KiB", 1_000_000, |_| {
        let start = random(&mut seed) % (KEYS * 16);
        black_box(node.overlapping(Inode(0), start, start + 8).map(Key::sectors).sum::<u64>());
    });
    drop(node);
    for count in [1, 20] {
        measure_inserts(count, &mut seed);
    }
    measure_passes(&mut seed);
    measure_read(&mut seed);
    for sets in [1, 13] {
        measure_turns(sets, &mut seed);
    }
    measure_sums();
}

/// Measures lookups, and iteration over all keys, in nodes that do not stay in the processor's
/// cache.
fn measure_passes(seed: &mut u64) {
    const COUNT: u64 = 20;
    let nodes: Vec<Node> = (0..COUNT).map(|_| full_node()).collect();
    let node = |round: u64| &nodes[usize::try_from(round % COUNT).expect("small")];
    measure(&format!("look up 4 KiB, {COUNT} nodes"), 100_000, |round| {
        let start = random(seed) % (KEYS * 16);
        black_box(node(round).overlapping(Inode(0), start, start + 8).map(Key::sectors).sum::<u64>());
    });
    measure_each(&format!("pass a key, {COUNT} nodes"), 1000, KEYS, |round| {
        node(round).keys().for_each(|key| {
            black_box(key);
        });
    });
}

/// Measures the checksum of a node's bytes: of the same bytes repeatedly, and of different bytes
/// each time.
fn measure_sums() {
    const KIB: u64 = 256;
    for nodes in [1, 512] {
        let bytes = vec![7; usize::try_from((nodes * KIB) << 10).expect("it fits memory")];
        let all: Vec<&[u8]> = bytes.chunks_exact(256 << 10).collect();
        measure_each(&format!("sum a KiB, in {} KiB", nodes * KIB), 1024, KIB, |round| {
            black_box(checksum(black_box(all[usize::try_from(round % nodes).expect("small")])));
        });
    }
}

/// Measures inserts spread over `count` nodes: one stays in the processor's cache, 20 do not.
fn measure_inserts(count: u64, seed: &mut u64) {
    let rounds = 1000 * count;
    // Larger nodes, with room behind their first set for the inserted keys.
    let roomy = Key { size: 2 * NODE_SECTORS, ..own(40) };
    let nodes_of = |keys: Vec<Key>| -> Vec<Node> { (0..count).map(|_| fresh_of(roomy, &keys).0).collect() };
    let mut nodes = nodes_of((0..KEYS).map(|index| key(index, index * 2)).collect());
    measure(&format!("insert over an old key, {count} nodes"), rounds, |round| {
        let node = &mut nodes[usize::try_from(round % count).expect("small")];
        let key = key(random(seed) % KEYS, random(seed) % (1 << 20));
        node.insert(&key, &mut |gone| {
            black_box(gone);
        });
    });
    let mut nodes = nodes_of((0..KEYS / 2).map(|index| key(index * 2, index * 2)).collect());
    measure(&format!("insert into a gap, {count} nodes"), rounds, |round| {
        let node = &mut nodes[usize::try_from(round % count).expect("small")];
        let key = key(random(seed) % (KEYS / 2) * 2 + 1, random(seed) % (1 << 20));
        node.insert(&key, &mut |_| ());
    });
}

/// Measures reading a node that consists of a large set and up to 32 small sets over it.
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn measure_read(seed: &mut u64) {
    let (bytes, sets) = written(33, 100, seed);
    let read = Node::read(own(40), 0, &GEOMETRY, &bytes).expect("we wrote it");
    println!("a node of {sets} sets, {} keys merged", read.len());
    measure_each("find the keys in a sector, with its sum", 200, u64::from(NODE_SECTORS), |_| {
        let place = NodeIdentity { magic: GEOMETRY.magic, node: own(40).pointers.as_slice()[0] };
        black_box(NodeLog::parse(&bytes, 4096, place).expect("we wrote it"));
    });
    measure(&format!("read it ({} KiB in memory)", read.memory_bytes() >> 10), 200, |_| {
        black_box(Node::read(own(40), 0, &GEOMETRY, &bytes).expect("we wrote it"));
    });
    let mut reader = NodeReader::new(own(40), 0, &GEOMETRY, &bytes).expect("we wrote it");
    while reader.step(1024).expect("we wrote it").is_none() {}
    let steps = reader.handled() as u64;
    measure_each(&format!("a step of it, {:.1} a key", steps as f64 / read.len() as f64), 200, steps, |_| {
        let mut reader = NodeReader::new(own(40), 0, &GEOMETRY, &bytes).expect("we wrote it");
        while reader.step(1024).expect("we wrote it").is_none() {}
    });
    measure("its living keys, for a fresh node", 200, |_| {
        black_box(living(&read));
    });
    measure_each("one of them", 200, read.len() as u64, |_| {
        black_box(living(&read));
    });
    let keys = living(&read);
    measure_each("put one into a fresh node and its set", 200, keys.keys().len() as u64, |_| {
        let (node, set) = fresh(keys.keys());
        black_box((node, set.bytes));
    });
}

/// Returns the bytes of a node, and its number of sets. The first set has half the keys; small sets
/// of `keys` follow, as many as fit, up to `sets_max` sets in all.
fn written(sets_max: usize, keys: usize, seed: &mut u64) -> (Vec<u8>, usize) {
    let first: Vec<Key> = (0..KEYS / 2).map(|index| key(index, index * 2)).collect();
    let (mut node, set) = fresh(&first);
    let mut bytes = vec![0; usize::from(NODE_SECTORS) * 512];
    let (mut sets, mut next) = (0, Some(set));
    while node.fits(3 * keys) && sets < sets_max {
        if let Some(set) = next.take().or_else(|| node.seal_pending(zeroed)) {
            let start = set.block as usize * 4096;
            bytes[start..start + set.bytes.len()].copy_from_slice(&set.bytes);
            sets += 1;
        }
        for _ in 0..keys {
            node.insert(&key(random(seed) % KEYS, random(seed) % (1 << 20)), &mut |_| ());
        }
    }
    (bytes, sets)
}

/// Measures reading several nodes in turns, as a tree walk does. Together they exceed the
/// processor's nearest caches.
fn measure_turns(sets_max: usize, seed: &mut u64) {
    const NODES: usize = 16;
    let nodes: Vec<(Vec<u8>, usize)> = (0..NODES).map(|_| written(sets_max, 320, seed)).collect();
    let read_all = || -> Vec<Node> {
        let begin = |bytes| NodeReader::new(own(40), 0, &GEOMETRY, bytes).expect("we wrote it");
        let mut readers: Vec<NodeReader<'_>> = nodes.iter().map(|(bytes, _)| begin(bytes)).collect();
        let mut read = Vec::new();
        while !readers.is_empty() {
            readers.retain_mut(|reader| match reader.step(1024).expect("we wrote it") {
                Some(node) => {
                    read.push(node);
                    false
                }
                None => true,
            });
        }
        read
    };
    let keys: usize = read_all().iter().map(Node::len).sum();
    let what = format!("read a key, {NODES} nodes of {} sets", nodes[0].1);
    measure_each(&what, 20, keys as u64, |_| {
        black_box(read_all());
    });
}

fn living(node: &Node) -> LiveKeys {
    let mut living = LiveKeys::default();
    node.gather(Position::ZERO, usize::MAX, &mut living, &mut |_| true);
    living
}
