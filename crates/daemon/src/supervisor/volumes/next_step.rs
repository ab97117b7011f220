//! Decides what a waiting volume needs next, and which engine is to serve it.

use crate::engine_thread::Engine;
use crate::supervisor::report::reasons;
use crate::supervisor::table::{CacheEntry, CacheState, Table, VolumeEntry, VolumeState};
use crate::supervisor::volumes::cacheless;
use bcached_control::failure::{Failure, Kind};
use bcached_format::{BackingSuperblock, Uuid};

/// What a volume needs next.
pub enum Step {
    /// Open its device and give it to the engine of this cache, or of the one that its superblock
    /// names.
    Open(Option<usize>),
    /// Its cache is unavailable for this reason: read the volume's device to see what that means
    /// for it.
    Look(CacheName, Failure),
}

/// The name of a cache, for a sentence.
pub type CacheName = String;

/// Why no engine takes a volume.
pub enum Unserved {
    /// Not yet.
    Waits(Failure),
    /// Its cache, whichever that is, is missing.
    Missing(Failure),
    /// Permanently.
    Failed(Failure),
}

impl Table {
    /// The device and the next step of a waiting volume, if there is one.
    pub fn next_step(&mut self, index: usize) -> Option<(String, Step)> {
        let entry = self.volumes.get(index)?;
        let VolumeState::Waiting(_) = entry.state else { return None };
        let device = entry.backing.clone()?;
        let cache = self.cache_said(entry.wanted_cache.as_deref());
        let is_moving = cache.and_then(|cache| self.former_of(cache)).is_some();
        let state = cache.and_then(|cache| self.caches.get(cache)).map(|cache| &cache.state);
        match state {
            // The volume's device says on which of the two caches it is.
            Some(_) if is_moving => Some((device, Step::Open(cache))),
            Some(CacheState::Failed(failure))
                if !self.strict && (cacheless::is_missing(failure) || failure.kind == Kind::NotBcache) =>
            {
                let (cache, reason) = (&self.caches[cache?], failure.clone());
                Some((device, Step::Look(cache.display_name().to_owned(), reason)))
            }
            Some(CacheState::Failed(failure)) => {
                let failure = reasons::cache_not_served(failure);
                self.set_volume(index, VolumeState::Failed(failure));
                None
            }
            Some(CacheState::Waiting(reason)) => {
                let (cache, reason) = (&self.caches[cache?], reason.clone());
                Some((device, Step::Look(cache.display_name().to_owned(), reason)))
            }
            // An opening takes a moment and does not deserve a warning.
            Some(CacheState::Opening { .. }) => {
                let again = &self.caches[cache?];
                if let Some(reason) = &again.trouble {
                    // The opening may fail again, or hang: a volume that can be served without it
                    // does not wait.
                    return Some((device, Step::Look(again.display_name().to_owned(), reason.clone())));
                }
                self.volumes[index].state = VolumeState::Waiting(reasons::its_cache_opens());
                None
            }
            Some(CacheState::Ending { .. } | CacheState::Stopped | CacheState::Released) => None,
            Some(CacheState::Open { .. }) | None => Some((device, Step::Open(cache))),
        }
    }

    /// Retries refused volumes after this cache's set has opened: a volume that was refused because
    /// its set was missing may be served now, unless its section names another cache.
    pub fn set_has_come(&mut self, cache: usize) {
        for index in 0..self.volumes.len() {
            let entry = &self.volumes[index];
            let said = self.cache_said(entry.wanted_cache.as_deref());
            if is_refused(entry) && said.is_none_or(|said| said == cache) {
                self.volumes[index].state = VolumeState::Waiting(reasons::its_cache_opens());
            }
        }
    }

    /// Retries a volume that a cache has forgotten, if it was refused because of a set.
    pub fn volume_is_forgotten(&mut self, uuid: Uuid) {
        for entry in self.volumes.iter_mut().filter(|entry| entry.uuid == Some(uuid)) {
            if is_refused(entry) {
                entry.state = VolumeState::Waiting(reasons::its_cache_opens());
            }
        }
    }

