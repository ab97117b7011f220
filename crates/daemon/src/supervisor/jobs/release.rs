//! `bcached release`: a set is stopped in order, and the next start does not serve its devices.
//! Dirty data stays on the cache, where a kernel or another daemon can read it.
//!
//! The configuration says so only after the set was stopped in order. A start after a kill in
//! between recovers the set, and the same command does the rest.

use crate::engine_error;
use crate::supervisor::Supervisor;
use crate::supervisor::jobs::{Job, JobTarget};
use crate::supervisor::table::{VolumeEntry, VolumeState};
use bcached_config::{Config, SetFile};
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{JobKind, JobReport, JobSpec, JobState};
use bcached_engine::Error;

impl Supervisor {
    /// Begins to release a cache and all that is on it, or joins a job that does.
    pub fn release(&mut self, begin: &JobSpec) -> Result<JobReport, Failure> {
        if let Some(already) = self.released_before(&begin.volume) {
            return Ok(already);
        }
        let running = self.releasing(&begin.volume)?;
        if let Some((number, cache)) = running {
            let mut shown = JobReport::new(
                JobKind::Release,
                self.shared().table.caches[cache].display_name().to_owned(),
                JobState::Running,
            );
            shown.id = Some(number);
            return Ok(shown);
        }
        if let Some(index) = self.closed_cache(&begin.volume) {
            return self.release_closed(index, begin);
        }
        let index = self.cache_called(Some(&begin.volume))?;
        let volumes = self.volumes_of(index);
        let (name, device, engine) = {
            let shared = self.shared();
            let entry = &shared.table.caches[index];
            let Some(engine) = entry.engine() else {
                let what = format!("cannot release {}", entry.display_name());
                return Err(Failure { what: what.into(), ..entry.closed() });
            };
            (entry.display_name().to_owned(), entry.device.clone(), engine)
        };
        let cannot = |kind| Failure::new(kind, format!("cannot release {name}"));
        if self.shared().table.former_of(index).is_some() {
            return Err(cannot(Kind::InUse)
                .why("it is being replaced, and its data is on two devices")
                .next(format!("`bcached replace {name} --with {device}` completes that")));
        }
        let status = engine.status().ok_or_else(|| cannot(Kind::Io).why("its engine does not answer"))?;
        if let Some(error) = &status.failed {
            return Err(cannot(Kind::Io)
                .why(format!("it has stopped writing, so it cannot be stopped in order: {error}"))
                .next("`bcached status` shows its state"));
        }
        self.check_idle(&name, &volumes)?;
        self.kept_released(&name, &volumes)?.map_or(Ok(()), |file| file.check_writable())?;
        let mut shown = JobReport::new(JobKind::Release, name.clone(), JobState::Planned);
        shown.dirty_bytes_at_start = status.dirty_sectors * 512;
        shown.dirty_unknown = status.volumes.iter().any(|info| !info.is_counted);
        let backings = volumes.iter().filter_map(|(_, entry)| entry.backing.clone());
        shown.devices = std::iter::once(device).chain(backings).collect();
        if self.config.set_file.is_none() {
            shown
                .notes
                .push("this is not kept over a restart: start the daemon without these devices".to_owned());
        }
        if begin.dry_run {
            return Ok(shown);
        }
        // If it could not be kept, the next start would serve the devices again, wherever they are
        // by then.
        self.kept_released(&name, &volumes)?.map_or(Ok(()), |file| file.rehearse())?;
        self.unserve(&name, index, &volumes)?;
        shown.state = JobState::Running;
        let number = self.shared().jobs.add(Job::new(&shown, JobTarget::Cache(index), Some(engine.clone())));
        shown.id = Some(number);
        self.stop_cache(index, &engine);
        Ok(shown)
    }

