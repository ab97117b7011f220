//! A job for a real kernel: a shell script run as root in a guest, with image files as its disks.
//!
//! Two kinds of machine can run one ([`crate::uml`], [`crate::vm`]). Both return what the job
//! printed and what the kernel logged. Both can be killed at a marker that the job prints: what the
//! guest's kernel had not yet written is then lost, as in a crash.
//!
//! The console carries both streams. The guest's init prefixes each line of the kernel's log with
//! `LOG_PREFIX`, and marks the end of the job with `JOB_EXIT`; everything else is the job's output.
//! Each line is a single write to the terminal, so lines do not mix.

mod console;
mod kernel_log;

use std::error::Error as _;
use std::fmt;
use std::path::Path;
use std::time::Duration;

pub(crate) use console::Console;
pub use kernel_log::KernelLog;

/// The limit of a job that is expected to end. It is many times what the longest job takes on an
/// idle machine: a busy machine must not reach it, and a guest that hangs is still detected.
pub const LIMIT: Duration = Duration::from_secs(1200);
/// Prefix of a line of the kernel's log on the console.
const LOG_PREFIX: &str = "kernel> ";
/// The line printed before the job starts.
pub(crate) const JOB_BEGINS: &str = "job begins";
/// The heartbeat: a line that the guest prints regularly, whatever its job waits for.
pub(crate) const HEART_BEATS: &str = "bcached-tests: the guest lives";
/// The interval between two heartbeats, in seconds.
const HEART_SECONDS: u32 = 10;
/// Prefix of the line with the job's exit status, after which the guest powers off.
const JOB_EXIT: &str = "job exit: ";
/// Shell functions that every job may call.
const FUNCTIONS: &str = include_str!("functions.sh");

/// What a guest shall do.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// Image files; the n-th is the guest's [`Machine::device`]`(n)`.
    pub images: &'a [&'a Path],
    /// A POSIX shell script, run under `set -e` with the functions of `functions.sh` and the path
    /// of the guest program in `$verified_io`.
    pub script: &'a str,
    /// The guest is killed as soon as it has printed this line. With `None`, it runs to its end.
    pub crash_at: Option<&'a str>,
    /// Time limit, after which the guest is killed and the run fails.
    pub limit: Duration,
}

/// The output of a job.
#[derive(Clone, Debug)]
pub struct Report {
    /// What the job printed, line by line.
    pub output: Vec<String>,
    /// What the kernel logged after its modules were loaded.
    pub kernel_log: KernelLog,
}

/// Formats the whole output, for a failure message.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the job:\n{}\nthe kernel:\n{}", self.output.join("\n"), self.kernel_log.0.join("\n"))
    }
}

impl Report {
    /// Returns the highest N of the lines `flushed N` that the guest program printed, or 0 without
    /// one.
    #[must_use]
    pub fn last_flush(&self) -> u64 {
        let numbers = self.output.iter().filter_map(|line| line.strip_prefix("flushed ")?.parse().ok());
        numbers.max().unwrap_or(0)
    }

    /// Checks that the kernel logged nothing unexpected. A kernel that logs something new has met
    /// something wrong.
    ///
    /// # Errors
    /// The lines that `tests/kernel-log.allow` does not contain.
    pub fn expect_allowed_log(&self) -> Result<(), GuestError> {
        self.expect_log(&[])
    }

    /// Like [`expect_allowed_log`](Self::expect_allowed_log), but also allows lines that match
    /// `also`: patterns of whole lines.
    ///
    /// # Errors
    /// The lines that match neither the file nor `also`.
    pub fn expect_log(&self, also: &[&str]) -> Result<(), GuestError> {
        let unexpected = self.kernel_log.unexpected(also);
        if unexpected.is_empty() {
            return Ok(());
        }
        Err(GuestError::Setup(format!("not in tests/kernel-log.allow:\n{}\n{self}", unexpected.join("\n"))))
    }

