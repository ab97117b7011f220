//! The new one's side.

use super::giving::keep;
use super::link::{Link, Message, Yours};
use super::{END_LIMIT, HELLO_LIMIT, PROTOCOL, READY_LIMIT, VARIABLE};
use crate::failure::{Failure, Kind};
use crate::passed::Sockets;
use bcached_front_nbd::Left;
use bcached_uring::device::claim::{self, Claim};
use std::io;
use std::os::fd::AsFd as _;
use std::time::Instant;

/// The daemon that this process takes over from.
pub struct Predecessor {
    link: Link,
    /// Its process.
    pub pid: u32,
}

/// What it has left.
#[derive(Default)]
pub struct Taken {
    /// Sockets that somebody else has bound.
    pub passed: Sockets,
    /// Clients.
    pub connections: Vec<Left>,
    /// What there was.
    pub yours: Yours,
}

/// The daemon that has started this process to take over, if one has. To be called before anything is opened.
///
/// # Errors
/// What the environment says does not add up.
pub fn begun() -> Result<Option<Predecessor>, Failure> {
    let Some(pid) = std::env::var_os(VARIABLE) else { return Ok(None) };
    let wrong = |why: String| {
        Failure::new(Kind::Usage, "this process is to take over from another, and cannot")
            .why(why)
            .next(format!("`bcached take-over` starts such a process; {VARIABLE} is not to be set otherwise"))
    };
    let pid = pid.to_str().and_then(|pid| pid.parse().ok());
    let pid = pid.ok_or_else(|| wrong(format!("{VARIABLE} names no process")))?;
    let end = io::stdin().as_fd().try_clone_to_owned().map_err(|error| wrong(error.to_string()))?;
    // Nothing else of this process reads from there.
    let nothing = std::fs::File::open("/dev/null").map_err(|error| wrong(error.to_string()))?;
    rustix::stdio::dup2_stdin(nothing).map_err(|error| wrong(error.to_string()))?;
    Ok(Some(Predecessor { link: Link::of(end), pid }))
}

impl Predecessor {
    /// Says that this process runs and knows what it is to serve, and waits for what that is.
    ///
    /// # Errors
    /// The other one goes on, or has ended; nothing has been opened.
    pub fn take(&self) -> Result<Taken, Failure> {
        let ended = |why: String| {
            Failure::new(Kind::Io, format!("nothing was taken over from process {}", self.pid)).why(why)
        };
        let hello = Message::Hello { protocol: PROTOCOL, version: env!("CARGO_PKG_VERSION").to_owned() };
        self.link.send(&hello, &[]).map_err(|error| ended(error.to_string()))?;
        let (mut taken, mut claims) = (Taken::default(), Vec::new());
        // It ends its own work first, which has limits of its own.
        let deadline = Instant::now() + HELLO_LIMIT + READY_LIMIT;
        loop {
            let message = self.link.receive(deadline).map_err(|error| ended(error.to_string()))?;
            let (message, descriptors) =
                message.ok_or_else(|| ended("it has ended, or goes on".to_owned()))?;
            let mut descriptors = descriptors.into_iter();
            let mut one = || descriptors.next().ok_or_else(|| ended("a descriptor is missing".to_owned()));
            match message {
                Message::Claim => {
                    let claim = Claim::from_descriptors(descriptors.collect());
                    claims.push(claim.map_err(|error| ended(error.to_string()))?);
                }
                Message::Socket(of) => {
                    keep(of, one()?, &mut taken.passed).map_err(|error| ended(error.to_string()))?;
                }
                Message::Connection(state) => taken.connections.push(Left { socket: one()?, state }),
                Message::Yours(yours) => {
                    claim::inherit(claims).map_err(|error| ended(error.to_string()))?;
                    return Ok(Taken { yours, ..taken });
                }
                _ => return Err(ended("it says what is not understood".to_owned())),
            }
        }
    }

    /// Says why this process cannot go on. The other one takes all of it back when it has ended.
    pub fn cannot(&self, failure: &Failure) {
        let failure = failure.to_error();
        // Whoever does not hear it sees the end of this process.
        let _heard = self.link.send(&Message::Cannot { failure }, &[]);
    }

    /// Says that all is served, and waits until nothing is the other one's any more.
    pub fn ready(&self) {
        if self.link.send(&Message::Ready, &[]).is_err() {
            return;
        }
        match self.link.receive(Instant::now() + END_LIMIT) {
            Ok(Some((Message::Gone, _)) | None) => {}
            _ => {
                // It stands still, and may take everything back when it goes on: unless it does not.
                tracing::warn!(event = "former-killed", "process {} does not answer, and is ended", self.pid);
                end(self.pid);
            }
        }
    }
}

/// Ends a process, and waits until it is gone.
fn end(pid: u32) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
    let Some(process) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return };
    // The one that has started this one, which has not been waited for: its number is nobody else's.
    if rustix::process::getppid() != Some(process) {
        return;
    }
    let Ok(process) = pidfd_open(process, PidfdFlags::empty()) else { return };
    let _has_ended = pidfd_send_signal(&process, Signal::KILL);
    let limit = Timespec::try_from(END_LIMIT).unwrap_or(Timespec { tv_sec: 10, tv_nsec: 0 });
    let _ended = poll(&mut [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)], Some(&limit));
}
