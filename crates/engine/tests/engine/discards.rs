//! Buckets that hold nothing are discarded on the cache device, in the background, once nothing can
//! bring back their contents.

use crate::background_tasks::BackgroundTask;
use crate::memory::{DISCARDED, OpFault};
use crate::resume::PersistentNote;
use crate::rig::{BACKING, CACHE, Rig, Sizes, ask, bytes, in_flight, open, run, write};
use bcached_engine::{CacheSet, DiscardState, Options, Request, Settings, Status, VolumeId, VolumeOptions};
use bcached_env::{DiskId, Env, Op};
use bcached_format::superblock::SUPERBLOCK_SECTOR;
use bcached_format::{CacheMode, ReplacementPolicy};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// Sectors of a bucket.
const BUCKET: u64 = 128;
const SIZES: Sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 400_000 };

/// More pieces of one bucket each than the cache holds.
const PIECES: u64 = 1200;

/// The first sector behind the journal: the superblock's bucket, then the journal buckets of a set
/// of this size.
const BEHIND_JOURNAL: u64 = BUCKET * 5;

fn options() -> Options {
    Options { discard: Some(true), ..Options::default() }
}

fn byte_of(piece: u64) -> u8 {
    u8::try_from(piece % 199).expect("below 199") + 1
}

fn rig(seed: u64) -> Rig {
    let rig = Rig::new(SIZES, seed);
    rig.world.borrow_mut().discard = true;
    rig
}

/// Opens the set, with a volume in writethrough mode: its clean data is evicted when more arrives.
async fn opened(env: &Env, options: Options) -> (CacheSet, VolumeId) {
    let (set, volume) = open(env.clone(), options).await.expect("sound");
    set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
    (set, volume)
}

async fn piece(set: &CacheSet, volume: VolumeId, number: u64) {
    ask(set, volume, write(number * BUCKET, 128, byte_of(number))).await;
}

/// Waits until nothing has been discarded for a while.
async fn calm(env: &Env, set: &CacheSet) -> Status {
    let mut before = None;
    loop {
        let status = set.status();
        if before == Some(status.discards) {
            return status;
        }
        before = Some(status.discards);
        env.sleep(Duration::from_millis(50)).await;
    }
}

/// Twice the cache's capacity is written and read again. Discards run all the time, and no client
/// is affected by one.
#[test]
fn what_is_discarded_is_nobodys() {
    for seed in 0..4 {
        let mut rig = rig(seed);
        let world = Rc::clone(&rig.world);
        let status = run(&mut rig, move |env| async move {
            let (set, volume) = opened(&env, options()).await;
            let writing = set.clone();
            in_flight(&env, PIECES, 8, move |number| {
                let set = writing.clone();
                async move {
                    piece(&set, volume, number).await;
                    let other = number / 2;
                    let found = bytes(&set, volume, other * BUCKET, 128).await;
                    assert!(found.iter().all(|byte| [byte_of(other), 0].contains(byte)), "piece {other}");
                }
            })
            .await;
            for number in 0..PIECES {
                let found = bytes(&set, volume, number * BUCKET, 128).await;
                assert!(found.iter().all(|byte| *byte == byte_of(number)), "piece {number}");
            }
            let status = calm(&env, &set).await;
            set.assert_invariants();
            set.stop().await.expect("it stops");
            let (set, volume) = opened(&env, options()).await;
            let found = bytes(&set, volume, 7 * BUCKET, 128).await;
            assert!(found.iter().all(|byte| *byte == byte_of(7)));
            status
        });
        let world = world.borrow();
        assert_eq!(world.beside_discards, Vec::<String>::new());
        let discarded: u64 = world.discarded.iter().map(|(_, _, sectors)| sectors * 512).sum();
        assert!(status.discards.bytes > 400 * BUCKET * 512, "{:?}", status.discards);
        assert!(discarded >= status.discards.bytes, "{discarded}, {:?}", status.discards);
        assert!(status.discards.count * 2 < status.discards.bytes / (BUCKET * 512), "neighbours together");
        let touched = |(disk, sector, _): &(DiskId, u64, u64)| *disk == CACHE && *sector >= BEHIND_JOURNAL;
        assert!(world.discarded.iter().all(touched), "neither the superblock nor the journal");
    }
}

