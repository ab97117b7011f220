//! Volumes that grow or shrink.
//!
//! No superblock records the size of a volume: it is that of its backing device, unless less is
//! requested. The size that a volume has shrunk to is kept beside its options (`size`), before the
//! work on it begins. A start in the middle therefore resumes the work, and every later one serves
//! no more than that, whether the device has been cut or not. Growing removes the limit.

use crate::engine_thread::VolumeJob;
use crate::supervisor::Supervisor;
use crate::supervisor::jobs::Job;
use crate::supervisor::jobs::attach_detach::{JobPlan, JobWork};
use crate::supervisor::table::{CacheEntry, VolumeEntry, VolumeState};
use bcached_config::{Config, SetFile};
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{JobKind, JobSpec};
use bcached_control::sizes::{exact, human, typed};
use bcached_engine::{Status, VolumeInfo};

impl Supervisor {
    /// Plans to grow a volume to the present size of its device; the caller cannot choose a size.
    /// `now` is the open volume.
    pub fn plan_growth(
        &self,
        entry: &VolumeEntry,
        now: &VolumeInfo,
        size: Option<u64>,
        planned: &mut JobPlan,
    ) -> Result<(), Failure> {
        let name = entry.display_name();
        let cannot = |why: String| Failure::new(Kind::Io, format!("cannot grow {name}")).why(why);
        let device = entry.backing.as_deref().unwrap_or_default();
        if size.is_some() {
            return Err(Failure::new(Kind::Usage, format!("cannot grow {name} to a size"))
                .why(format!("it becomes as large as its backing device, {device}"))
                .next(format!("enlarge that device, then `bcached grow {name}`"))
                .option("--size"));
        }
        let found = planned.engine.as_ref().and_then(|engine| engine.capacity(now.id));
        let capacity = found
            .ok_or_else(|| {
                cannot(format!("{device} does not report its size")).next("check the device for errors")
            })?
            .map_err(|error| cannot(error).next("check the device for errors"))?;
        if capacity < now.sectors {
            return Err(cannot(format!(
                "{device} has room for {} only, and the volume is {} large",
                exact(capacity * 512),
                exact(now.sectors * 512)
            ))
            .next("restore the device's former size: a part of the volume is missing"));
        }
        let limit = self.plan_limit(entry, None, planned)?;
        let sectors = limit.map_or(capacity, |size| capacity.min(size / 512)).max(now.sectors);
        if let Some(size) = limit.filter(|size| size / 512 < capacity) {
            planned.note(&format!(
                "the configuration limits it (`size = \"{}\"`); the device has room for {}",
                typed(size),
                exact(capacity * 512)
            ));
        }
        planned.size = Some(sectors * 512);
        planned.work = (sectors > now.sectors).then_some(JobWork::InEngine(VolumeJob::Grow(sectors)));
        self.note_kept_size(name, planned);
        Ok(())
    }

    /// Notes, for a volume that grows, that connected clients do not see the new size at once.
    pub fn note_kept_size(&self, name: &str, planned: &mut JobPlan) {
        if planned.work.is_some() && self.fronts.is_size_kept(name) {
            planned.note("clients that are connected see the new size when they reconnect");
        }
    }

