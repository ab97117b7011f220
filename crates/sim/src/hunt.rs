//! Looks for faults with fresh seeds for as long as there is time, in rounds that cover all shapes
//! of workloads. Some rounds crash at a few of their points.
//!
//! A hunt is identified by one number, from which all its rounds follow. So a hunt can be repeated,
//! and each failure names its workload and seed.

use crate::crashpoints::{PointClassCounts, SweepDepth, sweep_after};
use crate::digest::mix;
use crate::failure::Failure;
use crate::figures::RunCounts;
use crate::run::whole_of;
use crate::system::System;
use crate::workload::{Shape, Workload};
use bcached_engine::Phase;
use std::cell::RefCell;
use std::rc::Rc;

/// Budget of device operations for the crashes of a round, besides twice the number of points: a
/// second or less.
const WORK: u64 = 10_000;

/// The same for sets with large trees, where each recovery takes thousands of operations.
const WORK_LARGE: u64 = 50_000;

/// Crash at points unlike those of earlier rounds, and inside some of these recoveries.
const DEPTH: SweepDepth = SweepDepth { third_one_in: 128, work: Some(WORK), ..SweepDepth::SPARSE };

/// Crash only where nodes are merged, which takes a long run.
const THINNED: SweepDepth = SweepDepth { within: Phase::Coalesce.bit(), novel: 64, ..GROWN };

/// Crash grown sets only where the tree changes its shape: smaller sets cover the rest.
const GROWN: SweepDepth =
    SweepDepth { within: TREE_PHASES, novel: 8, recovery_one_in: 0, work: Some(WORK_LARGE), ..DEPTH };

/// Crash only where cached data gives way to data that goes to its backing device.
const WRITTEN_OUT: SweepDepth = SweepDepth { within: Phase::WriteOut.bit(), novel: 32, ..DEPTH };

/// Crash only where data is moved.
const MOVED: SweepDepth = SweepDepth { within: Phase::Move.bit(), novel: 32, ..DEPTH };

/// Processes die while they write priorities or the UUID table. Their successors write these early,
/// and the power is cut while they do.
const INHERITED: SweepDepth = SweepDepth {
    within: TABLE_PHASES,
    dies_first: true,
    recoveries_within: true,
    novel: 8,
    tries: None,
    recovery_one_in: 1,
    recovery_subsets: 2,
    work: Some(3 * WORK),
    ..DEPTH
};

/// Crash before the tree has been walked, and so again in the recovery.
const UNWALKED: SweepDepth = SweepDepth {
    within: Phase::Walk.bit(),
    recoveries_within: true,
    novel: 32,
    recovery_one_in: 4,
    third_one_in: 4,
    work: Some(2 * WORK_LARGE),
    ..DEPTH
};

/// Crash before the journal has been applied to the leaves, and so again in the recovery.
const OVERLAID: SweepDepth = SweepDepth { within: Phase::ReplayBeside.bit(), ..UNWALKED };

const TABLE_PHASES: u32 = Phase::PriorityChain.bit() | Phase::PriorityEntry.bit() | Phase::UuidTable.bit();

const TREE_PHASES: u32 =
    Phase::LeafSplit.bit() | Phase::InteriorSplit.bit() | Phase::RootSplit.bit() | Phase::Coalesce.bit();

/// The specification of some rounds of a hunt.
#[derive(Clone, Copy)]
struct RoundSpec {
    shape: &'static str,
    /// Number of steps, instead of the shape's default: a round should not take much longer than a
    /// second.
    steps: Option<usize>,
    /// Crash it at this depth, instead of running it to its end.
    depth: Option<SweepDepth>,
    /// Number of such rounds in succession.
    times: u64,
}

/// Number of rounds of a plain kind. Such a round takes a few milliseconds, others a hundred times
/// as long, so this gives each kind its share of the time.
const MANY: u64 = 12;

const fn plain(shape: &'static str) -> RoundSpec {
    RoundSpec { shape, steps: None, depth: None, times: MANY }
}

const fn repeated(shape: &'static str, times: u64) -> RoundSpec {
    RoundSpec { times, ..plain(shape) }
}

const fn crashing(shape: &'static str, steps: usize) -> RoundSpec {
    RoundSpec { shape, steps: Some(steps), depth: Some(DEPTH), times: 1 }
}

const fn crashing_grown(steps: usize) -> RoundSpec {
    RoundSpec { depth: Some(GROWN), ..crashing("forest", steps) }
}

