//! Adding volumes to a running daemon and removing them from it, which lasts over restarts.

use crate::engine_thread::Engine;
use crate::supervisor::jobs::JobEvent;
use crate::supervisor::jobs::RollbackState;
use crate::supervisor::jobs::attach_detach::{JobPlan, JobWork};
use crate::supervisor::jobs::precheck::{self, DeviceCheck};
use crate::supervisor::table::{CacheState, VolumeEntry, VolumeState};
use crate::supervisor::{Event, Supervisor};
use bcached_config::{Config, PersistedVolume, ResolvedNames, SetFile};
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{JobKind, JobReport, JobSpec, JobState};
use bcached_engine::VolumeId;

impl Supervisor {
    /// Plans to stop serving a volume that is not in use. Its section in the file stays.
    pub fn plan_removal(&self, entry: &VolumeEntry, planned: &mut JobPlan) -> Result<(), Failure> {
        self.check_unused(entry.display_name(), JobKind::Remove)?;
        planned.work = Some(JobWork::Release);
        if entry.backing.is_none() {
            let Some((file, before)) = self.keep_removed_flash(entry)? else {
                planned.note("this is not kept over a restart");
                return Ok(());
            };
            planned.before = RollbackState { section: Some(before), ..RollbackState::default() };
            return self.will_keep(file, planned);
        }
        let Ok((path, name)) = self.keeps(entry) else {
            planned.note("this is not kept over a restart");
            return Ok(());
        };
        let mut file = SetFile::read(path)?;
        let kept = file.kept_of(name);
        planned.before = RollbackState { section: Some(kept.clone()), ..RollbackState::default() };
        // Device, cache and options stay, even if no other file knows the volume: its name brings
        // it back.
        (kept.served, kept.released) = (Some(false), None);
        self.will_keep(file, planned)
    }

    /// Answers the removal of a volume that is not served already. A volume that was released with
    /// its cache is marked so that it does not come back with the cache.
    pub fn is_removed(&mut self, begin: &JobSpec) -> Result<JobReport, Failure> {
        let name = &begin.volume;
        let shown =
            JobReport { already: true, ..JobReport::new(JobKind::Remove, name.clone(), JobState::Done) };
        let mut with_caches = self.config.released.iter().flat_map(|cache| &cache.backings);
        let (true, Some(path)) = (with_caches.any(|(volume, _)| volume == name), &self.config.set_file)
        else {
            return Ok(shown);
        };
        let mut file = SetFile::read(path)?;
        (file.kept_of(name).served, file.kept_of(name).released) = (Some(false), None);
        let config = Config::load_with(&self.line, Some(&file.text()))?;
        if !begin.dry_run {
            file.write()?;
            self.take_over(config);
        }
        Ok(shown)
    }

    /// Plans to write the file, if the next start could read it.
    fn will_keep(&self, file: SetFile, planned: &mut JobPlan) -> Result<(), Failure> {
        Config::load_with(&self.line, Some(&file.text()))?;
        if file.is_changed() {
            file.check_writable()?;
            planned.file = Some(file);
        }
        Ok(())
    }

    /// Has the engine give the volume up; no other engine takes it over.
    pub fn begin_removal(&self, number: u64, volume: usize, verb: JobKind, engine: &Engine, id: VolumeId) {
        if self.unpublish(number, volume, verb) {
            let sender = self.sender.clone();
            let given = move |given| {
                drop(sender.send(Event::Job(number, JobEvent::Released(volume, None, Box::new(given)))));
            };
            engine.give_up(id, Box::new(given));
        }
    }

    /// Handles a volume that is gone. A removed one is as if it were not configured; a client that
    /// asks for a stopped one is told that it is stopped.
    pub fn gone(&self, volume: usize, verb: Option<JobKind>) {
        let is_stopped = verb == Some(JobKind::Stop);
        let entry = {
            let mut shared = self.shared();
            let entry = &mut shared.table.volumes[volume];
            entry.state = if is_stopped { VolumeState::Stopped } else { VolumeState::Removed };
            entry.missing_cache = None;
            entry.clone()
        };
        let name = entry.display_name();
        if is_stopped {
            self.name_export(&entry);
            // Clients were checked before. No client can wait for a volume that does not come back
            // by itself.
            self.fronts.retire(name);
            tracing::info!(event = "volume-stopped", "{name}: it is not served until the next start");
        } else {
            self.unexport(name);
            tracing::info!(event = "volume-removed", "{name}: it is no longer served");
        }
    }

