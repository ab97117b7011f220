//! The rate of write-back that somebody says: the engine's controller has the next word, so it is kept nowhere.

use super::Supervisor;
use super::options::served_by;
use super::owner::{Owner, View};
use super::table::VolumeState;
use crate::control::options::{Changing, Shown};
use crate::failure::{Failure, Kind};
use crate::options::layers::{Layers, Source};
use crate::options::value::Value;
use crate::options::{Definition, Scope};

/// The option.
const NAME: &str = "writeback_rate";

/// The rate that is typed so, in sectors a second.
pub fn read(option: &Definition, value: &Value, runtime: bool) -> Result<u64, Failure> {
    let Value::Rate(rate) = value else { unreachable!("it is the kind of {}", option.name) };
    if runtime {
        return Ok(*rate);
    }
    Err(Failure::new(Kind::Usage, format!("cannot set {NAME}"))
        .why("it follows from what is dirty, every writeback_rate_update_seconds")
        .next("add --runtime: it holds until then; writeback_rate_minimum and writeback_rate_maximum stay")
        .option(NAME))
}

/// The refusal to take back what is said.
pub fn not_said() -> Failure {
    Failure::new(Kind::Usage, format!("cannot unset {NAME}"))
        .why("nobody says it but the engine, every writeback_rate_update_seconds")
        .option(NAME)
}

/// The option as it is, and as it will be for a moment.
pub fn describe(view: &View, layers: &Layers, rate: u64) -> Option<Changing> {
    let option = Scope::Volume.find(NAME)?;
    let (was, _) = view.before_and_after(layers, None, option);
    let value = Value::Rate(rate);
    let mut after = Shown::of(option, Some(&value));
    after.say_where_from(Some((&value, Source::Runtime)));
    Some(Changing { already: false, before: was.value, after })
}

impl Supervisor {
    /// Sees that something is written back of the volume, at some rate.
    pub(super) fn check_paced(&self, view: &View) -> Result<(), Failure> {
        let View::Volume(entry) = view else { return Ok(()) };
        let refused = |kind, why: String| {
            Failure::new(kind, format!("cannot set {NAME} of {}", entry.display_name()))
                .why(why)
                .next("`bcached status` says what it waits for")
                .option(NAME)
        };
        let VolumeState::Served(info) = &entry.state else {
            return Err(refused(Kind::NotFound, "the volume is not served".to_owned()));
        };
        let engine = view.engine(&self.shared().table);
        let status = engine.and_then(|engine| engine.status());
        let now = status.as_ref().and_then(|status| status.volumes.iter().find(|now| now.id == info.id));
        if !now.unwrap_or(info).attached {
            return Err(refused(Kind::NotFound, "it is served without a cache".to_owned()));
        }
        match status.and_then(|status| status.failed) {
            None => Ok(()),
            Some(why) => Err(refused(Kind::Io, format!("the cache has stopped writing ({why})"))),
        }
    }

    /// Tells the engine.
    pub(super) fn apply_rate(&self, owner: Owner, rate: Option<u64>) {
        let (Owner::Volume(index), Some(rate)) = (owner, rate) else { return };
        let shared = self.shared();
        let table = &shared.table;
        let Some(entry) = table.volumes.get(index) else { return };
        let Some((engine, info)) = served_by(entry, &table.caches) else { return };
        let name = entry.display_name().to_owned();
        let answer = move |result: Result<(), bcached_engine::Error>| {
            if let Err(error) = result {
                tracing::error!(event = "options-failed", "{name}: {error}");
            }
        };
        engine.set_writeback_rate(info.id, rate, Box::new(answer));
    }
}
