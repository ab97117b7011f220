//! Crashes at every operation: the workload runs once, and at each point the world is copied,
//! crashed in several ways, opened again and judged. Some of the recoveries are crashed in turn, at
//! each of their own points.
//!
//! A copy at the point is equivalent to another run that crashes there (`driver::tests` compares
//! the two), and turns a quadratic sweep into a linear one. A replay runs the workload and judges
//! only one point.

mod novelty;

use crate::digest::mix;
use crate::disk::{Device, OpKind, Survivors};
use crate::driver::{Crash, OpView};
use crate::failure::{CrashPoint, Failure, FailureKind};
use crate::figures::RunCounts;
use crate::note::NoteState;
use crate::oracle::Oracle;
use crate::rig::{Rig, Snapshot};
use crate::run::{hard_start, play, rig_for, verified_life};
use crate::system::System;
use crate::workload::{Shape, Step, Workload};
use bcached_engine::Phases;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

pub use novelty::{PointClass, PointClassCounts};

/// How thorough a sweep is.
#[derive(Clone, Copy, Debug)]
pub struct SweepDepth {
    /// Judge one in this many points (1: all, 0: only novel points).
    pub every: u64,
    /// Also judge points unlike those before: see [`PointClassCounts::picks`]; 0: none.
    pub novel: u64,
    /// In the workload itself, judge only points inside one of these phases, bits as of
    /// [`Phases::inside`]; 0: all points.
    pub within: u32,
    /// Whether `within` applies to recoveries too.
    pub recoveries_within: bool,
    /// Seeded subsets tried at each power cut, besides nothing and everything.
    pub subsets: u64,
    /// Crash inside the recovery from one in this many crashes; 0: none.
    pub recovery_one_in: u64,
    /// In a recovery, judge one in this many points (1: all, 0: only novel points).
    pub recovery_every: u64,
    /// Seeded subsets tried at each power cut inside a recovery.
    pub recovery_subsets: u64,
    /// As `recovery_one_in`, for the recovery from a crash inside a recovery.
    pub third_one_in: u64,
    /// In the workload itself only processes die, and in what comes after only the power is cut.
    /// Writes that a dead process left unflushed are there, are read, and are then lost.
    pub dies_first: bool,
    /// Number of steps after each recovery.
    pub aftermath: usize,
    /// Number of crashes tried at each point, of all that are possible there; `None`: all.
    pub tries: Option<usize>,
    /// Budget of device operations for all that runs after crashes, besides twice the number of
    /// points reached so far. When it is spent no point is judged; when half of it is spent, only
    /// novel points of the workload itself are. `None`: unlimited.
    pub work: Option<u64>,
}

impl SweepDepth {
    /// Every point with nothing, everything and eight subsets; one recovery in 32 is crashed at
    /// each of its points. The aftermath is as long as in [`Self::QUICK`], because a replay does
    /// not know which of the two depths has found its crash.
    pub const FULL: Self = Self { subsets: 8, recovery_one_in: 32, ..Self::QUICK };

    /// A quick look: every point, two subsets, one recovery in 64.
    pub const QUICK: Self = Self {
        every: 1,
        novel: 0,
        within: 0,
        recoveries_within: false,
        subsets: 2,
        recovery_one_in: 64,
        recovery_every: 1,
        recovery_subsets: 1,
        third_one_in: 512,
        dies_first: false,
        aftermath: 4,
        tries: None,
        work: None,
    };

    /// Every point, every recovery and each of its points, all with eight subsets; of the
    /// recoveries from those, one in 4,096.
    pub const EXHAUSTIVE: Self =
        Self { recovery_one_in: 1, recovery_subsets: 8, third_one_in: 4096, ..Self::FULL };

    /// Only points unlike those before, and few crashes at each: many points with few crashes are
    /// worth more than a few points with many.
    pub const SPARSE: Self = Self { every: 0, novel: 2, tries: Some(2), recovery_every: 0, ..Self::QUICK };

