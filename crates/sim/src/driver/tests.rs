//! Tests of the driver alone, through the engine's own executor: order, durability and the end of
//! the world.

use super::*;
use crate::disk::{DeviceModel, DiskFault, FaultRule, InitialContent};
use bcached_env::{Executor, RunOrder, RunOutcome, join_all};
use std::cell::Cell;
use std::time::Duration;

fn world(seed: u64) -> Rc<RefCell<World>> {
    let background = InitialContent::Zero { data_start: 0 };
    let devices =
        vec![Device::new(DeviceModel::fast(4096, 1)), Device::new(DeviceModel::slow(4096, 8, background))];
    let mut world = World::new(devices, seed);
    world.trace.record();
    Rc::new(RefCell::new(world))
}

fn executor(world: &Rc<RefCell<World>>, seed: u64) -> Executor {
    Executor::new(Box::new(SimDriver::new(Rc::clone(world))), RunOrder::Seeded(Rng::new(seed)), seed)
}

fn bytes(value: u8, sectors: usize) -> bcached_env::Payload {
    Buffer::copied_from(&vec![value; sectors * 512]).freeze()
}

/// Writes 20 sectors at once, flushes, sleeps, and reads one back.
fn busy(executor: &mut Executor) -> Option<u8> {
    let env = executor.env();
    executor.block_on(async move {
        let disk = env.disk(DiskId(0));
        let writes = (0..20u8).map(|index| disk.write(u64::from(index), bytes(index + 1, 1)));
        assert!(join_all(writes).await.iter().all(Result::is_ok));
        disk.flush().await.unwrap();
        env.sleep(Duration::from_millis(5)).await;
        let (result, buffer) = disk.read(7, Buffer::zeroed(512)).await;
        result.unwrap();
        buffer.as_slice()[511]
    })
}

#[test]
fn the_same_seed_gives_the_same_trace_and_another_seed_another() {
    let run = |seed| {
        let world = world(seed);
        assert_eq!(busy(&mut executor(&world, seed)), Some(8));
        let lines = world.borrow().trace.lines().to_vec();
        (lines, world.borrow().trace.digest(), world.borrow().now())
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1).0, run(2).0);
    assert_ne!(run(1).1, run(2).1);
}

#[test]
fn the_world_ends_at_the_point_asked_for() {
    // 20 writes submitted, 20 completed, a flush submitted and completed.
    let world = world(3);
    assert_eq!(busy(&mut executor(&world, 3)), Some(8));
    assert_eq!(world.borrow().points(), 42);
    for point in [1, 20, 33, 41, 42] {
        let world = self::world(3);
        world.borrow_mut().crash_at(point);
        assert_eq!(busy(&mut executor(&world, 3)), None);
        assert_eq!(world.borrow().halted(), Some(&HaltReason::Requested(point)));
        world.borrow_mut().reboot(Crash::PowerCut, Survivors::Nothing);
        let there = world.borrow().devices[0].medium().digest() != crate::digest::Digest::new().value();
        assert_eq!(there, point == 42, "nothing is durable before the flush has completed");
    }
}

#[test]
fn an_observer_sees_what_a_crash_there_would_leave() {
    let seen = Rc::new(RefCell::new(Vec::new()));
    let world = world(5);
    let sink = Rc::clone(&seen);
    world.borrow_mut().observe(Box::new(move |_, devices, _| {
        let mut device = devices[0].clone();
        device.cut_power(0, Survivors::Seeded(9));
        sink.borrow_mut().push(device.medium().digest());
        false
    }));
    busy(&mut executor(&world, 5));
    for point in 1..=42 {
        let world = self::world(5);
        world.borrow_mut().crash_at(point);
        busy(&mut executor(&world, 5));
        world.borrow_mut().reboot(Crash::PowerCut, Survivors::Seeded(9));
        let index = usize::try_from(point).unwrap() - 1;
        assert_eq!(world.borrow().devices[0].medium().digest(), seen.borrow()[index], "point {point}");
    }
}

#[test]
fn waiting_for_nothing_and_spinning_are_seen() {
    let world = world(1);
    let mut stuck = executor(&world, 1);
    assert_eq!(stuck.run_until(|| false), RunOutcome::Halted);
    assert_eq!(world.borrow().halted(), Some(&HaltReason::Stuck));

    let world = self::world(1);
    let mut spinning = executor(&world, 1);
    let env = spinning.env();
    spinning.env().spawn(async move {
        loop {
            env.yield_now().await;
        }
    });
    assert_eq!(spinning.run_until(|| false), RunOutcome::Halted);
    assert_eq!(world.borrow().halted(), Some(&HaltReason::Spinning));

    let world = self::world(1);
    world.borrow_mut().progress(1_000_000_000);
    let mut late = executor(&world, 1);
    let env = late.env();
    late.env().spawn(async move {
        loop {
            env.sleep(Duration::from_millis(1)).await;
        }
    });
    assert_eq!(late.run_until(|| false), RunOutcome::Halted);
    assert_eq!(world.borrow().halted(), Some(&HaltReason::Late));
}

