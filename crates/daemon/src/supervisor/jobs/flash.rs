//! Flash-only volumes, which live in a cache alone. The cache's own table knows them, by label, so
//! each is served wherever its cache is. The configuration may say more of one: another name, that
//! it is read-only, or that it is not to be served.

use crate::engine_error;
use crate::engine_thread::Engine;
use crate::supervisor::options::pending_settings::PendingModes;
use crate::supervisor::table::{Table, VolumeEntry, VolumeState};
use crate::supervisor::{Event, Supervisor};
use bcached_config::options::Scope;
use bcached_config::{Config, PersistedVolume, SetFile};
use bcached_control::failure::{Failure, Kind};
use bcached_control::jobs::{JobKind, JobReport, JobSpec, JobState};
use bcached_control::names;
use bcached_control::sizes::human;
use bcached_engine::{Error, VolumeInfo};
use bcached_format::{Label, Uuid};
use std::sync::mpsc::Sender;
use std::time::Duration;

/// A volume that an engine was asked to make or to serve.
pub struct AddedFlashVolume {
    cache: usize,
    shown: JobReport,
    /// What the file said of it before, if it says something else now.
    before: Option<PersistedVolume>,
    added: Result<VolumeInfo, Error>,
    answer: Sender<Result<JobReport, Failure>>,
}

/// A request that was judged.
struct FlashPlan {
    engine: Engine,
    cache: usize,
    what: FlashAction,
    /// The file that has to change, and what it said of the volume.
    file: Option<(SetFile, PersistedVolume)>,
}

enum FlashAction {
    /// Nothing: it is there already.
    Nothing,
    /// Make one with this label and so many sectors.
    Make(Label, u64),
    Serve(Uuid),
}

impl Table {
    /// Adds an entry for a volume that an open set serves or could serve.
    pub fn add_flash(&mut self, cache: usize, info: VolumeInfo, config: &Config) -> VolumeEntry {
        let said = config.flash.iter().find(|flash| flash.uuid == info.uuid);
        let is_former = |former: &VolumeEntry| {
            former.backing.is_none() && former.is_gone() && former.uuid == Some(info.uuid)
        };
        let former = self.volumes.iter().position(is_former);
        let name = said.map(|flash| flash.name.clone());
        let name = name.or_else(|| self.volumes[former?].name.clone()).unwrap_or_else(|| {
            let taken = self.volume_names();
            names::of_volume(info.label, info.uuid, |name| taken.contains(name))
        });
        // These last until the daemon stops: neither a stop nor a removal of the volume ends them.
        let mut options = former.map(|former| self.volumes[former].options.clone()).unwrap_or_default();
        if let Some(said) = self.flash_runtime_options.remove(&info.uuid.to_string()) {
            said.add_to(&mut options, Scope::Volume, &name);
        }
        let before = former.map(|former| self.volumes[former].number);
        let number = self.number_of_flash(said, before, config);
        let entry = VolumeEntry {
            number: number.number,
            is_numbered: number.is_asked,
            name: Some(name),
            backing: None,
            uuid: Some(info.uuid),
            label: Some(info.label),
            wanted_cache: None,
            cache: Some(cache),
            options,
            told: info.options,
            data_offset: None,
            kept_mode: Some(info.mode),
            kept_state: None,
            pending_modes: PendingModes::default(),
            read_only: said.is_some_and(|flash| flash.read_only),
            shared: said.is_some_and(|flash| flash.shared),
            ways: said.map_or(config.ways, |flash| flash.ways),
            wait: Duration::ZERO,
            limit: None,
            owes: false,
            opened: None,
            absent: None,
            missed_set: None,
            stranded: None,
            missing_cache: None,
            again: None,
            state: match said {
                Some(flash) if !flash.served => VolumeState::Removed,
                _ => VolumeState::Served(Box::new(info)),
            },
            wait_logged: None,
        };
        match former {
            Some(former) => self.volumes[former] = entry.clone(),
            None => self.volumes.push(entry.clone()),
        }
        entry
    }
}

impl Supervisor {
    /// Takes up the flash-only volumes of a set that has opened, and serves those that are to be
    /// served.
    pub fn take_up_flash(&self, cache: usize, volumes: Vec<VolumeInfo>) {
        for info in volumes {
            let id = info.id;
            let entry = self.shared().table.add_flash(cache, info, &self.config);
            if !entry.is_removed() {
                self.export(&entry);
                continue;
            }
            if let Some(engine) = self.engine_of(cache) {
                let name = entry.display_name().to_owned();
                engine.give_up(
                    id,
                    Box::new(move |given| {
                        if let Err(error) = given.map(drop) {
                            tracing::error!(
                                event = "volume-not-removed",
                                "{name}: cannot stop serving it: {error}"
                            );
                        }
                    }),
                );
            }
        }
    }

