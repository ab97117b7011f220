//! `cargo xtask test`: runs every test program of the workspace, several at a time.
//!
//! `cargo test` runs them one after the other, and many of them mostly wait: for guests, sockets,
//! time limits. Here cargo still determines which programs there are and how each is started (see
//! `program`). As many as there are processors run at once (see `pool`), the long ones first. The
//! output of a program is kept and printed as a whole at its end. So the log reads like that of
//! `cargo test`, in another order, and `tests/summary.awk` adds it up.
//!
//! cargo-nextest also does this, but starts a process for each test. Tests that share something
//! expensive would make it again in each process, and a fresh machine would have to install
//! nextest.
//!
//! A program that ends without success, or leaves files in its `TMPDIR`, is named in a line `error:
//! test failed: ..`. A program that reported no failure of its own, because it was killed, exited
//! early or reached the time limit, counts as one failed test; its line ends with [`UNTOLD`].

mod decoy;
mod pool;
mod program;
mod usage;

use anyhow::{Context as _, Result, bail};
use decoy::Decoy;
use pool::{FinishedProgram, PoolLimits};
use program::Program;
use std::ffi::OsString;
use std::io::{self, Write as _};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use usage::{ProgramFolders, ResourceBounds, ResourceUsage};

/// Maximum number of programs at a time. More would cost more memory and slow each other down more
/// than they gain.
const AT_A_TIME_MAX: usize = 4;
/// Memory that each of them may take, which is a guest with what serves it. With less memory, fewer
/// programs run.
const EACH: u64 = 1536 << 20;
/// Time limit of a program: many times what the longest takes on a loaded machine, so a program
/// that reaches it hangs.
const LIMIT: Duration = Duration::from_secs(45 * 60);
/// The longest programs, which start first. Those that start last are then short, and no processor
/// waits for them. Names that do not exist have no effect; the last line of each run shows which
/// belong here.
const LONG: [&str; 8] = [
    "guests of bcached-tests",
    "engine of bcached-engine",
    "kernel_to_bcached of bcached-tests",
    "ping_pong of bcached-tests",
    "engine of bcached-sim",
    "bcached_sim of bcached-sim",
    "kernel_images of bcached-check",
    "take_over of bcached-cli",
];
/// Programs that fail on a busy machine. They run when all others have ended, one at a time.
const ALONE: [&str; 1] = [
    // A kernel's controller is sampled ten times a second, between the steps that it takes each
    // second.
    "write_back_rate of bcached-tests",
];
/// What each program may take, and what must be left to the machine: several times what any program
/// takes (`docs/testing.md`).
const BOUNDS: ResourceBounds = ResourceBounds { memory: 6 << 30, disk: 16 << 30, left: 512 << 20 };
/// What must be free before the first program runs.
const NEEDED: ResourceUsage = ResourceUsage { memory: 2 << 30, disk: 8 << 30 };
/// End of the line of a program that failed without reporting a failed test. `tests/summary.awk`
/// counts these lines.
const UNTOLD: &str = "; it counts as one failed test";

/// Options of the run.
#[derive(clap::Args)]
pub struct TestArgs {
    /// Number of programs at a time. Default: one per processor and per 1.5 GiB of memory, but at
    /// most four.
    #[arg(long, value_name = "NUMBER")]
    at_a_time: Option<NonZeroUsize>,
    /// Run only tests of this package (may be repeated).
    #[arg(long, value_name = "NAME")]
    package: Vec<String>,
    /// Run only programs with this text in their names, as shown in the line that begins with
    /// `Running` (may be repeated).
    #[arg(long, value_name = "PART")]
    only: Vec<String>,
    /// The process already has a mount namespace of its own.
    #[arg(long, hide = true)]
    apart: bool,
    /// Options passed to each program.
    #[arg(last = true)]
    options: Vec<OsString>,
}

/// Arguments of the command that cargo starts instead of a test program.
#[derive(clap::Args)]
pub struct RecordArgs {
    /// Folder for the record of how it was called.
    folder: PathBuf,
    /// The program, and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    called: Vec<OsString>,
}

