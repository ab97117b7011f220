//! `sim run`: runs one workload, drawn or from a script, with the requested crashes.

use crate::out::say;
use crate::program;
use crate::save::{check_new, save, save_found};
use crate::shorten::shorten;
use crate::what::SystemArgs;
use anyhow::{Error, Result, anyhow, bail};
use bcached_sim::crashpoints::{SweepDepth, aftermath, replay};
use bcached_sim::driver::trace::telling;
use bcached_sim::failure::{CrashPoint, Failure};
use bcached_sim::minimise::fault_of;
use bcached_sim::run::{play, rig_for};
use bcached_sim::script::{Script, limits::CUTS_MAX};
use bcached_sim::system::System;
use bcached_sim::workload::{Workload, check_drawing, parse_places};
use std::path::PathBuf;
use std::rc::Rc;

/// Options of `sim run`.
#[derive(clap::Args)]
pub struct RunArgs {
    #[command(flatten)]
    what: SystemArgs,
    /// The seed.
    #[arg(long)]
    seed: Option<u64>,
    /// The drawing of the seed, as it was printed; refused if this simulator has another one.
    #[arg(long, requires = "seed")]
    drawing: Option<u32>,
    /// Run the workload in this file instead of drawing one.
    #[arg(long, conflicts_with_all = ["workload", "length", "seed", "drawing"])]
    script: Option<PathBuf>,
    /// Keep only these of the steps, as in 0-3,7.
    #[arg(long)]
    steps: Option<String>,
    /// Crash at this point, as POINT:power|death:nothing|everything|SUBSET, instead of where the
    /// script says.
    #[arg(long)]
    cut: Option<String>,
    /// Crash the recovery from that at this point of its own; repeat for the recovery from this
    /// one, and so on.
    #[arg(long, requires = "cut")]
    then: Vec<String>,
    /// Print the steps and every device operation, including those of the recoveries from --cut and
    /// --then.
    #[arg(long)]
    trace: bool,
    /// Shorten the failing workload.
    #[arg(long)]
    minimise: bool,
    /// Write the workload, shortened if possible, to this new file, for --script.
    #[arg(long)]
    save: Option<PathBuf>,
}

impl RunArgs {
    /// Returns the workload and its crashes.
    fn script(&self) -> Result<Script> {
        let mut script = match (&self.script, self.seed) {
            (Some(path), _) => Script::load(path)?,
            (None, Some(seed)) => {
                self.drawing.map_or(Ok(()), check_drawing)?;
                Script { workload: self.what.draw(seed)?, cuts: Vec::new() }
            }
            (None, None) => bail!("a run needs a seed or a script: --seed NUMBER or --script FILE"),
        };
        if let Some(text) = &self.steps {
            let places = parse_places(text).map_err(|sentence| anyhow!(sentence))?;
            let count = script.workload.steps.len();
            if places.last().is_some_and(|place| *place >= count) {
                bail!("the workload has only {count} steps, counted from 0");
            }
            script.workload = script.workload.keep(&places);
        }
        if let Some(cut) = &self.cut {
            let texts = std::iter::once(cut).chain(&self.then);
            script.cuts = texts
                .map(|text| text.parse().map_err(|sentence: String| anyhow!(sentence)))
                .collect::<Result<_>>()?;
        }
        if script.cuts.len() > CUTS_MAX {
            bail!("at most {CUTS_MAX} crashes can follow each other, not {}", script.cuts.len());
        }
        Ok(script)
    }
}

/// Runs the workload. Returns true if nothing was found.
pub fn run(args: &RunArgs) -> Result<bool> {
    let system = args.what.system()?;
    check_new(args.save.as_deref())?;
    let Script { mut workload, mut cuts } = args.script()?;
    let judge = || judge(&system, &workload, &cuts);
    let judged = if args.trace { traced(&system, &workload, &cuts, judge) } else { judge() };
    let found = match judged {
        RunOutcome::Passed => None,
        RunOutcome::Failed(failure) => Some(failure),
        RunOutcome::Missed { reached } => return Err(missed(&system, &workload, &cuts, reached)?),
    };
    let passes = found.is_none();
    match found {
        None => say!("nothing found"),
        Some(failure) => {
            say!("{}", failure.told(&program::name()));
            if args.minimise {
                let shorter = shorten(&system, &workload, failure);
                (workload, cuts) = (shorter.workload, shorter.failure.cuts);
            }
        }
    }
    if let Some(path) = &args.save {
        let system = &args.what.system;
        if passes {
            save(path, system, &workload, &cuts)?;
        } else {
            save_found(path, system, &workload, &cuts);
        }
    }
    Ok(passes)
}

/// The outcome of a run.
enum RunOutcome {
    Passed,
    Failed(Failure),
    /// Only this many of the crashes happened: there was no such point for the next one.
    Missed {
        reached: usize,
    },
}

/// Runs `workload`. With `cuts`, crashes it as they say and judges what follows.
fn judge(system: &Rc<dyn System>, workload: &Workload, cuts: &[CrashPoint]) -> RunOutcome {
    if cuts.is_empty() {
        return fault_of(system, workload).map_or(RunOutcome::Passed, RunOutcome::Failed);
    }
    match replay(system, workload, cuts, SweepDepth::QUICK) {
        Err(failure) => RunOutcome::Failed(*failure),
        Ok(figures) => match usize::try_from(figures.crashes) {
            Ok(reached) if reached < cuts.len() => RunOutcome::Missed { reached },
            _ => RunOutcome::Passed,
        },
    }
}

/// Returns an error that says which of `cuts` never happened.
fn missed(
    system: &Rc<dyn System>,
    workload: &Workload,
    cuts: &[CrashPoint],
    reached: usize,
) -> Result<Error> {
    let point = cuts[reached].point;
    Ok(match reached.checked_sub(1) {
        Some(before) => {
            let before = cuts[before];
            anyhow!("there is no point {point} to crash at: the recovery from {before} ends before it")
        }
        None => {
            let mut rig = rig_for(system, workload)?;
            play(&mut rig, workload)?;
            let points = rig.world.borrow().points();
            anyhow!("there is no point {point} to crash at: the run has only {points} points")
        }
    })
}

/// Prints what `run` of `workload` does: its steps, and each device operation as it happens.
fn traced<T>(
    system: &Rc<dyn System>,
    workload: &Workload,
    cuts: &[CrashPoint],
    run: impl FnOnce() -> T,
) -> T {
    for (index, step) in workload.steps.iter().enumerate() {
        // The index as `--steps` takes it.
        let place = workload.kept.as_ref().map_or(index, |kept| kept[index]);
        say!("{place} {step}");
    }
    if !cuts.is_empty() {
        aftermath(workload, cuts).iter().for_each(|step| say!("after the crash: {step}"));
    }
    // A set is grown once per thread, and its growth is not part of the run. A fault on the way
    // appears again in the run.
    let _grown = rig_for(system, workload);
    telling(|line| say!("{line}"), run)
}
