//! Caches that become another device: for a while there are two entries, the new one under the cache's name, and what it was before.

use crate::engine_thread::Engine;
use crate::supervisor::report::reasons;
use crate::supervisor::table::{CacheEntry, CacheState, Table, VolumeEntry, VolumeState};
use crate::supervisor::volumes::next_step::Unserved;
use bcached_control::failure::Failure;
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
            // What set the new one is, which may be this volume's, is not known.
            _ if matches!(self.caches[cache].state, CacheState::Waiting(_)) => {
                Err(Unserved::Waits(reasons::missing_cache(superblock, None)))
            }
            CacheState::Failed(failure) => Err(Unserved::Failed(reasons::cache_not_served(failure))),
            CacheState::Waiting(_) => Err(Unserved::Waits(reasons::missing_cache(superblock, None))),
            _ => Err(Unserved::Waits(reasons::its_cache_opens())),
        })
    }

    /// The volume's section names that cache, or none where there is no other.
    pub fn is_meant(&self, entry: &VolumeEntry, cache: usize) -> bool {
        match &entry.wanted_cache {
            Some(wanted) => Some(wanted) == self.caches[cache].name.as_ref(),
            None => self.lasting_caches().map(|(index, _)| index).eq([cache]),
        }
    }

    /// The same, or it comes there from what the cache was before.
    pub fn is_to_be_on(&self, volume: usize, cache: usize) -> bool {
        self.is_meant(&self.volumes[volume], cache) || self.former_of(cache).is_some()
    }

    /// The cache is open, or, if it was judged to be dead, still is not there.
    pub fn is_as_judged(&self, cache: usize, is_dead: bool) -> bool {
        match self.caches[cache].state {
            CacheState::Open { .. } => !is_dead,
            CacheState::Waiting(_) | CacheState::Failed(_) => is_dead,
            _ => false,
        }
    }

    /// The volume or cache that is configured with this device.
    pub fn owner_of(&self, device: &str) -> Option<String> {
        let caches = self.real_caches().filter(|(_, cache)| cache.device == device);
        let caches = caches.map(|(_, cache)| cache.display_name().to_owned());
        let has_it = |entry: &&VolumeEntry| entry.backing.as_deref() == Some(device) && !entry.is_removed();
        let volumes = self.volumes.iter().filter(has_it).map(|entry| entry.display_name().to_owned());
        caches.chain(volumes).next()
    }

    /// Volumes on a cache whose sections name none, which is not enough when there are several.
    pub fn to_be_named(&self, cache: usize) -> Vec<(usize, String)> {
        if self.lasting_caches().count() == 1 {
            return Vec::new();
        }
        let is_on = |entry: &VolumeEntry| {
            entry.cache == Some(cache)
                && entry.backing.is_some()
                && entry.wanted_cache.is_none()
                && !entry.is_removed()
        };
        let all = self.volumes.iter().enumerate().filter(|(_, entry)| is_on(entry));
        all.filter_map(|(volume, entry)| Some((volume, entry.name.clone()?))).collect()
    }

    /// What could not be served for a reason that the cache of this name had may be now.
    pub fn look_again(&mut self, name: &str, waits: &Failure) {
        for entry in &mut self.volumes {
            if matches!(entry.state, VolumeState::Failed(_))
                && entry.wanted_cache.as_deref().is_none_or(|it| it == name)
            {
                entry.state = VolumeState::Waiting(waits.clone());
            }
        }
    }

    /// A cache is called like what this one would leave.
    pub fn former_named(&self, name: &str) -> bool {
        let name = name_of_former(name);
        self.real_caches().any(|(_, cache)| cache.name.as_ref() == Some(&name))
    }
}

impl CacheEntry {
    /// What it was before, as configured.
    pub fn former(cache: &bcached_config::Cache) -> Option<Self> {
        let (device, is_moving) = cache.former.clone()?;
        let name = cache.name.clone()?;
        let plain = bcached_config::Cache {
            device,
            former: None,
            name: Some(name_of_former(&name)),
            ..cache.clone()
        };
        Some(Self { former_of: Some(name), is_moving, ..Self::of(&plain) })
    }
}

/// What the cache called `name` was before is called so.
pub fn name_of_former(name: &str) -> String {
    format!("{name} (former)")
}
