//! Finds out by trial which kind of I/O this machine offers, and opens a driver on it.
//!
//! A ring must not only be granted but also work. Containers and hardened kernels refuse at setup
//! or at the first submission, or offer a kernel too old for what the driver relies on. The refusal
//! and its origin become the one line that the daemon logs.

use crate::disks::Disks;
use crate::driver::RingDriver;
use crate::ring::ClientInputs;
use crate::ring_client::RingHandle;
use crate::threads::ThreadDriver;
use crate::wakeup::{Bell, Signals};
use bcached_env::Driver;
use io_uring::{IoUring, Probe, opcode};
use std::ffi::OsString;
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// The environment variable that forces a backend: `uring` or `threads`. Anything else is an error.
pub const BACKEND_VARIABLE: &str = "BCACHED_IO";

/// Which backend to use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum BackendChoice {
    /// The value of [`BACKEND_VARIABLE`]; if it is not set, `io_uring` if it works, else threads.
    #[default]
    Environment,
    /// `io_uring` or nothing.
    Uring,
    /// Threads.
    Threads,
}

/// How to open a driver.
#[derive(Clone, Debug)]
pub struct DriverOptions {
    /// Which backend.
    pub choice: BackendChoice,
    /// Entries in the submission queue, a power of two: how much goes to the kernel at once. More
    /// operations than this can be in flight.
    pub entries: u32,
    /// Operations in the kernel at once, a power of two and at least `entries`; further ones queue
    /// in the driver.
    pub in_flight_max: u32,
    /// Threads of the thread backend.
    pub threads_max: usize,
    /// Helper threads beside a ring, for what it cannot do (discards on block devices, a few
    /// fallbacks).
    pub helpers_max: usize,
}

impl Default for DriverOptions {
    /// Sized for some thousand requests in flight; 16 threads saturate what blocking calls can get
    /// from one device.
    fn default() -> Self {
        Self {
            choice: BackendChoice::Environment,
            entries: 256,
            in_flight_max: 4096,
            threads_max: 16,
            helpers_max: 4,
        }
    }
}

/// An opened driver and its handles.
pub struct OpenedDriver {
    /// For the executor. It must stay on the thread that opened it.
    pub driver: Box<dyn Driver>,
    /// Adds and removes devices, also later and from other threads.
    pub disks: Disks,
    /// Wakes the engine, from any thread.
    pub bell: Bell,
    /// Sends ring clients, such as queues of ublk devices, to its ring, from any thread.
    pub ring_handle: RingHandle,
    /// How I/O is done, for the log.
    pub backend: Backend,
}

/// How I/O is done. `Display` is one line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Backend {
    /// `io_uring`.
    Uring {
        /// The driver decides when completions are collected (Linux 6.1), so they do not interrupt
        /// it.
        deferred: bool,
    },
    /// A pool of threads with blocking calls.
    Threads {
        /// Why not `io_uring`.
        reason: String,
    },
}

impl fmt::Display for Backend {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uring { deferred: true } => formatter.write_str("I/O through io_uring"),
            Self::Uring { deferred: false } => {
                formatter.write_str("I/O through io_uring, without deferred completions (needs Linux 6.1)")
            }
            Self::Threads { reason } => write!(formatter, "I/O through threads: {reason}"),
        }
    }
}

/// Why no driver could be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DriverError {
    /// [`BACKEND_VARIABLE`] has an invalid value.
    #[error("{BACKEND_VARIABLE} is {0:?}; it must be \"uring\" or \"threads\"")]
    UnknownChoice(OsString),
    /// `io_uring` was demanded and does not work.
    #[error("io_uring was requested but cannot be used: {0}; {BACKEND_VARIABLE}=threads does without it")]
    UringRefused(String),
    /// The system cannot provide a descriptor.
    #[error("cannot create an eventfd: {0}")]
    Eventfd(#[source] std::io::Error),
}

/// Opens a driver without disks.
///
/// # Errors
/// See [`DriverError`]. With [`BackendChoice::Environment`] and the variable unset, a refused
/// `io_uring` is not an error.
pub fn open_driver(options: &DriverOptions) -> Result<OpenedDriver, DriverError> {
    let signals = Signals::new().map_err(DriverError::Eventfd)?;
    let disks = Disks::default();
    let bell = Bell::of_engine(signals.clone());
    let ring_handle = RingHandle::new(signals.clone());
    let by_threads = |reason: String| {
        ring_handle.close("ublk needs io_uring, but I/O goes through threads here");
        let driver = ThreadDriver::new(options.threads_max, signals.clone(), disks.clone());
        (Box::new(driver) as Box<dyn Driver>, Backend::Threads { reason })
    };
    let by_ring = |(ring, inputs, deferred): (IoUring, ClientInputs, bool)| {
        let (signals, disks, ring_handle) = (signals.clone(), disks.clone(), ring_handle.clone());
        let driver = RingDriver::new((ring, inputs), options.helpers_max, signals, disks, ring_handle);
        (Box::new(driver) as Box<dyn Driver>, Backend::Uring { deferred })
    };
    let choice = match options.choice {
        BackendChoice::Environment => choice_of(std::env::var_os(BACKEND_VARIABLE))?,
        choice => choice,
    };
    let (driver, backend) = match choice {
        BackendChoice::Threads => by_threads("requested".into()),
        BackendChoice::Uring => by_ring(set_up(options, &signals).map_err(DriverError::UringRefused)?),
        BackendChoice::Environment => match set_up(options, &signals) {
            Ok(ring) => by_ring(ring),
            Err(reason) => by_threads(reason),
        },
    };
    Ok(OpenedDriver { driver, disks, bell, ring_handle, backend })
}

