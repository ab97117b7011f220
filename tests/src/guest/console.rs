//! A guest's process and its console: reads its lines, enforces a time limit, and kills the guest
//! reliably.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::{GuestError, HEART_BEATS, JOB_BEGINS, JOB_EXIT, Job, KernelLog, LOG_PREFIX, Report};

/// Time limit from the end of a guest's job to the end of the guest.
const POWER_OFF_LIMIT: Duration = Duration::from_secs(60);

/// A guest whose job has begun counts as frozen if it prints nothing for this long. It prints a
/// heartbeat every few seconds.
const FROZEN: Duration = Duration::from_secs(300);

/// Time limit for a machine to end after its console has ended.
const END_LIMIT: Duration = Duration::from_secs(5);

/// How long the console of a killed guest may stay open.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);

/// A running guest. Dropping it kills all of its processes.
pub(crate) struct Console {
    child: Child,
    /// A path that only this guest's processes have in their command lines.
    token: PathBuf,
    lines: Receiver<String>,
    /// The machine's standard error.
    complaints: File,
    /// The time after which the guest counts as frozen, by default [`FROZEN`].
    frozen: Duration,
}

impl Console {
    /// Starts `command`, whose arguments contain `token`.
    pub(crate) fn start(mut command: Command, token: &Path) -> Result<Self, GuestError> {
        let complaints =
            tempfile::tempfile().map_err(GuestError::host("keep what the guest complains of"))?;
        let heard = complaints.try_clone().map_err(GuestError::host("keep what the guest complains of"))?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(heard);
        let mut child = command.spawn().map_err(GuestError::host("start the guest"))?;
        let mut output = BufReader::new(child.stdout.take().expect("piped above"));
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            let mut line = Vec::new();
            // A console may carry any byte; a read error ends it. A line without a line end was cut
            // off by the guest's death and is dropped: half a line could be mistaken for another
            // line.
            while matches!(output.read_until(b'\n', &mut line), Ok(count) if count > 0)
                && line.ends_with(b"\n")
            {
                let text = String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']).to_owned();
                line.clear();
                if sender.send(text).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, token: token.to_owned(), lines, complaints, frozen: FROZEN })
    }

    /// Follows the console until the end of the job or its crash marker, and makes sure that the
    /// guest is gone.
    pub(crate) fn follow(self, job: &Job<'_>) -> Result<Report, GuestError> {
        self.follow_aloud(job, &mut |_| {})
    }

    /// Like [`follow`](Self::follow), but passes each line to `hear` as it arrives.
    pub(crate) fn follow_aloud(
        mut self,
        job: &Job<'_>,
        hear: &mut dyn FnMut(&str),
    ) -> Result<Report, GuestError> {
        let deadline = Instant::now() + job.limit;
        let mut transcript = Vec::new();
        let mut has_begun = false;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = match self.lines.recv_timeout(if has_begun { left.min(self.frozen) } else { left }) {
                Ok(line) if line == HEART_BEATS => continue,
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) if left > self.frozen && has_begun => {
                    return Err(GuestError::Frozen {
                        silent: self.frozen,
                        transcript: transcript.join("\n"),
                    });
                }
                Err(RecvTimeoutError::Timeout) => {
                    return Err(GuestError::Limit { limit: job.limit, transcript: transcript.join("\n") });
                }
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended_early(&transcript)),
            };
            has_begun |= line == JOB_BEGINS;
            hear(&line);
            if job.crash_at == Some(line.as_str()) {
                self.kill();
                transcript.push(line);
                // Output between the marker and the guest's death counts: those requests were
                // acknowledged.
                while let Ok(line) = self.lines.recv_timeout(DRAIN_LIMIT) {
                    transcript.push(line);
                }
                return Ok(report(transcript));
            }
            if let Some(status) = line.strip_prefix(JOB_EXIT) {
                let status = status.to_owned();
                self.wait_power_off();
                return match (status.as_str(), job.crash_at) {
                    ("0", None) => Ok(report(transcript)),
                    ("0", Some(_)) => Err(self.ended_early(&transcript)),
                    _ => Err(GuestError::Job { status, transcript: transcript.join("\n") }),
                };
            }
            transcript.push(line);
        }
    }

    /// Reports that the guest ended too early, with its machine's standard error and exit status.
    fn ended_early(&mut self, transcript: &[String]) -> GuestError {
        let deadline = Instant::now() + END_LIMIT;
        let mut ended = self.child.try_wait();
        while matches!(ended, Ok(None)) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(10));
            ended = self.child.try_wait();
        }
        let machine = match ended {
            Ok(Some(status)) => status.to_string(),
            Ok(None) => "still running".to_owned(),
            Err(error) => error.to_string(),
        };
        let mut complaints = String::new();
        let heard = self.complaints.rewind().and_then(|()| self.complaints.read_to_string(&mut complaints));
        if let Err(error) = heard {
            complaints = error.to_string();
        }
        GuestError::Ended { transcript: transcript.join("\n"), machine, complaints }
    }

    /// Lets the guest power off by itself. A guest that does not is killed; its disks are already
    /// synced.
    fn wait_power_off(&mut self) {
        let deadline = Instant::now() + POWER_OFF_LIMIT;
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(10));
        }
        self.kill();
    }

    /// Kills every process of this guest with SIGKILL, repeatedly until none is left.
    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        while {
            let pids = processes_naming(&self.token);
            for pid in &pids {
                let _ = kill_process(*pid, Signal::KILL);
            }
            !pids.is_empty()
        } {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the processes whose command line contains `token`. User-Mode Linux leaves its parent's
/// session and process group, so its processes are found this way. The token is a fresh temporary
/// directory, so no other processes match.
fn processes_naming(token: &Path) -> Vec<Pid> {
    let token = token.as_os_str().as_encoded_bytes();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let named = entries.filter(|entry| {
        let command_line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        command_line.windows(token.len()).any(|window| window == token)
    });
    named.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)).collect()
}

