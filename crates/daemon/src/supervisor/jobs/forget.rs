//! `bcached forget`: gives up a volume that is not served. What is lost is written down first, on a
//! thread of its own, which then has the engine do it. Neither this loop nor the engine waits for a
//! file.

use crate::engine_error;
use crate::engine_thread::Engine;
use crate::supervisor::jobs::JobEvent;
use crate::supervisor::jobs::record_losses::{self, AcceptedLoss, PointOfNoReturn};
use crate::supervisor::jobs::{Job, JobTarget};
use crate::supervisor::table::{VolumeEntry, VolumeState};
use crate::supervisor::{Event, Supervisor};
use bcached_config::{NO_CACHE, PersistedVolume, SetFile};
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{JobKind, JobReport, JobSpec, JobState};
use bcached_control::names::{self, KnownNames};
use bcached_control::sizes::{human, typed};
use bcached_engine::{Error, UnservedInfo};
use bcached_format::Uuid;
use bcached_offline::lost_writes::{self, VolumeIdentity};
use std::path::PathBuf;
use std::thread;

/// A volume in a set's table that is not served, and the engine of that set.
struct ForgetTarget {
    engine: Engine,
    cache: String,
    set_uuid: Uuid,
    left: UnservedInfo,
}

/// A request that was judged.
struct ForgetPlan {
    found: ForgetTarget,
    name: String,
    loss: AcceptedLoss,
    notes: Vec<String>,
}

impl Supervisor {
    /// Begins to forget a volume, or joins a job that does.
    pub fn forget(&self, begin: &JobSpec) -> Result<JobReport, Failure> {
        let found = self.unserved_called(begin)?;
        let uuid = found.left.uuid;
        if let Some((number, name)) = self.shared().jobs.forgetting(uuid) {
            let mut shown = JobReport::new(JobKind::Forget, name, JobState::Running);
            shown.id = Some(number);
            return Ok(shown);
        }
        let plan = self.plan_forget(begin, found)?;
        let mut shown = JobReport::new(JobKind::Forget, plan.name.clone(), JobState::Planned);
        let dirty = plan.found.left.dirty_sectors * 512;
        shown.dirty_bytes_at_start = dirty;
        shown.notes.clone_from(&plan.notes);
        if dirty > 0 {
            shown.lost_bytes = Some(dirty);
            shown.lost_ranges = Some(plan.loss.list.display().to_string());
        }
        if begin.dry_run {
            return Ok(shown);
        }
        shown.state = JobState::Running;
        let target = JobTarget::Unserved(uuid);
        let job = Job::new(&shown, target, Some(plan.found.engine.clone()));
        let turn = job.turn.clone();
        let number = self.shared().jobs.add(job);
        shown.id = Some(number);
        let sender = self.sender.clone();
        let work = move || {
            let forgotten = carry_out(plan, &turn);
            drop(sender.send(Event::Job(number, JobEvent::Forgotten(uuid, forgotten))));
        };
        if let Err(error) = thread::Builder::new().name("forget".to_owned()).spawn(work) {
            let failure = Failure::new(Kind::Io, "cannot start a thread for the job").why(error.to_string());
            self.end_job(number, Err(failure.clone()));
            return Err(failure);
        }
        Ok(shown)
    }

    fn plan_forget(&self, begin: &JobSpec, found: ForgetTarget) -> Result<ForgetPlan, Failure> {
        let uuid = found.left.uuid;
        let name = self.name_of_unserved(&found.left);
        check_walked(&found, &name)?;
        let mut notes = Vec::new();
        for entry in self.entries_of(uuid) {
            let called = entry.display_name();
            match &entry.state {
                VolumeState::Served(_) | VolumeState::Attaching => return Err(served(&entry, called, &found.cache)),
                // A volume without a device is named by no file.
                VolumeState::Removed | VolumeState::Releasing => {}
                _ if entry.backing.is_none() => {}
                VolumeState::Failed(why) if why.kind == Kind::WrongSet => {
                    notes.push(format!("bcached tries to serve {called} again as soon as it is forgotten"));
                }
                VolumeState::Waiting(_) | VolumeState::Failed(_) | VolumeState::Stopped => notes.push(format!(
                    "the configuration still names it, as {called}: remove that section, or `bcached remove {called}`"
                )),
            }
        }
        let dirty = found.left.dirty_sectors * 512;
        let accepted = begin.accept_loss_bytes.unwrap_or(0);
        if dirty > accepted {
            return Err(too_much(&name, &found, dirty, begin.accept_loss_bytes));
        }
        let list = begin.lost_ranges.as_ref().map_or_else(|| lost_writes::default_path(uuid), PathBuf::from);
        if dirty > 0 {
            lost_writes::check(&list)?;
        }
        let (label, flash_only) = (found.left.label.to_string(), found.left.flash_sectors.is_some());
        let owner = VolumeIdentity { uuid, label, set_uuid: found.set_uuid, flash_only };
        Ok(ForgetPlan { found, name, loss: AcceptedLoss { accepted, list, owner }, notes })
    }

