//! Clients that were connected before this process served anything, because it has taken over, or
//! was to be replaced and goes on. Each is resumed as soon as its volume is served, whatever
//! becomes of others, unless the former process may still resume all of them.

use crate::supervisor::Supervisor;
use bcached_port::Frontend;
use bcached_uring::device::claim;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// How long new clients wait for volumes that were served before. These are back within a moment,
/// or their devices are faulty. After that a client is told if its volume is not there.
const DOOR_LIMIT: Duration = Duration::from_secs(5);

/// How long clients are kept, and devices reserved for this process, once it is ready except for
/// their volumes. Those devices have been waited for by then (`wait`). A device that is plugged in
/// again is back within this time, and few clients have more patience.
const CLIENTS_LIMIT: Duration = Duration::from_secs(60);

/// Why they are ended after that.
const GONE: &str = "their volumes have not come back";

/// What the loop knows of these clients.
#[derive(Default)]
pub struct EarlierClients {
    /// The moment since which no other process can resume them.
    alone: Option<Instant>,
    /// The moment since which all is served that comes by itself.
    pub ready: Option<Instant>,
    /// Devices that were not opened are released.
    are_settled: bool,
}

impl Supervisor {
    /// Resumes the clients that can go on, and gives up what has been kept for long enough.
    pub fn look_after_kept(&mut self) {
        let starts = self.is_first && self.predecessor.is_none() && self.earlier_clients.ready.is_none();
        let is_done =
            self.earlier_clients.are_settled && self.fronts.is_open() && !self.fronts.is_waited_for();
        let may_give_back = || self.predecessor.as_ref().is_some_and(|former| !former.has_died());
        if starts || is_done || may_give_back() {
            return;
        }
        if self.predecessor.is_some() {
            self.hand_over.loses_former();
        }
        let alone = *self.earlier_clients.alone.get_or_insert_with(Instant::now);
        self.fronts.go_on();
        // They are served by another way, and never by NBD again.
        let by_nbd = self.exports.by(Frontend::Nbd);
        let is_elsewhere = |volume: &str| self.exports.find(volume).is_ok() && by_nbd.find(volume).is_err();
        self.cut_kept("their volumes are no longer available through NBD", is_elsewhere);
        if !self.fronts.is_open() && alone.elapsed() >= DOOR_LIMIT {
            self.fronts.open();
        }
        if self.have_waited() {
            self.cut_kept(GONE, |_| true);
        }
        self.settle_claims();
    }

    /// Checks whether the clients and devices that are still kept were kept for long enough.
    /// Devices of the command line may take any time, but their clients do not wait that long.
    fn have_waited(&self) -> bool {
        let since = if self.strict { self.earlier_clients.alone } else { self.earlier_clients.ready };
        since.is_some_and(|since| since.elapsed() >= CLIENTS_LIMIT)
    }

    /// Releases devices that this process was to have and has not opened, when all is served that
    /// was, or has been waited for.
    fn settle_claims(&mut self) {
        let is_over = || self.have_waited() || self.missing(&self.shared().table).is_empty();
        if self.earlier_clients.ready.is_some() && !self.earlier_clients.are_settled && is_over() {
            claim::settle();
            self.earlier_clients.are_settled = true;
        }
    }

    /// Ends the clients that are kept for such volumes, given by UUID, and logs that with the
    /// reason.
    pub fn cut_kept(&self, why: &str, is_in_vain: impl Fn(&str) -> bool) {
        let cut = self.fronts.give_up(is_in_vain);
        if cut.is_empty() {
            return;
        }
        let name = |uuid: &String| self.daemon_state.names.get(uuid).unwrap_or(uuid).clone();
        let volumes: BTreeSet<_> = cut.iter().map(name).collect();
        let (count, volumes) = (cut.len(), volumes.into_iter().collect::<Vec<_>>().join(", "));
        tracing::warn!(
            event = "clients-cut",
            "NBD connections closed, because {why}: {count} (of {volumes})"
        );
    }
}
