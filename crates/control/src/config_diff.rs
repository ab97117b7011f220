//! Differences between the running configuration and the files: `bcached.config-diff` version 1.
//! Within a version, fields are only added; a field whose value is not known is absent.

use serde::{Deserialize, Serialize};

/// All differences.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ConfigDifferences {
    /// The differences, in the order of the configuration.
    pub differences: Vec<ConfigDifference>,
}

/// A difference in one key, or in a section as a whole.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ConfigDifference {
    /// The section of the key, as `volume.media` or `daemon`.
    pub section: String,
    /// The key; absent if the whole section exists on one side only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The value in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub running: Option<String>,
    /// The value in the files, or the default if the files do not set the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<String>,
    /// The command or action that makes the two agree.
    pub mends: String,
}

impl ConfigDifferences {
    /// Formats the differences as text for people.
    #[must_use]
    pub fn text(&self) -> String {
        if self.differences.is_empty() {
            return "the running configuration is that of the files\n".to_owned();
        }
        let line = |one: &ConfigDifference| {
            let ConfigDifference { section, key, running, files, mends } = one;
            let what = key.as_ref().map_or_else(|| section.clone(), |key| format!("{section}.{key}"));
            let said = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".to_owned());
            format!(
                "{what}: {} is in force, {} is in the files (until {mends})\n",
                said(running),
                said(files)
            )
        };
        self.differences.iter().map(line).collect()
    }
}
