//! Shortens a failing workload: removes steps, first many at once, then one by one, as long as it
//! still fails in the same way
//! ([`FailureKind::resembles`](crate::failure::FailureKind::resembles)). A shorter way to another
//! fault is rejected: it would hide the first one.
//!
//! If a crash belongs to the failure, it is first tried at its old point: this removes everything
//! behind it at once. Next it is tried at the same distance from the end of the run, because
//! removing earlier steps moves it. Only then are all points crashed, or a sample of them in a long
//! run. One try takes seconds at most, and all of them together two minutes of CPU time.

use crate::crashpoints::{SweepDepth, replay, sweep};
use crate::failure::{CrashPoint, Failure};
use crate::figures::RunCounts;
use crate::run::{play, rig_for, whole_of};
use crate::system::System;
use crate::workload::Workload;
use rustix::time::{ClockId, clock_gettime};
use std::rc::Rc;
use std::time::Duration;

/// CPU time after which no further try is begun.
pub const TIME: Duration = Duration::from_secs(120);

/// Budget of device operations for the crashes of one try, besides twice the number of points: a
/// few seconds.
const WORK: u64 = 400_000;

/// Estimated device operations after one crash until a sweep has measured it: a recovery of a small
/// set.
const OPERATIONS_A_CRASH: u64 = 120;

/// A shorter workload that fails, and its failure.
pub struct MinimalFailure {
    /// The workload.
    pub workload: Workload,
    /// Its failure.
    pub failure: Failure,
    /// Number of shorter workloads that were tried.
    pub tries: u32,
    /// Whether the limit was reached before every step had been tried: there may be a shorter way.
    pub cut_off: bool,
}

/// Shortens `workload`, which fails with `failure`, in at most `tries` tries and about [`TIME`].
#[must_use]
pub fn minimise(
    system: &Rc<dyn System>,
    workload: &Workload,
    failure: Failure,
    tries: u32,
) -> MinimalFailure {
    let since = thread_time();
    minimise_while(system, workload, failure, |tried| {
        tried < tries && thread_time().saturating_sub(since) < TIME
    })
}

/// Does the same as [`minimise`], as long as `may_try` returns true. Its argument is the number of
/// tries so far.
#[must_use]
pub fn minimise_while(
    system: &Rc<dyn System>,
    workload: &Workload,
    failure: Failure,
    may_try: impl Fn(u32) -> bool,
) -> MinimalFailure {
    let mut search = Minimiser { system, operations_a_crash: OPERATIONS_A_CRASH };
    let mut best = MinimalFailure { workload: workload.clone(), failure, tries: 0, cut_off: false };
    let mut chunk = workload.steps.len().div_ceil(2);
    while chunk > 0 && !best.cut_off {
        // From the end, because everything that follows the fault goes at once.
        let mut end = best.workload.steps.len();
        while end > 0 {
            if !may_try(best.tries) {
                best.cut_off = true;
                break;
            }
            let start = end.saturating_sub(chunk);
            let places: Vec<usize> =
                (0..best.workload.steps.len()).filter(|place| !(start..end).contains(place)).collect();
            let candidate = best.workload.keep(&places);
            best.tries += 1;
            if let Some(failure) = search.same_failure(&candidate, &best) {
                (best.workload, best.failure) = (candidate, failure);
            }
            end = start;
        }
        chunk /= 2;
    }
    best
}

/// Returns the failure of `workload` without further crashes.
#[must_use]
pub fn fault_of(system: &Rc<dyn System>, workload: &Workload) -> Option<Failure> {
    whole_of(system, workload).err().map(|fault| Failure::new(fault, system.name(), workload, &[]))
}

/// The state that the tries share.
struct Minimiser<'a> {
    system: &'a Rc<dyn System>,
    /// Device operations for each crash, as measured by the last sweep.
    operations_a_crash: u64,
}