    /// Plans to shrink a volume to so many bytes. `now` is the open volume.
    pub fn plan_shrinking(
        &self,
        entry: &VolumeEntry,
        now: &VolumeInfo,
        begin: &JobSpec,
        planned: &mut JobPlan,
    ) -> Result<(), Failure> {
        let name = entry.display_name();
        let refused =
            |kind, why: String| Failure::new(kind, format!("cannot shrink {name}")).why(why).option("--size");
        if begin.accept_loss_bytes.is_some() || begin.lost_ranges.is_some() {
            let option = if begin.accept_loss_bytes.is_some() { "--accept-loss" } else { "--lost-ranges" };
            let why = "dirty data beyond its new end is written back, and none of it is lost".to_owned();
            return Err(refused(Kind::Usage, why).next(format!("leave {option} out")).option(option));
        }
        let size =
            begin.size_bytes.ok_or_else(|| refused(Kind::Usage, "its new size is not given".to_owned()))?;
        let block = now.block_sectors * 512;
        let has = now.sectors * 512;
        if size > has {
            return Err(refused(Kind::Usage, format!("its size is only {}", exact(has)))
                .next(format!("`bcached grow {name}` gives it the size of a device that has grown")));
        }
        if size < has && (size == 0 || !size.is_multiple_of(block)) {
            let below = (size - size % block).max(block);
            return Err(refused(
                Kind::Geometry,
                format!("its size must be a whole number of blocks of {}, at least one", human(block)),
            )
            .next(format!("`--size {}` is possible", typed(below))));
        }
        planned.size = Some(size);
        if size < has {
            // A client keeps the size that it learned when it connected, and its writes behind the
            // new end would be refused.
            self.check_unused(name, JobKind::Shrink)?;
            planned.work = Some(JobWork::InEngine(VolumeJob::Shrink(size / 512)));
            let behind = planned.engine.as_ref().and_then(|engine| engine.dirty_from(now.id, size / 512));
            // Dirty data before the new end stays dirty, and is no part of the work.
            let behind = behind.map_or(planned.dirty, |sectors| sectors * 512).min(planned.dirty);
            (planned.dirty_beside, planned.dirty) = (planned.dirty - behind, behind);
            self.plan_limit(entry, Some(size), planned)?;
        }
        Ok(())
    }

    /// Plans how it is kept that at most `limit` bytes of the volume are served, or, with `None`,
    /// all it has. Returns the limit that the configuration then gives.
    fn plan_limit(
        &self,
        entry: &VolumeEntry,
        limit: Option<u64>,
        planned: &mut JobPlan,
    ) -> Result<Option<u64>, Failure> {
        planned.limit = Some(limit);
        planned.before.limit = (entry.limit, None);
        let Ok((path, name)) = self.keeps(entry) else {
            if limit.is_some() {
                planned.note(
                    "this is not kept over a restart: cut the device to that size before the next start",
                );
            }
            return Ok(limit);
        };
        let mut file = SetFile::read(path)?;
        planned.before.limit.1 = file.kept_of(name).size;
        // If the configuration says it already, keeping it a second time would override what the
        // user writes there later.
        if limit.is_some() && self.said_limit(name, &file)? == limit {
            return Ok(limit);
        }
        file.kept_of(name).size = limit;
        let limit = self.said_limit(name, &file)?;
        planned.limit = Some(limit);
        if file.is_changed() {
            file.check_writable()?;
            planned.before.is_kept_anew = true;
            planned.file = Some(file);
        }
        Ok(limit)
    }

    /// Returns the limit of the served size, in bytes, that the configuration gives with `file` as
    /// the file of `set`.
    fn said_limit(&self, name: &str, file: &SetFile) -> Result<Option<u64>, Failure> {
        let config = Config::load_with(&self.line, Some(&file.text()))?;
        let volume = config.volumes.into_iter().find(|volume| volume.name.as_deref() == Some(name));
        Ok(volume.and_then(|volume| volume.size))
    }

    /// Announces the size when a job begins to resize the volume. New clients are not told of the
    /// part that a shrink is about to lose.
    pub fn is_to_have(&self, volume: usize, verb: JobKind, bytes: u64) {
        if verb == JobKind::Shrink {
            self.tell_size(volume, bytes / 512);
        }
    }