    fn engine_of(&self, cache: usize) -> Option<Engine> {
        self.shared().table.caches.get(cache)?.engine()
    }

    /// Checks whether the volume to be added is a flash-only one.
    pub fn is_flash(&self, begin: &JobSpec) -> bool {
        let is_it = |entry: &VolumeEntry| {
            entry.name.as_ref() == Some(&begin.volume) && entry.backing.is_none() && entry.is_gone()
        };
        begin.size_bytes.is_some()
            || (begin.backing.is_none() && self.shared().table.volumes.iter().any(is_it))
    }

    /// Makes a flash-only volume, or serves one again. The caller is answered when that is done.
    pub fn add_flash(&mut self, begin: &JobSpec, uid: &str, answer: Sender<Result<JobReport, Failure>>) {
        let mut shown = JobReport::new(JobKind::Add, begin.volume.clone(), JobState::Done);
        let planned = self.plan_flash(begin).and_then(|plan| {
            shown.already = matches!(plan.what, FlashAction::Nothing);
            if begin.dry_run && !shown.already {
                shown.state = JobState::Planned;
            }
            if let (Some((file, _)), false) = (&plan.file, begin.dry_run) {
                file.write()?;
                self.take_over(Config::load(&self.line)?);
            }
            Ok(plan)
        });
        let FlashPlan { engine, cache, what, file } = match planned {
            Err(failure) => {
                tracing::info!(event = "job-refused", uid, "add {}: {failure}", begin.volume);
                return drop(answer.send(Err(failure)));
            }
            Ok(_) if begin.dry_run || shown.already => return drop(answer.send(Ok(shown))),
            Ok(plan) => plan,
        };
        let (sender, before) = (self.sender.clone(), file.map(|(_, before)| before));
        let told = Box::new(move |added| {
            let done = AddedFlashVolume { cache, shown, before, added, answer };
            drop(sender.send(Event::FlashAdded(Box::new(done))));
        });
        match what {
            FlashAction::Nothing => {}
            FlashAction::Make(label, sectors) => engine.create_flash_only(sectors, label, told),
            FlashAction::Serve(uuid) => engine.add_flash_only(uuid, told),
        }
    }

    fn plan_flash(&self, begin: &JobSpec) -> Result<FlashPlan, Failure> {
        let name = &begin.volume;
        let refused = |kind, why: String| Failure::new(kind, format!("cannot add {name}")).why(why);
        if begin.backing.is_some() {
            return Err(refused(
                Kind::Usage,
                "a volume with a backing device has the size of that device".to_owned(),
            )
            .next("leave --size out, or --backing for a flash-only volume")
            .option("--size"));
        }
        self.check_not_releasing(name, None)?;
        let present =
            self.shared().table.volumes.iter().find(|entry| entry.name.as_ref() == Some(name)).cloned();
        let Some(entry) = present else { return self.plan_new_flash(begin) };
        let taken =
            || refused(Kind::InUse, "another volume has that name".to_owned()).next("choose another name");
        let cache = entry.cache.filter(|_| entry.backing.is_none()).ok_or_else(taken)?;
        let silent = || refused(Kind::Io, "the engine of its cache does not answer".to_owned());
        let engine = self.engine_of(cache).ok_or_else(silent)?;
        let status = engine.status().ok_or_else(silent)?;
        let sectors = match &entry.state {
            VolumeState::Served(info) => Some(info.sectors),
            _ => status
                .unserved
                .iter()
                .find(|left| Some(left.uuid) == entry.uuid)
                .and_then(|left| left.flash_sectors),
        };
        let sectors = sectors.ok_or_else(taken)?;
        if begin.size_bytes.is_some_and(|bytes| bytes != sectors * 512) {
            return Err(refused(
                Kind::InUse,
                format!("it exists already, with a size of {}", human(sectors * 512)),
            )
            .next("choose another name, or leave --size out to serve it again")
            .option("--size"));
        }
        match (entry.is_gone(), entry.uuid) {
            (true, Some(uuid)) => {
                Ok(FlashPlan { engine, cache, what: FlashAction::Serve(uuid), file: self.plan_kept(name)? })
            }
            _ => Ok(FlashPlan { engine, cache, what: FlashAction::Nothing, file: None }),
        }
    }

