//! `cargo xtask mutants`: plants deliberate faults, which are patches in `crates/sim/mutants`, each
//! in a scratch copy.
//!
//! The random workloads of `sim hunt` must find those in the engine. The simulator does not run the
//! rest of the program, and some coincidences are too rare for it. The patch of such a fault names
//! the tests that must fail, as arguments of `cargo test` (`test: -p bcached-offline --lib
//! lost_sets`).
//!
//! A fault counts as caught by hunts if no hunt takes longer than the limit. If enough starting
//! numbers are tried for a median to be meaningful, more than half of the hunts must also find it
//! within [`MEDIAN_SECONDS`].

use crate::named_tests;
use crate::tree::ScratchTree;
use anyhow::{Context as _, Result, bail};
use clap::builder::RangedU64ValueParser;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Limit for the median time until a hunt finds a fault, in CPU seconds.
const MEDIAN_SECONDS: f64 = 60.0;
/// Least number of starting numbers for which the median is checked.
const MEDIAN_OF: u64 = 3;

/// Folder of the faults that no hunt has found. They are known gaps of the simulator, and are
/// planted only by name.
const UNFOUND: &str = "unfound";
/// Scripts that once exposed a fault.
const SCRIPTS: &str = "crates/sim/scripts";
/// Prefix of the line of a script that names the fault for which it was kept, if that can be
/// planted.
const PLANTED: &str = "# planted: ";

/// Exit status of a Rust program that panicked.
const PANIC: i32 = 101;

