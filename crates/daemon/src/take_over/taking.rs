//! The new one's side.

use super::giving::keep;
use super::link::{Link, Message, Yours};
use super::{END_LIMIT, HELLO_LIMIT, LOOK, PROTOCOL, READY_LIMIT, TRIAL, VARIABLE};
use crate::socket_activation::Sockets;
use bcached_control::failure::{Failure, Kind};
use bcached_front_nbd::Left;
use bcached_uring::device::claim::{self, Claim};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, getppid, pidfd_open, pidfd_send_signal};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The daemon that this process takes over from.
pub struct Predecessor {
    link: Link,
    /// Its process.
    pub pid: u32,
    /// The same, which tells when all of it has ended; `None`: it has, or the kernel does not give it.
    process: Option<OwnedFd>,
    /// This process is only to show that it could.
    is_trial: bool,
    /// Whether it has ended since its end of the link was closed: to find out may take long, so it is asked once.
    has_died: OnceLock<bool>,
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
    let process = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let process = process.and_then(|process| pidfd_open(process, PidfdFlags::empty()).ok());
    let is_trial = std::env::var_os(TRIAL).is_some();
    let predecessor = Predecessor { link: Link::of(end), pid, process, is_trial, has_died: OnceLock::new() };
    if predecessor.is_others_parent() {
        return Err(wrong(format!(
            "process {pid} has started another one, and ends that if it is to go on itself"
        ))
        .next("a script that starts the daemon must become it (`exec`)"));
    }
    Ok(Some(predecessor))
}

impl Predecessor {
    /// Says that this process runs and knows what it is to serve, and waits for what that is. If the other one dies before it has said all,
    /// that is what has come so far: this process goes on with it, as one that starts after a kill.
    ///
    /// # Errors
    /// The other one goes on; nothing has been opened.
    pub fn take(&self) -> Result<Taken, Failure> {
        let mut taken = Taken::default();
        let mut claims = Vec::new();
        let heard = self.hear(&mut taken, &mut claims).and_then(|yours| {
            taken.yours = yours.unwrap_or_default();
            claim::inherit(claims)
        });
        heard.map(|()| taken).map_err(|error| {
            Failure::new(Kind::Io, format!("nothing was taken over from process {}", self.pid))
                .why(error.to_string())
        })
    }

    /// What the other one says, to its end; `None` if it has died before that.
    fn hear(&self, taken: &mut Taken, claims: &mut Vec<Arc<Claim>>) -> io::Result<Option<Yours>> {
        let hello = Message::Hello { protocol: PROTOCOL, version: env!("CARGO_PKG_VERSION").to_owned() };
        match self.link.send(&hello, &[]) {
            // It has closed its end, as what comes from there says, too.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            said => said?,
        }
        // It ends its own work first, which has limits of its own.
        let deadline = Instant::now() + HELLO_LIMIT + READY_LIMIT;
        loop {
            let received = self.link.receive(deadline)?;
            if self.is_trial {
                return Err(io::Error::other(
                    "it was only to be seen whether this process could (`--dry-run`)",
                ));
            }
            let Some((message, descriptors)) = received else {
                if !self.dies() {
                    return Err(io::Error::other("it goes on"));
                }
                tracing::warn!(
                    event = "former-died",
                    "process {} has died while it was being replaced: this one goes on with what that has left",
                    self.pid
                );
                return Ok(None);
            };
            let mut descriptors = descriptors.into_iter();
            let mut one = || descriptors.next().ok_or_else(|| io::Error::other("a descriptor is missing"));
            match message {
                Message::Claim => claims.push(Claim::from_descriptors(descriptors.collect())?),
                Message::Socket(of) => keep(of, one()?, &mut taken.passed)?,
                Message::Connection(state) => taken.connections.push(Left::new(one()?, state)),
                Message::Yours(yours) => return Ok(Some(yours)),
                _ => return Err(io::Error::other("it says what is not understood")),
            }
        }
    }

    /// Whether the process whose end of the link is closed ends, too. One that goes on has ended this one before it closes that.
    fn dies(&self) -> bool {
        // With all its threads: until the last has let go of its sockets it seems to listen there. This one has another parent before that, and
        // is not kept by one that hangs in a device.
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

    /// It lives, and has not started this process itself: it would go on beside this one.
    fn is_others_parent(&self) -> bool {
        !self.is_parent()
            && self.process.as_ref().is_some_and(|process| !has_ended_by(process, Duration::ZERO))
    }

    /// It has started this process, and nobody has waited for it: its number is nobody else's.
    fn is_parent(&self) -> bool {
        getppid().is_some_and(|parent| parent.as_raw_nonzero().get().unsigned_abs() == self.pid)
    }

    /// Whether the other one has died since it said what it had: nobody can take that back.
    pub fn has_died(&self) -> bool {
        if let Some(known) = self.has_died.get() {
            return *known;
        }
        matches!(self.link.receive(Instant::now()), Ok(None)) && *self.has_died.get_or_init(|| self.dies())
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
                if let Some(process) = self.process.as_ref().filter(|_| self.is_parent()) {
                    let _is_gone = pidfd_send_signal(process, Signal::KILL);
                    has_ended(process);
                }
            }
        }
    }
}

/// Waits until a process is gone, with all that it had open; false if that takes too long.
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
