//! `bcached release` of a cache that could not be opened, because it is damaged, missing, or in use
//! elsewhere. There is nothing to stop, and its device stays as it was found. This is also the way
//! back from an import that failed.

use crate::supervisor::Supervisor;
use crate::supervisor::table::{CacheState, VolumeEntry, VolumeState};
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{JobKind, JobReport, JobSpec, JobState};
use bcached_offline::notes;

impl Supervisor {
    /// Finds the cache of this name, if it is not open and this daemon does nothing with its
    /// device.
    pub fn closed_cache(&self, typed: &str) -> Option<usize> {
        let shared = self.shared();
        let mut all = shared.table.lasting_caches();
        let found = all.find(|(_, cache)| cache.display_name() == typed || cache.device == typed);
        let (index, cache) = found.filter(|_| self.config.set_file.is_some())?;
        let is_closed = match &cache.state {
            CacheState::Failed(_) => true,
            // A device that does not answer is being opened.
            CacheState::Waiting(reason) => reason.kind != Kind::TimeLimit,
            _ => false,
        };
        is_closed.then_some(index)
    }

    /// Stops serving the cache and its volumes from now on, and over restarts.
    pub fn release_closed(&mut self, index: usize, begin: &JobSpec) -> Result<JobReport, Failure> {
        let (name, device, last_set) = {
            let shared = self.shared();
            let entry = &shared.table.caches[index];
            (entry.display_name().to_owned(), entry.device.clone(), entry.last_set)
        };
        let volumes = self.volumes_of(index);
        // A set that was not seen since the start is known from the volumes that miss it.
        let missed = volumes.iter().filter_map(|(_, entry)| entry.missed_set);
        let cannot = |kind| Failure::new(kind, format!("cannot release {name}"));
        if self.shared().table.former_of(index).is_some() {
            return Err(cannot(Kind::InUse)
                .why("it is being replaced, and its data is on two devices")
                .next(format!("`bcached replace {name} --with {device}` completes that")));
        }
        if let Some(note) = last_set.into_iter().chain(missed).find_map(notes::unreplayed) {
            return Err(cannot(Kind::DataLoss)
                .why(format!(
                    "the note {} of a killed bcached may hold acknowledged writes, which only bcached can replay",
                    note.display()
                ))
                .next("repair the cache first, or remove that note if nothing in it is needed; nothing overrides this"));
        }
        if let Some(volume) = self.goes_on_without(index) {
            return Err(cannot(Kind::InUse).why(format!("{volume} is served without it")).next(format!(
                "`bcached detach {volume}` keeps it served without a cache, `bcached remove {volume}` stops serving it"
            )));
        }
        self.check_idle(&name, &volumes)?;
        self.kept_released(&name, &volumes)?.map_or(Ok(()), |file| file.check_writable())?;
        let mut shown = JobReport::new(JobKind::Release, name.clone(), JobState::Planned);
        shown.dirty_unknown = true;
        let backings = volumes.iter().filter_map(|(_, entry)| entry.backing.clone());
        shown.devices = std::iter::once(device).chain(backings).collect();
        if begin.dry_run {
            return Ok(shown);
        }
        let before = {
            let mut shared = self.shared();
            for (volume, _) in &volumes {
                shared.table.volumes[*volume].state = VolumeState::Removed;
            }
            std::mem::replace(&mut shared.table.caches[index].state, CacheState::Released)
        };
        if let Err(failure) = self.keep_released(&name, &volumes) {
            let mut shared = self.shared();
            shared.table.caches[index].state = before;
            for (volume, entry) in volumes {
                shared.table.volumes[volume].state = entry.state;
            }
            return Err(failure);
        }
        for (_, entry) in &volumes {
            self.unexport(entry.display_name());
        }
        self.cache_is_well(index);
        tracing::info!(event = "cache-released", "cache {name}: it is no longer served; it was not open");
        shown.state = JobState::Done;
        Ok(shown)
    }

    /// Returns a volume that belongs to the cache and is served without it.
    fn goes_on_without(&self, index: usize) -> Option<String> {
        let shared = self.shared();
        let is_its = |entry: &&VolumeEntry| {
            let is_served = matches!(entry.state, VolumeState::Attaching | VolumeState::Served(_));
            is_served && shared.table.is_meant(entry, index) && entry.missing_cache.is_some()
        };
        let found = shared.table.volumes.iter().find(is_its);
        found.map(|entry| entry.display_name().to_owned())
    }
}
