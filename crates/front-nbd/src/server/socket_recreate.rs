//! A unix socket whose file somebody has removed: another one takes its place, and connections go on.

use super::{NbdServer, Shared};
use crate::endpoint::{Bound, ListenError, Listening};
use std::path::Path;
use std::sync::{Arc, MutexGuard, PoisonError};

impl NbdServer {
    /// Listens anew on the unix socket at `path`, whose file somebody has removed. Connections go on.
    ///
    /// # Errors
    /// The system refuses, somebody else listens there now, or somebody else had bound it.
    pub fn bind_again(&self, path: &Path) -> Result<(), ListenError> {
        let (endpoints, encrypted) = &self.endpoints;
        let ours = self
            .bound
            .iter()
            .zip(endpoints)
            .find(|(bound, _)| matches!(bound, Bound::Unix(at) if at == path));
        let endpoint = ours.map(|(_, endpoint)| endpoint).filter(|endpoint| endpoint.is_ours());
        let listening = endpoint.ok_or(ListenError::SomebodyElses)?.listen(*encrypted)?;
        self.shared.again().push(listening);
        self.shared.wake();
        Ok(())
    }
}

impl Shared {
    fn again(&self) -> MutexGuard<'_, Vec<Listening>> {
        self.again.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sockets that were bound again take the places of those whose files have gone. Whoever has connected there is
    /// accepted first: with the socket its connection would go. An error means that none can be accepted for a while.
    pub(super) fn replace_gone(self: &Arc<Self>, listening: &mut [Listening]) -> Result<(), ()> {
        loop {
            // Not locked while anybody is accepted.
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
