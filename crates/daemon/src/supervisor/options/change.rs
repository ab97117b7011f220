//! `bcached set` and `unset`. The steps of a change, in order:
//!
//! 1. Everything is checked. A refused change has changed nothing.
//! 2. A device or an engine does what only it can accept or refuse: a label or a rate.
//! 3. The other values are written to the files, and put into force.
//!
//! The control thread asks and waits; the loop acts, as it does on everything else. A value that is
//! to be stored is first read back as the next start would read it, from the current files: what
//! would stop that start is refused.

use crate::control_server::ChangeHandler;
use crate::supervisor::jobs;
use crate::supervisor::options::owner::{LABEL, OptionsOwner, OwnerView};
use crate::supervisor::options::writeback_rate;
use crate::supervisor::options::{Completion, served_by};
use crate::supervisor::table::{VolumeEntry, VolumeState};
use crate::supervisor::volumes::label;
use crate::supervisor::{Event, Shared, Supervisor};
use bcached_config::options::layers::{OptionConflict, OptionLayers};
use bcached_config::options::value::{Value, ValueError};
use bcached_config::options::{self, OptionDefinition, OptionStorage, Scope, shown};
use bcached_config::{Config, SetFile};
use bcached_control::failure::{Failure, Kind};
use bcached_control::names::TypedName;
use bcached_control::options::{ChangedOption, OptionChange, OptionChangeReport};
use bcached_engine::{Error, Status, VolumeInfo};
use bcached_env::IoErrorKind;
use bcached_format::Label;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a client waits for a change: less than it waits for an answer. The loop may wait for a
/// device, and a cache mode is written to one.
const LIMIT: Duration = Duration::from_secs(8);

/// A requested change.
pub struct ChangeRequest {
    owner: OptionsOwner,
    change: OptionChange,
    /// The user of the requesting process.
    uid: Option<u32>,
    answer: Sender<Result<OptionChangeReport, Failure>>,
}

impl ChangeRequest {
    fn user(&self) -> String {
        jobs::user(self.uid)
    }

    fn refuse(self, text: &str, failure: Failure) {
        tracing::info!(event = "options-refused", uid = self.user(), "{text}: {failure}");
        let _gone = self.answer.send(Err(failure));
    }

    /// Answers a dry run: nothing was changed.
    fn answer_plan(self, text: &str, changed: OptionChangeReport) {
        tracing::info!(event = "options-planned", uid = self.user(), "{text}");
        let _gone = self.answer.send(Ok(changed));
    }

    fn answer(self, text: &str, changed: OptionChangeReport) {
        tracing::info!(event = "options-changed", uid = self.user(), "{text}");
        let _gone = self.answer.send(Ok(changed));
    }
}

/// What an engine has to do before anything else: it may still fail, and then nothing is to be
/// changed.
#[derive(Clone, Copy)]
enum FirstStep {
    /// The label to be written to the device.
    Label(Label),
    /// The write-back rate to be set at once, in sectors a second.
    Rate(u64),
}

impl FirstStep {
    /// The option that the step sets.
    const fn option(self) -> &'static str {
        match self {
            Self::Label(_) => LABEL,
            Self::Rate(_) => writeback_rate::NAME,
        }
    }

    /// The failure of the rest of a change whose first step is done.
    fn alone(self, failure: Failure) -> Failure {
        let option = self.option();
        let what = match &*failure.what {
            UNCHANGED => format!("only {option} was changed"),
            what => format!("only {option} was changed: {what}"),
        };
        let next = failure.next.map(|next| next.replace(UNCHANGED, "nothing else was changed").into());
        Failure { what: what.into(), next, ..failure }
    }
}

/// What a failure says of a change that was not begun.
const UNCHANGED: &str = "nothing was changed";

/// The engine's answer to the first step.
pub struct FirstStepOutcome {
    asked: ChangeRequest,
    text: String,
    first: FirstStep,
    /// The answer to the whole change.
    changed: OptionChangeReport,
    outcome: Result<(), Error>,
}

/// The option that a volume's superblock stores.
const CACHE_MODE: &str = "cache_mode";