    /// Returns whether `point` is one in every [`Self::every`] or [`Self::recovery_every`]. It
    /// comes after `level` crashes, which `number` identifies.
    fn is_one_in(&self, number: u64, point: u64, level: usize) -> bool {
        let every = if level == 0 { self.every } else { self.recovery_every };
        match (every, level) {
            (0, _) => false,
            (_, 0) => point % every == number % every,
            _ => mix(&[number, point]).is_multiple_of(every),
        }
    }

    /// Returns the crashes tried at `point` of a workload.
    fn cuts(&self, seed: u64, point: u64) -> Vec<CrashPoint> {
        let subset = |index| Survivors::Seeded(mix(&[seed, point, index]) >> 32);
        let power =
            [Survivors::Nothing, Survivors::Everything].into_iter().chain((0..self.subsets).map(subset));
        let death = [Survivors::Nothing, subset(self.subsets)];
        let power = power.filter(|_| !self.dies_first);
        self.some_of(cuts(point, power, death), mix(&[seed, point, 8]))
    }

    /// Returns the crashes tried at a point of a recovery.
    fn cuts_in_recovery(&self, seed: u64, point: u64) -> Vec<CrashPoint> {
        let subset = |index| Survivors::Seeded(mix(&[seed, point, 77 + index]) >> 32);
        let everything = (self.recovery_subsets > 1).then_some(Survivors::Everything);
        let power =
            [Survivors::Nothing].into_iter().chain(everything).chain((0..self.recovery_subsets).map(subset));
        let death = (!self.dies_first).then(|| subset(0));
        self.some_of(cuts(point, power, death), mix(&[seed, point, 8]))
    }

    /// Returns as many of `cuts` as are tried; `number` selects them.
    fn some_of(&self, mut cuts: Vec<CrashPoint>, number: u64) -> Vec<CrashPoint> {
        let count = cuts.len();
        cuts.rotate_left(usize::try_from(number % count as u64).expect("less than there are"));
        cuts.truncate(self.tries.unwrap_or(count));
        cuts
    }

    /// Returns the number of recoveries for each one that is crashed, after `level` crashes; 0:
    /// none is crashed.
    const fn one_in(&self, level: usize) -> u64 {
        match level {
            1 => self.recovery_one_in,
            2 => self.third_one_in,
            _ => 0,
        }
    }
}

fn cuts(
    point: u64,
    power: impl Iterator<Item = Survivors>,
    death: impl IntoIterator<Item = Survivors>,
) -> Vec<CrashPoint> {
    let cut = |crash| move |survivors| CrashPoint { point, crash, survivors };
    power.map(cut(Crash::PowerCut)).chain(death.into_iter().map(cut(Crash::ProcessDeath))).collect()
}

/// The state that a sweep or replay shares with its observers.
struct SweepState {
    system: Rc<dyn System>,
    workload: Workload,
    depth: SweepDepth,
    /// If not empty, judge only these crashes, instead of those of `depth`.
    only: Vec<CrashPoint>,
    /// The last point of the workload that was reached.
    reached: Cell<u64>,
    novelty: Rc<RefCell<PointClassCounts>>,
    figures: Cell<RunCounts>,
    failure: RefCell<Option<Failure>>,
}

