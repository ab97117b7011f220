//! Hand-over of the daemon's work to a new process: the request, and the report on it,
//! `bcached.take-over` version 1. Within a version, fields are only added; a field whose value is
//! not known is absent.

use crate::failure::Failure;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::path::PathBuf;

/// A request for another process to take over.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TakeOverRequest {
    /// The program that the new process runs, an absolute path.
    pub program: PathBuf,
    /// Hand nothing over; the answer says what would happen.
    #[serde(default)]
    pub dry_run: bool,
}

/// Progress of a hand-over.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TakeOverPhase {
    /// This process has not taken over from another one, and none is taking over from it.
    #[default]
    None,
    /// Dry run: nothing is handed over, and the answer says what would be.
    WouldBe,
    /// Another process is being started, or is taking over.
    UnderWay,
    /// This process has taken over.
    Done,
    /// Another process was to take over and failed; this one continues.
    Failed,
}

/// Report on a hand-over.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TakeOverReport {
    /// How far it has come.
    pub progress: TakeOverPhase,
    /// The process that answers.
    pub pid: u32,
    /// The previous process, once it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former_pid: Option<u32>,
    /// The version of the previous process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former_version: Option<String>,
    /// The previous process died during the hand-over. Clients whose connections had not been
    /// passed on by then must connect again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub former_died: bool,
    /// For how long requests of clients waited, in seconds; counted from the death of the previous
    /// process if it died.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused_seconds: Option<f64>,
    /// NBD connections that were handed over and continue.
    #[serde(default)]
    pub connections: usize,
    /// Clients whose connections cannot be handed over, and that must connect again.
    #[serde(default)]
    pub reconnect: Vec<String>,
    /// Why it failed, in the form of the `error` object of a refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<serde_json::Value>,
}

impl TakeOverReport {
    /// Returns why it failed.
    #[must_use]
    pub fn to_failure(&self) -> Option<Failure> {
        Failure::from_error(self.failure.as_ref()?)
    }

    /// Formats the report as text for people.
    #[must_use]
    pub fn text(&self) -> String {
        let Self { pid, .. } = self;
        let former = self.former_pid.unwrap_or_default();
        let mut text = match self.progress {
            TakeOverPhase::None => format!("daemon {pid} has not taken over from another process\n"),
            TakeOverPhase::WouldBe => format!("daemon {pid} would be replaced\n"),
            TakeOverPhase::UnderWay => format!("daemon {pid} is being replaced\n"),
            TakeOverPhase::Done => {
                let seconds = self.paused_seconds.unwrap_or_default();
                let died = if self.former_died {
                    ", which died during the hand-over: clients that lost their connection must connect again"
                } else {
                    ""
                };
                format!(
                    "daemon {pid} has taken over from {former}{died}; requests waited for {seconds:.3} s\n"
                )
            }
            TakeOverPhase::Failed => format!("daemon {pid} continues\n"),
        };
        if !self.reconnect.is_empty() {
            let verb = if self.progress == TakeOverPhase::WouldBe { "would have" } else { "have" };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "clients that {verb} to connect again: {}", self.reconnect.join(", "));
        }
        text
    }
}