    /// Returns the job that releases that cache, if there is one.
    fn releasing(&self, typed: &str) -> Result<Option<(u64, usize)>, Failure> {
        let shared = self.shared();
        let Some((number, cache)) = shared.jobs.releasing() else { return Ok(None) };
        let entry = &shared.table.caches[cache];
        if entry.display_name() == typed || entry.device == typed {
            return Ok(Some((number, cache)));
        }
        drop(shared);
        Err(self.release_goes_on(&format!("cannot release {typed} now")))
    }

    /// Returns the release of a cache that was released before, by this daemon or an earlier one.
    fn released_before(&self, typed: &str) -> Option<JobReport> {
        let is_there = self
            .shared()
            .table
            .lasting_caches()
            .any(|(_, cache)| cache.display_name() == typed || cache.device == typed);
        let said = self
            .config
            .released
            .iter()
            .find(|said| said.name == typed || said.device.as_deref() == Some(typed));
        let said = said.filter(|_| !is_there)?;
        let mut shown = JobReport::new(JobKind::Release, said.name.clone(), JobState::Done);
        shown.already = true;
        let backings = said.backings.iter().map(|(_, device)| device);
        shown.devices = said.device.iter().chain(backings).cloned().collect();
        Some(shown)
    }

    /// Returns the volumes that are on a cache, or are to join it.
    pub fn volumes_of(&self, index: usize) -> Vec<(usize, VolumeEntry)> {
        let shared = self.shared();
        let name = &shared.table.caches[index].name;
        // It may have been released already.
        let is_only = shared.table.lasting_caches().all(|(other, _)| other == index);
        let has = |entry: &VolumeEntry| {
            let is_to = entry.wanted_cache == *name || entry.wanted_cache.is_none() && is_only;
            !entry.is_removed() && (entry.cache == Some(index) || entry.cache.is_none() && is_to)
        };
        let all = shared.table.volumes.iter().enumerate();
        all.filter(|(_, entry)| has(entry)).map(|(volume, entry)| (volume, entry.clone())).collect()
    }

    /// Checks that no client uses any of the volumes, and that no job works on them.
    pub fn check_idle(&self, name: &str, volumes: &[(usize, VolumeEntry)]) -> Result<(), Failure> {
        let refused = |why: String| Failure::new(Kind::InUse, format!("cannot release {name} now")).why(why);
        for (volume, entry) in volumes {
            if matches!(entry.state, VolumeState::Attaching) {
                return Err(refused(format!("{} is being attached to a cache", entry.display_name()))
                    .next("try again when `bcached status` shows that it is served"));
            }
            let running = {
                let shared = self.shared();
                shared.jobs.running(*volume).map(|(number, job)| (number, job.verb))
            };
            if let Some((number, verb)) = running {
                return Err(refused(format!(
                    "{verb} of {} is still running (job {number})",
                    entry.display_name()
                ))
                .next(format!("wait for it, or `bcached cancel {number}`")));
            }
        }
        let users: Vec<_> = volumes
            .iter()
            .flat_map(|(_, entry)| {
                let name = entry.display_name();
                self.fronts.users_of(name).into_iter().map(move |user| format!("{user} uses {name}"))
            })
            .collect();
        if users.is_empty() {
            let mut written = volumes.iter().map(|(_, entry)| self.fronts.write_out(entry.display_name()));
            return written.try_for_each(|written| written).map_err(|why| refused(why).next("try again"));
        }
        let failure =
            refused(format!("clients are connected: {}", users.join(", "))).next("disconnect them first");
        Err(Failure { holders: users, ..failure })
    }

    /// Tells new clients that there are no such volumes. Undoes that if a client was faster.
    fn unserve(&self, name: &str, index: usize, volumes: &[(usize, VolumeEntry)]) -> Result<(), Failure> {
        for (_, entry) in volumes {
            // A client that has it open keeps it: the check below finds that.
            self.exports.remove(entry.display_name());
        }
        if let Err(failure) = self.check_idle(name, volumes) {
            for (_, entry) in volumes {
                self.name_export(entry);
                self.publish(entry);
            }
            return Err(failure);
        }
        let mut shared = self.shared();
        for (volume, _) in volumes {
            let entry = &mut shared.table.volumes[*volume];
            (entry.state, entry.cache) = (VolumeState::Releasing, Some(index));
        }
        Ok(())
    }

