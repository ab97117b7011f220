//! Looking for faults with fresh seeds, for as long as there is time: rounds of all shapes of workloads, some with crashes
//! at a few of their points.
//!
//! A hunt is told by one number; its rounds follow from that, so a hunt can be repeated, and each failure names its
//! workload and seed.

use crate::crashpoints::{Depth, sweep};
use crate::digest::mix;
use crate::failure::Failure;
use crate::figures::Figures;
use crate::run::whole_of;
use crate::system::System;
use crate::workload::{Shape, Workload};
use std::rc::Rc;

/// How much fewer points inside what comes seldom are judged than in a sweep: a round should not take much longer than a
/// second, and each crash of a set that has grown takes a good part of one.
const SELDOM: u64 = 32;

/// Of a recovery one point in so many is judged: some have thousands.
const RECOVERY: u64 = 16;

/// Device operations that the crashes of a round may take besides as many as its workload does: a second or less.
const WORK: u64 = 20_000;

/// What a round of a hunt is made of.
#[derive(Clone, Copy)]
struct Kind {
    shape: &'static str,
    /// Steps instead of the shape's own: a round should not take much longer than a second.
    steps: Option<usize>,
    /// Crash at one point in so many; `None`: no crashes but the workload's own.
    crash_every: Option<u64>,
    /// Some of the recoveries are crashed in turn.
    inside: bool,
}

const fn plain(shape: &'static str) -> Kind {
    Kind { shape, steps: None, crash_every: None, inside: false }
}

const fn crashing(shape: &'static str, steps: usize, every: u64) -> Kind {
    Kind { shape, steps: Some(steps), crash_every: Some(every), inside: true }
}

/// For sets whose recovery is long.
const fn crashing_once(shape: &'static str, steps: usize, every: u64) -> Kind {
    Kind { inside: false, ..crashing(shape, steps, every) }
}

/// One round after the other, then from the start.
const KINDS: [Kind; 21] = [
    plain("restarts"),
    crashing("points", 60, 7),
    plain("trouble"),
    plain("mixed"),
    crashing("trouble", 100, 13),
    plain("hot"),
    crashing_once("forest", 80, 997),
    crashing("restarts", 100, 29),
    plain("scarce"),
    plain("scatter"),
    crashing("points", 100, 11),
    plain("restarts"),
    Kind { shape: "turnover", steps: Some(700), crash_every: None, inside: false },
    crashing("mixed", 150, 31),
    crashing_once("scarce", 600, 997),
    plain("trouble"),
    crashing("trouble", 200, 31),
    crashing_once("forest", 80, 997),
    crashing("scatter", 400, 499),
    crashing("hot", 200, 29),
    crashing_once("forest", 400, 499),
];

/// One round of a hunt.
pub struct Round {
    /// What is run.
    pub workload: Workload,
    crashes: Option<Depth>,
}

impl Round {
    /// Round `index` of the hunt that is told by `from`.
    ///
    /// # Panics
    /// Never: the shapes it names exist.
    #[must_use]
    pub fn of(from: u64, index: u64) -> Self {
        let count = KINDS.len() as u64;
        let kind = KINDS[usize::try_from(index % count).expect("few kinds")];
        let shape = Shape::named(kind.shape).expect("a shape of its own");
        let shape = kind.steps.map_or(shape.clone(), |steps| shape.with_steps(steps));
        // Short enough to be typed.
        let seed = mix(&[from, index]) >> 32;
        let crashes = kind.crash_every.map(|every| Depth {
            every,
            seldom: SELDOM,
            recovery_every: RECOVERY,
            recovery_one_in: if kind.inside { 96 } else { 0 },
            work: Some(WORK),
            ..Depth::QUICK
        });
        Self { workload: shape.draw(seed), crashes }
    }

    /// Runs it against `system`.
    ///
    /// # Errors
    /// The fault that it finds.
    pub fn judge(&self, system: &Rc<dyn System>) -> Result<Figures, Box<Failure>> {
        let workload = &self.workload;
        if let Some(depth) = self.crashes {
            return sweep(system, workload, depth);
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
        assert_ne!(steps(1, 3), steps(1, 3 + KINDS.len() as u64));
    }
}
