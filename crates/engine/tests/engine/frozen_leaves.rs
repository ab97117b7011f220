//! A damaged leaf found by the walk at start freezes the range that it indexes, and nothing else.
//! None of its data is lost if the leaf becomes readable again.

use crate::memory::World;
use crate::rig::{Rig, Sizes, ask, bytes, open, run, write};
use bcached_engine::{CacheSet, CancelToken, Error, Options, Request, VolumeId, VolumeOptions};
use bcached_env::{Buffer, Env};
use bcached_format::{BackingState, Label, SetMagic, Uuid};
use std::ops::Range;
use std::time::Duration;

/// Sectors of a bucket, and of a node; the last sector of a bucket is its summary.
const BUCKET: u64 = 64;
const SIZES: Sizes = Sizes { block: 1, bucket: 64, buckets: 1600, backing: 200_000 };
/// Number of extents, none adjacent to another: keys for several leaves. Those below `CLEAN` are
/// written back.
const EXTENTS: u64 = 10_000;
const CLEAN: u64 = 5_000;
/// Sectors of an extent, and from the start of one to the next.
const LENGTH: usize = 4;
const STEP: u64 = 8;
/// First sector of data on the backing device.
const DATA_OFFSET: u64 = 16;
/// What replaces the first sector of a leaf.
const DAMAGE: [u8; 512] = [0x5A; 512];
/// An extent whose leaf is damaged.
const HIT: u64 = 7_000;

fn options(reserve: u64) -> Options {
    Options {
        reserve: Some(reserve),
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

fn byte_of(number: u64, round: u64) -> u8 {
    u8::try_from((number + round) % 251).expect("below 251") + 1
}

async fn write_extents(set: &CacheSet, volume: VolumeId, numbers: impl Iterator<Item = u64>, round: u64) {
    for number in numbers {
        ask(set, volume, write(STEP * number, LENGTH, byte_of(number, round))).await;
    }
    ask(set, volume, Request::Flush).await;
}

/// A set with clean and dirty data in many leaves, whose process has died after all of them were
/// written.
fn crashed(options: Options, seed: u64) -> Rig {
    let mut rig = Rig::new(SIZES, seed);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options.clone()).await.expect("a new set");
        write_extents(&set, volume, 0..CLEAN, 0).await;
        set.write_back(volume, &CancelToken::default()).await.expect("the device works");
        write_extents(&set, volume, CLEAN..EXTENTS, 0).await;
        rests(&env, &set, &options).await;
        ask(&set, volume, write(0, LENGTH, byte_of(0, 0))).await;
        ask(&set, volume, Request::Flush).await;
    });
    rig
}

/// Waits until the reserve is complete and all leaves are written.
async fn rests(env: &Env, set: &CacheSet, options: &Options) {
    while set.status().buckets_reserved < options.reserve.unwrap_or(0) {
        env.sleep(Duration::from_millis(10)).await;
    }
    env.sleep(Duration::from_secs(40)).await;
}

/// The first sectors of nodes that contain a key of the extent: its current leaf, and former ones.
fn leaves_of(world: &World, number: u64) -> Vec<u64> {
    // A key is positioned at the end of its extent.
    let end = DATA_OFFSET + STEP * number + LENGTH as u64;
    let magic = SetMagic::of(Uuid([1; 16])).bset().to_le_bytes();
    let mut node = vec![0; usize::try_from(BUCKET * 512).expect("small")];
    let mut is_leaf = |first: &u64| {
        world.look(0, *first, &mut node);
        let is_there = node[8..16] == magic || node[16..24] == magic;
        is_there && node.chunks_exact(8).any(|word| word == end.to_le_bytes())
    };
    (0..SIZES.buckets).map(|bucket| bucket * BUCKET).filter(|first| is_leaf(first)).collect()
}

/// Damages the nodes that begin at `leaves`; returns what was there.
fn damage(rig: &Rig, leaves: &[u64]) -> Vec<[u8; 512]> {
    let mut world = rig.world.borrow_mut();
    let damage = |leaf: &u64| {
        let mut sound = [0; 512];
        world.look(0, *leaf, &mut sound);
        world.place(0, *leaf, &DAMAGE);
        sound
    };
    leaves.iter().map(damage).collect()
}

/// Restores them, except where the place has been reused since.
fn heal(rig: &Rig, leaves: &[u64], sound: &[[u8; 512]]) {
    let mut world = rig.world.borrow_mut();
    for (leaf, sound) in leaves.iter().zip(sound) {
        let mut found = [0; 512];
        world.look(0, *leaf, &mut found);
        if found == DAMAGE {
            world.place(0, *leaf, sound);
        }
    }
}

