//! Write-back and its failures: nothing is held forever, the rest proceeds, and the failure is
//! reported. Also what the counters count.

use crate::memory::OpFault;
use crate::rig::{BACKING, CACHE, DATA_OFFSET, Rig, Sizes, ask, bytes, in_flight, open, run, write};
use bcached_engine::{BypassReason, Options, ReadStats, Request, Traffic, VolumeOptions};
use bcached_env::{Buffer, Op, Payload};
use bcached_format::superblock::SUPERBLOCK_SECTOR;
use bcached_format::{BackingState, CacheMode};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 200_000 };

/// A node of [`SIZES`] in bytes.
const NODE: usize = 128 * 512;

fn options() -> Options {
    Options {
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        volume: VolumeOptions {
            writeback_running: false,
            writeback_delay: Duration::from_millis(100),
            ..VolumeOptions::default()
        },
        ..Options::default()
    }
}

/// A rig with dirty data in several leaves.
fn dirty_rig() -> Rig {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        let worker = set.clone();
        in_flight(&env, 6000, 8, move |n| {
            let set = worker.clone();
            async move { drop(ask(&set, volume, write(2 * n, 1, 7)).await) }
        })
        .await;
        assert!(set.status().tree_depth > 0, "there are several leaves");
        set.stop().await.expect("it stops");
    });
    rig
}

/// While write-back gathers a batch, the second leaf fails to be read, once. The keys from the
/// first leaf used to stay claimed forever: they were never written back, and a discard of their
/// range never completed.
#[test]
fn a_leaf_that_cannot_be_read_once_holds_nobody_up() {
    let mut rig = dirty_rig();
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let options = Options {
            volume: VolumeOptions { writeback_running: true, writeback_percent: 0, ..options().volume },
            ..options()
        };
        let (set, volume) = open(env.clone(), options).await.expect("sound");
        let (reads, counted) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let (seen, failed) = (Rc::clone(&reads), Rc::clone(&counted));
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let Op::Read { buffer, .. } = op else { return None };
            seen.set(seen.get() + u32::from(disk == CACHE && buffer.len() == NODE));
            let fails = seen.get() == 2 && failed.get() == 0;
            failed.set(failed.get() + u32::from(fails));
            fails.then_some(OpFault::Fails)
        }));
        for _ in 0..600 {
            env.sleep(Duration::from_millis(500)).await;
        }
        assert_eq!(counted.get(), 1, "one leaf could not be read");
        assert_eq!(set.status().dirty_sectors, 0);
        assert_eq!(set.volumes()[0].writeback_trouble, None);
        ask(&set, volume, Request::Discard { sector: 0, sectors: 12_000 }).await;
    });
}

/// One leaf is permanently unreadable. All other dirty data is still written back, and the volume's
/// status reports where dirty data is stuck, and why.
#[test]
fn a_leaf_that_can_never_be_read_is_passed_by_and_named() {
    let mut rig = dirty_rig();
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let options = Options {
            volume: VolumeOptions { writeback_running: true, writeback_percent: 0, ..options().volume },
            ..options()
        };
        let (set, _) = open(env.clone(), options).await.expect("sound");
        let before = set.status().dirty_sectors;
        let mut bad = None;
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            Op::Read { buffer, sector } if disk == CACHE && buffer.len() == NODE => {
                (*bad.get_or_insert(*sector) == *sector).then_some(OpFault::Fails)
            }
            _ => None,
        }));
        env.sleep(Duration::from_secs(60)).await;
        let trouble = set.volumes().remove(0).writeback_trouble.expect("it stands still");
        let dirty = set.status().dirty_sectors;
        assert!(0 < dirty && dirty < before, "{dirty} of {before} sectors are left");
        assert!(trouble.error.to_string().contains("btree node"), "{trouble:?}");
        // Every other sector of the range is dirty, and nothing else is.
        assert!(trouble.sectors.div_ceil(2).abs_diff(dirty) <= 1, "{trouble:?}, {dirty} sectors are left");
        world.borrow_mut().fate = None;
        env.sleep(Duration::from_secs(60)).await;
        assert_eq!((set.status().dirty_sectors, set.volumes().remove(0).writeback_trouble), (0, None));
    });
}

/// A part of the backing device cannot be written, and the status names it. Write-back used to
/// stall without a report.
#[test]
fn a_backing_device_that_refuses_a_range_is_named() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let options = Options {
            volume: VolumeOptions { writeback_running: true, writeback_percent: 0, ..options().volume },
            ..options()
        };
        let (set, volume) = open(env.clone(), options).await.expect("sound");
        let refused = Rc::new(Cell::new(0));
        let seen = Rc::clone(&refused);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let fails = matches!(op, Op::Write { payload, .. } if payload.as_slice()[0] == 0x77);
            seen.set(seen.get() + u64::from(fails && disk == BACKING));
            (fails && disk == BACKING).then_some(OpFault::Fails)
        }));
        ask(&set, volume, write(0, 8, 1)).await;
        ask(&set, volume, write(640, 8, 0x77)).await;
        env.sleep(Duration::from_secs(10)).await;
        assert!(refused.get() > 1, "it is tried again");
        let trouble = set.volumes().remove(0).writeback_trouble.expect("it stands still");
        assert_eq!((trouble.sector, trouble.sectors, set.status().dirty_sectors), (640, 8, 8));
        assert!(trouble.error.to_string().contains("backing device"), "{trouble:?}");
        let stats = set.status().stats;
        assert_eq!((stats.writeback_keys_done, stats.writeback_keys_failed), (1, 0), "the other has left");
        assert_eq!(stats.writeback_errors, refused.get(), "each time that it was tried");
        world.borrow_mut().fate = None;
        env.sleep(Duration::from_secs(10)).await;
        assert_eq!((set.status().dirty_sectors, set.volumes().remove(0).writeback_trouble), (0, None));
    });
}

