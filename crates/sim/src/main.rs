//! `sim`: runs seeds, and shows a failing one again.
//!
//! Exit status: 0 when nothing was found, 1 when a fault was, 2 when the command line is wrong.

use anyhow::{Context as _, Result, anyhow, bail};
use bcached_engine::Phase;
use bcached_sim::crashpoints::{Depth, replay, sweep};
use bcached_sim::digest::mix;
use bcached_sim::failure::{Cut, Failure};
use bcached_sim::figures::Figures;
use bcached_sim::hunt::Round;
use bcached_sim::minimise::{fault_of, minimise};
use bcached_sim::run::{rig_for, whole, whole_of};
use bcached_sim::system::{System, system_named, system_names};
use bcached_sim::workload::{DRAWING, Shape, Workload, check_drawing, parse_places};
use clap::{Args, Parser, Subcommand, ValueEnum};
use rustix::time::{ClockId, clock_gettime};
use std::io::Write as _;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Runs that shortening a failure may take.
const MINIMISE_TRIES: u32 = 300;

#[derive(Parser)]
#[command(name = "sim", about = "Runs a system in a simulated world, from a seed", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run one workload, or show a failure again.
    Run(RunArgs),
    /// Run many seeds, each whole and then with a crash at every operation.
    Sweep(SweepArgs),
    /// Run fresh seeds of all workloads for some time, some of them with crashes at a few of their points.
    Hunt(HuntArgs),
    /// Name the systems and workloads.
    List,
}

/// What is run.
#[derive(Args, Clone)]
struct What {
    /// The system under test.
    #[arg(long, default_value = "engine")]
    system: String,
    /// The workload's shape.
    #[arg(long, default_value = "mixed")]
    workload: String,
    /// Number of steps instead of the shape's own.
    #[arg(long)]
    length: Option<usize>,
}

#[derive(Args)]
struct RunArgs {
    #[command(flatten)]
    what: What,
    /// The seed.
    #[arg(long)]
    seed: u64,
    /// The drawing that the seed is of, as it was printed; another one than this simulator's is refused.
    #[arg(long)]
    drawing: Option<u32>,
    /// Only these of the steps, as 0-3,7.
    #[arg(long)]
    steps: Option<String>,
    /// Crash at this point, as POINT:power|death:nothing|everything|SUBSET.
    #[arg(long)]
    cut: Option<String>,
    /// Crash the recovery from it at this point of its own.
    #[arg(long, requires = "cut")]
    then: Option<String>,
    /// Print the steps and every device operation (of the run, not of what follows a crash).
    #[arg(long)]
    trace: bool,
    /// Look for a shorter way to the failure.
    #[arg(long)]
    minimise: bool,
}

#[derive(Args)]
struct SweepArgs {
    #[command(flatten)]
    what: What,
    /// First and one past the last seed, as 0..100.
    #[arg(long, value_parser = parse_seeds)]
    seeds: std::ops::Range<u64>,
    /// How thorough.
    #[arg(long, value_enum, default_value = "quick")]
    depth: Thoroughness,
    /// Crash at one point in so many.
    #[arg(long, default_value_t = 1)]
    every: u64,
    /// Crash inside the recovery of one crash in so many (0: of none), instead of what the depth says.
    #[arg(long)]
    recovery_one_in: Option<u64>,
    /// Report failures as they are found, without looking for a shorter way.
    #[arg(long)]
    as_found: bool,
    /// Threads.
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Go on after a failure.
    #[arg(long)]
    keep_going: bool,
}