/// All kinds; rounds cycle through them.
const KINDS: [RoundSpec; 56] = [
    plain("restarts"),
    repeated("reopens", 3),
    crashing("points", 60),
    plain("trouble"),
    plain("coincidences-trouble"),
    plain("coincidences"),
    RoundSpec { times: 2, ..crashing("lodgers", 80) },
    plain("through"),
    plain("mixed"),
    crashing("trouble", 100),
    repeated("moves-trouble", 4),
    plain("lodgers-trouble"),
    plain("hot"),
    repeated("reopens", 3),
    repeated("promised", 1),
    plain("sizes"),
    RoundSpec { times: 4, ..crashing("sizes", 80) },
    RoundSpec { times: 6, depth: Some(INHERITED), ..crashing("chains", 30) },
    RoundSpec { times: 2, ..crashing_grown(80) },
    crashing("restarts", 100),
    crashing("reopens", 100),
    plain("trouble"),
    repeated("scarce", 1),
    RoundSpec { depth: Some(WRITTEN_OUT), ..crashing("moves-trouble", 1200) },
    RoundSpec { depth: Some(MOVED), ..crashing("moves", 1800) },
    repeated("scatter", 1),
    crashing("points", 100),
    plain("coincidences-trouble"),
    RoundSpec { times: 2, ..crashing("coincidences", 80) },
    plain("lodgers"),
    repeated("reopens", 3),
    plain("trouble"),
    repeated("early", 12),
    RoundSpec { times: 4, depth: Some(UNWALKED), ..crashing("early", 80) },
    RoundSpec { times: 6, depth: Some(OVERLAID), ..crashing("early", 80) },
    RoundSpec { times: 2, ..crashing("through", 150) },
    crashing("turnover", 700),
    repeated("turnover", 1),
    repeated("leaving", 120),
    RoundSpec { times: 2, ..crashing("leaving-trouble", 100) },
    crashing("mixed", 150),
    crashing("lodgers-trouble", 100),
    repeated("moves", 1),
    RoundSpec { times: 2, ..crashing("leaving", 100) },
    plain("leaving-trouble"),
    RoundSpec { depth: Some(UNWALKED), ..crashing("walks", 80) },
    repeated("chains", 24),
    crashing("chains", 60),
    crashing("scarce", 600),
    repeated("moves-trouble", 4),
    RoundSpec { times: 2, depth: Some(WRITTEN_OUT), ..crashing("leaving-trouble", 100) },
    crashing("trouble", 200),
    plain("restarts"),
    RoundSpec { depth: Some(THINNED), ..crashing("scatter", 1500) },
    crashing("hot", 200),
    crashing_grown(400),
];

/// Number of rounds in a cycle of all kinds.
const CYCLE: u64 = {
    let (mut rounds, mut at) = (0, 0);
    while at < KINDS.len() {
        rounds += KINDS[at].times;
        at += 1;
    }
    rounds
};

/// Returns the kind of round `index` of a hunt.
fn kind_of(index: u64) -> RoundSpec {
    let mut left = index % CYCLE;
    for kind in KINDS {
        if left < kind.times {
            return kind;
        }
        left -= kind.times;
    }
    unreachable!("the kinds make up a cycle")
}

/// One round of a hunt.
pub struct HuntRound {
    /// The workload of the round.
    pub workload: Workload,
    depth: Option<SweepDepth>,
}

impl HuntRound {
    /// Returns round `index` of the hunt that `from` identifies.
    ///
    /// # Panics
    /// Never: the shapes it names exist.
    #[must_use]
    pub fn of(from: u64, index: u64) -> Self {
        let kind = kind_of(index);
        let shape = Shape::named(kind.shape).expect("a shape of its own");
        let shape = kind.steps.map_or(shape.clone(), |steps| shape.with_steps(steps));
        // Short enough to be typed.
        let seed = mix(&[from, index]) >> 32;
        Self { workload: shape.draw(seed), depth: kind.depth }
    }

    /// Returns the phases in the middle of which it crashes, a [bit](Phase::bit) for each; 0:
    /// anywhere, or not at all.
    #[must_use]
    pub fn within(&self) -> u32 {
        self.depth.map_or(0, |depth| depth.within)
    }

    /// Runs the round against `system`. Situations that earlier rounds have judged are recorded in
    /// `novelty`.
    ///
    /// # Errors
    /// Returns the fault that it finds.
    pub fn judge(
        &self,
        system: &Rc<dyn System>,
        novelty: &Rc<RefCell<PointClassCounts>>,
    ) -> Result<RunCounts, Box<Failure>> {
        let workload = &self.workload;
        if let Some(depth) = self.depth {
            return sweep_after(system, workload, depth, novelty);
        }
        let result = whole_of(system, workload);
        result.map_err(|fault| Box::new(Failure::new(fault, system.name(), workload, &[])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hunt_can_be_repeated_and_no_two_are_the_same() {
        let steps = |from, index| HuntRound::of(from, index).workload.steps;
        assert_eq!(steps(1, 3), steps(1, 3));
        assert_ne!(steps(1, 3), steps(2, 3));
        assert_ne!(steps(1, 3), steps(1, 3 + CYCLE));
    }
}
