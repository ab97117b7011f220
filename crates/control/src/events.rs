//! What has happened, as the log says it: `bcached.events` version 1, and each line of `bcached events --json`, `bcached.event` version 1.
//! Within a version, fields are only added; what is not known is absent.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What has happened since the one that somebody has seen.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Events {
    /// Names the process that counts them: another one begins anew.
    pub daemon: String,
    /// In order.
    pub events: Vec<Event>,
    /// So many between the one that was seen and the first of these are not known any more.
    pub lost: u64,
}

/// One event.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Event {
    /// Counted from 1 since the daemon began; of two the greater is the later.
    pub sequence: u64,
    /// RFC 3339, in UTC.
    pub time: String,
    /// `error`, `warning`, `info` or `debug`.
    pub level: String,
    /// What kind of event it is. These names are stable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<String>,
    /// The sentence of the log.
    pub message: String,
    /// What else the log says, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fields: BTreeMap<String, String>,
}

impl Event {
    /// A line for people.
    #[must_use]
    pub fn text(&self) -> String {
        let word = match self.level.as_str() {
            "info" => String::new(),
            level => format!("{level}: "),
        };
        let id = self.event.as_ref().map_or_else(String::new, |event| format!(" [{event}]"));
        format!("{} {word}{}{id}\n", self.time, self.message)
    }
}
