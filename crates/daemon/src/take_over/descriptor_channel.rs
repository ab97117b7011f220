//! The link between the two processes: messages with descriptors, one at a time.

use bcached_config::options::runtime::RuntimeOptions;
use bcached_front_nbd as nbd;
use bcached_port::socket::FileId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// A message from one process to the other.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// New to old: it runs, and its configuration is valid.
    Hello { protocol: u32, version: String },
    /// Old to new, with its descriptors: the claim of a device.
    Claim,
    /// With its descriptor: a listening socket.
    Socket(SocketPurpose),
    /// With its descriptor: a client connection.
    Connection(nbd::ConnectionState),
    /// Everything is sent, and the old process writes nothing more.
    Yours(DaemonState),
    /// New to old: everything is served.
    Ready,
    /// New to old: it ends, for this reason.
    Cannot { failure: serde_json::Value },
    /// Old to new: nothing belongs to the old process any more.
    Gone,
}

/// The purpose of a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum SocketPurpose {
    /// A unix socket that bcached has bound; its path says what it is for. With device and inode of
    /// its file, if that exists.
    Path(Option<FileId>),
    /// NBD on TCP.
    NbdTcp,
    /// Metrics.
    Metrics,
    /// NBD, on a passed socket.
    PassedNbd,
    /// The control socket, passed.
    PassedControl,
    /// The read-only socket, passed.
    PassedMonitor,
}

/// The state of the old daemon.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct DaemonState {
    /// Names of volumes that were served.
    pub served: Vec<String>,
    /// Names of all volumes, by their UUIDs.
    #[serde(default)]
    pub names: BTreeMap<String, String>,
    /// Options that were set until the daemon stops.
    #[serde(default)]
    pub said: Vec<RuntimeOptions>,
    /// The version of the old process.
    pub version: String,
    /// How long clients have waited so far, in seconds.
    pub paused_seconds: f64,
    /// Clients that have to connect again.
    pub reconnect: Vec<String>,
}

/// Longest message, in bytes: what a client has sent and the daemon has not read, as JSON numbers,
/// and some reserve.
const BYTES_MAX: usize = 192 << 10;

/// Descriptors of one message: a device, and what is below it.
const DESCRIPTORS_MAX: usize = 8;

/// How long sending a message may take: the other process does nothing but read then.
const SEND_LIMIT: Duration = Duration::from_secs(10);

/// One end.
#[derive(Debug)]
pub struct DescriptorChannel(OwnedFd);

impl DescriptorChannel {
    /// Makes both ends.
    ///
    /// # Errors
    /// No descriptors are available.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        Ok((Self(ours), theirs))
    }

    /// The end that this process was started with.
    pub const fn of(end: OwnedFd) -> Self {
        Self(end)
    }

    /// Sends a message with duplicates of these descriptors.
    ///
    /// # Errors
    /// The other process has gone, or does not read.
    pub fn send(&self, message: &Message, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        let deadline = Instant::now() + SEND_LIMIT;
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            match sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Receives the next message; `None` if the other process has gone.
    ///
    /// # Errors
    /// `TimedOut` if no message arrives by `deadline`; or the message is unknown.
    pub fn receive(&self, deadline: Instant) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
        let mut bytes = vec![0; BYTES_MAX];
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let received =
                recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC);
            let received = match received {
                // If a process may open no more files, the kernel silently passes it fewer
                // descriptors.
                Ok(received) if received.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC) => {
                    let why =
                        "a message arrived incomplete: the limit of open files is too low (`ulimit -n`)";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, why));
                }
                Ok(received) if received.bytes == 0 => return Ok(None),
                Ok(received) => received.bytes,
                Err(Errno::CONNRESET) => return Ok(None),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {
                    self.wait(PollFlags::IN, deadline)?;
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let descriptors = ancillary.drain().flat_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
                _ => Vec::new(),
            });
            let descriptors = descriptors.collect();
            return Ok(Some((serde_json::from_slice(&bytes[..received])?, descriptors)));
        }
    }

    /// Waits until the link is ready.
    ///
    /// # Errors
    /// `TimedOut`
    fn wait(&self, what: PollFlags, deadline: Instant) -> io::Result<()> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let left = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        let mut fds = [PollFd::from_borrowed_fd(self.0.as_fd(), what)];
        match poll(&mut fds, Some(&left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    #[test]
    fn messages_come_with_their_descriptors_and_one_by_one() {
        let (ours, theirs) = DescriptorChannel::pair().unwrap();
        let theirs = DescriptorChannel::of(theirs);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "precious").unwrap();
        let fd = file.as_file().as_fd();
        let state = nbd::ConnectionState {
            volume: "u".to_owned(),
            bytes: 1 << 40,
            structured: true,
            block_status: false,
            read_only: false,
            multi_conn: true,
            only_looks: false,
            right: nbd::WriterStatus::MayBegin,
            unread: vec![255; 32 << 10],
        };
        ours.send(&Message::Claim, &[fd, fd]).unwrap();
        ours.send(&Message::Connection(state.clone()), &[fd]).unwrap();
        let (message, descriptors) = theirs.receive(soon()).unwrap().expect("it was sent");
        assert!(matches!(message, Message::Claim));
        assert_eq!(descriptors.len(), 2);
        let (message, descriptors) = theirs.receive(soon()).unwrap().expect("it was sent");
        assert!(matches!(message, Message::Connection(came) if came == state), "the longest there is");
        let read = std::io::read_to_string(std::fs::File::from(descriptors.into_iter().next().unwrap()));
        assert_eq!(read.unwrap(), "precious");
        assert_eq!(theirs.receive(soon()).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(ours);
        assert!(theirs.receive(soon()).unwrap().is_none(), "it has gone");
    }

    /// A message that arrives in part is an error. It was once taken for the whole message.
    #[test]
    fn a_message_that_comes_in_part_is_none() {
        let (ours, theirs) = DescriptorChannel::pair().unwrap();
        let theirs = DescriptorChannel::of(theirs);
        let long = vec![b' '; BYTES_MAX + 1];
        rustix::net::sockopt::set_socket_send_buffer_size(&ours.0, 4 * BYTES_MAX).unwrap();
        match rustix::net::send(&ours.0, &long, SendFlags::NOSIGNAL) {
            Ok(_) => {}
            Err(error) => return println!("skipped: a message so long cannot be sent here ({error})"),
        }
        assert_eq!(theirs.receive(soon()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
