//! Who may write to a volume: the port's rule, for whoever is on this socket.

use bcached_port::socket::has_hung_up;
use bcached_port::{Claim, Export, ExportTable, HasLeft, Moment, Peer};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// The right to write, until the last of its clones is dropped: when the client is gone and all that it asked for is done. `None` inside:
/// the volume is for several.
pub(crate) type Permit = Option<Arc<Claim>>;

/// A client, when it connected.
#[derive(Clone)]
pub(crate) struct Writer {
    peer: Peer,
    since: Moment,
    has_left: HasLeft,
    /// Another one was writing then, or nobody may.
    pub(crate) is_offered_read_only: bool,
}

impl Writer {
    /// Whoever is on that socket now, by this connection. Waits for a writer that has left, while it `goes_on`.
    pub(crate) fn connects(
        (exports, export): (&ExportTable, &Export),
        peer: Peer,
        connection: &Arc<UnixStream>,
        goes_on: impl Fn() -> bool,
    ) -> Self {
        // What was asked for may outlive the connection, which is not kept open for it.
        let connection = Arc::downgrade(connection);
        let has_left: HasLeft =
            Arc::new(move || connection.upgrade().is_none_or(|it| has_hung_up(it.as_fd())));
        if !export.shared {
            exports.writing().await_leavers(export.uuid, peer, || goes_on() && !has_left());
        }
        let (since, is_taken) = exports.writing().look(export.uuid, peer);
        Self { peer, since, has_left, is_offered_read_only: export.read_only || is_taken && !export.shared }
    }

    /// Asked with the first request that changes something, and again as long as the answer is no: that request and every later one
    /// ends with `VIRTIO_BLK_S_IOERR`, since virtio-blk has no status of its own for it.
    pub(crate) fn ask(&self, exports: &ExportTable, export: &Export) -> Option<Permit> {
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
