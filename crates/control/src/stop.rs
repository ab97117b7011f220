//! The stop of the whole daemon: the request, and the report on it, `bcached.stop` version 1.
//! Within a version, fields are only added; a field whose value is not known is absent.

use crate::failure::{Failure, Kind};
use crate::sizes::human;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// A request to stop.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StopRequest {
    /// Do nothing; the answer says what would happen.
    pub dry_run: bool,
}

/// Report on a stop: the state when it was requested, or what is left after it has ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StopReport {
    /// Process id of the daemon, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Dry run: nothing is done, and the report says what would be.
    pub dry_run: bool,
    /// There was no daemon.
    #[serde(default)]
    pub already: bool,
    /// Everything has been stopped, and the process ends now.
    pub ended: bool,
    /// For how long the daemon waits for clients at most.
    pub stop_timeout_seconds: u64,
    /// The clients that were connected.
    pub users: Vec<String>,
    /// Dirty data, which a stop leaves in the cache. The amounts may change until the stop has
    /// ended.
    pub dirty: Vec<RemainingDirty>,
    /// Users that had a file or block device open which disappeared with the daemon.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cut: Vec<String>,
    /// What could not be stopped cleanly, in the form of the `error` object of a refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<serde_json::Value>,
}

/// Dirty data of a volume that stays in the cache.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RemainingDirty {
    /// The volume's name.
    pub volume: String,
    /// Amount of dirty data.
    pub dirty_bytes: u64,
    /// The amount is a lower bound: the index had not been read completely.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_least: bool,
    /// The cache device that holds it.
    pub device: String,
}

impl RemainingDirty {
    /// Formats it as a sentence, for people and for the log.
    #[must_use]
    pub fn sentence(&self) -> String {
        let Self { volume, dirty_bytes, at_least, device } = self;
        let device = device.rsplit('/').next().unwrap_or(device);
        let least = if *at_least { "at least " } else { "" };
        format!("{volume}: {least}{} dirty stays on {device}; keep them together", human(*dirty_bytes))
    }
}

impl StopReport {
    /// Returns what could not be stopped cleanly.
    #[must_use]
    pub fn to_failure(&self) -> Option<Failure> {
        let cut = || {
            (!self.cut.is_empty()).then(|| {
                Failure::new(Kind::Io, format!("clients were cut off: {}", self.cut.join(", ")))
                    .why(format!(
                        "they had not closed their files or devices within stop_timeout ({} s)",
                        self.stop_timeout_seconds
                    ))
                    .next("data that they had not flushed is lost; check file systems that were mounted")
            })
        };
        self.failure.as_ref().and_then(Failure::from_error).or_else(cut)
    }

    /// Names the clients that the daemon waits for, in a line for people.
    #[must_use]
    pub fn waits_text(&self) -> Option<String> {
        let limit = self.stop_timeout_seconds;
        (!self.users.is_empty()).then(|| format!("up to {limit} s for clients: {}", self.users.join(", ")))
    }

    /// Formats the report as text for people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        for dirty in &self.dirty {
            text.push_str(&dirty.sentence());
            text.push('\n');
        }
        let pid = self.pid.unwrap_or_default();
        let line = match (self.already, self.dry_run, self.ended) {
            (true, ..) => "no daemon answers: there is nothing to stop".to_owned(),
            (_, true, _) => {
                let waits =
                    self.waits_text().map_or_else(String::new, |waits| format!(", after waiting {waits}"));
                format!("daemon {pid} would be stopped{waits}")
            }
            (_, _, true) => format!("daemon {pid} has stopped"),
            _ => format!("daemon {pid} is stopping"),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{line}");
        text
    }
}