#[derive(Args)]
struct HuntArgs {
    /// The system under test.
    #[arg(long, default_value = "engine")]
    system: String,
    /// Begin no round after so many seconds of the processor.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// The number that the hunt's seeds follow from, instead of a fresh one.
    #[arg(long)]
    from: Option<u64>,
    /// The drawing that it was printed with.
    #[arg(long, requires = "from")]
    drawing: Option<u32>,
    /// Report a failure as it is found, without looking for a shorter way.
    #[arg(long)]
    as_found: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Thoroughness {
    /// No crashes but those of the workload.
    Whole,
    /// Two seeded subsets at each point.
    Quick,
    /// Eight.
    Full,
}

fn parse_seeds(text: &str) -> Result<std::ops::Range<u64>, String> {
    let wrong = || format!("seeds are given as 0..100, not {text:?}");
    let (first, end) = text.split_once("..").ok_or_else(wrong)?;
    Ok(first.parse().map_err(|_| wrong())?..end.parse().map_err(|_| wrong())?)
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => run(&args),
        Command::Sweep(args) => sweep_seeds(&args),
        Command::Hunt(args) => hunt(&args),
        Command::List => {
            println!("systems: {}", system_names().join(" "));
            let shapes: Vec<&str> = Shape::all().iter().map(|shape| shape.name).collect();
            println!("workloads: {}", shapes.join(" "));
            Ok(true)
        }
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("sim: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn system(name: &str) -> Result<Rc<dyn System>> {
    let names = || system_names().join(", ");
    system_named(name).with_context(|| format!("no system {name:?}; there are {}", names()))
}

impl What {
    fn system(&self) -> Result<Rc<dyn System>> {
        system(&self.system)
    }

    fn draw(&self, seed: u64) -> Result<Workload> {
        let shape =
            Shape::named(&self.workload).with_context(|| format!("no workload {:?}", self.workload))?;
        let shape = self.length.map_or(shape.clone(), |length| shape.with_steps(length));
        Ok(shape.draw(seed))
    }
}

fn run(args: &RunArgs) -> Result<bool> {
    args.drawing.map_or(Ok(()), check_drawing)?;
    let system = args.what.system()?;
    let mut workload = args.what.draw(args.seed)?;
    if let Some(text) = &args.steps {
        let places = parse_places(text).map_err(|sentence| anyhow!(sentence))?;
        if places.iter().any(|place| *place >= workload.steps.len()) {
            bail!("the workload has only {} steps", workload.steps.len());
        }
        workload = workload.keep(&places);
    }
    let mut cuts: Vec<Cut> = Vec::new();
    for text in [&args.cut, &args.then].into_iter().flatten() {
        cuts.push(text.parse().map_err(|sentence: String| anyhow!(sentence))?);
    }
    if args.trace {
        let mut out = std::io::stdout().lock();
        for (place, step) in workload.steps.iter().enumerate() {
            writeln!(out, "{place} {step}")?;
        }
        // What goes wrong is reported below.
        if let Ok(mut rig) = rig_for(&system, &workload) {
            rig.world.borrow_mut().trace.record();
            let _outcome = whole(&mut rig, &workload);
            for line in rig.world.borrow().trace.lines() {
                writeln!(out, "{line}")?;
            }
        }
    }
    let found = if cuts.is_empty() {
        fault_of(&system, &workload)
    } else {
        replay(&system, &workload, &cuts, Depth::QUICK).err().map(|failure| *failure)
    };
    match found {
        None => println!("nothing found"),
        Some(failure) => {
            println!("{failure}");
            if args.minimise {
                shorten(&system, &workload, failure);
            }
            return Ok(false);
        }
    }
    Ok(true)
}

fn shorten(system: &Rc<dyn System>, workload: &Workload, failure: Failure) {
    let minimal = minimise(system, workload, failure, MINIMISE_TRIES);
    println!(
        "shortened to {} steps in {} tries: {}",
        minimal.workload.steps.len(),
        minimal.tries,
        minimal.failure
    );
    for step in &minimal.workload.steps {
        println!("    {step}");
    }
}

/// One seed: the whole workload, then the crash points.
fn sweep_seed(args: &SweepArgs, seed: u64) -> Result<Result<Figures, Failure>> {
    let system = args.what.system()?;
    let workload = args.what.draw(seed)?;
    let depth = match args.depth {
        Thoroughness::Whole => {
            let result = whole_of(&system, &workload);
            return Ok(result.map_err(|fault| Failure::new(fault, system.name(), &workload, &[])));
        }
        Thoroughness::Quick => Depth::QUICK,
        Thoroughness::Full => Depth::FULL,
    };
    let recovery_one_in = args.recovery_one_in.unwrap_or(depth.recovery_one_in);
    let depth = Depth { every: args.every.max(1), recovery_one_in, ..depth };
    Ok(match sweep(&system, &workload, depth) {
        Ok(figures) => Ok(figures),
        Err(failure) if args.as_found => Err(*failure),
        Err(failure) => {
            println!("{failure}");
            let minimal = minimise(&system, &workload, *failure, MINIMISE_TRIES / 10);
            Err(minimal.failure)
        }
    })
}

fn sweep_seeds(args: &SweepArgs) -> Result<bool> {
    args.what.system()?;
    args.what.draw(0)?;
    let next = AtomicU64::new(args.seeds.start);
    let (total, failures) = (Mutex::new(Figures::default()), AtomicU64::new(0));
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..args.jobs.clamp(1, 64) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let stop = !args.keep_going && failures.load(Ordering::Relaxed) > 0;
                    if seed >= args.seeds.end || stop {
                        return;
                    }
                    match sweep_seed(args, seed) {
                        Ok(Ok(figures)) => total.lock().expect("no thread panics with it").add(&figures),
                        Ok(Err(failure)) => {
                            failures.fetch_add(1, Ordering::Relaxed);
                            println!("seed {seed}: {failure}");
                        }
                        // The arguments were tried before the first seed.
                        Err(error) => println!("seed {seed}: {error:#}"),
                    }
                }
            });
        }
    });
    let figures = *total.lock().expect("no thread panics with it");
    print_figures(&figures, began.elapsed().as_secs_f64());
    let failures = failures.load(Ordering::Relaxed);
    println!("{} seeds, {failures} failed", args.seeds.end.saturating_sub(args.seeds.start));
    Ok(failures == 0)
}

