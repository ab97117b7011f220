//! `sim sweep`: runs many seeds of one workload, with crashes at their points.

use crate::figures::print_figures;
use crate::out::say;
use crate::program;
use crate::save::{check_new, save_found};
use crate::shorten;
use crate::what::SystemArgs;
use anyhow::{Result, bail};
use bcached_engine::Phase;
use bcached_sim::crashpoints::{SweepDepth, sweep};
use bcached_sim::failure::Failure;
use bcached_sim::figures::RunCounts;
use bcached_sim::minimise::{MinimalFailure, minimise};
use bcached_sim::run::whole_of;
use bcached_sim::workload::Workload;
use clap::ValueEnum;
use clap::builder::RangedU64ValueParser;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Maximum number of threads: each has devices of its own in memory.
const JOBS_MAX: u64 = 64;

/// Options of `sim sweep`.
#[derive(clap::Args)]
pub struct SweepArgs {
    #[command(flatten)]
    what: SystemArgs,
    /// First and one past the last seed, as 0..100.
    #[arg(long, value_parser = parse_seeds)]
    seeds: Range<u64>,
    /// How thorough the sweep is.
    #[arg(long, value_enum, default_value = "quick")]
    depth: DepthPreset,
    /// Crash at one in this many points, instead of at each.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    every: Option<u64>,
    /// Crash only in the middle of this phase, by its name in the table that a sweep prints; may be
    /// repeated.
    #[arg(long, value_parser = parse_phase)]
    within: Vec<Phase>,
    /// Crash inside one in this many recoveries (0: none), instead of what the depth says.
    #[arg(long)]
    recovery_one_in: Option<u64>,
    /// Report failures as they are found, without shortening them.
    #[arg(long)]
    as_found: bool,
    /// Number of threads.
    #[arg(long, default_value_t = 1, value_parser = RangedU64ValueParser::<usize>::new().range(1..=JOBS_MAX))]
    jobs: usize,
    /// Continue after a failure.
    #[arg(long)]
    keep_going: bool,
    /// Write the workload that has failed first, shortened if possible, to this new file, for `sim
    /// run --script`.
    #[arg(long)]
    save: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum DepthPreset {
    /// No crashes but those of the workload.
    Whole,
    /// Two seeded subsets at each point.
    Quick,
    /// Eight seeded subsets at each point.
    Full,
    /// Eight seeded subsets, also at each point of each recovery.
    Exhaustive,
}

fn parse_seeds(text: &str) -> Result<Range<u64>, String> {
    let wrong = || format!("seeds are given as 0..100, not {text:?}");
    let (first, end) = text.split_once("..").ok_or_else(wrong)?;
    let seeds = first.parse().map_err(|_| wrong())?..end.parse().map_err(|_| wrong())?;
    if seeds.is_empty() { Err(format!("there is no seed in {text}")) } else { Ok(seeds) }
}

fn parse_phase(text: &str) -> Result<Phase, String> {
    let named = Phase::ALL.into_iter().find(|phase| phase.name() == text);
    named.ok_or_else(|| {
        let names = Phase::ALL.map(|phase| format!("{:?}", phase.name()));
        format!("the phases to crash within are {}", names.join(", "))
    })
}

/// A failing workload and its failure.
struct FailedWorkload {
    workload: Workload,
    failure: Failure,
    /// The whole text about it, printed at once because other threads print too.
    told: String,
}

impl FailedWorkload {
    fn new(workload: Workload, failure: Failure) -> Box<Self> {
        let told = failure.told(&program::name());
        Box::new(Self { workload, failure, told })
    }

