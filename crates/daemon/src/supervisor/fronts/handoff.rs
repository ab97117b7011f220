//! What the front ends leave to another process, and what they take over from one.

use crate::supervisor::fronts::{FrontendManager, FrontendServers};
use bcached_front_nbd as nbd;
use bcached_front_ublk as ublk;
use bcached_port::Frontend;
use std::collections::BTreeSet;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What the front ends have left.
pub struct FrontendHandOver {
    /// The places of NBD, and its clients.
    pub nbd: Option<nbd::Handoff>,
    /// Block devices. Each request to them is answered or kept.
    pub ublk: Option<ublk::Handoff>,
}

impl FrontendManager {
    /// Takes over these clients, each as its volume comes. Block devices of the process `former`
    /// move here while that process lives.
    pub fn succeeding(mut self, connections: Vec<nbd::HandoffConnection>, former: Option<u32>) -> Self {
        self.lock().resumed = connections.len();
        *self.lock_left() = connections;
        self.former = former;
        self
    }

    /// Checks whether there are clients to resume that NBD was not given yet.
    pub fn has_left(&self) -> bool {
        !self.lock_left().is_empty()
    }

    /// Hands these clients to the caller.
    pub fn take_left(&self) -> Vec<nbd::HandoffConnection> {
        std::mem::take(&mut *self.lock_left())
    }

    /// Resumes the clients that another process has left, or this one, and whose volumes are served
    /// by now.
    pub fn go_on(&self) {
        if let Some(nbd) = &self.lock().nbd {
            nbd.go_on();
        }
    }

    /// Checks whether some of these clients still wait.
    pub fn is_waited_for(&self) -> bool {
        self.has_left() || self.lock().nbd.as_ref().is_some_and(|nbd| !nbd.awaited().is_empty())
    }

    /// Returns how many of these clients were resumed, or wait.
    pub fn resumed(&self) -> usize {
        self.lock().resumed
    }

    /// Ends the clients that wait in vain for such volumes. Returns the UUIDs of the volumes, one
    /// for each client.
    pub fn give_up(&self, is_in_vain: impl Fn(&str) -> bool) -> Vec<String> {
        let mut running = self.lock();
        let ended = running.nbd.as_ref().map_or_else(Vec::new, |nbd| nbd.give_up(is_in_vain));
        running.resumed -= ended.len();
        ended
    }

    fn lock_left(&self) -> MutexGuard<'_, Vec<nbd::HandoffConnection>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the clients that have to reconnect if another process takes over.
    pub fn reconnect(&self) -> Vec<String> {
        let users = self.users().into_iter();
        let cannot =
            users.filter(|user| user.way == Frontend::VhostUser || (user.way == Frontend::Nbd && user.tls));
        let told = cannot.filter_map(|user| Some(format!("{} ({})", user.volume?, user.peer)));
        told.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// Ends all front ends and leaves what can be left. Pending replies are sent within `limit` for
    /// all together.
    pub fn leave(&self, limit: Duration) -> FrontendHandOver {
        let deadline = Instant::now() + limit;
        let left = || {
            deadline
                .saturating_duration_since(Instant::now())
                .max(crate::supervisor::fronts::EACH_MIN.min(limit))
        };
        let devices = self.lock().dev.devices();
        if let Some(devices) = devices {
            // They are not in use: the other process makes new ones.
            let names: Vec<_> =
                self.lock().claims.keys().filter(|name| devices.state(name).is_some()).cloned().collect();
            crate::supervisor::fronts::dev::cut(devices, &names, left());
        }
        let ended = FrontendServers { has_ended: true, ..FrontendServers::default() };
        let FrontendServers { nbd, vhost, fuse, ublk, dev, .. } = std::mem::replace(&mut *self.lock(), ended);
        let nbd = nbd.map(|server| server.leave(left()));
        if let Some(nbd) = &nbd {
            tell_ended(&nbd.ended);
        }
        crate::supervisor::fronts::end_machines_and_files(vhost, fuse, left);
        dev.shutdown(left());
        FrontendHandOver { nbd, ublk: ublk.map(|ublk| ublk.leave()) }
    }
}

/// The number of clients that a log line names; the rest is counted.
const NAMED_MAX: usize = 8;

fn tell_ended(ended: &[nbd::ClientInfo]) {
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
    tracing::warn!(event = "clients-cut", "NBD connections that cannot be handed over: {count} ({named})");
}
