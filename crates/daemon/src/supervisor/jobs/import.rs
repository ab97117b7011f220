//! `bcached import`, after the kernel has released a set: the set joins the configuration, or, if
//! it was released here, is served again. The command itself tells the kernel what it must know.

use crate::supervisor::Supervisor;
use crate::supervisor::jobs::precheck::{DeviceCheck, ProbedDevice, meanwhile, released_called, uuid_of};
use crate::supervisor::table::{CacheEntry, CacheState};
use bcached_config::{Config, NO_CACHE, ReleasedCache, SetFile};
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{JobKind, JobReport, JobSpec, JobState};
use bcached_control::names;
use bcached_format::{CacheSuperblock, Label, Superblock, Uuid};
use bcached_offline::devices;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// A set as its devices describe it, and what the configuration says of them. Made on the caller's
/// thread.
pub struct ImportableSet {
    /// That configuration.
    config: Arc<Config>,
    cache: ImportedCache,
    /// The backing devices that the configuration does not name.
    backings: Vec<NewBacking>,
    devices: Vec<String>,
}

/// What a set's cache device is to the configuration.
enum ImportedCache {
    /// A cache that was released.
    Released(ReleasedCache),
    /// A cache of this name, which may wait for its device.
    Configured(String),
    /// Not known, and to be kept under this name of the device.
    New(String, CacheSuperblock),
    /// Not known, and no device was named.
    Unknown,
}

struct NewBacking {
    label: Label,
    uuid: Uuid,
    /// The name to keep it under.
    device: String,
}

impl ImportableSet {
    /// Looks at the devices, or, if none are named, for a set that was released here.
    pub fn look(config: Arc<Config>, typed: &str, devices: &[String]) -> Result<Self, Failure> {
        if devices.is_empty() {
            let is_configured = config.caches.iter().any(|cache| cache.name.as_deref() == Some(typed));
            let cache = match released_called(&config, typed) {
                Some(released) => ImportedCache::Released(released.clone()),
                None if is_configured => ImportedCache::Configured(typed.to_owned()),
                None => ImportedCache::Unknown,
            };
            return Ok(Self { config, cache, backings: Vec::new(), devices: Vec::new() });
        }
        let (mut cache, mut backings) = (None, Vec::new());
        for device in devices {
            let (superblock, presence) = devices::look_where(device)?;
            let at = ProbedDevice { presence, uuid: uuid_of(&superblock) };
            // Block devices are kept by UUID, and so are found under any path.
            let is_block = Path::new(device).starts_with("/dev");
            let kept = if is_block { format!("UUID={}", at.uuid) } else { device.clone() };
            match superblock {
                Superblock::Cache(superblock) => cache = Some(here(&config, &at, kept, superblock)),
                Superblock::Backing(superblock) if !is_named(&config, &at) => {
                    backings.push(NewBacking { label: superblock.label(), uuid: at.uuid, device: kept });
                }
                Superblock::Backing(_) => {}
            }
        }
        let cache = cache.ok_or_else(|| {
            Failure::new(Kind::NotFound, format!("cannot import {typed}"))
                .why(format!("none of {} is its cache device", devices.join(", ")))
                .next("connect the cache device")
        })?;
        Ok(Self { config, cache, backings, devices: devices.to_vec() })
    }
}

/// Returns what a cache device is to the configuration.
fn here(config: &Config, at: &ProbedDevice, kept: String, superblock: CacheSuperblock) -> ImportedCache {
    let is_it = |device: &String| {
        at.is_called(device)
            || device.strip_prefix("UUID=").and_then(Uuid::from_text) == Some(superblock.set_uuid())
    };
    if let Some(released) =
        config.released.iter().find(|released| released.device.as_ref().is_some_and(is_it))
    {
        return ImportedCache::Released(released.clone());
    }
    let configured = config.caches.iter().find(|cache| is_it(&cache.device));
    match configured.and_then(|cache| cache.name.clone()) {
        Some(name) => ImportedCache::Configured(name),
        None => ImportedCache::New(kept, superblock),
    }
}

/// Checks whether any section names a backing device, even one of a removed volume, which stays
/// removed.
fn is_named(config: &Config, at: &ProbedDevice) -> bool {
    let served = config.volumes.iter().map(|volume| &volume.backing);
    let removed = config.not_served.iter().filter_map(|removed| removed.backing.as_ref());
    served.chain(removed).any(|device| at.is_called(device))
}

