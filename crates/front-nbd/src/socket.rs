//! A connected socket: receives and sends with time limits, and identifies the peer.
//!
//! The descriptor stays in blocking mode. A receive without a limit is one system call. One with a
//! limit first tries without blocking, and polls only if there is nothing. So a busy connection
//! pays nothing for its limits.

use crate::peer_timeouts::PeerPace;
use bcached_port::Peer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recv, sendmsg, sockopt};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

pub(crate) struct Socket {
    fd: OwnedFd,
}

/// How long a receive may take.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReceiveTimeout {
    /// Without a limit.
    Forever,
    /// Until something arrives, but at most this long without anything.
    Stall(Duration),
    /// Until a moment.
    Deadline(Instant),
}

impl ReceiveTimeout {
    /// Whether its deadline has passed.
    pub(crate) fn is_over(self) -> bool {
        matches!(self, Self::Deadline(moment) if moment <= Instant::now())
    }

    /// Starts the time limit: returns a timeout for everything that is done until data has arrived.
    pub(crate) fn begun(self) -> Self {
        match self {
            Self::Stall(limit) => Self::Deadline(Instant::now() + limit),
            other => other,
        }
    }

    /// Fails after the deadline. For operations in pieces, each of which is in time.
    pub(crate) fn check(self) -> io::Result<()> {
        if self.is_over() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }
}