/// Data is overwritten while it is being written back: none of it becomes clean, which the kernel
/// counts as failed.
#[test]
fn what_is_overtaken_by_a_write_is_counted_apart() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let options = Options {
            volume: VolumeOptions { writeback_running: true, writeback_percent: 0, ..options().volume },
            ..options()
        };
        let (set, volume) = open(env.clone(), options).await.expect("sound");
        let (holds, copying) = (Rc::new(Cell::new(true)), Rc::new(Cell::new(false)));
        let (held, is_copying) = (Rc::clone(&holds), Rc::clone(&copying));
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let is_copy = disk == BACKING && matches!(op, Op::Write { sector: DATA_OFFSET, .. });
            is_copying.set(is_copying.get() || is_copy);
            (is_copy && held.get()).then_some(OpFault::Waits)
        }));
        ask(&set, volume, write(0, 8, 1)).await;
        while !copying.get() {
            env.sleep(Duration::from_micros(10)).await;
        }
        ask(&set, volume, write(0, 8, 2)).await;
        holds.set(false);
        env.sleep(Duration::from_secs(10)).await;
        let status = set.status();
        assert_eq!((status.stats.writeback_keys_done, status.stats.writeback_keys_failed), (1, 1));
        assert_eq!(status.dirty_sectors, 0, "what overtook it has left, too");
    });
}

/// A sector of the backing device that could not be written works again. Its report in the status
/// ends, although other data is dirty all the time.
#[test]
fn a_place_that_is_mended_is_not_named_any_more_while_others_are_dirty() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        // At the minimum rate a batch takes one of these writes a second.
        let options =
            Options { volume: VolumeOptions { writeback_running: true, ..options().volume }, ..options() };
        let (set, volume) = open(env.clone(), options).await.expect("sound");
        world.borrow_mut().fate = Some(Box::new(|disk, op| {
            let fails = matches!(op, Op::Write { payload, .. } if payload.as_slice()[0] == 0x77);
            (fails && disk == BACKING).then_some(OpFault::Fails)
        }));
        ask(&set, volume, write(640, 8, 0x77)).await;
        env.sleep(Duration::from_secs(10)).await;
        assert!(set.volumes()[0].writeback_trouble.is_some(), "it stands still");
        world.borrow_mut().fate = None;
        for number in 0..100 {
            // In falling order, so that write-back comes round; faster than it writes.
            ask(&set, volume, write(100_000 - 16 * number, 8, 1)).await;
            env.sleep(Duration::from_millis(100)).await;
        }
        assert!(set.status().dirty_sectors > 0, "there was dirty data all the time");
        assert_eq!(set.volumes()[0].writeback_trouble, None);
    });
}

/// Everything has been written back, but the backing device's superblock cannot be marked *clean*.
/// That used to be retried without a report. Afterwards the device's successes since the error are
/// counted.
#[test]
fn a_backing_device_that_cannot_be_marked_clean_is_named() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let options = Options {
            volume: VolumeOptions { writeback_running: true, writeback_percent: 0, ..options().volume },
            ..options()
        };
        let (set, volume) = open(env.clone(), options).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        let refused = Rc::new(Cell::new(0));
        let seen = Rc::clone(&refused);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let fails = disk == BACKING && matches!(op, Op::Write { sector: SUPERBLOCK_SECTOR, .. });
            seen.set(seen.get() + u64::from(fails));
            fails.then_some(OpFault::Fails)
        }));
        env.sleep(Duration::from_secs(10)).await;
        let info = set.volumes().remove(0);
        assert_eq!((info.dirty_sectors, info.state), (0, Some(BackingState::Dirty)));
        let error = info.marking_trouble.expect("it is named");
        assert!(error.to_string().contains("superblock"), "{error}");
        let health = info.backing_health.expect("a device");
        assert!(refused.get() > 1 && health.errors == refused.get(), "{health:?}");
        assert!(health.since_error < Duration::from_secs(5), "{health:?}");
        assert!(health.successes_since <= 1, "each try begins with what fails: {health:?}");

        world.borrow_mut().fate = None;
        env.sleep(Duration::from_secs(100)).await;
        let info = set.volumes().remove(0);
        assert_eq!((info.marking_trouble, info.state), (None, Some(BackingState::Clean)));
        let health = info.backing_health.expect("a device");
        assert!(health.since_error > Duration::from_secs(90) && health.successes_since > 1, "{health:?}");
    });
}

