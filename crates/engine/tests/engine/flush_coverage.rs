//! Tests what a client's flush covers when a flush of the backing device has failed: whatever was
//! acknowledged before the flush was requested, whichever client wrote it and in however many
//! pieces.

use crate::memory::OpFault;
use crate::rig::{BACKING, CACHE, Rig, Sizes, ask, open, run, write};
use bcached_engine::{CacheSet, Error, Options, Request, VolumeId, VolumeOptions};
use bcached_env::{Buffer, DiskId, Env, Op};
use bcached_format::CacheMode;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 1, bucket: 16, buckets: 600, backing: 200_000 };

fn options() -> Options {
    Options {
        cutoff_writeback: 101,
        cutoff_cache_add: 101,
        volume: VolumeOptions { writeback_running: false, ..VolumeOptions::default() },
        ..Options::default()
    }
}

/// Where the volume's data starts on its backing device, in sectors.
const DATA: u64 = 16;

/// Starts a request; the returned cell later says whether it succeeded.
fn start(env: &Env, set: &CacheSet, volume: VolumeId, request: Request) -> Rc<Cell<Option<bool>>> {
    let (set, answer) = (set.clone(), Rc::new(Cell::new(None)));
    let told = Rc::clone(&answer);
    env.spawn(async move {
        told.set(Some(set.serve(volume, request).await.result.is_ok()));
    });
    answer
}

async fn answered(env: &Env, answer: &Cell<Option<bool>>) -> bool {
    loop {
        if let Some(is_ok) = answer.get() {
            return is_ok;
        }
        env.sleep(Duration::from_micros(10)).await;
    }
}

fn durable(sector: u64) -> Request {
    Request::Write { sector, payload: Buffer::zeroed(4096).freeze(), fua: true }
}

/// A mode, a request, and which of the request's operations is slow.
type SlowCase = (CacheMode, fn() -> Request, fn(DiskId, &Op) -> bool);

const ONES: u8 = 1;

fn is_ones(op: &Op) -> bool {
    matches!(op, Op::Write { payload, .. } if payload.as_slice().iter().all(|byte| *byte == ONES))
}

/// Runs a request in mode `mode` whose operations selected by `is_slow` do not complete before a
/// flush has failed. Returns whether the request succeeded, and the results of that flush and of
/// two later ones.
fn beside_a_failing_flush(
    mode: CacheMode,
    request: Request,
    is_slow: fn(DiskId, &Op) -> bool,
) -> (bool, [Result<(), Error>; 3]) {
    let mut rig = Rig::new(Sizes { block: 8, ..SIZES }, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        set.set_cache_mode(volume, mode).await.expect("set");
        let holds = Rc::new(Cell::new(true));
        let (held, fails) = (Rc::clone(&holds), Cell::new(true));
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            op if held.get() && is_slow(disk, op) => Some(OpFault::Waits),
            Op::Flush if disk == BACKING && fails.replace(false) => Some(OpFault::Fails),
            _ => None,
        }));
        let changing = start(&env, &set, volume, request);
        env.sleep(Duration::from_millis(1)).await;
        let told = set.serve(volume, Request::Flush).await.result;
        holds.set(false);
        let is_ok = answered(&env, &changing).await;
        let next = set.serve(volume, Request::Flush).await.result;
        (is_ok, [told, next, set.serve(volume, Request::Flush).await.result])
    })
}

/// A request that is in flight when a flush fails is not acknowledged. The failed flush may have
/// dropped parts of it that were already written, although its completion is seen later. The client
/// used to be told that all of it was written, and then read the old content. Proves invariant D29.
#[test]
fn what_is_under_way_when_a_flush_fails_is_not_acknowledged() {
    let slow: [SlowCase; 4] = [
        (
            CacheMode::Writearound,
            || write(1000, 8, ONES),
            |disk, op| disk == BACKING && matches!(op, Op::Write { sector: 1016, .. }),
        ),
        (
            CacheMode::Writearound,
            || Request::WriteZeroes { sector: 1000, sectors: 8, fua: false, may_unmap: false },
            |disk, op| disk == BACKING && matches!(op, Op::Zero { sector: 1016, .. }),
        ),
        // The half of it that the backing device received long ago.
        (CacheMode::Writethrough, || write(1000, 8, ONES), |disk, op| disk == CACHE && is_ones(op)),
        // A part of a block, while the rest is slow.
        (
            CacheMode::Writearound,
            || Request::WriteZeroes { sector: 1004, sectors: 12, fua: false, may_unmap: false },
            |disk, op| disk == BACKING && matches!(op, Op::Zero { .. }),
        ),
    ];
    for (case, (mode, request, is_slow)) in slow.into_iter().enumerate() {
        let (is_ok, [told, next, last]) = beside_a_failing_flush(mode, request(), is_slow);
        assert!(!is_ok && told.is_err(), "case {case}");
        assert_eq!((next, last), (Ok(()), Ok(())), "case {case}: it has been said");
    }
}

