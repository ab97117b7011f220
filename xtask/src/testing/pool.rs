//! Programs that run several at a time, what each prints kept until it ends.
//!
//! Each is the head of a process group of its own, so that what it has started can be ended with it: when it takes too long, when it has
//! died itself, and when this program is told to stop.

use super::program::Program;
use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process_group};
use std::future::poll_fn;
use std::io::{Read as _, Seek as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

/// How often it is looked whether a program has ended: there are a hundred of them, most take longer than a second.
const LOOK: Duration = Duration::from_millis(20);
/// The exit status of a program that Ctrl-C ended, as a shell has it.
const INTERRUPTED: i32 = 130;

/// What the pool keeps to.
pub struct Limits {
    /// How many programs run at a time.
    pub at_a_time: usize,
    /// How long one may take.
    pub time: Duration,
}

/// A program that has ended.
pub struct Ended {
    /// What it printed, errors among it.
    pub printed: Vec<u8>,
    /// How long it took.
    pub time: Duration,
    /// Whether its status is that of success.
    pub is_success: bool,
    /// In words: its status, or what came before there was one.
    pub how: String,
}

/// The heads of groups that run. Whoever starts one holds the lock, so none is missed.
static RUNNING: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// Runs `programs` in their order and tells of each when it ends.
///
/// # Errors
/// What `tell` cannot do. What becomes of a program is no error.
pub fn run(
    programs: &[Program],
    limits: &Limits,
    mut tell: impl FnMut(&Program, Ended) -> Result<()>,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let (sender, ended) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..limits.at_a_time {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let ended = one(program, limits.time);
                    if sender.send((program, ended)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        // Where that fails nobody listens any more, and the others are not begun.
        ended.into_iter().try_for_each(|(program, ended)| tell(program, ended))
    })
}

/// Runs one of them.
fn one(program: &Program, limit: Duration) -> Ended {
    let began = Instant::now();
    let mut printed = Vec::new();
    let status = kept(program, limit, &mut printed);
    let is_success = status.as_ref().is_ok_and(|status| status.is_some_and(|status| status.success()));
    let how = match status {
        Ok(Some(status)) => status.to_string(),
        Ok(None) => format!("stopped after {} s", limit.as_secs()),
        Err(error) => format!("{error:#}"),
    };
    Ended { printed, time: began.elapsed(), is_success, how }
}

/// Its status, if it had one before its time was over, and in `printed` what it printed.
fn kept(program: &Program, limit: Duration, printed: &mut Vec<u8>) -> Result<Option<ExitStatus>> {
    // No pipe: what a program leaves running would hold it open.
    let mut output = tempfile::tempfile().context("a file for what it prints")?;
    let mut command = program.command();
    command.stdout(output.try_clone()?).stderr(output.try_clone()?).process_group(0);
    let mut running = RUNNING.lock().expect("no holder panics");
    let mut child = command.spawn().context("it does not start")?;
    let group = Pid::from_child(&child);
    running.push(group);
    drop(running);
    let status = waited_for(&mut child, limit)?;
    if !status.is_some_and(|status| status.success()) {
        // Most often nothing is left.
        let _nobody_is_there = kill_process_group(group, Signal::KILL);
        child.wait()?;
    }
    RUNNING.lock().expect("no holder panics").retain(|other| *other != group);
    output.rewind()?;
    output.read_to_end(printed)?;
    Ok(status)
}

fn waited_for(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let began = Instant::now();
    loop {
        let status = child.try_wait().context("wait")?;
        if status.is_some() || began.elapsed() >= limit {
            return Ok(status);
        }
        thread::sleep(LOOK);
    }
}

/// Has what runs end when this program is told to: the terminal's Ctrl-C does not reach other groups.
///
/// # Errors
/// Signals that cannot be waited for.
pub fn end_with_this_one() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let told = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
    let entered = runtime.enter();
    let mut signals = told.into_iter().map(signal).collect::<Result<Vec<_>, _>>().context("signals")?;
    drop(entered);
    thread::spawn(move || {
        runtime.block_on(poll_fn(|context| {
            let is_told = signals.iter_mut().any(|signal| signal.poll_recv(context).is_ready());
            if is_told { Poll::Ready(()) } else { Poll::Pending }
        }));
        // Held to the end: nothing is started any more.
        let running = RUNNING.lock().expect("no holder panics");
        for group in running.iter() {
            let _it_has_just_gone = kill_process_group(*group, Signal::KILL);
        }
        std::process::exit(INTERRUPTED);
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// How each of these shell scripts ended, by its text.
    fn ended(scripts: &[&str], limit: Duration) -> BTreeMap<String, Ended> {
        let program = |script: &&str| {
            let mut program = Program::called(&["sh".into(), "-c".into(), script.into()]).unwrap();
            (*script).clone_into(&mut program.name);
            program
        };
        let programs: Vec<_> = scripts.iter().map(program).collect();
        let mut all = BTreeMap::new();
        run(&programs, &Limits { at_a_time: 2, time: limit }, |program, ended| {
            all.insert(program.name.clone(), ended);
            Ok(())
        })
        .unwrap();
        all
    }

    #[test]
    fn each_ends_in_its_own_way_and_the_others_go_on() {
        let scripts = ["kill -ABRT $$", "echo one; echo two >&2", "exit 3", "echo last"];
        let all = ended(&scripts, Duration::from_secs(600));
        let [killed, well, failed, last] = scripts.map(|script| &all[script]);
        assert!(!killed.is_success && killed.how.starts_with("signal: 6"), "{}", killed.how);
        assert!(well.is_success);
        assert_eq!(well.printed, b"one\ntwo\n");
        assert_eq!((failed.is_success, failed.how.as_str()), (false, "exit status: 3"));
        assert_eq!(last.printed, b"last\n");
    }

    #[test]
    fn what_hangs_is_stopped_with_all_that_it_has_started() {
        // It says who waits with it, and that one would go on alone.
        let script = "sleep 600 & echo $!; wait";
        let all = ended(&[script], Duration::from_secs(1));
        let hung = &all[script];
        assert!(!hung.is_success);
        assert_eq!(hung.how, "stopped after 1 s");
        let other = String::from_utf8_lossy(&hung.printed).trim().to_owned();
        let state = || std::fs::read_to_string(format!("/proc/{other}/stat"));
        // It may be a while until the system has taken it away.
        while state().is_ok_and(|state| !state.contains(") Z ")) {
            thread::sleep(LOOK);
        }
    }
}
