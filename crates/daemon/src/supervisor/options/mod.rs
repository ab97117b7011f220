//! Options of volumes and caches: passes requested values to the engines, and shows them for `get`.

pub mod change;
pub mod config_diff;
pub mod owner;
pub mod pending_settings;
pub mod reload;
pub mod runtime;
pub mod writeback_rate;

use crate::control_server::OptionsHandler;
use crate::engine_thread::{Engine, ModePersistence};
use crate::supervisor::caches::CacheEvent;
use crate::supervisor::table::{Table, VolumeEntry, VolumeState};
use crate::supervisor::volumes::VolumeEvent;
use crate::supervisor::{Event, Shared, Supervisor};
use bcached_config::Config;
use bcached_config::options::layers::OptionLayers;
use bcached_config::options::quiet_hours;
use bcached_config::options::value::Value;
use bcached_config::options::{OptionDefinition, OptionStorage, shown};
use bcached_control::failure::{Failure, Kind};
use bcached_control::names::{self, KnownNames, TypedName};
use bcached_control::options::{OptionEntry, Options};
use bcached_engine::{Error, RateInfo, VolumeInfo, VolumeOptions};
use bcached_format::{CacheMode, Label};
use owner::{OptionsOwner, OwnerView};
use pending_settings::RequestId;
use std::sync::{Arc, Mutex, PoisonError};

/// Called once a change is in force, or has failed; possibly on an engine's thread.
pub struct Completion(Box<dyn FnOnce(Result<(), Failure>) + Send>);

impl Completion {
    pub fn new(then: impl FnOnce(Result<(), Failure>) + Send + 'static) -> Self {
        Self(Box::new(then))
    }

    /// Reports the outcome.
    pub fn call(self, outcome: Result<(), Failure>) {
        self.0(outcome);
    }

    /// For a change that no client waits for.
    pub fn nobody() -> Self {
        Self::new(drop)
    }
}

impl Supervisor {
    /// Gives the engines the options that have changed, by a request or because quiet hours begin
    /// or end.
    pub fn apply_options(&self) {
        let mut shared = self.shared();
        let table = &mut shared.table;
        for entry in &mut table.caches {
            let Some(engine) = entry.engine() else { continue };
            if entry.options != entry.told {
                entry.told = entry.options.clone();
                let layers = entry.options.clone();
                engine.change_cache(move |options| layers.apply_to_cache(options));
            }
        }
        for entry in &mut table.volumes {
            let Some((engine, info)) = served_by(entry, &table.caches) else { continue };
            let wanted = entry.options.volume_options(quiet_hours::local_minute);
            if wanted == entry.told {
                continue;
            }
            let name = entry.display_name().to_owned();
            if wanted.writeback_quiet != entry.told.writeback_quiet {
                let now = if wanted.writeback_quiet { "begin" } else { "are over" };
                tracing::info!(event = "quiet-hours", "{name}: quiet hours {now}");
            }
            let id = info.id;
            entry.told = wanted;
            let answer = move |result: Result<(), Error>| {
                if let Err(error) = result {
                    tracing::error!(
                        event = "options-failed",
                        "{name}: its options could not be changed: {error}"
                    );
                }
            };
            engine.set_options(id, wanted, Box::new(answer));
        }
    }

    /// Writes the configured settings to the superblock of an open cache, unless they are there.
    pub fn apply_settings(&self, index: usize, done: Completion) {
        let mut shared = self.shared();
        let Some(entry) = shared.table.caches.get_mut(index) else { return done.0(Ok(())) };
        let (Some(engine), Some(before)) = (entry.engine(), entry.kept) else {
            return done.0(Ok(()));
        };
        let wanted = entry.options.kept_settings();
        let after = wanted.or(before);
        if after == before {
            return done.0(Ok(()));
        }
        let name = entry.display_name().to_owned();
        let (sender, request) = (self.sender.clone(), RequestId::default());
        entry.pending_settings.add(&request, before);
        entry.kept = Some(after);
        engine.keep_settings(
            wanted,
            Box::new(move |result: Result<(), Error>| {
                let _stopping =
                    sender.send(Event::Cache(index, CacheEvent::SettingsSettled(request, result.is_err())));
                let kept = result.map_err(|error| {
                    tracing::error!(
                        event = "settings-failed",
                        "cache {name}: its superblock could not be written: {error}"
                    );
                    Failure::new(Kind::Io, format!("the superblock of cache {name} could not be written"))
                        .why(error.to_string())
                        .next("the new values are kept, and tried again at the next reload or start")
                });
                done.0(kept);
            }),
        );
    }

