//! Runs programs, several at a time, and keeps the output of each until it ends.
//!
//! Each is the leader of a process group of its own, so that everything it has started can be ended
//! with it: when it takes too long, when it has died itself, and when this program is told to stop.

use super::program::Program;
use super::usage::{self, ProgramFolders, ResourceUsage};
use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process_group};
use std::ffi::OsString;
use std::future::poll_fn;
use std::io::{Read as _, Seek as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

/// Polling interval for the end of a program. There are a hundred programs, and most take longer
/// than a second.
const LOOK: Duration = Duration::from_millis(20);
/// What a test prints if the machine has failed, rather than what was tested on it.
const FROZEN: &str = "the guest stands still";
/// Exit status of a program that Ctrl-C ended, as in a shell.
const INTERRUPTED: i32 = 130;

/// The limits of the pool.
pub struct PoolLimits<'a> {
    /// Number of programs that run at a time.
    pub at_a_time: usize,
    /// Time limit of a program.
    pub time: Duration,
    /// Folders, one of which is the `TMPDIR` of each program.
    pub folders: &'a ProgramFolders,
    /// Variables for the environment of each program.
    pub variables: &'a [(&'static str, OsString)],
}

/// A program that has ended.
pub struct FinishedProgram {
    /// Its output, including errors.
    pub printed: Vec<u8>,
    /// How long it took.
    pub time: Duration,
    /// Whether its exit status is success.
    pub is_success: bool,
    /// Its exit status in words, or what happened before there was one.
    pub how: String,
    /// The most that it took at any time.
    pub taken: ResourceUsage,
    /// The files in its `TMPDIR` at its end.
    pub left: Vec<String>,
}

/// A running program.
struct RunningProgram {
    /// The leader of its process group.
    group: Pid,
    name: String,
    /// Its `TMPDIR`.
    folder: PathBuf,
}

/// The lock is held while a program starts, so that none is missed.
static RUNNING: Mutex<Vec<RunningProgram>> = Mutex::new(Vec::new());

/// Returns the running groups and their folders.
pub fn groups() -> Vec<(Pid, PathBuf)> {
    let running = RUNNING.lock().expect("no thread panics while it holds the lock");
    running.iter().map(|one| (one.group, one.folder.clone())).collect()
}

/// Returns the names of the running programs.
pub fn running() -> Vec<String> {
    RUNNING
        .lock()
        .expect("no thread panics while it holds the lock")
        .iter()
        .map(|one| one.name.clone())
        .collect()
}

/// Runs `programs` in their order, and calls `tell` for each when it ends.
///
/// # Errors
/// An error of `tell`. A failed program is not an error.
pub fn run(
    programs: &[Program],
    limits: &PoolLimits<'_>,
    mut tell: impl FnMut(&Program, FinishedProgram) -> Result<()>,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let (sender, ended) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..limits.at_a_time {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let ended = one(program, limits);
                    if sender.send((program, ended)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        // If `tell` fails, nothing receives the results any more, and the remaining programs are
        // not started.
        ended.into_iter().try_for_each(|(program, ended)| tell(program, ended))
    })
}

/// Runs one program, and runs it again if one of its guests froze.
fn one(program: &Program, limits: &PoolLimits<'_>) -> FinishedProgram {
    let ended = attempt(program, limits);
    if ended.is_success || !has_frozen(&ended.printed) {
        return ended;
    }
    let mut again = attempt(program, limits);
    let words = format!("run once more after {} s: {FROZEN}\n", ended.time.as_secs());
    again.printed.splice(0..0, words.into_bytes());
    again.time += ended.time;
    again
}

fn has_frozen(printed: &[u8]) -> bool {
    printed.windows(FROZEN.len()).any(|words| words == FROZEN.as_bytes())
}

fn attempt(program: &Program, limits: &PoolLimits<'_>) -> FinishedProgram {
    let began = Instant::now();
    let mut ended = FinishedProgram {
        printed: Vec::new(),
        time: Duration::ZERO,
        is_success: false,
        how: String::new(),
        taken: ResourceUsage::default(),
        left: Vec::new(),
    };
    ended.how = match kept(program, limits, &mut ended) {
        Ok(Some(status)) => {
            ended.is_success = status.success();
            // Why it was killed, if it took too much.
            if ended.how.is_empty() { status.to_string() } else { ended.how }
        }
        Ok(None) => format!("stopped after {} s", limits.time.as_secs()),
        Err(error) => format!("{error:#}"),
    };
    ended.time = began.elapsed();
    ended
}

/// Returns the exit status, if the program had one before its time limit. Fills `ended` with its
/// output and what it took.
fn kept(
    program: &Program,
    limits: &PoolLimits<'_>,
    ended: &mut FinishedProgram,
) -> Result<Option<ExitStatus>> {
    static STARTED: AtomicUsize = AtomicUsize::new(0);
    // Not a pipe: whatever a program leaves running would hold it open.
    let mut output = tempfile::tempfile().context("cannot create a file for its output")?;
    let folder = limits.folders.of(&STARTED.fetch_add(1, Ordering::Relaxed).to_string());
    let folder = folder.context("cannot create a folder for its files")?;
    let mut command = program.command();
    command.envs(limits.variables.iter().map(|(name, value)| (name, value))).env("TMPDIR", &folder);
    command.stdout(output.try_clone()?).stderr(output.try_clone()?).process_group(0);
    let mut running = RUNNING.lock().expect("no thread panics while it holds the lock");
    let mut child = command.spawn().context("cannot start it")?;
    let group = Pid::from_child(&child);
    running.push(RunningProgram { group, name: program.name.clone(), folder: folder.clone() });
    drop(running);
    let status = waited_for(&mut child, limits.time)?;
    if !status.is_some_and(|status| status.success()) {
        // Usually nothing is left.
        let _nobody_is_there = kill_process_group(group, Signal::KILL);
        child.wait()?;
    }
    RUNNING.lock().expect("no thread panics while it holds the lock").retain(|other| other.group != group);
    let (taken, stopped) = usage::of(group);
    ended.taken = taken;
    ended.how = stopped.map_or_else(String::new, |why| format!("stopped: {why}"));
    let left = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    ended.left = left.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    // If the folder cannot be removed because something is mounted there, it is removed with the
    // parent folder, or is reported at the end.
    let _is_still_used = std::fs::remove_dir_all(&folder);
    output.rewind()?;
    output.read_to_end(&mut ended.printed)?;
    Ok(status)
}