/// The journal entry that makes new generations durable is slow. A power cut would bring back the
/// pointers to the old contents of the buckets, so none of it may be discarded yet.
/// Proves invariant D11.
#[test]
fn nothing_is_discarded_before_its_generation_is_durable() {
    let mut rig = rig(3);
    let holds = Rc::new(Cell::new(false));
    let is_held = Rc::clone(&holds);
    rig.world.borrow_mut().fate = Some(Box::new(move |disk, op| {
        let is_entry = matches!(op, Op::Write { sector, .. } if (BUCKET..BEHIND_JOURNAL).contains(sector));
        (disk == CACHE && is_entry && is_held.get()).then_some(OpFault::Waits)
    }));
    run(&mut rig, move |env| async move {
        let (set, volume) = opened(&env, options()).await;
        for number in 0..PIECES {
            piece(&set, volume, number).await;
        }
        ask(&set, volume, Request::Flush).await;
        let before = calm(&env, &set).await;
        holds.set(true);
        // Nothing of these is cached, so no hole has to be durable before they are written.
        for number in PIECES..PIECES + 60 {
            let (set, env) = (set.clone(), env.clone());
            env.spawn(async move { piece(&set, volume, number).await });
        }
        env.sleep(Duration::from_secs(1)).await;
        let held = set.status();
        assert!(held.buckets_free < before.buckets_free, "some are used");
        assert_eq!(held.discards, before.discards, "of what was taken from its data");
        holds.set(false);
        env.sleep(Duration::from_secs(1)).await;
        assert!(calm(&env, &set).await.discards.bytes > before.discards.bytes, "it is durable now");
    });
}

/// A device that never completes a discard blocks nothing but a stop.
#[test]
fn nobody_waits_for_a_discard_but_a_stop() {
    let mut rig = rig(5);
    let holds = Rc::new(Cell::new(true));
    let is_held = Rc::clone(&holds);
    rig.world.borrow_mut().fate = Some(Box::new(move |_, op| {
        (matches!(op, Op::Discard { .. }) && is_held.get()).then_some(OpFault::Waits)
    }));
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = opened(&env, options()).await;
        for number in 0..PIECES {
            piece(&set, volume, number).await;
        }
        let status = set.status();
        assert_eq!((status.discards.count, status.discard), (0, DiscardState::On));
        assert_eq!(status.stats.bypassed.total().requests, 0, "all of it was cached");
        let stopping = BackgroundTask::start(&env, async move { set.stop().await });
        env.sleep(Duration::from_secs(10)).await;
        assert!(!stopping.is_over(), "a discard is under way");
        holds.set(false);
        env.sleep(Duration::from_secs(10)).await;
        assert!(stopping.is_over());
        stopping.result(&env).await.expect("it stops");
    });
    assert_eq!(world.borrow().beside_discards, Vec::<String>::new());
}

/// An allocation while buckets are being discarded gets one: the reserves are never among these.
#[test]
fn enough_stay_that_can_be_had_at_once() {
    /// Reserves for nodes and for moving: so many buckets stay free however much data is written.
    const RESERVES: u64 = 14;
    let mut rig = rig(6);
    let least = run(&mut rig, |env| async move {
        let (set, volume) = opened(&env, Options { discard: Some(false), ..options() }).await;
        // The buckets that were free at first; none of them has been discarded when discards begin.
        calm(&env, &set).await;
        let (looking, is_over) = (set.clone(), Rc::new(Cell::new(false)));
        let (ends, least) = (Rc::clone(&is_over), Rc::new(Cell::new(u64::MAX)));
        let (fewest, clock) = (Rc::clone(&least), env.clone());
        env.spawn(async move {
            while !ends.get() {
                fewest.set(fewest.get().min(looking.status().buckets_free));
                clock.sleep(Duration::from_micros(1)).await;
            }
        });
        set.change_options(|options| options.discard = Some(true));
        for number in 0..PIECES {
            piece(&set, volume, number).await;
        }
        is_over.set(true);
        least.get()
    });
    assert!((RESERVES..100).contains(&least), "{least}");
}

/// A device that fails a discard gets no more of them and otherwise works on. Setting the option
/// again retries them.
#[test]
fn a_discard_that_fails_ends_them_and_nothing_else() {
    let mut rig = rig(7);
    let fails = Rc::new(Cell::new(true));
    let (is_failing, asked) = (Rc::clone(&fails), Rc::new(Cell::new(0)));
    let count = Rc::clone(&asked);
    rig.world.borrow_mut().fate = Some(Box::new(move |_, op| {
        let is_discard = matches!(op, Op::Discard { .. });
        count.set(count.get() + u32::from(is_discard));
        (is_discard && is_failing.get()).then_some(OpFault::Fails)
    }));
    run(&mut rig, move |env| async move {
        let (set, volume) = opened(&env, options()).await;
        for number in 0..PIECES {
            piece(&set, volume, number).await;
        }
        let status = calm(&env, &set).await;
        assert!(matches!(status.discard, DiscardState::Failed(_)), "{:?}", status.discard);
        assert_eq!((status.discards.bytes, asked.get(), status.failed, status.io_errors), (0, 1, None, 0));
        fails.set(false);
        set.change_options(|options| options.discard = Some(false));
        assert_eq!(set.status().discard, DiscardState::Off);
        set.change_options(|options| options.discard = Some(true));
        let status = calm(&env, &set).await;
        assert_eq!(status.discard, DiscardState::On);
        assert!(status.discards.bytes > 0);
        set.stop().await.expect("it stops");
    });
}