    fn plan_new_flash(&self, begin: &JobSpec) -> Result<FlashPlan, Failure> {
        let name = &begin.volume;
        let refused = |kind, why: &str| Failure::new(kind, format!("cannot add {name}")).why(why);
        if name.trim() != name || name.is_empty() || name.contains('/') || name.contains(names::is_unseen) {
            return Err(Failure::new(Kind::Usage, format!("cannot add \"{}\"", name.escape_debug())).why(
                "a name must not be empty, contain a slash or an invisible character, or begin or end with a blank",
            ));
        }
        let label = Label::from_text(name).ok_or_else(|| {
            refused(Kind::Usage, "the cache keeps the name as a label, which has at most 32 bytes")
                .next("choose a shorter name")
        })?;
        let mut removed = self.config.not_served.iter().map(|removed| &removed.name);
        let mut flash = self.config.flash.iter().map(|flash| &flash.name);
        if removed.any(|other| other == name) || flash.any(|other| other == name) {
            return Err(refused(Kind::InUse, "the configuration already has a volume of that name")
                .next("choose another name"));
        }
        let cache = self.cache_called(begin.cache.as_deref())?;
        let silent = || refused(Kind::Io, "the engine of its cache does not answer");
        let engine = self.engine_of(cache).ok_or_else(silent)?;
        let status = engine.status().ok_or_else(silent)?;
        let is_label = |other: Label| other.text() == label.text();
        let mut labels =
            status.unserved.iter().filter(|left| left.flash_sectors.is_some()).map(|left| left.label);
        if labels.any(is_label) {
            return Err(refused(Kind::InUse, "the cache has a volume of that name, which is not served")
                .next("choose another name, or `bcached forget` that one"));
        }
        let bytes = begin.size_bytes.unwrap_or_default();
        let (sectors, block_sectors, sectors_max) =
            (bytes / 512, status.block_sectors, status.flash_room_sectors);
        if bytes == 0 || !bytes.is_multiple_of(block_sectors * 512) {
            return Err(engine_error::of_flash(name, &Error::NotWholeBlocks { sectors, block_sectors }));
        }
        // The engine decides; this check gives a dry run the same answer.
        if sectors > sectors_max {
            return Err(engine_error::of_flash(name, &Error::NoRoom { sectors, sectors_max }));
        }
        Ok(FlashPlan { engine, cache, what: FlashAction::Make(label, sectors), file: None })
    }

    /// Plans the removal of the file's statement that the volume is not served.
    fn plan_kept(&self, name: &str) -> Result<Option<(SetFile, PersistedVolume)>, Failure> {
        let Some(path) = &self.config.set_file else { return Ok(None) };
        let mut file = SetFile::read(path)?;
        let before = file.kept_of(name).clone();
        *file.kept_of(name) = PersistedVolume::default();
        if !file.is_changed() {
            return Ok(None);
        }
        Config::load_with(&self.line, Some(&file.text()))?;
        file.check_writable()?;
        Ok(Some((file, before)))
    }

    /// Handles the answer of an engine that was to make a volume, or to serve one again.
    pub fn flash_added(&mut self, done: AddedFlashVolume) {
        let AddedFlashVolume { cache, shown, before, added, answer } = done;
        let name = shown.volume.clone();
        let outcome = match added {
            Ok(info) => {
                let entry = self.shared().table.add_flash(cache, info, &self.config);
                self.export(&entry);
                tracing::info!(event = "volume-added", "{name}: this flash-only volume is served");
                Ok(shown)
            }
            Err(error) => {
                if let Some(before) = before {
                    self.say_again(&name, &before);
                }
                let failure = engine_error::of_flash(&name, &error);
                tracing::error!(event = "job-failed", "{failure}");
                Err(failure)
            }
        };
        drop(answer.send(outcome));
    }

    fn say_again(&mut self, name: &str, before: &PersistedVolume) {
        let Some(path) = &self.config.set_file else { return };
        let said = SetFile::read(path).and_then(|mut file| {
            file.kept_of(name).clone_from(before);
            file.write()?;
            Config::load(&self.line)
        });
        match said {
            Ok(config) => self.take_over(config),
            Err(failure) => tracing::error!(event = "set-not-taken-back", "{failure}"),
        }
    }

    /// Plans the file's statement that the volume is not served. Returns the file and what it said
    /// before, or `None` if nothing is kept.
    pub fn keep_removed_flash(
        &self,
        entry: &VolumeEntry,
    ) -> Result<Option<(SetFile, PersistedVolume)>, Failure> {
        let (Some(path), Some(name), Some(uuid)) = (&self.config.set_file, &entry.name, entry.uuid) else {
            return Ok(None);
        };
        let mut file = SetFile::read(path)?;
        let is_configured = self.config.flash.iter().any(|flash| flash.name == *name);
        let kept = file.kept_of(name);
        let before = kept.clone();
        kept.served = Some(false);
        if !is_configured {
            kept.flash = Some(format!("UUID={uuid}"));
        }
        Ok(Some((file, before)))
    }
}