fn choice_of(value: Option<OsString>) -> Result<BackendChoice, DriverError> {
    match value {
        None => Ok(BackendChoice::Environment),
        Some(value) if value == "uring" => Ok(BackendChoice::Uring),
        Some(value) if value == "threads" => Ok(BackendChoice::Threads),
        Some(value) => Err(DriverError::UnknownChoice(value)),
    }
}

/// Returns a ring that is verified to work, the inputs for its ring clients, and whether its
/// completions are deferred; or the reason why there is none.
fn set_up(options: &DriverOptions, signals: &Arc<Signals>) -> Result<(IoUring, ClientInputs, bool), String> {
    let mut builder = IoUring::builder();
    builder.setup_clamp().setup_cqsize(options.in_flight_max.max(options.entries).max(2));
    let mut deferring = builder.clone();
    deferring.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    let entries = options.entries.max(1);
    let (mut ring, deferred) = match deferring.build(entries) {
        Ok(ring) => (ring, true),
        // The flags need Linux 6.0 and 6.1.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            let ring = builder.build(entries).map_err(|error| explain(&error))?;
            (ring, false)
        }
        Err(error) => return Err(explain(&error)),
    };
    check_features(&ring)?;
    check_round_trip(&mut ring)?;
    let inputs =
        ClientInputs::new(Arc::clone(signals)).map_err(|error| format!("cannot create epoll: {error}"))?;
    Ok((ring, inputs, deferred))
}

fn explain(error: &std::io::Error) -> String {
    let why = match error.raw_os_error() {
        Some(libc::ENOSYS) => "the kernel has no io_uring",
        Some(libc::EPERM | libc::EACCES) => {
            "io_uring is forbidden here (a container's seccomp profile, or kernel.io_uring_disabled)"
        }
        Some(libc::ENOMEM) => "not enough lockable memory for a ring (RLIMIT_MEMLOCK)",
        _ => return format!("io_uring cannot be set up: {error}"),
    };
    format!("{why}: {error}")
}

/// Checks for the features that the driver relies on.
fn check_features(ring: &IoUring) -> Result<(), String> {
    let parameters = ring.params();
    if !parameters.is_feature_ext_arg() || !parameters.is_feature_nodrop() {
        return Err("the kernel's io_uring cannot wait with a time limit (needs Linux 5.11)".into());
    }
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(|error| explain(&error))?;
    let needed = [
        ("read", opcode::Read::CODE),
        ("write", opcode::Write::CODE),
        ("fsync", opcode::Fsync::CODE),
        ("fallocate", opcode::Fallocate::CODE),
        ("poll", opcode::PollAdd::CODE),
    ];
    match needed.iter().find(|(_, code)| !probe.is_supported(*code)) {
        Some((name, _)) => Err(format!("the kernel's io_uring does not support {name}")),
        None => Ok(()),
    }
}

/// Checks that the ring works: some sandboxes grant a ring and refuse its use.
fn check_round_trip(ring: &mut IoUring) -> Result<(), String> {
    crate::ring::push_nothing(ring).map_err(|_| "a new io_uring has no room for an operation")?;
    ring.submit_and_wait(1).map_err(|error| explain(&error))?;
    match ring.completion().next() {
        Some(entry) if entry.result() == 0 => Ok(()),
        _ => Err("io_uring can be set up, but does not work".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_has_two_values() {
        assert_eq!(choice_of(None).expect("unset is allowed"), BackendChoice::Environment);
        assert_eq!(choice_of(Some("uring".into())).expect("documented"), BackendChoice::Uring);
        assert_eq!(choice_of(Some("threads".into())).expect("documented"), BackendChoice::Threads);
        let error = choice_of(Some("aio".into())).expect_err("means nothing");
        assert_eq!(error.to_string(), "BCACHED_IO is \"aio\"; it must be \"uring\" or \"threads\"");
    }

    #[test]
    fn a_forbidden_ring_is_explained_in_one_line() {
        for (errno, part) in
            [(libc::EPERM, "forbidden"), (libc::ENOSYS, "no io_uring"), (libc::EMFILE, "set up")]
        {
            let line = explain(&std::io::Error::from_raw_os_error(errno));
            assert!(line.contains(part) && !line.contains('\n'), "{line}");
        }
    }
}
