//! Volumes that are configured and not served yet. A client that asks for one that may still appear
//! waits for it: when a machine starts, clients connect before the devices appear.

use crate::export::{Export, ExportError, ExportTable};
use crate::lock::lock;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often a waiter checks whether its client is still connected.
const LOOK: Duration = Duration::from_millis(100);

/// Why a volume is not served.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeAbsence {
    /// A clause for the client.
    pub why: String,
    /// How long a client waits for it; `None`: it does not appear automatically, or is no longer
    /// expected.
    pub wait: Option<Duration>,
}

/// The expected volumes of one table.
#[derive(Default)]
pub(crate) struct ExpectedVolumes {
    state: Mutex<ExpectedState>,
    changed: Condvar,
}

#[derive(Default)]
struct ExpectedState {
    absent: BTreeMap<String, VolumeAbsence>,
    /// Some volumes are served under names that are not known yet; how long a client waits for
    /// them.
    unnamed: Option<Duration>,
    has_ended: bool,
    /// Number of changes so far.
    changes: u64,
}

impl ExpectedVolumes {
    fn change(&self, change: impl FnOnce(&mut ExpectedState)) {
        let mut state = lock(&self.state);
        change(&mut state);
        state.changes += 1;
        drop(state);
        self.changed.notify_all();
    }

    /// The volume is served, or is removed.
    pub(crate) fn settle(&self, name: &str) {
        self.change(|state| drop(state.absent.remove(name)));
    }

    /// Returns how long a client waits that gets this refusal, and the number of changes so far.
    fn wait_for(&self, refused: &ExportError) -> (Option<Duration>, u64) {
        let state = lock(&self.state);
        let wait = match refused {
            _ if state.has_ended => None,
            ExportError::NotServed(name) => state.absent.get(name).and_then(|absent| absent.wait),
            ExportError::Unknown(_) | ExportError::NameNeeded(_) => state.unnamed,
            _ => None,
        };
        (wait, state.changes)
    }

    /// Waits until there is another change, at most `limit`.
    fn wait(&self, changes: u64, limit: Duration) {
        let state = lock(&self.state);
        let is_same = |state: &mut ExpectedState| state.changes == changes;
        let waited = self.changed.wait_timeout_while(state, limit, is_same);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn explained(&self, refused: ExportError) -> ExportError {
        let state = lock(&self.state);
        match refused {
            _ if state.has_ended => ExportError::Ending,
            ExportError::NotServed(name) => match state.absent.get(&name) {
                Some(VolumeAbsence { why, .. }) => ExportError::Absent { why: why.clone(), name },
                None => ExportError::NotServed(name),
            },
            other => other,
        }
    }
}

impl ExportTable {
    /// Records why the volume called `name` is not served, until it is served or removed.
    pub fn is_absent(&self, name: &str, absent: VolumeAbsence) {
        let is_news = lock(&self.arrivals.state).absent.get(name) != Some(&absent);
        if is_news {
            self.arrivals.change(|state| drop(state.absent.insert(name.to_owned(), absent)));
        }
    }

    /// Expects volumes under names that are not known yet; a client waits this long for any name.
    /// `None`: all names are known.
    pub fn expect_names(&self, wait: Option<Duration>) {
        let is_news = lock(&self.arrivals.state).unnamed != wait;
        if is_news {
            self.arrivals.change(|state| state.unnamed = wait);
        }
    }

    /// Ends all waiting, now and later: the daemon ends, or another process takes over.
    pub fn end_waiting(&self) {
        self.arrivals.change(|state| state.has_ended = true);
    }

    /// Like [`ExportTable::find`], but waits for a volume that may still appear. It waits no longer
    /// than the volume's limit, less the time that the client has already `waited`, and only while
    /// `goes_on` says that the client is still there.
    ///
    /// # Errors
    /// Like [`ExportTable::find`], with the reason as far as it is known.
    pub fn find_or_wait(
        &self,
        wanted: &str,
        waited: Duration,
        goes_on: impl Fn() -> bool,
    ) -> Result<Arc<Export>, ExportError> {
        let begun = Instant::now();
        loop {
            let refused = match self.find(wanted) {
                Ok(export) => return Ok(export),
                Err(refused) => refused,
            };
            let (wait, changes) = self.arrivals.wait_for(&refused);
            let left = wait.unwrap_or_default().saturating_sub(waited + begun.elapsed());
            if left.is_zero() || !goes_on() {
                // It may have appeared between these two steps.
                return self.find(wanted).map_err(|refused| self.arrivals.explained(refused));
            }
            // A volume that appeared between these two steps changes the count, or is seen now.
            if self.find(wanted).is_err() {
                self.arrivals.wait(changes, left.min(LOOK));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frontend::Frontend;
    use std::thread;

    const LONG: Duration = Duration::from_secs(60);

    fn absent(wait: Option<Duration>) -> VolumeAbsence {
        VolumeAbsence { why: "its disk is missing".to_owned(), wait }
    }

    #[test]
    fn a_client_that_comes_early_gets_its_volume_or_the_reason() {
        let table = ExportTable::new();
        table.insert(Export::sample("tank", false));
        table.is_absent("tank", absent(Some(LONG)));
        let asked = |name: &'static str| {
            let table = table.by(Frontend::Nbd);
            thread::spawn(move || {
                table.find_or_wait(name, Duration::ZERO, || true).map(|found| found.name.clone())
            })
        };
        let (early, nameless) = (asked("tank"), asked(""));
        assert_eq!(
            table.find_or_wait("nobody", Duration::ZERO, || true).unwrap_err(),
            ExportError::Unknown("nobody".to_owned())
        );
        table.insert(Export::sample("tank", true));
        assert_eq!(early.join().unwrap().unwrap(), "tank");
        assert_eq!(nameless.join().unwrap().unwrap(), "tank");
        table.insert(Export::sample("pond", false));
        table.is_absent("pond", absent(Some(LONG)));
        let early = asked("pond");
        table.is_absent("pond", absent(None));
        let refused = early.join().unwrap().unwrap_err();
        assert_eq!(refused.to_string(), "the volume \"pond\" is not served: its disk is missing");
    }

    #[test]
    fn nobody_waits_longer_than_the_volume_is_to_be_waited_for() {
        let table = ExportTable::new();
        table.insert(Export::sample("tank", false));
        table.is_absent("tank", absent(Some(LONG)));
        assert!(table.find_or_wait("tank", LONG, || true).is_err(), "all of that time is over");
        assert!(table.find_or_wait("tank", Duration::ZERO, || false).is_err(), "its client has hung up");
    }

    #[test]
    fn names_that_are_not_known_yet_are_waited_for() {
        let table = ExportTable::new();
        table.expect_names(Some(LONG));
        let waits = {
            let table = table.clone();
            thread::spawn(move || table.find_or_wait("tank", Duration::ZERO, || true).is_ok())
        };
        table.insert(Export::sample("tank", true));
        assert!(waits.join().unwrap());
        table.expect_names(None);
        assert_eq!(
            table.find_or_wait("x", Duration::ZERO, || true).unwrap_err(),
            ExportError::Unknown("x".to_owned())
        );
    }

    #[test]
    fn the_end_ends_all_waiting() {
        let table = ExportTable::new();
        table.insert(Export::sample("tank", false));
        table.is_absent("tank", absent(Some(LONG)));
        let waits = {
            let table = table.clone();
            thread::spawn(move || table.find_or_wait("tank", Duration::ZERO, || true).unwrap_err())
        };
        table.end_waiting();
        assert_eq!(waits.join().unwrap(), ExportError::Ending);
    }
}
