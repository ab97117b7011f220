//! Deliberate faults, as patches in `crates/sim/mutants`: each is planted in a scratch copy. Those of the engine
//! the random workloads of `sim hunt` must find. The simulator does not run the rest of the program, and some
//! coincidences are too rare for it: of such a fault the patch names the tests that must fail, with the words that
//! `cargo test` takes (`test: -p bcached-daemon --lib offline`).
//!
//! A fault counts as caught by hunts when no hunt takes longer than the limit and, if enough starting numbers are tried for a median
//! to mean something, more than half of the hunts find it within [`MEDIAN_SECONDS`].

use crate::tree::Tree;
use anyhow::{Context as _, Result, bail};
use clap::builder::RangedU64ValueParser;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// How long a fault may hide from the middle one of the hunts, in seconds of one processor.
const MEDIAN_SECONDS: f64 = 60.0;
/// From how many starting numbers on a median is asked for.
const MEDIAN_OF: u64 = 3;

/// The folder of those that no hunt has found: gaps of the simulator, which are known, and are planted only by name.
const UNFOUND: &str = "unfound";
/// Scripts that have shown a fault once.
const SCRIPTS: &str = "crates/sim/scripts";
/// Starts the line of a script that names the fault it was kept of, where that is planted.
const PLANTED: &str = "# planted: ";

/// The exit status of a Rust program that panicked.
const PANIC: i32 = 101;

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
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Only so many faults, from the one whose turn it is by the commit that is checked out.
    #[arg(long, conflicts_with = "only", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    rotate: Option<usize>,
    /// Starting numbers tried with each fault.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
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
    /// What `cargo test` is to be asked for; `None`: hunts look for it.
    test: Option<Vec<String>>,
}

