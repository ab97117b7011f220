//! What front ends have for another process, and what they go on with that another one has left.

use super::{Fronts, Running};
use bcached_front_nbd as nbd;
use bcached_front_ublk as ublk;
use bcached_port::Way;
use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// What has been left.
pub struct Left {
    /// Where NBD was, and its clients.
    pub nbd: Option<nbd::Leaving>,
    /// Block devices, of which nobody has asked anything that is not answered or kept.
    pub ublk: Option<ublk::Leaving>,
}

impl Fronts {
    /// These clients are gone on with when everything is served. Block devices of the process `former` come here while that lives.
    pub fn succeeding(mut self, connections: Vec<nbd::Left>, former: Option<u32>) -> Self {
        *self.left.lock().unwrap_or_else(PoisonError::into_inner) = connections;
        self.former = former;
        self
    }

    /// There are clients to go on with.
    pub(super) fn has_left(&self) -> bool {
        !self.left.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Goes on with clients that another process has left, or this one. How many that are.
    pub(super) fn resume(&self, running: &Running) -> usize {
        let left = std::mem::take(&mut *self.left.lock().unwrap_or_else(PoisonError::into_inner));
        let count = left.len();
        match &running.nbd {
            Some(nbd) => nbd.resume(left),
            None if count > 0 => {
                tracing::warn!(
                    event = "clients-cut",
                    "NBD is not served any more: {count} connections are ended"
                );
            }
            None => {}
        }
        count
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
        let left = || deadline.saturating_duration_since(Instant::now()).max(super::EACH_MIN.min(limit));
        let devices = self.lock().dev.devices();
        if let Some(devices) = devices {
            // Nobody uses them: the other process makes others.
            let names: Vec<_> =
                self.lock().claims.keys().filter(|name| devices.state(name).is_some()).cloned().collect();
            super::dev::cut(devices, &names, left());
        }
        let ended = Running { has_ended: true, ..Running::default() };
        let Running { nbd, vhost, fuse, ublk, dev, .. } = std::mem::replace(&mut *self.lock(), ended);
        let nbd = nbd.map(|server| server.leave(left()));
        if let Some(ended) = nbd.as_ref().map(|nbd| nbd.ended).filter(|ended| *ended > 0) {
            tracing::warn!(event = "clients-cut", "NBD connections that cannot be gone on with: {ended}");
        }
        super::end_machines_and_files(vhost, fuse, left);
        dev.shutdown(left());
        Left { nbd, ublk: ublk.map(|ublk| ublk.leave()) }
    }
}
