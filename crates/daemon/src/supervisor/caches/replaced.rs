//! Caches that are replaced by another device. For a while the table has two entries: the new
//! device under the cache's name, and the former device.

use crate::supervisor::table::{CacheEntry, CacheState, Table, VolumeEntry, VolumeState};
use bcached_control::failure::Failure;

impl Table {
    /// The real caches without those that are being replaced; volumes can be attached to these.
    pub fn lasting_caches(&self) -> impl Iterator<Item = (usize, &CacheEntry)> {
        self.real_caches().filter(|(_, cache)| cache.former_of.is_none())
    }

    /// The former device of the cache, if it is still in the table.
    pub fn former_of(&self, cache: usize) -> Option<usize> {
        self.with_caches(|caches| caches.former_of(cache))
    }

    /// Returns true if the volume's section names that cache, or names none and there is no other.
    pub fn is_meant(&self, entry: &VolumeEntry, cache: usize) -> bool {
        self.with_caches(|caches| caches.is_meant(entry.wanted(), cache))
    }

    /// Returns true if the cache is still open, or, if it was judged to be dead, still not
    /// available.
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

    /// The volumes on a cache whose sections name none, which is ambiguous when there are several
    /// caches.
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

    /// Retries volumes that failed for a reason of the cache of this name: it may not apply any
    /// more.
    pub fn look_again(&mut self, name: &str, waits: &Failure) {
        for entry in &mut self.volumes {
            if matches!(entry.state, VolumeState::Failed(_))
                && entry.wanted_cache.as_deref().is_none_or(|it| it == name)
            {
                entry.state = VolumeState::Waiting(waits.clone());
            }
        }
    }

    /// Returns true if a cache already has the name that this one's former device would get.
    pub fn former_named(&self, name: &str) -> bool {
        let name = name_of_former(name);
        self.real_caches().any(|(_, cache)| cache.name.as_ref() == Some(&name))
    }
}

impl CacheEntry {
    /// The entry of the former device, as configured.
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

/// The name of the former device of the cache called `name`.
pub fn name_of_former(name: &str) -> String {
    format!("{name} (former)")
}
