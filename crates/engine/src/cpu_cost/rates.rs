//! Measures the costs from which the rates of buckets were derived. It prints times, and fails if
//! one is far above its rate. That depends on the machine, so this is not part of the normal tests:
//! `cargo test --release -p bcached-engine --features rates --lib rates -- --nocapture`

use super::{BUCKET_NS, COUNT_NS, PRIORITY_NS, VISIT_NS};
use crate::space::Buckets;
use alloc::vec::Vec;
use bcached_format::prio::{BucketPrio, PrioSet, PrioWriter};
use bcached_format::{DeviceIndex, Gen, Pointer, SetMagic, Uuid};
use std::hint::black_box;
use std::println;
use std::time::Instant;

/// Buckets of a large cache: 2 TiB in buckets of 1 MiB.
const BUCKETS: u64 = 2 << 20;
/// Buckets in one of its priority blocks.
const BLOCK: u64 = 349_500;
/// Number of keys, of eight sectors each.
const KEYS: u64 = 1_000_000;
/// Maximum ratio of a time to its rate: neighbours that fill the processor's cache double times.
const ABOVE: f64 = 4.0;

fn buckets() -> Buckets {
    let count = usize::try_from(BUCKETS).expect("a small table");
    let stored = (0..count).map(|_| (Gen(0), 1));
    let mut buckets = Buckets::new(DeviceIndex(0), 2048, 0, stored).expect("a small table");
    buckets.classify(|_| false).expect("a small table");
    buckets
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn measure<T>(what: &str, rate_ns: u64, count: u64, run: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let done = black_box(run());
    let each = start.elapsed().as_nanos() as f64 / count as f64;
    println!("{what:<44} {each:>8.1} ns, charged {rate_ns}");
    assert!(each <= ABOVE * rate_ns as f64, "{what}: {each:.1} ns, but only {rate_ns} ns are charged");
    done
}

#[test]
fn what_buckets_cost() {
    let mut buckets = buckets();
    let used = measure("look at a bucket in a row", BUCKET_NS, BUCKETS, || {
        buckets.iter().filter(|(_, bucket)| bucket.live > 100).count()
    });
    assert_eq!(used, 0, "nothing is in them yet");
    let places: Vec<u64> = (0..KEYS).map(|key| key * 7_919 % BUCKETS * 2048 + key % 200 * 8).collect();
    measure("count a key to its bucket", COUNT_NS, KEYS, || {
        for place in &places {
            black_box(buckets.add(Pointer::new(DeviceIndex(0), *place, Gen(0)), 8, true));
        }
    });
    let live: u64 = buckets.iter().map(|(_, bucket)| u64::from(bucket.live)).sum();
    assert_eq!(live, 8 * KEYS);
    let stale = measure("look for the bucket of a key", VISIT_NS, KEYS, || {
        let pointers = places.iter().map(|place| Pointer::new(DeviceIndex(0), *place, Gen(0)));
        pointers.filter(|pointer| buckets.is_stale(*pointer)).count()
    });
    assert_eq!(stale, 0);
    let magic = SetMagic::of(Uuid([7; 16]));
    let mut block = PrioWriter::new(alloc::vec![0; 1 << 20], magic, 1, 0);
    measure("put a bucket into a block of priorities", PRIORITY_NS, BLOCK, || {
        block.push((0..BLOCK).map(|index| {
            let id = buckets.id(index);
            BucketPrio { prio: buckets.prio(id), generation: buckets.get(id).generation }
        }));
    });
    let bytes = block.seal();
    let set = PrioSet::parse(&bytes, magic).expect("just sealed");
    let found = measure("take one out of it", PRIORITY_NS, BLOCK, || {
        set.entries().map(|entry| (entry.generation, entry.prio)).collect::<Vec<_>>()
    });
    let kept = (0..BLOCK).map(|index| (Gen(0), buckets.prio(buckets.id(index))));
    assert!(kept.eq(found.into_iter().take(usize::try_from(BLOCK).expect("few"))), "what was put in");
}