#[test]
#[should_panic(expected = "a task does not yield")]
fn a_task_that_never_yields_is_seen() {
    let mut executor = executor(&world(1), 1);
    let env = executor.env();
    executor.env().spawn(async move { while env.now() < Time(u64::MAX) {} });
    executor.run_until(|| false);
}

#[test]
fn faults_reach_the_one_who_asked() {
    let world = world(1);
    let write = |fault| FaultRule { on: OpKind::Write, sectors: 0..8, skip: 0, count: 1, fault };
    let flush = FaultRule {
        on: OpKind::Flush,
        sectors: 0..0,
        skip: 0,
        count: 1,
        fault: DiskFault::Fail(WrittenPart::Nothing),
    };
    for rule in [write(DiskFault::Fail(WrittenPart::Everything)), write(DiskFault::Unreachable), flush] {
        world.borrow_mut().devices[0].faults.add(rule);
    }
    let mut executor = executor(&world, 1);
    let env = executor.env();
    let kinds = executor.block_on(async move {
        let disk = env.disk(DiskId(0));
        let first = disk.write(0, bytes(1, 1)).await.map_err(|error| error.kind);
        let second = disk.write(1, bytes(2, 1)).await.map_err(|error| error.kind);
        let third = disk.flush().await.map_err(|error| error.kind);
        let fourth = disk.flush().await.map_err(|error| error.kind);
        [first, second, third, fourth]
    });
    let (failed, gone) = (Err(IoErrorKind::Io), Err(IoErrorKind::Unreachable));
    assert_eq!(kinds, Some([failed, gone, failed, Ok(())]));
    assert!(world.borrow().refused().is_none());
}

#[test]
fn a_stalled_device_goes_on_and_a_vanished_one_says_so() {
    let world = world(1);
    world.borrow_mut().progress(1_000_000_000);
    world.borrow_mut().stall(0, 3_000_000_000);
    let mut executor = executor(&world, 1);
    let env = executor.env();
    let shared = Rc::clone(&world);
    let result = executor.block_on(async move {
        let disk = env.disk(DiskId(0));
        disk.write(0, bytes(1, 1)).await.unwrap();
        assert!(env.now().0 >= 3_000_000_000);
        assert_eq!(shared.borrow().late(), 3_000_000_000);
        shared.borrow_mut().progress(1_000_000_000);
        shared.borrow_mut().devices[0].gone = true;
        disk.write(0, bytes(2, 1)).await.map_err(|error| error.kind)
    });
    assert_eq!(result, Some(Err(IoErrorKind::Unreachable)));
}

#[test]
fn an_unaligned_request_is_remembered() {
    let world = world(1);
    let mut executor = executor(&world, 1);
    let env = executor.env();
    let result =
        executor.block_on(async move { env.disk(DiskId(1)).write(3, bytes(1, 1)).await.map_err(|e| e.kind) });
    assert_eq!(result, Some(Err(IoErrorKind::Invalid)));
    assert!(world.borrow().refused().unwrap().contains("disk 1"));
}

/// A timer that is far away does not delay the completion of an operation that ends before it.
#[test]
fn an_answer_comes_when_it_comes_and_not_with_the_next_timer() {
    let world = world(1);
    let mut executor = executor(&world, 1);
    let env = executor.env();
    let sleeper = env.clone();
    env.spawn(async move { sleeper.sleep(Duration::from_secs(100)).await });
    let answered = executor.block_on(async move {
        env.disk(DiskId(0)).flush().await.unwrap();
        env.now().0
    });
    assert!(answered.unwrap() < 1_000_000_000, "{answered:?}");
}

/// A task with long CPU work lets others run, so a completion is delivered before that work is
/// done.
#[test]
fn an_answer_does_not_wait_for_one_who_works_for_long() {
    let mut executor = executor(&world(1), 1);
    let env = executor.env();
    let worker = env.clone();
    env.spawn(async move {
        for _ in 0..1000 {
            worker.charge(80_000);
            worker.breathe().await;
        }
    });
    let answered = executor.block_on(async move {
        env.disk(DiskId(0)).write(0, bytes(1, 1)).await.unwrap();
        env.now().0
    });
    // The device takes less than one millisecond, and a breath 80 microseconds.
    assert!(answered.unwrap() < 1_200_000, "{answered:?}");
}