    fn shorter(minimal: MinimalFailure) -> Box<Self> {
        let told = shorten::told(&minimal);
        Box::new(Self { workload: minimal.workload, failure: minimal.failure, told })
    }
}

/// Runs one seed: the whole workload, then the crash points.
fn sweep_seed(args: &SweepArgs, seed: u64) -> Result<Result<RunCounts, Box<FailedWorkload>>> {
    let system = args.what.system()?;
    let workload = args.what.draw(seed)?;
    let depth = match args.depth {
        DepthPreset::Whole => {
            return Ok(whole_of(&system, &workload).map_err(|fault| {
                let failure = Failure::new(fault, system.name(), &workload, &[]);
                FailedWorkload::new(workload, failure)
            }));
        }
        DepthPreset::Quick => SweepDepth::QUICK,
        DepthPreset::Full => SweepDepth::FULL,
        DepthPreset::Exhaustive => SweepDepth::EXHAUSTIVE,
    };
    let recovery_one_in = args.recovery_one_in.unwrap_or(depth.recovery_one_in);
    let within = args.within.iter().fold(0, |bits, phase| bits | phase.bit());
    let depth = SweepDepth { every: args.every.unwrap_or(depth.every), within, recovery_one_in, ..depth };
    Ok(match sweep(&system, &workload, depth) {
        Ok(figures) => Ok(figures),
        Err(failure) if args.as_found => Err(FailedWorkload::new(workload, *failure)),
        Err(failure) => {
            say!("{}", failure.told(&program::name()));
            Err(FailedWorkload::shorter(minimise(&system, &workload, *failure, shorten::TRIES / 10)))
        }
    })
}

/// Runs the seeds. Returns true if nothing was found.
pub fn sweep_seeds(args: &SweepArgs) -> Result<bool> {
    args.what.system()?;
    args.what.shape()?;
    let chooses_crashes = args.every.is_some() || !args.within.is_empty() || args.recovery_one_in.is_some();
    if matches!(args.depth, DepthPreset::Whole) && chooses_crashes {
        bail!("--depth whole crashes nothing, so it excludes --every, --within and --recovery-one-in");
    }
    check_new(args.save.as_deref())?;
    let next = AtomicU64::new(args.seeds.start);
    let (total, passes, failures) = (Mutex::new(RunCounts::default()), AtomicU64::new(0), AtomicU64::new(0));
    let first = Mutex::new(None);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..args.jobs {
            scope.spawn(|| {
                while let Some(seed) = take_seed(&next, args.seeds.end) {
                    if !args.keep_going && failures.load(Ordering::Relaxed) > 0 {
                        return;
                    }
                    match sweep_seed(args, seed) {
                        Ok(Ok(figures)) => {
                            passes.fetch_add(1, Ordering::Relaxed);
                            total.lock().expect("no thread panics while it holds the lock").add(&figures);
                        }
                        Ok(Err(found)) => {
                            failures.fetch_add(1, Ordering::Relaxed);
                            say!("seed {seed}: {}", found.told);
                            first
                                .lock()
                                .expect("no thread panics while it holds the lock")
                                .get_or_insert(found);
                        }
                        // The arguments were checked before the first seed.
                        Err(error) => say!("seed {seed}: {error:#}"),
                    }
                }
            });
        }
    });
    let figures = *total.lock().expect("no thread panics while it holds the lock");
    let (passes, failures) = (passes.load(Ordering::Relaxed), failures.load(Ordering::Relaxed));
    if failures > 0 {
        say!("figures of the {passes} seeds without a fault:");
    }
    print_figures(&figures, began.elapsed().as_secs_f64());
    say!("{} seeds, {failures} failed", passes + failures);
    let first = first.into_inner().expect("no thread panics while it holds the lock");
    if let (Some(path), Some(found)) = (&args.save, first) {
        save_found(path, &args.what.system, &found.workload, &found.failure.cuts);
    }
    Ok(failures == 0)
}

/// Takes the next free seed below `end`.
fn take_seed(next: &AtomicU64, end: u64) -> Option<u64> {
    let following = |seed: u64| (seed < end).then(|| seed + 1);
    next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, following).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_the_last_seed_there_is_none() {
        let next = AtomicU64::new(u64::MAX - 1);
        let seeds: [Option<u64>; 4] = std::array::from_fn(|_| take_seed(&next, u64::MAX));
        assert_eq!(seeds, [Some(u64::MAX - 1), None, None, None]);
    }
}
