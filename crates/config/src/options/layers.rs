//! Who has said what of a volume's options, and which of it is in force.
//!
//! ```text
//!   runtime      said to the daemon, until it stops               counts most
//!   configured   of the files, the last one that says it; `99-set.toml` is the last
//!   superblock   cache mode and label; of a cache, its policy and discard
//!   default      of the engine                                    counts least
//! ```

use super::quiet_hours::QuietHours;
use super::value::Value;
use super::{Definition, OPTIONS, Place, Scope, cache_options};
use crate::Origin;
use bcached_engine::{Options, Settings, VolumeOptions};
use bcached_format::CacheMode;
use std::collections::BTreeMap;

/// What files say of a volume's options, by name.
pub type Configured = BTreeMap<&'static str, Setting>;

/// A value, and where it stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setting {
    /// The value.
    pub value: Value,
    /// File and line.
    pub origin: Origin,
}

/// Everything that has been said.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Layers {
    /// By files.
    pub configured: Configured,
    /// To the running daemon, by option's name.
    pub runtime: BTreeMap<&'static str, Value>,
}

/// Whose word counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source<'a> {
    /// Somebody's who spoke to the daemon.
    Runtime,
    /// A file's.
    Configured(&'a Origin),
}

/// Two values that cannot be had together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Contradiction {
    /// Both, as a clause.
    pub what: String,
    /// Their names.
    pub options: [&'static str; 2],
}

impl Layers {
    /// What has been said of the option called `name`, and by whom; `None` if nothing was.
    #[must_use]
    pub fn said(&self, name: &str) -> Option<(&Value, Source<'_>)> {
        let runtime = self.runtime.get(name).map(|value| (value, Source::Runtime));
        let configured = || {
            let setting = self.configured.get(name)?;
            Some((&setting.value, Source::Configured(&setting.origin)))
        };
        runtime.or_else(configured)
    }

    /// The engine's options that follow, at this `minute` of the day.
    #[must_use]
    pub fn volume_options(&self, minute: impl FnOnce() -> u16) -> VolumeOptions {
        let mut options = VolumeOptions::default();
        for option in OPTIONS {
            if let (Place::Engine { write, .. }, Some((value, _))) = (option.place, self.said(option.name)) {
                write(&mut options, value);
            }
        }
        options.writeback_quiet = self.quiet_hours().is_some_and(|hours| hours.contains(minute()));
        options
    }

    /// Makes `options`, of the engine of a cache, what was said of that.
    pub fn apply_to_cache(&self, options: &mut Options) {
        cache_options::apply(options, |name| self.said(name).map(|(value, _)| value));
    }

    /// What the files say that is kept in the superblock of a cache, whatever was said to the daemon.
    #[must_use]
    pub fn kept_settings(&self) -> Settings {
        cache_options::settings(|name| self.configured.get(name).map(|setting| &setting.value))
    }

    /// The quiet hours, if there are any.
    #[must_use]
    pub fn quiet_hours(&self) -> Option<QuietHours> {
        match self.said("quiet_hours") {
            Some((Value::Hours(hours), _)) => Some(*hours),
            _ => None,
        }
    }

    /// The cache mode that was asked for.
    #[must_use]
    pub fn cache_mode(&self) -> Option<CacheMode> {
        self.said("cache_mode").and_then(|(value, _)| mode(value))
    }

    /// The cache mode that the files ask for, whatever was said to the daemon.
    #[must_use]
    pub fn configured_mode(&self) -> Option<CacheMode> {
        self.configured.get("cache_mode").and_then(|setting| mode(&setting.value))
    }

    /// Sees that all that is in force can be had together.
    ///
    /// # Errors
    /// What cannot.
    pub fn check(&self) -> Result<(), Contradiction> {
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
            let what = format!("{lower} must {relation} {upper}, and they would be {one} and {other}");
            Err(Contradiction { what, options: [lower, upper] })
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

fn read(option: &Definition, options: &VolumeOptions) -> Option<Value> {
    match option.place {
        Place::Engine { read, .. } => Some(read(options)),
        _ => None,
    }
}

/// The cache mode that `value` names.
fn mode(value: &Value) -> Option<CacheMode> {
    use CacheMode::{None as Nothing, Writearound, Writeback, Writethrough};
    let Value::Word(word) = value else { return None };
    [Writethrough, Writeback, Writearound, Nothing].into_iter().find(|mode| mode.name() == *word)
}