/// However many tasks have long CPU work, a completion waits for one breath of one of them.
#[test]
fn an_answer_waits_for_one_of_many_who_work_for_long() {
    const WORKERS: u64 = 16;
    const WRITES: u64 = 10;
    let world = world(1);
    let mut executor = Executor::new(Box::new(SimDriver::new(Rc::clone(&world))), RunOrder::Fifo, 1);
    let env = executor.env();
    let breaths = Rc::new(Cell::new(0));
    for _ in 0..WORKERS {
        let (worker, breaths) = (env.clone(), Rc::clone(&breaths));
        env.spawn(async move {
            for _ in 0..1000 {
                worker.charge(80_000);
                worker.breathe().await;
                breaths.set(breaths.get() + 1);
            }
        });
    }
    let answered = executor.block_on(async move {
        let begun = env.now().0;
        for sector in 0..WRITES {
            env.disk(DiskId(0)).write(8 * sector, bytes(1, 1)).await.unwrap();
        }
        env.now().0 - begun
    });
    assert!(answered.unwrap() < WRITES * 1_200_000, "{answered:?}");
    // And the workers do not wait for tasks that have nothing to do.
    assert!(breaths.get() >= WRITES, "{breaths:?}");
}

/// The same whole buckets of the cache are slow at every read; other buckets and parts of buckets
/// never are.
#[test]
fn some_nodes_are_read_slowly() {
    const MORE: u64 = 1_000_000_000;
    let slow = || {
        let world = world(1);
        world.borrow_mut().node_reads = Some((8, MORE));
        let mut executor = executor(&world, 1);
        let env = executor.env();
        let timed = executor.block_on(async move {
            let mut slow = Vec::new();
            for (disk, bucket, sectors) in
                (0..64).flat_map(|bucket| [(0, bucket, 8), (0, bucket, 4), (1, bucket, 8)])
            {
                let begun = env.now().0;
                env.disk(DiskId(disk)).read(8 * bucket, Buffer::zeroed(512 * sectors)).await.0.unwrap();
                if env.now().0 - begun >= MORE {
                    slow.push((disk, bucket, sectors));
                }
            }
            slow
        });
        timed.unwrap()
    };
    let found = slow();
    assert!((4..32).contains(&found.len()), "{found:?}");
    assert!(found.iter().all(|(disk, _, sectors)| (*disk, *sectors) == (0, 8)), "{found:?}");
    assert_eq!(found, slow());
}

/// Unanswered requests of a pulled device fail, and so do all requests through the old handle until
/// the process ends. Through the new handle, flushed data is there, and of the rest whatever
/// survives.
#[test]
fn a_pulled_device_is_back_on_another_way_only() {
    for (survivors, kept) in [(Survivors::Nothing, 0), (Survivors::Everything, 2)] {
        let world = world(11);
        let mut executor = executor(&world, 11);
        let (env, inner) = (executor.env(), Rc::clone(&world));
        let outcome = executor.block_on(async move {
            let disk = env.disk(DiskId(0));
            disk.write(0, bytes(1, 1)).await.unwrap();
            disk.flush().await.unwrap();
            disk.write(1, bytes(2, 1)).await.unwrap();
            let reading = disk.read(0, Buffer::zeroed(512));
            let dropped = inner.borrow_mut().pull(0, survivors);
            assert_eq!(dropped.len(), usize::from(kept == 0));
            assert!(!inner.borrow().is_there(0) && inner.borrow().has_device_failed(0));
            assert_eq!(reading.await.0.unwrap_err().kind, IoErrorKind::Gone);
            assert_eq!(disk.write(2, bytes(3, 1)).await.unwrap_err().kind, IoErrorKind::Gone);
            let back = inner.borrow_mut().reopen(0);
            assert_ne!(back, DiskId(0));
            assert_eq!(disk.flush().await.unwrap_err().kind, IoErrorKind::Gone);
            let mut found = Vec::new();
            for sector in 0..3 {
                let (result, buffer) = env.disk(back).read(sector, Buffer::zeroed(512)).await;
                result.unwrap();
                found.push(buffer.as_slice()[0]);
            }
            env.disk(back).flush().await.unwrap();
            found
        });
        assert_eq!(outcome, Some(vec![1, kept, 0]), "{survivors}");
        drop(executor);
        world.borrow_mut().reboot(Crash::ProcessDeath, Survivors::Everything);
        assert!(world.borrow().is_there(0), "the next process finds it");
    }
}
