//! Cache devices that go away while their set is open and come back as another device: the
//! counterpart of [`crate::supervisor::volumes::reconnect`] for caches. The engine opens the set
//! again on the new device (`bcached_host::cache_reconnect`). Waiting requests then continue. The
//! claims of backing devices are held throughout.

use crate::engine_error;
use crate::engine_thread::Engine;
use crate::supervisor::caches::CacheEvent;
use crate::supervisor::devices::open_timeout::{OpenError, PendingOpens};
use crate::supervisor::table::CacheEntry;
use crate::supervisor::volumes::reconnect::{RetryState, fails};
use crate::supervisor::{Event, Supervisor};
use bcached_control::failure::{Failure, Kind};
use bcached_engine::{Error, Status};
use bcached_format::Uuid;
use bcached_offline::devices::{self, CacheDevice, Reconnection};
use bcached_uring::DevicePresence;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// Cache devices whose sets have failed.
#[derive(Default)]
pub struct CacheReconnects {
    /// Those that are looked for, by cache.
    absent: BTreeMap<usize, RetryState>,
    /// Those that are gone while their sets have not noticed; a probing write is in flight.
    proving: BTreeSet<usize>,
    /// Those that their engines are about to take up.
    returning: BTreeMap<usize, (DevicePresence, PathBuf)>,
    /// Looks that hang.
    slow: PendingOpens<Reconnection<CacheDevice>>,
}

impl CacheReconnects {
    /// Returns true if there is something to check soon.
    pub fn is_busy(&self) -> bool {
        !self.absent.is_empty() || !self.returning.is_empty()
    }
}

/// What is known of an open cache.
struct OpenCache {
    name: String,
    device: String,
    /// The device's own UUID.
    uuid: Uuid,
    presence: DevicePresence,
    engine: Engine,
}

impl OpenCache {
    fn of(entry: &CacheEntry) -> Option<Self> {
        let (name, device) = (entry.display_name().to_owned(), entry.device.clone());
        Some(Self { name, device, uuid: entry.uuid?, presence: entry.opened?, engine: entry.engine()? })
    }
}

impl Supervisor {
    /// Looks for the device of a cache whose set has failed, if the device is gone, or if it fails
    /// and its name leads to another device by now.
    pub fn look_for_absent_cache(&mut self, cache: usize, status: &Status) {
        if self.cache_reconnects.returning.contains_key(&cache) {
            return;
        }
        let Some(known) = self.shared().table.caches.get(cache).and_then(OpenCache::of) else { return };
        let is_gone = known.presence.is_gone();
        if is_gone && status.failed.is_none() {
            self.prove_cache(cache, &known.engine);
        }
        if status.failed.is_none() || !is_gone && !fails(&status.cache_health) {
            if self.cache_reconnects.absent.remove(&cache).is_some() {
                self.shared().table.caches[cache].absent = None;
            }
            return;
        }
        let absent = self.cache_reconnects.absent.entry(cache).or_insert_with(RetryState::since_now);
        let gone = format!(
            "{} is gone: the system no longer has it; the cache is reopened when a device with its UUID appears",
            known.device
        );
        if is_gone && absent.goes() {
            tracing::error!(event = "device-gone", "cache {}: {gone}", known.name);
            self.shared().table.caches[cache].absent = Some(gone.as_str().into());
        }
        // A pending request may still complete.
        let absent = self.cache_reconnects.absent.get_mut(&cache);
        if status.cache_health.waiting > 0 || !absent.is_some_and(RetryState::is_due) {
            return;
        }
        let (uuid, presence) = (known.uuid, known.presence);
        let open = move |device: &str| devices::open_returned_cache(device, uuid, presence);
        match self.cache_reconnects.slow.open(&known.device, open) {
            Ok(Reconnection::Reopened(found)) => self.begin_cache_return(cache, &known.engine, found),
            Ok(Reconnection::Rejected(failure)) => self.cache_not_taken(cache, failure, RetryState::tells),
            Err(OpenError::NoAnswer(_)) => {}
            Err(OpenError::Failed(failure)) if failure.kind != Kind::NotFound => {
                self.cache_not_taken(cache, failure, RetryState::refused);
            }
            Ok(Reconnection::Missing) | Err(OpenError::Failed(_)) => {
                if self.cache_reconnects.absent.get_mut(&cache).is_some_and(RetryState::is_away) {
                    self.shared().table.caches[cache].absent = is_gone.then(|| gone.into());
                }
            }
        }
    }