    /// Finds the volume of this name among those that open sets know and that are not served.
    fn unserved_called(&self, begin: &JobSpec) -> Result<ForgetTarget, Failure> {
        let open: Vec<_> = {
            let shared = self.shared();
            let real =
                shared.table.real_caches().map(|(index, cache)| (index, cache.display_name().to_owned()));
            let real: Vec<_> = real.collect();
            let engines = shared.table.open_engines().into_iter();
            let name = |index| real.iter().find(|(real, _)| *real == index).map(|(_, name)| name.clone());
            engines.filter_map(|(index, engine)| Some((index, name(index)?, engine))).collect()
        };
        let wanted = begin.cache.as_deref().map(|cache| self.cache_called(Some(cache))).transpose()?;
        let open: Vec<_> =
            open.into_iter().filter(|(index, ..)| wanted.is_none_or(|wanted| wanted == *index)).collect();
        let engines: Vec<_> = open.iter().map(|(_, _, engine)| Some(engine.clone())).collect();
        let mut all = Vec::new();
        for ((_, cache, engine), status) in open.into_iter().zip(Engine::status_of_all(&engines)) {
            let status = status.ok_or_else(|| engine_error::silent(&cache))?;
            all.extend(status.unserved.into_iter().map(|left| ForgetTarget {
                engine: engine.clone(),
                cache: cache.clone(),
                set_uuid: status.set_uuid,
                left,
            }));
        }
        let known: Vec<_> = all.iter().map(|found| self.known_as(&found.left)).collect();
        match names::resolve(&begin.volume, &known) {
            Ok(index) => Ok(all.swap_remove(index)),
            Err(meant) if meant.is_empty() => Err(self.not_unserved(&begin.volume, &all)),
            Err(meant) => {
                let sentence =
                    |index: usize| format!("{} in {}", in_words(&all[index].left), all[index].cache);
                let meant: Vec<_> = meant.into_iter().map(sentence).collect();
                Err(Failure::new(Kind::AmbiguousName, format!("`{}` matches several volumes", begin.volume))
                    .next(format!("name the UUID, and the cache with --cache: {}", meant.join(", ")))
                    .option("--cache"))
            }
        }
    }

    fn known_as(&self, left: &UnservedInfo) -> KnownNames {
        let entries = self.entries_of(left.uuid);
        let named = entries.into_iter().find_map(|entry| entry.name);
        let label = left.label.to_string();
        KnownNames {
            name: named.unwrap_or_default(),
            label: Some(label).filter(|label| !label.is_empty()),
            uuid: Some(left.uuid.to_string()),
            ..KnownNames::default()
        }
    }

    fn name_of_unserved(&self, left: &UnservedInfo) -> String {
        let known = self.known_as(left);
        if known.name.is_empty() { in_words(left) } else { known.name }
    }

    /// Returns the volumes, configured or added, that have this UUID as far as is known.
    fn entries_of(&self, uuid: Uuid) -> Vec<VolumeEntry> {
        let by_name = format!("UUID={uuid}");
        let is_it = |entry: &&VolumeEntry| {
            let served = match &entry.state {
                VolumeState::Served(info) => Some(info.uuid),
                _ => None,
            };
            served.or(entry.uuid) == Some(uuid)
                || entry.backing.as_ref().is_some_and(|backing| backing.eq_ignore_ascii_case(&by_name))
        };
        self.shared().table.volumes.iter().filter(is_it).cloned().collect()
    }

    /// Returns why no volume of this name can be forgotten.
    fn not_unserved(&self, called: &str, all: &[ForgetTarget]) -> Failure {
        let (known, entries) = {
            let shared = self.shared();
            (shared.table.known(), shared.table.volumes.clone())
        };
        // Paths are not looked at: this is the loop.
        let known: Vec<_> =
            known.into_iter().map(|known| KnownNames { path: None, opened: None, ..known }).collect();
        if let Ok(index) = names::resolve(called, &known) {
            let (name, entry) = (&known[index].name, &entries[index]);
            if matches!(entry.state, VolumeState::Served(_) | VolumeState::Attaching) {
                let cache = entry
                    .cache
                    .and_then(|index| Some(self.shared().table.caches.get(index)?.display_name().to_owned()));
                return served(entry, name, &cache.unwrap_or_default());
            }
        }
        let names: Vec<_> = all.iter().map(|found| in_words(&found.left)).collect();
        let failure = Failure::new(
            Kind::UnknownName,
            format!("no open cache has a volume `{called}` that is not served"),
        )
        .why("it may have been forgotten already");
        if names.is_empty() {
            failure.next("`bcached status` lists the volumes that are not served")
        } else {
            failure.next(format!("there are: {}", names.join(", ")))
        }
    }

