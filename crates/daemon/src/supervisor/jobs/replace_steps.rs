//! The loop's part of `bcached replace`. It keeps and begins what
//! [`crate::supervisor::jobs::replace`] has judged, and takes every possible step whenever
//! something has happened. The steps follow from the table alone, so a start resumes where an
//! earlier daemon stopped.

use crate::engine_thread::Engine;
use crate::supervisor::Supervisor;
use crate::supervisor::caches::replaced::name_of_former;
use crate::supervisor::jobs::attach_detach::VolumeMove;
use crate::supervisor::jobs::replace::{ReplaceAction, ReplaceRequest, check_unserved};
use crate::supervisor::jobs::{Job, JobTarget};
use crate::supervisor::table::{CacheEntry, CacheState, Table, VolumeEntry, VolumeState};
use bcached_config::{Config, NO_CACHE, PersistedCache, SetFile};
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{JobKind, JobReport, JobState};
use bcached_engine::Error;
use bcached_format::BackingState;
use bcached_offline::devices::CacheDevice;

/// What is to be kept before the job begins.
struct ReplacePlan {
    index: usize,
    /// The device that the cache has now.
    old: String,
    file: SetFile,
    config: Config,
    /// Volumes on the cache whose sections name no cache, and must.
    named: Vec<(usize, String)>,
}

/// Returns the failure of a replace job that was cancelled.
pub fn cancelled() -> Failure {
    Failure::new(Kind::Cancelled, "it was cancelled")
        .why("volumes that have moved are on the new device, the others on the old one")
        .next("repeat the command to continue")
}

/// Returns the reason to try again what could not be served before.
fn was_replaced() -> Failure {
    Failure::new(Kind::NotFound, "its cache was replaced")
}

impl Supervisor {
    /// Begins what was judged.
    pub fn replace(&mut self, asked: ReplaceRequest) {
        let ReplaceRequest { name, device, what, uid, is_dead, answer } = asked;
        let uid = crate::supervisor::jobs::user(uid);
        let text = format!("replace {name} with {device}");
        let begun = match what {
            ReplaceAction::Check => {
                let planned = self.plan_replacing(&name, &device, is_dead);
                let _gone =
                    answer.send(planned.map(|_| JobReport::new(JobKind::Replace, name, JobState::Planned)));
                return;
            }
            ReplaceAction::Begin(cache) => self.begin_replacing(&name, &device, *cache, is_dead),
            ReplaceAction::Resume => self.move_again(&name, is_dead),
            ReplaceAction::Wait => self.wait_again(&name),
        };
        match &begun {
            Err(failure) => tracing::info!(event = "job-refused", uid, "{text}: {failure}"),
            Ok(shown) if shown.already => {}
            Ok(_) => tracing::info!(event = "job-begun", uid, "{text}"),
        }
        let _gone = answer.send(begun);
    }

    /// Plans what the file is to say, if all of that can be kept. `is_dead`: the cache was judged
    /// dead.
    fn plan_replacing(&self, name: &str, device: &str, is_dead: bool) -> Result<ReplacePlan, Failure> {
        let index = self.cache_called_so(name)?;
        let refused = |why: &str| {
            Failure::new(Kind::InUse, format!("cannot replace {name}")).why(why).next("try again")
        };
        let path = self.config.set_file.clone().ok_or_else(|| refused("there is no configuration"))?;
        let mut file = SetFile::read(&path)?;
        let (old, named) = {
            let shared = self.shared();
            let table = &shared.table;
            if table.former_of(index).is_some() || table.former_named(name) {
                let former = name_of_former(name);
                return Err(refused(&format!(
                    "another request is replacing it, or another cache has the name `{former}`, which its old device would get"
                )));
            }
            if !table.is_as_judged(index, is_dead) {
                return Err(refused("its device has just appeared or disappeared"));
            }
            if let Some(owner) = table.owner_of(device) {
                return Err(Failure::new(Kind::SameDevice, format!("cannot replace {name}"))
                    .why(format!("{device} cannot be its new device: it is the device of {owner} already"))
                    .next("name another device"));
            }
            if is_dead && let Some(flash) = self.flash_of_nobody(table) {
                return Err(Failure::new(Kind::DataLoss, format!("cannot replace {name}"))
                    .why(format!(
                        "the flash-only volume {flash} is in a cache that is not open, perhaps in this one"
                    ))
                    .next(format!("bring it back, or remove [volume.{flash}] from the files and reload")));
            }
            (table.caches[index].device.clone(), table.to_be_named(index))
        };
        let kept = file.kept_of_cache(name);
        kept.device = Some(device.to_owned());
        (kept.former, kept.moving) = ((!is_dead).then(|| old.clone()), is_dead.then_some(true));
        // While a volume belongs to neither set, only its section says which one it is to join.
        for (_, volume) in &named {
            *file.cache_of(volume) = Some(name.to_owned());
        }
        let config = self.read_with(Some(&file))?;
        file.check_writable()?;
        Ok(ReplacePlan { index, old, file, config, named })
    }

