//! When no bucket is available, data that is read is not added to the cache, and data that is
//! written through is invalidated there. Data of different kinds uses different buckets.

use crate::memory::{OpFault, World};
use crate::rig::{CACHE, Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, DataLocation, Options, Request, VolumeId, VolumeOptions};
use bcached_env::{Buffer, Env, Op};
use bcached_format::{CacheMode, Label, SetMagic, Uuid};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: 300_000 };

/// A piece fills a bucket.
const PIECE: u64 = 128;

/// The longest time, in virtual time, for a request that must not wait.
const LIMIT: Duration = Duration::from_secs(1);

/// Write-back is off.
fn options() -> Options {
    let volume = VolumeOptions { writeback_running: false, ..VolumeOptions::default() };
    Options { volume, parked_delay: Duration::from_millis(2), ..Options::default() }
}

fn read(piece: u64) -> Request {
    let bytes = usize::try_from(PIECE * 512).expect("small");
    Request::Read { sector: piece * PIECE, buffer: Buffer::zeroed(bytes) }
}

fn put(piece: u64, byte: u8) -> Request {
    write(piece * PIECE, usize::try_from(PIECE).expect("small"), byte)
}

/// Waits until fills have ended and their keys are in the tree.
async fn rest(env: &Env, set: &CacheSet, volume: VolumeId) {
    env.sleep(Duration::from_millis(20)).await;
    ask(set, volume, Request::Flush).await;
    env.sleep(Duration::from_millis(20)).await;
}

/// The bucket in which the sector is cached.
async fn bucket_of(set: &CacheSet, volume: VolumeId, sector: u64) -> Option<u64> {
    match set.explain(volume, sector).await.expect("it can be read").whereabouts {
        DataLocation::Parked(place) | DataLocation::Clean(place) | DataLocation::Dirty(place) => {
            Some(place.bucket)
        }
        _ => None,
    }
}

/// Makes sure that from now on no generation becomes durable, so that no bucket is reused.
fn hold_buckets(world: &RefCell<World>) {
    let magic = SetMagic::of(Uuid([1; 16])).prio().to_le_bytes();
    let is_generations =
        move |op: &Op| matches!(op, Op::Write { payload, .. } if payload.as_slice()[8..16] == magic);
    world.borrow_mut().fate =
        Some(Box::new(move |disk, op| (disk == CACHE && is_generations(op)).then_some(OpFault::Waits)));
}

/// Issues the requests and asserts that all of them are answered in time.
async fn answered(
    env: &Env,
    (set, volume): (&CacheSet, VolumeId),
    pieces: std::ops::Range<u64>,
    request: fn(u64) -> Request,
) {
    let (count, wanted) = (Rc::new(Cell::new(0)), pieces.end - pieces.start);
    let (asker, counts) = (set.clone(), Rc::clone(&count));
    env.spawn(async move {
        for piece in pieces {
            ask(&asker, volume, request(piece)).await;
            counts.set(counts.get() + 1);
        }
    });
    let until = env.now() + LIMIT;
    while count.get() < wanted {
        assert!(env.now() < until, "{} of {wanted} were answered", count.get());
        env.sleep(Duration::from_micros(100)).await;
    }
}

/// A cache full of clean data of the first pieces, in that mode.
async fn full(env: &Env, mode: CacheMode) -> (CacheSet, VolumeId) {
    let (set, volume) = open(env.clone(), options()).await.expect("sound");
    set.set_cache_mode(volume, mode).await.expect("it can be written");
    for piece in 0..1_000 {
        ask(&set, volume, read(piece)).await;
        if piece % 50 == 0 {
            rest(env, &set, volume).await;
        }
    }
    rest(env, &set, volume).await;
    (set, volume)
}

