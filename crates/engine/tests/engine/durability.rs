//! Durability means durability: a failed flush of the backing device invalidates every write that
//! was not yet proven durable, and no later success restores it.

use crate::memory::OpFault;
use crate::rig::{BACKING, CACHE, Rig, Sizes, ask, open, run, write};
use bcached_engine::{Error, Options, Request, VolumeOptions};
use bcached_env::{Buffer, DiskId, Op, join_all};
use bcached_format::CacheMode;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 1, bucket: 128, buckets: 600, backing: 200_000 };

/// First sector of data on the backing device; its superblock is before that.
const DATA: u64 = 16;

fn options() -> Options {
    Options {
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

/// The writes that a backing device may have dropped when a flush failed.
#[derive(Clone, Default)]
struct DroppedWrites {
    failed: Rc<Cell<bool>>,
    written: Rc<RefCell<BTreeSet<u64>>>,
}

impl DroppedWrites {
    /// The first flush with something to drop fails. A sector that was written again since counts
    /// as kept.
    fn fate(&self) -> impl FnMut(DiskId, &Op) -> Option<OpFault> + 'static {
        let Self { failed, written } = self.clone();
        move |disk, op| {
            match op {
                Op::Write { sector, .. } if disk == BACKING && *sector >= DATA => {
                    if failed.get() {
                        written.borrow_mut().remove(sector);
                    } else {
                        written.borrow_mut().insert(*sector);
                    }
                }
                Op::Flush if disk == BACKING && !failed.get() && !written.borrow().is_empty() => {
                    failed.set(true);
                    return Some(OpFault::Fails);
                }
                _ => {}
            }
            None
        }
    }
}

/// Write-back has copied a batch to the backing device. A client's flush fails there, so the copied
/// data may be gone; then the batch's flush succeeds, as a flush after a failed one does. The data
/// must stay dirty. The keys used to become clean, and the data was lost. Proves invariant D27.
#[test]
fn what_a_foreign_flush_may_have_dropped_stays_dirty_until_it_is_written_again() {
    let mut failures = 0;
    for seed in 1..20 {
        let mut rig = Rig::new(SIZES, seed);
        let world = Rc::clone(&rig.world);
        let drops = DroppedWrites::default();
        let fate = drops.fate();
        let clean = run(&mut rig, move |env| async move {
            let delay = Duration::from_millis(10);
            let options = Options {
                volume: VolumeOptions {
                    writeback_running: true,
                    writeback_percent: 0,
                    writeback_delay: delay,
                    ..options().volume
                },
                ..options()
            };
            let (set, volume) = open(env.clone(), options).await.expect("sound");
            world.borrow_mut().fate = Some(Box::new(fate));
            for n in 0..100 {
                ask(&set, volume, write(20 * n, 8, 9)).await;
            }
            let (flusher, clock, stop) = (set.clone(), env.clone(), Rc::new(Cell::new(false)));
            let stopped = Rc::clone(&stop);
            env.spawn(async move {
                while !stopped.get() {
                    let _ = flusher.serve(volume, Request::Flush).await;
                    clock.sleep(Duration::from_micros(20)).await;
                }
            });
            for _ in 0..600 {
                env.sleep(Duration::from_millis(100)).await;
                if set.status().dirty_sectors == 0 {
                    break;
                }
            }
            stop.set(true);
            set.status().dirty_sectors == 0
        });
        assert!(clean, "seed {seed}: write-back does not come to its end");
        failures += u32::from(drops.failed.get());
        let lost = drops.written.borrow().len();
        assert_eq!(lost, 0, "seed {seed}: clean, and not written since the flush that failed");
    }
    assert!(failures > 0, "no flush failed");
}

/// The cache refuses new data over dirty data, so the write goes to the backing device. A client's
/// flush fails there; the write's own flush succeeds. The old dirty data must stay. It used to be
/// invalidated in favour of new data that may be gone. Proves invariant D27.
#[test]
fn dirty_data_does_not_give_way_to_what_a_flush_may_have_dropped() {
    let mut failures = 0;
    for seed in 1..40 {
        let mut rig = Rig::new(SIZES, seed);
        let world = Rc::clone(&rig.world);
        let drops = DroppedWrites::default();
        let (mut fate, failed) = (drops.fate(), Rc::clone(&drops.failed));
        let (result, dirty) = run(&mut rig, move |env| async move {
            let (set, volume) = open(env.clone(), options()).await.expect("sound");
            ask(&set, volume, write(0, 8, 1)).await;
            ask(&set, volume, Request::Flush).await;
            world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
                Op::Write { payload, .. } if disk == CACHE && payload.as_slice()[0] == 0x77 => {
                    Some(OpFault::Fails)
                }
                other => fate(disk, other),
            }));
            let (flusher, clock) = (set.clone(), env.clone());
            env.spawn(async move {
                while !failed.get() {
                    let _ = flusher.serve(volume, Request::Flush).await;
                    clock.sleep(Duration::from_micros(1)).await;
                }
            });
            let result = set.serve(volume, write(0, 8, 0x77)).await.result;
            (result, set.status().dirty_sectors)
        });
        failures += u32::from(drops.failed.get());
        let lost = drops.failed.get() && !drops.written.borrow().is_empty() && dirty == 0;
        assert!(!lost, "seed {seed}: the write ended with {result:?}, and neither old nor new data is safe");
    }
    assert!(failures > 0, "no flush failed");
}