/// The handler for the control thread.
pub fn ask(shared: Arc<Mutex<Shared>>, events: Sender<Event>) -> ChangeHandler {
    Box::new(move |scope, typed, change, uid| {
        let owner =
            OptionsOwner::find(&shared, scope, TypedName::by_owner(typed)).inspect_err(|failure| {
                // The client tries a name as a volume first, and then as a cache: no refusal if it
                // is a cache.
                let is_cache =
                    || OptionsOwner::find(&shared, Scope::Cache, TypedName::by_owner(typed)).is_ok();
                if scope == Scope::Volume && failure.kind == Kind::UnknownName && is_cache() {
                    return;
                }
                let text = change.text(typed);
                tracing::info!(event = "options-refused", uid = jobs::user(uid), "{text}: {failure}");
            })?;
        let (answer, answered) = mpsc::channel();
        let _refused_below =
            events.send(Event::Request(crate::supervisor::ClientRequest::Change(Box::new(ChangeRequest {
                owner,
                change,
                uid,
                answer,
            }))));
        match answered.recv_timeout(LIMIT) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout) => {
                let what = format!("the change has not been completed within {} s", LIMIT.as_secs());
                Err(crate::supervisor::late(what).next("it continues: `bcached get` shows the result"))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(Failure::new(Kind::Io, "nothing or only a part was changed")
                    .why("the daemon is stopping, or the engine of the cache has ended")
                    .next("`bcached get` shows what is in force"))
            }
        }
    })
}

/// A checked change.
struct ChangePlan {
    layers: OptionLayers,
    /// The file to be written, if its contents change.
    file: Option<SetFile>,
    first: Option<FirstStep>,
    /// An option is named that a superblock stores.
    is_written: bool,
    changed: OptionChangeReport,
}

/// The options that a change names, parsed.
struct ParsedChange {
    set: BTreeMap<&'static str, Value>,
    /// Stored by the device.
    label: Option<Label>,
    /// In force for a moment only.
    rate: Option<u64>,
    /// The engine's report of the volume, if it was asked for one.
    now: Option<VolumeInfo>,
    unset: Vec<&'static str>,
    notes: Vec<String>,
}

impl ParsedChange {
    fn names(&self, option: &&'static str) -> bool {
        *option == LABEL || self.set.contains_key(option) || self.unset.contains(option)
    }

    /// Checks that the new values fit the others in force, before reporting which file is to store
    /// them.
    fn check_together(&self, layers: &OptionLayers) -> Result<(), Failure> {
        if !self.unset.is_empty() {
            // The values of unset options come from the files, which are not read yet.
            return Ok(());
        }
        let mut together = layers.clone();
        together.runtime.extend(self.set.clone());
        together.check().map_err(not_together)
    }

    fn is_written(&self, scope: Scope) -> bool {
        let mut named = self.set.keys().chain(&self.unset).filter_map(|name| scope.find(name));
        named.any(|option| {
            matches!(option.place, OptionStorage::CacheSuperblock { .. } | OptionStorage::CacheMode)
        })
    }
}

impl Supervisor {
    /// Carries out a change, and answers when it is done.
    pub fn change(&self, asked: ChangeRequest) {
        let Some(view) = asked.owner.view(&self.shared().table) else { return };
        let text = asked.change.text(view.display_name());
        match self.plan(&view, &asked.change) {
            Err(failure) => asked.refuse(&text, failure),
            Ok(plan) if asked.change.dry_run => asked.answer_plan(&text, plan.changed),
            Ok(ChangePlan { first: Some(first), changed, .. }) => self.go_ahead(asked, text, first, changed),
            Ok(plan) => self.take_up(asked, &text, plan),
        }
    }

    /// Has the engine do the first step.
    fn go_ahead(&self, asked: ChangeRequest, text: String, first: FirstStep, changed: OptionChangeReport) {
        let shared = self.shared();
        let entry = match asked.owner {
            OptionsOwner::Volume(index) => shared.table.volumes.get(index),
            OptionsOwner::Cache(_) => None,
        };
        let Some((engine, info)) = entry.and_then(|entry| served_by(entry, &shared.table.caches)) else {
            return;
        };
        let sender = self.sender.clone();
        let answer = Box::new(move |outcome| {
            let step = FirstStepOutcome { asked, text, first, changed, outcome };
            drop(sender.send(Event::FirstStepDone(Box::new(step))));
        });
        match first {
            FirstStep::Label(label) => engine.set_label(info.id, label, answer),
            FirstStep::Rate(rate) => engine.set_writeback_rate(info.id, rate, answer),
        }
    }