/// Ends with the first failure.
fn hunt(args: &HuntArgs) -> Result<bool> {
    args.drawing.map_or(Ok(()), check_drawing)?;
    let system = system(&args.system)?;
    let from = args.from.unwrap_or_else(fresh_number);
    println!("hunt {from}, drawing {DRAWING}");
    let (mut figures, mut rounds) = (Figures::default(), 0);
    let mut found = None;
    let limit = Duration::from_secs(args.seconds);
    while found.is_none() && (rounds == 0 || processor_time() < limit) {
        let round = Round::of(from, rounds);
        rounds += 1;
        match round.judge(&system) {
            Ok(done) => figures.add(&done),
            Err(failure) => found = Some((round, *failure)),
        }
    }
    let spent = processor_time().as_secs_f64();
    print_figures(&figures, spent);
    let Some((round, failure)) = found else {
        println!("{rounds} rounds, nothing found");
        return Ok(true);
    };
    println!("found in round {rounds} after {spent:.1} s: {failure}");
    if !args.as_found {
        shorten(&system, &round.workload, failure);
    }
    Ok(false)
}

/// How long this process has had a processor: what a busy machine does not change.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// What no earlier hunt has begun with, most likely.
fn fresh_number() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    mix(&[since.as_secs(), u64::from(since.subsec_nanos()), u64::from(std::process::id())]) >> 32
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn print_figures(figures: &Figures, seconds: f64) {
    let rate = |count: u64| count as f64 / seconds.max(0.001);
    let Figures { requests, operations, lives, crashes, crashes_in_recovery, .. } = *figures;
    println!("requests            {requests:>12} {:>10.0}/s", rate(requests));
    println!("device operations   {operations:>12} {:>10.0}/s", rate(operations));
    println!("processes           {lives:>12} {:>10.0}/s", rate(lives));
    println!("crashes             {crashes:>12} {:>10.0}/s", rate(crashes));
    println!("  inside recoveries {crashes_in_recovery:>12}");
    println!("virtual seconds     {:>12.1}", figures.virtual_ns as f64 / 1e9);
    println!("longest transition  {:>12.1} us", figures.longest_ns as f64 / 1e3);
    println!("{:<34} {:>10} {:>10}", "in the middle of", "times", "crashes");
    for ((phase, begun), cuts) in Phase::ALL.iter().zip(figures.begun).zip(figures.cuts) {
        println!("{:<34} {begun:>10} {cuts:>10}", phase.name());
    }
}