    /// Settles a pending write of the superblock. After a refusal the next reload may try again.
    pub fn settings_settled(&self, index: usize, request: &RequestId, is_refused: bool) {
        if let Some(entry) = self.shared().table.caches.get_mut(index)
            && let Some(before) = entry.pending_settings.settle(request, is_refused)
        {
            entry.kept = Some(before);
        }
    }

    /// Gives a served volume its requested cache mode, unless it has it. Only a mode from the files
    /// is written to the superblock; a runtime value must leave nothing there.
    pub fn apply_cache_mode(&self, index: usize, done: Completion) {
        let mut shared = self.shared();
        let table = &mut shared.table;
        let Some(entry) = table.volumes.get_mut(index) else { return done.0(Ok(())) };
        let keep = if entry.options.runtime.contains_key("cache_mode") {
            ModePersistence::Temporary
        } else {
            ModePersistence::InSuperblock
        };
        let kept = entry.kept_mode;
        let (wanted, name) = (entry.options.cache_mode().or(kept), entry.display_name().to_owned());
        let Some((engine, _)) = served_by(entry, &table.caches) else { return done.0(Ok(())) };
        let (VolumeState::Served(info), Some(mode)) = (&mut entry.state, wanted) else {
            return done.0(Ok(()));
        };
        // A mode that is in the superblock already is not written again: a cache that has failed
        // could not do it.
        let keep = if kept == Some(mode) { ModePersistence::Temporary } else { keep };
        let is_kept = keep == ModePersistence::Temporary;
        if info.flash_only || (info.mode == mode && is_kept) {
            return done.0(Ok(()));
        }
        let (id, sender, request) = (info.id, self.sender.clone(), RequestId::default());
        entry.pending_modes.in_force.add(&request, info.mode);
        info.mode = mode;
        if keep == ModePersistence::InSuperblock {
            entry.pending_modes.kept.add(&request, kept);
            entry.kept_mode = Some(mode);
        }
        let answer = move |result: Result<(), Error>| {
            let _stopping =
                sender.send(Event::Volume(index, VolumeEvent::ModeSettled(request, result.is_err())));
            match result {
                Ok(()) => {
                    tracing::info!(event = "cache-mode-set", "{name}: its cache mode is {} now", mode.name());
                    done.0(Ok(()));
                }
                Err(error) => {
                    tracing::error!(
                        event = "cache-mode-failed",
                        "{name}: its cache mode could not be changed: {error}"
                    );
                    let what = format!("the cache mode of {name} could not be changed");
                    done.0(Err(Failure::new(Kind::Io, what)
                        .why(error.to_string())
                        .next("the new values are kept, and tried again at the next reload or start")));
                }
            }
        };
        engine.set_cache_mode(id, mode, keep, Box::new(answer));
    }

    /// Settles a pending cache mode. After a refusal the next reload may try again.
    pub fn mode_settled(&self, index: usize, request: &RequestId, is_refused: bool) {
        let mut shared = self.shared();
        let Some(entry) = shared.table.volumes.get_mut(index) else { return };
        if let Some(before) = entry.pending_modes.kept.settle(request, is_refused) {
            entry.kept_mode = before;
        }
        let in_force = entry.pending_modes.in_force.settle(request, is_refused);
        if let (VolumeState::Served(info), Some(before)) = (&mut entry.state, in_force) {
            info.mode = before;
        }
    }
}

/// The engine of a served volume.
pub fn served_by(
    entry: &VolumeEntry,
    caches: &[crate::supervisor::table::CacheEntry],
) -> Option<(Engine, Box<VolumeInfo>)> {
    let VolumeState::Served(info) = &entry.state else { return None };
    Some((caches.get(entry.cache?)?.engine()?, info.clone()))
}