    /// Handles the end of the first step. If it failed, nothing is changed. Otherwise the rest is
    /// checked once more: others may have changed something meanwhile.
    pub fn first_step_done(&self, step: FirstStepOutcome) {
        let FirstStepOutcome { mut asked, text, first, changed, outcome } = step;
        let OptionsOwner::Volume(index) = asked.owner else { return };
        let done = match first {
            FirstStep::Label(label) => self.labelled(index, label, outcome),
            FirstStep::Rate(_) => self.paced(index, outcome),
        };
        if let Err(failure) = done {
            return asked.refuse(&text, failure);
        }
        asked.change.set.remove(first.option());
        if asked.change.set.is_empty() && asked.change.unset.is_empty() {
            return asked.answer(&text, changed);
        }
        let Some(view) = asked.owner.view(&self.shared().table) else { return };
        match self.plan(&view, &asked.change) {
            Err(failure) => asked.refuse(&text, first.alone(failure)),
            Ok(plan) => self.take_up(asked, &text, ChangePlan { first: Some(first), changed, ..plan }),
        }
    }

    /// Stores the planned values, and puts them into force. The first step, if any, is done.
    fn take_up(&self, asked: ChangeRequest, text: &str, plan: ChangePlan) {
        let ChangePlan { layers, file, first, is_written, changed } = plan;
        if let Err(failure) = file.as_ref().map_or(Ok(()), SetFile::write) {
            let failure = or_for_now(failure);
            let failure = match first {
                Some(first) => first.alone(failure),
                None => failure,
            };
            return asked.refuse(text, failure);
        }
        let owner = asked.owner;
        owner.take(&mut self.shared().table, layers);
        tracing::info!(event = "options-changed", uid = asked.user(), "{text}");
        let then = Completion::new(move |done| drop(asked.answer.send(done.map(|()| changed))));
        // Before the answer: a client that looks after it has to find the values in force.
        self.apply_options();
        // Values of earlier requests that are not in the superblock yet are retried. A client that
        // sets something else does not wait for that.
        let then = if is_written {
            then
        } else {
            then.call(Ok(()));
            Completion::nobody()
        };
        match owner {
            OptionsOwner::Volume(index) => self.apply_cache_mode(index, then),
            OptionsOwner::Cache(index) => self.apply_settings(index, then),
        }
    }

    fn plan(&self, view: &OwnerView, change: &OptionChange) -> Result<ChangePlan, Failure> {
        let mut wanted = understand(change, view)?;
        let label = match (view, wanted.label) {
            (OwnerView::Volume(entry), Some(label)) => {
                Some(self.judge_label(entry, label, &mut wanted.notes)?)
            }
            _ => None,
        };
        if wanted.rate.is_some() {
            wanted.now = self.check_paced(view)?;
        }
        let is_kept = self.keeps_of(view);
        if !wanted.set.is_empty() && !change.runtime {
            is_kept.as_ref().map_err(Failure::clone)?;
        }
        let mut layers = view.layers().clone();
        for name in wanted.set.keys().chain(&wanted.unset) {
            layers.runtime.remove(name);
        }
        let mut file = None;
        if change.runtime {
            layers.runtime.extend(wanted.set.clone());
        }
        wanted.check_together(&layers)?;
        if let (Ok((path, name)), false) = (is_kept, change.runtime && wanted.unset.is_empty()) {
            let mut newest = SetFile::read(path)?;
            let kept = newest.of(view.scope(), name);
            if !change.runtime {
                kept.extend(wanted.set.clone());
            }
            kept.retain(|option, _| !wanted.unset.contains(option));
            self.reread(&mut layers, (view.scope(), name), &newest, &wanted)?;
            file = newest.is_changed().then_some(newest);
        }
        layers.check().map_err(not_together)?;
        let kept = view.would_write(&layers, label.flatten());
        let mode = wanted.set.contains_key(CACHE_MODE) && !change.runtime;
        let mut written =
            kept.into_iter().filter(|option| wanted.names(option)).chain(mode.then_some(CACHE_MODE));
        if let Some(option) = written.next() {
            self.check_writes(view, option)?;
        }
        if let Some(file) = &file {
            file.check_writable().map_err(or_for_now)?;
        }
        let changed = describe(view, &layers, &wanted, change);
        let kept_in = self.config.set_file.as_ref().filter(|_| file.is_some());
        let kept_in = kept_in.map(|path| path.display().to_string());
        let first = label.flatten().map(FirstStep::Label).or(wanted.rate.map(FirstStep::Rate));
        let is_written = wanted.is_written(view.scope());
        Ok(ChangePlan { layers, file, first, is_written, changed: OptionChangeReport { kept_in, ..changed } })
    }

