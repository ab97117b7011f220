//! `sim run`: one workload, drawn or from a script, with the crashes that are asked for.

use crate::out::say;
use crate::program;
use crate::save::{check_new, save, save_found};
use crate::shorten::shorten;
use crate::what::What;
use anyhow::{Result, anyhow, bail};
use bcached_sim::crashpoints::{Depth, replay};
use bcached_sim::failure::{Cut, Failure};
use bcached_sim::minimise::fault_of;
use bcached_sim::run::{play, rig_for, whole};
use bcached_sim::script::{Script, limits::CUTS_MAX};
use bcached_sim::system::System;
use bcached_sim::workload::{Workload, check_drawing, parse_places};
use std::path::PathBuf;
use std::rc::Rc;

/// Options of `sim run`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    what: What,
    /// The seed.
    #[arg(long, required_unless_present = "script")]
    seed: Option<u64>,
    /// The drawing that the seed is of, as it was printed; another one than this simulator's is refused.
    #[arg(long, requires = "seed")]
    drawing: Option<u32>,
    /// Run the workload in this file instead of drawing one.
    #[arg(long, conflicts_with_all = ["workload", "length", "seed"])]
    script: Option<PathBuf>,
    /// Only these of the steps, as 0-3,7.
    #[arg(long)]
    steps: Option<String>,
    /// Crash at this point, as POINT:power|death:nothing|everything|SUBSET, instead of as the script says.
    #[arg(long)]
    cut: Option<String>,
    /// Crash the recovery from that at this point of its own; again: the recovery from this one, and so on.
    #[arg(long, requires = "cut")]
    then: Vec<String>,
    /// Print the steps and every device operation (of the run, not of what follows a crash).
    #[arg(long)]
    trace: bool,
    /// Look for a shorter way to the failure.
    #[arg(long)]
    minimise: bool,
    /// Write what was run, the shorter one if there is one, to this new file, for --script.
    #[arg(long)]
    save: Option<PathBuf>,
}

impl Args {
    /// The workload and its crashes.
    fn script(&self) -> Result<Script> {
        let mut script = match (&self.script, self.seed) {
            (Some(path), _) => Script::load(path)?,
            (None, Some(seed)) => {
                self.drawing.map_or(Ok(()), check_drawing)?;
                Script { workload: self.what.draw(seed)?, cuts: Vec::new() }
            }
            (None, None) => bail!("a run needs a seed or a script"),
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
            bail!("at most {CUTS_MAX} crashes follow each other, not {}", script.cuts.len());
        }
        Ok(script)
    }
}

/// Runs it; true if nothing was found.
pub fn run(args: &Args) -> Result<bool> {
    let system = args.what.system()?;
    check_new(args.save.as_deref())?;
    let Script { mut workload, mut cuts } = args.script()?;
    if args.trace {
        trace(&system, &workload);
    }
    let found =
        if cuts.is_empty() { fault_of(&system, &workload) } else { crash(&system, &workload, &cuts)? };
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

/// Ends the world as `cuts` say, and judges that.
fn crash(system: &Rc<dyn System>, workload: &Workload, cuts: &[Cut]) -> Result<Option<Failure>> {
    let reached = match replay(system, workload, cuts, Depth::QUICK) {
        Err(failure) => return Ok(Some(*failure)),
        Ok(figures) => figures.crashes,
    };
    let missed = usize::try_from(reached).ok().and_then(|reached| cuts.get(reached));
    match (missed, reached) {
        (None, _) => Ok(None),
        (Some(cut), 0) => {
            let mut rig = rig_for(system, workload)?;
            play(&mut rig, workload)?;
            bail!(
                "there is no point {} to crash at: the run has only {}",
                cut.point,
                rig.world.borrow().points()
            )
        }
        (Some(cut), _) => {
            let before = cuts[usize::try_from(reached).unwrap_or_default() - 1];
            bail!("there is no point {} to crash at: the recovery from {before} ends before it", cut.point)
        }
    }
}

fn trace(system: &Rc<dyn System>, workload: &Workload) {
    for (place, step) in workload.steps.iter().enumerate() {
        say!("{place} {step}");
    }
    // What goes wrong is reported by the run that follows.
    if let Ok(mut rig) = rig_for(system, workload) {
        rig.world.borrow_mut().trace.record();
        let _outcome = whole(&mut rig, workload);
        for line in rig.world.borrow().trace.lines() {
            say!("{line}");
        }
    }
}
