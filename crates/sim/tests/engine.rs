//! Tests the engine in the simulator, to the extent that CI has time for. `sim sweep` runs longer
//! sweeps; a failing seed prints its command.

use bcached_engine::Phase;
use bcached_sim::crashpoints::{SweepDepth, replay, sweep};
use bcached_sim::failure::Failure;
use bcached_sim::figures::{HostCounts, RunCounts};
use bcached_sim::hunt::HuntRound;
use bcached_sim::minimise::fault_of;
use bcached_sim::oracle::VolumePresence;
use bcached_sim::reached::{CoverageCase, FailedDevices, RequestCoverage};
use bcached_sim::run::{rig_for, whole, whole_of};
use bcached_sim::script::Script;
use bcached_sim::system::System;
use bcached_sim::system::engine::Engine;
use bcached_sim::workload::Shape;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

fn engine() -> Rc<dyn System> {
    Rc::new(Engine)
}

/// Every shape of workload passes, with its own restarts and crashes. Together they enter every
/// phase that a crash could interrupt.
#[test]
fn every_workload_passes() {
    let mut figures = RunCounts::default();
    for shape in Shape::all() {
        // Data is moved when buckets have run out, which takes a while.
        let steps = if shape.name == "moves" { 2000 } else { 250 };
        // Requests beside a failure, or in a mode that hardly lasts, are drawn more rarely.
        let is_seldom = shape.name.ends_with("-trouble") || ["hot", "reopens"].contains(&shape.name);
        let seeds = if is_seldom { 20 } else { 6 };
        for seed in 0..seeds {
            let workload = shape.clone().with_steps(steps).draw(seed);
            match whole_of(&engine(), &workload) {
                Ok(done) => figures.add(&done),
                Err(fault) => panic!("{}", Failure::new(fault, "engine", &workload, &[])),
            }
        }
    }
    for (phase, begun) in Phase::ALL.into_iter().zip(figures.begun) {
        // A volume leaves its cache in this phase only if the cache dies at the right moment:
        // scenarios cover that.
        assert!(begun > 0 || phase == Phase::BackingStale, "no workload comes to: {}", phase.name());
    }
    assert_asked(&figures.reached);
    let HostCounts { reopenings, bypasses } = figures.hosting;
    assert!(reopenings > 20 && bypasses > 10, "{:?}", figures.hosting);
}

/// Asserts that each kind of request was submitted to each kind of volume while no device had
/// failed, at each alignment, and beside the failure of either device. (The failure of both takes
/// longer than this.)
fn assert_asked(reached: &RequestCoverage) {
    let sum = |alike: &dyn Fn(&CoverageCase) -> bool| -> u64 {
        CoverageCase::all().filter(|case| alike(case)).map(|case| reached.of(&case)).sum()
    };
    for case in CoverageCase::all().filter(|case| case.failed != FailedDevices::Both) {
        let asked = |other: &CoverageCase| other.asked == case.asked;
        let of_volume = sum(&|other| {
            asked(other) && other.standing == case.standing && other.failed == FailedDevices::Nothing
        });
        let at_place = sum(&|other| asked(other) && other.lies == case.lies);
        let beside_failure = sum(&|other| asked(other) && other.failed == case.failed);
        assert!(
            of_volume > 0 && at_place > 0 && beside_failure > 0,
            "no workload asks for anything like: {case} ({of_volume} {at_place} {beside_failure})"
        );
    }
}

/// Workloads that failed once pass now. Each script says why it exists; `sim run .. --save` makes
/// one of a hunt's find.
#[test]
fn what_failed_once_passes() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts");
    let mut files: Vec<PathBuf> =
        fs::read_dir(&folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    assert!(files.len() >= 9, "scripts are missing: {files:?}");
    for file in files {
        let name = file.display();
        let text = fs::read_to_string(&file).expect("text");
        assert!(text.lines().nth(1).is_some_and(|line| line.starts_with("# ")), "{name} does not say why");
        let Script { workload, cuts } = Script::load(&file).unwrap_or_else(|error| panic!("{error}"));
        let found = if cuts.is_empty() {
            fault_of(&engine(), &workload)
        } else {
            let figures = replay(&engine(), &workload, &cuts, SweepDepth::QUICK).map_err(|failure| *failure);
            figures
                .map(|figures| assert_eq!(figures.crashes, cuts.len() as u64, "{name}: a point is gone"))
                .err()
        };
        if let Some(failure) = found {
            panic!("{failure}");
        }
    }
}

/// The engine survives a power cut and a process death after every device operation, and in some of
/// the recoveries from them.
#[test]
fn every_crash_point_passes() {
    // The recoveries of seed 0 have a thousand crashes each, and take longer than the others
    // together.
    for seed in 1..4 {
        let workload = Shape::named("points").expect("a shape").with_steps(25).draw(seed);
        match sweep(&engine(), &workload, SweepDepth::QUICK) {
            Err(failure) => panic!("{failure}"),
            Ok(figures) => assert!(figures.crashes > 500, "{figures:?}"),
        }
    }
}