impl SweepState {
    /// Tries `cuts` (the last of them is new) on `snapshot`. Returns true if the world may end
    /// because a fault was found.
    fn try_cut(self: &Rc<Self>, snapshot: &Snapshot, cuts: &[CrashPoint]) -> bool {
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

    /// Checks the structure as the crash has left it (with grown sets in one of four runs). Then
    /// opens the system, verifies, runs some steps and stops. In one of four runs the power is then
    /// cut, and nothing may be missing.
    fn aftermath(&self, rig: &mut Rig, seed: u64) -> Result<(), FailureKind> {
        if self.workload.grown.is_none() || seed % 4 == 1 {
            rig.inspect()?;
        }
        if self.workload.troubled && !hard_start(rig, mix(&[seed, 12]))? {
            return Ok(());
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
        figures.crashes_in_third += u64::from(level > 2);
        self.figures.set(figures);
    }

    fn count_cuts(&self, phases: &Phases, cuts: u64) {
        let mut figures = self.figures.get();
        figures.cut(phases, cuts);
        self.figures.set(figures);
    }

    /// Returns whether the recovery after `cuts` is crashed in turn.
    fn looks_inside(&self, cuts: &[CrashPoint]) -> bool {
        if !self.only.is_empty() {
            return cuts.len() < self.only.len();
        }
        let one_in = self.depth.one_in(cuts.len());
        one_in > 0 && self.number_of(cuts).is_multiple_of(one_in)
    }

    /// Returns a number that identifies these crashes.
    fn number_of(&self, cuts: &[CrashPoint]) -> u64 {
        cuts.iter().fold(self.workload.seed, |number, cut| {
            let salt = u64::from(cut.crash == Crash::PowerCut);
            mix(&[number, cut.point, salt, subset_number(cut.survivors)])
        })
    }

    /// Judges each point of what `rig` will run after the crashes `before`.
    fn observe(self: &Rc<Self>, rig: &Rig, before: Vec<CrashPoint>) {
        let judge = Rc::clone(self);
        let (note, oracle) = (Rc::clone(&rig.note), Rc::clone(&rig.oracle));
        let phases = Arc::clone(&rig.phases);
        let observer = move |point, devices: &[Device], view: &OpView| {
            let cuts = judge.cuts_at(point, &before, &phases, view);
            if cuts.is_empty() {
                return false;
            }
            judge.count_cuts(&phases, cuts.len() as u64);
            let snapshot = snapshot(devices, &note, &oracle);
            let failed = cuts.into_iter().any(|cut| {
                let chain: Vec<CrashPoint> = before.iter().copied().chain([cut]).collect();
                judge.try_cut(&snapshot, &chain)
            });
            // A replay has seen all that it needs.
            failed || !judge.only.is_empty()
        };
        rig.world.borrow_mut().observe(Box::new(observer));
    }

    /// Returns how much of the budget is spent, in percent.
    fn spent_percent(&self) -> u64 {
        let spent = self.figures.get().operations;
        self.depth.work.map_or(0, |work| 100 * spent / (work + 2 * self.reached.get()))
    }

    fn cuts_at(&self, point: u64, before: &[CrashPoint], phases: &Phases, view: &OpView) -> Vec<CrashPoint> {
        if let Some(only) = self.only.get(before.len()) {
            return if only.point == point { vec![*only] } else { Vec::new() };
        }
        let (number, level) = (self.number_of(before), before.len());
        if level == 0 {
            self.reached.set(point);
        }
        let mut cuts = match level {
            _ if !self.is_judged(number, point, level, phases, view) => Vec::new(),
            0 => self.depth.cuts(number, point),
            _ => self.depth.cuts_in_recovery(number, point),
        };
        if is_unheard_drop(view) {
            cuts.retain(|cut| cut.crash != Crash::ProcessDeath);
        }
        cuts
    }

    /// Returns whether `point`, after the `level` crashes that `number` identifies, is judged.
    fn is_judged(&self, number: u64, point: u64, level: usize, phases: &Phases, view: &OpView) -> bool {
        let (depth, spent) = (&self.depth, self.spent_percent());
        let is_paid_for = spent < if level == 0 { 100 } else { 50 };
        if !is_paid_for {
            return false;
        }
        let inside = phases.inside();
        if (level == 0 || depth.recoveries_within) && depth.within != 0 && inside & depth.within == 0 {
            return false;
        }
        let is_novel = || {
            let situation = PointClass::of(view, level, inside, self.workload.geometry.cache_sectors());
            self.novelty.borrow_mut().picks(depth.novel, mix(&[number, point]), situation)
        };
        spent < 50 && depth.is_one_in(number, point, level) || is_novel()
    }
}

/// Returns whether a flush or a FUA write has just failed, so that what it was to make durable is
/// lost. A process that dies before it learns of that leaves a note of acknowledged writes, and its
/// successor cannot know of the loss or detect it from the data. Such a death is therefore not
/// tried.
fn is_unheard_drop(view: &OpView) -> bool {
    view.completed && view.failed && (view.kind == OpKind::Flush || view.fua)
}

/// Returns the seed of the world after `cuts`.
fn seed_after(workload: &Workload, cuts: &[CrashPoint]) -> u64 {
    let points: Vec<u64> = cuts.iter().map(|cut| cut.point).collect();
    mix(&[workload.seed, mix(&points), 5])
}

/// Returns the steps that a replay of `cuts` runs after the last of them.
#[must_use]
pub fn aftermath(workload: &Workload, cuts: &[CrashPoint]) -> Vec<Step> {
    Shape::aftermath(workload, mix(&[seed_after(workload, cuts), 6]), SweepDepth::QUICK.aftermath)
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
/// Returns the first fault, of the run itself or after a crash.
pub fn sweep(
    system: &Rc<dyn System>,
    workload: &Workload,
    depth: SweepDepth,
) -> Result<RunCounts, Box<Failure>> {
    sweep_after(system, workload, depth, &Rc::default())
}

/// Does the same as [`sweep`] after earlier sweeps: situations that they have judged are not novel.
///
/// # Errors
/// As [`sweep`].
pub fn sweep_after(
    system: &Rc<dyn System>,
    workload: &Workload,
    depth: SweepDepth,
    novelty: &Rc<RefCell<PointClassCounts>>,
) -> Result<RunCounts, Box<Failure>> {
    run(rig_of(system, workload)?, workload, depth, Vec::new(), Rc::clone(novelty))
}

/// Does the same as [`sweep`], on a rig that is ready: see [`rig_from`](crate::run::rig_from).
///
/// # Errors
/// As [`sweep`].
pub fn sweep_on(rig: Rig, workload: &Workload, depth: SweepDepth) -> Result<RunCounts, Box<Failure>> {
    run(rig, workload, depth, Vec::new(), Rc::default())
}

/// Runs `workload`, crashes the world as `cuts` say, and judges only that.
///
/// # Errors
/// Returns the fault that this leads to.
pub fn replay(
    system: &Rc<dyn System>,
    workload: &Workload,
    cuts: &[CrashPoint],
    depth: SweepDepth,
) -> Result<RunCounts, Box<Failure>> {
    run(rig_of(system, workload)?, workload, depth, cuts.to_vec(), Rc::default())
}

fn rig_of(system: &Rc<dyn System>, workload: &Workload) -> Result<Rig, Box<Failure>> {
    let rig = rig_for(system, workload);
    rig.map_err(|fault| Box::new(Failure::new(fault, system.name(), workload, &[])))
}

fn run(
    mut rig: Rig,
    workload: &Workload,
    depth: SweepDepth,
    only: Vec<CrashPoint>,
    novelty: Rc<RefCell<PointClassCounts>>,
) -> Result<RunCounts, Box<Failure>> {
    let judge = Rc::new(SweepState {
        system: Rc::clone(&rig.system),
        workload: workload.clone(),
        depth,
        only,
        reached: Cell::new(0),
        novelty,
        figures: Cell::default(),
        failure: RefCell::default(),
    });
    judge.observe(&rig, Vec::new());
    let result = play(&mut rig, workload);
    rig.world.borrow_mut().stop_observing();
    if let Some(failure) = judge.failure.borrow_mut().take() {
        return Err(Box::new(failure));
    }
    result.map_err(|fault| Box::new(Failure::new(fault, rig.system.name(), workload, &[])))?;
    let mut figures = judge.figures.get();
    figures.add(&rig.figures());
    Ok(figures)
}