/// Sorts a console's lines into job output and kernel log.
fn report(transcript: Vec<String>) -> Report {
    let said = transcript.into_iter().filter(|line| line != JOB_BEGINS);
    let (log, output): (Vec<_>, Vec<_>) = said.partition(|line| line.starts_with(LOG_PREFIX));
    let log = log.iter().map(|line| &line[LOG_PREFIX.len()..]);
    Report { output, kernel_log: KernelLog::from_lines(log) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the error that following a guest with this output ends in.
    fn follow(script: &str, limit: Duration) -> GuestError {
        let directory = tempfile::tempdir().expect("a folder");
        let mut command = Command::new("sh");
        command.args(["-c", script]).arg(directory.path());
        let mut console = Console::start(command, directory.path()).expect("starts");
        console.frozen = Duration::from_millis(500);
        let job = Job { images: &[], script: "", crash_at: None, limit };
        console.follow(&job).expect_err("it never ends")
    }

    /// A frozen guest and a job that exceeds its limit are reported as different errors. For a
    /// frozen guest, it is unknown whether its job would have ended.
    #[test]
    fn a_guest_that_stands_still_is_told_from_one_whose_job_takes_too_long() {
        let still = follow(&format!("echo {JOB_BEGINS}; sleep 600"), Duration::from_secs(600));
        assert!(matches!(still, GuestError::Frozen { .. }), "{still:?}");
        let beats = format!("echo {JOB_BEGINS}; while sleep 0.1; do echo {HEART_BEATS}; done");
        let late = follow(&beats, Duration::from_secs(2));
        assert!(matches!(late, GuestError::Limit { .. }), "{late:?}");
        // A machine that is slow to boot has no heartbeat yet.
        let boots = follow("sleep 600", Duration::from_secs(1));
        assert!(matches!(boots, GuestError::Limit { .. }), "{boots:?}");
    }
}
