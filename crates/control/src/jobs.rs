//! Long-running jobs: the request to start one, and the report on it, `bcached.job` version 1.
//! Within a version, fields are only added; a field whose value is not known is absent.

use crate::failure::Failure;
use crate::sizes::{exact, human};
use serde::{Deserialize, Serialize};
use std::fmt::{self, Write as _};

/// What may be overwritten on a device.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Overrides {
    /// Names of the signatures that may be overwritten.
    pub wipe_signature: Vec<String>,
    /// A bcache superblock may be overwritten if no dirty data belongs to it.
    pub wipe_bcache: bool,
}

/// The operation that a job performs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JobKind {
    /// Writes back the dirty data.
    Flush,
    /// Detaches a volume from its cache.
    Detach,
    /// Attaches a volume to a cache.
    Attach,
    /// Stops serving a volume permanently.
    Remove,
    /// Stops serving a volume until the next start.
    Stop,
    /// Starts serving a volume.
    Add,
    /// Discards everything that a cache holds for a volume.
    Forget,
    /// Makes a volume as large as its backing device is now.
    Grow,
    /// Makes a volume smaller.
    Shrink,
    /// Replaces the device of a cache; its volumes move to the new one.
    Replace,
    /// Stops serving a cache and all its volumes, and releases the devices.
    Release,
    /// Starts serving a set that the kernel used before, or that was released.
    Import,
}

impl JobKind {
    /// Returns whether the job can be cancelled while it runs. The others end soon, or cannot be
    /// left half done.
    #[must_use]
    pub const fn can_be_cancelled(self) -> bool {
        matches!(
            self,
            Self::Attach
                | Self::Detach
                | Self::Flush
                | Self::Forget
                | Self::Grow
                | Self::Replace
                | Self::Shrink
        )
    }
}

impl fmt::Display for JobKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flush => "flush",
            Self::Detach => "detach",
            Self::Attach => "attach",
            Self::Remove => "remove",
            Self::Stop => "stop",
            Self::Add => "add",
            Self::Forget => "forget",
            Self::Grow => "grow",
            Self::Shrink => "shrink",
            Self::Replace => "replace",
            Self::Release => "release",
            Self::Import => "import",
        })
    }
}

/// A request to start a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobSpec {
    /// The operation.
    pub verb: JobKind,
    /// The volume, or for some operations the cache.
    pub volume: String,
    /// The backing device, for [`JobKind::Add`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<String>,
    /// The cache to join, for [`JobKind::Attach`] and [`JobKind::Add`]; the cache that holds the
    /// data, for [`JobKind::Forget`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<String>,
    /// The new size, for [`JobKind::Shrink`], and for [`JobKind::Add`] and [`JobKind::Grow`] of a
    /// volume that lives in the cache only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// How much dirty data may be lost, for [`JobKind::Forget`], and for [`JobKind::Shrink`] of a
    /// volume that lives in the cache only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accept_loss_bytes: Option<u64>,
    /// The file that lists the lost ranges, for the same operations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_ranges: Option<String>,
    /// The new device, for [`JobKind::Replace`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub with: Option<String>,
    /// The devices of the set, the cache first, for [`JobKind::Import`]. If empty, those of a
    /// released cache.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// What may be overwritten on the new device.
    #[serde(default)]
    pub overwrites: Overrides,
    /// Do nothing; the answer says what would happen.
    #[serde(default)]
    pub dry_run: bool,
}

impl JobSpec {
    /// Creates a request with nothing but the operation and the name.
    #[must_use]
    pub const fn new(verb: JobKind, volume: String) -> Self {
        let overwrites = Overrides { wipe_signature: Vec::new(), wipe_bcache: false };
        Self {
            overwrites,
            devices: Vec::new(),
            with: None,
            verb,
            volume,
            backing: None,
            cache: None,
            size_bytes: None,
            accept_loss_bytes: None,
            lost_ranges: None,
            dry_run: false,
        }
    }
}

/// State of a job.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum JobState {
    /// Dry run: the job would be started.
    Planned,
    /// In progress.
    Running,
    /// Finished, or there was nothing to do.
    Done,
    /// Failed; the failure says why, and what the state is now.
    Failed,
    /// Cancelled on request.
    Cancelled,
}