    /// Serves a volume that is newly named or was removed: a device that the configuration names
    /// from now on.
    pub fn add(&mut self, begin: &JobSpec, device_check: &DeviceCheck) -> Result<JobReport, Failure> {
        let name = &begin.volume;
        let mut shown = JobReport::new(JobKind::Add, name.clone(), JobState::Done);
        self.check_not_releasing(name, None)?;
        if matches!(device_check, DeviceCheck::NotYet) && self.is_flash(begin) {
            shown.state = JobState::Planned;
            return Ok(shown);
        }
        if let Some(resumed) = self.resume(begin, device_check) {
            return Ok(resumed);
        }
        let Some(path) = self.config.set_file.clone() else {
            return Err(Failure::new(Kind::Usage, format!("cannot add {name}"))
                .why("the daemon serves devices of its command line, without a configuration")
                .next("start `bcached serve` with that device as well"));
        };
        let present =
            self.shared().table.volumes.iter().find(|entry| entry.name.as_ref() == Some(name)).cloned();
        if let Some(entry) = present.filter(|entry| !entry.is_removed()) {
            self.check_as_it_is(&entry, begin)?;
            shown.already = true;
            return Ok(shown);
        }
        self.check_not_there(begin)?;
        let mut file = SetFile::read(&path)?;
        file.add(name);
        if let Some(backing) = &begin.backing {
            self.forget_removed(&mut file, name, backing);
        }
        let kept = file.kept_of(name);
        (kept.served, kept.released) = (None, None);
        kept.backing = begin.backing.clone().or(kept.backing.take());
        kept.cache = begin.cache.clone().or(kept.cache.take());
        let config = self.read_with(Some(&file))?;
        let volume = config.volumes.iter().find(|volume| volume.name.as_ref() == Some(name));
        let backing = volume.map(|volume| volume.backing.clone()).ok_or_else(|| {
            Failure::new(Kind::Usage, format!("cannot add {name}"))
                .why("the configuration does not name its device")
                .next("name it with --backing")
                .option("--backing")
        })?;
        self.check_not_releasing(name, Some(volume.and_then(|volume| volume.cache.as_deref())))?;
        file.check_writable()?;
        match device_check {
            DeviceCheck::NotYet => {
                (shown.state, shown.devices) = (JobState::Planned, vec![backing]);
                return Ok(shown);
            }
            DeviceCheck::Backing(device) if *device == backing => {}
            _ => return Err(precheck::meanwhile(&format!("cannot add {name}"))),
        }
        if begin.dry_run {
            shown.state = JobState::Planned;
            return Ok(shown);
        }
        file.write()?;
        self.take_over(config);
        tracing::info!(event = "volume-added", "{name}: it is served as soon as possible");
        Ok(shown)
    }

    /// Drops what is kept of removed volumes that had this device or this name, unless they had
    /// both. Options were chosen for the device, and a device has one name.
    fn forget_removed(&self, file: &mut SetFile, name: &str, backing: &str) {
        let removed = file.removed_with_device();
        let real =
            ResolvedNames::of(removed.iter().map(|(_, device)| device.clone()).chain([backing.to_owned()]));
        for (other, device) in removed {
            if (other == name) != real.is_same(&device, backing) {
                *file.kept_of(&other) = PersistedVolume::default();
            }
        }
    }