/// Flash-only volumes are really created and shrunk. An engine that never creates one, always
/// reports that there is no room, or never changes a size would pass everything else.
#[test]
fn volumes_that_live_in_the_cache_alone_are_made_and_used() {
    for (name, least) in [("lodgers", 6), ("promised", 3)] {
        let (mut there, mut smaller) = (0, 0);
        for seed in 0..4 {
            let workload = Shape::named(name).expect("a shape").draw(seed);
            let mut rig = rig_for(&engine(), &workload).expect("nothing grows");
            let done = whole(&mut rig, &workload);
            assert!(done.is_ok(), "{}", Failure::new(done.unwrap_err(), "engine", &workload, &[]));
            let oracle = rig.oracle.borrow();
            for (volume, largest) in workload.geometry.lodgers() {
                if let VolumePresence::Exists(sectors) = oracle.presence(volume) {
                    there += 1;
                    smaller += usize::from(sectors < largest);
                }
            }
        }
        // Volumes with promised room shrink only to grow again, for which there may be no room.
        assert!(smaller > 0 || name == "promised", "{name}: none of them has become smaller");
        assert!(there >= least, "{name}: {there} in four runs");
    }
}

/// The rounds of a hunt that are meant for it crash a set before its tree has been walked, and
/// crash the recovery from that again.
#[test]
fn crashes_come_before_the_end_of_the_walk() {
    let is_crashed =
        |round: &HuntRound| round.workload.name == "early" && round.within() == Phase::Walk.bit();
    let round =
        (0..).map(|index| HuntRound::of(1, index)).find(is_crashed).expect("they come again and again");
    match round.judge(&engine(), &Rc::default()) {
        Err(failure) => panic!("{failure}"),
        Ok(RunCounts { crashes, crashes_in_recovery, cuts, .. }) => {
            assert_eq!(cuts[Phase::Walk as usize], crashes);
            assert!(crashes > 40 && crashes_in_recovery > 4, "{crashes}, {crashes_in_recovery}");
        }
    }
}

/// Some rounds crash a set before the keys of its journal are in its leaves. Half of the sets do
/// that first, if it is short.
#[test]
fn crashes_come_before_the_journal_is_in_its_leaves() {
    let is_crashed = |round: &HuntRound| round.within() == Phase::ReplayBeside.bit();
    let (mut within, mut in_recovery) = (0, 0);
    for round in (0..).map(|index| HuntRound::of(1, index)).filter(is_crashed).take(4) {
        match round.judge(&engine(), &Rc::default()) {
            Err(failure) => panic!("{failure}"),
            Ok(RunCounts { crashes, crashes_in_recovery, cuts, .. }) => {
                assert_eq!(cuts[Phase::ReplayBeside as usize], crashes);
                within += crashes;
                in_recovery += crashes_in_recovery;
            }
        }
    }
    assert!(within > 40 && in_recovery > 4, "{within}, {in_recovery}");
}

/// Nothing of a dead process stays in memory. Its unanswered requests once kept all of it: a hunt
/// of ten minutes took 15 GiB.
#[test]
fn nothing_of_a_process_is_left_in_memory() {
    for name in ["restarts", "trouble", "lodgers"] {
        let workload = Shape::named(name).expect("a shape").draw(1);
        let mut rig = rig_for(&engine(), &workload).expect("nothing grows");
        let done = whole(&mut rig, &workload);
        assert!(done.is_ok(), "{}", Failure::new(done.unwrap_err(), "engine", &workload, &[]));
        assert_eq!(Rc::strong_count(&rig.world), 1, "{name}: who died holds the world");
    }
}

/// The engine takes all its random numbers, its time and the order of its tasks from the world that
/// it runs in.
#[test]
fn the_same_seed_is_the_same_run() {
    let trace = |name: &str| {
        let workload = Shape::named(name).expect("a shape").with_steps(200).draw(11);
        let mut rig = rig_for(&engine(), &workload).expect("it grows");
        rig.world.borrow_mut().trace.record();
        whole(&mut rig, &workload).expect("no fault");
        let world = rig.world.borrow();
        (world.trace.lines().to_vec(), world.trace.digest())
    };
    for name in ["mixed", "restarts", "trouble", "leaving-trouble", "moves-trouble", "scatter"] {
        let (first, second) = (trace(name), trace(name));
        for (line, other) in first.0.iter().zip(&second.0) {
            assert_eq!(line, other, "{name}");
        }
        assert_eq!(first.1, second.1, "{name}");
    }
}
