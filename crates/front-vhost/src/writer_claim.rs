//! Which client may write to a volume: applies the port's rule to the client on this socket.

use bcached_port::socket::has_hung_up;
use bcached_port::{Export, ExportTable, Peer, PeerGoneCheck, WriteClaim, WriterGeneration};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// The write claim, held until the last clone is dropped: when the client is gone and all its
/// requests are complete. `None` inside means that the volume is shared.
pub(crate) type WritePermit = Option<Arc<WriteClaim>>;

/// A client, as of when it connected.
#[derive(Clone)]
pub(crate) struct WritingClient {
    peer: Peer,
    since: WriterGeneration,
    has_left: PeerGoneCheck,
    /// Another client was writing then, or the volume is read-only.
    pub(crate) is_offered_read_only: bool,
}

impl WritingClient {
    /// Makes the writer for the client that is now on the socket, through this connection. Waits
    /// for a former writer that has left, while `goes_on` returns true.
    pub(crate) fn connects(
        (exports, export): (&ExportTable, &Export),
        peer: Peer,
        connection: &Arc<UnixStream>,
        goes_on: impl Fn() -> bool,
    ) -> Self {
        // Requests may outlive the connection, which they must not keep open.
        let connection = Arc::downgrade(connection);
        let has_left: PeerGoneCheck =
            Arc::new(move || connection.upgrade().is_none_or(|it| has_hung_up(it.as_fd())));
        if !export.shared {
            exports.writing().await_leavers(export.uuid, peer, || goes_on() && !has_left());
        }
        let (since, is_taken) = exports.writing().look(export.uuid, peer);
        Self { peer, since, has_left, is_offered_read_only: export.read_only || is_taken && !export.shared }
    }

    /// Asks for the write claim. Called for the first request that changes content, and again as
    /// long as it is refused. A refused request ends with `VIRTIO_BLK_S_IOERR`, because virtio-blk
    /// has no specific status for it.
    pub(crate) fn ask(&self, exports: &ExportTable, export: &Export) -> Option<WritePermit> {
        if export.read_only {
            return None;
        }
        if export.shared {
            return Some(None);
        }
        let claim = exports.writing().claim(export.uuid, self.peer, self.since)?;
        claim.ends_after(Arc::clone(&self.has_left));
        Some(Some(Arc::new(claim)))
    }
}