async fn result_of(set: &CacheSet, volume: VolumeId, request: Request) -> Result<(), Error> {
    set.serve(volume, request).await.result
}

/// Checks the behaviour of a set with a damaged leaf. Returns which extents are frozen.
async fn all_but_the_range_is_served(set: &CacheSet, volume: VolumeId, round: u64) -> Range<u64> {
    set.walked().await.expect("the walk passes it by");
    let unreadable = set.status().unreadable;
    assert_eq!((unreadable.len(), unreadable[0].level), (1, 0), "{unreadable:?}");
    let covered = unreadable[0].covers[0];
    let frozen = covered.start.div_ceil(STEP)..covered.end.div_ceil(STEP);
    assert!(frozen.contains(&HIT) && frozen.end - frozen.start < 2_000, "{covered:?}");
    let is_damage = |result: Result<(), Error>| matches!(result, Err(Error::Node { .. }));
    for number in frozen.clone() {
        let read = Request::Read { sector: STEP * number, buffer: Buffer::zeroed(512) };
        assert!(is_damage(result_of(set, volume, read).await), "extent {number} is not read as a hole");
    }
    let inside = result_of(set, volume, write(STEP * HIT, 1, 9)).await;
    assert!(is_damage(inside), "nor written");
    check(set, volume, round, &frozen).await;
    frozen
}

async fn check(set: &CacheSet, volume: VolumeId, round: u64, frozen: &Range<u64>) {
    for number in (0..EXTENTS).filter(|number| !frozen.contains(number)) {
        let found = bytes(set, volume, STEP * number, LENGTH).await;
        assert_eq!(found, [byte_of(number, round); LENGTH], "extent {number}");
    }
}

/// A leaf is damaged. Then other extents are written repeatedly, which takes as many buckets as are
/// available.
fn a_damaged_leaf_freezes_its_range(reserve: u64, seed: u64) {
    const ROUNDS: u64 = 4;
    let mut rig = crashed(options(reserve), seed);
    let leaves = leaves_of(&rig.world.borrow(), HIT);
    let sound = damage(&rig, &leaves);
    let frozen = run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options(reserve)).await.expect("it opens");
        let frozen = all_but_the_range_is_served(&set, volume, 0).await;
        for round in 1..=ROUNDS {
            let others = (0..EXTENTS).filter(|number| !frozen.contains(number));
            write_extents(&set, volume, others, round).await;
            // All known dirty data is written back, and then an error says that this may not be
            // all.
            let flushed = set.write_back(volume, &CancelToken::default()).await;
            assert!(matches!(flushed, Err(Error::Node { .. })), "{flushed:?}");
            assert_eq!(set.status().dirty_sectors, 0);
        }
        let detached = set.detach(volume, &CancelToken::default()).await;
        assert!(matches!(detached, Err(Error::Node { .. })), "{detached:?}");
        assert_eq!(set.volumes()[0].state, Some(BackingState::Dirty));
        assert_eq!(set.failure(), None, "the set goes on");
        set.assert_invariants();
        rests(&env, &set, &options(reserve)).await;
        frozen
    });
    // The same after a crash, and after a stop.
    for ends_in_order in [false, true, true] {
        run(&mut rig, move |env| async move {
            let (set, volume) = open(env.clone(), options(reserve)).await.expect("it opens");
            all_but_the_range_is_served(&set, volume, ROUNDS).await;
            if ends_in_order {
                set.stop().await.expect("it stops");
            }
        });
    }
    heal(&rig, &leaves, &sound);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options(reserve)).await.expect("it opens");
        set.walked().await.expect("it is sound");
        check(&set, volume, ROUNDS, &frozen).await;
        for number in frozen {
            let found = bytes(&set, volume, STEP * number, LENGTH).await;
            assert_eq!(found, [byte_of(number, 0); LENGTH], "extent {number} has been kept");
        }
        set.write_back(volume, &CancelToken::default()).await.expect("nothing is frozen any more");
        set.detach(volume, &CancelToken::default()).await.expect("nor dirty");
    });
}

#[test]
fn a_damaged_leaf_that_is_met_beside_requests_freezes_its_range() {
    a_damaged_leaf_freezes_its_range(100, 1);
}

/// Without a reserve, the summaries prove that the buckets in use belong to nothing else.
#[test]
fn a_damaged_leaf_that_is_met_by_a_start_that_walks_first_freezes_its_range() {
    a_damaged_leaf_freezes_its_range(0, 2);
}

