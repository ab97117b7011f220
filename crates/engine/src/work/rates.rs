//! What the rates of buckets were chosen by. Prints times and asserts nothing, so it is no test of every day:
//! `cargo test --release -p bcached-engine --features rates --lib rates -- --nocapture`

use crate::space::Buckets;
use alloc::vec::Vec;
use bcached_format::prio::{BucketPrio, PrioSet, PrioWriter};
use bcached_format::{DeviceIndex, Gen, Pointer, SetMagic, Uuid};
use std::hint::black_box;
use std::println;
use std::time::Instant;

/// Buckets of a large cache: 2 TiB in buckets of 1 MiB.
const BUCKETS: u64 = 2 << 20;
/// Buckets in one of its blocks of priorities.
const BLOCK: u64 = 349_500;

fn buckets() -> Buckets {
    let mut buckets = Buckets::new(DeviceIndex(0), 2048, 0, (0..BUCKETS).map(|_| (Gen(0), 1)));
    buckets.classify(|_| false);
    buckets
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn measure(what: &str, count: u64, run: impl FnOnce()) {
    let start = Instant::now();
    run();
    println!("{what:<44} {:>8.1} ns", start.elapsed().as_nanos() as f64 / count as f64);
}

#[test]
fn what_buckets_cost() {
    let mut buckets = buckets();
    measure("look at a bucket in a row", BUCKETS, || {
        black_box(buckets.iter().filter(|(_, bucket)| bucket.live > 100).count());
    });
    let places: Vec<u64> = (0..1_000_000).map(|key| key * 7_919 % BUCKETS * 2048 + key % 200 * 8).collect();
    measure("count a key to its bucket", 1_000_000, || {
        for place in &places {
            black_box(buckets.add(Pointer::new(DeviceIndex(0), *place, Gen(0)), 8, true));
        }
    });
    measure("look for the bucket of a key", 1_000_000, || {
        let pointers = places.iter().map(|place| Pointer::new(DeviceIndex(0), *place, Gen(0)));
        black_box(pointers.filter(|pointer| buckets.is_stale(*pointer)).count());
    });
    let magic = SetMagic::of(Uuid([7; 16]));
    let mut block = PrioWriter::new(1 << 20, magic, 1, 0);
    measure("put a bucket into a block of priorities", BLOCK, || {
        block.push((0..BLOCK).map(|index| {
            let id = buckets.id(index);
            BucketPrio { prio: buckets.prio(id), generation: buckets.get(id).generation }
        }));
    });
    let bytes = block.seal();
    let set = PrioSet::parse(&bytes, magic).expect("just sealed");
    measure("take one out of it", BLOCK, || {
        black_box(set.entries().map(|entry| (entry.generation, entry.prio)).collect::<Vec<_>>());
    });
}