/// Checks that runtime values are consistent with `config`.
///
/// # Errors
/// They are not, for at least one volume.
pub fn check_with(config: &Config, table: &Table) -> Result<(), Failure> {
    for volume in &config.volumes {
        let entry = table.volumes.iter().find(|entry| entry.name == volume.name);
        let runtime = entry.map(|entry| entry.options.runtime.clone()).unwrap_or_default();
        let layers = OptionLayers { configured: volume.options.clone(), runtime };
        layers.check().map_err(|wrong| {
            let name = volume.name.as_deref().unwrap_or(&volume.backing);
            Failure::new(Kind::Config, format!("the options of {name} contradict each other"))
                .why(wrong.what)
                .next(format!("one was set with --runtime: `bcached get {name}` shows which"))
        })?;
    }
    Ok(())
}

impl Table {
    /// The names by which each volume can be called, in the order of the table.
    pub fn known(&self) -> Vec<KnownNames> {
        let known = |entry: &VolumeEntry| {
            if entry.is_removed() {
                return KnownNames { former: Some(entry.display_name().to_owned()), ..KnownNames::default() };
            }
            let info = match &entry.state {
                VolumeState::Served(info) => Some(info),
                _ => None,
            };
            let label = info.map(|info| info.label).or(entry.label).map(|label| label.to_string());
            KnownNames {
                name: entry.display_name().to_owned(),
                kernel_name: Some(names::in_control_files(entry.number)),
                label: label.filter(|label| !label.is_empty()),
                uuid: info.map(|info| info.uuid).or(entry.uuid).map(|uuid| uuid.to_string()),
                path: entry.backing.clone(),
                opened: entry.opened,
                former: None,
            }
        };
        self.volumes.iter().map(known).collect()
    }
}

/// Finds the volume called `typed`. Reads files, so it must not run on the loop.
pub fn resolve(shared: &Mutex<Shared>, typed: &str) -> Result<usize, Failure> {
    resolve_called(shared, TypedName::by_owner(typed))
}

/// The same; `None` if a volume of that name is configured and not to be served, or was removed.
pub fn resolve_or_gone(shared: &Mutex<Shared>, typed: &str) -> Result<Option<usize>, Failure> {
    let is_gone = {
        let shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
        let mut entries = shared.table.volumes.iter().filter(|entry| entry.display_name() == typed);
        let (is_there, was_removed) =
            (entries.clone().any(|entry| !entry.is_removed()), entries.next().is_some());
        !is_there && (was_removed || shared.config.has_unserved(typed))
    };
    if is_gone { Ok(None) } else { resolve(shared, typed).map(Some) }
}

/// The same, where `called` also says whether files may be read to resolve the name.
pub fn resolve_called(shared: &Mutex<Shared>, called: TypedName<'_>) -> Result<usize, Failure> {
    let typed = called.typed;
    let known = {
        let shared = shared.lock().unwrap_or_else(PoisonError::into_inner);
        // A name of the configuration is never the label of another volume.
        let unserved = shared
            .config
            .unserved()
            .map(|name| KnownNames { former: Some(name.to_owned()), ..KnownNames::default() });
        let mut known = shared.table.known();
        known.extend(unserved);
        known
    };
    names::resolve_called(called, &known).map_err(|meant| {
        let name = |known: &'_ KnownNames| known.name.clone();
        let meant: Vec<_> = meant.into_iter().map(|index| name(&known[index])).collect();
        if meant.is_empty() && known.iter().any(|known| known.former.as_deref() == Some(typed)) {
            return Failure::new(Kind::UnknownName, format!("`{typed}` is not served"))
                .why("it was removed, or is configured with `served = false`")
                .next(format!("`bcached add {typed}` serves it again"));
        }
        let all = known.iter().map(|known| known.name.as_str()).filter(|name| !name.is_empty());
        names::refusal(typed, meant.iter().map(String::as_str), all)
    })
}