/// The journal has keys for the damaged leaf. Their data is readable, and they stay in the journal
/// without blocking anything else.
#[test]
fn keys_of_the_journal_lie_over_a_damaged_leaf() {
    const CHANGED: Range<u64> = HIT..HIT + 50;
    let mut rig = crashed(options(100), 4);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options(100)).await.expect("it opens");
        set.walked().await.expect("it is sound");
        write_extents(&set, volume, CHANGED, 1).await;
    });
    let leaves = leaves_of(&rig.world.borrow(), HIT);
    let sound = damage(&rig, &leaves);
    for ends_in_order in [true, false, true] {
        run(&mut rig, move |env| async move {
            let (set, volume) = open(env.clone(), options(100)).await.expect("it opens");
            set.walked().await.expect("the walk passes it by");
            let covered = set.status().unreadable[0].covers[0];
            let frozen = covered.start.div_ceil(STEP)..covered.end.div_ceil(STEP);
            check(&set, volume, 0, &frozen).await;
            for number in CHANGED {
                assert_eq!(bytes(&set, volume, STEP * number, LENGTH).await, [byte_of(number, 1); LENGTH]);
            }
            let below = Request::Read { sector: STEP * frozen.start, buffer: Buffer::zeroed(512) };
            assert!(matches!(result_of(&set, volume, below).await, Err(Error::Node { .. })));
            let flushed = set.write_back(volume, &CancelToken::default()).await;
            assert!(matches!(flushed, Err(Error::Node { .. })), "{flushed:?}");
            assert_eq!(set.status().dirty_sectors, 0, "the rest is written back");
            write_extents(&set, volume, 0..CLEAN, 0).await;
            assert_eq!(set.failure(), None, "the set goes on");
            if ends_in_order {
                set.stop().await.expect("it stops");
            }
        });
    }
    heal(&rig, &leaves, &sound);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options(100)).await.expect("it opens");
        set.walked().await.expect("it is sound");
        check(&set, volume, 0, &CHANGED).await;
        for number in CHANGED {
            assert_eq!(bytes(&set, volume, STEP * number, LENGTH).await, [byte_of(number, 1); LENGTH]);
        }
        set.write_back(volume, &CancelToken::default()).await.expect("nothing is frozen any more");
        set.detach(volume, &CancelToken::default()).await.expect("nor dirty");
    });
}

/// A volume whose superblock says that it has no dirty data needs no leaf.
#[test]
fn a_clean_volume_goes_on_without_a_damaged_leaf() {
    let mut rig = Rig::new(SIZES, 3);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options(100)).await.expect("a new set");
        write_extents(&set, volume, 0..EXTENTS, 0).await;
        set.write_back(volume, &CancelToken::default()).await.expect("the device works");
        rests(&env, &set, &options(100)).await;
        set.stop().await.expect("it stops");
    });
    let leaves = leaves_of(&rig.world.borrow(), HIT);
    damage(&rig, &leaves);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options(100)).await.expect("it opens");
        set.walked().await.expect("the walk passes it by");
        assert_eq!(set.status().unreadable.len(), 1);
        set.write_back(volume, &CancelToken::default()).await.expect("nothing is dirty");
        check(&set, volume, 0, &(0..0)).await;
        ask(&set, volume, write(STEP * HIT, LENGTH, 9)).await;
        assert_eq!(bytes(&set, volume, STEP * HIT, LENGTH).await, [9; LENGTH]);
        assert_eq!(set.volumes()[0].state, Some(BackingState::Stale), "durably without the cache");
        set.stop().await.expect("it stops");
    });
}

/// Buckets that are not reused because a damaged leaf may point to them are promised to no volume.
#[test]
fn a_volume_in_the_cache_alone_is_promised_nothing_that_is_kept_for_a_damaged_leaf() {
    let options = options(70);
    let mut rig = crashed(options.clone(), 5);
    let leaves = leaves_of(&rig.world.borrow(), HIT);
    damage(&rig, &leaves);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options).await.expect("the reserve is there");
        set.walked().await.expect("the walk passes it by");
        assert_eq!(set.status().unreadable.len(), 1);
        let flushed = set.write_back(volume, &CancelToken::default()).await;
        assert!(matches!(flushed, Err(Error::Node { .. })), "all but the range: {flushed:?}");
        let room = set.status().flash_room_sectors;
        assert!(room > 10_000, "{room} sectors");
        let label = Label::from_text("scratch").expect("short");
        let scratch = set.create_flash_only(room, label).await.expect("it is promised");
        // Every other sector first: overwriting then leaves most buckets half full.
        let pieces = (0..room - 1).step_by(2).chain((1..room - 1).step_by(2));
        for at in pieces.clone().chain(pieces.step_by(3)) {
            let written = result_of(&set, scratch, write(at, 1, 7)).await;
            assert_eq!(written, Ok(()), "sector {at} of {room}");
        }
        set.stop().await.expect("it stops");
    });
}