    /// Returns the name of a flash-only volume whose cache is not open.
    fn flash_of_nobody(&self, table: &Table) -> Option<String> {
        let is_there = |uuid| {
            let is_it = |entry: &&VolumeEntry| entry.backing.is_none() && entry.uuid == Some(uuid);
            let cache = table.volumes.iter().find(is_it).and_then(|entry| table.caches.get(entry.cache?));
            cache.is_some_and(|cache| matches!(cache.state, CacheState::Open { .. }))
        };
        self.config.flash.iter().find(|flash| !is_there(flash.uuid)).map(|flash| flash.name.clone())
    }

    fn begin_replacing(
        &mut self,
        name: &str,
        device: &str,
        cache: CacheDevice,
        is_dead: bool,
    ) -> Result<JobReport, Failure> {
        let ReplacePlan { index, old, file, config, named } = self.plan_replacing(name, device, is_dead)?;
        file.write().map_err(|failure| {
            failure.next(
                "the new device is a cache now, and nothing else has begun: repeat the command to continue",
            )
        })?;
        for (volume, _) in named {
            self.shared().table.volumes[volume].wanted_cache = Some(name.to_owned());
        }
        self.slow_caches.keep(device, cache);
        self.become_former(index, name, !is_dead, &config);
        self.take_over(config);
        tracing::info!(
            event = "cache-replaced",
            "cache {name}: its device is {device} from now on, and was {old}"
        );
        if is_dead {
            return Ok(self.begin_arrival(self.cache_called_so(name)?, name));
        }
        Ok(self.begin_job_of(index, name))
    }

    /// Turns the entry of the cache into one of its former device, and adds a new entry for the
    /// cache.
    fn become_former(&self, index: usize, name: &str, is_open: bool, config: &Config) {
        let mut shared = self.shared();
        let table = &mut shared.table;
        let entry = &mut table.caches[index];
        let options = entry.options.clone();
        entry.name = Some(name_of_former(name));
        entry.former_of = Some(name.to_owned());
        entry.is_moving = true;
        if !is_open {
            entry.state = CacheState::Released;
        }
        let cache = config.caches.iter().find(|cache| cache.name.as_deref() == Some(name));
        if let Some(cache) = cache {
            let mut fresh = CacheEntry::of(cache);
            fresh.options = options;
            table.caches.push(fresh);
        }
        if is_open {
            return;
        }
        table.look_again(name, &was_replaced());
    }

    /// Resumes a replacement that was cancelled.
    fn move_again(&self, name: &str, is_dead: bool) -> Result<JobReport, Failure> {
        let index = self.cache_called_so(name)?;
        let former = self.shared().table.former_of(index);
        let Some(former) = former else {
            return Ok(JobReport {
                already: true,
                ..JobReport::new(JobKind::Replace, name.to_owned(), JobState::Done)
            });
        };
        if !self.shared().table.is_as_judged(former, is_dead) {
            return Err(Failure::new(Kind::InUse, format!("cannot replace {name}"))
                .why("its old device has just appeared or disappeared")
                .next("try again"));
        }
        if is_dead {
            // No volume belongs to the former device any more.
            self.keep_awaited(name, true)?;
            {
                let table = &mut self.shared().table;
                table.caches[former].state = CacheState::Released;
                table.caches[index].is_awaited = true;
                table.look_again(name, &was_replaced());
            }
            return Ok(self.begin_arrival(index, name));
        }
        self.forget_former(name, Some(true))?;
        self.shared().table.caches[former].is_moving = true;
        Ok(self.begin_job_of(former, name))
    }

    pub fn cache_called_so(&self, name: &str) -> Result<usize, Failure> {
        let shared = self.shared();
        let mut all = shared.table.lasting_caches();
        let found = all.find(|(_, cache)| cache.display_name() == name);
        found
            .map(|(index, _)| index)
            .ok_or_else(|| Failure::new(Kind::UnknownName, format!("there is no cache `{name}` any more")))
    }

