//! `bcached stop`: stops the daemon cleanly, and reports which dirty data stays where and how the
//! daemon has ended. With a volume: stops serving only that.

use super::jobs;
use crate::failure::{Failure, Kind};
use crate::flags;
use crate::output::{Printable, Report};
use bcached_control::client;
use bcached_control::status::Status;
use bcached_control::stop::{StopReport, StopRequest};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, pidfd_open};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// The interval between two polls of a process that is about to end.
const LOOK: Duration = Duration::from_millis(50);

/// Stops the daemon or a volume.
pub fn run(flags: &flags::StopArgs) -> Result<Report, Failure> {
    let watch = &flags.watch;
    if let Some(volume) = &flags.volume {
        return jobs::stop(volume, watch);
    }
    let limit = watch.timeout.as_deref().map(bcached_config::time).transpose();
    let limit = limit.map_err(|why| Failure::new(Kind::Usage, why).option("--timeout"))?;
    let until = limit.and_then(|limit| Instant::now().checked_add(limit));
    let socket = watch.control.socket();
    let mut stopping = match ask(&socket, StopRequest { dry_run: watch.dry_run }) {
        Ok(stopping) => stopping,
        Err(failure) if failure.kind == Kind::NoDaemon => return already(&failure),
        Err(failure) => return Err(failure),
    };
    if watch.dry_run || watch.no_wait {
        return Report::of(&stopping);
    }
    let process = process(&socket, stopping.pid);
    if let Some(waits) = stopping.waits_text() {
        // Standard error may be closed, which is no reason to stop.
        let _unread = writeln!(io::stderr(), "bcached: waiting {waits}");
    }
    while !stopping.ended {
        check_time(until, &stopping)?;
        match client::get_until(&socket, "/v1/stop", until) {
            Ok(body) => stopping = client::understood(&body)?,
            // The command's own time limit has passed.
            Err(failure) if failure.kind == Kind::TimeLimit && is_over(until) => {}
            Err(failure) if failure.kind == Kind::NoDaemon => {
                return Err(Failure::new(Kind::Io, "the daemon ended without reporting how")
                    .why("its process was killed, or did not wait for this command")
                    .next("its log says how; the next start recovers its state"));
            }
            Err(failure) => return Err(failure),
        }
    }
    let is_left = || match &process {
        Some(process) => !has_ended(process),
        None => is_there(&socket, stopping.pid),
    };
    while is_left() {
        check_time(until, &stopping)?;
        thread::sleep(LOOK);
    }
    let failure = stopping.to_failure();
    let report = Report::of(&stopping)?;
    Ok(match failure {
        Some(failure) => report.failing(failure),
        None => report,
    })
}

fn ask(socket: &Path, stop: StopRequest) -> Result<StopReport, Failure> {
    let body = client::body(&stop)?;
    client::understood(&client::post(socket, "/v1/stop", &body)?)
}

/// Reports that no daemon is running, which is the desired state. Names the socket, since it may be
/// the wrong one.
fn already(failure: &Failure) -> Result<Report, Failure> {
    let nobody = StopReport {
        pid: None,
        dry_run: false,
        already: true,
        ended: true,
        stop_timeout_seconds: 0,
        users: Vec::new(),
        dirty: Vec::new(),
        cut: Vec::new(),
        failure: None,
    };
    Ok(Report::of(&nobody)?.warning(vec![failure.what.to_string()]))
}

fn is_over(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() >= until)
}

fn check_time(until: Option<Instant>, stopping: &StopReport) -> Result<(), Failure> {
    if !is_over(until) {
        return Ok(());
    }
    let failure = Failure::new(
        Kind::TimeLimit,
        format!("daemon {} is still stopping", stopping.pid.unwrap_or_default()),
    );
    let waits = stopping.waits_text().map(|waits| format!("waiting {waits}"));
    Err(failure
        .why(waits.unwrap_or_else(|| "it is closing its caches".to_owned()))
        .next("repeat `bcached stop` to wait for it"))
}

/// Returns the daemon's process to wait for, if it is visible from here. If a service manager has
/// bound the socket, the socket outlives the daemon, and a request to it makes the manager start
/// the daemon again.
fn process(socket: &Path, pid: Option<u32>) -> Option<OwnedFd> {
    let process = client::process(socket)?;
    let is_it = u32::try_from(process.as_raw_nonzero().get()).ok() == pid;
    pidfd_open(process, PidfdFlags::empty()).ok().filter(|_| is_it)
}

fn has_ended(process: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&now)).is_ok_and(|ended| ended > 0)
}

/// Returns true if the same process still answers on the socket.
fn is_there(socket: &Path, pid: Option<u32>) -> bool {
    let status = client::get(socket, "/v1/status").and_then(|body| client::understood::<Status>(&body));
    match status {
        Ok(status) => Some(status.pid) == pid,
        Err(failure) => failure.kind == Kind::TimeLimit,
    }
}

impl Printable for StopReport {
    const SCHEMA: &'static str = "bcached.stop";

    fn text(&self) -> String {
        Self::text(self)
    }
}