/// Environment of the builds. Faults leave code unused, and are built again and again.
const BUILD: [(&str, &str); 3] = [
    ("RUSTFLAGS", "--allow warnings"),
    ("CARGO_PROFILE_RELEASE_INCREMENTAL", "true"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
];

/// Which faults to plant, and how long to hunt.
#[derive(clap::Args)]
pub struct MutantArgs {
    /// Plant only the fault of this name (its file without `.patch`).
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Plant only this many faults, starting with the one whose turn it is at the current commit.
    #[arg(long, conflicts_with = "only", value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    rotate: Option<usize>,
    /// Number of starting numbers tried with each fault.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    starts: u64,
    /// Time limit of a hunt, in CPU seconds.
    #[arg(long, default_value_t = 600)]
    limit: u64,
    /// Only check that every patch still applies, and that the tests it names exist.
    #[arg(long)]
    apply_only: bool,
}

/// A planted fault.
struct Mutant {
    name: String,
    patch: PathBuf,
    /// Arguments for `cargo test`; `None`: hunts look for the fault.
    test: Option<Vec<String>>,
}

/// Runs `cargo xtask mutants`. Returns false if a fault was not caught.
///
/// # Errors
/// A patch that does not apply, a tree that does not build, or a name that does not exist.
pub fn run(args: &MutantArgs) -> Result<bool> {
    let origin = crate::origin();
    let work = crate::target(origin).join("mutants");
    let folder = origin.join("crates/sim/mutants");
    let mut mutants = all(&folder)?;
    if args.apply_only || args.only.is_some() {
        mutants.extend(all(&folder.join(UNFOUND))?);
    }
    let mutants = select(mutants, args, origin)?;
    let tree = ScratchTree::of(origin, work.join("tree"))?;
    let mut missed = Vec::new();
    for mutant in &mutants {
        tree.restore()?;
        tree.apply(&mutant.patch).with_context(|| format!("the patch {} does not apply", mutant.name))?;
        if args.apply_only {
            if let Some(words) = &mutant.test {
                named_tests::check(&tree.root, words).with_context(|| mutant.name.clone())?;
            }
            continue;
        }
        let build = work.join("build");
        let is_caught = match &mutant.test {
            Some(words) => fails(mutant, words, &tree.root, &build).with_context(|| mutant.name.clone())?,
            None => {
                let simulator = crate::build_sim(&tree.root, &build, &BUILD);
                let simulator = simulator.with_context(|| mutant.name.clone())?;
                // Run both, so that both results are printed.
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

/// Returns the faults that `args` select.
fn select(mut mutants: Vec<Mutant>, args: &MutantArgs, origin: &Path) -> Result<Vec<Mutant>> {
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

/// Returns the number of commits, so that a run at each commit plants each fault in turn.
fn commits(origin: &Path) -> Result<usize> {
    let mut git = Command::new("git");
    git.current_dir(origin).args(["rev-list", "--count", "HEAD"]);
    let done = git.output().context("cannot start git, which counts the commits")?;
    let count = String::from_utf8_lossy(&done.stdout).trim().parse();
    // A tree that is not a repository has no turn.
    Ok(count.unwrap_or(0))
}

/// Runs the kept scripts that name `mutant` ([`PLANTED`]), each for at most `limit` CPU seconds.
/// Returns whether each of them fails with it. A script that passes has become useless.
fn kept_scripts_fail(mutant: &Mutant, simulator: &Path, folder: &Path, limit: u64) -> Result<bool> {
    let mut all_fail = true;
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let script = entry?.path();
        let text = fs::read_to_string(&script).with_context(|| script.display().to_string())?;
        if !names(&text, &mutant.name) {
            continue;
        }
        // A script that does not end is stopped, and counts as having noticed the fault.
        let mut run = Command::new("sh");
        run.args(["-c", "ulimit -t \"$1\" && shift && exec \"$@\"", "sh", &limit.to_string()]);
        run.arg(simulator).args(["run", "--script"]).arg(&script).stdin(Stdio::null());
        let done = run.output().context("cannot start the simulator")?;
        let is_noticed = is_failure(&done).with_context(|| script.display().to_string())?;
        let verdict = if is_noticed { "caught" } else { "NOT CAUGHT" };
        let script = script.file_name().unwrap_or_default().display();
        println!("{:<44} {verdict}: by {script}", mutant.name);
        all_fail &= is_noticed;
    }
    Ok(all_fail)
}

/// Returns whether a script was kept for this fault.
fn names(script: &str, fault: &str) -> bool {
    script.lines().any(|line| line.strip_prefix(PLANTED).is_some_and(|named| named.trim() == fault))
}

/// Returns whether `sim run` showed a failure, or died of one. A script that could not be run at
/// all shows nothing.
fn is_failure(done: &Output) -> Result<bool> {
    match done.status.code() {
        Some(0) => Ok(false),
        Some(1 | PANIC) | None => Ok(true),
        Some(_) => {
            bail!("{}", last_words(done))
        }
    }
}

/// Returns the last line of a program's error output.
fn last_words(done: &Output) -> String {
    let complaint = String::from_utf8_lossy(&done.stderr);
    complaint.trim().lines().next_back().unwrap_or("no error output").to_owned()
}

/// Returns the tests that must fail with the patch, as named above its first hunk.
fn named_test(patch: &str) -> Option<Vec<String>> {
    let mut head = patch.lines().take_while(|line| !line.starts_with("diff ") && !line.starts_with("--- "));
    let words = head.find_map(|line| line.strip_prefix("test:"))?;
    Some(words.split_whitespace().map(str::to_owned).collect())
}

/// Runs the tests that `words` select in the planted `tree`. Returns whether one of them fails.
fn fails(mutant: &Mutant, words: &[String], tree: &Path, target: &Path) -> Result<bool> {
    let tests = |more: &[&str]| {
        let mut cargo = crate::cargo();
        cargo.current_dir(tree).args(["test", "--quiet", "--target-dir"]).arg(target);
        cargo.args(more).args(words).env("RUSTFLAGS", "--allow warnings");
        cargo.env("CARGO_PROFILE_DEV_DEBUG", "0").stdin(Stdio::null());
        cargo.output().context("cannot start cargo")
    };
    let built = tests(&["--no-run"])?;
    if !built.status.success() {
        bail!("cannot build its tests: {}", last_words(&built));
    }
    let began = Instant::now();
    let verdict = TestResult::of(&tests(&[])?)?;
    let word = if verdict == TestResult::Failed { "caught" } else { "NOT CAUGHT" };
    println!("{:<44} {word}: by its tests, {:.1} s", mutant.name, began.elapsed().as_secs_f64());
    Ok(verdict == TestResult::Failed)
}

/// The result of tests.
#[derive(PartialEq, Debug)]
enum TestResult {
    /// One of them failed.
    Failed,
    /// All that ran passed.
    Passed,
}

impl TestResult {
    /// Returns the verdict of a run of `cargo test`. Only the output of the tests themselves
    /// counts.
    fn of(done: &Output) -> Result<Self> {
        const FAILED: i32 = 101;
        let told = String::from_utf8_lossy(&done.stdout);
        let says = |result: &str| told.lines().any(|line| line.starts_with(result));
        let ran = |line: &str| line.starts_with("running ") && !line.starts_with("running 0 tests");
        match done.status.code() {
            Some(FAILED) if says("test result: FAILED") => Ok(Self::Failed),
            Some(0) if told.lines().any(ran) => Ok(Self::Passed),
            Some(0) => bail!("the patch names no existing test"),
            _ => {
                bail!("the tests ended with {} and reported no failure: {}", done.status, last_words(done))
            }
        }
    }
}

/// Hunts with each starting number, and prints how long that took. Returns whether the fault counts
/// as caught.
fn is_found(mutant: &Mutant, simulator: &Path, args: &MutantArgs) -> Result<bool> {
    let mut times = hunts(simulator, args)?;
    times.sort_unstable_by(f64::total_cmp);
    let (median, worst) = (median(&times), times.last().context("there is a start")?);
    let caught = worst.is_finite() && (args.starts < MEDIAN_OF || median <= MEDIAN_SECONDS);
    let verdict = if caught { "caught" } else { "NOT CAUGHT" };
    println!("{:<44} {verdict}: median {median:.1} s, worst {worst:.1} s", mutant.name);
    Ok(caught)
}

/// Returns the median of `sorted`; of an even number of times, the later of the two in the middle.
/// So if the median is within a limit, so are more than half of the times.
fn median(sorted: &[f64]) -> f64 {
    sorted[sorted.len() / 2]
}

/// Returns the seconds after which each of the hunts found something. Several hunts run at once,
/// one per processor.
fn hunts(simulator: &Path, args: &MutantArgs) -> Result<Vec<f64>> {
    let (next, times) = (AtomicU64::new(1), Mutex::new(Vec::new()));
    let hunter = || -> Result<()> {
        loop {
            let from = next.fetch_add(1, Ordering::Relaxed);
            if from > args.starts {
                return Ok(());
            }
            // A fault that was not found counts as infinitely late.
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

/// Runs one hunt. Returns the CPU seconds after which it found something, if it did.
fn hunt(simulator: &Path, from: u64, limit: u64) -> Result<Option<f64>> {
    let mut hunt = Command::new(simulator);
    hunt.args(["hunt", "--as-found", "--rounds", "--from", &from.to_string()]);
    hunt.args(["--seconds", &limit.to_string()]);
    let began = Instant::now();
    let done = hunt.stdin(Stdio::null()).output().context("cannot start the simulator")?;
    Ok(match HuntResult::of(&done)? {
        HuntResult::Nothing => None,
        HuntResult::Found { seconds } => Some(seconds),
        HuntResult::Died => Some(began.elapsed().as_secs_f64()),
    })
}

/// How a hunt ended.
#[derive(PartialEq, Debug)]
enum HuntResult {
    /// It ran out of time.
    Nothing,
    /// It found something after this many CPU seconds.
    Found { seconds: f64 },
    /// The process died in the middle of a round because of the fault; a correct engine does not
    /// die.
    Died,
}

impl HuntResult {
    /// Returns how the hunt ended, from its output. A simulator that could not hunt has caught
    /// nothing, and neither has one with unknown output.
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
            // Killed by a signal, for example because it was out of memory.
            None | Some(PANIC) if is_inside_a_round(&told) => return Ok(Self::Died),
            _ => {}
        }
        bail!("the hunt ended with {} and reported no finding: {}", done.status, last_words(done))
    }
}

/// Returns the seconds in the line that reports a finding.
fn found_after(line: &str) -> Option<f64> {
    let (_, after) = line.strip_prefix("found in round ")?.split_once(" after ")?;
    after.split_once(" s: ")?.0.parse().ok()
}

/// Returns whether the last round has not ended: its line is incomplete.
fn is_inside_a_round(told: &str) -> bool {
    told.lines().next_back().is_some_and(|line| line.starts_with("round ")) && !told.ends_with('\n')
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    /// Returns the ending of a process with the given `wait` status: an exit status, or the signal
    /// that killed it.
    fn ending(wait: i32, told: &str) -> Result<HuntResult> {
        let status = ExitStatus::from_raw(wait);
        HuntResult::of(&Output { status, stdout: told.into(), stderr: b"sim: no such thing\n".to_vec() })
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
        assert_eq!(ending(exited(1), &found).unwrap(), HuntResult::Found { seconds: 3.5 });
        let nothing = format!("{rounds}1 rounds, nothing found\n");
        assert_eq!(ending(exited(0), &nothing).unwrap(), HuntResult::Nothing);
        let inside = format!("{rounds}round 1: mixed 18");
        assert_eq!(ending(ABORTED, &inside).unwrap(), HuntResult::Died);
        assert_eq!(ending(exited(101), &inside).unwrap(), HuntResult::Died);
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
            assert!(refused.to_string().ends_with("reported no finding: sim: no such thing"), "{refused}");
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
            TestResult::of(&Output { status, stdout: told.into(), stderr: b"error: no such test\n".to_vec() })
        };
        let failed = "running 2 tests\n.F\ntest result: FAILED. 1 passed; 1 failed\n";
        assert_eq!(verdict(exited(101), failed).unwrap(), TestResult::Failed);
        let passed = "running 2 tests\n..\ntest result: ok. 2 passed; 0 failed\n";
        assert_eq!(verdict(exited(0), passed).unwrap(), TestResult::Passed);
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
        struct TestCli {
            #[command(flatten)]
            _args: MutantArgs,
        }
        for option in ["--rotate", "--starts"] {
            assert!(TestCli::try_parse_from(["mutants", option, "1"]).is_ok());
            let refused = TestCli::try_parse_from(["mutants", option, "0"]).err().expect("none is refused");
            assert!(refused.to_string().contains("0 is not in 1.."), "{refused}");
        }
    }
}
