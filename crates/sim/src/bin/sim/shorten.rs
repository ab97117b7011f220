//! A shorter way to a failure, and what is said of it.

use crate::out::say;
use crate::program;
use bcached_sim::failure::Failure;
use bcached_sim::minimise::{Minimal, minimise};
use bcached_sim::system::System;
use bcached_sim::workload::Workload;
use std::rc::Rc;

/// Tries that shortening a failure may take.
pub const TRIES: u32 = 300;

/// Looks for a shorter way to `failure` of `workload`, and prints it.
pub fn shorten(system: &Rc<dyn System>, workload: &Workload, failure: Failure) -> Minimal {
    let minimal = minimise(system, workload, failure, TRIES);
    let (steps, tries) = (minimal.workload.steps.len(), minimal.tries);
    let cut_off = if minimal.cut_off { " (no longer looked for)" } else { "" };
    say!("shortened to {steps} steps in {tries} tries{cut_off}: {}", minimal.failure.told(&program::name()));
    for step in &minimal.workload.steps {
        say!("    {step}");
    }
    minimal
}