    /// Checks that a superblock can be written for the option: the set has not failed, and the
    /// device is not gone.
    fn check_writes(&self, view: &OwnerView, option: &'static str) -> Result<(), Failure> {
        let engine = view.engine(&self.shared().table);
        let Some(status) = engine.and_then(|engine| engine.status()) else { return Ok(()) };
        // With a failed set, the cache mode is written when the set works again.
        let failed = status.failed.as_ref().filter(|_| option != CACHE_MODE);
        let (why, when) = if let Some(why) = failed {
            (format!("the cache has stopped writing ({why})"), "the cache works again")
        } else if let Some(gone) = gone_from_under(view, &status) {
            (format!("the backing device is gone ({gone})"), "it is back")
        } else {
            return Ok(());
        };
        let next = match option {
            LABEL => format!("set it when {when}"),
            _ => format!("set it when {when}; with --runtime it holds until the daemon stops"),
        };
        Err(Failure::new(Kind::Io, format!("cannot set {option} of {}", view.display_name()))
            .why(format!("it is written to a device, and {why}"))
            .next(next)
            .option(option))
    }

    /// The file and the name under which values of this volume can be stored.
    pub fn keeps<'a>(&'a self, entry: &'a VolumeEntry) -> Result<(&'a Path, &'a str), Failure> {
        self.keeps_for(Scope::Volume, entry.name.as_ref(), entry.display_name())
    }

    fn keeps_of<'a>(&'a self, view: &'a OwnerView) -> Result<(&'a Path, &'a str), Failure> {
        self.keeps_for(view.scope(), view.name(), view.display_name()).map_err(|failure| match view {
            OwnerView::Volume(entry) if entry.is_flash_only() => {
                failure.why("the options of a flash-only volume are not kept")
            }
            _ => failure,
        })
    }

    fn keeps_for<'a>(
        &'a self,
        scope: Scope,
        name: Option<&'a String>,
        display_name: &str,
    ) -> Result<(&'a Path, &'a str), Failure> {
        let refused = |why: &str| {
            Failure::new(Kind::Usage, format!("cannot keep options of {display_name}"))
                .why(why)
                .next("add --runtime: the change then holds until the daemon stops")
                .option("--runtime")
        };
        let Some(path) = &self.config.set_file else {
            return Err(refused("the daemon serves devices of its command line, without a configuration"));
        };
        let is_configured = |name: &&String| match scope {
            Scope::Volume => self.config.volumes.iter().any(|volume| volume.name.as_ref() == Some(name)),
            Scope::Cache => self.config.caches.iter().any(|cache| cache.name.as_ref() == Some(name)),
        };
        match name.filter(is_configured) {
            Some(name) => Ok((path, name)),
            None => Err(refused("it has no section in the configuration")),
        }
    }

    /// Updates `layers` with what the files will say of the named options once `newest` is among
    /// them.
    fn reread(
        &self,
        layers: &mut OptionLayers,
        (scope, name): (Scope, &str),
        newest: &SetFile,
        wanted: &ParsedChange,
    ) -> Result<(), Failure> {
        let config = Config::load_with(&self.line, Some(&newest.text()))?;
        let volumes = config.volumes.into_iter().map(|volume| (Scope::Volume, volume.name, volume.options));
        let caches = config.caches.into_iter().map(|cache| (Scope::Cache, cache.name, cache.options));
        let it = volumes.chain(caches).find(|(of, is, _)| *of == scope && is.as_deref() == Some(name));
        let mut said = it.map(|(_, _, options)| options).unwrap_or_default();
        for option in wanted.set.keys().chain(&wanted.unset) {
            match said.remove(option) {
                Some(setting) => drop(layers.configured.insert(option, setting)),
                None => drop(layers.configured.remove(option)),
            }
        }
        Ok(())
    }
}

/// How the volume's backing device has gone, if that is known.
fn gone_from_under(view: &OwnerView, status: &Status) -> Option<IoErrorKind> {
    let OwnerView::Volume(entry) = view else { return None };
    let VolumeState::Served(info) = &entry.state else { return None };
    let now = status.volumes.iter().find(|now| now.id == info.id)?;
    let last = now.backing_health?.last_error?;
    last.kind.is_final().then_some(last.kind)
}