/// A TCP peer that vanished silently is detected after this time and three more probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_PROBES: u32 = 3;

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Socket {
    pub(crate) const fn new(fd: OwnedFd) -> Self {
        Self { fd }
    }

    /// Prepares a TCP connection: no delay for small replies, and detection of vanished peers.
    pub(crate) fn prepare_tcp(&self) -> io::Result<()> {
        sockopt::set_tcp_nodelay(&self.fd, true)?;
        sockopt::set_tcp_keepidle(&self.fd, KEEPALIVE_IDLE)?;
        sockopt::set_tcp_keepintvl(&self.fd, KEEPALIVE_INTERVAL)?;
        sockopt::set_tcp_keepcnt(&self.fd, KEEPALIVE_PROBES)?;
        sockopt::set_socket_keepalive(&self.fd, true)?;
        Ok(())
    }

    /// Receives the available data, at least a byte. Returns 0 if the peer will send no more.
    /// `pace` is for data that holds memory until it has arrived.
    pub(crate) fn receive(
        &self,
        into: &mut [u8],
        timeout: ReceiveTimeout,
        mut pace: Option<&mut PeerPace>,
    ) -> io::Result<usize> {
        debug_assert!(!into.is_empty(), "0 bytes received must mean the end");
        let deadline = match timeout {
            ReceiveTimeout::Forever => None,
            ReceiveTimeout::Stall(limit) => Some(Instant::now() + limit),
            ReceiveTimeout::Deadline(moment) => Some(moment),
        };
        let flags = if deadline.is_some() { RecvFlags::DONTWAIT } else { RecvFlags::empty() };
        loop {
            match recv(&self.fd, &mut *into, flags) {
                Ok((received, _)) => {
                    if let Some(pace) = pace {
                        pace.moved(received);
                    }
                    return Ok(received);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, deadline, pace.as_deref_mut())?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Receives the available data: 0 if the peer will send no more, `None` if there is nothing
    /// now.
    pub(crate) fn receive_now(&self, into: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match recv(&self.fd, &mut *into, RecvFlags::DONTWAIT) {
                Ok((received, _)) => return Ok(Some(received)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits, at most for `limit`, until a receive would not block. Returns whether that is so.
    pub(crate) fn await_some(&self, limit: Duration) -> bool {
        let limit = Timespec::try_from(limit).unwrap_or(Timespec { tv_sec: 0, tv_nsec: 0 });
        let mut fds = [PollFd::from_borrowed_fd(self.fd.as_fd(), PollFlags::IN)];
        poll(&mut fds, Some(&limit)).is_ok_and(|ready| ready > 0)
    }

    /// Whether the peer has closed its sending side, or this socket was shut down for receiving.
    pub(crate) fn has_hung_up(&self) -> bool {
        bcached_port::socket::has_hung_up(self.fd.as_fd())
    }

    /// Sends what the socket takes now. Returns its length in bytes.
    pub(crate) fn send_now(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        loop {
            let mut nothing = SendAncillaryBuffer::new(&mut [] as &mut [MaybeUninit<u8>]);
            match sendmsg(&self.fd, slices, &mut nothing, flags) {
                Ok(sent) => return Ok(sent),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(0),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends everything, unless the peer takes nothing for `stall`. `pace` is for data that holds
    /// memory until it is sent.
    pub(crate) fn send(
        &self,
        mut slices: &mut [IoSlice<'_>],
        stall: Duration,
        mut pace: Option<&mut PeerPace>,
    ) -> io::Result<()> {
        // Skip empty slices at the front, so that the loop ends.
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            match self.send_now(slices)? {
                0 => self.wait(PollFlags::OUT, Some(Instant::now() + stall), pace.as_deref_mut())?,
                sent => {
                    if let Some(pace) = &mut pace {
                        pace.moved(sent);
                    }
                    IoSlice::advance_slices(&mut slices, sent);
                }
            }
        }
        Ok(())
    }

    /// Ends receiving: a receive in progress returns 0.
    pub(crate) fn end_receiving(&self) {
        // An error means that the peer has gone already, which has the same effect.
        let _: Result<(), Errno> = rustix::net::shutdown(&self.fd, Shutdown::Read);
    }

    /// Ends the connection in both directions: a receive or send in progress returns.
    pub(crate) fn end(&self) {
        let _: Result<(), Errno> = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// The process at the other end of a unix socket, if it is visible from here.
    pub(crate) fn peer_process(&self) -> Option<Peer> {
        let pid = crate::credentials::peer_pid(self.fd.as_raw_fd())?;
        let started = start_time(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
        Some(Peer::Process { pid, started })
    }

    fn wait(
        &self,
        what: PollFlags,
        deadline: Option<Instant>,
        mut pace: Option<&mut PeerPace>,
    ) -> io::Result<()> {
        loop {
            let now = Instant::now();
            let left = deadline.map(|moment| moment.saturating_duration_since(now));
            let look = pace.as_ref().map(|pace| pace.look_every());
            let longest = left.into_iter().chain(look).min();
            let longest = longest
                .map(|left| Timespec::try_from(left).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 }));
            let mut fds = [PollFd::from_borrowed_fd(self.fd.as_fd(), what)];
            let polled = poll(&mut fds, longest.as_ref());
            if let Some(pace) = &mut pace {
                pace.waited(now.elapsed())?;
            }
            match polled {
                Ok(0) if deadline.is_some_and(|moment| moment <= Instant::now()) => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Returns field 22 of `/proc/PID/stat`. The second field is a name in parentheses, which may
/// contain anything, even parentheses.
fn start_time(stat: &str) -> Option<u64> {
    let (_, behind_name) = stat.rsplit_once(')')?;
    behind_name.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_start_time_is_found_behind_any_name() {
        let stat = "77 (a) b (c) S 1 77 77 0 -1 4194560 5 6 7 8 9 10 11 12 20 0 1 0 4242 99 100";
        assert_eq!(start_time(stat), Some(4242));
        assert_eq!(start_time("77 (a"), None);
    }

    #[test]
    fn both_ends_of_a_pair_are_this_process() {
        let (one, other) = UnixStream::pair().unwrap();
        let (one, other) = (Socket::new(one.into()), Socket::new(other.into()));
        let peer = one.peer_process().expect("a process that we can see");
        assert!(matches!(peer, Peer::Process { pid, .. } if pid == std::process::id()));
        assert_eq!(other.peer_process(), Some(peer));
    }

    #[test]
    fn patience_ends() {
        let (one, other) = UnixStream::pair().unwrap();
        let one = Socket::new(one.into());
        let mut byte = [0];
        let short = Duration::from_millis(1);
        let error = one.receive(&mut byte, ReceiveTimeout::Stall(short), None).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let error = one.receive(&mut byte, ReceiveTimeout::Deadline(Instant::now()), None).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let megabytes = vec![0; 4 << 20];
        let error = one.send(&mut [IoSlice::new(&megabytes)], short, None).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "nobody reads");
        drop(other);
        assert!(
            one.send(&mut [IoSlice::new(&megabytes)], short, None)
                .is_err_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
        );
    }
}