/// Runs `cargo xtask mutants`; false if a fault was not caught.
///
/// # Errors
/// A patch that does not apply, a tree that does not build, a name that there is not.
pub fn run(args: &Args) -> Result<bool> {
    let origin = crate::origin();
    let work = crate::target(origin).join("mutants");
    let folder = origin.join("crates/sim/mutants");
    let mut mutants = all(&folder)?;
    if args.apply_only || args.only.is_some() {
        mutants.extend(all(&folder.join(UNFOUND))?);
    }
    let mutants = select(mutants, args, origin)?;
    let tree = Tree::of(origin, work.join("tree"))?;
    let mut missed = Vec::new();
    for mutant in &mutants {
        tree.restore()?;
        tree.apply(&mutant.patch).with_context(|| format!("{} does not apply", mutant.name))?;
        if args.apply_only {
            continue;
        }
        let build = work.join("build");
        let is_caught = match &mutant.test {
            Some(words) => fails(mutant, words, &tree.root, &build).with_context(|| mutant.name.clone())?,
            None => {
                let simulator = crate::build_sim(&tree.root, &build, &BUILD);
                let simulator = simulator.with_context(|| mutant.name.clone())?;
                // Both are printed.
                let scripts_fail = kept_scripts_fail(mutant, &simulator, &origin.join(SCRIPTS), args.limit)?;
                is_found(mutant, &simulator, args)? && scripts_fail
            }
        };
        if !is_caught {
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
            let text = fs::read_to_string(&patch).with_context(|| patch.display().to_string())?;
            mutants.push(Mutant { name, patch, test: named_test(&text) });
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
        let count = count.min(mutants.len());
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

/// Runs the kept scripts that name `mutant` ([`PLANTED`]), each for `limit` seconds of the processor at most; whether each of
/// them fails with it. A script that passes keeps nothing any more.
fn kept_scripts_fail(mutant: &Mutant, simulator: &Path, folder: &Path, limit: u64) -> Result<bool> {
    let mut all_fail = true;
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let script = entry?.path();
        let text = fs::read_to_string(&script).with_context(|| script.display().to_string())?;
        if !names(&text, &mutant.name) {
            continue;
        }
        // One that does not come to its end is stopped, and has noticed.
        let mut run = Command::new("sh");
        run.args(["-c", "ulimit -t \"$1\" && shift && exec \"$@\"", "sh", &limit.to_string()]);
        run.arg(simulator).args(["run", "--script"]).arg(&script).stdin(Stdio::null());
        let done = run.output().context("the simulator does not start")?;
        let is_noticed = is_failure(&done).with_context(|| script.display().to_string())?;
        let verdict = if is_noticed { "caught" } else { "NOT CAUGHT" };
        let script = script.file_name().unwrap_or_default().display();
        println!("{:<44} {verdict}: by {script}", mutant.name);
        all_fail &= is_noticed;
    }
    Ok(all_fail)
}

/// Whether a script says that it was kept of this fault.
fn names(script: &str, fault: &str) -> bool {
    script.lines().any(|line| line.strip_prefix(PLANTED).is_some_and(|named| named.trim() == fault))
}

/// Whether `sim run` has shown a failure, or died of one. What it could not run at all shows nothing.
fn is_failure(done: &Output) -> Result<bool> {
    match done.status.code() {
        Some(0) => Ok(false),
        Some(1 | PANIC) | None => Ok(true),
        Some(_) => {
            bail!("{}", last_words(done))
        }
    }
}

/// The last that a program has complained of.
fn last_words(done: &Output) -> String {
    let complaint = String::from_utf8_lossy(&done.stderr);
    complaint.trim().lines().next_back().unwrap_or("without a word").to_owned()
}

/// What the patch says above its first hunk of the tests that must fail with it.
fn named_test(patch: &str) -> Option<Vec<String>> {
    let mut head = patch.lines().take_while(|line| !line.starts_with("diff ") && !line.starts_with("--- "));
    let words = head.find_map(|line| line.strip_prefix("test:"))?;
    Some(words.split_whitespace().map(str::to_owned).collect())
}

/// Runs the tests that `words` name in the planted `tree`; whether one of them fails.
fn fails(mutant: &Mutant, words: &[String], tree: &Path, target: &Path) -> Result<bool> {
    let tests = |more: &[&str]| {
        let mut cargo = crate::cargo();
        cargo.current_dir(tree).args(["test", "--quiet", "--target-dir"]).arg(target);
        cargo.args(more).args(words).env("RUSTFLAGS", "--allow warnings");
        cargo.env("CARGO_PROFILE_DEV_DEBUG", "0").stdin(Stdio::null());
        cargo.output().context("cargo does not start")
    };
    let built = tests(&["--no-run"])?;
    if !built.status.success() {
        bail!("its tests do not build: {}", last_words(&built));
    }
    let began = Instant::now();
    let verdict = Verdict::of(&tests(&[])?)?;
    let word = if verdict == Verdict::Failed { "caught" } else { "NOT CAUGHT" };
    println!("{:<44} {word}: by its tests, {:.1} s", mutant.name, began.elapsed().as_secs_f64());
    Ok(verdict == Verdict::Failed)
}

/// What tests have said.
#[derive(PartialEq, Debug)]
enum Verdict {
    /// One of them failed.
    Failed,
    /// All that ran passed.
    Passed,
}

impl Verdict {
    /// Of a run of `cargo test`, of which nothing is believed but the words of the tests themselves.
    fn of(done: &Output) -> Result<Self> {
        const FAILED: i32 = 101;
        let told = String::from_utf8_lossy(&done.stdout);
        let says = |result: &str| told.lines().any(|line| line.starts_with(result));
        let ran = |line: &str| line.starts_with("running ") && !line.starts_with("running 0 tests");
        match done.status.code() {
            Some(FAILED) if says("test result: FAILED") => Ok(Self::Failed),
            Some(0) if told.lines().any(ran) => Ok(Self::Passed),
            Some(0) => bail!("the patch names no test that there is"),
            _ => {
                bail!("the tests ended with {} and told of no failure: {}", done.status, last_words(done))
            }
        }
    }
}

/// Hunts with each starting number, and prints how long that took.
fn is_found(mutant: &Mutant, simulator: &Path, args: &Args) -> Result<bool> {
    let mut times = hunts(simulator, args)?;
    times.sort_unstable_by(f64::total_cmp);
    let (median, worst) = (median(&times), times.last().context("there is a start")?);
    let caught = worst.is_finite() && (args.starts < MEDIAN_OF || median <= MEDIAN_SECONDS);
    let verdict = if caught { "caught" } else { "NOT CAUGHT" };
    println!("{:<44} {verdict}: median {median:.1} s, worst {worst:.1} s", mutant.name);
    Ok(caught)
}

/// The middle one of `sorted`, of an even number the later of the two: what is asked of it holds for more than half.
fn median(sorted: &[f64]) -> f64 {
    sorted[sorted.len() / 2]
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
    hunt.args(["hunt", "--as-found", "--rounds", "--from", &from.to_string()]);
    hunt.args(["--seconds", &limit.to_string()]);
    let began = Instant::now();
    let done = hunt.stdin(Stdio::null()).output().context("the simulator does not start")?;
    Ok(match Ending::of(&done)? {
        Ending::Nothing => None,
        Ending::Found { seconds } => Some(seconds),
        Ending::Died => Some(began.elapsed().as_secs_f64()),
    })
}

/// How a hunt ended.
#[derive(PartialEq, Debug)]
enum Ending {
    /// Its time was over.
    Nothing,
    /// It found something after so many seconds of the processor.
    Found { seconds: f64 },
    /// The process died in the middle of a round: the fault has brought it down, a correct engine does not.
    Died,
}

impl Ending {
    /// What the hunt has told. A simulator that could not hunt has caught nothing, and neither has one that nobody
    /// understands.
    fn of(done: &Output) -> Result<Self> {
        let told = String::from_utf8_lossy(&done.stdout);
        match done.status.code() {
            Some(0) if told.lines().any(|line| line.ends_with(" rounds, nothing found")) => {
                return Ok(Self::Nothing);
            }
            Some(1) => {
                if let Some(seconds) = told.lines().find_map(found_after) {
                    return Ok(Self::Found { seconds });
                }
            }
            // Killed by a signal, out of memory among others.
            None | Some(PANIC) if is_inside_a_round(&told) => return Ok(Self::Died),
            _ => {}
        }
        bail!("the hunt ended with {} and told of no finding: {}", done.status, last_words(done))
    }
}

/// The seconds in the line that tells of a finding.
fn found_after(line: &str) -> Option<f64> {
    let (_, after) = line.strip_prefix("found in round ")?.split_once(" after ")?;
    after.split_once(" s: ")?.0.parse().ok()
}

/// Whether the last round that was begun has not ended: its line is only half there.
fn is_inside_a_round(told: &str) -> bool {
    told.lines().next_back().is_some_and(|line| line.starts_with("round ")) && !told.ends_with('\n')
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    /// The ending of a process that exited with `exit`, or was killed by a signal (as `wait` has it).
    fn ending(wait: i32, told: &str) -> Result<Ending> {
        let status = ExitStatus::from_raw(wait);
        Ending::of(&Output { status, stdout: told.into(), stderr: b"sim: no such thing\n".to_vec() })
    }

    const fn exited(status: i32) -> i32 {
        status << 8
    }

    const ABORTED: i32 = 6;

    #[test]
    fn a_script_names_its_fault_and_a_failure_is_one() {
        let script = "sim script 1\n# A hole was lost.\n# planted: hole-lost\nworkload points\n";
        assert!(names(script, "hole-lost") && !names(script, "hole"));
        let run = |wait| {
            let status = ExitStatus::from_raw(wait);
            is_failure(&Output { status, stdout: Vec::new(), stderr: b"sim: no such file\n".to_vec() })
        };
        assert!(run(exited(1)).unwrap() && run(exited(101)).unwrap() && run(ABORTED).unwrap());
        assert!(!run(exited(0)).unwrap());
        assert_eq!(run(exited(2)).unwrap_err().to_string(), "sim: no such file");
    }

    #[test]
    fn only_a_finding_is_a_finding() {
        let rounds = "hunt 1, drawing 7\nround 0: points 17, 12 crashes, 0.1 s\n";
        let found = format!("{rounds}found in round 1 after 3.5 s: it panicked\n  again: sim run\n");
        assert_eq!(ending(exited(1), &found).unwrap(), Ending::Found { seconds: 3.5 });
        let nothing = format!("{rounds}1 rounds, nothing found\n");
        assert_eq!(ending(exited(0), &nothing).unwrap(), Ending::Nothing);
        let inside = format!("{rounds}round 1: mixed 18");
        assert_eq!(ending(ABORTED, &inside).unwrap(), Ending::Died);
        assert_eq!(ending(exited(101), &inside).unwrap(), Ending::Died);
        for (wait, told) in [
            (exited(2), ""),
            (exited(2), &found),
            (exited(1), rounds),
            (exited(1), "found in round 1 after a while: it panicked\n"),
            (exited(0), rounds),
            (exited(101), "hunt 1, drawing 7\n"),
            (ABORTED, "hunt 1, drawing 7\n"),
            (ABORTED, rounds),
        ] {
            let refused = ending(wait, told).expect_err(told);
            assert!(refused.to_string().ends_with("told of no finding: sim: no such thing"), "{refused}");
        }
    }

    #[test]
    fn a_patch_names_its_tests_above_what_it_changes() {
        let words = |text: &str| named_test(text).map(|words| words.join("|"));
        let patch = "It is not done.\ntest: -p bcached-daemon  --lib offline\n\ndiff --git a/one b/one\n";
        assert_eq!(words(patch).as_deref(), Some("-p|bcached-daemon|--lib|offline"));
        assert_eq!(words("It is not done.\n\ndiff --git a/one b/one\ntest: -p one\n"), None);
        assert_eq!(words("It is not done.\n\n--- a/one\n+++ b/one\ntest: -p one\n"), None);
    }

    #[test]
    fn only_a_failed_test_is_a_failed_test() {
        let verdict = |wait: i32, told: &str| {
            let status = ExitStatus::from_raw(wait);
            Verdict::of(&Output { status, stdout: told.into(), stderr: b"error: no such test\n".to_vec() })
        };
        let failed = "running 2 tests\n.F\ntest result: FAILED. 1 passed; 1 failed\n";
        assert_eq!(verdict(exited(101), failed).unwrap(), Verdict::Failed);
        let passed = "running 2 tests\n..\ntest result: ok. 2 passed; 0 failed\n";
        assert_eq!(verdict(exited(0), passed).unwrap(), Verdict::Passed);
        for (wait, told) in [
            (exited(0), "running 0 tests\ntest result: ok. 0 passed\n"),
            (exited(0), ""),
            (exited(101), ""),
            (exited(101), passed),
            (exited(1), failed),
            (ABORTED, "running 2 tests\n"),
        ] {
            assert!(verdict(wait, told).is_err(), "{wait} {told}");
        }
    }

    #[test]
    fn the_median_of_an_even_number_is_the_later_one() {
        assert!((median(&[1.0, 2.0, 3.0]) - 2.0).abs() < f64::EPSILON);
        assert!((median(&[1.0, 2.0, f64::INFINITY, f64::INFINITY])).is_infinite());
    }

    #[test]
    fn nothing_is_not_a_number_of_faults_or_starts() {
        #[derive(Parser)]
        struct Cli {
            #[command(flatten)]
            _args: Args,
        }
        for option in ["--rotate", "--starts"] {
            assert!(Cli::try_parse_from(["mutants", option, "1"]).is_ok());
            let refused = Cli::try_parse_from(["mutants", option, "0"]).err().expect("none is refused");
            assert!(refused.to_string().contains("0 is not in 1.."), "{refused}");
        }
    }
}