    /// Plans the file's statement that nothing of the cache is served. `None`: there is no file.
    pub fn kept_released(
        &self,
        name: &str,
        volumes: &[(usize, VolumeEntry)],
    ) -> Result<Option<SetFile>, Failure> {
        let Some(path) = &self.config.set_file else { return Ok(None) };
        let mut file = SetFile::read(path)?;
        let own = volumes.iter().filter(|(_, entry)| entry.backing.is_some());
        let own = own.filter_map(|(_, entry)| entry.name.clone());
        // The files may have a new section for one since they were read; without a cache it could
        // not be served.
        let later = Config::load_with(&self.line, Some(&file.text()))?.volumes_of(name).into_iter();
        let later: Vec<_> = {
            let shared = self.shared();
            let stays = |volume: &String| {
                let is_it = |entry: &VolumeEntry| entry.name.as_ref() == Some(volume) && !entry.is_leaving();
                shared.table.volumes.iter().any(is_it)
            };
            later.filter(|volume| !stays(volume)).collect()
        };
        file.kept_of_cache(name).served = Some(false);
        for volume in own.chain(later) {
            let kept = file.kept_of(&volume);
            (kept.served, kept.released) = (Some(false), Some(true));
        }
        Config::load_with(&self.line, Some(&file.text()))?;
        Ok(Some(file))
    }

    /// Handles a cache that was stopped, in order or not.
    pub fn released(&mut self, number: u64, index: usize, result: Result<(), Error>) {
        let name = self.shared().table.caches[index].display_name().to_owned();
        // This includes volumes that a reload has assigned to it meanwhile.
        let volumes = self.volumes_of(index);
        for (volume, entry) in &volumes {
            self.shared().table.volumes[*volume].state = VolumeState::Removed;
            self.unexport(entry.display_name());
        }
        let outcome = match result {
            Err(error) => {
                let failure = engine_error::of_stop(format!("{name} was not stopped in order"), &error);
                Err(match (failure.kind, &failure.next) {
                    // Another start would not repair this.
                    (Kind::Damaged, _) | (_, None) => failure,
                    (_, Some(next)) => {
                        let next = format!(
                            "start bcached once more with its devices before another program uses them: {next}"
                        );
                        failure.next(next)
                    }
                })
            }
            Ok(()) => self.keep_released(&name, &volumes).map_err(|failure| not_kept(&name, failure)),
        };
        self.end_job(number, outcome);
    }

    pub fn keep_released(&mut self, name: &str, volumes: &[(usize, VolumeEntry)]) -> Result<(), Failure> {
        match self.kept_released(name, volumes)? {
            Some(file) if file.is_changed() => {
                file.write()?;
                self.take_over(Config::load(&self.line)?);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Returns the failure for work that could undo a running release, or that a release could
    /// undo.
    pub fn release_goes_on(&self, what: &str) -> Failure {
        let shared = self.shared();
        let failure = Failure::new(Kind::InUse, what).next("try again when that has ended");
        match shared.jobs.releasing() {
            Some((number, cache)) => {
                let name = shared.table.caches[cache].display_name();
                failure.why(format!("{name} is still being released (job {number})"))
            }
            None => failure.why("its cache is still being released"),
        }
    }
}

/// Returns the failure for a release that succeeded but could not be kept.
fn not_kept(name: &str, failure: Failure) -> Failure {
    Failure::new(failure.kind, format!("{name} is no longer served, but the next start would serve it again"))
        .why(failure.reason())
        .next(format!("write `served = false` into [cache.{name}] before then"))
}