    /// Makes the set of a vanished device find out. Only a write tells it, and the next one may be
    /// half a minute away, or never come.
    fn prove_cache(&mut self, cache: usize, engine: &Engine) {
        if self.cache_reconnects.proving.insert(cache) {
            let sender = self.sender.clone();
            engine.prove_cache(Box::new(move |_set_knows| {
                drop(sender.send(Event::Cache(cache, CacheEvent::Probed)));
            }));
        }
    }

    /// The probing write has ended. If the set still has not noticed, the next look probes again.
    pub fn cache_proved(&mut self, cache: usize) {
        self.cache_reconnects.proving.remove(&cache);
    }

    /// Gives the new device to the cache's engine.
    fn begin_cache_return(&mut self, cache: usize, engine: &Engine, found: CacheDevice) {
        let (presence, path) = (found.device.presence(), found.device.path().to_owned());
        self.cache_reconnects.returning.insert(cache, (presence, path));
        let sender = self.sender.clone();
        let answer =
            move |taken| drop(sender.send(Event::Cache(cache, CacheEvent::Returned(Box::new(taken)))));
        engine.take_back_cache(found, Box::new(answer));
    }

    /// Handles the engine's answer: it has taken the device up, or says why not. The next flush of
    /// a client reports a loss.
    pub fn cache_returned(&mut self, cache: usize, taken: Result<bool, Error>) {
        let Some((presence, path)) = self.cache_reconnects.returning.remove(&cache) else { return };
        let Some(OpenCache { name, device, .. }) =
            self.shared().table.caches.get(cache).and_then(OpenCache::of)
        else {
            return;
        };
        match taken {
            Err(error) => {
                let failure = engine_error::of_cache_return(&name, &path, &error);
                self.cache_not_taken(cache, failure, RetryState::refused);
            }
            Ok(may_have_lost) => {
                self.cache_reconnects.absent.remove(&cache);
                // The log has reported nothing of this device yet.
                self.said.remove(&device);
                {
                    let entry = &mut self.shared().table.caches[cache];
                    (entry.opened, entry.absent) = (Some(presence), None);
                }
                tracing::info!(
                    event = "device-returned",
                    "cache {name}: its device is back as {}",
                    path.display()
                );
                if may_have_lost {
                    tracing::error!(
                        event = "flush-failed",
                        "cache {name}: its device may have lost power, and with it writes that clients have not \
                         flushed: the next flush of each volume with dirty data reports this"
                    );
                }
            }
        }
    }

    /// Forgets caches that are no longer open.
    pub fn look_after_cache_returns(&mut self) {
        let open: Vec<_> = self.shared().table.open_engines().into_iter().map(|(index, _)| index).collect();
        self.cache_reconnects.absent.retain(|cache, _| open.contains(cache));
        self.cache_reconnects.proving.retain(|cache| open.contains(cache));
        self.cache_reconnects.returning.retain(|cache, _| open.contains(cache));
    }

    /// Logs why a device is not taken up, as for a volume.
    fn cache_not_taken(
        &mut self,
        cache: usize,
        failure: Failure,
        note: fn(&mut RetryState, &Failure) -> bool,
    ) {
        let Some(absent) = self.cache_reconnects.absent.get_mut(&cache) else { return };
        if !note(absent, &failure) {
            return;
        }
        let entry = &mut self.shared().table.caches[cache];
        tracing::error!(event = "device-not-taken", "cache {}: {failure}", entry.display_name());
        entry.absent = Some(failure.to_string().into());
    }
}
