//! The simulator raises no false alarms: a system without a cache and without a fault passes
//! everything.

use bcached_sim::crashpoints::{SweepDepth, sweep};
use bcached_sim::run::whole_of;
use bcached_sim::system::System;
use bcached_sim::system::passthrough::Passthrough;
use bcached_sim::workload::Shape;
use std::rc::Rc;

#[test]
fn a_faultless_system_passes_every_workload() {
    let system: Rc<dyn System> = Rc::new(Passthrough);
    for shape in Shape::all() {
        for seed in 0..10 {
            let workload = shape.draw(seed);
            if let Err(fault) = whole_of(&system, &workload) {
                panic!("{} {seed}: {fault}", shape.name);
            }
        }
    }
}

#[test]
fn a_faultless_system_passes_every_crash_point() {
    let system: Rc<dyn System> = Rc::new(Passthrough);
    for (name, seeds) in [("points", 0..4), ("hot", 10..11), ("restarts", 20..21)] {
        for seed in seeds {
            let workload = Shape::named(name).unwrap().with_steps(40).draw(seed);
            match sweep(&system, &workload, SweepDepth::QUICK) {
                Err(failure) => panic!("{failure}"),
                Ok(figures) => assert!(figures.crashes > 100, "{figures:?}"),
            }
        }
    }
}
