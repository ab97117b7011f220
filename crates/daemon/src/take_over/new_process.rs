//! The side of the new process.

use super::descriptor_channel::{DaemonState, DescriptorChannel, Message};
use super::old_process::keep;
use super::{END_LIMIT, HELLO_LIMIT, LOOK, PROTOCOL, READY_LIMIT, TRIAL, VARIABLE};
use crate::socket_activation::PassedSockets;
use bcached_control::failure::{Failure, Kind};
use bcached_front_nbd::HandoffConnection;
use bcached_uring::device::claim::{self, DeviceClaim};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, getppid, pidfd_open, pidfd_send_signal};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The daemon that this process takes over from.
pub struct Predecessor {
    link: DescriptorChannel,
    /// Its process.
    pub pid: u32,
    /// Its pidfd, which tells when all of its threads have ended; `None` if it has ended, or the
    /// kernel has no pidfds.
    process: Option<OwnedFd>,
    /// This process is only a trial.
    is_trial: bool,
    /// Whether it has ended since its end of the link was closed. Finding out may take long, so it
    /// is done once.
    has_died: OnceLock<bool>,
}

/// What the old process has left.
#[derive(Default)]
pub struct InheritedState {
    /// Sockets that another process has bound and passed.
    pub passed: PassedSockets,
    /// Client connections.
    pub connections: Vec<HandoffConnection>,
    /// The state of the old daemon.
    pub daemon_state: DaemonState,
}

/// Returns the daemon that has started this process to take over, if one has. To be called before
/// anything is opened.
///
/// # Errors
/// The environment is contradictory.
pub fn begun() -> Result<Option<Predecessor>, Failure> {
    let Some(pid) = std::env::var_os(VARIABLE) else { return Ok(None) };
    let wrong = |why: String| {
        Failure::new(Kind::Usage, "this process cannot take over from another")
            .why(why)
            .next(format!("`bcached take-over` starts such a process; do not set {VARIABLE} otherwise"))
    };
    let pid = pid.to_str().and_then(|pid| pid.parse().ok());
    let pid = pid.ok_or_else(|| wrong(format!("{VARIABLE} is not a process id")))?;
    let end = io::stdin().as_fd().try_clone_to_owned().map_err(|error| wrong(error.to_string()))?;
    // Nothing else in this process reads standard input.
    let nothing = std::fs::File::open("/dev/null").map_err(|error| wrong(error.to_string()))?;
    rustix::stdio::dup2_stdin(nothing).map_err(|error| wrong(error.to_string()))?;
    let process = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let process = process.and_then(|process| pidfd_open(process, PidfdFlags::empty()).ok());
    let is_trial = std::env::var_os(TRIAL).is_some();
    let predecessor =
        Predecessor { link: DescriptorChannel::of(end), pid, process, is_trial, has_died: OnceLock::new() };
    if predecessor.is_others_parent() {
        return Err(wrong(format!(
            "process {pid}, which it is to replace, did not start it directly, and could not end it if the take-over failed"
        ))
        .next("a script that starts the daemon must do so with `exec`"));
    }
    Ok(Some(predecessor))
}

impl Predecessor {
    /// Tells the old process that this one runs and knows what it is to serve, and waits for
    /// everything. If the old process dies before it has sent all, the result is what has arrived
    /// so far: this process goes on with it, like one that starts after a kill.
    ///
    /// # Errors
    /// The old process goes on; nothing has been opened.
    pub fn take(&self) -> Result<InheritedState, Failure> {
        let mut taken = InheritedState::default();
        let mut claims = Vec::new();
        let heard = self.hear(&mut taken, &mut claims).and_then(|daemon_state| {
            taken.daemon_state = daemon_state.unwrap_or_default();
            claim::inherit(claims)
        });
        heard.map(|()| taken).map_err(|error| {
            Failure::new(Kind::Io, format!("nothing was taken over from process {}", self.pid))
                .why(error.to_string())
        })
    }

