//! The sources of a volume's or cache's options, and which value is in force.
//!
//! ```text
//!   runtime      set in the running daemon, until it stops        highest precedence
//!   configured   the last file that sets it; `99-set.toml` is read last
//!   superblock   cache mode and label; of a cache, its policy and discard
//!   default      of the engine                                    lowest precedence
//! ```

use super::quiet_hours::QuietHours;
use super::value::Value;
use super::{OPTIONS, OptionDefinition, OptionStorage, Scope, cache_options};
use crate::Origin;
use bcached_engine::{Options, Settings, VolumeOptions};
use bcached_format::CacheMode;
use std::collections::BTreeMap;

/// The options that files set, by name.
pub type ConfiguredOptions = BTreeMap<&'static str, OptionSetting>;

/// A value, and its location.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OptionSetting {
    /// The value.
    pub value: Value,
    /// File and line.
    pub origin: Origin,
}

/// All options that have been set.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct OptionLayers {
    /// By files.
    pub configured: ConfiguredOptions,
    /// In the running daemon, by name of the option.
    pub runtime: BTreeMap<&'static str, Value>,
}

/// The source of the value in force.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ValueSource<'a> {
    /// A command to the running daemon.
    Runtime,
    /// A file.
    Configured(&'a Origin),
}

/// Two values that contradict each other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OptionConflict {
    /// Both, as a clause.
    pub what: String,
    /// The names of the options.
    pub options: [&'static str; 2],
}

impl OptionLayers {
    /// Returns the value of the option `name` and its source; `None` if it is not set.
    #[must_use]
    pub fn said(&self, name: &str) -> Option<(&Value, ValueSource<'_>)> {
        let runtime = self.runtime.get(name).map(|value| (value, ValueSource::Runtime));
        let configured = || {
            let setting = self.configured.get(name)?;
            Some((&setting.value, ValueSource::Configured(&setting.origin)))
        };
        runtime.or_else(configured)
    }

    /// Returns the resulting options for the engine, at this `minute` of the day.
    #[must_use]
    pub fn volume_options(&self, minute: impl FnOnce() -> u16) -> VolumeOptions {
        let mut options = VolumeOptions::default();
        for option in OPTIONS {
            if let (OptionStorage::Engine { write, .. }, Some((value, _))) =
                (option.place, self.said(option.name))
            {
                write(&mut options, value);
            }
        }
        options.writeback_quiet = self.quiet_hours().is_some_and(|hours| hours.contains(minute()));
        options
    }

    /// Sets `options`, for the engine of a cache, to the values in force.
    pub fn apply_to_cache(&self, options: &mut Options) {
        cache_options::apply(options, |name| self.said(name).map(|(value, _)| value));
    }

    /// Returns the configured values that are stored in the superblock of a cache, whatever was set
    /// at run time.
    #[must_use]
    pub fn kept_settings(&self) -> Settings {
        cache_options::settings(|name| self.configured.get(name).map(|setting| &setting.value))
    }

    /// Returns the quiet hours, if there are any.
    #[must_use]
    pub fn quiet_hours(&self) -> Option<QuietHours> {
        match self.said("quiet_hours") {
            Some((Value::Hours(hours), _)) => Some(*hours),
            _ => None,
        }
    }

    /// Returns the cache mode in force, if one is set.
    #[must_use]
    pub fn cache_mode(&self) -> Option<CacheMode> {
        self.said("cache_mode").and_then(|(value, _)| mode(value))
    }

    /// Returns the cache mode that the files set, whatever was set at run time.
    #[must_use]
    pub fn configured_mode(&self) -> Option<CacheMode> {
        self.configured.get("cache_mode").and_then(|setting| mode(&setting.value))
    }

    /// Checks that the values in force do not contradict each other.
    ///
    /// # Errors
    /// The two values that do.
    pub fn check(&self) -> Result<(), OptionConflict> {
        let options = self.volume_options(|| 0);
        let below = |lower: &'static str, upper: &'static str, is_in_order: bool| {
            if is_in_order {
                return Ok(());
            }
            let [one, other] = [lower, upper].map(|name| {
                let option = Scope::Volume.find(name).map(|option| read(option, &options));
                option.flatten().map_or_else(String::new, |value| value.to_string())
            });
            let relation = if lower == "writeback_rate_minimum" { "not be above" } else { "be below" };
            let what = format!("{lower} must {relation} {upper}, but they would be {one} and {other}");
            Err(OptionConflict { what, options: [lower, upper] })
        };
        let (low, mid, high) = (
            options.writeback_rate_fp_term_low,
            options.writeback_rate_fp_term_mid,
            options.writeback_rate_fp_term_high,
        );
        below("writeback_rate_fp_term_low", "writeback_rate_fp_term_mid", low < mid)?;
        below("writeback_rate_fp_term_mid", "writeback_rate_fp_term_high", mid < high)?;
        let maximum = options.writeback_rate_maximum.unwrap_or(u64::MAX);
        below("writeback_rate_minimum", "writeback_rate_maximum", options.writeback_rate_minimum <= maximum)
    }
}

fn read(option: &OptionDefinition, options: &VolumeOptions) -> Option<Value> {
    match option.place {
        OptionStorage::Engine { read, .. } => Some(read(options)),
        _ => None,
    }
}

/// Returns the cache mode that `value` names.
fn mode(value: &Value) -> Option<CacheMode> {
    use CacheMode::{None as Nothing, Writearound, Writeback, Writethrough};
    let Value::Word(word) = value else { return None };
    [Writethrough, Writeback, Writearound, Nothing].into_iter().find(|mode| mode.name() == *word)
}
