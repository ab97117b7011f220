//! The catalog of exports that the handshake consults, for one client.

use crate::connection::ClientContext;
use crate::proto::handshake::{ExportCatalog, ExportOffer};
use crate::server::ServerShared;
use crate::socket::Socket;
use bcached_port::{Export, ExportError, Peer, WriterGeneration};
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The exports, as offered to one client.
pub(crate) struct ClientCatalog<'a> {
    pub(crate) shared: &'a Arc<ServerShared>,
    pub(crate) caller: &'a ClientContext,
    pub(crate) socket: &'a Arc<Socket>,
    /// When the last offer was made; whatever the client reads is at least as new.
    pub(crate) since: Cell<WriterGeneration>,
    /// How long the client has waited for volumes that were not served yet.
    pub(crate) waited: Cell<Duration>,
}

impl ClientCatalog<'_> {
    /// Finds a volume by name. May wait for the volume, and for its last writer to leave. Stops
    /// waiting if the client has hung up or lost its place, or if the server stops.
    fn find(&self, name: &str) -> Result<Arc<Export>, ExportError> {
        self.shared.go_on();
        let begun = Instant::now();
        let goes_on = || !self.shared.is_stopping() && !self.socket.has_hung_up();
        let found = self.shared.exports.find_or_wait(name, self.waited.get(), goes_on);
        // Connections taken over from another server are resumed first.
        self.shared.go_on();
        // A read-only client need not wait for a writer. The offer describes the volume as it is
        // after the wait.
        let found = match found {
            Ok(export) if !export.shared && !export.read_only && !self.caller.read_only => {
                self.shared.exports.writing().await_leavers(export.uuid, self.caller.peer, goes_on);
                self.shared.exports.find(name)
            }
            found => found,
        };
        self.waited.set(self.waited.get() + begun.elapsed());
        found
    }
}

impl ExportCatalog for ClientCatalog<'_> {
    fn names(&self) -> Vec<String> {
        self.shared.exports.served().iter().map(|export| export.name.clone()).collect()
    }

    fn offer(&self, name: &str) -> Result<ExportOffer, String> {
        let export = self.find(name).map_err(|error| error.to_string())?;
        let (now, taken) = self.shared.exports.writing().look(export.uuid, self.caller.peer);
        self.since.set(now);
        let read_only = export.read_only || self.caller.read_only || (taken && !export.shared);
        let one_of_several = matches!(self.caller.peer, Peer::Process { .. });
        let multi_conn = read_only || export.shared || one_of_several;
        Ok(ExportOffer { export, read_only, multi_conn })
    }
}