/// Both the cache and the backing device refuse a large write. It fails, and its space in the cache
/// is released. The space used to leak, and after enough failures every write waited for space
/// forever.
#[test]
fn a_write_that_nobody_takes_gives_its_space_back() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        world.borrow_mut().fate = Some(Box::new(|_, op| {
            let Op::Write { payload, .. } = op else { return None };
            payload.as_slice().iter().all(|byte| *byte == 0x77).then_some(OpFault::Fails)
        }));
        for round in 0..150 {
            assert!(set.serve(volume, write(round * 1024, 1024, 0x77)).await.result.is_err());
        }
        for round in 0..20 {
            ask(&set, volume, write(round * 1024, 1024, 1)).await;
        }
        assert_eq!(bytes(&set, volume, 0, 4).await, [1; 4]);
    });
}

/// Writes around the cache used to be counted as one byte each, and reads that the engine issues
/// itself, to complete a partial block, as a client's.
#[test]
fn counters_count_what_they_say() {
    let sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: 200_000 };
    run(&mut Rig::new(sizes, 1), |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        ask(&set, volume, write(1, 1, 1)).await;
        let stats = set.status().stats;
        assert_eq!((stats.reads, stats.write_bytes), (ReadStats::default(), 512));
        assert_eq!((stats.hit_bytes, stats.miss_bytes), (0, 0));
        ask(&set, volume, Request::Read { sector: 1, buffer: Buffer::zeroed(512) }).await;
        ask(&set, volume, Request::Read { sector: 801, buffer: Buffer::zeroed(512) }).await;
        let stats = set.status().stats;
        assert_eq!(stats.reads, ReadStats { hits: 1, misses: 1, ..ReadStats::default() });
        assert_eq!((stats.hit_bytes, stats.miss_bytes), (4096, 4096), "of the blocks around them");
        set.set_cache_mode(volume, CacheMode::Writearound).await.expect("set");
        ask(&set, volume, write(1600, 16, 1)).await;
        assert_eq!(
            set.status().stats.bypassed.of(BypassReason::Mode),
            Traffic { requests: 1, bytes: 16 * 512 }
        );
    });
}

/// Data was being written back when its range was written again. The cache refused the new data,
/// which therefore had to go to the backing device. Meanwhile the old data became clean. After a
/// crash it used to be served until its bucket was reused, and then the sector changed its contents
/// without a write.
#[test]
fn what_turns_clean_during_a_write_past_the_cache_does_not_hide_it() {
    const OLD: u8 = 1;
    const NEW: u8 = 2;
    let is_of = |payload: &Payload, byte| payload.as_slice().iter().all(|found| *found == byte);
    let mut rig = Rig::new(Sizes { bucket: 16, ..SIZES }, 1);
    let world = Rc::clone(&rig.world);
    let eager = Options {
        volume: VolumeOptions {
            writeback_running: true,
            writeback_percent: 0,
            writeback_delay: Duration::from_millis(5),
            ..options().volume
        },
        ..options()
    };
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), eager).await.expect("sound");
        let (holds, copying, landed) =
            (Rc::new(Cell::new(true)), Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
        let (held, is_copying, has_landed) = (Rc::clone(&holds), Rc::clone(&copying), Rc::clone(&landed));
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            Op::Write { sector: 16, payload, .. } if disk == BACKING && is_of(payload, OLD) => {
                is_copying.set(true);
                held.get().then_some(OpFault::Waits)
            }
            Op::Write { sector: 16, payload, .. } if disk == BACKING && is_of(payload, NEW) => {
                has_landed.set(true);
                None
            }
            Op::Write { payload, .. } if disk == CACHE && is_of(payload, NEW) => Some(OpFault::Fails),
            // The process dies before the flush after which it could invalidate the old key.
            Op::Flush if disk == BACKING && has_landed.get() => Some(OpFault::Waits),
            _ => None,
        }));
        ask(&set, volume, write(0, 8, OLD)).await;
        while !copying.get() {
            env.sleep(Duration::from_micros(10)).await;
        }
        let writer = set.clone();
        env.spawn(async move {
            let reply = writer.serve(volume, write(0, 8, NEW)).await;
            panic!("not before its flush: {:?}", reply.result);
        });
        env.sleep(Duration::from_millis(10)).await;
        holds.set(false);
        while !landed.get() {
            env.sleep(Duration::from_micros(10)).await;
        }
        env.sleep(Duration::from_secs(1)).await;
    });
    rig.world.borrow_mut().fate = None;
    let (at_start, later) = run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        let at_start = bytes(&set, volume, 0, 1).await;
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
        // Every bucket is reused.
        for n in 0..1500 {
            ask(&set, volume, write(1000 + 16 * n, 16, 9)).await;
            if n % 50 == 0 {
                ask(&set, volume, Request::Flush).await;
            }
        }
        (at_start, bytes(&set, volume, 0, 1).await)
    });
    assert_eq!(at_start, later);
}