fn waited_for(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let began = Instant::now();
    loop {
        let status = child.try_wait().context("cannot wait for it")?;
        if status.is_some() || began.elapsed() >= limit {
            return Ok(status);
        }
        thread::sleep(LOOK);
    }
}

/// Ends the running programs when this program is told to stop, because the terminal's Ctrl-C does
/// not reach other groups. Then calls `ends`.
///
/// # Errors
/// Signals that cannot be waited for.
pub fn end_with_this_one(ends: impl FnOnce() + Send + 'static) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let told = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
    let entered = runtime.enter();
    let mut signals =
        told.into_iter().map(signal).collect::<Result<Vec<_>, _>>().context("cannot wait for signals")?;
    drop(entered);
    thread::spawn(move || {
        runtime.block_on(poll_fn(|context| {
            let is_told = signals.iter_mut().any(|signal| signal.poll_recv(context).is_ready());
            if is_told { Poll::Ready(()) } else { Poll::Pending }
        }));
        // The lock is held until the end, so that nothing more is started.
        let running = RUNNING.lock().expect("no thread panics while it holds the lock");
        for one in running.iter() {
            let _it_has_just_gone = kill_process_group(one.group, Signal::KILL);
        }
        ends();
        std::process::exit(INTERRUPTED);
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Runs these shell scripts, and returns how each ended, by its text.
    fn ended(scripts: &[&str], limit: Duration) -> BTreeMap<String, FinishedProgram> {
        let program = |script: &&str| {
            let mut program = Program::called(&["sh".into(), "-c".into(), script.into()]).unwrap();
            (*script).clone_into(&mut program.name);
            program
        };
        let programs: Vec<_> = scripts.iter().map(program).collect();
        let mut all = BTreeMap::new();
        let folders = ProgramFolders::new().unwrap();
        let variables = [("DECOY", "quack".into())];
        let limits = PoolLimits { at_a_time: 2, time: limit, folders: &folders, variables: &variables };
        run(&programs, &limits, |program, ended| {
            all.insert(program.name.clone(), ended);
            Ok(())
        })
        .unwrap();
        all
    }

    #[test]
    fn each_ends_in_its_own_way_and_the_others_go_on() {
        let scripts = [
            "kill -ABRT $$",
            "echo one; echo two >&2",
            "exit 3",
            "echo last",
            "test $DECOY = quack && : > $TMPDIR/kept",
        ];
        let all = ended(&scripts, Duration::from_secs(600));
        let [killed, well, failed, last, leaves] = scripts.map(|script| &all[script]);
        assert!(!killed.is_success && killed.how.starts_with("signal: 6"), "{}", killed.how);
        assert!(well.is_success);
        assert_eq!(well.printed, b"one\ntwo\n");
        assert_eq!((failed.is_success, failed.how.as_str()), (false, "exit status: 3"));
        assert_eq!(last.printed, b"last\n");
        assert_eq!((leaves.is_success, leaves.left.as_slice()), (true, &["kept".to_owned()][..]));
        assert_eq!(last.left, [""; 0]);
    }

    #[test]
    fn what_hangs_is_stopped_with_all_that_it_has_started() {
        // It prints the process that it waits for, which would otherwise continue alone.
        let script = "sleep 600 & echo $!; wait";
        let all = ended(&[script], Duration::from_secs(1));
        let hung = &all[script];
        assert!(!hung.is_success);
        assert_eq!(hung.how, "stopped after 1 s");
        let other = String::from_utf8_lossy(&hung.printed).trim().to_owned();
        let state = || std::fs::read_to_string(format!("/proc/{other}/stat"));
        // It may take a while until the system has removed it.
        while state().is_ok_and(|state| !state.contains(") Z ")) {
            thread::sleep(LOOK);
        }
    }

    /// Proves that a program is run again if its machine froze, since that says nothing about what
    /// is tested on it. Only a second failure counts.
    #[test]
    fn who_had_a_guest_that_stood_still_is_run_once_more() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let state = state.display();
        let once = format!("test -e {state} && exit 0; : > {state}; echo {FROZEN}; exit 1");
        let always = format!("echo {FROZEN}; exit 1");
        let otherwise = "echo it failed; exit 1";
        let all = ended(&[&once, &always, otherwise], Duration::from_secs(600));
        let printed = |script: &str| String::from_utf8_lossy(&all[script].printed).into_owned();
        assert!(all[once.as_str()].is_success);
        assert_eq!(printed(&once), format!("run once more after 0 s: {FROZEN}\n"));
        assert!(!all[always.as_str()].is_success);
        assert_eq!(printed(&always), format!("run once more after 0 s: {FROZEN}\n{FROZEN}\n"));
        assert_eq!((all[otherwise].is_success, printed(otherwise)), (false, "it failed\n".to_owned()));
    }
}
