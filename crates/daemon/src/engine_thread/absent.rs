//! Backing devices that are gone: since when requests wait for one, and how another one takes its place.
//!
//! What is open of such a device never works again, and says so with every operation. A request that met that has been refused by the set
//! and has changed nothing that counts; by the volume's policy it is asked again when the device is back. While that is exchanged no request
//! of the volume is in the set: those that wait are not, and those that come wait for the moment. So nobody waits for who waits for him.

use super::keeper::{Keeper, Sets};
use bcached_engine::{CacheSet, Error, OnError, VolumeId};
use bcached_env::Time;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How long requests that the set has are waited for before a device is exchanged.
pub const EXCHANGE_LIMIT: Duration = Duration::from_secs(10);

/// What is known of them.
#[derive(Default)]
pub struct Absences {
    missed: BTreeMap<VolumeId, Missed>,
    /// Volumes whose devices are being exchanged.
    exchanged: BTreeSet<VolumeId>,
    /// How many requests the sets have, of volumes that they have had any of.
    inside: BTreeMap<VolumeId, usize>,
}

/// A device that requests could not have.
struct Missed {
    /// When the first of them asked.
    since: Time,
    /// It has been waited for in vain, which the log was told.
    is_over: bool,
}

/// A request that a set has.
pub struct Inside(Keeper, VolumeId);

impl Drop for Inside {
    fn drop(&mut self) {
        let is_awaited = self.0.with(|sets| {
            let Some(count) = sets.absences.inside.get_mut(&self.1) else { return false };
            *count -= 1;
            *count == 0 && sets.absences.holds_off(self.1)
        });
        if is_awaited {
            self.0.look_again();
        }
    }
}

impl Absences {
    fn holds_off(&self, volume: VolumeId) -> bool {
        self.exchanged.contains(&volume)
    }

    fn is_empty(&self, volume: VolumeId) -> bool {
        self.inside.get(&volume).is_none_or(|count| *count == 0)
    }

    /// Since when requests of the volume have had to wait for its backing device, if they have.
    pub fn missed_since(&self, volume: VolumeId) -> Option<Time> {
        self.missed.get(&volume).map(|missed| missed.since)
    }

    /// The volume is served no more.
    pub fn forget(&mut self, volume: VolumeId) {
        self.missed.remove(&volume);
        if self.is_empty(volume) {
            self.inside.remove(&volume);
        }
    }
}

impl Keeper {
    /// A request goes to the set of the volume, as soon as no device is being exchanged under that: the set, and the [`Keeper::turn`] in which that
    /// has the volume. `None`: nobody has it.
    pub async fn enters(&self, volume: VolumeId) -> Option<(Inside, CacheSet, u64)> {
        self.until(|sets| sets.is_stopping || !sets.absences.holds_off(volume)).await;
        self.with(|sets| self.enter(sets, volume))
    }

    /// The same, `None` also if it had to wait.
    pub fn enters_at_once(&self, volume: VolumeId) -> Option<(Inside, CacheSet, u64)> {
        self.with(|sets| if sets.absences.holds_off(volume) { None } else { self.enter(sets, volume) })
    }

    fn enter(&self, sets: &mut Sets, volume: VolumeId) -> Option<(Inside, CacheSet, u64)> {
        let set = sets.home(volume)?;
        *sets.absences.inside.entry(volume).or_insert(0) += 1;
        Some((Inside(self.clone(), volume), set, sets.turn()))
    }

    /// Until when a request waits that needs a backing device that is gone; `None`: it does not wait, or not any more.
    pub fn waits_for_backing(&self, volume: VolumeId) -> Option<Time> {
        let options = self.options_of(volume);
        if options.on_backing_error != OnError::Freeze || self.with(|sets| sets.is_stopping) {
            return None;
        }
        let now = self.inner().env.now();
        let (since, is_first) = self.with(|sets| {
            let missed = &mut sets.absences.missed;
            let is_first = !missed.contains_key(&volume);
            (missed.entry(volume).or_insert(Missed { since: now, is_over: false }).since, is_first)
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
                "volume {name}: its backing device is gone: requests that need it wait for it, for {limit} s in all \
                 (freeze_timeout); connect it again"
            );
        }
        Some(until)
    }

    /// The device has not come in time: who needs it fails from now on.
    pub fn has_waited(&self, volume: VolumeId) {
        let is_news = self.with(|sets| {
            let missed = sets.absences.missed.get_mut(&volume);
            missed.is_some_and(|missed| !std::mem::replace(&mut missed.is_over, true))
        });
        if is_news {
            let name = self.name_of(volume);
            tracing::error!(
                event = "device-awaited-in-vain",
                "volume {name}: its backing device has not come back in time (freeze_timeout): requests that need it fail from now \
                 on, also flushes; it is still looked for; connect it again, or `bcached remove` the volume when nobody uses it"
            );
        }
    }

    /// From now on no request of the volume goes to its set; true when that has none any more, false if they do not end.
    pub async fn begin_exchange(&self, volume: VolumeId) -> bool {
        self.with(|sets| sets.absences.exchanged.insert(volume));
        let until = self.inner().env.now() + EXCHANGE_LIMIT;
        let is_empty = |keeper: &Self| keeper.with(|sets| sets.absences.is_empty(volume));
        while !is_empty(self) && self.inner().env.now() < until {
            self.changes_until(until).await;
        }
        is_empty(self)
    }

    /// Who waited goes on: with the new device, if it `is_there`.
    pub fn end_exchange(&self, volume: VolumeId, is_there: bool) {
        self.change(|sets| {
            sets.absences.exchanged.remove(&volume);
            if is_there {
                sets.absences.missed.remove(&volume);
            }
        });
    }

    /// A backing device is gone, and not the cache, and the request was refused for that.
    pub fn misses_backing(&self, error: &Error) -> bool {
        let Error::Io { source, .. } = error else { return false };
        error.is_absence() && source.disk != self.inner().recipe.cache.get()
    }

    /// What the volume is called on its superblock.
    fn name_of(&self, volume: VolumeId) -> String {
        let volumes = self.home(volume).map(|set| set.volumes()).unwrap_or_default();
        let found = volumes.into_iter().find(|info| info.id == volume);
        found.map_or_else(String::new, |info| {
            let label = info.label.to_string();
            if label.is_empty() { info.uuid.to_string() } else { label }
        })
    }
}