/// The handler for `get` on the control thread. It holds no lock while it waits for an engine.
pub fn options_of(shared: Arc<Mutex<Shared>>) -> OptionsHandler {
    Box::new(move |scope, called| {
        let owner = OptionsOwner::find(&shared, scope, called)?;
        let (view, engine) = {
            let table = &shared.lock().unwrap_or_else(PoisonError::into_inner).table;
            let Some(view) = owner.view(table) else {
                return Err(Failure::new(Kind::Io, "the daemon is stopping"));
            };
            let engine = view.engine(table);
            (view, engine)
        };
        let owner = shown::named(scope, view.display_name());
        let entry = match &view {
            OwnerView::Volume(entry) => entry,
            OwnerView::Cache(cache) => {
                let show = |option| owner::of_cache(cache, option);
                return Ok(Options { owner, options: scope.options().iter().map(show).collect() });
            }
        };
        let now = engine.and_then(|engine| engine.status()).and_then(|status| {
            let VolumeState::Served(info) = &entry.state else { return None };
            status.volumes.into_iter().find(|now| now.id == info.id)
        });
        let facts = OptionSources::of(entry, now.as_ref());
        let has = |option: &&OptionDefinition| !entry.is_flash_only() || option.is_of_flash();
        let options = scope.options().iter().filter(has).map(|option| facts.show(option)).collect();
        Ok(Options { owner, options })
    })
}

/// Everything that decides which values are in force.
pub struct OptionSources<'a> {
    pub layers: &'a OptionLayers,
    /// The options of the engine.
    options: VolumeOptions,
    /// The current write-back rate, if known.
    pace: Option<RateInfo>,
    /// The mode in force, or the one that the volume will be served with, if known.
    mode: Option<CacheMode>,
    label: Option<String>,
}

impl<'a> OptionSources<'a> {
    /// The facts of a volume; `now` is the engine's current report of it, if there is one.
    pub fn of(entry: &'a VolumeEntry, now: Option<&VolumeInfo>) -> Self {
        let served = match &entry.state {
            VolumeState::Served(info) => Some(&**info),
            _ => None,
        };
        // Without a current report: the one from when the volume came is outdated, but the engine
        // has been given all requested options since.
        let options = now.map_or_else(|| entry.options.volume_options(|| 0), |now| now.options);
        let pace = now.filter(|now| now.attached && !now.flash_only).map(|now| now.writeback_rate);
        let now = now.or(served);
        // The mode that a volume will have that is not served.
        let coming = || entry.options.cache_mode().or(entry.kept_mode);
        Self {
            layers: &entry.options,
            options,
            pace,
            mode: now.map(|now| now.mode).or_else(coming),
            label: now.map(|now| now.label).or(entry.label).map(|label| label.to_string()),
        }
    }

    /// The same if `layers` were in force.
    pub fn with<'b>(
        &self,
        layers: &'b OptionLayers,
        kept: Option<CacheMode>,
        label: Option<Label>,
    ) -> OptionSources<'b> {
        OptionSources {
            layers,
            options: layers.volume_options(|| 0),
            pace: self.pace,
            mode: layers.cache_mode().or(kept),
            label: label.map(|label| label.to_string()).or_else(|| self.label.clone()),
        }
    }

    /// The option as it is.
    pub fn show(&self, option: &'static OptionDefinition) -> OptionEntry {
        let said = self.layers.said(option.name);
        let value = match option.place {
            OptionStorage::Engine { read, .. } => Some(read(&self.options)),
            OptionStorage::WritebackRate => match self.pace {
                Some(pace) => Some(pace.rate.map_or(Value::None, Value::Rate)),
                None => option.default(),
            },
            // No option of a volume is stored there.
            OptionStorage::CacheEngine { .. } | OptionStorage::CacheSuperblock { .. } => None,
            OptionStorage::QuietHours => said.map(|(value, _)| value.clone()).or(option.default()),
            OptionStorage::Label => self.label.clone().map(Value::Text),
            OptionStorage::CacheMode => match self.mode {
                Some(mode) => Some(Value::Word(mode.name())),
                None => said.map(|(value, _)| value.clone()),
            },
        };
        let mut shown = shown::shown(option, value.as_ref());
        let is_kept = matches!(option.place, OptionStorage::Label | OptionStorage::CacheMode);
        // A requested value that is not in force is not the origin of the one shown.
        let said = said.filter(|(asked, _)| value.as_ref() == Some(asked));
        if said.is_none() && is_kept {
            "superblock".clone_into(&mut shown.origin);
        }
        shown::say_where_from(&mut shown, said);
        shown
    }
}
