//! Which engine serves a volume: gathers what is known for the decisions of [`bcached_placement`],
//! and puts them into words.

use crate::supervisor::report::reasons;
use crate::supervisor::table::{CacheEntry, CacheState, Table, VolumeEntry, VolumeState};
use bcached_config::NO_CACHE;
use bcached_control::failure::{Failure, Kind};
use bcached_format::{BackingSuperblock, Uuid};
use bcached_placement::{
    BypassedVolume, Cache, CacheFault, CacheSelector, Caches, Decision, Precheck, Reason, Role, State,
    Superblock, Volume,
};
use std::time::Duration;

/// Why no engine takes a volume.
pub enum UnservedReason {
    /// Not yet.
    Waiting(Failure),
    /// Permanently.
    Failed(Failure),
}

/// Returns what a reason for not opening a cache means for its volumes.
pub const fn fault_of(reason: &Failure) -> CacheFault {
    match reason.kind {
        Kind::NotFound | Kind::TimeLimit | Kind::DeviceFails => CacheFault::Missing,
        Kind::Damaged => CacheFault::Damaged,
        Kind::NotBcache => CacheFault::NotBcache,
        _ => CacheFault::Other,
    }
}

/// The cache that a section names.
fn wanted_of(wanted: Option<&str>) -> CacheSelector<'_> {
    match wanted {
        None => CacheSelector::Any,
        Some(NO_CACHE) => CacheSelector::NoCache,
        Some(name) => CacheSelector::Named(name),
    }
}

impl CacheEntry {
    /// The cache as placement sees it.
    fn view(&self) -> Cache<'_> {
        let role = match (&self.is_none_of, &self.former_of) {
            (Some(_), _) => Role::Bypass,
            (None, Some(name)) => Role::FormerOf(name),
            (None, None) => Role::Permanent,
        };
        let state = match &self.state {
            CacheState::Waiting(reason) => State::Waiting(fault_of(reason)),
            CacheState::Opening { set, .. } => State::Opening(*set, self.trouble.as_ref().map(fault_of)),
            CacheState::Open { set, .. } => State::Open(*set),
            CacheState::Ending { .. } | CacheState::Stopped => State::Closed,
            CacheState::Released => State::Released,
            CacheState::Failed(reason) => State::Failed(fault_of(reason)),
        };
        Cache { name: self.name.as_deref(), role, state, last_set: self.last_set }
    }

    /// Why it is not open, now or the last time.
    fn reason(&self) -> Failure {
        match &self.state {
            CacheState::Waiting(reason) | CacheState::Failed(reason) => reason.clone(),
            _ => self.trouble.clone().unwrap_or_else(reasons::its_cache_opens),
        }
    }
}

impl Table {
    /// Asks the rules of placement about the caches as they are.
    pub fn with_caches<T>(&self, ask: impl FnOnce(&Caches<'_>) -> T) -> T {
        let all: Vec<_> = self.caches.iter().map(CacheEntry::view).collect();
        ask(&Caches { all: &all, is_strict: self.strict })
    }

    /// The device of a waiting volume that is to be read now. A volume that its cache decides about
    /// is refused, or waits for the cache to open.
    pub fn device_to_read(&mut self, index: usize) -> Option<String> {
        let entry = self.volumes.get(index)?;
        let VolumeState::Waiting(_) = entry.state else { return None };
        let device = entry.backing.clone()?;
        match self.with_caches(|caches| caches.before(&entry.view(None))) {
            Precheck::ReadSuperblock => return Some(device),
            Precheck::Ignore => {}
            // An opening takes a moment and does not deserve a warning.
            Precheck::Wait => self.volumes[index].state = VolumeState::Waiting(reasons::its_cache_opens()),
            Precheck::Refuse(cache) => {
                let refused = reasons::cache_not_served(&self.caches[cache].reason());
                self.set_volume(index, VolumeState::Failed(refused));
            }
        }
        None
    }

    /// Decides about a volume at the time `now`. `since` is since when its cache counts as missing
    /// if that is news. Both are counted from the daemon's start.
    pub fn place(
        &self,
        index: usize,
        superblock: &BackingSuperblock,
        (now, since): (Duration, Duration),
    ) -> Decision {
        let volume = self.volumes[index].view(Some(since));
        let superblock = Superblock { state: superblock.state(), set: superblock.set_uuid() };
        self.with_caches(|caches| caches.decide(&volume, &superblock, now))
    }

    /// The cache of a volume that is served without it, if that is open again.
    pub fn cache_is_back(&self, entry: &VolumeEntry) -> Option<usize> {
        let set = entry.lacked_set()?;
        let is_without = matches!(&entry.state, VolumeState::Served(info) if !info.attached);
        let volume = BypassedVolume { wanted: entry.wanted(), set };
        is_without.then(|| self.with_caches(|caches| caches.is_back(&volume)))?
    }

    /// The name of the cache that is in trouble, if it is known to be the volume's, and why it is.
    pub fn trouble_for(&self, superblock: &BackingSuperblock, why: Reason) -> (Option<String>, Failure) {
        match why {
            Reason::NamedCache(cache) => {
                (Some(self.caches[cache].display_name().to_owned()), self.caches[cache].reason())
            }
            _ => (None, self.why(superblock, why)),
        }
    }

    /// Why a volume waits, is refused, or goes without its cache.
    pub fn why(&self, superblock: &BackingSuperblock, why: Reason) -> Failure {
        let reason = |cache: usize| self.caches[cache].reason();
        match why {
            Reason::Opening => reasons::its_cache_opens(),
            Reason::NamedCache(cache) => {
                let (name, reason) = (self.caches[cache].display_name(), reason(cache));
                match reason.kind {
                    Kind::Damaged => reasons::cache_damaged(superblock, name, &reason),
                    Kind::NotBcache => reasons::cache_has_no_superblock(superblock, &reason),
                    _ => reasons::cache_waits(superblock, Some(name), &reason),
                }
            }
            Reason::PossibleCache(cache) => reasons::cache_waits(superblock, None, &reason(cache)),
            Reason::FailedCache(cache) => reasons::cache_not_served(&reason(cache)),
            Reason::FormerDevice => reasons::missing_cache(superblock, None),
            Reason::NoCache => reasons::no_cache("none of the caches can be chosen for it", superblock)
                .next("name its cache with `cache = \"NAME\"` in its section, or serve that set, too"),
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
        self.with_caches(|caches| caches.said(wanted_of(wanted)))
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
}

impl VolumeEntry {
    /// The cache that its section names.
    pub fn wanted(&self) -> CacheSelector<'_> {
        wanted_of(self.wanted_cache.as_deref())
    }

    /// The volume as placement sees it. `since` is since when its cache counts as missing if it has
    /// not been found missing yet.
    fn view(&self, since: Option<Duration>) -> Volume<'_> {
        let lacks_since = self.lacks_since().or(since);
        Volume { wanted: self.wanted(), wait: self.wait, lacks_since }
    }
}

/// Returns true if the volume was refused because of the set that its device belongs to.
fn is_refused(entry: &VolumeEntry) -> bool {
    matches!(&entry.state, VolumeState::Failed(failure) if failure.kind == Kind::WrongSet)
}