/// Parses every option and every value that `change` names.
fn understand(change: &OptionChange, view: &OwnerView) -> Result<ParsedChange, Failure> {
    let mut wanted = ParsedChange {
        set: BTreeMap::new(),
        label: None,
        rate: None,
        now: None,
        unset: Vec::new(),
        notes: Vec::new(),
    };
    if change.set.is_empty() && change.unset.is_empty() {
        return Err(Failure::new(Kind::Usage, "no option is named")
            .next(format!("`bcached get {}` lists them", view.display_name())));
    }
    for (name, typed) in &change.set {
        let option = changeable(name, view)?;
        let refused =
            |why| Failure::new(Kind::Usage, format!("cannot set {name}")).why(why).option(name.as_str());
        let value = match option.read(&typed.0) {
            Ok(value) => value,
            Err(ValueError::OutOfRange(why, end)) if option.is_of_kernel => {
                wanted.notes.push(format!("{name}: {why}, which is used"));
                end
            }
            Err(ValueError::OutOfRange(why, _) | ValueError::NotUnderstood(why)) => return Err(refused(why)),
        };
        if matches!(option.place, OptionStorage::Label) {
            wanted.label = Some(label::read(&typed.0, change.runtime)?);
            continue;
        }
        if matches!(option.place, OptionStorage::WritebackRate) {
            wanted.rate = Some(writeback_rate::read(option, &value, change.runtime)?);
            continue;
        }
        wanted.set.insert(option.name, value);
    }
    for name in &change.unset {
        let option = changeable(name, view)?;
        if matches!(option.place, OptionStorage::Label) {
            return Err(Failure::new(Kind::Usage, "cannot unset label")
                .why("only the device keeps it")
                .next(format!("`bcached set {} label=` removes it", view.display_name()))
                .option(name.as_str()));
        }
        if matches!(option.place, OptionStorage::WritebackRate) {
            return Err(writeback_rate::not_said());
        }
        if wanted.set.contains_key(option.name) {
            return Err(Failure::new(Kind::Usage, format!("{name} is both set and unset"))
                .next("name it once")
                .option(name.as_str()));
        }
        if !wanted.unset.contains(&option.name) {
            wanted.unset.push(option.name);
        }
    }
    Ok(wanted)
}

/// The option called `name`, if it can be changed here.
fn changeable(name: &str, view: &OwnerView) -> Result<&'static OptionDefinition, Failure> {
    let scope = view.scope();
    let Some(option) = scope.find(name) else { return Err(options::unknown(scope, name)) };
    let is_flash_only = matches!(view, OwnerView::Volume(entry) if entry.is_flash_only());
    if is_flash_only && !option.is_of_flash() {
        return Err(Failure::new(Kind::Usage, format!("{} has no {name}", view.display_name()))
            .why("it is a flash-only volume")
            .option(name));
    }
    Ok(option)
}

/// Describes each named option, as it is and as it will be.
fn describe(
    view: &OwnerView,
    layers: &OptionLayers,
    wanted: &ParsedChange,
    change: &OptionChange,
) -> OptionChangeReport {
    let scope = view.scope();
    let label = wanted.label.map(|_| &LABEL);
    let named = wanted.set.keys().chain(&wanted.unset).chain(label).filter_map(|name| scope.find(name));
    let changes = named.map(|option| {
        let (was, is) = view.before_and_after(layers, wanted.label, option);
        // The line may differ because one above it was added or removed.
        let already = (&was.value, &was.origin, &was.file) == (&is.value, &is.origin, &is.file);
        ChangedOption { already, before: was.value, after: is }
    });
    let rate = wanted.rate.and_then(|rate| writeback_rate::describe(view, wanted.now.as_ref(), rate));
    OptionChangeReport {
        owner: shown::named(scope, view.display_name()),
        dry_run: change.dry_run,
        kept_in: None,
        changes: changes.chain(rate).collect(),
        notes: wanted.notes.clone(),
    }
}

/// The failure for values that contradict each other.
fn not_together(wrong: OptionConflict) -> Failure {
    let [one, other] = wrong.options;
    Failure::new(Kind::Usage, UNCHANGED)
        .why(wrong.what)
        .next(format!("set them together: `bcached set VOLUME {one}=.. {other}=..`"))
        .option(one)
}

/// Adds the hint for values that cannot be stored.
fn or_for_now(failure: Failure) -> Failure {
    failure.next(format!("{UNCHANGED}; `--runtime` changes it until the daemon stops"))
}
