//! The side of the old process.

use super::InheritedState;
use super::descriptor_channel::{DaemonState, DescriptorChannel, Message, SocketPurpose};
use super::{END_LIMIT, HELLO_LIMIT, KILLED_LIMIT, LOOK, PROTOCOL, READY_LIMIT, TRIAL, VARIABLE};
use crate::control_server::ControlSockets;
use crate::oom_score;
use crate::socket_activation::PassedSockets;
use bcached_control::failure::{Failure, Kind};
use bcached_front_nbd as nbd;
use bcached_port::socket::inherited::{self, Purpose};
use bcached_port::socket::{PassedSocket, SocketOwner};
use bcached_uring::device::claim::{self, DeviceClaim};
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A process that is to take over. If it is dropped before it has, the process is ended.
pub struct Successor {
    process: Option<Child>,
    link: DescriptorChannel,
    /// Its version.
    pub version: String,
}

impl Successor {
    /// Starts `program` as this process was started, and waits until it has read its configuration.
    ///
    /// # Errors
    /// It cannot be started, or refuses: then nothing has changed.
    pub fn start(program: &Path) -> Result<Self, Failure> {
        Self::begin(program, HELLO_LIMIT, false)
    }

    /// Likewise, only to see whether it could take over, within `limit`; then the process is ended.
    ///
    /// # Errors
    /// As of [`Successor::start`], or it takes longer.
    pub fn tries(program: &Path, limit: Duration) -> Result<(), Failure> {
        Self::begin(program, limit, true).map(drop)
    }

    fn begin(program: &Path, limit: Duration, is_trial: bool) -> Result<Self, Failure> {
        let cannot = |why: String| {
            Failure::new(Kind::Io, format!("{} cannot take over", program.display()))
                .why(why)
                .next("this daemon continues; its log and that of the other process have details")
        };
        let (link, theirs) = DescriptorChannel::pair().map_err(|error| cannot(error.to_string()))?;
        let mut command = Command::new(program);
        command.args(std::env::args_os().skip(1));
        command.env(VARIABLE, std::process::id().to_string()).stdin(Stdio::from(theirs));
        // A real take-over may follow a trial, and the reverse.
        command.env_remove(TRIAL).envs(is_trial.then_some((TRIAL, "1")));
        let started = oom_score::as_before(|| command.spawn());
        // This closes our copy of the new process's end of the link, which must be that process's
        // alone.
        drop(command);
        let process = started.map_err(|error| cannot(format!("it cannot be started: {error}")))?;
        let mut successor = Self { process: Some(process), link, version: String::new() };
        match successor.link.receive(Instant::now() + limit) {
            Ok(Some((Message::Hello { protocol: PROTOCOL, version }, _))) => {
                successor.version = version;
                Ok(successor)
            }
            Ok(Some((Message::Hello { version, .. }, _))) => {
                Err(cannot(format!("bcached {version} uses another take-over protocol"))
                    .next("stop this daemon, and start the other"))
            }
            Ok(Some((Message::Cannot { failure }, _))) => {
                Err(Failure::from_error(&failure).unwrap_or_else(|| cannot(String::new())))
            }
            Ok(Some(_) | None) => {
                Err(cannot("it ended at once, or is not a bcached that supports take-over".to_owned()))
            }
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                Err(Failure::new(Kind::TimeLimit, format!("{} does not answer yet", program.display()))
                    .why(format!("it was started, but did not read its configuration within {limit:.0?}"))
                    .next("this daemon continues; check what delays that program, then try again"))
            }
            Err(error) => Err(cannot(format!("it does not answer: {error}"))),
        }
    }

    /// Gives the new process everything, and waits until it serves all of it.
    ///
    /// # Errors
    /// It does not, and the new process has ended or has been ended: everything belongs to this
    /// process as before.
    pub fn take(mut self, released: &ReleasedState) -> Result<(), Failure> {
        match self.pass(released) {
            Ok(()) => {
                let pid = self.process.as_ref().map_or(0, Child::id);
                // To systemd this process was the service's main process.
                let _no_systemd = sd_notify::notify(&[sd_notify::NotifyState::MainPid(pid)]);
                // A successor that does not receive it sees the end of this process.
                let _goes_on = self.link.send(&Message::Gone, &[]);
                self.process = None;
                Ok(())
            }
            Err(failure) => {
                self.end();
                Err(failure)
            }
        }
    }

    fn pass(&mut self, released: &ReleasedState) -> Result<(), Failure> {
        let cannot = |why: String| {
            Failure::new(Kind::Io, "the new process could not take over")
                .why(why)
                .next("this daemon continues; the log has details")
        };
        released.send(&self.link).map_err(|error| cannot(error.to_string()))?;
        let deadline = Instant::now() + READY_LIMIT;
        loop {
            match self.link.receive(deadline) {
                // *Ready* may have been its last message before it died: no process has served a
                // client since.
                Ok(Some((Message::Ready, _))) if self.is_alive() => return Ok(()),
                Ok(Some((Message::Ready, _))) => return Err(cannot("it has ended".to_owned())),
                Ok(Some((Message::Cannot { failure }, _))) => {
                    return Err(Failure::from_error(&failure)
                        .unwrap_or_else(|| cannot("it gave no reason".to_owned())));
                }
                Ok(Some(_)) => {}
                Ok(None) => return Err(cannot("it has ended".to_owned())),
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    return Err(cannot(format!(
                        "it did not serve everything within {} s",
                        READY_LIMIT.as_secs()
                    )));
                }
                Err(error) => return Err(cannot(error.to_string())),
            }
        }
    }

    fn is_alive(&mut self) -> bool {
        self.process.as_mut().is_some_and(|process| matches!(process.try_wait(), Ok(None)))
    }

    /// Ends the process, and waits until it is gone: from then on it writes nothing more, except
    /// what the kernel already has from it. That may take as long as a device likes. Until then no
    /// other process can open what it has open (`claim`); nothing else has to wait for it.
    fn end(&mut self) {
        let Some(process) = &mut self.process else { return };
        // A process that has reported why it cannot take over is about to end by itself, in order.
        if !has_ended_within(process, END_LIMIT) {
            self.kill();
        }
    }

    /// The same, without waiting for it to end by itself.
    fn kill(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        let _has_ended = process.kill();
        if has_ended_within(&mut process, KILLED_LIMIT) {
            return;
        }
        tracing::warn!(
            event = "successor-hangs",
            "process {} was killed, but waits for a device that does not answer: until it ends, this daemon cannot open what it has open",
            process.id()
        );
        // Without a wait it would stay in the process table when it has ended.
        let waits = move || drop(process.wait());
        let _nobody_waits = std::thread::Builder::new().name("successor".into()).spawn(waits);
    }
}

