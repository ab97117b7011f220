//! Shortens a failing workload and prints the result.

use crate::out::say;
use crate::program;
use bcached_sim::failure::Failure;
use bcached_sim::minimise::{MinimalFailure, minimise};
use bcached_sim::system::System;
use bcached_sim::workload::Workload;
use std::rc::Rc;

/// Maximum number of attempts to shorten a failure.
pub const TRIES: u32 = 300;

/// Looks for a shorter way to `failure` of `workload`, and prints it.
pub fn shorten(system: &Rc<dyn System>, workload: &Workload, failure: Failure) -> MinimalFailure {
    let minimal = minimise(system, workload, failure, TRIES);
    say!("{}", told(&minimal));
    minimal
}

/// Returns the text of the result: its length, the failure, and the remaining steps.
pub fn told(minimal: &MinimalFailure) -> String {
    let (steps, tries) = (&minimal.workload.steps, minimal.tries);
    let cut_off = if minimal.cut_off { " (the limit, so it may not be the shortest)" } else { "" };
    let failure = minimal.failure.told(&program::name());
    let head = format!("shortened to {} steps in {tries} tries{cut_off}: {failure}", steps.len());
    steps.iter().fold(head, |told, step| format!("{told}\n    {step}"))
}
