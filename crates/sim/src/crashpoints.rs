//! A crash at every operation: the workload runs once, and at each point the world is copied, crashed in several ways,
//! opened again and judged. Of the recoveries some are crashed in turn, at each of their own points.
//!
//! Copying at the point is the same as running again and crashing there (`driver::tests` compares the two), and turns a
//! quadratic sweep into a linear one. A replay runs the workload and judges the one point.

use crate::digest::mix;
use crate::disk::{Device, Survivors};
use crate::driver::Crash;
use crate::failure::{Cut, Failure, Fault};
use crate::figures::Figures;
use crate::note::NoteState;
use crate::oracle::Oracle;
use crate::rig::{Rig, Snapshot};
use crate::run::{play, rig_for, verified_life};
use crate::system::System;
use crate::workload::{Shape, Step, Workload};
use bcached_engine::Phases;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

/// How thorough a sweep is.
#[derive(Clone, Copy, Debug)]
pub struct Depth {
    /// Judge one point in so many (1: all).
    pub every: u64,
    /// Seeded subsets tried at each power cut, besides nothing and everything.
    pub subsets: u64,
    /// Crash inside the recovery of one crash in so many; 0: of none.
    pub recovery_one_in: u64,
    /// Steps done after each recovery.
    pub aftermath: usize,
}

impl Depth {
    /// Every point with nothing, everything and eight subsets; one recovery in 32 is crashed at each of its points.
    /// Afterwards as much is done as in a quick look: a replay does not know which of the two has found its crash.
    pub const FULL: Self = Self { subsets: 8, recovery_one_in: 32, ..Self::QUICK };

    /// For a quick look: every point, two subsets, one recovery in 64.
    pub const QUICK: Self = Self { every: 1, subsets: 2, recovery_one_in: 64, aftermath: 4 };

    /// The crashes tried at `point`.
    fn cuts(&self, seed: u64, point: u64) -> Vec<Cut> {
        let subset = |index| Survivors::Seeded(mix(&[seed, point, index]) >> 32);
        let power =
            [Survivors::Nothing, Survivors::Everything].into_iter().chain((0..self.subsets).map(subset));
        let death = [Survivors::Nothing, subset(self.subsets)];
        let cut = |crash| move |survivors| Cut { point, crash, survivors };
        power.map(cut(Crash::PowerCut)).chain(death.map(cut(Crash::ProcessDeath))).collect()
    }

    /// The crashes tried at a point of a recovery.
    fn cuts_in_recovery(seed: u64, point: u64) -> Vec<Cut> {
        let cut = |(crash, survivors)| Cut { point, crash, survivors };
        let subset = Survivors::Seeded(mix(&[seed, point, 77]) >> 32);
        [(Crash::PowerCut, Survivors::Nothing), (Crash::PowerCut, subset), (Crash::ProcessDeath, subset)]
            .into_iter()
            .map(cut)
            .collect()
    }
}

/// What a sweep or replay shares with its observers.
struct Judge {
    system: Rc<dyn System>,
    workload: Workload,
    depth: Depth,
    /// Only this one, instead of what `depth` says.
    only: Vec<Cut>,
    figures: Cell<Figures>,
    failure: RefCell<Option<Failure>>,
}

impl Judge {
    /// Tries `cuts` (the last of them new) on `snapshot`; true if the world may end because a fault was found.
    fn try_cut(self: &Rc<Self>, snapshot: &Snapshot, cuts: &[Cut]) -> bool {
        let cut = cuts.last().expect("there is a cut to try");
        let mut after = snapshot.clone();
        after.crash(cut.crash, cut.survivors);
        let seed = seed_after(&self.workload, cuts);
        let geometry = self.workload.geometry.clone();
        let mut rig = Rig::resume(Rc::clone(&self.system), geometry, self.workload.depth, seed, after);
        if self.looks_inside(cuts) {
            self.observe(&rig, cuts.to_vec());
        }
        let result = self.aftermath(&mut rig, seed);
        self.count(&rig, cuts.len());
        let Err(fault) = result else { return self.failure.borrow().is_some() };
        let failure = Failure::new(fault, self.system.name(), &self.workload, cuts);
        self.failure.borrow_mut().get_or_insert(failure);
        true
    }

    /// Opens, verifies, goes on a little, stops; in one of four runs the structure is checked as the crash has left it,
    /// in one of four runs the power then goes, and nothing may be missing.
    fn aftermath(&self, rig: &mut Rig, seed: u64) -> Result<(), Fault> {
        if seed % 4 == 1 {
            rig.inspect()?;
        }
        verified_life(rig, Shape::aftermath(&self.workload, mix(&[seed, 6]), self.depth.aftermath))?;
        if rig.world.borrow().halted().is_none() && seed.is_multiple_of(4) {
            rig.crash(Crash::PowerCut, Survivors::Nothing);
            verified_life(rig, Vec::new())?;
        }
        Ok(())
    }

