//! Writes that make data dirty in a cache that is nearly full of dirty data. They are throttled to
//! the pace of write-back, and wait no longer than promised for space that does not become free.

use crate::memory::OpFault;
use crate::rig::{BACKING, Rig, Sizes, ask, in_flight, open, run, write};
use bcached_engine::{Options, RequestPath, VolumeOptions};
use bcached_env::Op;
use bcached_env::rng::Rng;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const SIZES: Sizes = Sizes { block: 8, bucket: 128, buckets: 600, backing: 1 << 18 };

/// Sectors of the backing device that are written, in pieces of 8: more than twice what the cache
/// holds.
const SPAN: u64 = 200_000;

/// Issues `writes` writes at random places. Returns the total time, the longest time of one write,
/// and how many of them went past the cache.
fn random_writes(options: Options, writes: u64, fate: crate::memory::FaultHook) -> (Duration, Duration, u64) {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), options).await.expect("a sound set");
        world.borrow_mut().fate = Some(fate);
        let (begun, longest) = (env.now(), Rc::new(RefCell::new(Duration::ZERO)));
        let places = Rc::new(RefCell::new(Rng::new(5)));
        let (worker, clock, most) = (set.clone(), env.clone(), Rc::clone(&longest));
        in_flight(&env, writes, 32, move |_| {
            let (set, clock, most) = (worker.clone(), clock.clone(), Rc::clone(&most));
            let sector = places.borrow_mut().below(SPAN / 8) * 8;
            async move {
                let asked = clock.now();
                ask(&set, volume, write(sector, 8, 1)).await;
                let took: Duration = clock.now().since(asked);
                most.replace_with(|most| took.max(*most));
            }
        })
        .await;
        let took = env.now().since(begun);
        let latencies = set.latencies(volume).expect("it is served");
        let past =
            [RequestPath::WriteThrough, RequestPath::WriteAround].map(|path| latencies.of(path).requests());
        let longest = *longest.borrow();
        (took, longest, past.iter().sum())
    })
}

/// A write to the backing device takes a hundred times as long as one to the cache.
fn slow_device() -> crate::memory::FaultHook {
    let mut rng = Rng::new(9);
    Box::new(move |disk, op| {
        let is_slow = disk == BACKING && matches!(op, Op::Write { .. });
        (is_slow && rng.below(100) > 0).then_some(OpFault::Waits)
    })
}

/// Three times the cache's capacity is written as fast as it is accepted. Nothing goes past the
/// cache, where it would take the device's time from write-back, and no write is blocked for long.
#[test]
fn writes_wait_for_room_and_do_not_go_past_the_cache() {
    let (_, longest, past) = random_writes(Options::default(), 30_000, slow_device());
    assert_eq!(past, 0, "the longest took {longest:?}");
    assert!(longest < Duration::from_millis(500), "{longest:?}");
}

/// A quarter of the cache is rewritten repeatedly, faster than it could be filled once. The dirty
/// data is below the target, and moving makes space for it, so write-back need not hurry. It does
/// not write the data back each time to a disk that has other work.
#[test]
fn what_is_written_over_and_over_stays_in_the_cache() {
    let mut rig = Rig::new(SIZES, 1);
    run(&mut rig, |env| async move {
        let volume = VolumeOptions { writeback_percent: 40, ..VolumeOptions::default() };
        let options = Options { volume, ..Options::default() };
        let (set, volume) = open(env.clone(), options).await.expect("a sound set");
        let places = Rc::new(RefCell::new(Rng::new(5)));
        let worker = set.clone();
        let blocks = SIZES.buckets * u64::from(SIZES.bucket) / 8 / 4;
        in_flight(&env, 30_000, 32, move |_| {
            let set = worker.clone();
            let sector = places.borrow_mut().below(blocks) * 8;
            async move {
                ask(&set, volume, write(sector, 8, 1)).await;
            }
        })
        .await;
        let latencies = set.latencies(volume).expect("it is served");
        let past =
            [RequestPath::WriteThrough, RequestPath::WriteAround].map(|path| latencies.of(path).requests());
        assert_eq!(past, [0; 2]);
        let back = set.status().stats.written_back_bytes >> 12;
        assert!(back < 300, "{back} blocks were written back");
    });
}

/// Write-back is off, so no space will become free: writes go past the cache, and none has waited
/// for space.
#[test]
fn nobody_waits_where_nothing_is_written_back() {
    let volume = VolumeOptions { writeback_running: false, ..VolumeOptions::default() };
    let options = Options { volume, ..Options::default() };
    let (took, longest, past) = random_writes(options, 30_000, Box::new(|_, _| None));
    assert!(past > 10_000, "{past}");
    assert!(longest < Duration::from_millis(100), "{longest:?} of {took:?}");
}

/// Write-back stalls. The writes that find the cache full wait a second for space, and later ones
/// do not wait at all.
#[test]
fn room_that_does_not_come_is_not_waited_for_again_and_again() {
    let mut rig = Rig::new(SIZES, 1);
    let world = Rc::clone(&rig.world);
    run(&mut rig, move |env| async move {
        let (set, volume) = open(env.clone(), Options::default()).await.expect("a sound set");
        world.borrow_mut().fate = Some(Box::new(move |disk, op| {
            let is_copy =
                disk == BACKING && matches!(op, Op::Write { payload, .. } if payload.as_slice()[0] == 1);
            is_copy.then_some(OpFault::Waits)
        }));
        let answered = Rc::new(Cell::new(0));
        let (writer, count) = (set.clone(), Rc::clone(&answered));
        env.spawn(async move {
            for n in 0..1200 {
                // Write-back of the first ones stalls; the others, written past the cache, do not.
                ask(&writer, volume, write(n * 128, 128, if n < 500 { 1 } else { 2 })).await;
                count.set(n + 1);
            }
        });
        let mut seconds = 0;
        while answered.get() < 1200 {
            assert!(seconds < 120, "{} were answered", answered.get());
            for _ in 0..10 {
                world.borrow_mut().pass(Duration::from_millis(100));
                env.sleep(Duration::from_micros(50)).await;
            }
            seconds += 1;
        }
        let waited = set.latencies(volume).expect("it is served").of(RequestPath::WriteThrough).requests();
        assert!(waited > 500, "{waited} went past the cache, in {seconds} s");
        world.borrow_mut().fate = None;
    });
}