impl Supervisor {
    /// Serves a set from now on, and over restarts.
    pub fn import(&mut self, begin: &JobSpec, device_check: DeviceCheck) -> Result<JobReport, Failure> {
        let typed = &begin.volume;
        let cannot = |kind| Failure::new(kind, format!("cannot import {typed}"));
        let mut shown = JobReport::new(JobKind::Import, typed.clone(), JobState::Done);
        if self.shared().jobs.releasing().is_some() {
            return Err(self.release_goes_on(&format!("cannot import {typed} now")));
        }
        if self.serves(typed) {
            shown.already = true;
            return Ok(shown);
        }
        let path = self.config.set_file.clone().ok_or_else(|| {
            cannot(Kind::Usage)
                .why("the daemon serves devices of its command line, without a configuration")
                .next("start `bcached serve` with those devices as well")
        })?;
        let importable = match device_check {
            DeviceCheck::Set(importable) if Arc::ptr_eq(&importable.config, &self.config) => *importable,
            _ => return Err(meanwhile(&format!("cannot import {typed}"))),
        };
        if matches!(importable.cache, ImportedCache::Unknown) {
            return Err(cannot(Kind::UnknownName)
                .why("neither the kernel nor a block device here has such a set, and no set of that name was released here")
                .next("`bcached scan` shows the sets on this machine"));
        }
        let mut file = SetFile::read(&path)?;
        shown.volume = self.plan_import(&mut file, &importable, &mut shown);
        let config = self.read_with(Some(&file))?;
        file.check_writable()?;
        if begin.dry_run {
            shown.state = JobState::Planned;
            return Ok(shown);
        }
        file.write()?;
        self.take_over(config);
        self.try_anew(&shown.volume);
        tracing::info!(event = "set-imported", "cache {}: it is served as soon as possible", shown.volume);
        Ok(shown)
    }

    /// Checks whether there is a cache of this name that is open or about to be.
    fn serves(&self, name: &str) -> bool {
        let shared = self.shared();
        let mut all = shared.table.lasting_caches();
        all.any(|(_, cache)| cache.display_name() == name && cache.set().is_some())
    }

    /// Tries a failed cache again: its reason may have been remedied.
    fn try_anew(&self, name: &str) {
        let mut shared = self.shared();
        let mut caches = shared.table.caches.iter_mut();
        let is_it = |cache: &&mut CacheEntry| cache.is_real() && cache.display_name() == name;
        let Some(cache) = caches.find(is_it).filter(|cache| matches!(cache.state, CacheState::Failed(_)))
        else {
            return;
        };
        let not_looked = Failure::new(Kind::NotLooked, "its device has not been looked for yet");
        cache.state = CacheState::Waiting(not_looked.clone());
        shared.table.look_again(name, &not_looked);
    }

    /// Plans what the file is to say. Returns the cache's name.
    fn plan_import(&self, file: &mut SetFile, importable: &ImportableSet, shown: &mut JobReport) -> String {
        let name = match &importable.cache {
            ImportedCache::Released(released) => {
                file.kept_of_cache(&released.name).served = None;
                shown.devices.extend(released.device.clone());
                for (volume, device) in &released.backings {
                    let kept = file.kept_of(volume);
                    (kept.served, kept.released) = (None, None);
                    shown.devices.push(device.clone());
                }
                released.name.clone()
            }
            ImportedCache::Configured(name) => {
                shown.devices.extend(importable.devices.iter().cloned());
                name.clone()
            }
            ImportedCache::New(device, superblock) => {
                let name = self.name_of_new(superblock);
                let kept = file.kept_of_cache(&name);
                (kept.device, kept.imported) = (Some(device.clone()), Some(true));
                shown.devices.push(device.clone());
                name
            }
            ImportedCache::Unknown => return String::new(),
        };
        let mut taken = self.shared().table.volume_names();
        taken.extend(self.config.not_served.iter().map(|removed| removed.name.clone()));
        for NewBacking { label, uuid, device } in &importable.backings {
            let volume = names::of_volume(*label, *uuid, |name| taken.contains(name));
            let kept = file.kept_of(&volume);
            (kept.backing, kept.cache) = (Some(device.clone()), Some(name.clone()));
            shown.devices.push(device.clone());
            shown.notes.push(format!("{device} is the volume {volume}"));
            taken.insert(volume);
        }
        name
    }

    fn name_of_new(&self, superblock: &CacheSuperblock) -> String {
        let shared = self.shared();
        let all = shared.table.real_caches().map(|(_, cache)| cache.display_name().to_owned());
        let taken: BTreeSet<_> =
            all.chain(self.config.released.iter().map(|released| released.name.clone())).collect();
        let is_taken = |name: &str| name == NO_CACHE || taken.contains(name);
        names::of_cache(superblock.label(), superblock.set_uuid(), is_taken)
    }
}
