//! The way to a VMM for what it did not ask: that its disk has changed.
//!
//! The VMM sends one end of a socket for that. The crate `vhost` takes it and has no message for a changed configuration,
//! nor does it lend the socket; so a duplicate is taken by peeking at the message before the crate reads it. It
//! counts only once the crate has found the message right.

use rustix::cmsg_space;
use rustix::io::Result;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use vhost::vhost_user::message::{BackendReq, FrontendReq};

/// Bytes of a message's header: code, flags, size of what follows.
const HEADER_BYTES: usize = 12;
/// Flags of a message: version 1, and no answer is wanted. The VMM asks for the new configuration before it would answer, and
/// who is to tell it that must not wait.
const FLAGS: u32 = 1;

/// A socket to the VMM.
pub(crate) struct Notices(OwnedFd);

impl Notices {
    /// The socket that comes with the message which is about to be read, if it is one for that.
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

    /// Says that the configuration space has changed.
    pub(crate) fn changed(&self) -> Result<()> {
        let mut message = Vec::with_capacity(HEADER_BYTES);
        message.extend(u32::from(BackendReq::CONFIG_CHANGE_MSG).to_ne_bytes());
        message.extend(FLAGS.to_ne_bytes());
        message.extend(0_u32.to_ne_bytes());
        send(&self.0, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map(drop)
    }
}
