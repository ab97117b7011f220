//! Looking for faults with fresh seeds, for as long as there is time: rounds of all shapes of
//! workloads, some with crashes at a few of their points.
//!
//! A hunt is told by one number; its rounds follow from that, so a hunt can be repeated, and each
//! failure names its workload and seed.

use crate::crashpoints::{Depth, Novelty, sweep_after};
use crate::digest::mix;
use crate::failure::Failure;
use crate::figures::Figures;
use crate::run::whole_of;
use crate::system::System;
use crate::workload::{Shape, Workload};
use bcached_engine::Phase;
use std::cell::RefCell;
use std::rc::Rc;

/// Device operations that the crashes of a round may take besides twice as many as there are
/// points: a second or less.
const WORK: u64 = 10_000;

/// The same of sets with large trees, each recovery of which takes thousands.
const WORK_LARGE: u64 = 50_000;

/// Points unlike those of earlier rounds are crashed, and some of these recoveries.
const DEPTH: Depth = Depth { third_one_in: 128, work: Some(WORK), ..Depth::SPARSE };

/// Only where nodes become fewer, which takes a long run.
const THINNED: Depth = Depth { within: Phase::Coalesce.bit(), novel: 64, ..GROWN };

/// Sets that have grown are crashed where the tree changes its form: for the rest there are smaller
/// ones.
const GROWN: Depth =
    Depth { within: TREE_PHASES, novel: 8, recovery_one_in: 0, work: Some(WORK_LARGE), ..DEPTH };

/// Only where what the cache holds gives way to what its backing device gets.
const WRITTEN_OUT: Depth = Depth { within: Phase::WriteOut.bit(), novel: 32, ..DEPTH };

/// Only where data is moved.
const MOVED: Depth = Depth { within: Phase::Move.bit(), novel: 32, ..DEPTH };

/// Processes die while they write priorities or uuids, and so do their heirs, who do that early,
/// for lack of power.
const INHERITED: Depth = Depth {
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

/// Before the tree has been walked, and so again in what comes after that.
const UNWALKED: Depth = Depth {
    within: Phase::Walk.bit(),
    recoveries_within: true,
    novel: 32,
    recovery_one_in: 4,
    third_one_in: 4,
    work: Some(2 * WORK_LARGE),
    ..DEPTH
};

/// Before the journal is in its leaves, and so again in what comes after that.
const OVERLAID: Depth = Depth { within: Phase::ReplayBeside.bit(), ..UNWALKED };

const TABLE_PHASES: u32 = Phase::PriorityChain.bit() | Phase::PriorityEntry.bit() | Phase::UuidTable.bit();

const TREE_PHASES: u32 =
    Phase::LeafSplit.bit() | Phase::InteriorSplit.bit() | Phase::RootSplit.bit() | Phase::Coalesce.bit();

/// What a round of a hunt is made of.
#[derive(Clone, Copy)]
struct Kind {
    shape: &'static str,
    /// Steps instead of the shape's own: a round should not take much longer than a second.
    steps: Option<usize>,
    /// Crash it so, rather than let it run to its end.
    depth: Option<Depth>,
    /// So many of them one after the other.
    times: u64,
}

/// Such a round takes a few milliseconds, others a hundred times as long: each kind gets its share
/// of the time.
const MANY: u64 = 12;

const fn plain(shape: &'static str) -> Kind {
    Kind { shape, steps: None, depth: None, times: MANY }
}

const fn repeated(shape: &'static str, times: u64) -> Kind {
    Kind { times, ..plain(shape) }
}

const fn crashing(shape: &'static str, steps: usize) -> Kind {
    Kind { shape, steps: Some(steps), depth: Some(DEPTH), times: 1 }
}

const fn crashing_grown(steps: usize) -> Kind {
    Kind { depth: Some(GROWN), ..crashing("forest", steps) }
}

/// One after the other, then from the start.
const KINDS: [Kind; 56] = [
    plain("restarts"),
    plain("reopens"),
    crashing("points", 60),
    plain("trouble"),
    plain("coincidences-trouble"),
    plain("coincidences"),
    Kind { times: 2, ..crashing("lodgers", 80) },
    plain("through"),
    plain("mixed"),
    crashing("trouble", 100),
    repeated("moves-trouble", 4),
    plain("lodgers-trouble"),
    plain("hot"),
    plain("reopens"),
    repeated("promised", 1),
    plain("sizes"),
    Kind { times: 4, ..crashing("sizes", 80) },
    Kind { times: 6, depth: Some(INHERITED), ..crashing("chains", 30) },
    Kind { times: 2, ..crashing_grown(80) },
    crashing("restarts", 100),
    crashing("reopens", 100),
    plain("trouble"),
    repeated("scarce", 1),
    Kind { depth: Some(WRITTEN_OUT), ..crashing("moves-trouble", 1200) },
    Kind { depth: Some(MOVED), ..crashing("moves", 1800) },
    repeated("scatter", 1),
    crashing("points", 100),
    plain("coincidences-trouble"),
    Kind { times: 2, ..crashing("coincidences", 80) },
    plain("lodgers"),
    plain("reopens"),
    plain("trouble"),
    repeated("early", 12),
    Kind { times: 4, depth: Some(UNWALKED), ..crashing("early", 80) },
    Kind { times: 6, depth: Some(OVERLAID), ..crashing("early", 80) },
    Kind { times: 2, ..crashing("through", 150) },
    crashing("turnover", 700),
    repeated("turnover", 1),
    repeated("leaving", 120),
    Kind { times: 2, ..crashing("leaving-trouble", 100) },
    crashing("mixed", 150),
    crashing("lodgers-trouble", 100),
    repeated("moves", 1),
    Kind { times: 2, ..crashing("leaving", 100) },
    plain("leaving-trouble"),
    Kind { depth: Some(UNWALKED), ..crashing("walks", 80) },
    repeated("chains", 24),
    crashing("chains", 60),
    crashing("scarce", 600),
    repeated("moves-trouble", 4),
    Kind { times: 2, depth: Some(WRITTEN_OUT), ..crashing("leaving-trouble", 100) },
    crashing("trouble", 200),
    plain("restarts"),
    Kind { depth: Some(THINNED), ..crashing("scatter", 1500) },
    crashing("hot", 200),
    crashing_grown(400),
];

/// Rounds until the kinds begin again.
const CYCLE: u64 = {
    let (mut rounds, mut at) = (0, 0);
    while at < KINDS.len() {
        rounds += KINDS[at].times;
        at += 1;
    }
    rounds
};

/// Of which kind round `index` of a hunt is.
fn kind_of(index: u64) -> Kind {
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
pub struct Round {
    /// What is run.
    pub workload: Workload,
    depth: Option<Depth>,
}

impl Round {
    /// Round `index` of the hunt that is told by `from`.
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

    /// In the middle of which phases it crashes, a [bit](Phase::bit) for each; 0: anywhere, or not
    /// at all.
    #[must_use]
    pub fn within(&self) -> u32 {
        self.depth.map_or(0, |depth| depth.within)
    }

    /// Runs it against `system`, after rounds that have judged what `novelty` says.
    ///
    /// # Errors
    /// The fault that it finds.
    pub fn judge(
        &self,
        system: &Rc<dyn System>,
        novelty: &Rc<RefCell<Novelty>>,
    ) -> Result<Figures, Box<Failure>> {
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
        let steps = |from, index| Round::of(from, index).workload.steps;
        assert_eq!(steps(1, 3), steps(1, 3));
        assert_ne!(steps(1, 3), steps(2, 3));
        assert_ne!(steps(1, 3), steps(1, 3 + CYCLE));
    }
}