/// Whether a process ends within `limit`. If that cannot be queried, it has: some other code has
/// waited for it.
fn has_ended_within(process: &mut Child, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    while matches!(process.try_wait(), Ok(None)) {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    true
}

impl Drop for Successor {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Everything that a daemon leaves behind; none of it is in use.
pub struct ReleasedState {
    /// Of all devices.
    pub claims: Vec<Arc<DeviceClaim>>,
    /// The sockets of the control server.
    pub control: ControlSockets,
    /// The NBD sockets and connections.
    pub nbd: Option<nbd::Handoff>,
    /// The state of the daemon.
    pub daemon_state: DaemonState,
    /// Since when clients wait.
    pub since: Instant,
}

impl ReleasedState {
    fn send(&self, link: &DescriptorChannel) -> io::Result<()> {
        for claim in &self.claims {
            link.send(&Message::Claim, &claim.descriptors())?;
        }
        for (of, socket) in self.sockets() {
            link.send(&Message::Socket(of), &[socket.as_fd()])?;
        }
        for left in self.nbd.iter().flat_map(|nbd| &nbd.connections) {
            let message = Message::Connection(left.state.clone());
            link.send(&message, &[left.as_fd()])?;
        }
        let paused_seconds = self.since.elapsed().as_secs_f64();
        link.send(&Message::Yours(DaemonState { paused_seconds, ..self.daemon_state.clone() }), &[])
    }

    fn sockets(&self) -> Vec<(SocketPurpose, &OwnedFd)> {
        let of = |whose: SocketOwner, passed: SocketPurpose| match whose {
            SocketOwner::Ours(file) => SocketPurpose::Path(file),
            SocketOwner::Foreign => passed,
        };
        let ControlSockets { owner, monitor, metrics } = &self.control;
        let mut sockets = vec![(of(owner.1, SocketPurpose::PassedControl), &owner.0)];
        sockets
            .extend(monitor.iter().map(|monitor| (of(monitor.1, SocketPurpose::PassedMonitor), &monitor.0)));
        sockets.extend(metrics.iter().map(|metrics| (SocketPurpose::Metrics, metrics)));
        sockets.extend(self.nbd.iter().flat_map(|nbd| &nbd.sockets).map(|left| {
            let of = match (&left.bound, left.whose) {
                (nbd::BoundAddress::Tcp(_), SocketOwner::Ours(_)) => SocketPurpose::NbdTcp,
                (_, whose) => of(whose, SocketPurpose::PassedNbd),
            };
            (of, &left.socket)
        }));
        sockets
    }

    /// Takes everything back for this process, because no other has taken it.
    ///
    /// # Errors
    /// No descriptors are available, or something has changed.
    pub fn take_back(mut self) -> io::Result<InheritedState> {
        claim::inherit(std::mem::take(&mut self.claims))?;
        let mut passed = PassedSockets::default();
        for (of, socket) in self.sockets() {
            keep(of, socket.try_clone()?, &mut passed)?;
        }
        let connections = self.nbd.map_or_else(Vec::new, |nbd| nbd.connections);
        Ok(InheritedState { passed, connections, daemon_state: self.daemon_state })
    }
}

/// Keeps a socket for the code that will listen there.
pub(super) fn keep(of: SocketPurpose, socket: OwnedFd, passed: &mut PassedSockets) -> io::Result<()> {
    let socket = PassedSocket::new(socket).map_err(io::Error::other)?;
    match of {
        SocketPurpose::Path(file) => inherited::keep_unix(socket, file),
        SocketPurpose::NbdTcp => inherited::keep_tcp(Purpose::Nbd, socket),
        SocketPurpose::Metrics => inherited::keep_tcp(Purpose::Metrics, socket),
        SocketPurpose::PassedNbd => passed.nbd.push(Arc::new(socket)),
        SocketPurpose::PassedControl => passed.control = Some(socket),
        SocketPurpose::PassedMonitor => passed.monitor = Some(socket),
    }
    Ok(())
}