    /// Handles the end of the thread.
    pub fn forgotten(&mut self, number: u64, uuid: Uuid, outcome: Result<(), Failure>) {
        if outcome.is_ok() {
            self.drop_flash(uuid);
            self.shared().table.volume_is_forgotten(uuid);
        }
        self.end_job(number, outcome);
    }

    /// Drops what is known and kept of a flash-only volume that was forgotten.
    fn drop_flash(&mut self, uuid: Uuid) {
        let is_it = |entry: &&mut VolumeEntry| entry.backing.is_none() && entry.uuid == Some(uuid);
        let name = {
            let mut shared = self.shared();
            let Some(entry) = shared.table.volumes.iter_mut().find(is_it) else { return };
            (entry.uuid, entry.label) = (None, None);
            // If it was stopped, its clients must not be told of a volume that no longer exists.
            entry.state = VolumeState::Removed;
            entry.name.take()
        };
        let (Some(path), Some(name)) = (&self.config.set_file, name) else { return };
        let dropped = SetFile::read(path).and_then(|mut file| {
            *file.kept_of(&name) = PersistedVolume::default();
            let is_changed = file.is_changed();
            file.write().map(|()| is_changed)
        });
        match dropped {
            Ok(false) => {}
            // Another volume may have its name now. Other changes of the files take effect at the
            // next reload.
            Ok(true) => {
                let mut config = (*self.config).clone();
                config.flash.retain(|flash| flash.name != name);
                self.set_config(config);
            }
            Err(failure) => tracing::warn!(event = "set-not-written", "{failure}"),
        }
    }
}

/// Checks that the index has been read: before that, the amount of data that would be lost is
/// unknown.
fn check_walked(found: &ForgetTarget, name: &str) -> Result<(), Failure> {
    let walked = found.engine.status().map_or(100, |status| status.walked_percent);
    if walked == 100 {
        return Ok(());
    }
    Err(Failure::new(Kind::InUse, format!("the amount of dirty data of {name} is not known yet"))
        .why(format!("the index of {} is still being read ({walked}%)", found.cache))
        .next("try again in a moment"))
}

/// Writes down what is lost, then has the volume forgotten.
fn carry_out(plan: ForgetPlan, turn: &PointOfNoReturn) -> Result<(), Failure> {
    let ForgetPlan { found, name, loss, .. } = plan;
    let ForgetTarget { engine, cache, left, .. } = &found;
    let failed = |error: Error| engine_error::of_job(JobKind::Forget, &name, &error);
    let forgetting = engine.begin_forgetting(left.uuid).map_err(failed)?;
    let dirty = forgetting.dirty_sectors * 512;
    let begun = loss.write_down(
        dirty,
        turn,
        || too_much(&name, &found, dirty, Some(loss.accepted)),
        || record_losses::cancelled(format!("{name} was not forgotten")),
        |at| engine.lost(&forgetting, at).map_err(failed),
    );
    if let Err(failure) = begun {
        engine.keep(forgetting);
        return Err(failure);
    }
    engine.forget(forgetting).map_err(failed)?;
    tracing::info!(
        event = "volume-forgotten",
        "{name}: it is forgotten; {} of its dirty data in {cache} is given up ({})",
        human(dirty),
        loss.list_in_words(dirty)
    );
    Ok(())
}

fn in_words(left: &UnservedInfo) -> String {
    crate::supervisor::report::unserved(left).name()
}

fn served(entry: &VolumeEntry, name: &str, cache: &str) -> Failure {
    let next = match cache {
        // A flash-only volume cannot leave its cache.
        _ if entry.is_flash_only() => format!("`bcached remove {name}` first"),
        NO_CACHE => format!("`bcached remove {name}` first"),
        _ => format!(
            "`bcached detach {name}` takes it out of {cache} with all of its data; to give up its data in {cache} instead, `bcached remove {name}` first"
        ),
    };
    Failure::new(Kind::InUse, format!("cannot forget {name}")).why("it is served").next(next)
}

fn too_much(name: &str, found: &ForgetTarget, dirty: u64, accepted: Option<u64>) -> Failure {
    let (human, typed) = (human(dirty), typed(dirty));
    let what = format!("cannot forget {name}");
    let why = format!("{human} of its dirty data in {} {}", found.cache, record_losses::more_than(accepted));
    let giving_up = format!("give that up with `--accept-loss {typed}`");
    let next = match found.left.flash_sectors {
        Some(_) => giving_up,
        None => format!("bring its backing device back, or {giving_up}"),
    };
    Failure::new(Kind::DataLoss, what).why(why).next(next).option("--accept-loss")
}