/// Runs `cargo xtask note-test`: records how a test program is to be started.
///
/// # Errors
/// A file that cannot be written.
pub fn note(args: &RecordArgs) -> Result<bool> {
    Program::called(&args.called)?.keep(&args.folder)?;
    Ok(true)
}

/// Runs `cargo xtask test`. Returns false if a test failed.
///
/// # Errors
/// Tests that do not build, or a result that cannot be printed.
pub fn run(args: &TestArgs) -> Result<bool> {
    let began = Instant::now();
    let not_apart = if args.apart { None } else { Some(decoy::move_apart()?) };
    let mut programs = program::all(&args.package, &args.options)?;
    programs.retain(|program| {
        args.only.is_empty() || args.only.iter().any(|part| program.name.contains(part.as_str()))
    });
    let folders = ProgramFolders::new().context("cannot create a folder for temporary files")?;
    let left = usage::left(&std::env::temp_dir());
    has_room(left)?;
    let decoy = Decoy::lay(args.apart).context("cannot set up the decoy")?;
    let (alone, mut programs): (Vec<_>, Vec<_>) =
        programs.into_iter().partition(|program| ALONE.contains(&&*program.name));
    // Programs that are not listed keep their order, which is that of the packages.
    programs.sort_by_key(|program| LONG.iter().position(|name| *name == program.name).unwrap_or(LONG.len()));
    let processors = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let usual = at_a_time(processors, left.memory);
    let at_a_time = args.at_a_time.map_or(usual, NonZeroUsize::get);
    let mut variables = decoy.variables();
    // The number of tests at a time in each program is bounded as well, so that what they take
    // together does not rise with the number of processors.
    let threads = std::env::var_os("RUST_TEST_THREADS");
    variables.push(("RUST_TEST_THREADS", threads.unwrap_or_else(|| usual.to_string().into())));
    let limits = PoolLimits { at_a_time, time: LIMIT, folders: &folders, variables: &variables };
    let mut all_well = true;
    let (mut times, mut takers) = (Vec::new(), Vec::new());
    let mut tell = |program: &Program, ended: FinishedProgram| {
        let report = report(program, &ended);
        all_well &= report.is_well;
        times.push((ended.time, program.name.clone()));
        takers.push((ended.taken, program.name.clone()));
        // Printed as a whole, so that the output of programs does not mix.
        let mut out = io::stdout().lock();
        out.write_all(&report.text).and_then(|()| out.flush()).context("cannot print")
    };
    let (of_decoy, of_programs) = (decoy.folder(), folders.path().to_owned());
    pool::end_with_this_one(move || {
        for folder in [of_decoy, of_programs] {
            decoy::unmount(&folder);
            let _is_still_used = std::fs::remove_dir_all(folder);
        }
    })?;
    usage::watch(BOUNDS);
    pool::run(&programs, &limits, &mut tell)?;
    pool::run(&alone, &PoolLimits { at_a_time: 1, ..limits }, &mut tell)?;
    drop(folders);
    let (is_unseen, text) = unseen(&decoy.found()?, not_apart.as_deref());
    print!("{text}");
    println!("{}", longest(times, at_a_time, began.elapsed()));
    println!("{}", most(&takers, usage::of_all()));
    Ok(all_well && is_unseen)
}

/// The printed result of a program.
struct ProgramReport {
    is_well: bool,
    text: Vec<u8>,
}

fn report(program: &Program, ended: &FinishedProgram) -> ProgramReport {
    let (name, seconds) = (&program.name, ended.time.as_secs_f64());
    let mut text = format!("     Running {name} ({seconds:.1} s)\n").into_bytes();
    text.extend_from_slice(&ended.printed);
    if text.last() != Some(&b'\n') {
        text.push(b'\n');
    }
    let told = |start: &str| {
        ended.printed.split(|byte| *byte == b'\n').any(|line| line.starts_with(start.as_bytes()))
    };
    // A test that exits the program with status 0 has kept the others from running.
    let has_ended_well = ended.is_success && told("test result: ");
    if !has_ended_well {
        let untold = if told("test result: FAILED.") { "" } else { UNTOLD };
        text.extend_from_slice(format!("error: test failed: {name}: {}{untold}\n", ended.how).as_bytes());
    }
    if !ended.left.is_empty() {
        let left = ended.left.join(", ");
        // A program that has failed counts already, and may have had no time to clean up.
        let (start, end) = if has_ended_well { ("error: test failed: ", UNTOLD) } else { ("", "") };
        text.extend_from_slice(format!("{start}{name}: files left in TMPDIR: {left}{end}\n").as_bytes());
    }
    ProgramReport { is_well: has_ended_well && ended.left.is_empty(), text }
}