/// Report on a job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JobReport {
    /// Number of the job, for `cancel`; absent if nothing was started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// The operation.
    pub verb: JobKind,
    /// The volume, or for some operations the cache.
    pub volume: String,
    /// The job's state.
    pub state: JobState,
    /// The requested state existed already: there was nothing to do.
    pub already: bool,
    /// Time since the start, or from the start to the end.
    pub elapsed_seconds: u64,
    /// Amount of dirty data at the start.
    pub dirty_bytes_at_start: u64,
    /// The amount at the start is not known exactly, because the cache is not open or its index is
    /// damaged or not read completely. `dirty_bytes_at_start` is then a lower bound.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dirty_unknown: bool,
    /// Dirty data that is left, if the engine answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_bytes: Option<u64>,
    /// How much of the dirty data has been written back, in percent. It may stop growing while
    /// clients write.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percent: Option<u64>,
    /// The rate at which the amount of dirty data decreases.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// Remaining time at that rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eta_seconds: Option<u64>,
    /// Dirty data that the job loses, or would lose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_bytes: Option<u64>,
    /// The file on the daemon's machine that lists the lost ranges, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_ranges: Option<String>,
    /// The size of the volume afterwards, for [`JobKind::Grow`] and [`JobKind::Shrink`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// The devices that [`JobKind::Release`] releases or [`JobKind::Import`] takes into service,
    /// the cache first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// What the job is waiting for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocked_by: Option<String>,
    /// Further remarks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Why it failed, in the form of the `error` object of a refusal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<serde_json::Value>,
}

/// All running jobs, and the most recent ones that have ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JobList {
    /// The jobs, oldest first.
    pub jobs: Vec<JobReport>,
}

impl JobReport {
    /// Creates a report of which only the operation, the name and the state are known.
    pub const fn new(verb: JobKind, volume: String, state: JobState) -> Self {
        Self {
            id: None,
            verb,
            volume,
            state,
            already: false,
            elapsed_seconds: 0,
            dirty_bytes_at_start: 0,
            dirty_unknown: false,
            dirty_bytes: None,
            percent: None,
            bytes_per_second: None,
            eta_seconds: None,
            lost_bytes: None,
            lost_ranges: None,
            size_bytes: None,
            devices: Vec::new(),
            blocked_by: None,
            notes: Vec::new(),
            failure: None,
        }
    }

    /// Adds the progress: the amount of dirty data that is left after that many milliseconds.
    pub fn with_progress(mut self, dirty: u64, milliseconds: u64) -> Self {
        let done = self.dirty_bytes_at_start.saturating_sub(dirty);
        self.dirty_bytes = Some(dirty);
        self.percent = (done * 100).checked_div(self.dirty_bytes_at_start);
        let rate = (done.saturating_mul(1000)).checked_div(milliseconds).filter(|rate| *rate > 0);
        self.bytes_per_second = rate;
        self.eta_seconds = rate.map(|rate| dirty.div_ceil(rate));
        self
    }

    /// Returns why it failed.
    #[must_use]
    pub fn to_failure(&self) -> Option<Failure> {
        Failure::from_error(self.failure.as_ref()?)
    }

    /// Formats the progress as a line for people.
    #[must_use]
    pub fn progress_text(&self) -> String {
        let mut text = format!("{}: {}", self.volume, self.verb);
        // Writing to a string cannot fail.
        let _ = match (self.dirty_bytes, self.percent) {
            (Some(dirty), Some(percent)) => {
                let done = if self.verb == JobKind::Forget { "discarded" } else { "written back" };
                write!(text, ", {percent}% {done}, {} dirty", human(dirty))
            }
            (Some(dirty), None) => write!(text, ", {} dirty", human(dirty)),
            _ => Ok(()),
        };
        if let (Some(rate), Some(eta)) = (self.bytes_per_second, self.eta_seconds) {
            let _ = write!(text, ", {}/s, about {eta} s left", human(rate));
        }
        if let Some(blocked) = &self.blocked_by {
            let _ = write!(text, "; {blocked}");
        }
        text
    }

    /// Describes what is lost, as the end of a sentence.
    fn loss(&self, lost: &str) -> String {
        match (self.lost_bytes, &self.lost_ranges) {
            (Some(bytes), Some(file)) => format!(": {} {lost}; {file} lists the ranges", human(bytes)),
            (Some(bytes), None) => format!(": {} {lost}", human(bytes)),
            (None, _) if self.verb == JobKind::Forget => format!(": no dirty data {lost}"),
            (None, _) => String::new(),
        }
    }