/// A file system may report only when asked that it cannot discard. That is no device failure,
/// which would be reported as trouble.
#[test]
fn a_discard_that_is_not_known_after_all_is_no_failure() {
    let mut rig = rig(8);
    rig.world.borrow_mut().fate =
        Some(Box::new(|_, op| matches!(op, Op::Discard { .. }).then_some(OpFault::Unknown)));
    run(&mut rig, move |env| async move {
        let (set, volume) = opened(&env, options()).await;
        for number in 0..PIECES {
            piece(&set, volume, number).await;
        }
        let status = calm(&env, &set).await;
        assert_eq!((status.discard, status.discards.bytes), (DiscardState::Unsupported, 0));
        assert_eq!(status.cache_health.errors, 0);
    });
}

/// No discard is issued if the device does not support it, or if it is not configured.
#[test]
fn none_is_tried_where_the_device_knows_none_or_nobody_asks() {
    for (can, wanted, expected) in [
        (false, Some(true), DiscardState::Unsupported),
        (true, Some(false), DiscardState::Off),
        (true, None, DiscardState::Off),
    ] {
        let mut rig = rig(9);
        rig.world.borrow_mut().discard = can;
        let asked = Rc::new(Cell::new(0));
        let count = Rc::clone(&asked);
        rig.world.borrow_mut().fate = Some(Box::new(move |_, op| {
            count.set(count.get() + u32::from(matches!(op, Op::Discard { .. })));
            None
        }));
        run(&mut rig, move |env| async move {
            let (set, volume) = opened(&env, Options { discard: wanted, ..options() }).await;
            for number in 0..PIECES {
                piece(&set, volume, number).await;
            }
            let status = calm(&env, &set).await;
            assert_eq!((status.discard, asked.get()), (expected, 0));
        });
    }
}

/// Settings kept in the superblock are in force from the change on and after the next start, unless
/// the options override them.
#[test]
fn settings_are_kept_in_the_superblock() {
    let mut rig = rig(11);
    run(&mut rig, |env| async move {
        let of = |status: &Status| (status.discard, status.replacement, status.kept);
        let kept = |discard, replacement| Settings { discard: Some(discard), replacement: Some(replacement) };
        let (set, _) = opened(&env, Options::default()).await;
        let before = kept(false, ReplacementPolicy::Lru);
        assert_eq!(of(&set.status()), (DiscardState::Off, ReplacementPolicy::Lru, before));
        set.keep_settings(Settings { discard: Some(true), replacement: None }).await.expect("written");
        let fifo = Settings { discard: None, replacement: Some(ReplacementPolicy::Fifo) };
        set.keep_settings(fifo).await.expect("written");
        let after = kept(true, ReplacementPolicy::Fifo);
        assert_eq!(of(&set.status()), (DiscardState::On, ReplacementPolicy::Fifo, after));
        set.change_options(|options| {
            options.discard = Some(false);
            options.replacement = Some(ReplacementPolicy::Random);
        });
        assert_eq!(of(&set.status()), (DiscardState::Off, ReplacementPolicy::Random, after));
        set.stop().await.expect("it stops");
        let (set, _) = opened(&env, Options::default()).await;
        assert_eq!(of(&set.status()), (DiscardState::On, ReplacementPolicy::Fifo, after));
    });
}

/// The daemon is killed after its superblock has changed. What it had acknowledged, which only the
/// note holds, belongs to the same session as before. (If the checksum of the whole superblock
/// named the session, the note would be void.)
#[test]
fn a_change_of_settings_makes_no_note_void() {
    // Whether the superblock has reached the device when the process dies.
    for lands in [true, false] {
        let mut rig = rig(13);
        let dies = Rc::new(Cell::new(false));
        let is_dying = Rc::clone(&dies);
        rig.world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let is_superblock = matches!(op, Op::Write { sector, .. } if *sector == SUPERBLOCK_SECTOR);
            (disk == CACHE && is_superblock && is_dying.get() && !lands).then_some(OpFault::Waits)
        }));
        let note = PersistentNote::default();
        let held = note.clone();
        let late = Duration::from_secs(3600);
        let options = move || Options {
            journal_delay: late,
            leaf_delay: late,
            volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
            ..Options::default()
        };
        run(&mut rig, move |env| async move {
            let set = CacheSet::open(env.clone(), CACHE, Box::new(held), options()).await.expect("sound");
            let volume = set.add_backing(BACKING, None).await.expect("sound");
            ask(&set, volume, write(64, 8, 7)).await;
            dies.set(true);
            let changing = set.clone();
            env.spawn(async move {
                let settings = Settings { discard: Some(true), replacement: Some(ReplacementPolicy::Random) };
                let _killed = changing.keep_settings(settings).await;
            });
            env.sleep(Duration::from_secs(1)).await;
            assert_eq!(set.status().kept.discard, Some(lands));
        });
        rig.world.borrow_mut().fate = None;
        run(&mut rig, move |env| async move {
            let set = CacheSet::open(env, CACHE, Box::new(note), options()).await.expect("sound");
            let volume = set.add_backing(BACKING, None).await.expect("sound");
            assert_eq!(bytes(&set, volume, 64, 8).await, [7; 8], "landed: {lands}");
            assert_ne!(DISCARDED, 7);
        });
    }
}