/// Returns how many programs, and tests in each, run at a time.
fn at_a_time(processors: usize, memory: u64) -> usize {
    let with_room = usize::try_from(memory / EACH).unwrap_or(usize::MAX);
    processors.min(AT_A_TIME_MAX).min(with_room).max(1)
}

/// Checks that there is room for tests.
fn has_room(left: ResourceUsage) -> Result<()> {
    let folder = std::env::temp_dir();
    let kinds = [
        ("memory".to_owned(), left.memory, NEEDED.memory, "stop other programs"),
        (
            format!("the disk of {}", folder.display()),
            left.disk,
            NEEDED.disk,
            "set TMPDIR to a folder with more space",
        ),
    ];
    for (name, left, needed, next) in kinds {
        if left < needed {
            bail!("{} MiB of {name} are free, and the tests need {} MiB; {next}", left >> 20, needed >> 20);
        }
    }
    Ok(())
}

/// Reports the decoy like any test: whether it passed, and the lines that say so.
fn unseen(found: &[String], not_apart: Option<&str>) -> (bool, String) {
    let mut text = "     Running decoy of xtask\n".to_owned();
    for line in found {
        text += &format!("a test touched the machine: {line}\n");
    }
    // Places that this run cannot use are reported as skipped, like a test with a missing
    // requirement.
    if let Some(why) = not_apart {
        text += &format!("skipped: no decoy in /etc, /run and /dev/shm: {why}\n");
    }
    let (word, failed) = if found.is_empty() { ("ok", 0) } else { ("FAILED", 1) };
    text += &format!("test result: {word}. {} passed; {failed} failed; 0 ignored;\n", 1 - failed);
    if failed > 0 {
        text += "error: test failed: decoy of xtask: see above\n";
    }
    (found.is_empty(), text)
}

/// Returns two lines that say what the programs took, and which of them took most.
fn most(takers: &[(ResourceUsage, String)], all: ResourceUsage) -> String {
    let named = |of: fn(&ResourceUsage) -> u64| {
        let mut sorted: Vec<_> = takers.iter().map(|(taken, name)| (of(taken) >> 20, name)).collect();
        sorted.sort_unstable_by(|one, other| other.cmp(one));
        let named: Vec<_> = sorted.iter().take(5).map(|(mib, name)| format!("{name} {mib}")).collect();
        named.join(", ")
    };
    format!(
        "memory: {} MiB at most at a time; the most: {}\ndisk: {} MiB at most at a time; the most: {}",
        all.memory >> 20,
        named(|taken| taken.memory),
        all.disk >> 20,
        named(|taken| taken.disk)
    )
}