/// Two clients flush at once, and the device's flush fails. What either wrote before may be gone,
/// so both must get the error. One used to be told that all is well. Proves invariant D28.
#[test]
fn every_flush_under_way_when_one_fails_says_so() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
        ask(&set, volume, write(0, 8, 1)).await;
        let mut once = Some(OpFault::Fails);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            Op::Flush if disk == BACKING => once.take(),
            _ => None,
        }));
        let both = join_all((0..2).map(|_| set.serve(volume, Request::Flush))).await;
        assert!(both.iter().all(|reply| reply.result.is_err()), "{both:?}");
        ask(&set, volume, Request::Flush).await;
    });
}

/// A flush that the engine issued itself fails while no client flushes. The next client's flush
/// reports it, once.
#[test]
fn a_failure_that_nobody_heard_of_is_told_once() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let parked_delay = Duration::from_millis(50);
        let (set, volume) = open(env.clone(), Options { parked_delay, ..options() }).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
        let mut once = Some(OpFault::Fails);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            Op::Flush if disk == BACKING => once.take(),
            _ => None,
        }));
        ask(&set, volume, write(0, 8, 1)).await;
        env.sleep(Duration::from_secs(1)).await;
        assert_eq!(set.serve(volume, Request::Flush).await.result, Err(Error::LostWrites));
        ask(&set, volume, Request::Flush).await;
    });
}

/// The last flush of a stopping set fails: acknowledged data may be gone, so the stop must report
/// it. The same holds if a flush failed earlier and no client has flushed since.
/// Proves invariant D33.
#[test]
fn a_stop_whose_flush_fails_says_so() {
    for early in [false, true] {
        let mut rig = Rig::new(SIZES, 1);
        let world = Rc::clone(&rig.world);
        run(&mut rig, move |env| async move {
            let parked_delay = Duration::from_millis(if early { 50 } else { 5_000 });
            let (set, volume) =
                open(env.clone(), Options { parked_delay, ..options() }).await.expect("sound");
            set.set_cache_mode(volume, CacheMode::Writethrough).await.expect("set");
            let mut once = Some(OpFault::Fails);
            world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
                Op::Flush if disk == BACKING => once.take(),
                _ => None,
            }));
            ask(&set, volume, write(0, 8, 1)).await;
            env.sleep(Duration::from_secs(1)).await;
            assert!(set.stop().await.is_err(), "flush failed early: {early}");
        });
    }
}

/// A FUA write whose data the cache refuses goes to the backing device and must be durable there.
/// It used to stay in the device's volatile cache.
#[test]
fn a_write_with_fua_is_durable_when_the_cache_refuses_the_data() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env, options()).await.expect("sound");
        ask(&set, volume, write(0, 8, 1)).await;
        ask(&set, volume, Request::Flush).await;
        let durable = Rc::new(Cell::new(false));
        let seen = Rc::clone(&durable);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            match op {
                Op::Write { payload, .. } if disk == CACHE && payload.as_slice()[0] == 0x77 => {
                    return Some(OpFault::Fails);
                }
                Op::Write { fua, .. } if disk == BACKING => seen.set(*fua),
                Op::Flush if disk == BACKING => seen.set(true),
                _ => {}
            }
            None
        }));
        let payload = Buffer::copied_from(&[0x77; 4096]).freeze();
        ask(&set, volume, Request::Write { sector: 64, payload, fua: true }).await;
        assert!(durable.get(), "it was acknowledged, and a power cut takes it");
    });
}
