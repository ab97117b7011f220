//! Scripts: workloads as text files. Unlike a seed, a script stays valid when the drawing of
//! workloads changes, and can be edited by hand.
//!
//! A script contains everything that a run depends on besides the system: sizes, seed of the world,
//! steps, the crashes, and the steps after a crash (or after the last step if there is no crash).
//! It has one item per line, from top to bottom. Lines that begin with `#` and empty lines are
//! ignored:
//!
//! ```text
//! sim script 1
//! # why it is kept
//! workload points
//! seed 7
//! depth 6
//! troubled no
//! start new
//! block-sectors 1
//! set-block-sectors 8
//! bucket-sectors 16
//! buckets 812
//! volume-sectors 1024
//! torn-sectors 1
//! backing-volatile yes
//! cache-volatile no
//! note-records 256
//! cache-fua-flushes no
//! backing-fua-flushes no
//! discard yes
//! backing-discard no
//! first-mode 2
//! node-budget-mib 8
//! journal-delay-ms 100
//! leaf-delay-ms 500
//! parked-delay-ms 20
//! parked-max 1024
//! writeback-delay-ms 10
//! writeback-batch-sectors 512
//! writeback-running yes
//! writeback-percent 10
//! steps
//! write 0 8..16 fua
//! flush 0
//! after
//! read 0 0..8
//! cuts
//! 17:power:nothing
//! end
//! ```
//!
//! Scripts come from anywhere. Everything in a script is checked against [`limits`] before a device
//! is made from it, and whatever is written here can be read here.

pub mod limits;
mod parse;
mod sizes;
#[cfg(test)]
mod tests;

use crate::crashpoints::aftermath;
use crate::failure::CrashPoint;
use crate::growth::GrowthStage;
use crate::run::last_steps;
use crate::workload::{StepSource, Workload};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::Path;

pub use parse::{ScriptError, ScriptErrorKind};

/// The version of the format. A reader knows only this one.
pub const VERSION: u32 = 1;

/// A workload and the crashes that end it, independent of any drawing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Script {
    /// The workload; its origin is the script.
    pub workload: Workload,
    /// The crashes: none, one in the workload, one in the recovery from it, and so on.
    pub cuts: Vec<CrashPoint>,
}

/// The reason why a file gives no script. The message is a whole sentence, which a chain of causes
/// must not repeat.
#[derive(Debug, thiserror::Error)]
pub enum ScriptFileError {
    /// The file itself cannot be read or written.
    #[error("cannot {what} {file}: {why}")]
    File {
        /// What was attempted.
        what: &'static str,
        /// Name of the file.
        file: String,
        /// The cause.
        why: io::Error,
    },
    /// The contents are wrong, or would be.
    #[error("{file}: {why}")]
    Script {
        /// Name of the file.
        file: String,
        /// What is wrong.
        why: ScriptError,
    },
}

impl Script {
    /// Makes a script of `workload` as it is, ended by `cuts`.
    #[must_use]
    pub fn of(workload: &Workload, cuts: &[CrashPoint]) -> Self {
        let after = if cuts.is_empty() { last_steps(workload) } else { aftermath(workload, cuts) };
        let origin = StepSource::Script { file: String::new(), after };
        Self { workload: Workload { origin, kept: None, ..workload.clone() }, cuts: cuts.to_vec() }
    }

    /// Parses a script. `file` is its name in reports.
    ///
    /// # Errors
    /// The first thing that is wrong, and its line.
    pub fn parse(text: &str, file: &str) -> Result<Self, ScriptError> {
        parse::script(text, file)
    }

    /// Reads the script in `path`, at most [`limits::BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// If the file cannot be read, or what is wrong with its contents.
    pub fn load(path: &Path) -> Result<Self, ScriptFileError> {
        let file = path.display().to_string();
        let wrong = |why| ScriptFileError::File { what: "read", file: file.clone(), why };
        let mut bytes = Vec::new();
        // Reading a pipe could block forever.
        if !fs::metadata(path).map_err(wrong)?.is_file() {
            return Err(wrong(io::Error::other("it is not a regular file")));
        }
        let opened = File::open(path).map_err(wrong)?;
        opened.take(limits::BYTES_MAX + 1).read_to_end(&mut bytes).map_err(wrong)?;
        let text = parse::text_of(&bytes).and_then(|text| Self::parse(text, &file));
        text.map_err(|why| ScriptFileError::Script { file: file.clone(), why })
    }

    /// Writes the script to `path`, which must not exist yet.
    ///
    /// # Errors
    /// If the file cannot be created, or the script exceeds the limits for reading it again.
    pub fn save(&self, path: &Path) -> Result<(), ScriptFileError> {
        let (text, file) = (self.to_string(), path.display().to_string());
        let readable = parse::text_of(text.as_bytes()).and_then(|text| Self::parse(text, &file));
        readable.map_err(|why| ScriptFileError::Script { file: file.clone(), why })?;
        let wrong = |why| ScriptFileError::File { what: "write", file, why };
        let mut new = File::create_new(path).map_err(wrong.clone())?;
        new.write_all(text.as_bytes()).map_err(|why| {
            // Half a script is useless, and would block the next attempt.
            let _left_behind = fs::remove_file(path);
            wrong(why)
        })
    }
}

/// Returns the word after `start`, which names what the devices contain at first.
const fn start_word(grown: Option<GrowthStage>) -> &'static str {
    match grown {
        None => "new",
        Some(GrowthStage::ThirdLevel) => "third-level",
        Some(GrowthStage::InteriorSplit) => "interior-split",
        Some(GrowthStage::Copse) => "copse",
    }
}

/// Returns the word for a boolean.
const fn yes(it: bool) -> &'static str {
    if it { "yes" } else { "no" }
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Workload { name, seed, geometry, grown, depth, steps, troubled, origin, .. } = &self.workload;
        writeln!(f, "sim script {VERSION}")?;
        writeln!(f, "workload {name}\nseed {seed}\ndepth {depth}\ntroubled {}", yes(*troubled))?;
        writeln!(f, "start {}", start_word(*grown))?;
        sizes::write(f, geometry)?;
        writeln!(f, "steps")?;
        steps.iter().try_for_each(|step| writeln!(f, "{step}"))?;
        if let StepSource::Script { after, .. } = origin
            && !after.is_empty()
        {
            writeln!(f, "after")?;
            after.iter().try_for_each(|step| writeln!(f, "{step}"))?;
        }
        if !self.cuts.is_empty() {
            writeln!(f, "cuts")?;
            self.cuts.iter().try_for_each(|cut| writeln!(f, "{cut}"))?;
        }
        writeln!(f, "end")
    }
}
