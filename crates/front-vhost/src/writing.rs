//! Who may write to a volume: the port's rule, for whoever is on this socket.

use bcached_port::{Claim, Export, ExportTable, Moment, Peer};
use std::sync::Arc;

/// The right to write, until the last of its clones is dropped: when the client is gone and all that it asked for is done. `None` inside:
/// the volume is for several.
pub(crate) type Permit = Option<Arc<Claim>>;

/// A client, when it connected.
#[derive(Clone, Copy)]
pub(crate) struct Writer {
    peer: Peer,
    since: Moment,
    /// Another one was writing then, or nobody may.
    pub(crate) is_offered_read_only: bool,
}

impl Writer {
    /// Whoever is on that socket now.
    pub(crate) fn connects(exports: &ExportTable, export: &Export, peer: Peer) -> Self {
        let (since, is_taken) = exports.writing().look(export.uuid, peer);
        Self { peer, since, is_offered_read_only: export.read_only || is_taken && !export.shared }
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
        Some(Some(Arc::new(claim)))
    }
}
