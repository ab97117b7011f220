//! The replacement of a daemon by another process, both ways: the request, and what is said of it, `bcached.take-over` version 1. Within a
//! version, fields are only added; what is not known is absent.

use crate::failure::Failure;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::path::PathBuf;

/// A request for another process to take over.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TakeOver {
    /// The program that it is to run, an absolute path.
    pub program: PathBuf,
    /// Nothing is handed over: the answer says what would be.
    #[serde(default)]
    pub dry_run: bool,
}

/// How far a hand-over is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Progress {
    /// This process has taken over from nobody, and nobody is taking over from it.
    #[default]
    None,
    /// Nothing is handed over: it is what would be.
    WouldBe,
    /// Another process is being started, or takes over.
    UnderWay,
    /// This process has taken over.
    Done,
    /// Another process was to, and could not: this one goes on.
    Failed,
}

/// A hand-over.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TakingOver {
    /// How far it is.
    pub progress: Progress,
    /// The process that answers.
    pub pid: u32,
    /// The one that was there before, once it has gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former_pid: Option<u32>,
    /// Its version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former_version: Option<String>,
    /// It has died in the middle of it: clients whose connections had not been passed on by then have to connect again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub former_died: bool,
    /// How long clients' requests have waited, in seconds; since its death, if it has died.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused_seconds: Option<f64>,
    /// NBD connections that have been gone on with.
    #[serde(default)]
    pub connections: usize,
    /// Clients that cannot be gone on with, and have to connect again.
    #[serde(default)]
    pub reconnect: Vec<String>,
    /// Why it has failed: what stands in `error` of a refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<serde_json::Value>,
}

impl TakingOver {
    /// Why it has failed.
    #[must_use]
    pub fn to_failure(&self) -> Option<Failure> {
        Failure::from_error(self.failure.as_ref()?)
    }

    /// Lines for people.
    #[must_use]
    pub fn text(&self) -> String {
        let Self { pid, .. } = self;
        let former = self.former_pid.unwrap_or_default();
        let mut text = match self.progress {
            Progress::None => format!("daemon {pid} has taken over from nobody\n"),
            Progress::WouldBe => format!("daemon {pid} would be replaced\n"),
            Progress::UnderWay => format!("daemon {pid} is being replaced\n"),
            Progress::Done => {
                let seconds = self.paused_seconds.unwrap_or_default();
                let died = if self.former_died {
                    ", which has died in the middle of it: clients that have noticed connect again"
                } else {
                    ""
                };
                format!(
                    "daemon {pid} has taken over from {former}{died}; requests waited for {seconds:.3} s\n"
                )
            }
            Progress::Failed => format!("daemon {pid} goes on\n"),
        };
        if !self.reconnect.is_empty() {
            let verb = if self.progress == Progress::WouldBe { "would have" } else { "had" };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "to connect again {verb}: {}", self.reconnect.join(", "));
        }
        text
    }
}