    /// Checks that the device belongs to no cache and no other volume, by any path. (A hard link is
    /// recognised when the device is looked at.)
    fn check_not_there(&self, begin: &JobSpec) -> Result<(), Failure> {
        let Some(backing) = &begin.backing else { return Ok(()) };
        let there: Vec<(String, precheck::DeviceOwner)> = {
            let shared = self.shared();
            let volumes = shared.table.volumes.iter().filter(|entry| !entry.is_removed());
            let volumes = volumes.filter(|entry| entry.display_name() != begin.volume);
            let volumes = volumes.filter_map(|entry| {
                Some((entry.backing.clone()?, precheck::DeviceOwner::Volume(entry.display_name().to_owned())))
            });
            let caches = shared.table.real_caches();
            let caches = caches.map(|(_, cache)| {
                (cache.device.clone(), precheck::DeviceOwner::Cache(cache.display_name().to_owned()))
            });
            volumes.chain(caches).collect()
        };
        let real = ResolvedNames::of(there.iter().map(|(device, _)| device).chain([backing]).cloned());
        match there.iter().find(|(device, _)| real.is_same(device, backing)) {
            Some((device, owner)) => Err(precheck::is_there(backing, owner, device != backing)),
            None => Ok(()),
        }
    }

    /// Checks that a volume which exists already has the requested device and cache.
    fn check_as_it_is(&self, entry: &VolumeEntry, begin: &JobSpec) -> Result<(), Failure> {
        let refused =
            |why: String| Failure::new(Kind::InUse, format!("cannot add {}", begin.volume)).why(why);
        let backing = entry.backing.as_deref();
        if begin.backing.is_some() && begin.backing.as_deref() != backing {
            return Err(refused(format!("that is the name of {}", backing.unwrap_or("a flash-only volume")))
                .next("choose another name"));
        }
        if self.shared().table.has_cache(entry, begin.cache.as_deref()) {
            return Ok(());
        }
        let name = entry.display_name();
        let cache = begin.cache.as_deref().unwrap_or_default();
        Err(refused(format!("it exists already, and its section does not say `cache = \"{cache}\"`"))
            .next(format!("`bcached detach {name}` and `bcached attach {name} --cache` change that"))
            .option("--cache"))
    }

    /// Checks that the volume is not on a cache that is being released, and that its section does
    /// not name such a cache.
    pub fn check_not_releasing(&self, name: &str, said: Option<Option<&str>>) -> Result<(), Failure> {
        let goes = {
            let shared = self.shared();
            let goes = |entry: &VolumeEntry| {
                entry.display_name() == name && matches!(entry.state, VolumeState::Releasing)
            };
            let cache = said.and_then(|said| shared.table.cache_said(said));
            let is_ending =
                |cache: usize| matches!(shared.table.caches[cache].state, CacheState::Ending { .. });
            shared.table.volumes.iter().any(goes) || cache.is_some_and(is_ending)
        };
        if goes { Err(self.release_goes_on(&format!("cannot add {name} now"))) } else { Ok(()) }
    }

    /// Serves a stopped volume again, if the request matches it, and looks again at one that could
    /// not be served.
    fn resume(&self, begin: &JobSpec, device_check: &DeviceCheck) -> Option<JobReport> {
        let mut shared = self.shared();
        let index = shared.table.volumes.iter().position(|entry| entry.display_name() == begin.volume)?;
        let has_cache = shared.table.has_cache(&shared.table.volumes[index], begin.cache.as_deref());
        let entry = &mut shared.table.volumes[index];
        let has_device = begin.backing.is_none() || begin.backing == entry.backing;
        let may_be_tried = matches!(entry.state, VolumeState::Stopped | VolumeState::Failed(_));
        if !(may_be_tried && has_device && has_cache) {
            return None;
        }
        if begin.dry_run || matches!(device_check, DeviceCheck::NotYet) {
            return Some(JobReport::new(JobKind::Add, begin.volume.clone(), JobState::Planned));
        }
        let failure = Failure::new(Kind::NotFound, "its device has not been looked for yet");
        entry.state = VolumeState::Waiting(failure);
        tracing::info!(event = "volume-added", "{}: it is served as soon as possible", begin.volume);
        Some(JobReport::new(JobKind::Add, begin.volume.clone(), JobState::Done))
    }
}
