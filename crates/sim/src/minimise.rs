//! Shortening a workload that fails: steps are taken out, first many at once, then one by one, as long as it still
//! fails in the same way. A shorter way to another fault is not taken: it would hide the first one.

use crate::crashpoints::{Depth, sweep};
use crate::failure::Failure;
use crate::run::whole_of;
use crate::system::System;
use crate::workload::Workload;
use std::rc::Rc;

/// A shorter workload that fails, and how.
pub struct Minimal {
    /// The workload.
    pub workload: Workload,
    /// Its failure.
    pub failure: Failure,
    /// Runs that were tried.
    pub tries: u32,
}

/// Shortens `workload`, which fails as `failure` says, in at most `tries` runs.
#[must_use]
pub fn minimise(system: &Rc<dyn System>, workload: &Workload, failure: Failure, tries: u32) -> Minimal {
    let crashes = !failure.cuts.is_empty();
    let one_in = |crashes| if failure.cuts.len() >= crashes { 16 } else { 0 };
    let depth = Depth { recovery_one_in: one_in(2), third_one_in: one_in(3), ..Depth::QUICK };
    let fails = |candidate: &Workload| {
        if crashes {
            sweep(system, candidate, depth).err().map(|failure| *failure)
        } else {
            fault_of(system, candidate)
        }
    };
    let mut best = Minimal { workload: workload.clone(), failure, tries: 0 };
    let mut chunk = workload.steps.len().div_ceil(2);
    while chunk > 0 {
        // From the end, because what follows the fault goes at once.
        let mut end = best.workload.steps.len();
        while end > 0 && best.tries < tries {
            let start = end.saturating_sub(chunk);
            let places: Vec<usize> =
                (0..best.workload.steps.len()).filter(|place| !(start..end).contains(place)).collect();
            let candidate = best.workload.keep(&places);
            best.tries += 1;
            let failure = fails(&candidate).filter(|failure| failure.fault.resembles(&best.failure.fault));
            if let Some(failure) = failure {
                (best.workload, best.failure) = (candidate, failure);
            }
            end = start;
        }
        chunk /= 2;
    }
    best
}

/// The failure of `workload` without crashes of our own.
#[must_use]
pub fn fault_of(system: &Rc<dyn System>, workload: &Workload) -> Option<Failure> {
    whole_of(system, workload).err().map(|fault| Failure::new(fault, system.name(), workload, &[]))
}
