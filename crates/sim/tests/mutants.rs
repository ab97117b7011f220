//! The simulator is sensitive: random workloads alone catch every fault of `system::mutant`.

use bcached_sim::crashpoints::{SweepDepth, sweep};
use bcached_sim::failure::Failure;
use bcached_sim::minimise::{fault_of, minimise};
use bcached_sim::system::System;
use bcached_sim::system::mutant::{ALL, Mutant, MutantFault};
use bcached_sim::workload::{DRAWING, Shape};
use std::rc::Rc;

/// Returns the failure that the random workloads find first, and after how many rounds.
fn caught(system: &Rc<dyn System>) -> Option<(u64, Failure)> {
    for seed in 0..6 {
        for name in ["mixed", "hot", "restarts"] {
            if let Some(failure) = fault_of(system, &Shape::named(name).expect("a shape").draw(seed)) {
                return Some((seed, failure));
            }
        }
        let workload = Shape::named("points").expect("a shape").draw(seed);
        if let Err(failure) = sweep(system, &workload, SweepDepth::QUICK) {
            return Some((seed, *failure));
        }
    }
    None
}

#[test]
fn every_fault_is_caught() {
    let mut missed = Vec::new();
    for fault in ALL {
        let system: Rc<dyn System> = Rc::new(Mutant::new(fault));
        match caught(&system) {
            Some((seed, failure)) => println!("{fault:?}: round {seed}: {failure}"),
            None => missed.push(fault),
        }
    }
    assert!(missed.is_empty(), "not noticed: {missed:?}");
}

#[test]
fn a_failure_is_shortened() {
    let system: Rc<dyn System> = Rc::new(Mutant::new(MutantFault::ZeroesHalf));
    let workload = Shape::named("mixed").unwrap().draw(1);
    let failure = fault_of(&system, &workload).expect("zeroes are halved");
    let minimal = minimise(&system, &workload, failure, 400);
    println!("{}", minimal.failure);
    // One zeroing and at most one read: even without one, the last verification reads.
    assert!(minimal.workload.steps.len() <= 3, "{:?}", minimal.workload.steps);
    let command = minimal.failure.command("sim");
    let wanted = format!(
        "sim run --system mutant-ZeroesHalf --workload mixed --length 300 --seed 1 --drawing {DRAWING} --steps "
    );
    assert!(command.starts_with(&wanted), "{command}");
}