/// Reads are answered, and their data is dropped: it is not added later when a bucket is free
/// again.
#[test]
fn a_fill_that_finds_no_bucket_is_dropped() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = full(&env, CacheMode::Writethrough).await;
        hold_buckets(&world);
        answered(&env, (&set, volume), 1_000..1_300, read).await;
        assert!(bucket_of(&set, volume, 1_000 * PIECE).await.is_some(), "there were some buckets at first");
        world.borrow_mut().fate = None;
        rest(&env, &set, volume).await;
        assert_eq!(bucket_of(&set, volume, 1_299 * PIECE).await, None, "nobody has waited to add it");
        ask(&set, volume, read(1_299)).await;
        rest(&env, &set, volume).await;
        assert!(bucket_of(&set, volume, 1_299 * PIECE).await.is_some(), "now it is added");
        set.stop().await.expect("in order");
    });
}

/// The cached copy is invalidated, the data is on the backing device, and no write has waited.
#[test]
fn a_write_through_that_finds_no_bucket_goes_to_the_backing_device_alone() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = full(&env, CacheMode::Writethrough).await;
        assert!(bucket_of(&set, volume, 999 * PIECE).await.is_some(), "it was read last");
        hold_buckets(&world);
        answered(&env, (&set, volume), 1_000..1_300, |piece| put(piece, 7)).await;
        answered(&env, (&set, volume), 999..1_000, |piece| put(piece, 8)).await;
        world.borrow_mut().fate = None;
        rest(&env, &set, volume).await;
        for (piece, byte) in [(999, 8), (1_299, 7)] {
            assert_eq!(bucket_of(&set, volume, piece * PIECE).await, None, "{piece}");
            assert_eq!(bytes(&set, volume, piece * PIECE, 8).await, [byte; 8], "{piece}");
        }
        set.stop().await.expect("in order");
    });
}

/// Reads that may add nothing because of the cache mode still find what is cached, and they age
/// unused buckets.
#[test]
fn reads_that_are_bypassed_age_the_cache_too() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        for piece in 0..8 {
            ask(&set, volume, put(piece, 1)).await;
        }
        set.set_cache_mode_for_now(volume, CacheMode::None).expect("it is served");
        let before = set.ages().await.average.expect("buckets are used");
        let reads = set.status().stats.reads;
        // One step for each 75 sectors.
        for _ in 0..100 {
            ask(&set, volume, read(0)).await;
        }
        assert_eq!(set.status().stats.reads.bypass_hits, reads.bypass_hits + 100, "all were bypassed");
        let after = set.ages().await.average.expect("buckets are used");
        assert!(after > before + 50, "{before} and then {after}");
    });
}

/// Dirty data of two volumes and clean copies are in one bucket each, whichever clients write and
/// wherever: they die at different times.
#[test]
fn each_volume_fills_a_bucket_of_its_own_and_clean_copies_another() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, move |env| async move {
        let (set, tank) = open(env.clone(), options()).await.expect("sound");
        let scratch = set.create_flash_only(4096, Label::default()).await.expect("there is room");
        // Three interleaved streams, which the kernel would separate.
        let sector = |n: u64| n % 3 * 1024 + n / 3 * 8;
        for n in 0..4 {
            for volume in [tank, scratch] {
                ask(&set, volume, write(sector(n), 8, 1)).await;
            }
            ask(&set, tank, Request::Read { sector: 100_000 + 1024 * n, buffer: Buffer::zeroed(4096) }).await;
            env.sleep(Duration::from_millis(1)).await;
        }
        rest(&env, &set, tank).await;
        let mut buckets: Vec<BTreeSet<Option<u64>>> = vec![BTreeSet::new(); 3];
        for n in 0..4 {
            buckets[0].insert(bucket_of(&set, tank, sector(n)).await);
            buckets[1].insert(bucket_of(&set, scratch, sector(n)).await);
            buckets[2].insert(bucket_of(&set, tank, 100_000 + 1024 * n).await);
        }
        assert!(buckets.iter().all(|of| of.len() == 1 && !of.contains(&None)), "{buckets:?}");
        let all: BTreeSet<_> = buckets.iter().flatten().collect();
        assert_eq!(all.len(), 3, "{buckets:?}");
    });
}