    /// The cache that a volume's section names, or, if it names none, the only one there is.
    pub fn cache_said(&self, wanted: Option<&str>) -> Option<usize> {
        match wanted {
            Some(bcached_config::NO_CACHE) => None,
            Some(name) => {
                let mut all = self.lasting_caches();
                all.find(|(_, cache)| cache.name.as_deref() == Some(name)).map(|(index, _)| index)
            }
            None => {
                let mut all = self.lasting_caches().map(|(index, _)| index);
                all.next().filter(|_| all.next().is_none())
            }
        }
    }

    /// Returns true if the volume has, or is to have, the cache called `said`; `None` means no
    /// change.
    pub fn has_cache(&self, entry: &VolumeEntry, said: Option<&str>) -> bool {
        let wanted = entry.wanted_cache.as_deref();
        let is_on = |said: &str| {
            let on =
                entry.cache.and_then(|cache| self.caches.get(cache)).and_then(|cache| cache.name.as_deref());
            on == Some(said)
        };
        said.is_none_or(|said| match wanted {
            Some(wanted) => wanted == said,
            None => {
                is_on(said)
                    || self.cache_said(None).is_some_and(|only| self.cache_said(Some(said)) == Some(only))
            }
        })
    }

    /// The engine of the volume's cache: the configured one, else the one whose set its superblock
    /// names.
    pub fn engine_for(
        &self,
        cache: Option<usize>,
        superblock: &BackingSuperblock,
    ) -> Result<(usize, Engine), Unserved> {
        if let Some(elsewhere) = cache.and_then(|cache| self.still_on_former(cache, superblock)) {
            return elsewhere;
        }
        if let Some(index) = cache {
            return match &self.caches[index].state {
                CacheState::Open { engine, .. } => Ok((index, engine.clone())),
                _ => Err(Unserved::Waits(reasons::its_cache_opens())),
            };
        }
        for (index, cache) in self.real_caches() {
            if let CacheState::Open { set, engine, .. } = &cache.state
                && *set == superblock.set_uuid()
            {
                return Ok((index, engine.clone()));
            }
        }
        let is_its = |cache: &&CacheEntry| cache.last_set == Some(superblock.set_uuid());
        let refused =
            self.real_caches().map(|(_, cache)| cache).filter(is_its).find_map(|cache| match &cache.state {
                CacheState::Failed(failure) => Some(failure),
                _ => None,
            });
        if let Some(failure) = refused {
            let refused = reasons::cache_not_served(failure);
            let goes_without = !self.strict && cacheless::is_missing(failure);
            return Err(if goes_without { Unserved::Missing(refused) } else { Unserved::Failed(refused) });
        }
        let opens_first =
            |cache: &CacheEntry| matches!(cache.state, CacheState::Opening { .. }) && cache.trouble.is_none();
        if self.real_caches().any(|(_, cache)| opens_first(cache)) {
            return Err(Unserved::Waits(reasons::its_cache_opens()));
        }
        let waited_for = self.caches.iter().filter_map(|cache| match &cache.state {
            CacheState::Waiting(reason) => Some(reason),
            CacheState::Opening { .. } => cache.trouble.as_ref(),
            _ => None,
        });
        let waited_for: Vec<_> = waited_for.collect();
        if let Some(first) = waited_for.first() {
            // The volume may belong to any of them, also to one that is only in use.
            let reason = waited_for.iter().find(|reason| !cacheless::is_missing(reason));
            let waits = reasons::cache_waits(superblock, None, reason.unwrap_or(first));
            return Err(if reason.is_some() { Unserved::Waits(waits) } else { Unserved::Missing(waits) });
        }
        let failure = reasons::no_cache("no cache for it is served", superblock);
        let next = "say which with `cache = \"NAME\"` in its section, or serve that set too";
        Err(Unserved::Failed(failure.next(next)))
    }
}

/// Returns true if the volume was refused because of the set that its device belongs to.
fn is_refused(entry: &VolumeEntry) -> bool {
    matches!(&entry.state, VolumeState::Failed(failure) if failure.kind == Kind::WrongSet)
}
