//! Caches that become another device: for a while there are two entries, the new one under the cache's name, and what it was before.

use super::reasons;
use super::table::{CacheEntry, CacheState, Table, Unserved};
use crate::config;
use crate::engine_thread::Engine;
use bcached_format::{BackingState, BackingSuperblock};

impl Table {
    /// Those that are to stay, and that volumes can come to.
    pub fn lasting_caches(&self) -> impl Iterator<Item = (usize, &CacheEntry)> {
        self.real_caches().filter(|(_, cache)| cache.former_of.is_none())
    }

    /// What the cache was before, if there still is something of it.
    pub fn former_of(&self, cache: usize) -> Option<usize> {
        let name = self.caches.get(cache)?.name.as_ref()?;
        self.real_caches().find(|(_, former)| former.former_of.as_ref() == Some(name)).map(|(index, _)| index)
    }

    /// The engine of what the cache was before, if the volume has not left that.
    pub fn still_on_former(
        &self,
        cache: usize,
        superblock: &BackingSuperblock,
    ) -> Option<Result<(usize, Engine), Unserved>> {
        let former = self.former_of(cache)?;
        let set = superblock.set_uuid();
        let has_left = !matches!(superblock.state(), BackingState::Clean | BackingState::Dirty);
        if has_left || self.caches[cache].set() == Some(set) {
            return None;
        }
        Some(match &self.caches[former].state {
            CacheState::Open { set: its, engine, .. } if *its == set => Ok((former, engine.clone())),
            CacheState::Failed(failure) => Err(Unserved::Failed(reasons::cache_not_served(failure))),
            CacheState::Waiting(_) => Err(Unserved::Waits(reasons::missing_cache(superblock, None))),
            _ => Err(Unserved::Waits(reasons::its_cache_opens())),
        })
    }

    /// A cache is called like what this one would leave.
    pub fn former_named(&self, name: &str) -> bool {
        let name = name_of_former(name);
        self.real_caches().any(|(_, cache)| cache.name.as_ref() == Some(&name))
    }
}

impl CacheEntry {
    /// What it was before, as configured.
    pub fn former(cache: &config::Cache) -> Option<Self> {
        let (device, is_moving) = cache.former.clone()?;
        let name = cache.name.clone()?;
        let plain =
            config::Cache { device, former: None, name: Some(name_of_former(&name)), ..cache.clone() };
        Some(Self { former_of: Some(name), is_moving, ..Self::of(&plain) })
    }
}

/// What the cache called `name` was before is called so.
pub fn name_of_former(name: &str) -> String {
    format!("{name} (former)")
}
