//! Deliberate faults of the engine, as patches in `crates/sim/mutants`: each is planted in a scratch copy, and the random
//! workloads of `sim hunt` must find it.
//!
//! A fault counts as caught when no hunt takes longer than the limit and, if enough starting numbers are tried for a median
//! to mean something, half of the hunts find it within [`MEDIAN_SECONDS`].

use crate::tree::Tree;
use anyhow::{Context as _, Result, bail};
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// How long a fault may hide from half of the hunts, in seconds of one processor.
const MEDIAN_SECONDS: f64 = 60.0;
/// From how many starting numbers on a median is asked for.
const MEDIAN_OF: u64 = 3;

/// How it is built. Faults leave things unused, and are built over and over.
const BUILD: [(&str, &str); 3] = [
    ("RUSTFLAGS", "--allow warnings"),
    ("CARGO_PROFILE_RELEASE_INCREMENTAL", "true"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
];

/// What to plant, and how long to look.
#[derive(clap::Args)]
pub struct Args {
    /// Only the fault of this name (its file without `.patch`).
    #[arg(long)]
    only: Option<String>,
    /// Only so many faults, from the one whose turn it is by the commit that is checked out.
    #[arg(long, conflicts_with = "only")]
    rotate: Option<usize>,
    /// Starting numbers tried with each fault.
    #[arg(long, default_value_t = 10)]
    starts: u64,
    /// The longest that a hunt may take, in seconds of the processor.
    #[arg(long, default_value_t = 600)]
    limit: u64,
    /// Only see whether every patch still applies.
    #[arg(long)]
    apply_only: bool,
}

/// A planted fault.
struct Mutant {
    name: String,
    patch: PathBuf,
}

/// Runs `cargo xtask mutants`; false if a fault was not caught.
///
/// # Errors
/// A patch that does not apply, a tree that does not build, a name that there is not.
pub fn run(args: &Args) -> Result<bool> {
    let origin = crate::origin();
    let work = crate::target(origin).join("mutants");
    let mutants = select(all(&origin.join("crates/sim/mutants"))?, args, origin)?;
    let tree = Tree::of(origin, work.join("tree"))?;
    let mut missed = Vec::new();
    for mutant in &mutants {
        tree.restore()?;
        tree.apply(&mutant.patch).with_context(|| format!("{} does not apply", mutant.name))?;
        if args.apply_only {
            continue;
        }
        let simulator = crate::build_sim(&tree.root, &work.join("build"), &BUILD);
        let simulator = simulator.with_context(|| mutant.name.clone())?;
        if !is_caught(mutant, &simulator, args)? {
            missed.push(mutant.name.as_str());
        }
    }
    tree.restore()?;
    let count = mutants.len();
    if args.apply_only {
        println!("{count} patches apply");
    } else if missed.is_empty() {
        println!("{count} faults planted, all caught");
    } else {
        println!("{count} faults planted, not caught: {}", missed.join(", "));
    }
    Ok(missed.is_empty())
}

fn all(folder: &Path) -> Result<Vec<Mutant>> {
    let mut mutants = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let patch = entry?.path();
        if patch.extension().is_some_and(|extension| extension == "patch") {
            let name = patch.file_stem().context("it has an extension")?.to_string_lossy().into_owned();
            mutants.push(Mutant { name, patch });
        }
    }
    mutants.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(mutants)
}

/// Those that `args` ask for.
fn select(mut mutants: Vec<Mutant>, args: &Args, origin: &Path) -> Result<Vec<Mutant>> {
    if let Some(name) = &args.only {
        mutants.retain(|mutant| mutant.name == *name);
        if mutants.is_empty() {
            bail!("there is no fault {name:?} in crates/sim/mutants");
        }
    }
    if let Some(count) = args.rotate {
        let turn = commits(origin)? * count % mutants.len().max(1);
        mutants.rotate_left(turn);
        mutants.truncate(count);
    }
    Ok(mutants)
}

/// How many commits there are: who runs each of them sees each fault in turn.
fn commits(origin: &Path) -> Result<usize> {
    let mut git = Command::new("git");
    git.current_dir(origin).args(["rev-list", "--count", "HEAD"]);
    let done = git.output().context("git, which counts commits, does not start")?;
    let count = String::from_utf8_lossy(&done.stdout).trim().parse();
    // A tree that is no repository has no turn.
    Ok(count.unwrap_or(0))
}

/// Hunts with each starting number, and prints how long that took.
fn is_caught(mutant: &Mutant, simulator: &Path, args: &Args) -> Result<bool> {
    let mut times = hunts(simulator, args)?;
    times.sort_unstable_by(f64::total_cmp);
    let (Some(median), Some(worst)) = (times.get(times.len().saturating_sub(1) / 2), times.last()) else {
        bail!("at least one start is needed");
    };
    let caught = worst.is_finite() && (args.starts < MEDIAN_OF || *median <= MEDIAN_SECONDS);
    let verdict = if caught { "caught" } else { "NOT CAUGHT" };
    println!("{:<44} {verdict}: median {median:.1} s, worst {worst:.1} s", mutant.name);
    Ok(caught)
}

/// The seconds after which each of the hunts found something; several run at once, each on a processor.
fn hunts(simulator: &Path, args: &Args) -> Result<Vec<f64>> {
    let (next, times) = (AtomicU64::new(1), Mutex::new(Vec::new()));
    let hunter = || -> Result<()> {
        loop {
            let from = next.fetch_add(1, Ordering::Relaxed);
            if from > args.starts {
                return Ok(());
            }
            // What was never found took longer than any.
            let time = hunt(simulator, from, args.limit)?.unwrap_or(f64::INFINITY);
            times.lock().expect("no hunter panics").push(time);
        }
    };
    std::thread::scope(|scope| {
        let hunters: Vec<_> = (0..parallel()).map(|_| scope.spawn(hunter)).collect();
        hunters.into_iter().try_for_each(|hunter| hunter.join().expect("no hunter panics"))
    })?;
    Ok(times.into_inner().expect("no hunter panics"))
}

fn parallel() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// One hunt: the seconds of the processor after which it found something, if it did.
fn hunt(simulator: &Path, from: u64, limit: u64) -> Result<Option<f64>> {
    let mut hunt = Command::new(simulator);
    hunt.args(["hunt", "--as-found", "--from", &from.to_string(), "--seconds", &limit.to_string()]);
    let began = Instant::now();
    let done = hunt.stdin(Stdio::null()).output().context("the simulator does not start")?;
    if done.status.code() == Some(0) {
        return Ok(None);
    }
    let told = String::from_utf8_lossy(&done.stdout);
    let seconds = told.lines().find_map(|line| {
        let (_, after) = line.strip_prefix("found in round ")?.split_once(" after ")?;
        after.split_once(" s: ")?.0.parse().ok()
    });
    // Killed, or without memory: found as well, a correct engine is not.
    Ok(Some(seconds.unwrap_or_else(|| began.elapsed().as_secs_f64())))
}
