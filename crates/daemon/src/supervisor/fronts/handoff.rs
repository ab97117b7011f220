//! What front ends have for another process, and what they go on with that another one has left.

use crate::supervisor::fronts::{Fronts, Running};
use bcached_front_nbd as nbd;
use bcached_front_ublk as ublk;
use bcached_port::Way;
use std::collections::BTreeSet;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What has been left.
pub struct Left {
    /// Where NBD was, and its clients.
    pub nbd: Option<nbd::Leaving>,
    /// Block devices, of which nobody has asked anything that is not answered or kept.
    pub ublk: Option<ublk::Leaving>,
}

impl Fronts {
    /// These clients are gone on with as their volumes come. Block devices of the process `former` come here while that lives.
    pub fn succeeding(mut self, connections: Vec<nbd::Left>, former: Option<u32>) -> Self {
        self.lock().resumed = connections.len();
        *self.lock_left() = connections;
        self.former = former;
        self
    }

    /// There are clients to go on with, which NBD has not been given.
    pub fn has_left(&self) -> bool {
        !self.lock_left().is_empty()
    }

    /// They are the caller's.
    pub fn take_left(&self) -> Vec<nbd::Left> {
        std::mem::take(&mut *self.lock_left())
    }

    /// Goes on with the clients that another process has left, or this one, whose volumes are served by now.
    pub fn go_on(&self) {
        if let Some(nbd) = &self.lock().nbd {
            nbd.go_on();
        }
    }

    /// Some of them wait.
    pub fn is_waited_for(&self) -> bool {
        self.has_left() || self.lock().nbd.as_ref().is_some_and(|nbd| !nbd.awaited().is_empty())
    }

    /// Of such clients, how many have been gone on with, or wait.
    pub fn resumed(&self) -> usize {
        self.lock().resumed
    }

    /// Those that wait for such volumes wait in vain: their UUIDs, one for each of them.
    pub fn give_up(&self, is_in_vain: impl Fn(&str) -> bool) -> Vec<String> {
        let mut running = self.lock();
        let ended = running.nbd.as_ref().map_or_else(Vec::new, |nbd| nbd.give_up(is_in_vain));
        running.resumed -= ended.len();
        ended
    }

    fn lock_left(&self) -> MutexGuard<'_, Vec<nbd::Left>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who has to connect again if another process takes over.
    pub fn reconnect(&self) -> Vec<String> {
        let users = self.users().into_iter();
        let cannot = users.filter(|user| user.way == Way::VhostUser || (user.way == Way::Nbd && user.tls));
        let told = cannot.filter_map(|user| Some(format!("{} ({})", user.volume?, user.peer)));
        told.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Ends all of them and leaves what can be left. What is due goes out, up to `limit` for all together.
    pub fn leave(&self, limit: Duration) -> Left {
        let deadline = Instant::now() + limit;
        let left = || {
            deadline
                .saturating_duration_since(Instant::now())
                .max(crate::supervisor::fronts::EACH_MIN.min(limit))
        };
        let devices = self.lock().dev.devices();
        if let Some(devices) = devices {
            // Nobody uses them: the other process makes others.
            let names: Vec<_> =
                self.lock().claims.keys().filter(|name| devices.state(name).is_some()).cloned().collect();
            crate::supervisor::fronts::dev::cut(devices, &names, left());
        }
        let ended = Running { has_ended: true, ..Running::default() };
        let Running { nbd, vhost, fuse, ublk, dev, .. } = std::mem::replace(&mut *self.lock(), ended);
        let nbd = nbd.map(|server| server.leave(left()));
        if let Some(nbd) = &nbd {
            tell_ended(&nbd.ended);
        }
        crate::supervisor::fronts::end_machines_and_files(vhost, fuse, left);
        dev.shutdown(left());
        Left { nbd, ublk: ublk.map(|ublk| ublk.leave()) }
    }
}

/// Clients that a log line names; of more it says how many.
const NAMED_MAX: usize = 8;

fn tell_ended(ended: &[nbd::Client]) {
    if ended.is_empty() {
        return;
    }
    let uses =
        ended.iter().filter_map(|client| Some(format!("{} uses {}", client.peer, client.export.as_ref()?)));
    let uses: BTreeSet<_> = uses.collect();
    let more = uses.len().saturating_sub(NAMED_MAX);
    let mut named: Vec<_> = uses.into_iter().take(NAMED_MAX).collect();
    if more > 0 {
        named.push(format!("{more} others"));
    }
    let (count, named) = (ended.len(), named.join(", "));
    tracing::warn!(event = "clients-cut", "NBD connections that cannot be gone on with: {count} ({named})");
}
