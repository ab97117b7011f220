//! Long work, both ways: the request to begin some, and what is said of it, `bcached.job` version 1. Within a version, fields are only
//! added; what is not known is absent.

use crate::failure::Failure;
use crate::sizes::{exact, human};
use serde::{Deserialize, Serialize};
use std::fmt::{self, Write as _};

/// Marks on a device that may be erased.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Overrides {
    /// Signatures that are not needed any more, by name.
    pub wipe_signature: Vec<String>,
    /// A bcache superblock is not needed any more, with nothing dirty behind it.
    pub wipe_bcache: bool,
}

/// What is done to a volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verb {
    /// What is dirty is written back.
    Flush,
    /// It leaves its cache.
    Detach,
    /// It comes to a cache.
    Attach,
    /// It is served no more.
    Remove,
    /// It is not served before the next start.
    Stop,
    /// It is served.
    Add,
    /// The cache gives up all that it holds of it.
    Forget,
    /// It becomes as large as its backing device is now.
    Grow,
    /// It becomes smaller.
    Shrink,
    /// A cache becomes another device.
    Replace,
    /// A cache and all that is on it are let go of.
    Release,
    /// A set that was the kernel's, or was released, is served.
    Import,
}

impl Verb {
    /// It can be given up while it goes on. The others end soon, or cannot be left half done.
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

impl fmt::Display for Verb {
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

/// A request for long work.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Begin {
    /// What.
    pub verb: Verb,
    /// Of which volume.
    pub volume: String,
    /// On which device, for [`Verb::Add`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backing: Option<String>,
    /// To which cache, for [`Verb::Attach`] and [`Verb::Add`]; in which, for [`Verb::Forget`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<String>,
    /// How large, for [`Verb::Shrink`], and for [`Verb::Add`] and [`Verb::Grow`] of a volume that lives in the cache alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// How much dirty data may be lost, for [`Verb::Forget`], and [`Verb::Shrink`] of a volume that lives in the cache alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accept_loss_bytes: Option<u64>,
    /// The file that is to say what was lost, for the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_ranges: Option<String>,
    /// By which device, for [`Verb::Replace`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub with: Option<String>,
    /// Its devices, the cache first, for [`Verb::Import`]; none: those of a cache that was released.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// What may be overwritten on that.
    #[serde(default)]
    pub overwrites: Overrides,
    /// Nothing is done: the answer says what would be.
    #[serde(default)]
    pub dry_run: bool,
}

impl Begin {
    /// A request that says no more than this.
    #[must_use]
    pub const fn new(verb: Verb, volume: String) -> Self {
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

/// Where work is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// It would be begun.
    Planned,
    /// It goes on.
    Running,
    /// It has come to its end, or there was nothing to do.
    Done,
    /// It has failed: the failure says why, and how things are.
    Failed,
    /// Somebody has given it up.
    Cancelled,
}

/// Long work.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// Its number, for `cancel`; absent if nothing was begun.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// What is done.
    pub verb: Verb,
    /// To which volume.
    pub volume: String,
    /// How far.
    pub state: State,
    /// It was so already: there was nothing to do.
    pub already: bool,
    /// Since it began, or from its beginning to its end.
    pub elapsed_seconds: u64,
    /// Dirty data that there was at the beginning.
    pub dirty_bytes_at_start: u64,
    /// How much that was nobody knows: the cache is not open, or its index is damaged or not read to its end. It was that much at the
    /// least.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dirty_unknown: bool,
    /// Dirty data that is left, if its engine answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_bytes: Option<u64>,
    /// How much of it has been written back, in percent. Clients who go on writing may keep it from growing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub percent: Option<u64>,
    /// How fast the dirty data becomes less.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// How long it takes at that speed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eta_seconds: Option<u64>,
    /// Dirty data that is lost with it, or would be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_bytes: Option<u64>,
    /// The file on the daemon's machine that says where that was, if there is any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost_ranges: Option<String>,
    /// How large the volume is after it, or would be, for [`Verb::Grow`] and [`Verb::Shrink`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// The devices that are let go of, for [`Verb::Release`], or taken, for [`Verb::Import`]: the cache first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// What keeps it from going on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocked_by: Option<String>,
    /// What else is to be known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Why it has failed: what stands in `error` of a refusal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<serde_json::Value>,
}

/// All long work that goes on, and the last that has ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Jobs {
    /// The oldest first.
    pub jobs: Vec<Job>,
}