    /// Returns the rest of the first line that starts with `prefix`.
    #[must_use]
    pub fn line_after(&self, prefix: &str) -> Option<&str> {
        self.output.iter().find_map(|line| line.strip_prefix(prefix))
    }
}

/// Why a job did not reach its expected end.
#[derive(thiserror::Error)]
pub enum GuestError {
    /// An operation on the host failed.
    #[error("{action}")]
    Host {
        /// The operation.
        action: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The guest's machine could not be set up.
    #[error("{0}")]
    Setup(String),
    /// The job ended with a status other than 0.
    #[error("the job failed with status {status}; the guest said:\n{transcript}")]
    Job {
        /// Its exit status, as the guest printed it.
        status: String,
        /// Everything on the console.
        transcript: String,
    },
    /// The guest ended before the job did, or before the marker appeared.
    #[error("the guest ended too early ({machine}), complaining:\n{complaints}\nit said:\n{transcript}")]
    Ended {
        /// How the machine's process ended.
        machine: String,
        /// The standard error of that process.
        complaints: String,
        /// Everything on the console.
        transcript: String,
    },
    /// Even the heartbeat has stopped: the machine has failed, not what runs in it. It was killed.
    /// (`cargo xtask test` recognises this message and runs the test once more.)
    #[error("the guest stands still: nothing in it has run for {silent:?}; it said:\n{transcript}")]
    Frozen {
        /// How long it was silent.
        silent: Duration,
        /// Everything on the console.
        transcript: String,
    },
    /// The limit was reached; the guest was killed.
    #[error("the guest took longer than {limit:?}; it said:\n{transcript}")]
    Limit {
        /// The limit.
        limit: Duration,
        /// Everything on the console.
        transcript: String,
    },
}

/// A failing test prints the transcript as lines, not as one escaped string.
impl fmt::Debug for GuestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")?;
        self.source().map_or(Ok(()), |source| write!(f, ": {source}"))
    }
}

impl GuestError {
    /// Returns a closure for `map_err` that reports a failure on the host during `action`.
    pub(crate) fn host(action: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Host { action: action.into(), source }
    }
}

/// A machine that runs jobs on a real kernel.
pub trait Machine: Sync {
    /// The name of the kernel, for messages.
    fn name(&self) -> &'static str;

    /// The device name of the job's n-th image in the guest.
    fn device(&self, index: usize) -> String;

    /// Boots, runs the job, and waits for the end or the crash. Concurrent runs of several threads
    /// do not interfere.
    ///
    /// # Errors
    /// [`GuestError`]; the guest is gone in every case.
    fn run(&self, job: &Job<'_>) -> Result<Report, GuestError>;
}

/// Returns the job as the guest's init runs it: the functions, the guest program, then the script,
/// all under `set -e`.
pub(crate) fn job_script(script: &str, verified_io: &str) -> String {
    format!("set -e\nverified_io={verified_io}\n{FUNCTIONS}\n{script}\n")
}

/// Returns the part of a guest's init that both machines share: the log stream, the job, the end.
/// The kernel's log before that point, from booting, is left out.
pub(crate) fn init_body(job_path: &str) -> String {
    format!(
        r#"start_of_log="bcached-tests: start of log" end_of_log="bcached-tests: end of log" relayed=
relay() {{
	while IFS= read -r line; do
		case $line in
		*"$start_of_log"*) relayed=yes ;;
		*"$end_of_log"*) return ;;
		*) [ ! "$relayed" ] || echo "{LOG_PREFIX}$line" ;;
		esac
	done < /proc/kmsg
}}
echo "<6>$start_of_log" > /dev/kmsg
relay & relay=$!
heart() {{ while sleep {HEART_SECONDS}; do echo "{HEART_BEATS}"; done; }}
heart & heart=$!
echo "{JOB_BEGINS}"
sh {job_path} 2>&1; status=$?
# A failed job may leave a device that nobody serves: what waits for that is not waited for.
sync & [ $status != 0 ] || wait $!
echo "<6>$end_of_log" > /dev/kmsg
wait $relay
kill $heart
echo "{JOB_EXIT}$status"
"#
    )
}
