//! How what runs differs from what the files say: `bcached.config-diff` version 1. Within a version, fields are only added; what is not known
//! is absent.

use serde::{Deserialize, Serialize};

/// What differs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Differences {
    /// In the order of the configuration.
    pub differences: Vec<Difference>,
}

/// One key.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Difference {
    /// Where the key is, as `volume.media` or `daemon`.
    pub section: String,
    /// The key; absent if the section as a whole is or is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// What runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<String>,
    /// What the files say, or the default if they say nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<String>,
    /// What makes them agree.
    pub mends: String,
}

impl Differences {
    /// Lines for people.
    #[must_use]
    pub fn text(&self) -> String {
        if self.differences.is_empty() {
            return "what runs is what the files say\n".to_owned();
        }
        let line = |one: &Difference| {
            let Difference { section, key, running, files, mends } = one;
            let what = key.as_ref().map_or_else(|| section.clone(), |key| format!("{section}.{key}"));
            let said = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".to_owned());
            format!("{what}: {} runs, the files say {} ({mends})\n", said(running), said(files))
        };
        self.differences.iter().map(line).collect()
    }
}