impl Job {
    /// Work of which nothing is known yet.
    pub const fn new(verb: Verb, volume: String, state: State) -> Self {
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

    /// The same with so much dirty data left, after so long.
    pub fn with_progress(mut self, dirty: u64, milliseconds: u64) -> Self {
        let done = self.dirty_bytes_at_start.saturating_sub(dirty);
        self.dirty_bytes = Some(dirty);
        self.percent = (done * 100).checked_div(self.dirty_bytes_at_start);
        let rate = (done.saturating_mul(1000)).checked_div(milliseconds).filter(|rate| *rate > 0);
        self.bytes_per_second = rate;
        self.eta_seconds = rate.map(|rate| dirty.div_ceil(rate));
        self
    }

    /// Why it has failed.
    #[must_use]
    pub fn to_failure(&self) -> Option<Failure> {
        Failure::from_error(self.failure.as_ref()?)
    }

    /// How far it is, in a line for people.
    #[must_use]
    pub fn progress_text(&self) -> String {
        let mut text = format!("{}: {}", self.volume, self.verb);
        // Writing to a string cannot fail.
        let _ = match (self.dirty_bytes, self.percent) {
            (Some(dirty), Some(percent)) => {
                let done = if self.verb == Verb::Forget { "given up" } else { "written back" };
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

    /// What is lost, as the end of a sentence.
    fn loss(&self, lost: &str) -> String {
        match (self.lost_bytes, &self.lost_ranges) {
            (Some(bytes), Some(file)) => format!(": {} {lost}; {file} says which", human(bytes)),
            (Some(bytes), None) => format!(": {} {lost}", human(bytes)),
            (None, _) if self.verb == Verb::Forget => ": nothing of it is dirty".to_owned(),
            (None, _) => String::new(),
        }
    }

    /// What it would be.
    fn planned_text(&self) -> String {
        let Self { volume, verb, .. } = self;
        let size = exact(self.size_bytes.unwrap_or_default());

        let dirty = match (self.dirty_unknown, self.dirty_bytes_at_start) {
            (false, dirty) => human(dirty),
            (true, 0) => "an unknown amount".to_owned(),
            (true, least) => format!("at least {}", human(least)),
        };
        match verb {
            Verb::Flush => format!("{volume}: {dirty} would be written back"),
            Verb::Detach => {
                format!("{volume}: {dirty} would be written back, then it would be served without a cache")
            }
            Verb::Attach => format!("{volume}: would be attached"),
            Verb::Remove => {
                format!("{volume}: would be served no more, and {dirty} dirty would stay in its cache")
            }
            Verb::Stop => format!(
                "{volume}: would not be served until the next start, and {dirty} dirty would stay in its cache"
            ),
            Verb::Add => format!("{volume}: would be served"),
            Verb::Forget => format!("{volume}: would be forgotten{}", self.loss("would be lost")),
            Verb::Grow => format!("{volume}: would be {size} large"),
            Verb::Import => format!("{volume}: would be served"),
            Verb::Release if self.dirty_unknown => {
                format!(
                    "{volume}: would not be served any more, and what is dirty there, which is not known, would stay"
                )
            }
            Verb::Release => {
                format!("{volume}: would not be served any more, and {dirty} dirty would stay there")
            }
            Verb::Replace => format!(
                "{volume}: {dirty} would be written back, then its volumes would go to the new device"
            ),
            Verb::Shrink if self.dirty_bytes_at_start == 0 => {
                format!("{volume}: would be {size} large{}", self.loss("would be lost"))
            }
            Verb::Shrink => {
                format!(
                    "{volume}: {dirty} behind {size} would be written back, then it would be {size} large"
                )
            }
        }
    }

    /// Its end, or what it would be, in lines for people.
    #[must_use]
    pub fn text(&self) -> String {
        let Self { volume, verb, .. } = self;
        let done = match verb {
            Verb::Flush => "what was dirty is written back",
            Verb::Detach => "detached: it is served without a cache",
            Verb::Attach => "attached",
            Verb::Remove if self.dirty_unknown => {
                "removed: it is served no more; how much of it is dirty in a cache is not known"
            }
            Verb::Stop if self.dirty_unknown => {
                "stopped: it is not served until the next start, or `bcached add`; how much of it is dirty in a cache is not known"
            }
            Verb::Remove => "removed: it is served no more, and what is dirty of it stays in its cache",
            Verb::Stop => {
                "stopped: it is not served until the next start, or `bcached add`; what is dirty of it stays in its cache"
            }
            Verb::Add => "added",
            Verb::Forget => "forgotten",
            Verb::Grow | Verb::Shrink => "resized",
            Verb::Import => "imported",
            Verb::Release => "released: it is not served any more, and what is dirty of it stays there",
            Verb::Replace => "replaced: its former device is not used any more",
        };
        let size = exact(self.size_bytes.unwrap_or_default());
        let line = match (self.state, self.already) {
            (State::Done, true) => match verb {
                Verb::Flush => format!("{volume}: nothing is dirty"),
                Verb::Detach => format!("{volume}: it is detached already"),
                Verb::Attach => format!("{volume}: it is attached already"),
                Verb::Remove => format!("{volume}: it is removed already"),
                Verb::Stop => format!("{volume}: it is stopped already"),
                Verb::Add => format!("{volume}: it is there already"),
                Verb::Forget => format!("{volume}: it is forgotten already"),
                Verb::Grow | Verb::Shrink => format!("{volume}: it is {size} large already"),
                Verb::Import => format!("{volume}: it is served already"),
                Verb::Release => format!("{volume}: it is released already"),
                Verb::Replace => format!("{volume}: it is on that device already"),
            },
            (State::Done, false) if self.size_bytes.is_some() => {
                format!("{volume}: it is {size} large{}", self.loss("are lost"))
            }
            (State::Done, false) => format!("{volume}: {done}{}", self.loss("are lost")),
            (State::Planned, _) => self.planned_text(),
            (State::Cancelled, _) => format!("{volume}: {verb} was cancelled"),
            (State::Failed, _) => format!("{volume}: {verb} has failed"),
            (State::Running, _) => match self.id {
                Some(id) => format!("{} (job {id})", self.progress_text()),
                None => self.progress_text(),
            },
        };
        // How what has not come about would be kept is no news.
        let is_void = matches!(self.state, State::Failed | State::Cancelled)
            && matches!(self.verb, Verb::Detach | Verb::Attach | Verb::Add);
        let notes = self.notes.iter().filter(|_| !is_void);
        let text = notes.fold(line + "\n", |text, note| text + &format!("{volume}: {note}\n"));
        self.devices.iter().fold(text, |text, device| text + device + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A detach that had failed went on to say until when it would not be kept.
    #[test]
    fn how_a_thing_is_kept_is_said_when_it_has_come_about() {
        let text = |state| {
            let job = Job::new(Verb::Detach, "media".to_owned(), state);
            Job { notes: vec!["this is not kept".to_owned()], ..job }.text()
        };
        assert!(text(State::Done).contains("this is not kept"));
        assert_eq!(text(State::Failed), "media: detach has failed\n");
    }
}
