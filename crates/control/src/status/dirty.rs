//! The amount of dirty data, and how far it is known. An amount that is not known is absent, never
//! zero.

use crate::sizes::human;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Amount of dirty data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirtyData {
    /// The whole amount; absent if it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_bytes: Option<u64>,
    /// What has been counted, if there may be more because the index is not read completely or is
    /// damaged in part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_bytes_at_least: Option<u64>,
    /// `known`, `at-least` or `unknown`.
    #[serde(default)]
    pub dirty_state: String,
}

impl DirtyData {
    /// Creates the amount from the number of sectors counted, and whether that is all.
    #[must_use]
    pub fn of(sectors: u64, is_all: bool) -> Self {
        let bytes = sectors * 512;
        let (dirty_bytes, dirty_bytes_at_least, state) = match (is_all, bytes) {
            (true, _) => (Some(bytes), None, "known"),
            (false, 0) => (None, None, "unknown"),
            (false, _) => (None, Some(bytes), "at-least"),
        };
        Self { dirty_bytes, dirty_bytes_at_least, dirty_state: state.to_owned() }
    }

    /// Returns what has been counted.
    #[must_use]
    pub fn counted(&self) -> u64 {
        self.dirty_bytes.or(self.dirty_bytes_at_least).unwrap_or(0)
    }
}

/// `1.5 MiB dirty`, for people.
impl fmt::Display for DirtyData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.dirty_bytes, self.dirty_bytes_at_least) {
            (Some(all), _) => write!(f, "{} dirty", human(all)),
            (None, Some(least)) => write!(f, "at least {} dirty", human(least)),
            (None, None) => f.write_str("amount of dirty data unknown"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_no_zero() {
        for (sectors, is_all, text, json) in [
            (0, true, "0 B dirty", r#"{"dirty_bytes":0,"dirty_state":"known"}"#),
            (2048, true, "1 MiB dirty", r#"{"dirty_bytes":1048576,"dirty_state":"known"}"#),
            (
                2048,
                false,
                "at least 1 MiB dirty",
                r#"{"dirty_bytes_at_least":1048576,"dirty_state":"at-least"}"#,
            ),
            (0, false, "amount of dirty data unknown", r#"{"dirty_state":"unknown"}"#),
        ] {
            let dirty = DirtyData::of(sectors, is_all);
            assert_eq!(dirty.to_string(), text);
            assert_eq!(serde_json::to_string(&dirty).expect("an object"), json);
        }
    }
}
