//! Who may write to a volume.

use bcached_port::Export;

/// A client's right to write, until it is dropped: when the client is gone and all that it asked for is done.
pub(crate) struct Permit {}

/// **The one place where a client that is about to write is asked for permission.** It is asked with the first request that
/// changes something, and then no more; `None` answers this and every later one with `VIRTIO_BLK_S_IOERR`, since virtio-blk
/// has no status of its own for it.
///
/// Here only the volume itself says no. That one client writes at a time, whichever front end it comes by, belongs here.
pub(crate) fn ask_to_write(export: &Export) -> Option<Permit> {
    if export.read_only { None } else { Some(Permit {}) }
}

/// Whether a client that connects is offered a read-only disk: what [`ask_to_write`] would refuse it now.
pub(crate) const fn is_offered_read_only(export: &Export) -> bool {
    export.read_only
}