    fn count(&self, rig: &Rig, level: usize) {
        let mut figures = self.figures.get();
        figures.add(&rig.figures());
        figures.crashes += 1;
        figures.crashes_in_recovery += u64::from(level > 1);
        self.figures.set(figures);
    }

    fn count_cuts(&self, phases: &Phases, cuts: u64) {
        let mut figures = self.figures.get();
        figures.cut(phases, cuts);
        self.figures.set(figures);
    }

    /// Whether the recovery after `cuts` is crashed in turn.
    fn looks_inside(&self, cuts: &[Cut]) -> bool {
        if !self.only.is_empty() {
            return cuts.len() < self.only.len();
        }
        let one_in = self.depth.recovery_one_in;
        let cut = cuts[0];
        let salt = u64::from(cut.crash == Crash::PowerCut);
        cuts.len() == 1
            && one_in > 0
            && mix(&[self.workload.seed, cut.point, salt, subset_number(cut.survivors)])
                .is_multiple_of(one_in)
    }

    /// Judges each point of what `rig` will run, which comes after the crashes `before`.
    fn observe(self: &Rc<Self>, rig: &Rig, before: Vec<Cut>) {
        let judge = Rc::clone(self);
        let (note, oracle) = (Rc::clone(&rig.note), Rc::clone(&rig.oracle));
        let phases = Arc::clone(&rig.phases);
        let observer = move |point, devices: &[Device], _: &_| {
            let cuts = judge.cuts_at(point, &before);
            if cuts.is_empty() {
                return false;
            }
            judge.count_cuts(&phases, cuts.len() as u64);
            let snapshot = snapshot(devices, &note, &oracle);
            let failed = cuts.into_iter().any(|cut| {
                let chain: Vec<Cut> = before.iter().copied().chain([cut]).collect();
                judge.try_cut(&snapshot, &chain)
            });
            // A replay has seen what it wanted.
            failed || !judge.only.is_empty()
        };
        rig.world.borrow_mut().observe(Box::new(observer));
    }

    fn cuts_at(&self, point: u64, before: &[Cut]) -> Vec<Cut> {
        if let Some(only) = self.only.get(before.len()) {
            return if only.point == point { vec![*only] } else { Vec::new() };
        }
        let seed = self.workload.seed;
        match before {
            [] if point % self.depth.every == seed % self.depth.every => self.depth.cuts(seed, point),
            [] => Vec::new(),
            [first, ..] => Depth::cuts_in_recovery(mix(&[seed, first.point]), point),
        }
    }
}

/// The seed of the world after `cuts`.
fn seed_after(workload: &Workload, cuts: &[Cut]) -> u64 {
    let points: Vec<u64> = cuts.iter().map(|cut| cut.point).collect();
    mix(&[workload.seed, mix(&points), 5])
}

/// What a replay of `cuts` does after the last of them.
#[must_use]
pub fn aftermath(workload: &Workload, cuts: &[Cut]) -> Vec<Step> {
    Shape::aftermath(workload, mix(&[seed_after(workload, cuts), 6]), Depth::QUICK.aftermath)
}

const fn subset_number(survivors: Survivors) -> u64 {
    match survivors {
        Survivors::Nothing => 0,
        Survivors::Everything => 1,
        Survivors::Seeded(seed) => seed,
    }
}

fn snapshot(devices: &[Device], note: &RefCell<NoteState>, oracle: &RefCell<Oracle>) -> Snapshot {
    Snapshot { devices: devices.to_vec(), note: note.borrow().clone(), oracle: oracle.borrow().clone() }
}

/// Runs `workload` and crashes it at its points.
///
/// # Errors
/// The first fault, of the run itself or after a crash.
pub fn sweep(system: &Rc<dyn System>, workload: &Workload, depth: Depth) -> Result<Figures, Box<Failure>> {
    run(system, workload, depth, Vec::new())
}

/// Runs `workload`, ends the world as `cuts` say, and judges that alone.
///
/// # Errors
/// The fault that this leads to.
pub fn replay(
    system: &Rc<dyn System>,
    workload: &Workload,
    cuts: &[Cut],
    depth: Depth,
) -> Result<Figures, Box<Failure>> {
    run(system, workload, depth, cuts.to_vec())
}

fn run(
    system: &Rc<dyn System>,
    workload: &Workload,
    depth: Depth,
    only: Vec<Cut>,
) -> Result<Figures, Box<Failure>> {
    let judge = Rc::new(Judge {
        system: Rc::clone(system),
        workload: workload.clone(),
        depth,
        only,
        figures: Cell::default(),
        failure: RefCell::default(),
    });
    let in_workload = |fault| Box::new(Failure::new(fault, system.name(), workload, &[]));
    let mut rig = rig_for(system, workload).map_err(in_workload)?;
    judge.observe(&rig, Vec::new());
    let result = play(&mut rig, workload);
    rig.world.borrow_mut().stop_observing();
    if let Some(failure) = judge.failure.borrow_mut().take() {
        return Err(Box::new(failure));
    }
    result.map_err(in_workload)?;
    let mut figures = judge.figures.get();
    figures.add(&rig.figures());
    Ok(figures)
}
