//! Clients that found no room and do not sleep for it: their bells ring when there is some.

use crate::outbox::ReplySink;
use std::sync::{Arc, Weak};

/// Each client once, however often it asks.
#[derive(Default)]
pub(crate) struct WaitingClients(Vec<Weak<dyn ReplySink>>);

impl WaitingClients {
    /// Adds a client, and removes those that are gone: a client that connects and disconnects
    /// leaves nothing behind.
    pub(crate) fn enter(&mut self, client: &Arc<dyn ReplySink>) {
        let client = Arc::downgrade(client);
        self.0.retain(|known| known.strong_count() > 0 && !known.ptr_eq(&client));
        self.0.push(client);
    }

    /// Rings for all. Must not be called under a lock: a bell may do anything.
    pub(crate) fn ring(self) {
        for client in self.0 {
            if let Some(client) = client.upgrade() {
                client.has_room();
            }
        }
    }
}
