//! The backend channel to a VMM, for a message that it did not ask for: the disk's configuration
//! has changed.
//!
//! For that the VMM sends one end of a socket. The crate `vhost` takes it, but has no message for a
//! changed configuration, and does not give access to the socket. So a duplicate is obtained by
//! peeking at the message before the crate reads it. The duplicate is used only once the crate has
//! accepted the message.

use rustix::cmsg_space;
use rustix::io::Result;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use vhost::vhost_user::message::{BackendReq, FrontendReq};

/// Bytes of a message's header: code, flags, payload size.
const HEADER_BYTES: usize = 12;
/// Flags of a message: version 1, no reply requested. Before replying the VMM would ask for the new
/// configuration, and the sender must not wait for that.
const FLAGS: u32 = 1;

/// A socket to the VMM.
pub(crate) struct ConfigNotifier(OwnedFd);

impl ConfigNotifier {
    /// Returns the socket that comes with the next message to be read, if it is a
    /// `SET_BACKEND_REQ_FD`.
    pub(crate) fn peek(connection: impl AsFd) -> Option<Self> {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut header = [0; HEADER_BYTES];
        let (bytes, _) = recv(&connection, &mut header, flags).ok()?;
        let wanted = u32::from(FrontendReq::SET_BACKEND_REQ_FD).to_ne_bytes();
        if bytes < HEADER_BYTES || header[..4] != wanted {
            return None;
        }
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        recvmsg(&connection, &mut [IoSliceMut::new(&mut header)], &mut ancillary, flags).ok()?;
        let mut sockets = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut sockets) => sockets.next(),
            _ => None,
        });
        sockets.next().map(Self)
    }

    /// Reports that the configuration space has changed.
    pub(crate) fn changed(&self) -> Result<()> {
        let mut message = Vec::with_capacity(HEADER_BYTES);
        message.extend(u32::from(BackendReq::CONFIG_CHANGE_MSG).to_ne_bytes());
        message.extend(FLAGS.to_ne_bytes());
        message.extend(0_u32.to_ne_bytes());
        send(&self.0, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map(drop)
    }
}
