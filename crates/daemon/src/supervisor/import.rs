//! `bcached import`, when the kernel has let go of a set: it becomes part of the configuration, or, if it was released here, is served again.
//! What is to be told to the kernel is told by the command.

use super::Supervisor;
use super::replace::is_same;
use crate::config::{NO_CACHE, Released, SetFile};
use crate::control::jobs::{Begin, Job as Shown, State, Verb};
use crate::devices;
use crate::failure::{Failure, Kind};
use crate::names;
use bcached_format::{CacheSuperblock, Superblock, Uuid};
use std::collections::BTreeSet;
use std::path::Path;

/// A set by its devices, as they are kept.
struct Members {
    cache: (String, CacheSuperblock),
    backings: Vec<(String, String)>,
}

impl Supervisor {
    /// Serves a set from now on, and over restarts.
    pub(super) fn import(&mut self, begin: &Begin) -> Result<Shown, Failure> {
        let typed = &begin.volume;
        let cannot = |kind| Failure::new(kind, format!("cannot import {typed}"));
        let mut shown = Shown::new(Verb::Import, typed.clone(), State::Done);
        if self.shared().jobs.releasing().is_some() {
            return Err(self.release_goes_on(&format!("cannot import {typed} now")));
        }
        if let Some(name) = self.serves(typed) {
            shown.volume = name;
            shown.already = true;
            return Ok(shown);
        }
        let path = self.config.set_file.clone().ok_or_else(|| {
            cannot(Kind::Usage)
                .why("the daemon serves devices of its command line, without a configuration")
                .next("start `bcached serve` with those devices, too")
        })?;
        let mut file = SetFile::read(&path)?;
        let members =
            if begin.devices.is_empty() { None } else { Some(self.members(typed, &begin.devices)?) };
        let has = |released: &Released, (device, _): &(String, CacheSuperblock)| {
            released.device.as_ref().is_some_and(|its| is_same(its, device))
        };
        let mut all = self.config.released.iter();
        let released = all.find(|released| {
            released.name == *typed || members.as_ref().is_some_and(|members| has(released, &members.cache))
        });
        let released = released.cloned();
        if released.is_none() && members.is_none() {
            return Err(cannot(Kind::UnknownName)
                .why("neither the kernel nor a block device here has such a set, and none of that name was released here")
                .next("`bcached scan` shows the sets that there are"));
        }
        shown.volume = self.plan_import(&mut file, released.as_ref(), members.as_ref(), &mut shown);
        let config = self.read_with(Some(&file))?;
        file.check_writable()?;
        if begin.dry_run {
            shown.state = State::Planned;
            return Ok(shown);
        }
        file.write()?;
        self.take_over(config);
        tracing::info!(event = "set-imported", "cache {}: it is served as soon as it can be", shown.volume);
        Ok(shown)
    }

    /// The cache that is called so, or has that set, if there is one.
    fn serves(&self, typed: &str) -> Option<String> {
        let uuid = Uuid::from_text(typed);
        let shared = self.shared();
        let is_it = |name: &str, set: Option<Uuid>| name == typed || uuid.is_some() && set == uuid;
        let mut all = shared.table.lasting_caches();
        let found = all.find(|(_, cache)| is_it(cache.display_name(), cache.set()));
        found.map(|(_, cache)| cache.display_name().to_owned())
    }

    /// What the devices say. Block devices are kept by their UUIDs, under which they are found wherever they are.
    fn members(&self, typed: &str, all: &[String]) -> Result<Members, Failure> {
        let mut taken = self.shared().table.volume_names();
        taken.extend(self.config.not_served.iter().cloned());
        let (mut cache, mut backings) = (None, Vec::new());
        for device in all {
            let is_block = Path::new(device).starts_with("/dev");
            let kept = |uuid: Uuid| if is_block { format!("UUID={uuid}") } else { device.clone() };
            match devices::look(device)? {
                Superblock::Cache(superblock) => cache = Some((kept(superblock.uuid()), superblock)),
                Superblock::Backing(superblock) => {
                    let (label, uuid) = (superblock.label(), superblock.uuid());
                    let name = names::of_volume(label, uuid, |name| taken.contains(name));
                    taken.insert(name.clone());
                    backings.push((name, kept(uuid)));
                }
            }
        }
        let cache = cache.ok_or_else(|| {
            Failure::new(Kind::NotFound, format!("cannot import {typed}"))
                .why(format!("none of {} is its cache device", all.join(", ")))
                .next("connect it")
        })?;
        Ok(Members { cache, backings })
    }

    /// What the file is to say; the cache's name.
    fn plan_import(
        &self,
        file: &mut SetFile,
        released: Option<&Released>,
        members: Option<&Members>,
        shown: &mut Shown,
    ) -> String {
        let mut known: Vec<String> =
            self.config.volumes.iter().map(|volume| volume.backing.clone()).collect();
        let name = match (released, members) {
            (Some(released), _) => {
                file.kept_of_cache(&released.name).served = None;
                shown.devices.extend(released.device.clone());
                for (volume, device) in &released.backings {
                    let kept = file.kept_of(volume);
                    (kept.served, kept.released) = (None, None);
                    shown.devices.push(device.clone());
                    known.push(device.clone());
                }
                released.name.clone()
            }
            (None, Some(Members { cache: (device, superblock), .. })) => {
                let name = self.name_of_new(superblock);
                let kept = file.kept_of_cache(&name);
                (kept.device, kept.imported) = (Some(device.clone()), Some(true));
                shown.devices.push(device.clone());
                name
            }
            (None, None) => return String::new(),
        };
        for (volume, device) in members.iter().flat_map(|members| &members.backings) {
            if known.iter().any(|known| is_same(known, device)) {
                continue;
            }
            let kept = file.kept_of(volume);
            (kept.backing, kept.cache) = (Some(device.clone()), Some(name.clone()));
            shown.devices.push(device.clone());
            shown.notes.push(format!("{device} is the volume {volume}"));
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
