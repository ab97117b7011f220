//! Options set with `--runtime`, in the form in which they are handed over. They hold until the
//! daemon stops, and a hand-over is not a stop. They are passed by the names of options, as typed.

use super::Scope;
use super::layers::OptionLayers;
use super::value::Value;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The owner of the options. Another device is another cache or volume, whatever its name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OptionOwner {
    /// A cache.
    Cache {
        /// Its name in the configuration.
        name: Option<String>,
        /// Its device, as configured.
        device: String,
    },
    /// A volume with a backing device.
    Volume {
        /// Its name in the configuration.
        name: Option<String>,
        /// Its backing device, as configured.
        backing: String,
    },
    /// A volume that lives in a cache only, by its UUID.
    Lodger {
        /// The UUID.
        uuid: String,
    },
}

/// The run-time options of one cache or volume.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RuntimeOptions {
    /// The owner.
    pub whose: OptionOwner,
    options: BTreeMap<String, String>,
}

impl RuntimeOptions {
    /// Collects the run-time options; `None` if there are none.
    #[must_use]
    pub fn of(whose: OptionOwner, layers: &OptionLayers) -> Option<Self> {
        let options = layers.runtime.iter().map(|(name, value)| ((*name).to_owned(), value.to_string()));
        let options: BTreeMap<_, _> = options.collect();
        (!options.is_empty()).then_some(Self { whose, options })
    }

    /// Adds the options to `layers`. One that is unknown here, or does not fit what the files now
    /// set, is left out, with a warning that names it.
    pub fn add_to(&self, layers: &mut OptionLayers, scope: Scope, owner: &str) {
        for (name, typed) in &self.options {
            let option = scope.find(name);
            let value = option.and_then(|option| Some((option.name, option.read(typed).ok()?)));
            let added = value.is_some_and(|(name, value)| add(layers, name, value));
            if !added {
                tracing::warn!(
                    event = "runtime-not-kept",
                    "{owner}: {name}={typed}, set with --runtime before the take-over, is dropped: this \
                     process does not know it, or it does not fit the other options"
                );
            }
        }
    }
}

/// Adds one option. Returns false, and changes nothing, if it does not fit the others.
fn add(layers: &mut OptionLayers, name: &'static str, value: Value) -> bool {
    let mut together = layers.clone();
    together.runtime.insert(name, value);
    let fits = together.check().is_ok();
    if fits {
        *layers = together;
    }
    fits
}

#[cfg(test)]
mod tests {
    use super::super::{OPTIONS, cache_options};
    use super::*;

    fn layers(scope: Scope, said: &[(&str, &str)]) -> OptionLayers {
        let mut layers = OptionLayers::default();
        for (name, typed) in said {
            let option = scope.find(name).expect("an option");
            layers.runtime.insert(option.name, option.read(typed).expect("a value"));
        }
        layers
    }

    /// The value of each option survives a hand-over.
    #[test]
    fn what_is_said_comes_as_it_was() {
        for (scope, all) in [(Scope::Volume, OPTIONS), (Scope::Cache, cache_options::OPTIONS)] {
            let values = ["1", "17", "5M", "11s", "01:00-02:00", "none", "writeback", "fifo", "3.5G"];
            for (option, typed) in all.iter().flat_map(|option| values.map(|typed| (option, typed))) {
                if option.read(typed).is_err() {
                    continue;
                }
                let before = layers(scope, &[(option.name, typed)]);
                let said = RuntimeOptions::of(OptionOwner::Lodger { uuid: String::new() }, &before)
                    .expect("it was said");
                let said =
                    serde_json::from_str::<RuntimeOptions>(&serde_json::to_string(&said).expect("JSON"));
                let mut after = OptionLayers::default();
                said.expect("the same").add_to(&mut after, scope, "tank");
                // A value that contradicts the defaults is left out; otherwise all values are
                // equal.
                if before.check().is_ok() {
                    assert_eq!(after, before, "{}={typed}", option.name);
                }
            }
        }
    }

    #[test]
    fn what_is_not_known_or_does_not_fit_is_left_out() {
        let said = |name: &str, typed: &str| RuntimeOptions {
            whose: OptionOwner::Lodger { uuid: String::new() },
            options: [(name.to_owned(), typed.to_owned())].into(),
        };
        let mut now = layers(Scope::Volume, &[("writeback_rate_minimum", "1M")]);
        let before = now.clone();
        said("of_tomorrow", "1").add_to(&mut now, Scope::Volume, "tank");
        said("writeback_percent", "very much").add_to(&mut now, Scope::Volume, "tank");
        said("writeback_rate_maximum", "512k").add_to(&mut now, Scope::Volume, "tank");
        assert_eq!(now, before);
    }
}
