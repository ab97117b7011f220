//! Events as the log reports them: `bcached.events` version 1, and each line of
//! `bcached events --json`, `bcached.event` version 1. Within a version, fields are only added; a
//! field whose value is not known is absent.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The events after the last one that the client has seen.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Events {
    /// Identifies the process that counts the events. Another process starts a new count.
    pub daemon: String,
    /// The events, oldest first.
    pub events: Vec<Event>,
    /// Number of events between the last one seen and the first of these that are no longer
    /// available.
    pub lost: u64,
}

/// One event.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Event {
    /// Sequence number, from 1 at the daemon's start; later events have greater numbers.
    pub sequence: u64,
    /// Time in RFC 3339 format, in UTC.
    pub time: String,
    /// `error`, `warning`, `info` or `debug`.
    pub level: String,
    /// The kind of event. These names are stable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<String>,
    /// The message in the log.
    pub message: String,
    /// The other fields of the log line, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fields: BTreeMap<String, String>,
}

impl Event {
    /// Formats the event as a line for people.
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
