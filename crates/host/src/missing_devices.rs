//! Backing devices that are gone: how long requests have been waiting for one, and how another
//! device takes its place.
//!
//! An open device that was unplugged never works again, and fails every operation. The set has
//! refused a request that met such a device, and the request has changed nothing that matters.
//! Depending on the policy of the volume, it is retried when the device is back.
//!
//! No request of the volume is in flight while its device is exchanged: waiting requests are not in
//! flight, and new ones wait for the exchange to end. So the exchange and the requests never wait
//! for each other.

use crate::Host;
use crate::host::HostState;
use bcached_engine::{CacheSet, Error, ErrorPolicy, VolumeId};
use bcached_env::Time;
use std::collections::{BTreeMap, BTreeSet};

/// The devices that are gone or being exchanged, and the number of requests in flight.
#[derive(Default)]
pub struct MissingDevices {
    missed: BTreeMap<VolumeId, MissingDevice>,
    /// Volumes whose devices a request has found to be gone.
    gone: BTreeSet<VolumeId>,
    /// Volumes whose devices are being exchanged.
    exchanged: BTreeSet<VolumeId>,
    /// Number of requests in flight in the sets, by volume. A volume stays here at 0.
    in_flight: BTreeMap<VolumeId, usize>,
}

/// A device that requests needed but could not reach.
struct MissingDevice {
    /// When the first of these requests arrived.
    since: Time,
    /// Whether the device failed to come back in time, and the log says so.
    is_over: bool,
}

/// Counts a request in flight in a set, until dropped.
pub struct InFlightGuard(Host, VolumeId);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let is_awaited = self.0.with(|state| {
            let Some(count) = state.absences.in_flight.get_mut(&self.1) else { return false };
            *count -= 1;
            *count == 0 && state.absences.is_exchanging(self.1)
        });
        if is_awaited {
            self.0.wake();
        }
    }
}

impl MissingDevices {
    fn is_exchanging(&self, volume: VolumeId) -> bool {
        self.exchanged.contains(&volume)
    }

    fn is_idle(&self, volume: VolumeId) -> bool {
        self.in_flight.get(&volume).is_none_or(|count| *count == 0)
    }

    /// Returns the time since which requests of the volume have been waiting for its backing
    /// device, if any have.
    #[must_use]
    pub fn missed_since(&self, volume: VolumeId) -> Option<Time> {
        self.missed.get(&volume).map(|missed| missed.since)
    }

    /// Returns the volumes whose devices a request has found to be gone.
    pub fn gone(&self) -> impl Iterator<Item = VolumeId> {
        self.gone.iter().copied()
    }

    /// Records that a request has found the volume's device to be gone.
    pub(crate) fn is_gone(&mut self, volume: VolumeId) {
        self.gone.insert(volume);
    }

    /// Forgets the volume, which is no longer served.
    pub fn forget(&mut self, volume: VolumeId) {
        self.missed.remove(&volume);
        self.gone.remove(&volume);
        if self.is_idle(volume) {
            self.in_flight.remove(&volume);
        }
    }
}

impl Host {
    /// Returns the set for a request of the volume, and [`Host::moves`] at that moment. Waits while
    /// the volume's device is being exchanged. `None`: no set has the volume.
    pub(crate) async fn enter(&self, volume: VolumeId) -> Option<(InFlightGuard, CacheSet, u64)> {
        self.until(|state| state.is_stopping || !state.absences.is_exchanging(volume)).await;
        self.with(|state| self.entered(state, volume))
    }

    /// Does the same, but returns `None` also where it would have to wait.
    pub(crate) fn enter_at_once(&self, volume: VolumeId) -> Option<(InFlightGuard, CacheSet, u64)> {
        self.with(
            |state| {
                if state.absences.is_exchanging(volume) { None } else { self.entered(state, volume) }
            },
        )
    }

    fn entered(&self, state: &mut HostState, volume: VolumeId) -> Option<(InFlightGuard, CacheSet, u64)> {
        let set = state.set_of(volume)?;
        *state.absences.in_flight.entry(volume).or_insert(0) += 1;
        Some((InFlightGuard(self.clone(), volume), set, state.moves()))
    }

    /// Returns the time until which a request waits for a backing device that is gone. `None`: it
    /// does not wait, or no longer.
    pub(crate) fn waits_for_backing(&self, volume: VolumeId) -> Option<Time> {
        let options = self.options_of(volume);
        if options.on_backing_error != ErrorPolicy::Freeze || self.with(|state| state.is_stopping) {
            return None;
        }
        let now = self.inner().env.now();
        let (since, is_first) = self.with(|state| {
            let missed = &mut state.absences.missed;
            let is_first = !missed.contains_key(&volume);
            (missed.entry(volume).or_insert(MissingDevice { since: now, is_over: false }).since, is_first)
        });
        let limit = options.freeze_timeout;
        let until = since + limit;
        if now >= until {
            self.has_waited(volume);
            return None;
        }
        if is_first {
            let (name, limit) = (self.name_of(volume), limit.as_secs());
            tracing::warn!(
                event = "device-awaited",
                "volume {name}: its backing device is gone; requests that need it wait for up to \
                 {limit} s in total (freeze_timeout); reconnect the device"
            );
        }
        Some(until)
    }

    /// Records that the device has not come back in time: requests that need it fail from now on.
    pub(crate) fn has_waited(&self, volume: VolumeId) {
        let is_news = self.with(|state| {
            let missed = state.absences.missed.get_mut(&volume);
            missed.is_some_and(|missed| !std::mem::replace(&mut missed.is_over, true))
        });
        if is_news {
            let name = self.name_of(volume);
            tracing::error!(
                event = "device-awaited-in-vain",
                "volume {name}: its backing device has not come back in time (freeze_timeout): requests \
                 that need it fail from now on, including flushes; bcached still looks for the device; \
                 reconnect it, or `bcached remove` the volume when no client uses it"
            );
        }
    }

    /// Blocks new requests of the volume, and waits for those in flight. Returns true once none is
    /// in flight any more; false if they do not end in time.
    pub(crate) async fn begin_exchange(&self, volume: VolumeId) -> bool {
        self.with(|state| state.absences.exchanged.insert(volume));
        let until = self.inner().env.now() + self.inner().opening.limits.exchange;
        let is_idle = |host: &Self| host.with(|state| state.absences.is_idle(volume));
        while !is_idle(self) && self.inner().env.now() < until {
            self.changes_until(until).await;
        }
        is_idle(self)
    }

    /// Lets requests that waited proceed: with the new device, if it `is_there`.
    pub(crate) fn end_exchange(&self, volume: VolumeId, is_there: bool) {
        self.change(|state| {
            state.absences.exchanged.remove(&volume);
            if is_there {
                state.absences.missed.remove(&volume);
                state.absences.gone.remove(&volume);
            }
        });
    }

    /// Returns whether a request was refused because a backing device is gone, rather than the
    /// cache device.
    pub(crate) fn misses_backing(&self, error: &Error) -> bool {
        let Error::Io { source, .. } = error else { return false };
        error.is_absence() && source.disk != self.inner().opening.cache.get()
    }

    /// Returns the label of a volume, or its UUID.
    fn name_of(&self, volume: VolumeId) -> String {
        let volumes = self.set_of(volume).map(|set| set.volumes()).unwrap_or_default();
        let found = volumes.into_iter().find(|info| info.id == volume);
        found.map_or_else(String::new, |info| {
            let label = info.label.to_string();
            if label.is_empty() { info.uuid.to_string() } else { label }
        })
    }
}
