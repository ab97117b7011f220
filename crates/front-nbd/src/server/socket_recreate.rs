//! Recreates a unix socket whose file was removed. Existing connections continue.

use super::{NbdServer, ServerShared};
use crate::endpoint::{BoundAddress, EndpointListener, ListenError};
use std::path::Path;
use std::sync::{Arc, MutexGuard, PoisonError};

impl NbdServer {
    /// Listens again at the unix socket's `path`, whose file was removed. Connections continue.
    ///
    /// # Errors
    /// The system refuses, another server listens there now, or another process had bound it.
    pub fn bind_again(&self, path: &Path) -> Result<(), ListenError> {
        let (endpoints, encrypted) = &self.endpoints;
        let ours = self
            .bound
            .iter()
            .zip(endpoints)
            .find(|(bound, _)| matches!(bound, BoundAddress::Unix(at) if at == path));
        let endpoint = ours.map(|(_, endpoint)| endpoint).filter(|endpoint| endpoint.is_ours());
        let listening = endpoint.ok_or(ListenError::Foreign)?.listen(*encrypted)?;
        self.shared.again().push(listening);
        self.shared.wake();
        Ok(())
    }
}

impl ServerShared {
    fn again(&self) -> MutexGuard<'_, Vec<EndpointListener>> {
        self.again.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the sockets whose files were removed with the recreated ones. Connections waiting
    /// at an old socket are accepted first, because closing it would drop them. An error means that
    /// none can be accepted for a while.
    pub(super) fn replace_gone(self: &Arc<Self>, listening: &mut [EndpointListener]) -> Result<(), ()> {
        loop {
            // Not locked while connections are accepted.
            let next = self.again().pop();
            let Some(again) = next else { return Ok(()) };
            let Some(gone) = listening.iter_mut().find(|gone| gone.bound == again.bound) else { continue };
            loop {
                match self.accept_one(gone) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(()) => {
                        self.again().push(again);
                        return Err(());
                    }
                }
            }
            *gone = again;
        }
    }
}