    /// Publishes the size of a volume when a resize job has ended, even if it failed.
    pub fn resized(&self, volume: usize) {
        let (entry, engine) = {
            let shared = self.shared();
            let Some(entry) = shared.table.volumes.get(volume).cloned() else { return };
            let cache = entry.cache.and_then(|cache| shared.table.caches.get(cache));
            let Some(engine) = cache.and_then(CacheEntry::engine) else { return };
            (entry, engine)
        };
        let VolumeState::Served(served) = &entry.state else { return };
        let status = engine.status();
        let now = status.and_then(|status| status.volumes.into_iter().find(|now| now.id == served.id));
        if let Some(now) = now {
            let sectors = entry.served_sectors(now.sectors, now.block_sectors);
            self.tell_size(volume, sectors);
            let (name, size) = (entry.display_name(), exact(sectors * 512));
            tracing::info!(event = "volume-resized", "{name}: its size is {size} now");
        }
    }

    /// Publishes the sizes of flash-only volumes as a reopened set reports them. A write of its
    /// volume table that seemed to fail may have reached the device.
    pub fn tell_flash_sizes(&self, cache: usize, status: &Status) {
        let others: Vec<_> = {
            let shared = self.shared();
            let other = |(index, entry): (usize, &VolumeEntry)| {
                let VolumeState::Served(served) = &entry.state else { return None };
                let now = status.volumes.iter().find(|now| now.id == served.id && now.flash_only)?;
                let is_other = now.sectors != served.sectors && shared.jobs.running(index).is_none();
                (entry.cache == Some(cache) && is_other).then_some((index, now.sectors))
            };
            shared.table.volumes.iter().enumerate().filter_map(other).collect()
        };
        for (volume, sectors) in others {
            self.tell_size(volume, sectors);
        }
    }

    fn tell_size(&self, volume: usize, sectors: u64) {
        let entry = {
            let mut shared = self.shared();
            let Some(entry) = shared.table.volumes.get_mut(volume) else { return };
            let VolumeState::Served(info) = &mut entry.state else { return };
            info.sectors = sectors;
            entry.clone()
        };
        self.publish(&entry);
    }

    /// Shrinks a newly added volume down to its limit, if it is larger. An earlier daemon may have
    /// been about to do that, or has done it and the device was not cut since.
    pub fn give_up_the_rest(&self, volume: usize) {
        let (limit, name) = {
            let shared = self.shared();
            let entry = &shared.table.volumes[volume];
            let limit = match &entry.state {
                VolumeState::Served(info) if !info.flash_only => entry.limit_in_blocks(info.block_sectors),
                _ => None,
            };
            (limit, entry.display_name().to_owned())
        };
        let Some(limit) = limit else { return };
        let begin = JobSpec { size_bytes: Some(limit), ..JobSpec::new(JobKind::Shrink, name.clone()) };
        let planned = self.plan_job(volume, &begin);
        // A device that is no larger than the limit has nothing to give up.
        let planned = planned.map(|planned| (planned.work.is_some()).then_some(planned));
        let begun = planned.map(|planned| {
            planned.map(|planned| self.carry_out(volume, JobKind::Shrink, planned)).transpose()
        });
        match begun.and_then(|begun| begun) {
            Ok(None) => {}
            Ok(Some(_)) => tracing::info!(
                event = "job-begun",
                "{name}: shrinking it to {}, the size to which the configuration limits it",
                exact(limit)
            ),
            Err(failure) => tracing::error!(event = "job-failed", "{name}: shrink: {failure}"),
        }
    }

    /// Restores the former size limit of the volume, because the job has failed.
    pub fn take_size_back(&self, job: &Job) {
        let (limit, kept) = job.before.limit;
        let entry = {
            let mut shared = self.shared();
            let entry = job.volume().and_then(|volume| shared.table.volumes.get_mut(volume));
            let Some(entry) = entry else { return };
            entry.limit = limit;
            entry.clone()
        };
        let (true, Ok((path, name))) = (job.before.is_kept_anew, self.keeps(&entry)) else { return };
        let taken_back = SetFile::read(path).and_then(|mut file| {
            file.kept_of(name).size = kept;
            file.write()
        });
        if let Err(failure) = taken_back {
            tracing::error!(event = "set-not-taken-back", "{failure}");
        }
    }
}