    /// Describes what the job would do.
    fn planned_text(&self) -> String {
        let Self { volume, verb, .. } = self;
        let size = exact(self.size_bytes.unwrap_or_default());

        let dirty = match (self.dirty_unknown, self.dirty_bytes_at_start) {
            (false, dirty) => human(dirty),
            (true, 0) => "an unknown amount".to_owned(),
            (true, least) => format!("at least {}", human(least)),
        };
        match verb {
            JobKind::Flush => format!("{volume}: {dirty} would be written back"),
            JobKind::Detach => {
                format!("{volume}: {dirty} would be written back, then it would be served without a cache")
            }
            JobKind::Attach => format!("{volume}: would be attached"),
            JobKind::Remove => {
                format!("{volume}: would no longer be served; {dirty} of dirty data would stay in its cache")
            }
            JobKind::Stop => format!(
                "{volume}: would not be served until the next start; \
                 {dirty} of dirty data would stay in its cache"
            ),
            JobKind::Add => format!("{volume}: would be served"),
            JobKind::Forget => format!("{volume}: would be forgotten{}", self.loss("would be lost")),
            JobKind::Grow => format!("{volume}: its size would become {size}"),
            JobKind::Import => format!("{volume}: would be served"),
            JobKind::Release => {
                format!(
                    "{volume}: would no longer be served; {dirty} of dirty data would stay on the cache device"
                )
            }
            JobKind::Replace => format!(
                "{volume}: {dirty} would be written back, then its volumes would move to the new device"
            ),
            JobKind::Shrink if self.dirty_bytes_at_start == 0 => {
                format!("{volume}: its size would become {size}{}", self.loss("would be lost"))
            }
            JobKind::Shrink => {
                format!(
                    "{volume}: {dirty} beyond {size} would be written back, then its size would become {size}"
                )
            }
        }
    }

    /// Formats the result of the job, or what it would do, as lines for people.
    #[must_use]
    pub fn text(&self) -> String {
        let Self { volume, verb, .. } = self;
        let done = match verb {
            JobKind::Flush => "its dirty data is written back",
            JobKind::Detach => "detached: it is served without a cache",
            JobKind::Attach => "attached",
            JobKind::Remove if self.dirty_unknown => {
                "removed: it is no longer served; the amount of its dirty data in a cache is unknown"
            }
            JobKind::Stop if self.dirty_unknown => {
                "stopped: it is not served until the next start, or `bcached add`; \
                 the amount of its dirty data in a cache is unknown"
            }
            JobKind::Remove => "removed: it is no longer served; its dirty data stays in its cache",
            JobKind::Stop => {
                "stopped: it is not served until the next start, or `bcached add`; \
                 its dirty data stays in its cache"
            }
            JobKind::Add => "added",
            JobKind::Forget => "forgotten",
            JobKind::Grow | JobKind::Shrink => "resized",
            JobKind::Import => "imported",
            JobKind::Release => "released: it is no longer served; its dirty data stays on the cache device",
            JobKind::Replace => "replaced: its old device is no longer used",
        };
        let size = exact(self.size_bytes.unwrap_or_default());
        let line = match (self.state, self.already) {
            (JobState::Done, true) => match verb {
                JobKind::Flush => format!("{volume}: it has no dirty data"),
                JobKind::Detach => format!("{volume}: it is detached already"),
                JobKind::Attach => format!("{volume}: it is attached already"),
                JobKind::Remove => format!("{volume}: it is removed already"),
                JobKind::Stop => format!("{volume}: it is stopped already"),
                JobKind::Add => format!("{volume}: it is there already"),
                JobKind::Forget => format!("{volume}: it is forgotten already"),
                JobKind::Grow | JobKind::Shrink => format!("{volume}: its size is {size} already"),
                JobKind::Import => format!("{volume}: it is served already"),
                JobKind::Release => format!("{volume}: it is released already"),
                JobKind::Replace => format!("{volume}: it is on that device already"),
            },
            (JobState::Done, false) if self.size_bytes.is_some() => {
                format!("{volume}: its size is {size}{}", self.loss("is lost"))
            }
            (JobState::Done, false) => format!("{volume}: {done}{}", self.loss("is lost")),
            (JobState::Planned, _) => self.planned_text(),
            (JobState::Cancelled, _) => format!("{volume}: {verb} was cancelled"),
            (JobState::Failed, _) => format!("{volume}: {verb} has failed"),
            (JobState::Running, _) => match self.id {
                Some(id) => format!("{} (job {id})", self.progress_text()),
                None => self.progress_text(),
            },
        };
        // The notes say how a change is persisted; they do not apply to one that was not made.
        let is_void = matches!(self.state, JobState::Failed | JobState::Cancelled)
            && matches!(self.verb, JobKind::Detach | JobKind::Attach | JobKind::Add);
        let notes = self.notes.iter().filter(|_| !is_void);
        let text = notes.fold(line + "\n", |text, note| text + &format!("{volume}: {note}\n"));
        self.devices.iter().fold(text, |text, device| text + device + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A failed job does not report how its result would be persisted.
    #[test]
    fn how_a_thing_is_kept_is_said_when_it_has_come_about() {
        let text = |state| {
            let job = JobReport::new(JobKind::Detach, "media".to_owned(), state);
            JobReport { notes: vec!["this is not kept".to_owned()], ..job }.text()
        };
        assert!(text(JobState::Done).contains("this is not kept"));
        assert_eq!(text(JobState::Failed), "media: detach has failed\n");
    }
}