/// Returns one line that says which programs took longest.
fn longest(mut times: Vec<(Duration, String)>, at_a_time: usize, whole: Duration) -> String {
    const NAMED: usize = 12;
    times.sort_unstable_by(|one, other| other.cmp(one));
    let named: Vec<_> =
        times.iter().take(NAMED).map(|(time, name)| format!("{name} {:.0}", time.as_secs_f64())).collect();
    let (count, whole) = (times.len(), whole.as_secs_f64());
    format!("{count} test programs, {at_a_time} at a time: {whole:.0} s; the longest: {}", named.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is printed for a program that ended this way.
    fn printed(printed: &str, is_success: bool, how: &str) -> (bool, String) {
        printed_with(Vec::new(), printed, is_success, how)
    }

    /// Returns the same for a program that left these files.
    fn printed_with(left: Vec<String>, printed: &str, is_success: bool, how: &str) -> (bool, String) {
        let program = Program::called(&["deps/some_lane-0123abcd".into()]).unwrap();
        let (time, how) = (Duration::from_millis(1500), how.to_owned());
        let report = report(
            &program,
            &FinishedProgram {
                printed: printed.into(),
                time,
                is_success,
                how,
                taken: ResourceUsage::default(),
                left,
            },
        );
        (report.is_well, String::from_utf8(report.text).unwrap())
    }

    #[test]
    fn fewer_run_where_there_is_little_memory() {
        assert_eq!([1, 2, 8].map(|processors| at_a_time(processors, 64 << 30)), [1, 2, 4]);
        assert_eq!([1, 2, 4, 64].map(|gib| at_a_time(8, gib << 30)), [1, 1, 2, 4]);
    }

    #[test]
    fn what_failed_is_named_and_counted_once() {
        let start = "     Running some_lane of xtask (1.5 s)\n";
        let passed = "test result: ok. 3 passed\n";
        assert_eq!(printed(passed, true, "exit status: 0"), (true, format!("{start}{passed}")));
        let failed = "test result: FAILED. 2 passed; 1 failed\n";
        let named = "error: test failed: some_lane of xtask: exit status: 101";
        let report = format!("{start}{failed}{named}\n");
        assert_eq!(printed(failed, false, "exit status: 101"), (false, report));
        // Either no result, or a result that is not the last word: the documentation tests print
        // many.
        for told in ["running 3 tests\ntest one ... ", passed] {
            let line = if told == passed { told.to_owned() } else { format!("{told}\n") };
            let report = format!("{start}{line}{named}{UNTOLD}\n");
            assert_eq!(printed(told, false, "exit status: 101"), (false, report));
        }
        let (is_well, _) = printed("running 3 tests\n", true, "exit status: 0");
        assert!(!is_well, "a test has left the program");
        let named = "some_lane of xtask: files left in TMPDIR: a, b";
        let with_files = |told, is_success| {
            printed_with(vec!["a".to_owned(), "b".to_owned()], told, is_success, "exit status: 101")
        };
        let report = format!("{start}{passed}error: test failed: {named}{UNTOLD}\n");
        assert_eq!(with_files(passed, true), (false, report));
        let (is_well, text) = with_files(failed, false);
        assert!(!is_well && text.ends_with(&format!("exit status: 101\n{named}\n")), "{text}");
    }

    #[test]
    fn a_decoy_that_was_seen_fails_the_run_and_one_that_cannot_be_is_skipped() {
        let passed = "     Running decoy of xtask\ntest result: ok. 1 passed; 0 failed; 0 ignored;\n";
        assert_eq!(unseen(&[], None), (true, passed.to_owned()));
        let (is_unseen, text) = unseen(&[], Some("not root"));
        assert!(is_unseen && text.contains("\nskipped: no decoy in /etc, /run and /dev/shm: not root\n"));
        let (is_unseen, text) = unseen(&["/etc/bcached/config.toml: opened".to_owned()], None);
        assert!(!is_unseen && text.contains("0 passed; 1 failed;") && text.contains("config.toml: opened"));
        assert!(!text.contains(UNTOLD), "it is counted by its result");
    }

    #[test]
    fn too_little_room_is_told_before_anything_runs() {
        has_room(NEEDED).unwrap();
        let why = has_room(ResourceUsage { memory: 1 << 30, ..NEEDED }).unwrap_err().to_string();
        assert_eq!(why, "1024 MiB of memory are free, and the tests need 2048 MiB; stop other programs");
        let why = has_room(ResourceUsage { disk: 1 << 30, ..NEEDED }).unwrap_err().to_string();
        assert!(why.ends_with("set TMPDIR to a folder with more space"), "{why}");
    }

    #[test]
    fn the_longest_are_named_first() {
        let times =
            [(1, "short"), (30, "long")].map(|(time, name)| (Duration::from_secs(time), name.to_owned()));
        let told = longest(times.to_vec(), 2, Duration::from_secs(31));
        assert_eq!(told, "2 test programs, 2 at a time: 31 s; the longest: long 30, short 1");
    }
}
