//! The stop of the whole daemon, both ways: the request, and what is said of it, `bcached.stop` version 1. Within a version, fields are only
//! added; what is not known is absent.

use crate::failure::{Failure, Kind};
use crate::sizes::human;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

/// A request to stop.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Stop {
    /// Nothing is done: the answer says what would be.
    pub dry_run: bool,
}

/// A stop: what there was when it was asked for, or what is left when it has ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Stopping {
    /// The daemon's process, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Nothing is done: it is what would be.
    pub dry_run: bool,
    /// There was no daemon.
    #[serde(default)]
    pub already: bool,
    /// Everything has been stopped: the process ends now.
    pub ended: bool,
    /// How long clients are waited for at most.
    pub stop_timeout_seconds: u64,
    /// Who was connected.
    pub users: Vec<String>,
    /// Dirty data, which a stop leaves where it is. Until it has ended that may change.
    pub dirty: Vec<DirtyStays>,
    /// Who had a file or a block device open that ended with the daemon.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cut: Vec<String>,
    /// What could not be stopped in order: what stands in `error` of a refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<serde_json::Value>,
}

/// Dirty data of a volume.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DirtyStays {
    /// Whose.
    pub volume: String,
    /// How much.
    pub dirty_bytes: u64,
    /// It may be more: the index had not been read to its end.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_least: bool,
    /// The cache device that has it.
    pub device: String,
}

impl DirtyStays {
    /// The sentence for people and for the log.
    #[must_use]
    pub fn sentence(&self) -> String {
        let Self { volume, dirty_bytes, at_least, device } = self;
        let device = device.rsplit('/').next().unwrap_or(device);
        let least = if *at_least { "at least " } else { "" };
        format!("{volume}: {least}{} dirty stays on {device}; keep them together", human(*dirty_bytes))
    }
}

impl Stopping {
    /// What could not be stopped in order.
    #[must_use]
    pub fn to_failure(&self) -> Option<Failure> {
        let cut = || {
            (!self.cut.is_empty()).then(|| {
                Failure::new(
                    Kind::Io,
                    format!("cut off in the middle of their work: {}", self.cut.join(", ")),
                )
                .why(format!("they had not gone within stop_timeout ({} s)", self.stop_timeout_seconds))
                .next("what they had not flushed is lost; check a file system that was mounted")
            })
        };
        self.failure.as_ref().and_then(Failure::from_error).or_else(cut)
    }

    /// Who is waited for, in a line for people.
    #[must_use]
    pub fn waits_text(&self) -> Option<String> {
        let limit = self.stop_timeout_seconds;
        (!self.users.is_empty()).then(|| format!("up to {limit} s for: {}", self.users.join(", ")))
    }

    /// Lines for people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        for dirty in &self.dirty {
            text.push_str(&dirty.sentence());
            text.push('\n');
        }
        let pid = self.pid.unwrap_or_default();
        let line = match (self.already, self.dry_run, self.ended) {
            (true, ..) => "no daemon answers: nothing is to be stopped".to_owned(),
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