    fn begin_job_of(&self, former: usize, name: &str) -> JobReport {
        let engine = self.shared().table.caches[former].engine();
        let dirty = engine.as_ref().and_then(Engine::status).map_or(0, |status| status.dirty_sectors * 512);
        let mut shown = JobReport::new(JobKind::Replace, name.to_owned(), JobState::Running);
        shown.dirty_bytes_at_start = dirty;
        let number = self.shared().jobs.add(Job::new(&shown, JobTarget::Cache(former), engine));
        shown.id = Some(number);
        shown
    }

    /// Keeps whether the volumes of the cache `name` leave its former device. `None` drops the
    /// former device from the file.
    fn forget_former(&self, name: &str, moving: Option<bool>) -> Result<(), Failure> {
        self.keep_of(name, |kept| {
            kept.moving = moving.filter(|moves| !moves);
            if moving.is_none() {
                kept.former = None;
            }
        })
    }

    /// Drops the former device of the cache `name` from the file, and keeps whether volumes still
    /// have to join the cache. The next start knows that from the file alone.
    pub fn keep_awaited(&self, name: &str, is_awaited: bool) -> Result<(), Failure> {
        self.keep_of(name, |kept| (kept.former, kept.moving) = (None, is_awaited.then_some(true)))
    }

    fn keep_of(&self, name: &str, change: impl FnOnce(&mut PersistedCache)) -> Result<(), Failure> {
        let Some(path) = &self.config.set_file else { return Ok(()) };
        let mut file = SetFile::read(path)?;
        change(file.kept_of_cache(name));
        if file.is_changed() { file.write() } else { Ok(()) }
    }

    /// Takes every step that is possible now.
    pub fn go_on_replacing(&self) {
        let all: Vec<_> = {
            let shared = self.shared();
            let formers = shared.table.real_caches().filter(|(_, cache)| cache.is_moving);
            formers.filter_map(|(index, cache)| Some((index, cache.former_of.clone()?))).collect()
        };
        for (former, name) in all {
            let Some(engine) = self.shared().table.caches[former].engine() else { continue };
            let running = self.shared().jobs.replacing(former);
            let number = running.or_else(|| self.begin_job_of(former, &name).id);
            let (Some(number), Ok(to)) = (number, self.cache_called_so(&name)) else { continue };
            let blocked = self.go_on_with((former, to), &engine);
            self.shared().jobs.block(number, blocked);
        }
    }

    /// Takes the possible steps for one cache. Returns what keeps it from going on, if anything
    /// does.
    fn go_on_with(&self, (former, to): (usize, usize), engine: &Engine) -> Option<String> {
        let (volumes, trouble) = {
            let shared = self.shared();
            let trouble = match &shared.table.caches[to].state {
                CacheState::Open { .. } => None,
                CacheState::Waiting(failure) | CacheState::Failed(failure) => Some(failure.to_string()),
                _ => Some("it is not open yet".to_owned()),
            };
            (shared.table.volumes.clone(), trouble)
        };
        if let Some(trouble) = trouble {
            return Some(format!("the new device is not served: {trouble}"));
        }
        let Some(status) = engine.status() else {
            return Some("the engine of its old device does not answer".to_owned());
        };
        let (mut blocked, mut left) = (None, false);
        for (volume, entry) in volumes.iter().enumerate() {
            let is_to = self.shared().table.is_meant(entry, to);
            match &entry.state {
                VolumeState::Served(info) if entry.cache == Some(former) => {
                    left = true;
                    let now = status.volumes.iter().find(|now| now.id == info.id);
                    let step =
                        now.map(|now| self.step(volume, (entry, now), engine, to, status.failed.is_some()));
                    blocked = blocked.or(step.flatten());
                }
                VolumeState::Attaching if entry.cache == Some(former) || is_to => left = true,
                VolumeState::Waiting(why) | VolumeState::Failed(why) if is_to && entry.backing.is_some() => {
                    left = true;
                    blocked = blocked.or(Some(format!("{} is not served: {why}", entry.display_name())));
                }
                VolumeState::Stopped if is_to && entry.backing.is_some() => {
                    left = true;
                    let name = entry.display_name();
                    blocked =
                        blocked.or(Some(format!("{name} is stopped: `bcached add {name}` serves it again")));
                }
                _ => {}
            }
        }
        if left {
            return blocked;
        }
        let name = self.shared().table.caches[to].name.clone().unwrap_or_default();
        if let Err(failure) = check_unserved(&name, &status) {
            return Some(failure.why.map_or_else(String::new, String::from));
        }
        self.stop_cache(former, engine);
        None
    }