    /// Receives everything from the old process; `None` if it dies before the end.
    fn hear(
        &self,
        taken: &mut InheritedState,
        claims: &mut Vec<Arc<DeviceClaim>>,
    ) -> io::Result<Option<DaemonState>> {
        let hello = Message::Hello { protocol: PROTOCOL, version: env!("CARGO_PKG_VERSION").to_owned() };
        match self.link.send(&hello, &[]) {
            // It has closed its end, which the following receive reports, too.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            said => said?,
        }
        // The old process finishes its own work first, which has limits of its own.
        let deadline = Instant::now() + HELLO_LIMIT + READY_LIMIT;
        loop {
            let received = self.link.receive(deadline)?;
            if self.is_trial {
                return Err(io::Error::other("this was only a trial (`--dry-run`)"));
            }
            let Some((message, descriptors)) = received else {
                if !self.dies() {
                    return Err(io::Error::other("that process continues"));
                }
                tracing::warn!(
                    event = "former-died",
                    "process {} died while it was being replaced: this process continues with what it received",
                    self.pid
                );
                return Ok(None);
            };
            let mut descriptors = descriptors.into_iter();
            let mut one = || descriptors.next().ok_or_else(|| io::Error::other("a descriptor is missing"));
            match message {
                Message::Claim => claims.push(DeviceClaim::from_descriptors(descriptors.collect())?),
                Message::Socket(of) => keep(of, one()?, &mut taken.passed)?,
                Message::Connection(state) => taken.connections.push(HandoffConnection::new(one()?, state)),
                Message::Yours(daemon_state) => return Ok(Some(daemon_state)),
                _ => return Err(io::Error::other("it sent an unknown message")),
            }
        }
    }

    /// Whether the old process, whose end of the link is closed, ends, too. One that goes on ends
    /// this process before it closes its end.
    fn dies(&self) -> bool {
        // Waits for all its threads: until the last has released its sockets, it still appears to
        // listen there. This process gets another parent before that, so it does not wait for one
        // that hangs in a device.
        if self.process.as_ref().is_some_and(has_ended) {
            return true;
        }
        let deadline = Instant::now() + END_LIMIT;
        while self.is_parent() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(LOOK);
        }
        true
    }

    /// Whether it lives and has not started this process itself: then it would go on beside this
    /// one.
    fn is_others_parent(&self) -> bool {
        !self.is_parent()
            && self.process.as_ref().is_some_and(|process| !has_ended_by(process, Duration::ZERO))
    }

    /// Whether it has started this process and has not been waited for: then its process id has not
    /// been reused.
    fn is_parent(&self) -> bool {
        getppid().is_some_and(|parent| parent.as_raw_nonzero().get().unsigned_abs() == self.pid)
    }

    /// Whether the old process has died since it handed over its state: then it can take nothing
    /// back.
    pub fn has_died(&self) -> bool {
        if let Some(known) = self.has_died.get() {
            return *known;
        }
        matches!(self.link.receive(Instant::now()), Ok(None)) && *self.has_died.get_or_init(|| self.dies())
    }

    /// Reports why this process cannot go on. The old process takes everything back when this one
    /// has ended.
    pub fn cannot(&self, failure: &Failure) {
        let failure = failure.to_error();
        // An old process that does not receive it sees the end of this one.
        let _heard = self.link.send(&Message::Cannot { failure }, &[]);
    }

    /// Reports that everything is served, and waits until nothing belongs to the old process any
    /// more.
    pub fn ready(&self) {
        if self.link.send(&Message::Ready, &[]).is_err() {
            return;
        }
        match self.link.receive(Instant::now() + END_LIMIT) {
            Ok(Some((Message::Gone, _)) | None) => {}
            _ => {
                // It is stopped or hangs, and might take everything back when it continues, unless
                // it is killed.
                tracing::warn!(
                    event = "former-killed",
                    "process {} does not answer, and is killed",
                    self.pid
                );
                if let Some(process) = self.process.as_ref().filter(|_| self.is_parent()) {
                    let _is_gone = pidfd_send_signal(process, Signal::KILL);
                    has_ended(process);
                }
            }
        }
    }
}

/// Waits until a process is gone with all that it had open; returns false if that takes too long.
fn has_ended(process: &OwnedFd) -> bool {
    has_ended_by(process, END_LIMIT)
}

fn has_ended_by(process: &OwnedFd, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let limit = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 10, tv_nsec: 0 });
        match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)) {
            Err(Errno::INTR) => {}
            ended => return ended.is_ok_and(|ended| ended > 0),
        }
    }
}
