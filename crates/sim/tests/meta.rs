//! Tests the simulator itself: the same seed gives the same run to the byte, and a replay finds
//! what a sweep found.

use bcached_sim::crashpoints::{SweepDepth, replay, sweep};
use bcached_sim::digest::Digest;
use bcached_sim::run::{rig_for, whole};
use bcached_sim::system::System;
use bcached_sim::system::mutant::{Mutant, MutantFault};
use bcached_sim::system::passthrough::Passthrough;
use bcached_sim::workload::Shape;
use std::rc::Rc;

fn trace(name: &str, seed: u64) -> (Vec<String>, u64, u64) {
    let system: Rc<dyn System> = Rc::new(Passthrough);
    let workload = Shape::named(name).expect("a shape").with_steps(150).draw(seed);
    let mut rig = rig_for(&system, &workload).expect("it grows");
    rig.world.borrow_mut().trace.record();
    whole(&mut rig, &workload).expect("no fault");
    let world = rig.world.borrow();
    // In order: runs with two devices exchanged are not equal.
    let mut contents = Digest::new();
    world.devices.iter().for_each(|device| contents.word(device.medium().digest()));
    (world.trace.lines().to_vec(), world.trace.digest(), contents.value())
}

#[test]
fn the_same_seed_is_the_same_run_to_the_byte() {
    for shape in Shape::all() {
        let (first, second) = (trace(shape.name, 7), trace(shape.name, 7));
        for (line, other) in first.0.iter().zip(&second.0) {
            assert_eq!(line, other, "{}", shape.name);
        }
        assert_eq!(first, second, "{}", shape.name);
        assert_ne!(first.1, trace(shape.name, 8).1, "{}", shape.name);
    }
}

#[test]
fn a_failure_met_by_a_sweep_is_met_again_by_its_replay() {
    let system: Rc<dyn System> = Rc::new(Mutant::new(MutantFault::FlushSkipped));
    let workload = Shape::named("points").unwrap().draw(3);
    let failure = sweep(&system, &workload, SweepDepth::QUICK).expect_err("flushes are skipped");
    let again = replay(&system, &workload, &failure.cuts, SweepDepth::QUICK).expect_err("the same crash");
    assert_eq!(failure.to_string(), again.to_string());
}