    /// Begins to detach a volume from its set, or, if it is detached, moves it to the other one.
    fn step(
        &self,
        volume: usize,
        (entry, now): (&VolumeEntry, &bcached_engine::VolumeInfo),
        engine: &Engine,
        to: usize,
        has_failed: bool,
    ) -> Option<String> {
        let name = entry.display_name();
        let running = {
            let shared = self.shared();
            shared.jobs.running(volume).map(|(number, job)| (number, job.verb))
        };
        match running {
            Some((_, JobKind::Replace)) => return None,
            Some((number, verb)) => return Some(format!("{verb} of {name} is still running (job {number})")),
            None => {}
        }
        let VolumeState::Served(served) = &entry.state else { return None };
        let is_dirty = now.dirty_sectors > 0 || now.state == Some(BackingState::Dirty);
        if now.attached && has_failed && is_dirty {
            return Some(format!("{name} has dirty data in a cache that has failed"));
        }
        let leaves = now.attached && !has_failed;
        let target = if entry.wanted_cache.as_deref() == Some(NO_CACHE) {
            match self.engine_of_none(now.backing_block_sectors.unwrap_or(1)) {
                Ok((index, _)) => index,
                Err(_) => return Some(format!("{name} waits for an engine that serves it without a cache")),
            }
        } else {
            if let Err(failure) = self.check_blocks(name, now, to) {
                return Some(failure.to_string());
            }
            to
        };
        let mut shown = JobReport::new(JobKind::Replace, name.to_owned(), JobState::Running);
        shown.dirty_bytes_at_start = now.dirty_sectors * 512;
        let job_target = JobTarget::Volume(volume, served.clone());
        let number = self.shared().jobs.add(Job::new(&shown, job_target, Some(engine.clone())));
        if leaves {
            self.begin_here(number, Self::job_of(JobKind::Replace), engine, now.id);
        } else {
            self.begin_move(number, VolumeMove { volume, cache: target }, engine, now.id);
        }
        None
    }

    /// Closes one cache while others go on.
    pub fn stop_cache(&self, index: usize, engine: &Engine) {
        let mut shared = self.shared();
        let entry = &mut shared.table.caches[index];
        let state = std::mem::replace(&mut entry.state, CacheState::Released);
        let CacheState::Open { thread, .. } = state else {
            entry.state = state;
            return;
        };
        entry.state = CacheState::Ending { thread };
        drop(shared);
        self.tell_to_stop(index, engine);
    }

    /// Handles a cache that was stopped: this daemon no longer has its device.
    pub fn cache_let_go(&mut self, index: usize, result: Result<(), Error>) {
        let (state, name, former_of, device) = {
            let mut shared = self.shared();
            let entry = &mut shared.table.caches[index];
            let state = std::mem::replace(&mut entry.state, CacheState::Released);
            (state, entry.display_name().to_owned(), entry.former_of.clone(), entry.device.clone())
        };
        if let CacheState::Ending { thread } | CacheState::Open { thread, .. } = state {
            let _ended = thread.join();
        }
        if let Err(error) = &result {
            tracing::warn!(event = "cache-not-stopped", "cache {name}: it was not stopped in order: {error}");
        }
        tracing::info!(event = "cache-released", "cache {name}: {device} is released");
        let releasing = self.shared().jobs.releasing().filter(|(_, cache)| *cache == index);
        if let Some((number, _)) = releasing {
            return self.released(number, index, result);
        }
        let Some(of) = former_of else { return };
        let outcome = self.forget_former(&of, None);
        let running = self.shared().jobs.replacing(index);
        if let Some(number) = running {
            self.end_job(number, outcome);
        }
    }

    /// Stops a replacement that was cancelled, or from which a volume cannot leave. Volumes that
    /// have moved stay on the new device, and the others on the former one.
    pub fn stop_replacing(&self, former: usize, failure: Failure) {
        let (number, name, others) = {
            let mut shared = self.shared();
            let Some(number) = shared.jobs.replacing(former) else { return };
            let entry = &mut shared.table.caches[former];
            if !matches!(entry.state, CacheState::Open { .. }) {
                return;
            }
            entry.is_moving = false;
            let name = entry.former_of.clone().unwrap_or_default();
            (number, name, shared.jobs.leaving(former, &shared.table))
        };
        if let Err(failure) = self.forget_former(&name, Some(false)) {
            tracing::error!(event = "set-not-taken-back", "{failure}");
        }
        self.end_job(number, Err(failure));
        for (number, engine) in others {
            engine.cancel(number);
        }
    }

    /// Stops the replacement of a volume's cache, because the volume could not leave or move.
    pub fn volume_stays(&self, volume: usize, failure: &Failure) {
        let former = self.shared().table.volumes.get(volume).and_then(|entry| entry.cache);
        if let Some(former) = former {
            self.stop_replacing(former, failure.clone());
        }
    }
}