impl Minimiser<'_> {
    /// Returns the failure of `candidate`, if it fails as `best` does.
    fn same_failure(&mut self, candidate: &Workload, best: &MinimalFailure) -> Option<Failure> {
        let same = |failure: &Failure| failure.fault.resembles(&best.failure.fault);
        let Some((first, others)) = best.failure.cuts.split_first() else {
            return fault_of(self.system, candidate).filter(same);
        };
        let crashed_at = |point| {
            let cuts: Vec<CrashPoint> =
                [CrashPoint { point, ..*first }].iter().chain(others).copied().collect();
            let failure = replay(self.system, candidate, &cuts, SweepDepth::QUICK).err()?;
            Some(*failure).filter(same)
        };
        if let Some(failure) = crashed_at(first.point) {
            return Some(failure);
        }
        let (before, now) = (points(self.system, &best.workload), points(self.system, candidate));
        let from_end = (now + first.point).checked_sub(before).filter(|point| *point > 0);
        if let Some(failure) = from_end.filter(|point| *point != first.point).and_then(crashed_at) {
            return Some(failure);
        }
        self.crashed_anywhere(candidate, best.failure.cuts.len(), now).filter(same)
    }

    /// Returns the failure of `candidate`, which has `points` points, after one crash or several in
    /// a row.
    fn crashed_anywhere(&mut self, candidate: &Workload, crashes: usize, points: u64) -> Option<Failure> {
        /// Crashes at each point of a quick sweep, with a reserve: a sweep judges no more points
        /// once half of its budget is spent.
        const CRASHES: u64 = 2 * 6;
        let one_in = |level| if crashes >= level { 16 } else { 0 };
        let depth = SweepDepth {
            every: (points * CRASHES * self.operations_a_crash).div_ceil(WORK).max(1),
            recovery_one_in: one_in(2),
            third_one_in: one_in(3),
            work: Some(WORK),
            ..SweepDepth::QUICK
        };
        match sweep(self.system, candidate, depth) {
            Err(failure) => Some(*failure),
            Ok(RunCounts { operations, crashes, crashes_in_recovery, .. }) => {
                let of_the_run = crashes - crashes_in_recovery;
                self.operations_a_crash = operations.div_ceil(of_the_run.max(1)).max(OPERATIONS_A_CRASH);
                None
            }
        }
    }
}

/// Returns the number of points of the run of `workload`, as far as it gets.
fn points(system: &Rc<dyn System>, workload: &Workload) -> u64 {
    let Ok(mut rig) = rig_for(system, workload) else { return 0 };
    let _tried_by_others = play(&mut rig, workload);
    let world = rig.world.borrow();
    world.points()
}

/// Returns the CPU time of this thread, which depends neither on other threads nor on how busy the
/// machine is.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Survivors;
    use crate::driver::Crash;
    use crate::system::mutant::{Mutant, MutantFault};
    use crate::workload::Shape;

    fn crashed(seed: u64) -> (Rc<dyn System>, Workload, Failure) {
        let system: Rc<dyn System> = Rc::new(Mutant::new(MutantFault::FlushSkipped));
        let workload = Shape::named("points").unwrap().draw(seed);
        let failure = sweep(&system, &workload, SweepDepth::QUICK).expect_err("flushes are skipped");
        (system, workload, *failure)
    }

    #[test]
    fn a_failure_after_a_crash_is_shortened_and_shown_again() {
        let (system, workload, failure) = crashed(6);
        let minimal = minimise(&system, &workload, failure, 300);
        // As many as are in flight together, and the flush that lies.
        assert!(minimal.workload.steps.len() <= 7, "{:?}", minimal.workload.steps);
        assert!(!minimal.cut_off);
        let again = replay(&system, &minimal.workload, &minimal.failure.cuts, SweepDepth::QUICK).unwrap_err();
        assert_eq!(again.to_string(), minimal.failure.to_string());
    }

    #[test]
    fn what_is_cut_off_is_the_shortest_so_far() {
        let (system, workload, failure) = crashed(5);
        let told = failure.to_string();
        let nothing = minimise_while(&system, &workload, failure.clone(), |_| false);
        assert_eq!((nothing.tries, nothing.cut_off, nothing.failure.to_string()), (0, true, told));
        // First half of the steps, then half of these.
        let some = minimise_while(&system, &workload, failure, |tried| tried < 3);
        assert!(some.cut_off && some.tries == 3);
        let steps = some.workload.steps.len();
        assert!((5..workload.steps.len()).contains(&steps), "{steps}");
        replay(&system, &some.workload, &some.failure.cuts, SweepDepth::QUICK).expect_err("it fails still");
    }

    /// Everything behind the crash is removed after one run and one recovery each, however many
    /// points there are.
    #[test]
    fn a_crash_is_first_tried_where_it_was() {
        let (system, workload, failure) = crashed(6);
        let cuts = |point| [CrashPoint { point, crash: Crash::PowerCut, survivors: Survivors::Nothing }];
        let fails = |point: &u64| replay(&system, &workload, &cuts(*point), SweepDepth::QUICK).is_err();
        let last = (1..=points(&system, &workload)).rev().find(fails).expect("flushes are skipped");
        let failure = Failure { cuts: cuts(last).to_vec(), ..failure };
        let mut search = Minimiser { system: &system, operations_a_crash: OPERATIONS_A_CRASH };
        let best = MinimalFailure { workload: workload.clone(), failure, tries: 0, cut_off: false };
        let count = workload.steps.len();
        let mut found_at = |kept: std::ops::Range<usize>| {
            let failure = search.same_failure(&workload.keep(&kept.collect::<Vec<_>>()), &best);
            failure.expect("the flush that lies is kept").cuts[0].point
        };
        assert_eq!(found_at(0..count), last, "not where a sweep meets the fault first");
        let early = found_at(4..count);
        let moved =
            points(&system, &workload) - points(&system, &workload.keep(&(4..count).collect::<Vec<_>>()));
        assert_eq!(early, last - moved, "what was taken out before it has moved it");
    }
}
