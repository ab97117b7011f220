//! The engine in the simulator: CI's share. Longer sweeps are for `sim sweep`; a failing seed prints its command.

use bcached_sim::crashpoints::{Depth, sweep};
use bcached_sim::disk::{Fault as DiskFault, OpKind, Rule, Survivors};
use bcached_sim::driver::Crash;
use bcached_sim::minimise::fault_of;
use bcached_sim::run::{rig_for, whole};
use bcached_sim::scenario::Stage;
use bcached_sim::stamp::Value;
use bcached_sim::system::engine::Engine;
use bcached_sim::system::{Geometry, System};
use bcached_sim::workload::{Shape, Step};
use std::rc::Rc;

fn engine() -> Rc<dyn System> {
    Rc::new(Engine)
}

/// Every shape of workload, with the restarts and crashes that it has of its own.
#[test]
fn every_workload_passes() {
    for shape in Shape::all() {
        for seed in 0..6 {
            let workload = shape.clone().with_steps(250).draw(seed);
            if let Some(failure) = fault_of(&engine(), &workload) {
                panic!("{failure}");
            }
        }
    }
}

/// A power cut and a death of the process after every device operation, and in some of the recoveries from them.
#[test]
fn every_crash_point_passes() {
    for seed in 0..3 {
        let workload = Shape::named("points").expect("a shape").with_steps(25).draw(seed);
        match sweep(&engine(), &workload, Depth::QUICK) {
            Err(failure) => panic!("{failure}"),
            Ok(figures) => assert!(figures.crashes > 500, "{figures:?}"),
        }
    }
}

/// The engine takes all its random numbers, its time and the order of its tasks from the world it runs in.
#[test]
fn the_same_seed_is_the_same_run() {
    let trace = |name: &str| {
        let workload = Shape::named(name).expect("a shape").with_steps(200).draw(11);
        let mut rig = rig_for(&engine(), &workload);
        rig.world.borrow_mut().trace.record();
        whole(&mut rig, &workload).expect("no fault");
        let world = rig.world.borrow();
        (world.trace.lines().to_vec(), world.trace.digest())
    };
    for name in ["mixed", "restarts"] {
        let (first, second) = (trace(name), trace(name));
        for (line, other) in first.0.iter().zip(&second.0) {
            assert_eq!(line, other, "{name}");
        }
        assert_eq!(first.1, second.1, "{name}");
    }
}

/// A set is stopped while the allocator stores generations, on a device that takes its time for them: the journal, which
/// the allocator needs for that, must go on until it has ended (found as a stop that never ended).
#[test]
fn a_stop_waits_for_the_allocator_before_it_ends_the_journal() {
    const LATE: u64 = 1_000_000_000;
    let mut met = 0;
    for count in 20..40 {
        let geometry = Geometry { bucket_sectors: 16, ..small_geometry() };
        let mut stage = Stage::new(engine(), geometry, count);
        stage.start().expect("it opens");
        // Superblock, four journal buckets, then the two chains of priorities.
        let late = Rule {
            on: OpKind::Write,
            sectors: 6 * 16..8 * 16,
            skip: 0,
            count: 1,
            fault: DiskFault::Late(LATE),
        };
        stage.device(0).faults.add(late);
        let write = |place| Step::Write { volume: 0, sectors: place * 16..(place + 1) * 16, fua: false };
        stage.together((0..count).map(write).collect()).expect("it writes");
        let before = stage.rig().figures().virtual_ns;
        stage.stop().unwrap_or_else(|fault| panic!("after {count} writes: {fault}"));
        met += u32::from(stage.rig().figures().virtual_ns - before > LATE / 2);
    }
    assert!(met > 0, "no stop met the allocator at work");
}

/// Few small buckets, one volume, mode writeback.
fn small_geometry() -> Geometry {
    Geometry {
        block_sectors: 8,
        set_block_sectors: 8,
        bucket_sectors: 16,
        buckets: 600,
        volumes: vec![4096],
        torn_sectors: 8,
        backing_volatile: true,
        cache_volatile: true,
        note_records: 1024,
        tuning: 2 << 40,
    }
}

/// Nobody asks for durability; the keys are in the journal after the time that the set waits for more, as in a kernel.
#[test]
fn acknowledged_writes_are_durable_after_the_journal_delay() {
    let geometry = Geometry { note_records: 1024, ..small_geometry() };
    let mut stage = Stage::new(engine(), geometry, 1);
    stage.start().expect("it opens");
    stage.ask(Step::Write { volume: 0, sectors: 0..8, fua: false }).expect("it writes");
    stage
        .play(|client| async move {
            client.go(Step::Pause(300)).await;
            Ok(())
        })
        .expect("time passes");
    stage.crash(Crash::PowerCut, Survivors::Nothing);
    stage.start().expect("it opens");
    assert_eq!(stage.values(0, 0..8).expect("it reads"), [Value::Written(1); 8]);
}