/// A flush requested before a write was acknowledged does not consume the error of that write. It
/// completes after the write, with the error that the write's own flush should get. It does not
/// cover the write, so the next flush must still report the error.
#[test]
fn an_earlier_flush_does_not_take_the_error_of_a_later_one() {
    let mut rig = Rig::new(SIZES, 1);
    rig.world.borrow_mut().fua = false;
    let world = Rc::clone(&rig.world);
    let next = run(&mut rig, move |env| async move {
        let patient = Options { journal_delay: Duration::from_secs(60), ..options() };
        let (set, volume) = open(env.clone(), patient).await.expect("sound");
        ask(&set, volume, Request::Flush).await;
        ask(&set, volume, write(5000, 8, 3)).await;
        set.set_cache_mode(volume, CacheMode::Writearound).await.expect("set");
        let slow_journal = Rc::new(Cell::new(true));
        let (journal_waits, fails) = (Rc::clone(&slow_journal), Cell::new(true));
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            // The early flush waits for the key of the dirty data.
            _ if disk == CACHE && journal_waits.get() => Some(OpFault::Waits),
            Op::Flush if disk == BACKING && fails.replace(false) => Some(OpFault::Fails),
            _ => None,
        }));
        let early = start(&env, &set, volume, Request::Flush);
        let changing = start(&env, &set, volume, write(1000, 8, 1));
        assert!(answered(&env, &changing).await);
        let another = start(&env, &set, volume, durable(64));
        assert!(!answered(&env, &another).await, "its flush failed");
        slow_journal.set(false);
        answered(&env, &early).await;
        set.serve(volume, Request::Flush).await.result
    });
    assert_eq!(next, Err(Error::LostWrites));
}

/// A flush that is queued before it reaches the engine covers only what was acknowledged when its
/// client requested it. When it failed, writes acknowledged in the meantime used to count as
/// reported, and the next flush succeeded in spite of them.
#[test]
fn a_flush_that_has_waited_does_not_take_the_error_of_the_next() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    let (next, last) = run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options()).await.expect("sound");
        set.set_cache_mode(volume, CacheMode::Writearound).await.expect("set");
        ask(&set, volume, Request::Flush).await;
        let asked = env.now();
        env.sleep(Duration::from_millis(1)).await;
        ask(&set, volume, write(0, 8, 1)).await;
        let fails = Cell::new(true);
        world.borrow_mut().fate = Some(Box::new(move |disk, op| match op {
            Op::Flush if disk == BACKING && fails.replace(false) => Some(OpFault::Fails),
            _ => None,
        }));
        env.sleep(Duration::from_millis(1)).await;
        assert!(
            set.serve(volume, Request::FlushRequestedAt(asked)).await.result.is_err(),
            "the device said so"
        );
        env.sleep(Duration::from_millis(1)).await;
        let next = set.serve(volume, Request::Flush).await.result;
        env.sleep(Duration::from_millis(1)).await;
        (next, set.serve(volume, Request::Flush).await.result)
    });
    assert_eq!((next, last), (Err(Error::LostWrites), Ok(())));
}

/// A device without FUA makes a write durable by a flush. At most one flush may run at a time, so
/// the write shares the flush of another client. The two used to run side by side, and the kernel
/// reported the failure of both to only one of them.
#[test]
fn where_there_is_no_fua_a_durable_write_shares_the_one_flush_that_may_run() {
    for fua in [false, true] {
        let mut rig = Rig::new(SIZES, 1);
        rig.world.borrow_mut().fua = fua;
        let world = Rc::clone(&rig.world);
        let flushed = run(&mut rig, move |env| async move {
            let (set, volume) = open(env, options()).await.expect("sound");
            set.set_cache_mode(volume, CacheMode::Writearound).await.expect("set");
            ask(&set, volume, Request::Flush).await;
            ask(&set, volume, write(0, 8, 1)).await;
            let fails = Cell::new(true);
            world.borrow_mut().fate = Some(Box::new(move |_, op| match op {
                Op::Write { sector, fua: true, .. } => {
                    assert!(fua, "the device has none");
                    (*sector == 64 + DATA).then_some(OpFault::Fails)
                }
                Op::Flush => (!fua && fails.replace(false)).then_some(OpFault::Fails),
                _ => None,
            }));
            assert!(set.serve(volume, durable(64)).await.result.is_err(), "the device said so");
            set.serve(volume, Request::Flush).await.result
        });
        assert_eq!(flushed, if fua { Ok(()) } else { Err(Error::LostWrites) }, "fua: {fua}");
    }
}
