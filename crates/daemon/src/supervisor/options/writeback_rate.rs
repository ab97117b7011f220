//! A requested write-back rate. It is stored nowhere, because the engine's controller soon sets its
//! own.

use crate::supervisor::Supervisor;
use crate::supervisor::options::OptionSources;
use crate::supervisor::options::owner::OwnerView;
use crate::supervisor::table::VolumeState;
use bcached_config::options::layers::ValueSource;
use bcached_config::options::value::Value;
use bcached_config::options::{OptionDefinition, Scope, shown};
use bcached_control::failure::{Failure, Kind};
use bcached_control::options::ChangedOption;
use bcached_engine::{Error, VolumeInfo};

/// The option.
pub const NAME: &str = "writeback_rate";

/// Reads the requested rate, in sectors a second.
pub fn read(option: &OptionDefinition, value: &Value, runtime: bool) -> Result<u64, Failure> {
    let Value::Rate(rate) = value else { unreachable!("the value of {} is a rate", option.name) };
    if runtime {
        return Ok(*rate);
    }
    Err(Failure::new(Kind::Usage, format!("cannot set {NAME}"))
        .why("the engine sets it from the amount of dirty data, every writeback_rate_update_seconds")
        .next("add --runtime: it holds until the next update; writeback_rate_minimum and writeback_rate_maximum are kept")
        .option(NAME))
}

/// The refusal to unset the option.
pub fn not_said() -> Failure {
    Failure::new(Kind::Usage, format!("cannot unset {NAME}"))
        .why("only the engine sets it, every writeback_rate_update_seconds")
        .option(NAME)
}

/// Describes the option as the engine reports it, and as it will be for a moment.
pub fn describe(view: &OwnerView, now: Option<&VolumeInfo>, rate: u64) -> Option<ChangedOption> {
    let (option, OwnerView::Volume(entry)) = (Scope::Volume.find(NAME)?, view) else { return None };
    let was = OptionSources::of(entry, now).show(option);
    let value = Value::Rate(rate);
    let mut after = shown::shown(option, Some(&value));
    shown::say_where_from(&mut after, Some((&value, ValueSource::Runtime)));
    Some(ChangedOption { already: false, before: was.value, after })
}

impl Supervisor {
    /// Checks that dirty data of the volume can be written back, so that it has a rate. Returns the
    /// engine's report of the volume, if it answers.
    pub fn check_paced(&self, view: &OwnerView) -> Result<Option<VolumeInfo>, Failure> {
        let OwnerView::Volume(entry) = view else { return Ok(None) };
        let refused = |kind, why: String| {
            Failure::new(kind, format!("cannot set {NAME} of {}", entry.display_name()))
                .why(why)
                .next("`bcached status` shows what it waits for")
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
        let now = now.cloned();
        match status.and_then(|status| status.failed) {
            None => Ok(now),
            Some(why) => Err(refused(Kind::Io, format!("the cache has stopped writing ({why})"))),
        }
    }

    /// Handles the engine's answer: it has set the rate, or failed.
    pub fn paced(&self, volume: usize, outcome: Result<(), Error>) -> Result<(), Failure> {
        outcome.map_err(|error| {
            let name = self.shared().table.volumes[volume].display_name().to_owned();
            Failure::new(Kind::Io, format!("{NAME} of {name} could not be changed")).why(error.to_string())
        })
    }
}
