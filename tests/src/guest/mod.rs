//! A job for a real kernel: a shell script run as root in a guest, with image files as its disks.
//!
//! Two machines can run one ([`crate::uml`], [`crate::vm`]); both give back what the job printed and what the kernel logged, and both can die
//! at a marker the job prints: the guest's processes are killed, and what its kernel had not yet written is lost, as in a crash.
//!
//! The console carries both streams. The guest's init prefixes each line of the kernel's log with `LOG_PREFIX`, and brackets the job with
//! `JOB_EXIT`; everything else is the job's output. One line is one write to the terminal, so lines do not mix.

mod console;
mod kernel_log;

use std::error::Error as _;
use std::fmt;
use std::path::Path;
use std::time::Duration;

pub(crate) use console::Console;
pub use kernel_log::KernelLog;

/// The limit of a job that is expected to end. It is many times what the longest takes on an idle machine: a busy
/// machine must not meet it, and a guest that hangs is seen all the same.
pub const LIMIT: Duration = Duration::from_secs(1200);
/// Starts a line of the kernel's log on the console.
const LOG_PREFIX: &str = "kernel> ";
/// The line before the job's own.
pub(crate) const JOB_BEGINS: &str = "job begins";
/// What a guest says now and then, whatever its job waits for.
pub(crate) const HEART_BEATS: &str = "bcached-tests: the guest lives";
/// How often.
const HEART_SECONDS: u32 = 10;
/// Starts the line with the job's exit status, after which the guest powers off.
const JOB_EXIT: &str = "job exit: ";
/// Functions that every job may call.
const FUNCTIONS: &str = include_str!("functions.sh");

/// What a guest is asked to do.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// Image files; the n-th is the guest's [`Machine::device`]`(n)`.
    pub images: &'a [&'a Path],
    /// POSIX shell, run under `set -e` with the functions of `functions.sh` and `$verified_io`, the guest program.
    pub script: &'a str,
    /// Kill the guest as soon as it has printed this line; `None`: it runs to its end.
    pub crash_at: Option<&'a str>,
    /// The guest is killed and the run fails when it takes longer.
    pub limit: Duration,
}

/// What came of a job.
#[derive(Clone, Debug)]
pub struct Report {
    /// What the job printed, line by line.
    pub output: Vec<String>,
    /// What the kernel logged from the moment its modules were in.
    pub kernel_log: KernelLog,
}

/// Everything that was said, for a failure.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the job:\n{}\nthe kernel:\n{}", self.output.join("\n"), self.kernel_log.0.join("\n"))
    }
}

impl Report {
    /// The highest N of the lines `flushed N` that the guest program printed; 0 without one.
    #[must_use]
    pub fn last_flush(&self) -> u64 {
        let numbers = self.output.iter().filter_map(|line| line.strip_prefix("flushed ")?.parse().ok());
        numbers.max().unwrap_or(0)
    }

    /// A kernel that says something new has met something wrong.
    ///
    /// # Errors
    /// The lines that `tests/kernel-log.allow` does not hold.
    pub fn expect_allowed_log(&self) -> Result<(), GuestError> {
        self.expect_log(&[])
    }

    /// The same, where `also` may appear as well: patterns of whole lines.
    ///
    /// # Errors
    /// The lines that neither the file nor `also` holds.
    pub fn expect_log(&self, also: &[&str]) -> Result<(), GuestError> {
        let unexpected = self.kernel_log.unexpected(also);
        if unexpected.is_empty() {
            return Ok(());
        }
        Err(GuestError::Setup(format!("not in tests/kernel-log.allow:\n{}\n{self}", unexpected.join("\n"))))
    }

    /// The rest of the first line that starts with `prefix`.
    #[must_use]
    pub fn line_after(&self, prefix: &str) -> Option<&str> {
        self.output.iter().find_map(|line| line.strip_prefix(prefix))
    }
}

/// Why a job did not come to its expected end.
#[derive(thiserror::Error)]
pub enum GuestError {
    /// Something on the host.
    #[error("{action}")]
    Host {
        /// What was being done.
        action: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The guest's machine could not be put together.
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
    /// The guest ended before the job did, or before the marker came.
    #[error("the guest ended too early ({machine}), complaining:\n{complaints}\nit said:\n{transcript}")]
    Ended {
        /// How its process ended.
        machine: String,
        /// What that wrote to its standard error.
        complaints: String,
        /// Everything on the console.
        transcript: String,
    },
    /// Not even its heart beats any more: the machine has failed, and not what it runs. It was killed. (`cargo xtask test` knows these
    /// words, and runs the test once more.)
    #[error("the guest stands still: nothing in it has run for {silent:?}; it said:\n{transcript}")]
    Frozen {
        /// For how long.
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

/// What a failing test prints: the transcript as lines, not as one escaped string.
impl fmt::Debug for GuestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")?;
        self.source().map_or(Ok(()), |source| write!(f, ": {source}"))
    }
}

impl GuestError {
    /// For `map_err`: a failure on the host while doing `action`.
    pub(crate) fn host(action: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Host { action: action.into(), source }
    }
}

/// Something that runs jobs on a real kernel.
pub trait Machine: Sync {
    /// For messages: which kernel.
    fn name(&self) -> &'static str;

    /// The guest's name of the job's n-th image.
    fn device(&self, index: usize) -> String;

    /// Boots, runs the job, and waits for the end (or the crash). Runs of several threads do not meet.
    ///
    /// # Errors
    /// [`GuestError`]; the guest is gone in every case.
    fn run(&self, job: &Job<'_>) -> Result<Report, GuestError>;
}

/// The job as the guest's init runs it: the functions, the guest program, then the script, all under `set -e`.
pub(crate) fn job_script(script: &str, verified_io: &str) -> String {
    format!("set -e\nverified_io={verified_io}\n{FUNCTIONS}\n{script}\n")
}

/// The part of a guest's init that both machines share: the log stream, the job, the end. What the kernel said while it booted is left out.
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
